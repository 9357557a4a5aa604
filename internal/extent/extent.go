// Package extent allocates ranges of a line: the offsets in an arena, in a device's memory or in a
// spill file. An Allocator accesses no memory. Place lays a body on
// several free ranges, and Address, Aligned and Touch are about bytes of the process.
//
//	0            off        off+n                             size
//	+-- taken ----+-- free --+-- taken --+-------- free --------+
//
// Allocation is best fit: the shortest free range that is long enough, and among equally long ones
// the lowest. So the high end of the line stays free and can be given back. Freed ranges are joined
// with their free neighbours at once; two free ranges never touch.
//
// The package knows no alignment: if every n that a caller passes is a multiple of some unit, so is
// every offset. An Allocator has no lock of its own; its owner guards it.
package extent

import (
	"fmt"
	"iter"

	"github.com/google/btree"
)

// degree of the trees: nodes of 31 to 63 ranges of 16 bytes, at most a page of 1 KiB, as
// google/btree's own benchmarks find best for small items.
const degree = 32

// Allocator allocates ranges of [0, size). It is not safe for concurrent use. Alloc, Free and Largest
// take time logarithmic in the number of free ranges and, once the trees have grown, allocate no
// memory.
type Allocator struct {
	size int64
	free int64

	byOffset *btree.BTreeG[span] // the free ranges, twice
	byLength *btree.BTreeG[span]

	found span // the result of a search by catch; n is 0 if there is none
	catch btree.ItemIteratorG[span]
}

type span struct{ off, n int64 }

// New returns an allocator of [0, size), all of it free. size must not be negative.
func New(size int64) *Allocator {
	if size < 0 {
		panic(fmt.Sprintf("extent: a line of %d bytes", size))
	}
	a := &Allocator{
		size:     size,
		byOffset: btree.NewG(degree, func(a, b span) bool { return a.off < b.off }),
		byLength: btree.NewG(degree, func(a, b span) bool { return a.n < b.n || a.n == b.n && a.off < b.off }),
	}
	// One closure for all searches, because one for each call would be allocated.
	a.catch = func(s span) bool { a.found = s; return false }
	if size > 0 {
		a.Free(0, size)
	}
	return a
}

// Alloc takes n > 0 bytes from the low end of the shortest free range that has them, and reports
// whether there was one.
func (a *Allocator) Alloc(n int64) (off int64, ok bool) {
	if n <= 0 {
		panic(fmt.Sprintf("extent: a range of %d bytes", n))
	}
	a.found = span{}
	a.byLength.AscendGreaterOrEqual(span{n: n}, a.catch)
	s := a.found
	if s.n == 0 {
		return 0, false
	}
	a.byLength.Delete(s)
	a.byOffset.Delete(s)
	if rest := (span{s.off + n, s.n - n}); rest.n > 0 {
		a.byLength.ReplaceOrInsert(rest)
		a.byOffset.ReplaceOrInsert(rest)
	}
	a.free -= n
	return s.off, true
}

// Free gives back [off, off+n), n > 0, which may be part of what one Alloc returned or span several.
// It panics if any of it is free already or outside the line, because a range that is allocated twice
// would be worse.
func (a *Allocator) Free(off, n int64) {
	if n <= 0 || off < 0 || off > a.size || n > a.size-off {
		panic(fmt.Sprintf("extent: range [%d, +%d) freed on a line of %d bytes", off, n, a.size))
	}
	a.found = span{}
	a.byOffset.DescendLessOrEqual(span{off: off}, a.catch)
	before := a.found
	a.found = span{}
	a.byOffset.AscendGreaterOrEqual(span{off: off}, a.catch)
	after := a.found
	for _, s := range []span{before, after} {
		if s.n > 0 && s.off < off+n && off < s.off+s.n {
			panic(fmt.Sprintf("extent: range [%d, +%d) freed while [%d, +%d) is free", off, n, s.off, s.n))
		}
	}
	a.free += n
	joined := span{off, n}
	if before.n > 0 && before.off+before.n == off {
		a.byLength.Delete(before)
		a.byOffset.Delete(before)
		joined = span{before.off, before.n + n}
	}
	if after.n > 0 && after.off == off+n {
		a.byLength.Delete(after)
		a.byOffset.Delete(after)
		joined.n += after.n
	}
	a.byLength.ReplaceOrInsert(joined)
	a.byOffset.ReplaceOrInsert(joined)
}

// FreeBytes returns how much of the line is free.
func (a *Allocator) FreeBytes() int64 { return a.free }

// Largest returns the length of the longest free range, 0 if there is none.
func (a *Allocator) Largest() int64 {
	s, _ := a.byLength.Max()
	return s.n
}

// All yields the free ranges in ascending order as offset and length. The allocator must not be
// changed meanwhile.
func (a *Allocator) All() iter.Seq2[int64, int64] {
	return func(yield func(off, n int64) bool) {
		a.byOffset.Ascend(func(s span) bool { return yield(s.off, s.n) })
	}
}
