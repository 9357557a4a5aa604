package seal_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/volumes/internal/seal"
	"github.com/spillway-db/spillway/tier"
)

// file is a file in memory, which can fail to be written.
type file struct {
	p    []byte
	fail error
}

func (f *file) ReadAt(p []byte, off int64) (int, error) {
	if off+int64(len(p)) > int64(len(f.p)) {
		return 0, io.ErrUnexpectedEOF
	}
	return copy(p, f.p[off:]), nil
}

func (f *file) WriteAt(p []byte, off int64) (int, error) {
	if f.fail != nil {
		return 0, f.fail
	}
	return copy(f.p[off:], p), nil
}

// memory is a sealed memory of two stretches, whose places in the file are the other way round.
type memory struct {
	t         *testing.T
	sealer    *seal.Sealer
	units     *seal.Units
	stretches []seal.Stretch
	at        []int64
	file      *file
	buffers   *seal.Buffers
}

const pad = tier.Page - 5 // behind the end

func newMemory(t *testing.T, users []byte) *memory {
	s, err := seal.NewSealer(users)
	if err != nil {
		t.Fatal(err)
	}
	const first, second = 2*seal.Unit + tier.Page, 3*seal.Unit + 5
	m := &memory{
		t: t, sealer: s, stretches: []seal.Stretch{{Off: 0, Len: first}, {Off: first, Len: second}}, at: []int64{second + pad, 0},
		file: &file{p: make([]byte, first+second+pad)},
		buffers: &seal.Buffers{Request: 8 * seal.Unit, Slab: 1, Slabs: 1, Heap: &sync.Pool{New: func() any {
			b := make([]byte, 8*seal.Unit+2*tier.Page)
			return &b
		}}},
	}
	m.units = s.NewUnits(m.stretches)
	t.Cleanup(func() {
		s.Forget()
		if err := m.buffers.Unmap(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// do reads or writes bytes of one stretch.
func (m *memory) do(u *seal.Units, stretch int, off int64, p []byte, write bool) error {
	h, err := u.Hold(m.t.Context(), stretch, off, int64(len(p)), write)
	if err != nil {
		return err
	}
	defer h.Release()
	r := seal.Request{Stretch: stretch, Off: off, P: p, File: m.file, At: m.at[stretch] + off - m.stretches[stretch].Off}
	if write {
		return h.Write(r, m.buffers)
	}
	return h.Read(r, m.buffers)
}

// TestRandomRequests: what is read is what was written last, or zeros, and no byte of it is in the
// file. A later sealer with the same key of the user's reads it, too.
func TestRandomRequests(t *testing.T) {
	users := bytes.Repeat([]byte{7}, 32)
	m := newMemory(t, users)
	rng := rand.New(rand.NewPCG(testseed.One(t), 1))
	size := m.stretches[1].Off + m.stretches[1].Len
	model := make([]byte, size)
	pick := func() (stretch int, off, n int64) {
		stretch = rng.IntN(2)
		s := m.stretches[stretch]
		off = rng.Int64N(s.Len)
		return stretch, s.Off + off, 1 + rng.Int64N(s.Len-off)
	}
	same := func(u *seal.Units) {
		t.Helper()
		stretch, off, n := pick()
		p := make([]byte, n)
		if err := m.do(u, stretch, off, p, false); err != nil || !bytes.Equal(p, model[off:off+n]) {
			t.Fatalf("%d bytes at %d are other ones: %v", n, off, err)
		}
	}
	for range testseed.Rounds(200, 40) {
		same(m.units)
		stretch, off, n := pick()
		testseed.Fill(model[off:off+n], rng.Uint64())
		if err := m.do(m.units, stretch, off, model[off:off+n], true); err != nil {
			t.Fatal(err)
		}
	}
	for off := 0; off+16 <= len(model); off += 4096 {
		if bytes.Contains(m.file.p, model[off:off+16]) && !bytes.Equal(model[off:off+16], make([]byte, 16)) {
			t.Errorf("bytes at %d are in the file", off)
		}
	}
	seals, err := m.units.Seals(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	later := newMemory(t, users)
	if ok, err := later.sealer.Opens(m.sealer.Mark()); !ok || err != nil {
		t.Errorf("the same key: %v, %v", ok, err)
	}
	key, err := later.sealer.KeyOf(m.units.Key().Salt())
	if err != nil {
		t.Fatal(err)
	}
	old := later.sealer.OldUnits(key, m.units.Number(), m.stretches, seals)
	if !old.ReadOnly() || m.units.ReadOnly() {
		t.Error("units of an earlier volume can be written, or those of this one cannot")
	}
	for range 20 {
		same(old)
	}
	other := newMemory(t, bytes.Repeat([]byte{8}, 32))
	if ok, err := other.sealer.Opens(m.sealer.Mark()); ok || err != nil {
		t.Errorf("another key: %v, %v", ok, err)
	}
}

// TestChangedBytesAreFound, in place, and a unit in the place of another.
func TestChangedBytesAreFound(t *testing.T) {
	m := newMemory(t, nil)
	data := make([]byte, m.stretches[1].Len)
	testseed.Fill(data, 1)
	off := m.stretches[1].Off
	if err := m.do(m.units, 1, off, data, true); err != nil {
		t.Fatal(err)
	}
	sound := bytes.Clone(m.file.p)
	for name, change := range map[string]func(p []byte){
		"a bit":        func(p []byte) { p[seal.Unit+9] ^= 4 },
		"another unit": func(p []byte) { copy(p[seal.Unit-tier.Page:][:seal.Unit], p[2*seal.Unit-tier.Page:]) },
	} {
		m.file.p = bytes.Clone(sound)
		change(m.file.p)
		p := make([]byte, len(data))
		var a *tier.AlteredError
		if err := m.do(m.units, 1, off, p, false); !errors.As(err, &a) || a.Offset != seal.Unit-tier.Page || a.Length != seal.Unit {
			t.Errorf("%s: %v", name, err)
		}
	}
	m.file.p = sound[:seal.Unit] // somebody has cut it
	if err := m.do(m.units, 1, off, make([]byte, len(data)), false); !errors.Is(err, tier.ErrAltered) {
		t.Errorf("cut: %v", err)
	}
}

// TestFailedWritesAreLost until all of a unit is written.
func TestFailedWritesAreLost(t *testing.T) {
	m := newMemory(t, nil)
	fails := errors.New("it fails")
	p := bytes.Repeat([]byte{3}, seal.Unit)
	write := func(fail error, n int) error {
		m.file.fail = fail
		return m.do(m.units, 0, 0, p[:n], true)
	}
	if err := write(fails, seal.Unit); !errors.Is(err, fails) {
		t.Error(err)
	}
	if _, err := m.units.Seals(t.Context()); err != nil { // there was nothing to lose
		t.Error(err)
	}
	if err := errors.Join(write(nil, seal.Unit)); err != nil {
		t.Error(err)
	}
	if err := write(fails, 100); !errors.Is(err, fails) {
		t.Error(err)
	}
	if _, err := m.units.Seals(t.Context()); !errors.Is(err, fails) {
		t.Errorf("what was lost: %v", err)
	}
	if err := m.do(m.units, 0, 0, p[:1], false); !errors.Is(err, fails) || !errors.Is(err, tier.ErrAltered) {
		t.Errorf("what was lost is read: %v", err)
	}
	if err := write(nil, 100); !errors.Is(err, fails) {
		t.Errorf("a part of what was lost is written: %v", err)
	}
	if err := write(nil, seal.Unit); err != nil {
		t.Error(err)
	}
	if err := m.do(m.units, 0, 0, p, false); err != nil {
		t.Error(err)
	}
}

// TestHoldsTakeTurns: reads share, writes do not, and one that gives up lets the next have its
// turn.
func TestHoldsTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMemory(t, nil)
		hold := func(ctx context.Context, off, n int64, write bool) chan *seal.Hold {
			got := make(chan *seal.Hold, 1)
			go func() {
				h, _ := m.units.Hold(ctx, 0, off, n, write)
				got <- h
			}()
			synctest.Wait()
			return got
		}
		a, b := <-hold(t.Context(), 0, 10, false), <-hold(t.Context(), 0, seal.Unit+1, false)
		beside := <-hold(t.Context(), 2*seal.Unit, 10, true)
		ctx, cancel := context.WithCancel(t.Context())
		write, behind := hold(ctx, seal.Unit, 10, true), hold(t.Context(), seal.Unit, 10, false)
		if len(write) > 0 || len(behind) > 0 {
			t.Fatal("a write did not wait for reads, or a read passed it")
		}
		cancel()
		synctest.Wait()
		if len(behind) == 0 || <-write != nil {
			t.Fatal("a read waits for a write that gave up")
		}
		for _, h := range []*seal.Hold{a, b, beside, <-behind} {
			h.Release()
		}
		(<-hold(t.Context(), 0, 2*seal.Unit, true)).Release()
	})
}
