//go:build !linux

package bandwidth

// mapRegion takes memory of the heap: elsewhere there are neither huge pages to ask for nor
// direct I/O that wants aligned addresses.
func mapRegion(n int64) ([]byte, error) { return make([]byte, n), nil }

func unmapRegion([]byte) error { return nil }
