package sim

import (
	"fmt"
	"unsafe"

	"github.com/spillway-db/spillway/tier"
)

// Pointer returns where the n bytes at addr are in the process's memory, for programs that
// are given a device's memory as it is, such as the consumers of package convert/cdevice. It
// means something only while the allocation is there, and whoever uses it is outside of all
// order that streams give.
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
