package volumes_test

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// heard is what a volume told.
type heard struct {
	mu  sync.Mutex
	all []events.Event
}

func (h *heard) add(e events.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = append(h.all, e)
}

// take returns what was told since the last call.
func (h *heard) take() []events.Event {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := h.all
	h.all = nil
	return all
}

func kindsOf(all []events.Event) (kinds []events.Kind) {
	for _, e := range all {
		kinds = append(kinds, e.Kind)
	}
	return kinds
}

// A request that takes longer than a second is told while it is under way, and when it is over.
func TestSlowRequestIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		files, h := faultfs.New(disk.OS(), 1), new(heard)
		v := open(t, volumes.Config{Dir: testfs.MemoryDir(t), Capacity: 16 * mib, FS: files, Events: h.add})
		m, err := v.Alloc(mib, nil)
		if err != nil {
			t.Fatal(err)
		}
		at := m.(tier.FileMemory)
		p := make([]byte, 64<<10)
		if err := at.WriteAt(t.Context(), p, 0); err != nil || len(h.take()) > 0 {
			t.Fatal("a quick request was told", err)
		}
		remove := files.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Slow(3 * time.Second)})
		done := make(chan error, 1)
		go func() { done <- at.WriteAt(t.Context(), p, 0) }()
		time.Sleep(2 * time.Second)
		synctest.Wait()
		all := h.take()
		if len(all) != 1 || all[0].Kind != events.DiskSlow || all[0].Took != time.Second || all[0].Bytes != int64(len(p)) || !strings.Contains(all[0].Text, "is not over yet") {
			t.Errorf("while it is under way: %v", all)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		if all = h.take(); len(all) != 1 || all[0].Took != 3*time.Second || !strings.HasSuffix(all[0].Text, "is over") {
			t.Errorf("when it is over: %v", all)
		}
		remove()
		v.Free(m, func() {})
	})
}

// telling opens a volume whose files may be made to fail and whose events are heard, and takes memory of it.
func telling(t *testing.T) (*volumes.Volume, tier.FileMemory, *faultfs.FS, *heard) {
	t.Helper()
	files, h := faultfs.New(disk.OS(), 1), new(heard)
	v := open(t, volumes.Config{Dir: testfs.MemoryDir(t), Capacity: 16 * mib, FS: files, Events: h.add})
	m, err := v.Alloc(mib, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { v.Free(m, func() {}) })
	return v, m.(tier.FileMemory), files, h
}

// That requests fail is told once, for reads and for writes, and that they succeed again, too.
func TestFailingDiskIsTold(t *testing.T) {
	_, at, files, h := telling(t)
	p := make([]byte, 8<<10)
	do := func(op string) {
		if op == "read" {
			_ = at.ReadAt(t.Context(), p, 0)
		} else {
			_ = at.WriteAt(t.Context(), p, 0)
		}
	}
	do("write")
	for _, op := range []string{"read", "write"} {
		other := map[string]string{"read": "write", "write": "read"}[op]
		remove := files.Add(faultfs.Rule{Ops: []string{op}, Effect: faultfs.Fail(syscall.EIO)})
		do(op)
		do(other) // says nothing of what fails
		do(op)
		if all := h.take(); !slices.Equal(kindsOf(all), []events.Kind{events.DiskFailing}) || all[0].Err == nil {
			t.Errorf("%s fails: %v", op, all)
		}
		remove()
		do(op)
		do(op)
		if all := h.take(); !slices.Equal(kindsOf(all), []events.Kind{events.DiskWell}) {
			t.Errorf("%s succeeds: %v", op, all)
		}
	}
}

// A write that finds no room says nothing against the disk. It is told as a full one, once, whatever
// the file system says of itself, until a write succeeds: a quota is in no statfs.
func TestNoRoomIsTold(t *testing.T) {
	for _, refusal := range []error{syscall.ENOSPC, syscall.EDQUOT} {
		v, at, files, h := telling(t)
		p := make([]byte, 8<<10)
		remove := files.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Fail(refusal)})
		for range 3 {
			if err := at.WriteAt(t.Context(), p, 0); !errors.Is(err, tier.ErrNoSpace) {
				t.Fatal(err)
			}
			v.LookAtRoom()
		}
		if all := h.take(); !slices.Equal(kindsOf(all), []events.Kind{events.DiskNearlyFull}) || !errors.Is(all[0].Err, refusal) {
			t.Errorf("%v: told as %v", refusal, all)
		}
		remove()
		_ = at.ReadAt(t.Context(), p, 0) // says nothing of writes
		if v.LookAtRoom(); len(h.take()) > 0 {
			t.Errorf("%v: well before a write has succeeded", refusal)
		}
		for range 2 {
			if err := at.WriteAt(t.Context(), p, 0); err != nil {
				t.Fatal(err)
			}
		}
		if all := h.take(); !slices.Equal(kindsOf(all), []events.Kind{events.DiskWell}) {
			t.Errorf("%v: with room it is told as %v", refusal, all)
		}
	}
}

// That no room can be taken is told once, as a full disk or as one that fails, until some is taken:
// a write of room that was taken before does not end it.
func TestRoomThatIsRefusedIsTold(t *testing.T) {
	for refusal, want := range map[error]events.Kind{
		syscall.ENOSPC: events.DiskNearlyFull, syscall.EDQUOT: events.DiskNearlyFull, syscall.EIO: events.DiskFailing,
	} {
		files, h := faultfs.New(disk.OS(), 1), new(heard)
		v := open(t, volumes.Config{Dir: testfs.MemoryDir(t), Capacity: 128 * mib, FS: files, Events: h.add})
		first, err := v.Alloc(64*mib, nil)
		if err != nil {
			t.Fatal(err)
		}
		remove := files.Add(faultfs.Rule{Ops: []string{"allocate"}, Effect: faultfs.Fail(refusal)})
		for range 3 {
			if _, err := v.Alloc(16*mib, nil); !errors.Is(err, refusal) {
				t.Fatal(err)
			}
			if err := first.(tier.FileMemory).WriteAt(t.Context(), make([]byte, 8<<10), 0); err != nil {
				t.Fatal(err)
			}
			v.LookAtRoom()
		}
		if all := h.take(); !slices.Equal(kindsOf(all), []events.Kind{want}) || !errors.Is(all[0].Err, refusal) {
			t.Errorf("%v: told as %v", refusal, all)
		}
		remove()
		for range 4 {
			m, err := v.Alloc(16*mib, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer v.Free(m, func() {})
		}
		if all := h.take(); !slices.Equal(kindsOf(all), []events.Kind{events.DiskWell}) {
			t.Errorf("%v: with room it is told as %v", refusal, all)
		}
		if _, err := v.Alloc(16*mib, nil); !errors.Is(err, tier.ErrNoSpace) || len(h.take()) > 0 {
			t.Errorf("a volume that is used up is told as a full disk: %v", err)
		}
		v.Free(first, func() {})
	}
}

// A disk is well when neither its file system nor a write says that it is full.
func TestFullTwiceIsToldOnce(t *testing.T) {
	h, room := new(heard), &freeRoom{FS: disk.OS(), free: 1 << 40}
	files := faultfs.New(room, 1)
	v := open(t, volumes.Config{Dir: testfs.MemoryDir(t), Capacity: 256 * mib, FS: files, Events: h.add})
	m, err := v.Alloc(mib, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer v.Free(m, func() {})
	write := func(refuse bool) {
		if refuse {
			defer files.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Fail(syscall.ENOSPC)})()
		}
		if err := m.(tier.FileMemory).WriteAt(t.Context(), make([]byte, 8<<10), 0); (err != nil) != refuse {
			t.Fatal(err)
		}
	}
	look := func(free int64) { room.free = free; v.LookAtRoom() }
	for i, step := range []struct {
		do   func()
		want []events.Kind
	}{
		{func() { write(true) }, []events.Kind{events.DiskNearlyFull}},
		{func() { look(0) }, nil},
		{func() { write(false) }, nil}, // the file system still says so
		{func() { look(1 << 40) }, []events.Kind{events.DiskWell}},
		{func() { look(0) }, []events.Kind{events.DiskNearlyFull}},
		{func() { write(true) }, nil},
		{func() { look(1 << 40) }, nil}, // the write still says so
		{func() { write(false) }, []events.Kind{events.DiskWell}},
	} {
		step.do()
		if all := h.take(); !slices.Equal(kindsOf(all), step.want) {
			t.Errorf("step %d is told as %v", i, all)
		}
	}
}

// freeRoom is a file system with so many free bytes.
type freeRoom struct {
	disk.FS
	free int64
}

func (r *freeRoom) Usage(dir string) (disk.Usage, error) {
	u, err := r.FS.Usage(dir)
	u.Free = r.free
	return u, err
}

// A file system that has less room than the volume may still take is told once, until it has enough.
func TestNearlyFullIsTold(t *testing.T) {
	h, fs := new(heard), &freeRoom{FS: disk.OS(), free: 1 << 40}
	v := open(t, volumes.Config{Dir: testfs.MemoryDir(t), Capacity: 100 * mib, Reserve: mib, FS: fs, Events: h.add})
	for _, step := range []struct {
		free int64 // beside the reserve
		want events.Kind
	}{
		{200 * mib, 0}, {50 * mib, 0}, {9 * mib, events.DiskNearlyFull}, {8 * mib, 0}, {12 * mib, 0}, {16 * mib, events.DiskWell},
		{-mib, events.DiskNearlyFull}, {200 * mib, events.DiskWell},
	} {
		fs.free = step.free + mib
		v.LookAtRoom()
		var want []events.Kind
		if step.want != 0 {
			want = []events.Kind{step.want}
		}
		all := h.take()
		if !slices.Equal(kindsOf(all), want) || len(all) > 0 && all[0].Bytes != max(0, step.free) {
			t.Errorf("with %d bytes free: %v", step.free, all)
		}
	}
}

// Room that the volume leaves to the file system, or that is missing there, can be taken again when the
// file system has it: a volume that works on in its room takes none, and is told as well all the same.
func TestRoomIsBackWithoutTakingSome(t *testing.T) {
	refusing := func(err error) *faultfs.Rule {
		return &faultfs.Rule{Ops: []string{"allocate"}, Effect: faultfs.Fail(err)}
	}
	for _, c := range []struct {
		name    string
		reserve int64
		refuse  *faultfs.Rule
		ends    bool
	}{
		{"the reserve", 1 << 30, nil, true},
		{"free space", 0, nil, true},
		{"the file system", 0, refusing(syscall.ENOSPC), true},
		{"a quota", 0, refusing(syscall.EDQUOT), false},
	} {
		h, room := new(heard), &freeRoom{FS: disk.OS(), free: 1 << 40}
		files := faultfs.New(room, 1)
		v := open(t, volumes.Config{
			Dir: testfs.MemoryDir(t), Capacity: 256 * mib, Reserve: c.reserve, FS: files, Events: h.add,
		})
		m, err := v.Alloc(64*mib, nil)
		if err != nil {
			t.Fatal(err)
		}
		again := func() {
			v.LookAtRoom()
			v.Free(m, func() {})
			if m, err = v.Alloc(64*mib, nil); err != nil {
				t.Fatal(err)
			}
		}
		refused := func() {
			t.Helper()
			if c.refuse != nil {
				defer files.Add(*c.refuse)()
			}
			if _, err := v.Alloc(64*mib, nil); !errors.Is(err, tier.ErrNoSpace) {
				t.Fatal(c.name, err)
			}
		}
		if c.refuse == nil {
			room.free = c.reserve + 48*mib // not nearly full, and too little
		}
		for range 3 {
			refused()
			again()
		}
		room.free = c.reserve
		again()
		if all := h.take(); !slices.Equal(kindsOf(all), []events.Kind{events.DiskNearlyFull}) {
			t.Errorf("%s: refused, it is told as %v", c.name, all)
		}
		room.free = 1 << 40
		again()
		again()
		all := h.take()
		if c.ends != slices.Equal(kindsOf(all), []events.Kind{events.DiskWell}) || !c.ends && len(all) > 0 {
			t.Errorf("%s: with room it is told as %v", c.name, all)
		}
		if room.free = 0; c.ends {
			again()
			if all := h.take(); !slices.Equal(kindsOf(all), []events.Kind{events.DiskNearlyFull}) {
				t.Errorf("%s: full again, it is told as %v", c.name, all)
			}
		}
		v.Free(m, func() {})
	}
}
