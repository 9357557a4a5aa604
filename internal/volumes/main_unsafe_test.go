package volumes_test

import "unsafe"

// aligned returns n bytes that start at a page.
func aligned(n int64) []byte {
	b := make([]byte, n+page)
	skip := (page - int(uintptr(unsafe.Pointer(unsafe.SliceData(b)))%page)) % page
	return b[skip : int64(skip)+n : int64(skip)+n]
}

// start is where b starts, to see how it is aligned.
func start(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
