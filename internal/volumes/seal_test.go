package volumes

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

const (
	page  = tier.Page
	block = blockSize
	size  = 5*block + 3*page - 5 // of a memory, which is at begin in its file
	begin = 2 * page
)

// file is a file in memory, whose writes can fail. It counts the reads.
type file struct {
	p     []byte
	fail  error
	reads int
}

func (f *file) ReadAt(p []byte, off int64) (int, error) {
	f.reads++
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

type memory struct {
	sealer *sealer
	extent *sealedExtent
	file   *file
	buf    []byte
}

func newMemory(t *testing.T, users []byte) *memory {
	t.Helper()
	s, err := newSealer(users)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.forget)
	return &memory{s, &sealedExtent{sealer: s, key: s.own, block: blockSize}, &file{p: make([]byte, begin+size+5)}, make([]byte, size+3*block)}
}

// write writes p as a volume does: in requests that end on multiples of a block's size.
func (m *memory) write(p []byte, off int64) error {
	if err := m.extent.checkWrite(off, int64(len(p))); err != nil {
		return err
	}
	for len(p) > 0 {
		n := min(int64(len(p)), 2*block-off%block)
		if err := m.extent.Write(m.file, begin+off, p[:n], off, m.buf); err != nil {
			return err
		}
		p, off = p[n:], off+n
	}
	return nil
}

func (m *memory) read(p []byte, off int64) error {
	return m.extent.Read(m.file, begin+off, p, off, m.buf)
}

// TestRandomRequests compares reads of any part with a model, and finds out by the model which writes
// must be refused. No write reads, and no written byte is in the file. A later sealer with the same
// user's key reads the same, and one with another key is recognized.
func TestRandomRequests(t *testing.T) {
	for seed := range testseed.Each(t, testseed.Rounds(20, 4)) {
		rng := rand.New(rand.NewPCG(seed, 1))
		users := bytes.Repeat([]byte{7}, 32)
		m := newMemory(t, users)
		model := make([]byte, size)
		of := make([]int, size/page+1) // which block each page is in; 0: none
		blocks := 0
		same := func(m *memory) {
			t.Helper()
			off := rng.Int64N(size)
			p := bytes.Repeat([]byte{0xee}, 1+int(rng.Int64N(size-off)))
			if err := m.read(p, off); err != nil || !bytes.Equal(p, model[off:off+int64(len(p))]) {
				t.Fatalf("seed %d: %d bytes at %d differ: %v", seed, len(p), off, err)
			}
		}
		for range 40 {
			same(m)
			first := rng.IntN(len(of))
			last := first + rng.IntN(min(len(of)-first, 40)) // pages
			off := int64(first) * page
			p := make([]byte, min(size, int64(last+1)*page)-off)
			testseed.Fill(p, rng.Uint64())
			before, after := 0, 0
			if first > 0 {
				before = of[first-1]
			}
			if last < len(of)-1 {
				after = of[last+1]
			}
			cuts := before != 0 && before == of[first] || after != 0 && after == of[last]
			reads := m.file.reads
			err := m.write(p, off)
			if cuts != errors.Is(err, tier.ErrNotSupported) || !cuts && err != nil {
				t.Fatalf("seed %d: %d bytes at %d cut a block: %t, and the error is %v", seed, len(p), off, cuts, err)
			}
			if m.file.reads != reads {
				t.Fatalf("seed %d: a write read", seed)
			}
			if cuts {
				continue
			}
			copy(model[off:], p)
			for i := first; i <= last; i++ {
				if i == first || i%(block/page) == 0 {
					blocks++
				}
				of[i] = blocks
			}
		}
		for off := 0; off+16 <= len(model); off += page {
			if bytes.Contains(m.file.p, model[off:off+16]) && !bytes.Equal(model[off:off+16], make([]byte, 16)) {
				t.Errorf("seed %d: bytes at %d are in the file", seed, off)
			}
		}
		written, err := m.extent.blocksIn(0, size)
		if err != nil {
			t.Fatal(err)
		}
		later := newMemory(t, users)
		if ok, err := later.sealer.opens(m.sealer.mark); !ok || err != nil {
			t.Errorf("the same key: %v, %v", ok, err)
		}
		key, err := later.sealer.keyOf(m.extent.key.salt)
		if err != nil {
			t.Fatal(err)
		}
		later.extent, later.file = &sealedExtent{sealer: later.sealer, key: key}, m.file
		later.extent.mu.blocks = written
		for range 20 {
			same(later)
		}
		if err := later.write(model, 0); !errors.Is(err, tier.ErrNotSupported) {
			t.Errorf("memory of an earlier volume is written: %v", err)
		}
		other := newMemory(t, bytes.Repeat([]byte{8}, 32))
		if ok, err := other.sealer.opens(m.sealer.mark); ok || err != nil {
			t.Errorf("another key: %v, %v", ok, err)
		}
	}
}

// TestChangedBytesAreFound finds changed bytes, a block in the place of another one, a block of another
// memory, and the end of a file.
func TestChangedBytesAreFound(t *testing.T) {
	m := newMemory(t, nil)
	data := make([]byte, size)
	testseed.Fill(data, 1)
	if err := m.write(data, 0); err != nil {
		t.Fatal(err)
	}
	sound := bytes.Clone(m.file.p)
	second := &memory{m.sealer, &sealedExtent{sealer: m.sealer, key: m.sealer.own, block: blockSize}, &file{p: make([]byte, len(sound))}, m.buf}
	if err := second.write(data, 0); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(p []byte){
		"a bit":                            func(p []byte) { p[9] ^= 4 },
		"another block":                    func(p []byte) { copy(p[:block], p[block:]) },
		"the same block of another memory": func(p []byte) { copy(p[:block], second.file.p[begin+block:]) },
	} {
		m.file.p = bytes.Clone(sound)
		change(m.file.p[begin+block:])
		p := bytes.Repeat([]byte{1}, size)
		var a *tier.AlteredError
		if err := m.read(p, 0); !errors.As(err, &a) || a.Offset != begin+block || a.Length != block {
			t.Errorf("%s: %v", name, err)
		}
		if got := p[block : 2*block]; !bytes.Equal(got, make([]byte, block)) && !bytes.Equal(got, bytes.Repeat([]byte{1}, block)) {
			t.Errorf("%s: some of it was returned", name)
		}
	}
	m.file.p = sound[:begin+block]
	if err := m.read(make([]byte, size), 0); !errors.Is(err, tier.ErrAltered) {
		t.Errorf("a file that was truncated: %v", err)
	}
}

// TestFailedWritesAreLost until all that failed is written.
func TestFailedWritesAreLost(t *testing.T) {
	m := newMemory(t, nil)
	fails := errors.New("it fails")
	p := bytes.Repeat([]byte{3}, block)
	lost := func(when string) {
		t.Helper()
		if _, err := m.extent.blocksIn(0, size); !errors.Is(err, fails) {
			t.Errorf("%s: the blocks are %v", when, err)
		}
		if err := m.read(make([]byte, 1), 0); !errors.Is(err, fails) || !errors.Is(err, tier.ErrAltered) {
			t.Errorf("%s it is read: %v", when, err)
		}
		if err := m.write(p[:page], 0); !errors.Is(err, tier.ErrNotSupported) {
			t.Errorf("%s a part of it is written: %v", when, err)
		}
	}
	for _, when := range []string{"the first time", "over written bytes"} {
		m.file.fail = fails
		if err := m.write(p, 0); !errors.Is(err, fails) {
			t.Error(err)
		}
		m.file.fail = nil
		lost(when)
		if err := m.write(p, 0); err != nil {
			t.Error(err)
		}
		got := make([]byte, block)
		if err := m.read(got, 0); err != nil || !bytes.Equal(got, p) {
			t.Errorf("%s: written again it is %v", when, err)
		}
	}
}
