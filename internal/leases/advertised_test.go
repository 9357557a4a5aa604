package leases_test

import (
	"math"
	"math/big"
	"testing"

	"github.com/spillway-db/spillway/internal/leases"
)

func rat(s string) *big.Rat {
	r, _ := new(big.Rat).SetString(s)
	return r
}

func TestAdvertised(t *testing.T) {
	for _, c := range []struct {
		physical int64
		ratio    string
		want     int64 // 0: an error
	}{
		{100, "", 100}, {100, "1", 100}, {100, "1.5", 150}, {99, "0.5", 49}, {3, "1.1", 3}, {10, "1.1", 11},
		{1000, "0.999", 999},
		{math.MaxInt64, "1", math.MaxInt64}, {math.MaxInt64, "0.5", math.MaxInt64 / 2},
		{math.MaxInt64 - 1, "1.0000000000000000001", math.MaxInt64 - 1}, // floats would lose that
		{math.MaxInt64, "1.1", 0}, {1, "0.5", 0}, {0, "1", 0}, {-1, "1", 0}, {1 << 62, "2", 0},
	} {
		var ratio *big.Rat
		if c.ratio != "" {
			ratio = rat(c.ratio)
		}
		got, err := leases.Advertised(c.physical, ratio)
		if (err != nil) != (c.want == 0) || got != c.want {
			t.Errorf("Advertised(%d, %s) = %d, %v; want %d", c.physical, c.ratio, got, err, c.want)
		}
	}
	if _, err := leases.Advertised(10, new(big.Rat)); err == nil {
		t.Error("a ratio of 0: want an error")
	}
}

func FuzzAdvertised(f *testing.F) {
	f.Add(int64(3), int64(2))
	f.Add(int64(1), int64(math.MaxInt64))
	f.Add(int64(math.MaxInt64), int64(1))
	f.Fuzz(func(t *testing.T, num, denom int64) {
		if denom == 0 {
			return
		}
		if n, err := leases.Advertised(1<<40, big.NewRat(num, denom)); err == nil && n <= 0 {
			t.Errorf("Advertised(1<<40, %d/%d) = %d", num, denom, n)
		}
	})
}
