package transfer

import "unsafe"

// addressOf returns where b begins, as a number that keeps nothing alive.
func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
