//go:build linux || darwin || freebsd

package fsinfo

import (
	"errors"
	"io/fs"
	"math"
	"syscall"

	"golang.org/x/sys/unix"
)

// statfs is the system call.
func statfs(path string) (st unix.Statfs_t, err error) {
	for {
		if err = unix.Statfs(path, &st); !errors.Is(err, unix.EINTR) {
			return st, err
		}
	}
}

// Device returns the device id of the file system that a file is on, if that is known.
func Device(info fs.FileInfo) (id uint64, known bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return uint64(st.Dev), true // it is narrower on some systems
}

// OpenLimit returns how many files the process may have open, the largest int64 if that is not
// known. The Go runtime has raised it to the hard limit.
func OpenLimit() int64 {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil || uint64(r.Cur) > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(r.Cur)
}
