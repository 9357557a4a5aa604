package host

import (
	"fmt"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/tier"
)

// small is a memory that lies in a slab.
type small struct {
	size    int64
	slab    *slab
	index   int
	extents [1][]byte
	freed   atomic.Bool
}

func (m *small) Size() int64       { return m.size }
func (m *small) Extents() [][]byte { return m.extents[:] }

// allocSmall hands out a place of a slab. It tries, in order, a slab with a free place, a new slab,
// a shorter one where the arena has no range for a whole one, and a larger place. So it is refused
// only if no page and no long enough place is free.
func (a *Arena) allocSmall(size, charge int64, cuts []int64) (tier.Memory, error) {
	class := classOf(size)
	for {
		p, err := a.placeSmall(size, charge, class, cuts)
		switch {
		case err != nil:
			return nil, err
		case p.wait != nil:
			<-p.wait // for Trim, or for another slab that is on its way
		case p.pieces != nil:
			return a.handOut(size, p.pieces)
		case p.fresh != nil:
			if err := a.open(p.fresh); err != nil {
				return nil, err
			}
		default:
			return a.handOutPlace(size, p.slab, p.index)
		}
	}
}

// placed is what placeSmall found; one of the fields is set.
type placed struct {
	slab   *slab
	index  int
	fresh  *slab           // a new slab, not among the slabs yet: to be opened
	pieces []piece         // pages
	wait   <-chan struct{} // try again then
}

func (a *Arena) placeSmall(size, charge int64, class int, cuts []int64) (placed, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		return placed{}, tier.ErrClosed
	}
	slabs := &a.mu.slabs
	if s, i, ok := slabs.take(class, charge); ok {
		a.mu.used += charge
		return placed{slab: s, index: i}, nil
	}
	if s := a.newSlabLocked(class); s != nil {
		if invariants.Enabled {
			a.mu.withheld += s.length
			return placed{fresh: s}, nil
		}
		a.mark(s.off, s.length)
		slabs.add(s)
		s, i, _ := slabs.take(class, charge)
		a.mu.used += charge
		return placed{slab: s, index: i}, nil
	}
	if a.mu.withheld > 0 {
		return placed{wait: a.returnedLocked()}, nil
	}
	if s, i, ok := slabs.takeLarger(class, charge); ok {
		a.mu.used += charge
		return placed{slab: s, index: i}, nil
	}
	if pieces, ok := a.pagesLocked(size, cuts); ok {
		return placed{pieces: pieces}, nil
	}
	return placed{}, a.fullLocked(size)
}

// newSlabLocked takes the pages of a new slab, as many as it should have or else as
// many as there are; nil if there are too few for one place.
func (a *Arena) newSlabLocked(class int) *slab {
	free := a.mu.free
	n := slabLength(class)
	off, ok := free.Alloc(n)
	if !ok && a.mu.slabs.flush(free.Free) {
		off, ok = free.Alloc(n)
	}
	if !ok {
		n = min(n, free.Largest())
		if n < classSize(class) {
			return nil
		}
		off, _ = free.Alloc(n)
	}
	return newSlab(class, off, n)
}

// open makes a new slab's places ready, in an invariants build, and puts it among the slabs. Its
// pages count as withheld meanwhile, so that no request is refused that would find room in it.
func (a *Arena) open(s *slab) error {
	a.mark(s.off, s.length)
	mem := a.mem[s.off : s.off+s.length]
	err := a.space.show(mem)
	if err == nil {
		scribble(mem)
	}
	a.mu.Lock()
	if err == nil {
		a.mu.slabs.add(s)
	} else {
		a.mu.free.Free(s.off, s.length)
	}
	waiters := a.unwithholdLocked(s.length)
	last := a.lastLocked()
	a.mu.Unlock()
	wake(waiters)
	if last {
		a.unmap()
	}
	if err != nil {
		return fmt.Errorf("host: making %d bytes readable again: %w", s.length, err)
	}
	return nil
}

// handOutPlace makes a memory of a place that was taken.
func (a *Arena) handOutPlace(size int64, s *slab, index int) (tier.Memory, error) {
	at := s.at(index)
	a.window.Reach(at + size)
	m := &small{size: size, slab: s, index: index}
	m.extents[0] = a.mem[at : at+size : at+size]
	if !invariants.Enabled {
		return m, nil
	}
	whole := a.mem[at : at+classSize(s.class)]
	if pages := wholePages(whole, at); len(pages) > 0 {
		if err := a.space.show(pages); err != nil {
			a.freeSmall(m, false)
			return nil, fmt.Errorf("host: making %d bytes readable again: %w", len(pages), err)
		}
	}
	if i := unscribbled(whole); i >= 0 {
		a.freeSmall(m, true)
		panic(fmt.Sprintf("host: byte %d of %d was written after it was freed", i, len(whole)))
	}
	return m, nil
}

// freeSmall takes a place back. touch says that its bytes may be written.
func (a *Arena) freeSmall(m *small, touch bool) {
	s, charge := m.slab, a.Charge(m.size)
	if invariants.Enabled && touch {
		at := s.at(m.index)
		whole := a.mem[at : at+classSize(s.class)]
		scribble(whole)
		if pages := wholePages(whole, at); len(pages) > 0 {
			_ = a.space.hide(pages) // as in Free
		}
	}
	a.mu.Lock()
	a.mu.used -= charge
	out := a.mu.slabs.put(s, m.index, charge)
	switch {
	case out && poison:
		a.mu.withheld += s.length
	case out:
		a.mu.free.Free(s.off, s.length)
	}
	last := a.lastLocked()
	a.mu.Unlock()
	if out && poison {
		last = a.hideSlab(s)
	}
	if last {
		a.unmap()
	}
}

// hideSlab makes the pages of an empty slab unreadable and gives them back. They are withheld:
// until then any request could use its other places.
func (a *Arena) hideSlab(s *slab) (last bool) {
	_ = a.space.hide(a.mem[s.off : s.off+s.length])
	a.mu.Lock()
	a.mu.free.Free(s.off, s.length)
	waiters := a.unwithholdLocked(s.length)
	last = a.lastLocked()
	a.mu.Unlock()
	wake(waiters)
	return last
}

// wholePages returns the pages that lie wholly in mem, which begins at the offset
// at: only those can be made unreadable, the others have neighbours.
func wholePages(mem []byte, at int64) []byte {
	from, to := round(at), (at+int64(len(mem)))&^(tier.Page-1)
	if from >= to {
		return nil
	}
	return mem[from-at : to-at]
}

// freedByte is what free places are filled with in an invariants build: as an
// offset or a length it is nonsense.
const freedByte = 0xdb

func scribble(b []byte) {
	for i := range b {
		b[i] = freedByte
	}
}

// unscribbled returns the index of the first byte that is not freedByte, or -1.
func unscribbled(b []byte) int {
	for i, c := range b {
		if c != freedByte {
			return i
		}
	}
	return -1
}
