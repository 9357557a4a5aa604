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

// Fence ends what was copied past the cache: what the calling goroutine does afterwards is
// seen by others only after it. It waits for the stores, so it is not done for each run:
// runs of 64 KiB, each with a fence and its last block outside of the loop, came to 0.75 of
// memmove, and to 0.93 to 1.0 without.
func Fence()
