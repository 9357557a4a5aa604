package bandwidth

import (
	"fmt"

	"golang.org/x/sys/unix"
)

func mapRegion(n int64) ([]byte, error) {
	m, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("bandwidth: mapping %d bytes to compare with: %w", n, err)
	}
	_ = unix.Madvise(m, unix.MADV_HUGEPAGE) // a kernel without them has none for the engine either
	return m, nil
}

func unmapRegion(m []byte) error { return unix.Munmap(m) }
