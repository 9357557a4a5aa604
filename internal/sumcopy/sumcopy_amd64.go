package sumcopy

import "golang.org/x/sys/cpu"

var fused = cpu.X86.HasAVX2

// copyBlocks copies blocks×Block bytes from src to dst and takes them into acc, and after
// them, if last is 1, the last block of the run. There must be a fence before others
// read dst.
//
//go:noescape
func copyBlocks(acc *[8]uint64, dst, src *byte, blocks, last uint64)

// copyBlocksSub32 is copyBlocks with base subtracted from every 32-bit word.
//
//go:noescape
func copyBlocksSub32(acc *[8]uint64, dst, src *byte, blocks, last uint64, base uint32)

// copyBlocksSub64 is copyBlocks with base subtracted from every 64-bit word.
//
//go:noescape
func copyBlocksSub64(acc *[8]uint64, dst, src *byte, blocks, last uint64, base uint64)

// fence orders the stores so far before those that follow.
func fence()
