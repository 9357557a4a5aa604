// Package fsinfo says what the operating system knows about file systems and files.
//
//	Of(path) ──▶ Info    the file system of path: its name, its size, where it keeps files
//	Owner, Device        the owner of a file, and the device that it is on
//
// What a system does not say is errors.ErrUnsupported, not known, or unlimited. The functions
// take no locks and are safe for concurrent use.
package fsinfo

import (
	"math"
	"math/bits"
)

// Info describes a file system.
type Info struct {
	Name   string // "ext4", "xfs", …; a number in hexadecimal if Linux's has no name here
	Free   int64  // bytes that an unprivileged process may still take
	Total  int64  // bytes
	Memory bool   // it keeps its files in memory
	Remote bool   // other machines, or other kernels, may have the pages of its files too
}

// product is a·b, or the largest int64 if that is less: some network file systems claim as much.
func product(a, b uint64) int64 {
	high, low := bits.Mul64(a, b)
	if high != 0 || low > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(low)
}
