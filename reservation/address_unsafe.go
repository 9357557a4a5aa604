package reservation

import "unsafe"

// address is where b starts. It names a block of an Allocator; nothing is reached
// through it.
func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
