// Package system has what spillbench asks only Linux for: files without names, an empty page cache,
// and memory of huge pages.
//
//	OpenNameless ──▶ *os.File ── GiveName, DropCache
//	MapRegion ──▶ []byte ── UnmapRegion
//
// Elsewhere files fail with errors.ErrUnsupported, and memory is of the heap. The package takes no
// locks. All functions are safe for concurrent use.
package system

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// OpenNameless makes a file in dir that has no name.
func OpenNameless(dir string) (*os.File, error) {
	return os.OpenFile(dir, unix.O_TMPFILE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
}

// GiveName links a file that has no name to path, which must not be there. The way over /proc needs
// no privilege, as the one by an empty path does.
func GiveName(f *os.File, path string) error {
	return control(f, func(fd int) error {
		return unix.Linkat(
			unix.AT_FDCWD,
			fmt.Sprintf("/proc/self/fd/%d", fd),
			unix.AT_FDCWD,
			path,
			unix.AT_SYMLINK_FOLLOW,
		)
	})
}

// DropCache drops what the page cache holds of the first n bytes of f, or of all of it if n is 0. f
// must be synced: pages that are not on the disk yet stay.
func DropCache(f *os.File, n int64) error {
	return control(f, func(fd int) error { return unix.Fadvise(fd, 0, n, unix.FADV_DONTNEED) })
}

// control calls do with the descriptor of f, which stays open meanwhile.
func control(f *os.File, do func(fd int) error) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := conn.Control(func(fd uintptr) { inner = do(int(fd)) }); err != nil {
		return err
	}
	return inner
}

// MapRegion maps n bytes, of huge pages where the kernel has some. The caller must unmap them.
func MapRegion(n int64) ([]byte, error) {
	m, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("mapping %d bytes to compare with: %w", n, err)
	}
	_ = unix.Madvise(m, unix.MADV_HUGEPAGE) // a kernel without them has none for the engine either
	return m, nil
}

// UnmapRegion unmaps what MapRegion returned.
func UnmapRegion(m []byte) error { return unix.Munmap(m) }

// CPUTime returns the processor time that the process has taken, user and system; 0 if it is not
// known.
func CPUTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
