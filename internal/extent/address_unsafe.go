package extent

import (
	"sync/atomic"
	"unsafe"
)

// page is what direct I/O is satisfied with everywhere.
const page = 4096

// Address returns where b begins in the process's memory. It is a number: it keeps nothing alive.
func Address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// Aligned returns n bytes of the heap that begin at a page.
func Aligned(n int) []byte {
	b := make([]byte, n+page)
	skip := (page - int(Address(b)%page)) % page
	return b[skip : skip+n : skip+n]
}

// Touch adds 0 to the first word of each page of b, which begins at a multiple of 4. That makes the
// page present and, being atomic, loses no write at the same time.
func Touch(b []byte) {
	for i := 0; i+4 <= len(b); i += page {
		atomic.AddUint32((*uint32)(unsafe.Pointer(&b[i])), 0)
	}
}
