// Package histogram counts durations.
package histogram

import (
	"math/bits"
	"sync"
	"time"
)

// Summary describes the durations that were recorded.
type Summary struct {
	Count int64
	Total time.Duration // their sum
	// P50, P99 and P999 are percentiles, P999 that of 99.9 %. They are at most 1/16 too high.
	P50, P99, P999, Max time.Duration
	// Within maps bounds to how many durations are below them. The bounds are the powers of two of
	// nanoseconds from 4 µs to 18 minutes.
	Within map[time.Duration]int64
}

// The bounds of Summary.Within are 1<<firstBound ns to 1<<lastBound ns. Each is a bound of buckets.
const firstBound, lastBound = 12, 40

// Durations counts durations in buckets whose width is 1/16 of the power of two below them. So a
// percentile is at most 1/16 too high, and the memory is the same for any number of samples. It is
// safe for concurrent use.
type Durations struct {
	mu      sync.Mutex
	total   time.Duration
	max     time.Duration
	buckets [(64 - subBits) << subBits]int64 // 7.5 KiB
}

const subBits = 4

// bucketOf returns the bucket of v: v itself below 32. Above, the upper bits of the bucket are the
// power of two, and the lower four are those that follow the leading one of v.
func bucketOf(v uint64) int {
	if v < 1<<subBits {
		return int(v)
	}
	shift := bits.Len64(v) - 1 - subBits
	return (shift+1)<<subBits | int(v>>shift)&(1<<subBits-1)
}

// upperOf returns the largest value in bucket i.
func upperOf(i int) int64 {
	if i < 1<<subBits {
		return int64(i)
	}
	shift := i>>subBits - 1
	return int64((uint64(i)&(1<<subBits-1)|1<<subBits)<<shift + 1<<shift - 1)
}

// Record counts d, or 0 if it is below 0.
func (h *Durations) Record(d time.Duration) {
	d = max(0, d)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.max = max(h.max, d)
	h.total += d
	h.buckets[bucketOf(uint64(d))]++
}

// Summary describes the durations that were recorded so far.
func (h *Durations) Summary() Summary {
	h.mu.Lock()
	s, counts := Summary{Total: h.total, Max: h.max}, h.buckets
	h.mu.Unlock()
	for _, n := range counts {
		s.Count += n
	}
	quantile := func(perMille int64) time.Duration {
		rank := (s.Count*perMille + 999) / 1000
		for i, n := range counts {
			if rank -= n; rank <= 0 {
				return min(time.Duration(upperOf(i)), s.Max)
			}
		}
		return s.Max
	}
	if s.Count > 0 {
		s.P50, s.P99, s.P999 = quantile(500), quantile(990), quantile(999)
	}
	s.Within = make(map[time.Duration]int64, lastBound-firstBound+1)
	below, next := int64(0), 0
	for i := firstBound; i <= lastBound; i++ {
		for end := bucketOf(1 << i); next < end; next++ {
			below += counts[next]
		}
		s.Within[1<<i] = below
	}
	return s
}
