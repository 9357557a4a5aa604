// Package system has the functions of spillbench that need Linux: files without names, dropping pages
// from the page cache, and memory of huge pages.
//
//	OpenNameless ──▶ *os.File ── GiveName, DropCache
//	MapRegion ──▶ []byte ── UnmapRegion
//
// On other systems the functions for files return errors.ErrUnsupported, and MapRegion returns memory
// of Go's heap. The package takes no locks. All functions are safe for concurrent use; those for a
// file must not run while it is closed.
package system

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// OpenNameless creates a file in dir that has no name.
func OpenNameless(dir string) (*os.File, error) {
	return os.OpenFile(dir, unix.O_TMPFILE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
}

// GiveName gives a file without a name the name path, which must not exist. It uses the file's link
// in /proc, because linkat with AT_EMPTY_PATH needs a privilege.
func GiveName(f *os.File, path string) error {
	link := fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	return unix.Linkat(unix.AT_FDCWD, link, unix.AT_FDCWD, path, unix.AT_SYMLINK_FOLLOW)
}

// DropCache drops the first n bytes of f, or all of it if n is 0, from the page cache. Pages that have
// not been written to the disk stay, so the caller must sync f first.
func DropCache(f *os.File, n int64) error {
	return unix.Fadvise(int(f.Fd()), 0, n, unix.FADV_DONTNEED)
}

// MapRegion maps n bytes, in huge pages if the kernel has some. The caller must unmap them.
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
