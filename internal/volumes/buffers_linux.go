//go:build !race

package volumes

import (
	"github.com/spillway-db/spillway/internal/extent"
	"golang.org/x/sys/unix"
)

// hugePage is the length of a huge page. On arm64 with large base pages they are longer, and these
// stay small.
const hugePage = 2 << 20

// mapHuge maps n bytes, with huge pages where whole ones fit and the system has them. It returns the
// bytes and the mapping that they are in, or nil if it cannot.
func mapHuge(n int64) (memory, mapping []byte) {
	m, err := unix.Mmap(-1, 0, int(n+hugePage), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, nil
	}
	skip := (hugePage - int64(extent.Address(m)%hugePage)) % hugePage
	memory = m[skip : skip+n]
	if whole := n / hugePage * hugePage; whole > 0 {
		_ = unix.Madvise(memory[:whole], unix.MADV_HUGEPAGE) // small ones do as well
	}
	return memory, m
}

func unmapHuge(mapping []byte) {
	if mapping != nil {
		_ = unix.Munmap(mapping) // it fails only for what is not mapped
	}
}
