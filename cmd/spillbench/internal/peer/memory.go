package peer

import (
	"fmt"
	"math"
	"runtime"
	"runtime/debug"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/zeebo/xxh3"
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

// touch reads every byte of every Arrow buffer of rec and returns a digest of them,
// so that nothing that a side put off until somebody looks stays undone. It hashes
// with XXH3, which costs less than reading the memory does.
func touch(rec arrow.RecordBatch) uint64 {
	d := uint64(rec.NumRows())
	for _, col := range rec.Columns() {
		d = touchData(d, col.Data())
	}
	return d
}

func touchData(d uint64, data arrow.ArrayData) uint64 {
	for _, b := range data.Buffers() {
		d *= 0x9e3779b97f4a7c15 // odd, so that the place of each buffer counts and nothing is lost
		if b != nil {
			d += xxh3.Hash(b.Bytes())
		}
	}
	for _, child := range data.Children() {
		d = touchData(d, child)
	}
	// The interface of a missing dictionary may hold a nil pointer; the type says whether there is one.
	if dict, ok := data.DataType().(*arrow.DictionaryType); ok && dict != nil {
		d = touchData(d, data.Dictionary())
	}
	return d
}

// checkDigest compares what a measured pass touched with what the verified one did.
func checkDigest(side string, got, want uint64) error {
	if got == want {
		return nil
	}
	return &MismatchError{side, "all batches together", fmt.Errorf("digest %016x, and %016x when they were compared with the source", got, want)}
}
