//go:build unix

package volumes

import (
	"io/fs"
	"math"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// ownerOf returns the owner of a file, if that is known. It is called only where locks are: without
// them no directory is taken over.
func ownerOf(info fs.FileInfo) (uid uint32, known bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || runtime.GOOS != "linux" {
		return 0, false
	}
	return st.Uid, true
}

// fileLimit is how many files the process may have open. The Go runtime has raised it to
// the hard limit.
func fileLimit() int64 {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil || uint64(r.Cur) > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(r.Cur)
}
