package bandwidth

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// newRegionsOf returns regions that go with the test.
func newRegionsOf(t *testing.T, n int64) *regions {
	t.Helper()
	room, err := newRegions(t.Context(), 7, n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := room.close(); err != nil {
			t.Error(err)
		}
	})
	return room
}

// TestRawMemory: every byte of every thread goes there, and back.
func TestRawMemory(t *testing.T) {
	l := load{3 << 20, 2}
	room := newRegionsOf(t, l.total())
	raw := rawMemory(room, l)
	for i := range l.threads {
		here, there := room.pair(l, i)
		if int64(len(here)) != l.bytes || int64(len(there)) != l.bytes || bytes.Equal(here, there) {
			t.Fatalf("regions of %d and %d bytes", len(here), len(there))
		}
	}
	first := slices.Clone(room.whole[:l.total()])
	if err := raw.there(t.Context()); err != nil {
		t.Fatal(err)
	}
	clear(room.whole[:l.total()])
	if err := raw.back(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(room.whole[:l.total()], first) {
		t.Error("the bytes have changed on their way")
	}
}

// rawFileOf returns a file on a file system with faults.
func rawFileOf(t *testing.T, anonymous bool, l load, room *regions, rules ...faultfs.Rule) *rawFile {
	t.Helper()
	dir := t.TempDir()
	fs := faultfs.New(disk.OS(), 1, rules...)
	direct := true
	f, err := fs.OpenAnonymous(dir, true)
	if err != nil { // as the volume would find out
		direct = false
		f, err = fs.OpenAnonymous(dir, false)
	}
	switch {
	case err == nil:
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	case anonymous:
		t.Skipf("needs files without names: %v", err)
	}
	r := &rawFile{fs: fs, dir: dir, direct: direct, anonymous: anonymous, load: l, space: tier.ID{Kind: tier.Disk},
		memory: func(i int) []byte { here, _ := room.pair(l, i); return here }}
	t.Cleanup(func() {
		if err := r.close(); err != nil {
			t.Error(err)
		}
		if n := fs.Open(); n != 0 {
			t.Errorf("%d files are open", n)
		}
	})
	return r
}

// names lists a directory.
func names(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// TestRawFile: what is written is read again, whole, by however many threads and in pieces
// of any length; and at no moment is there a name in the directory.
func TestRawFile(t *testing.T) {
	for _, anonymous := range []bool{false, true} {
		for _, l := range []load{{64 << 10, 1}, {3<<20 + tier.Page, 2}, {12 << 20, 1}} {
			room := newRegionsOf(t, l.total())
			r := rawFileOf(t, anonymous, l, room)
			for range 2 { // a new file each time
				if err := r.renew(t.Context()); err != nil {
					t.Fatal(err)
				}
				if left := names(t, r.dir); len(left) != 0 {
					t.Errorf("there are %q", left)
				}
				want := slices.Clone(room.whole[:l.total()])
				if err := r.write(t.Context()); err != nil {
					t.Fatal(err)
				}
				clear(room.whole[:l.total()])
				if err := r.read(t.Context()); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(room.whole[:l.total()], want) {
					t.Errorf("%+v: other bytes come back", l)
				}
			}
		}
	}
}

// TestRawFileShort: transfers that the system does in part are completed.
func TestRawFileShort(t *testing.T) {
	l := load{2 << 20, 2}
	room := newRegionsOf(t, l.total())
	r := rawFileOf(t, true, l, room, faultfs.Rule{Ops: []string{"read", "write"}, Times: 5, Effect: faultfs.Short()})
	if err := r.renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := slices.Clone(room.whole[:l.total()])
	if err := r.write(t.Context()); err != nil {
		t.Fatal(err)
	}
	clear(room.whole[:l.total()])
	if err := r.read(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(room.whole[:l.total()], want) {
		t.Error("other bytes come back")
	}
}

// TestRawFileFails: no room is told as such, and other errors as what they are; nothing is
// left.
func TestRawFileFails(t *testing.T) {
	l := load{4 << 20, 1}
	room := newRegionsOf(t, l.total())
	for _, c := range []struct {
		op        string
		err       error
		full      bool
		anonymous bool
	}{
		{"allocate", syscall.ENOSPC, true, true},
		{"allocate", syscall.EDQUOT, true, true},
		{"allocate", syscall.EIO, false, true},
		{"create", syscall.EACCES, false, false},
		{"remove", syscall.EIO, false, false},
		{"write", syscall.EIO, false, true},
		{"read", syscall.EIO, false, true},
	} {
		r := rawFileOf(t, c.anonymous, l, room, faultfs.Rule{Ops: []string{c.op}, Times: 1, Effect: faultfs.Fail(c.err)})
		err := r.renew(t.Context())
		if err == nil {
			if err = r.write(t.Context()); err == nil {
				err = r.read(t.Context())
			}
		}
		if !errors.Is(err, c.err) || errors.Is(err, tier.ErrNoSpace) != c.full {
			t.Errorf("%s, %v: it ends with %v", c.op, c.err, err)
		}
		if left := names(t, r.dir); len(left) > 0 && c.op != "remove" { // then the name is what could not be removed
			t.Errorf("%s: there are %q", c.op, left)
		}
	}
}

// TestRawFileSparse: where no room can be set aside files do without.
func TestRawFileSparse(t *testing.T) {
	l := load{64 << 10, 1}
	r := rawFileOf(t, true, l, newRegionsOf(t, l.total()), faultfs.Rule{Ops: []string{"allocate"}, Effect: faultfs.Fail(errors.ErrUnsupported)})
	if err := errors.Join(r.renew(t.Context()), r.write(t.Context()), r.read(t.Context())); err != nil {
		t.Error(err)
	}
}

// TestWhole: what was done in part goes on at the page where it ended.
func TestWhole(t *testing.T) {
	var at []int64
	err := whole(make([]byte, 3*tier.Page), tier.Page, func(p []byte, off int64) (int, error) {
		at = append(at, off)
		return min(len(p), tier.Page+tier.Page/2), nil
	})
	if want := []int64{tier.Page, 2 * tier.Page, 3 * tier.Page}; err != nil || !slices.Equal(at, want) {
		t.Errorf("requests at %d, %v; want %d", at, err, want)
	}
}

// TestRequestsCancelled: no request begins after the context has ended.
func TestRequestsCancelled(t *testing.T) {
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	var begun atomic.Int64
	err := requests(ctx, make([]byte, 16*rawDepth*rawRequest), 0, func(p []byte, _ int64) (int, error) {
		begun.Add(1)
		cancel(cause) // so whoever began one begins no other
		return len(p), nil
	})
	if !errors.Is(err, cause) || begun.Load() > rawDepth {
		t.Errorf("%d requests were begun, %v", begun.Load(), err)
	}
}

// TestFreshRoom: what renew leaves is room that was taken from the file system and not
// written; what is written there takes no other; and a volume that has none does.
func TestFreshRoom(t *testing.T) {
	eng := engine(t)
	space := eng.Spaces()[2]
	v := space.Pool().(*volumes.Volume)
	b := bench{cfg: small(eng), load: load{256 << 10, 2}}
	for range 2 {
		before := v.Stats()
		if at, err := b.renew(t.Context(), space, v); err != nil || at != 0 {
			t.Fatal(at, err)
		}
		st := v.Stats()
		if st.Fresh-before.Fresh < b.load.total() || st.Backed < b.load.total() || st.Used != 0 || st.Written != before.Written || st.Given-before.Given < before.Backed {
			t.Errorf("before %+v\nafter %+v", before, st)
		}
	}
	write := func(ctx context.Context) error {
		m, err := v.Alloc(b.load.bytes, nil)
		if err != nil {
			return err
		}
		defer v.Free(m, func() {})
		return m.(tier.FileMemory).WriteAt(ctx, make([]byte, b.load.bytes), 0)
	}
	seen, steady := watching(write, v)
	if err := seen(t.Context()); err != nil || !steady() {
		t.Errorf("%v; room that was set aside was not used", err)
	}
	if _, err := v.Trim(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := seen(t.Context()); err != nil || steady() || !steady() {
		t.Errorf("%v; room was taken, and nobody noticed, or for ever", err)
	}
}

// TestKeptRoom: a volume that cannot give its room back is an error, for what it hands out next
// would not be fresh.
func TestKeptRoom(t *testing.T) {
	eng := engineOn(t, faultfs.New(disk.OS(), 1, faultfs.Rule{Ops: []string{"punch"}, Effect: faultfs.Fail(errors.ErrUnsupported)}), convert.CodecNone)
	v := eng.Spaces()[2].Pool().(*volumes.Volume)
	var room [2]tier.Memory // of one piece of the file
	for i := range room {
		var err error
		if room[i], err = v.Alloc(64<<10, nil); err != nil {
			t.Fatal(err)
		}
	}
	v.Free(room[0], func() {})
	if err := trim(t.Context(), v); err == nil || !strings.Contains(err.Error(), " keeps ") {
		t.Errorf("with a half in use: %v", err)
	}
	v.Free(room[1], func() {})
	if err := trim(t.Context(), v); err != nil {
		t.Error(err)
	}
}

// TestRequestsAreMany: as many are under way as the limit says.
func TestRequestsAreMany(t *testing.T) {
	all := make(chan struct{}, rawDepth)
	begun := make(chan struct{}, rawDepth)
	go func() {
		for range rawDepth {
			<-begun
		}
		for range rawDepth {
			all <- struct{}{}
		}
	}()
	var lengths [rawDepth]int
	err := requests(t.Context(), make([]byte, rawDepth*rawRequest), 0, func(p []byte, off int64) (int, error) {
		lengths[off/rawRequest] = len(p)
		begun <- struct{}{}
		<-all // until all are under way
		return len(p), nil
	})
	if err != nil || slices.Min(lengths[:]) != rawRequest {
		t.Errorf("%v, %v", err, lengths)
	}
	if err := requests(t.Context(), make([]byte, tier.Page), 0, func([]byte, int64) (int, error) { return 0, nil }); !errors.Is(err, io.ErrNoProgress) {
		t.Errorf("no progress ends with %v", err)
	}
}

// TestRequestsEnd: when one has failed, no other is begun.
func TestRequestsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		broken := errors.New("broken")
		var begun atomic.Int64
		err := requests(t.Context(), make([]byte, 16*rawDepth*rawRequest), 0, func(p []byte, off int64) (int, error) {
			begun.Add(1)
			if off == 0 {
				time.Sleep(time.Second) // until all others have begun
				return 0, broken
			}
			time.Sleep(2 * time.Second) // until that one has failed
			return len(p), nil
		})
		if !errors.Is(err, broken) || begun.Load() != rawDepth {
			t.Errorf("%d requests were begun, %v", begun.Load(), err)
		}
	})
}
