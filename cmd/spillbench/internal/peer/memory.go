package peer

import (
	"math"
	"runtime"
	"runtime/debug"
)

// limitHeap lets the Go heap grow by at most more bytes from what it is now, and
// returns what ends that. A lower limit that is set already stays.
func limitHeap(more int64) (end func()) {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	now := int64(min(m.Sys-m.HeapReleased, math.MaxInt64/2))
	before := debug.SetMemoryLimit(-1)
	debug.SetMemoryLimit(min(before, now+min(more, math.MaxInt64/2)))
	return func() { debug.SetMemoryLimit(before) }
}
