package leases_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/internal/testseed"
)

func TestLeastLoaded(t *testing.T) {
	seed := testseed.One(t)
	want := []leases.Load{
		{UUID: "b", Bytes: 0, Count: 0},
		{UUID: "a", Bytes: 0, Count: 2},
		{UUID: "d", Bytes: 0, Count: 2},
		{UUID: "z", Bytes: 1, Count: 0},
		{UUID: "c", Bytes: 5, Count: 1},
		{UUID: "a", Bytes: 5, Count: 9},
	}
	rng := rand.New(rand.NewPCG(seed, 2))
	for range 100 {
		loads := slices.Clone(want)
		rng.Shuffle(len(loads), func(i, j int) { loads[i], loads[j] = loads[j], loads[i] })
		before := slices.Clone(loads)
		if got := leases.LeastLoaded(loads); !slices.Equal(got, want) {
			t.Fatalf("LeastLoaded(%v) = %v", before, got)
		}
		if !slices.Equal(loads, before) {
			t.Fatalf("the loads were changed: %v, before %v", loads, before)
		}
	}
	if got := leases.LeastLoaded(nil); len(got) != 0 {
		t.Errorf("of none: %v", got)
	}
}
