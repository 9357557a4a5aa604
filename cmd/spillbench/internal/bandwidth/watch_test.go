package bandwidth

import (
	"bytes"
	"context"
	"errors"
	"path/filepath"
	"testing"

	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// benchOn is a measurement of two batches, whose spaces are the GPU's, the host's and the disk's.
func benchOn(t *testing.T, w *Watch, codec convert.Codec) (b *bench, k link, v *volumes.Volume) {
	t.Helper()
	eng := engineOn(t, w, codec)
	b = &bench{cfg: small(eng), load: load{64 << 10, 2}, room: newRegionsOf(t, 256<<10)}
	rec, err := record(t.Context(), 1, b.load.bytes)
	if err != nil {
		t.Fatal(err)
	}
	defer rec.Release()
	plan, err := eng.Plan("test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := plan.Close(); err != nil {
			t.Error(err)
		}
	})
	repo, err := plan.Repository("test", 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.put(t.Context(), repo, rec); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.drop(t.Context()); err != nil {
			t.Error(err)
		}
	})
	spaces := eng.Spaces()
	return b, link{spaces[1], spaces[2], true}, spaces[2].Pool().(*volumes.Volume)
}

// TestPlace: where the batches were is where the limit reads and writes, also room that
// is fresh.
func TestPlace(t *testing.T) {
	w := NewWatch()
	b, k, v := benchOn(t, w, convert.CodecNone)
	at, err := b.settled(t.Context(), k, v, w)
	if err != nil || at == nil {
		t.Fatal(at, err)
	}
	if err := b.moveAll(t.Context(), k.to); err != nil {
		t.Fatal(err)
	}
	memory := func(i int) []byte { here, _ := b.room.pair(b.load, i); return here }
	if err := at.read(t.Context(), b.load, memory); err != nil {
		t.Fatal(err)
	}
	for i, x := range b.batches {
		tr, err := x.TryTransit()
		if err != nil {
			t.Fatal(err)
		}
		want := make([]byte, b.load.bytes)
		if err := bodyOf(tr).ReadAt(t.Context(), want, 0); err != nil {
			t.Fatal(err)
		}
		if err := tr.Abort(); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(memory(i), want) {
			t.Errorf("batch %d lies elsewhere", i)
		}
	}
	if err := b.bring(t.Context(), k.from); err != nil {
		t.Fatal(err)
	}
	first, err := b.renew(t.Context(), k.to, v)
	if err != nil {
		t.Fatal(err)
	}
	if at = b.laid(w, first, k.to.Charge(b.load.bytes)); at == nil {
		t.Fatal("fresh room has no place")
	}
	for i := range b.batches {
		copy(memory(i), bytes.Repeat([]byte{byte(i + 1)}, int(b.load.bytes)))
	}
	if err := at.write(t.Context(), b.load, memory); err != nil {
		t.Fatal(err)
	}
	m, err := v.Alloc(b.load.total(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer v.Free(m, func() {})
	got := make([]byte, b.load.total())
	if err := m.(tier.FileMemory).ReadAt(t.Context(), got, 0); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got[:b.load.bytes], memory(0)) || !bytes.Equal(got[b.load.bytes:], memory(1)) {
		t.Error("what was written is not in the volume's room")
	}
}

// TestHold: what raw holds is the room of the place, as it was written, or there is an error.
func TestHold(t *testing.T) {
	w := NewWatch()
	b, k, v := benchOn(t, w, convert.CodecNone)
	at, err := b.settled(t.Context(), k, v, w)
	if err != nil || at == nil {
		t.Fatal(at, err)
	}
	hold := func(at *place) error {
		held, err := b.hold(t.Context(), k.to, v, at)
		return errors.Join(err, held.Release())
	}
	if err := hold(at); err != nil {
		t.Errorf("the room of the place: %v", err)
	}
	beyond := &place{file: at.file, at: []int64{at.at[0], at.at[1] + b.load.total()}}
	if err := hold(beyond); !errors.Is(err, errPlace) {
		t.Errorf("room elsewhere: %v", err)
	}
	if err := trim(t.Context(), v); err != nil {
		t.Fatal(err)
	}
	if err := hold(at); !errors.Is(err, errPlace) {
		t.Errorf("the same room, taken anew: %v", err)
	}
}

// TestFreshForAll: where fresh room is measured each side has taken it anew.
func TestFreshForAll(t *testing.T) {
	w := NewWatch()
	b, k, v := benchOn(t, w, convert.CodecNone)
	b.cfg.Watched = map[tier.ID]*Watch{k.to.ID(): w}
	if err := b.bring(t.Context(), k.from); err != nil {
		t.Fatal(err)
	}
	before := v.Stats().Fresh
	if _, err := b.renew(t.Context(), k.to, v); err != nil {
		t.Fatal(err)
	}
	begun := v.Stats().Fresh
	once, steps, taken := begun-before, 0, int64(0)
	b.cfg.Progress = stepping{f: func() {
		if steps++; steps == b.cfg.Pairs {
			taken = v.Stats().Fresh - begun
		}
	}}
	if _, err := b.withDisk(t.Context(), k, v); err != nil {
		t.Fatal(err)
	}
	// By all three in each round, of which one warms up; before that it was seen where batches lie.
	if want := int64(1 + 3*(1+b.cfg.Pairs)); taken != want*once {
		t.Errorf("room was taken anew %d times, want %d", taken/once, want)
	}
}

// TestWithin: a place is in a piece of the file if all of each batch is.
func TestWithin(t *testing.T) {
	for _, c := range []struct {
		first, n, bytes int64
		want            bool
	}{
		{100, 40, 10, true}, // just
		{100, 39, 10, false},
		{101, 40, 10, false},
		{100, 40, 11, false},
		{0, 1000, 10, true},
		{-1, 1000, 10, false}, // it is in pieces
	} {
		p := &place{at: []int64{130, 100}}
		if got := p.within(c.first, c.n, c.bytes); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}

// TestNoPlace: batches that are compressed, and volumes with more files than one, have none; then
// the limit has files of its own.
func TestNoPlace(t *testing.T) {
	w := NewWatch()
	b, k, v := benchOn(t, w, convert.CodecBitpack)
	if at, err := b.settled(t.Context(), k, v, w); at != nil || err != nil {
		t.Errorf("compressed: %v, %v", at, err)
	}
	if w.only() == nil {
		t.Error("there is no file")
	}
	if b.laid(w, -1, b.load.bytes) != nil {
		t.Error("room in pieces is a place")
	}
	if _, err := w.OpenAnonymous(filepath.Join(t.TempDir(), "none"), false); err == nil || w.only() == nil {
		t.Errorf("%v; a file that could not be opened is there", err)
	}
	f, err := w.OpenAnonymous(t.TempDir(), false)
	if err != nil {
		t.Fatal(err)
	}
	if w.only() != nil {
		t.Error("there is only one of two files")
	}
	if err := f.Close(); err != nil || w.only() == nil {
		t.Errorf("%v; a file that was closed is there", err)
	}
}

// stepping calls f at each step.
type stepping struct {
	silent
	f func()
}

func (s stepping) Step() { s.f() }

// TestPlaceIsLost: where the batches have no place any more, when some of the rounds are over, the
// limit has files of its own, and is measured all the same.
func TestPlaceIsLost(t *testing.T) {
	for _, after := range []int{1, 5} { // while room is made anew for all, and while it is not
		w := NewWatch()
		b, k, v := benchOn(t, w, convert.CodecNone)
		b.cfg.Watched = map[tier.ID]*Watch{k.to.ID(): w}
		b.cfg.Pairs = 3
		if err := b.bring(t.Context(), k.from); err != nil {
			t.Fatal(err)
		}
		steps := 0
		b.cfg.Progress = stepping{f: func() {
			if steps++; steps != after {
				return
			}
			f, err := w.OpenAnonymous(t.TempDir(), false)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := f.Close(); err != nil {
					t.Error(err)
				}
			})
		}}
		rows, err := b.withDisk(t.Context(), k, v)
		if err != nil || len(rows) != 3 {
			t.Fatalf("after %d steps: %d rows, %v", after, len(rows), err)
		}
		for _, r := range rows {
			if r.Limit <= 0 || r.GiBPerS <= 0 {
				t.Errorf("after %d steps: %+v", after, r)
			}
		}
		if want := after + b.cfg.Pairs; steps != want {
			t.Errorf("%d rounds, want %d", steps, want)
		}
	}
}

// trimming is a file system on which a volume gives back all room that is idle whenever something
// is read or written, but while some batches have left it and others have not.
type trimming struct {
	disk.FS
	v    *volumes.Volume // nil: not yet
	load int64
}

type trimmed struct {
	disk.File
	fs *trimming
}

func (f *trimming) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	file, err := f.FS.OpenAnonymous(dir, direct)
	return trimmed{file, f}, err
}

func (f *trimming) Create(path string, direct bool) (disk.File, error) {
	file, err := f.FS.Create(path, direct)
	return trimmed{file, f}, err
}

func (f trimmed) WriteAt(p []byte, off int64) (int, error) {
	return f.trim(func() (int, error) { return f.File.WriteAt(p, off) })
}

func (f trimmed) ReadAt(p []byte, off int64) (int, error) {
	return f.trim(func() (int, error) { return f.File.ReadAt(p, off) })
}

func (f trimmed) trim(do func() (int, error)) (int, error) {
	if v := f.fs.v; v != nil && v.Stats().Used%f.fs.load == 0 {
		if _, err := v.Trim(context.Background()); err != nil {
			return 0, err
		}
	}
	return do()
}

// TestRoomIsHeld: the volume gives back what lies idle, but not where the limit is measured.
func TestRoomIsHeld(t *testing.T) {
	w := NewWatch()
	idle := &trimming{FS: w.FS}
	w.FS = idle
	b, k, v := benchOn(t, w, convert.CodecNone)
	b.cfg.Watched = map[tier.ID]*Watch{k.to.ID(): w}
	b.cfg.Pairs = 3
	steps := 0
	b.cfg.Progress = stepping{f: func() { steps++ }}
	if err := b.bring(t.Context(), k.from); err != nil {
		t.Fatal(err)
	}
	idle.v, idle.load = v, b.load.total()
	rows, err := b.withDisk(t.Context(), k, v)
	if err != nil || len(rows) != 3 {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	if steps != 2*b.cfg.Pairs {
		t.Errorf("%d rounds, want %d: the limit was measured elsewhere", steps, 2*b.cfg.Pairs)
	}
}
