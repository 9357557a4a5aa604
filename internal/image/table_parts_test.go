package image

import (
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// TestBetween: the copies between the parts of two tables are those that a copy by way of a body
// makes, whatever the parts of either are, in one window after the other.
func TestBetween(t *testing.T) {
	for seed := range testseed.Each(t, testseed.Rounds(300, 60)) {
		rng := rand.New(rand.NewPCG(seed, 1))
		random := func() (parts Parts, memory map[int64]int64) { // by place in the body: the address of a byte
			memory = make(map[int64]int64)
			at, addr := int64(0), int64(rng.IntN(1000))
			for range rng.IntN(6) {
				at += int64(rng.IntN(3))
				n := 1 + int64(rng.IntN(9))
				parts = append(parts, Part{Off: at, N: n, Addr: tier.Addr(addr)})
				for i := range n {
					memory[at+i] = addr + i
				}
				at, addr = at+n, addr+n+int64(rng.IntN(50))
			}
			return parts, memory
		}
		dst, to := random()
		src, from := random()
		want := make(map[int64]int64)
		for at, addr := range to {
			if s, ok := from[at]; ok {
				want[addr] = s
			}
		}
		got := make(map[int64]int64)
		for off, n := int64(0), 1+rng.Int64N(70); off < 70; off += n {
			copies, bytes := Between(dst, src, off, n)
			for _, c := range copies {
				for i := range c.Size {
					got[int64(c.Dst)+i] = int64(c.Src) + i
				}
				bytes -= c.Size
			}
			if bytes != 0 {
				t.Errorf("seed %d: %d bytes are counted and not copied", seed, bytes)
			}
		}
		if !maps.Equal(got, want) {
			t.Fatalf("seed %d: from %v to %v: %v, want %v", seed, src, dst, got, want)
		}
	}
}
