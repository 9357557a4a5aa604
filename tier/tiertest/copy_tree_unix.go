//go:build linux || darwin || freebsd

package tiertest

import (
	"errors"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// nextData returns where the first bytes of f from off on that are no hole begin and end.
func nextData(f *os.File, off, size int64) (begin, end int64, err error) {
	begin, err = f.Seek(off, unix.SEEK_DATA)
	if errors.Is(err, syscall.ENXIO) { // only a hole is left
		return size, size, nil
	}
	if err != nil {
		return 0, 0, err
	}
	if end, err = f.Seek(begin, unix.SEEK_HOLE); err != nil {
		return 0, 0, err
	}
	return begin, end, nil
}
