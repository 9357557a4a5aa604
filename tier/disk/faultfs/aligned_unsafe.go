package faultfs

import (
	"unsafe"

	"github.com/spillway-db/spillway/tier"
)

// aligned returns n bytes that direct I/O takes.
func aligned(n int) []byte {
	b := make([]byte, n+tier.Page)
	skip := (tier.Page - int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))%tier.Page)) % tier.Page
	return b[skip : skip+n : skip+n]
}
