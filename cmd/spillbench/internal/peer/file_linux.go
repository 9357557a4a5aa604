package peer

import (
	"os"

	"golang.org/x/sys/unix"
)

// openNameless makes a file in dir that never has a name.
func openNameless(dir string) (*os.File, error) {
	return os.OpenFile(dir, unix.O_TMPFILE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
}

// dropCache drops what the page cache holds of the first n bytes of f, or of all of
// it if n is 0. f must be synced: pages that are not on the disk yet stay.
func dropCache(f *os.File, n int64) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	err = conn.Control(func(fd uintptr) { inner = unix.Fadvise(int(fd), 0, n, unix.FADV_DONTNEED) })
	if err != nil {
		return err
	}
	return inner
}
