// Package address says where bytes are in the process's memory, and makes bytes where direct I/O
// wants them. An address is a number here: it keeps nothing alive, and nothing is reached by it.
package address

import "unsafe"

// page is what direct I/O is satisfied with everywhere.
const page = 4096

// Of returns where b begins.
func Of(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// Aligned returns n bytes of the heap that begin at a page.
func Aligned(n int) []byte {
	b := make([]byte, n+page)
	skip := (page - int(Of(b)%page)) % page
	return b[skip : skip+n : skip+n]
}
