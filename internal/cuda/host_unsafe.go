package cuda

import (
	"sync/atomic"
	"unsafe"
)

// AddressOf returns where b begins, for memory that is not Go's.
func AddressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// HostBytes returns n bytes of host memory that Calls.AllocHost has allocated, for as
// long as it is not freed.
func HostBytes(addr uintptr, n int64) []byte {
	// The address is the driver's, so the garbage collector has no part in it.
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&addr))), n)
}

// StoreWord writes a word of pinned host memory for which a stream may be waiting with
// WaitValue. The address must be a multiple of 4.
func StoreWord(addr uintptr, v uint32) {
	atomic.StoreUint32((*uint32)(*(*unsafe.Pointer)(unsafe.Pointer(&addr))), v)
}

// RegisterHost pins n bytes at addr, which must not be on Go's heap, for all contexts.
// It takes some tenths of a second for each GiB, and so belongs in Here. The memory
// must be there until UnregisterHost.
func (c *Calls) RegisterHost(addr uintptr, n int64) error {
	const portable = 1
	if err := c.lib.call(&c.lib.sym.hostRegister, addr, uintptr(n), portable); err != nil {
		return err
	}
	c.lib.pinned.add(addr, n)
	return nil
}

// UnregisterHost ends what RegisterHost began, by the address that it was given. No copy
// may be using the memory.
func (c *Calls) UnregisterHost(addr uintptr) error {
	c.lib.pinned.remove(addr)
	return c.lib.call(&c.lib.sym.hostUnregister, addr)
}

// KnowHost records n bytes at addr as pinned, until ForgetHost. Another part of the process has
// registered them.
func (c *Calls) KnowHost(addr uintptr, n int64) { c.lib.pinned.add(addr, n) }

// ForgetHost ends what KnowHost began.
func (c *Calls) ForgetHost(addr uintptr) { c.lib.pinned.remove(addr) }

// Numbers of the driver for questions about an address, and for the answer that it is a device's.
const (
	pointerMemoryType = 2
	pointerNumber     = 7 // of the allocation, or registration
	pointerRangeStart = 11
	pointerRangeSize  = 12
	pointerMapped     = 13
	pointerPool       = 17
	memoryTypeDevice  = 2
)

// HostRegistered reports whether all n > 0 bytes at addr are pinned in one piece, anywhere in the
// process: the driver refuses copies that cross two pieces. If the driver does not answer, it
// returns false.
func (c *Calls) HostRegistered(addr uintptr, n int64) bool {
	last := addr + uintptr(n) - 1
	if start, size, err := c.pointerRange(addr); err == nil {
		return start <= addr && last-start < size
	}
	first, err1 := c.pointer(pointerNumber, addr)
	end, err2 := c.pointer(pointerNumber, last)
	return err1 == nil && err2 == nil && first == end && first != 0
}

// pointer asks about an address; of what drivers do not know they answer nothing.
func (c *Calls) pointer(what, addr uintptr) (answer uint64, err error) { // of which they write the first byte, or more
	err = c.lib.call(&c.lib.sym.pointerAttribute, uintptr(unsafe.Pointer(&answer)), what, addr)
	return answer, err
}

// pointerRange returns the piece of memory that addr lies in.
func (c *Calls) pointerRange(addr uintptr) (start, size uintptr, err error) {
	s, err := c.pointer(pointerRangeStart, addr)
	if err != nil {
		return 0, 0, err
	}
	n, err := c.pointer(pointerRangeSize, addr)
	return uintptr(s), uintptr(n), err
}

// AllocHost allocates n bytes of pinned host memory for all contexts.
func (c *Calls) AllocHost(n int64) (uintptr, error) {
	const portable = 1
	var p uintptr
	if err := c.lib.call(&c.lib.sym.hostAlloc, uintptr(unsafe.Pointer(&p)), uintptr(n), portable); err != nil {
		return 0, err
	}
	c.lib.pinned.add(p, n)
	return p, nil
}

// FreeHost gives memory of AllocHost back.
func (c *Calls) FreeHost(addr uintptr) error {
	c.lib.pinned.remove(addr)
	return c.lib.call(&c.lib.sym.hostFree, addr)
}

// HostDevicePtr returns the address that the device has for pinned host memory.
func (c *Calls) HostDevicePtr(addr uintptr) (Ptr, error) {
	var p Ptr
	err := c.lib.call(&c.lib.sym.hostDevicePointer, uintptr(unsafe.Pointer(&p)), addr, 0)
	return p, err
}
