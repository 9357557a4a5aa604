package host

import (
	"fmt"
	"math/bits"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/tier"
)

// Small memory is in slabs: a few pages of the arena, cut into places of one
// size. A slab has at most 64 places, so that one word has a bit for each.
//
//	slab of 1792-byte places    ├ place ┼ place ┼ free ┼ … ┼ place ┤   28 KiB
//
// The sizes go up by 64 bytes to 512, and then in four steps to each doubling. So a place is at
// most a quarter larger than its contents. Sizes of whole pages need no slab: pages by themselves
// are as dense, are aligned for direct I/O, and pin nothing else.

const (
	// place is the alignment of places: what Arrow asks for its buffers.
	place = 64
	// maxSmall is the largest size that a slab serves.
	maxSmall = 2 * tier.Page
	// maxFine is up to where classes go up by place.
	maxFine = 512
	// classCount: maxFine/place, then four for each of the four doublings.
	classCount = 8 + 4*4
)

// classOf returns the class of a size from 1 to maxSmall.
func classOf(size int64) int {
	if size <= maxFine {
		return int((size - 1) / place)
	}
	n := bits.Len64(uint64(size - 1)) // 2^(n-1) < size ≤ 2^n, n from 10
	return 8 + 4*(n-10) + int((size-1)>>(n-3)) - 4
}

// classSize returns the length of a class's places.
func classSize(class int) int64 {
	if class < 8 {
		return int64(class+1) * place
	}
	class -= 8
	return int64(class%4+5) << (class/4 + 7)
}

// slabLength returns how long a slab of a class should be: as few pages as its
// places fill without a rest, and four places at least. (The sizes are 1, 3, 5 or 7
// times a power of two, so that is 32 KiB at most.) A class that left a rest could
// not fill an arena, though the books had room.
func slabLength(class int) int64 {
	size := classSize(class)
	n := size >> bits.TrailingZeros64(uint64(size)) * tier.Page
	for n < 4*size {
		n *= 2
	}
	return n
}

// slab is a range of the arena that is cut into places.
type slab struct {
	off, length int64
	class       int
	free, all   uint64 // a bit for each free place; for each place
	listed      int    // where it is in the list of its class, while it is in that
}

func newSlab(class int, off, length int64) *slab {
	all := ^uint64(0) >> (64 - min(length/classSize(class), 64))
	return &slab{off: off, length: length, class: class, free: all, all: all}
}

// at returns where the place begins in the arena.
func (s *slab) at(i int) int64 { return s.off + int64(i)*classSize(s.class) }

// slabs are an arena's slabs. It touches no memory and has no lock: the arena's guards it. Each call
// takes constant time. A slab that is empty goes back to the arena at once.
type slabs struct {
	lists  [classCount][]*slab // those with free and used places; the last is full first
	length int64               // bytes of all slabs
}

// add puts in a slab that was made of pages of the arena; all of it is free. The next call is take.
func (l *slabs) add(s *slab) {
	l.length += s.length
	l.list(s)
}

// take hands out a place of a class; nil if none is free.
func (l *slabs) take(class int) (*slab, int) {
	if len(l.lists[class]) == 0 {
		return nil, 0
	}
	s := l.lists[class][len(l.lists[class])-1]
	i := bits.TrailingZeros64(s.free)
	if s.free &^= 1 << i; s.free == 0 {
		l.unlist(s)
	}
	return s, i
}

// put takes a place back. A slab that is empty then is not among the slabs any more, and its pages
// are the caller's.
func (l *slabs) put(s *slab, i int) (empty bool) {
	if s.free&(1<<i) != 0 {
		panic(fmt.Sprintf("host: the place at %d is free already", s.at(i)))
	}
	if s.free == 0 {
		l.list(s)
	}
	if s.free |= 1 << i; s.free != s.all {
		return false
	}
	l.unlist(s)
	l.length -= s.length
	return true
}

// list appends s to the list of its class: the slab that was used last is filled first, and the
// others have time to become empty.
func (l *slabs) list(s *slab) {
	s.listed = len(l.lists[s.class])
	l.lists[s.class] = append(l.lists[s.class], s)
}

func (l *slabs) unlist(s *slab) {
	list := l.lists[s.class]
	last := len(list) - 1
	list[s.listed], list[last].listed = list[last], s.listed
	list[last] = nil
	l.lists[s.class] = list[:last]
}

// placeLocked takes a place of a slab. It tries, in order, a slab with a free place, a new slab,
// a shorter one where the arena has no range for a whole one, and a larger place. It returns nil
// where there is none.
func (a *Arena) placeLocked(class int) (s *slab, index int) {
	slabs, free := &a.mu.slabs, a.mu.free
	if s, index = slabs.take(class); s != nil {
		return s, index
	}
	n := slabLength(class)
	off, ok := free.Alloc(n)
	if !ok && free.Largest() >= classSize(class) {
		n = min(n, free.Largest())
		off, ok = free.Alloc(n)
	}
	if ok && invariants.Enabled {
		if err := a.space.show(a.mem[off : off+n]); err != nil {
			free.Free(off, n)
			ok = false
		} else {
			scribble(a.mem[off : off+n])
		}
	}
	if ok {
		a.mark(off, n)
		slabs.add(newSlab(class, off, n))
	}
	for ; s == nil && class < classCount; class++ {
		s, index = slabs.take(class)
	}
	return s, index
}

// freedByte is what free places are filled with in an invariants build: as an
// offset or a length it is nonsense.
const freedByte = 0xdb

func scribble(b []byte) {
	for i := range b {
		b[i] = freedByte
	}
}
