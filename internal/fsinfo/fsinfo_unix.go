//go:build linux || darwin || freebsd

package fsinfo

import (
	"errors"
	"io/fs"
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
