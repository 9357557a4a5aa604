//go:build linux || darwin

package disk

import (
	"math"

	"golang.org/x/sys/unix"
)

// fileLimit is how many files the process may have open. The Go runtime has raised it to
// the hard limit.
func fileLimit() int64 {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil || r.Cur > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(r.Cur)
}
