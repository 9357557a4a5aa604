package extent

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// line is a Source over one allocator.
type line struct{ *Allocator }

func (l line) Free(off, n int64) { l.Allocator.Free(off, n) }

// lineWith returns a source whose free ranges have the given lengths, with one
// taken byte between them.
func lineWith(lengths ...int64) line {
	var size int64
	for _, n := range lengths {
		size += n + 1
	}
	a := New(size)
	a.Alloc(size)
	off := int64(0)
	for _, n := range lengths {
		a.Free(off, n)
		off += n + 1
	}
	return line{a}
}

func TestPlace(t *testing.T) {
	for _, c := range []struct {
		name   string
		ranges []int64
		size   int64
		cuts   []int64
		least  int64
		want   []int64 // lengths of the pieces; nil: refused
	}{
		{"one piece where there is one", []int64{10, 30}, 20, []int64{5, 10}, 0, []int64{20}},
		{"no cuts, no split", []int64{10, 10}, 20, nil, 0, nil},
		{"the longest from the front", []int64{10, 12}, 20, []int64{5, 10, 15}, 0, []int64{10, 10}},
		{"a cut exactly at the room", []int64{10, 10}, 20, []int64{10}, 0, []int64{10, 10}},
		{"the stretch is longer than any range", []int64{10, 10, 10}, 22, []int64{4, 15}, 0, nil},
		{"the cut before the room", []int64{10, 16}, 25, []int64{9, 24}, 0, []int64{9, 16}},
		{"apart where longest first fails", []int64{10, 4, 4, 4}, 22, []int64{4, 8, 12}, 0, []int64{4, 4, 4, 10}},
		{"pieces of at least", []int64{3, 3, 3, 3}, 12, []int64{3, 6, 9}, 4, nil},
		{"the last may be shorter", []int64{6, 2}, 8, []int64{2, 6}, 4, []int64{6, 2}},
		{"apart joins what is too short", []int64{9, 5, 5}, 18, []int64{2, 5, 10}, 3, []int64{5, 5, 8}},
		{"not enough at all", []int64{5, 5}, 20, []int64{5, 10, 15}, 0, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := lineWith(c.ranges...)
			free := l.FreeBytes()
			pieces, ok := Place(l, c.size, c.cuts, c.least)
			if !ok {
				if c.want != nil {
					t.Fatalf("refused; want %v", c.want)
				}
				if l.FreeBytes() != free {
					t.Fatalf("refused, and %d of %d bytes are free", l.FreeBytes(), free)
				}
				return
			}
			var got []int64
			for _, p := range pieces {
				got = append(got, p.Len)
			}
			if !slices.Equal(got, c.want) {
				t.Fatalf("pieces %v, want %v", got, c.want)
			}
		})
	}
}

// TestPlaceRandom checks that pieces cover the body, are split at cuts only and
// take exactly the body's length, and that a refusal takes nothing. It also asks
// that a body cut at every unit is never refused while there is room.
func TestPlaceRandom(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	placed := 0
	for range 5000 {
		lengths := make([]int64, 1+r.IntN(8))
		for i := range lengths {
			lengths[i] = 1 + r.Int64N(20)
		}
		l := lineWith(lengths...)
		free := l.FreeBytes()
		size := 1 + r.Int64N(60)
		every := r.IntN(3) == 0
		var cuts []int64
		for c := int64(1); c < size; c++ {
			if every || r.IntN(4) == 0 {
				cuts = append(cuts, c)
			}
		}
		least := r.Int64N(4)
		if every {
			least = 0
		}
		pieces, ok := Place(l, size, cuts, least)
		if !ok {
			if l.FreeBytes() != free {
				t.Fatal("a refusal took bytes")
			}
			if every && size <= free {
				t.Fatalf("%d bytes that may be cut everywhere were refused with %d free", size, free)
			}
			continue
		}
		placed++
		at := int64(0)
		for i, p := range pieces {
			if p.Off != at || p.Len <= 0 {
				t.Fatalf("piece %d is %+v, want offset %d", i, p, at)
			}
			if at > 0 && !slices.Contains(cuts, at) {
				t.Fatalf("split at %d, cuts %v", at, cuts)
			}
			if i < len(pieces)-1 && p.Len < least {
				t.Fatalf("piece %+v is shorter than %d", p, least)
			}
			at += p.Len
		}
		if at != size || l.FreeBytes() != free-size {
			t.Fatalf("laid %d of %d bytes, free %d of %d", at, size, l.FreeBytes(), free)
		}
		undo(l, pieces) // panics if anything was taken twice
		if l.FreeBytes() != free {
			t.Fatal("not all came back")
		}
	}
	if placed < 1000 {
		t.Fatalf("only %d bodies were placed", placed)
	}
}
