package lookup

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// TestFindsTheFirst searches lists that grow, in which some keys are there twice.
func TestFindsTheFirst(t *testing.T) {
	for _, n := range []int{0, 1, few, few + 1, 3 * few, 1000} {
		rng := rand.New(rand.NewPCG(uint64(n), 1))
		var list []int
		var table Table[int]
		for range n {
			list = append(list, rng.IntN(2*n))
			for range rng.IntN(4) {
				k := rng.IntN(2 * n)
				if at, want := table.Of(list, k), slices.Index(list, k); at != want {
					t.Fatalf("%d of %d items: found at %d, want %d", k, len(list), at, want)
				}
			}
		}
		if at := table.Of(list, -1); at != -1 {
			t.Errorf("what is not in a list of %d was found at %d", n, at)
		}
	}
}

// TestStepsAreLinear looks for each item of a list that is complete, and of one that grows.
func TestStepsAreLinear(t *testing.T) {
	counted := func(n int, grows bool) int64 {
		list := make([]int, n)
		for i := range list {
			list[i] = n - i
		}
		before := Steps()
		var table Table[int]
		for i, k := range list {
			part := list
			if grows {
				part = list[:i]
			}
			if at := table.Of(part, k); at != i && !grows || grows && at != -1 {
				t.Fatalf("item %d of %d was found at %d", i, n, at)
			}
		}
		return Steps() - before
	}
	for _, grows := range []bool{false, true} {
		one, four := counted(1000, grows), counted(4000, grows)
		if one < 1000 || four > 5*one || four > 12*4000 {
			t.Errorf("grows %v: %d steps for 1000 items, %d for 4000", grows, one, four)
		}
	}
}

// TestShortListsAllocateNothing: a short list has no table.
func TestShortListsAllocateNothing(t *testing.T) {
	short := []int{1, 2, 3, 4, 5, 6, 7, 8}
	if n := testing.AllocsPerRun(100, func() {
		var many Table[int]
		for range 100 {
			many.Find(len(short), func(i int) int { return short[i] }, 8)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
