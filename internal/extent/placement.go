package extent

import (
	"cmp"
	"slices"
)

// Source is what a body is laid on: free ranges, of which Alloc takes n bytes
// out of a good one.
type Source[P any] interface {
	// Alloc takes n bytes in one piece, or says that there is no such piece.
	Alloc(n int64) (P, bool)
	// Free gives back what Alloc returned for n bytes.
	Free(p P, n int64)
	// Largest is the length of the longest free range.
	Largest() int64
}

// Piece is a part of a body and where it was laid.
type Piece[P any] struct {
	Off, Len int64 // within the body
	At       P
}

// Place lays a body of size > 0 bytes on free ranges that may be shorter than the body, and reports
// whether it could; if not, nothing is taken. The body may be split only at cuts, which are ascending
// and inside (0, size). Every piece but the last is at least least bytes long (0 for any length).
//
//	body     +----------+----+---------------+      +: cuts
//	ranges     +-----------+   +--+  +--------------------+
//
// It has no state and no lock: callers hold the lock of what they allocate from.
//
// Two ways are tried. The first takes the longest stretch from the front that
// fits, again and again, and so makes few pieces. Where it fails, because a long
// range was spent on what would have fitted elsewhere, the second lays each
// stretch between two cuts by itself, the longest first. It makes more pieces, but
// a request is refused only when both fail. (To find a fit whenever there is one
// would be bin packing.)
func Place[P any](src Source[P], size int64, cuts []int64, least int64) ([]Piece[P], bool) {
	if at, ok := src.Alloc(size); ok {
		return []Piece[P]{{0, size, at}}, true
	}
	if len(cuts) == 0 {
		return nil, false
	}
	if pieces, ok := longest(src, size, cuts, least); ok {
		return pieces, true
	}
	return betweenCuts(src, size, cuts, least)
}

// longest takes the longest stretch that fits, from the front.
func longest[P any](src Source[P], size int64, cuts []int64, least int64) ([]Piece[P], bool) {
	var pieces []Piece[P]
	for off := int64(0); off < size; {
		end := size
		if room := src.Largest(); size-off > room {
			i, exact := slices.BinarySearch(cuts, off+room)
			if !exact {
				i--
			}
			if i < 0 || cuts[i] <= off || cuts[i]-off < least {
				undo(src, pieces)
				return nil, false
			}
			end, cuts = cuts[i], cuts[i+1:]
		}
		at, ok := src.Alloc(end - off)
		if !ok {
			undo(src, pieces)
			return nil, false
		}
		pieces = append(pieces, Piece[P]{off, end - off, at})
		off = end
	}
	return pieces, true
}

// betweenCuts lays the stretches between the cuts one by one, the longest first.
func betweenCuts[P any](src Source[P], size int64, cuts []int64, least int64) ([]Piece[P], bool) {
	pieces := make([]Piece[P], 0, len(cuts)+1)
	off := int64(0)
	for _, c := range cuts {
		if c-off >= least { // else it goes with what follows
			pieces = append(pieces, Piece[P]{Off: off, Len: c - off})
			off = c
		}
	}
	pieces = append(pieces, Piece[P]{Off: off, Len: size - off})
	slices.SortStableFunc(pieces, func(a, b Piece[P]) int { return cmp.Compare(b.Len, a.Len) })
	for i := range pieces {
		at, ok := src.Alloc(pieces[i].Len)
		if !ok {
			undo(src, pieces[:i])
			return nil, false
		}
		pieces[i].At = at
	}
	slices.SortFunc(pieces, func(a, b Piece[P]) int { return cmp.Compare(a.Off, b.Off) })
	return pieces, true
}

func undo[P any](src Source[P], pieces []Piece[P]) {
	for _, p := range pieces {
		src.Free(p.At, p.Len)
	}
}

// RoundUp returns the least multiple of unit, a power of two, that is not below n.
func RoundUp(n, unit int64) int64 { return (n + unit - 1) &^ (unit - 1) }
