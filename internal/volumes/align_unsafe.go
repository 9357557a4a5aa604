package volumes

import (
	"unsafe"

	"github.com/spillway-db/spillway/tier"
)

// alignedBytes returns n bytes of the heap that start at a multiple of a page.
func alignedBytes(n int64) []byte {
	b := make([]byte, n+tier.Page)
	skip := (tier.Page - int64(address(b)%tier.Page)) % tier.Page
	return b[skip : skip+n : skip+n]
}

// address is where b starts, to see how it is aligned.
func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
