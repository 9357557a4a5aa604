package sim

import (
	"fmt"
	"unsafe"

	"github.com/spillway-db/spillway/tier"
)

// Pointer returns where the n bytes at addr are in the process's memory. It is for programs that
// get a device's memory as it is, such as the consumers of package convert/cdevice. It is valid
// only while the allocation is there. Accesses through it are not ordered by streams.
func (d *gpu) Pointer(addr tier.Addr, n int64) (uintptr, error) {
	a, err := d.at(addr, max(1, n))
	if err != nil {
		return 0, err
	}
	return uintptr(unsafe.Pointer(unsafe.SliceData(a.b))), nil
}

// AddrOf returns the address of what is at p in the process's memory.
func (d *gpu) AddrOf(p uintptr) (tier.Addr, error) {
	first := uintptr(unsafe.Pointer(unsafe.SliceData(d.arena.bytes)))
	if p < first || p-first >= uintptr(len(d.arena.bytes)) {
		return 0, fmt.Errorf("sim: the memory at %#x is not the device's", p)
	}
	return d.base + tier.Addr(p-first), nil
}
