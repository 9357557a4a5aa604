//go:build !linux || race

package volumes

// mapHuge returns nil: the race detector does not check mapped memory.
func mapHuge(int64) (memory, mapping []byte) { return nil, nil }

func unmapHuge([]byte) {}
