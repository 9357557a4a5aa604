//go:build !amd64 || race

package sumcopy

const fused = false

func copyBlocks(*[8]uint64, *byte, *byte, uint64) {
	panic("sumcopy: not built for this processor")
}
