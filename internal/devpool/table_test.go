package devpool_test

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/tier"
)

func TestCharge(t *testing.T) {
	for size, want := range map[int64]int64{
		-1: 0, 0: 0, 1: 512, 512: 512, 513: 1024, math.MaxInt64: math.MaxInt64 / 512 * 512,
	} {
		if got := devpool.Granule(512).Charge(size); got != want {
			t.Errorf("%d bytes are charged as %d, want %d", size, got, want)
		}
	}
}

func TestRegionSize(t *testing.T) {
	b := make([]byte, 10)
	for _, c := range []struct {
		name string
		r    tier.Region
		want int64 // -1: an error
	}{
		{"to the device", tier.Region{Dst: 100, HostSrc: b}, 10},
		{"to the host, with its size", tier.Region{Src: 100, HostDst: b, Size: 10}, 10},
		{"another size", tier.Region{Src: 100, HostDst: b, Size: 9}, -1},
		{"nothing to the host", tier.Region{Src: 100, HostDst: b[:0]}, 0},
		{"both on the host", tier.Region{HostSrc: b, HostDst: b}, -1},
		{"on the device", tier.Region{Dst: 110, Src: 100, Size: 10}, 10},
		{"by one byte too near", tier.Region{Dst: 109, Src: 100, Size: 10}, -1},
		{"by one byte too near, backwards", tier.Region{Dst: 100, Src: 109, Size: 10}, -1},
	} {
		got, err := devpool.RegionSize(c.r)
		if (err != nil) != (c.want < 0) || err == nil && got != c.want {
			t.Errorf("%s: %d, %v, want %d", c.name, got, err, c.want)
		}
	}
}

// TestTableAsModel compares a table with a model that looks at each byte.
func TestTableAsModel(t *testing.T) {
	const end = 400
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	table := devpool.NewTable("model")
	var owner [end]*devpool.Allocation
	for range rounds(20_000) {
		at, n := rng.IntN(end), 1+rng.IntN(40)
		free := at+n <= end
		for i := at; i < min(at+n, end); i++ {
			free = free && owner[i] == nil
		}
		if free && rng.IntN(2) == 0 {
			a := &devpool.Allocation{Addr: tier.Addr(at), Size: int64(1 + rng.IntN(n)), Charge: int64(n)}
			table.ReplaceOrInsert(a)
			for i := range n {
				owner[at+i] = a
			}
		} else if a := owner[at]; a != nil && rng.IntN(3) == 0 {
			table.Delete(a)
			for i := range int(a.Charge) {
				owner[int(a.Addr)+i] = nil
			}
		}
		got, err := table.Find(tier.Addr(at), int64(n))
		want := owner[at]
		if want != nil && int64(at+n) > int64(want.Addr)+want.Size {
			want = nil
		}
		if got != want || (err == nil) != (want != nil) {
			t.Fatalf("seed %d: %d bytes at %d are in %+v (%v), want %+v", seed, n, at, got, err, want)
		}
	}
	if a, err := table.Find(77, 0); a != nil || err != nil {
		t.Errorf("no bytes are in %v, %v", a, err)
	}
	if _, err := table.Find(0, -1); err == nil {
		t.Error("a range of -1 bytes was found")
	}
}
