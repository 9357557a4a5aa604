//go:build !linux || race

package seal

// mapHuge says that there is no such memory: the race detector does not see what is mapped.
func mapHuge(int64) (memory, mapping []byte) { return nil, nil }

func unmapHuge([]byte) error { return nil }
