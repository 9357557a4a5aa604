package host

import (
	"fmt"
	"testing"

	"github.com/spillway-db/spillway/tier"
)

// BenchmarkSmall is what a small memory costs to have and to free, one at a time and
// a thousand at once. 4096 and 8192 bytes are whole pages, as everything was before
// there were slabs: the limit beside the result.
func BenchmarkSmall(b *testing.B) {
	for _, size := range []int64{64, 256, 1000, 3000, 6000, 4096, 8192} {
		for _, n := range []int{1, 1024} {
			b.Run(fmt.Sprintf("%dB/live=%d", size, n), func(b *testing.B) {
				a := open(b, Config{Capacity: 256 << 20, Node: -1})
				ms := make([]tier.Memory, 0, n)
				b.ReportAllocs()
				for b.Loop() {
					ms = ms[:0]
					for range n {
						m, err := a.Alloc(size, nil)
						if err != nil {
							b.Fatal(err)
						}
						ms = append(ms, m)
					}
					for _, m := range ms {
						a.Free(m, func() {})
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/memory")
			})
		}
	}
}
