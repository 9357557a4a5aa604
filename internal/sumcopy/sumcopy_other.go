//go:build !amd64

package sumcopy

const fused = false

func copyBlocks(*[8]uint64, *byte, *byte, uint64, uint64)              { panic("unreachable") }
func copyBlocksSub32(*[8]uint64, *byte, *byte, uint64, uint64, uint32) { panic("unreachable") }
func copyBlocksSub64(*[8]uint64, *byte, *byte, uint64, uint64, uint64) { panic("unreachable") }

// Fence does nothing: nothing is copied past the cache.
func Fence() {}
