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
	"github.com/spillway-db/spillway/internal/memdir"
	"github.com/spillway-db/spillway/internal/volumes"
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
		v := open(t, volumes.Config{Dir: memdir.New(t), Capacity: 16 * mib, FS: files, Events: h.add})
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
	v := open(t, volumes.Config{Dir: memdir.New(t), Capacity: 16 * mib, FS: files, Events: h.add})
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

// A write that finds no room says nothing against the disk. It is told as a full one, once.
func TestNoRoomIsTold(t *testing.T) {
	v, at, files, h := telling(t)
	p := make([]byte, 8<<10)
	remove := files.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Fail(syscall.ENOSPC)})
	for range 2 {
		if err := at.WriteAt(t.Context(), p, 0); !errors.Is(err, tier.ErrNoSpace) {
			t.Fatal(err)
		}
	}
	if all := h.take(); !slices.Equal(kindsOf(all), []events.Kind{events.DiskNearlyFull}) || !errors.Is(all[0].Err, tier.ErrNoSpace) {
		t.Errorf("a full disk is told as %v", all)
	}
	remove()
	v.LookAtRoom()
	if all := h.take(); !slices.Equal(kindsOf(all), []events.Kind{events.DiskWell}) {
		t.Errorf("with room it is told as %v", all)
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
	v := open(t, volumes.Config{Dir: memdir.New(t), Capacity: 100 * mib, Reserve: mib, FS: fs, Events: h.add})
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
