//go:build linux || darwin

package topology

import (
	"fmt"
	"math"
	"math/bits"
	"syscall"
)

// systemStatfs asks this machine. Free is what is left to an unprivileged
// process.
func systemStatfs(path string) (total, free int64, err error) {
	var s syscall.Statfs_t
	for {
		if err = syscall.Statfs(path, &s); err != syscall.EINTR {
			break
		}
	}
	if err != nil {
		return 0, 0, fmt.Errorf("statfs: %w", err)
	}
	return product(s.Blocks, uint64(s.Bsize)), product(s.Bavail, uint64(s.Bsize)), nil
}

// product is a·b, or the largest int64 if that is less: some network file
// systems claim as much.
func product(a, b uint64) int64 {
	high, low := bits.Mul64(a, b)
	if high != 0 || low > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(low)
}
