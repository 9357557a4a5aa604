package main

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// openAnonymous makes a file in dir that has no name.
func openAnonymous(dir string) (*os.File, error) {
	return os.OpenFile(dir, unix.O_TMPFILE|os.O_WRONLY|unix.O_CLOEXEC, 0o600)
}

// giveName links a file that has no name to path, which must not be there. The
// way over /proc needs no privilege, as the one by an empty path does.
func giveName(f *os.File, path string) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = conn.Control(func(fd uintptr) {
		inner = unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd), unix.AT_FDCWD, path, unix.AT_SYMLINK_FOLLOW)
	})
	if err != nil {
		return err
	}
	return inner
}
