package histogram

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func TestBucketsCoverEverything(t *testing.T) {
	values := []uint64{0, 1, 15, 16, 17, 31, 32, 33, 63, 64, math.MaxInt64 - 1, math.MaxInt64}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 10_000 {
		values = append(values, rng.Uint64()>>(1+rng.IntN(63)))
	}
	for _, v := range values {
		i := bucketOf(v)
		if upper := uint64(upperOf(i)); upper < v || upper-v > v/16 {
			t.Errorf("%d is in bucket %d, which ends at %d", v, i, upper)
		}
		if i > 0 && uint64(upperOf(i-1)) >= v {
			t.Errorf("%d is in bucket %d though the one before ends at %d", v, i, upperOf(i-1))
		}
	}
	if n := len(Durations{}.buckets); bucketOf(math.MaxInt64) != n-1 {
		t.Errorf("the last of %d buckets is never used", n)
	}
}

func TestPercentiles(t *testing.T) {
	var h Durations
	rng := rand.New(rand.NewPCG(3, 4))
	var all []time.Duration
	for range 5000 {
		d := time.Duration(math.Exp(rng.Float64() * 25))
		all = append(all, d)
		h.Record(d)
	}
	h.Record(-1) // a clock that was set back
	all = append(all, 0)
	slices.Sort(all)
	s := h.Summary()
	var total time.Duration
	for _, d := range all {
		total += d
	}
	if s.Count != 5001 || s.Max != all[5000] || s.Total != total {
		t.Errorf("%+v; want 5001 up to %v, %v together", s, all[5000], total)
	}
	for name, p := range map[string][2]time.Duration{"P50": {s.P50, all[2500]}, "P99": {s.P99, all[4950]}, "P999": {s.P999, all[4995]}} {
		if p[0] < p[1] || p[0] > p[1]+p[1]/16 {
			t.Errorf("%s is %v; want %v or up to a sixteenth more", name, p[0], p[1])
		}
	}
}

func TestOnePercentile(t *testing.T) {
	var h Durations
	h.Record(time.Second)
	if s := h.Summary(); s.Count != 1 || s.Total != time.Second || s.P50 != time.Second || s.P99 != time.Second ||
		s.P999 != time.Second ||
		s.Max != time.Second {
		t.Errorf("%+v", s)
	}
}

// Within counts what is less than its bounds, exactly.
func TestWithin(t *testing.T) {
	var h Durations
	rng := rand.New(rand.NewPCG(5, 6))
	var all []time.Duration
	for range 5000 {
		d := time.Duration(math.Exp(rng.Float64() * 30))
		if rng.IntN(2) == 0 {
			d = 1<<rng.IntN(43) + time.Duration(rng.IntN(3)-1) // about a bound
		}
		all = append(all, d)
		h.Record(d)
	}
	within := h.Summary().Within
	if len(within) != 29 || within[4096] == 0 || within[1<<40] == 0 || within[1<<40] == 5000 {
		t.Error(within)
	}
	for bound, have := range within {
		want := int64(0)
		for _, d := range all {
			if d < bound {
				want++
			}
		}
		if have != want {
			t.Errorf("%d are below %v, not %d", want, bound, have)
		}
	}
}
