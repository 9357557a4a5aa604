// Package histogram counts durations without a lock.
package histogram

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// Summary says how long what was recorded took.
type Summary struct {
	Count int64
	Total time.Duration // of all together
	// P50, P99 and P999 are percentiles, P999 that of 99.9 %. They are at most 1/16 too high.
	P50, P99, P999, Max time.Duration
	// Within has how many took less than so long, for the powers of two of nanoseconds from 4 µs to
	// 18 minutes.
	Within map[time.Duration]int64
}

// The bounds of Summary.Within are 1<<firstBound ns to 1<<lastBound ns: what is below one is in whole
// buckets.
const firstBound, lastBound = 12, 40

// Durations counts durations in buckets whose width is 1/16 of the power of two below them. So a
// percentile is at most 1/16 too high, and the memory is the same for any number of samples. It is
// written here because the libraries that do this lock or need to be locked. It is safe for
// concurrent use.
type Durations struct {
	total   atomic.Int64
	max     atomic.Int64
	buckets [(64 - subBits) << subBits]atomic.Int64 // 7.5 KiB
}

const subBits = 4

// bucketOf is the identity below 32; above, the upper bits are the power of two
// and the lower four those that follow the leading one.
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

// Record counts d; below 0 it is 0.
func (h *Durations) Record(d time.Duration) {
	d = max(0, d)
	for {
		old := h.max.Load()
		if int64(d) <= old || h.max.CompareAndSwap(old, int64(d)) {
			break
		}
	}
	h.total.Add(int64(d))
	h.buckets[bucketOf(uint64(d))].Add(1)
}

// Summary returns what was recorded so far.
func (h *Durations) Summary() Summary {
	var counts [len(h.buckets)]int64
	var s Summary
	for i := range counts {
		counts[i] = h.buckets[i].Load()
		s.Count += counts[i]
	}
	s.Total, s.Max = time.Duration(h.total.Load()), time.Duration(h.max.Load())
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
