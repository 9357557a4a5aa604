package host

import (
	"fmt"
	"math/bits"

	"github.com/spillway-db/spillway/tier"
)

// Small memory lies in slabs: a few pages of the arena, cut into places of one
// size. A slab has at most 64 places, so that one word says which are free.
//
//	slab of 1792-byte places    ├ place ┼ place ┼ free ┼ … ┼ place ┤   28 KiB
//
// The sizes go up by 64 bytes to 512, and then in four steps to each doubling. So a place is at
// most a quarter larger than its contents. Sizes of whole pages need no slab: pages by themselves
// are as dense, are aligned for direct I/O, and pin nothing beside them.

const (
	// place is the alignment of places: what Arrow asks for its buffers.
	place = 64
	// smallMost is the largest size that a slab serves.
	smallMost = 2 * tier.Page
	// fineMost is up to where classes go up by place.
	fineMost = 512
	// classCount: fineMost/place, then four for each of the four doublings.
	classCount = 8 + 4*4
)

// classOf returns the class of a size from 1 to smallMost.
func classOf(size int64) int {
	if size <= fineMost {
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
	places      int
	free        uint64 // a bit for each free place

	prev, next *slab // in the list of its class; only while a place is free
}

func newSlab(class int, off, length int64) *slab {
	n := int(min(length/classSize(class), 64))
	return &slab{off: off, length: length, class: class, places: n, free: ^uint64(0) >> (64 - n)}
}

// at returns where the place begins in the arena.
func (s *slab) at(i int) int64 { return s.off + int64(i)*classSize(s.class) }

func (s *slab) empty() bool { return s.free == ^uint64(0)>>(64-s.places) }

// slabs are an arena's slabs. It touches no memory and has no lock: the arena's
// guards it. Each call but flush takes constant time.
//
// An empty slab goes back to the arena, except one spare of each class. Without the spare, a
// program that allocates and frees one buffer again and again would make and give up a slab each
// time. Spares block no request: flush gives them back before a request is refused, or split, for
// want of their pages.
type slabs struct {
	reuse   bool // whether there are spares at all
	lists   [classCount]*slab
	ends    [classCount]*slab
	spare   [classCount]*slab
	partial uint32 // a bit for each class with a list
	spares  int
	length  int64 // bytes of all slabs
	used    int64 // of these, charged for
}

// slack is how much of the slabs is in no place that is handed out.
func (l *slabs) slack() int64 { return l.length - l.used }

// add puts in a slab that was made of pages of the arena; all of it is free.
func (l *slabs) add(s *slab) {
	l.length += s.length
	l.push(s)
}

// take hands out a place of a class for something that is charged charge bytes.
func (l *slabs) take(class int, charge int64) (*slab, int, bool) {
	s := l.lists[class]
	if s == nil {
		return nil, 0, false
	}
	if s == l.spare[class] {
		l.spare[class] = nil
		l.spares--
	}
	i := bits.TrailingZeros64(s.free)
	if s.free &^= 1 << i; s.free == 0 {
		l.unlink(s)
	}
	l.used += charge
	return s, i, true
}

// takeLarger hands out a place of the smallest class above class that has one.
func (l *slabs) takeLarger(class int, charge int64) (*slab, int, bool) {
	above := l.partial >> (class + 1)
	if above == 0 {
		return nil, 0, false
	}
	return l.take(class+1+bits.TrailingZeros32(above), charge)
}

// put takes a place back. A slab that is empty then, and no spare, is not among the
// slabs any more and its pages are the caller's.
func (l *slabs) put(s *slab, i int, charge int64) (out bool) {
	if s.free&(1<<i) != 0 {
		panic(fmt.Sprintf("host: the place at %d is free already", s.at(i)))
	}
	l.used -= charge
	full := s.free == 0
	s.free |= 1 << i
	switch {
	case !s.empty():
		if full {
			l.push(s)
		}
		return false
	case l.reuse && l.spare[s.class] == nil:
		if !full {
			l.unlink(s)
		}
		l.append(s) // to be used last
		l.spare[s.class] = s
		l.spares++
		return false
	}
	if !full {
		l.unlink(s)
	}
	l.length -= s.length
	return true
}

// flush gives the spares to free, and reports whether there were any.
func (l *slabs) flush(free func(off, n int64)) bool {
	if l.spares == 0 {
		return false
	}
	for class, s := range l.spare {
		if s != nil {
			l.spare[class] = nil
			l.unlink(s)
			l.length -= s.length
			free(s.off, s.length)
		}
	}
	l.spares = 0
	return true
}

// largest is the length of the largest free place, 0 if there is none.
func (l *slabs) largest() int64 {
	if l.partial == 0 {
		return 0
	}
	return classSize(bits.Len32(l.partial) - 1)
}

// push puts s at the front of its class's list: what was used last is full first,
// and the others have time to become empty.
func (l *slabs) push(s *slab) {
	s.prev, s.next = nil, l.lists[s.class]
	if s.next != nil {
		s.next.prev = s
	} else {
		l.ends[s.class] = s
	}
	l.lists[s.class] = s
	l.partial |= 1 << s.class
}

// append puts s at the end of its class's list.
func (l *slabs) append(s *slab) {
	end := l.ends[s.class]
	if end == nil {
		l.push(s)
		return
	}
	s.prev, s.next = end, nil
	end.next = s
	l.ends[s.class] = s
}

func (l *slabs) unlink(s *slab) {
	if s.prev != nil {
		s.prev.next = s.next
	} else {
		l.lists[s.class] = s.next
	}
	if s.next != nil {
		s.next.prev = s.prev
	} else {
		l.ends[s.class] = s.prev
	}
	s.prev, s.next = nil, nil
	if l.lists[s.class] == nil {
		l.partial &^= 1 << s.class
	}
}
