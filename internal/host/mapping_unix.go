//go:build (linux || darwin || freebsd) && !race

package host

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/invariants"
)

// poison reports whether freed extents are made unreadable.
const poison = invariants.Enabled

// onHeap says that the arena is Go memory.
const onHeap = false

// mapped is anonymous private memory.
type mapped struct {
	whole []byte // what mmap returned
	mem   []byte // the part that starts at a multiple of step
}

// reserve maps size bytes. Nothing is committed by it: with MAP_NORESERVE the
// range counts only as far as its pages are touched.
func reserve(size int64) (Mapping, error) {
	if int64(int(size+step)) != size+step {
		return nil, fmt.Errorf("more than the addresses of this machine")
	}
	whole, err := unix.Mmap(-1, 0, int(size+step), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_ANON|unix.MAP_PRIVATE|noReserve)
	if err != nil {
		return nil, err
	}
	skip := (step - int64(extent.Address(whole)%step)) % step
	return &mapped{whole: whole, mem: whole[skip : skip+size : skip+size]}, nil
}

func (m *mapped) Bytes() []byte         { return m.mem }
func (m *mapped) hide(b []byte) error   { return unix.Mprotect(b, unix.PROT_NONE) }
func (m *mapped) show(b []byte) error   { return unix.Mprotect(b, unix.PROT_READ|unix.PROT_WRITE) }
func (m *mapped) unlock(b []byte) error { return unix.Munlock(b) }
func (m *mapped) Release() error        { return unix.Munmap(m.whole) }
