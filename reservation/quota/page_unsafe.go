package quota

import (
	"sync/atomic"
	"unsafe"
)

// wordOf is the word at a multiple of 8 in a mapped page. Other processes change it.
func wordOf(page []byte, at int) *atomic.Int64 {
	_ = page[at+7]
	return (*atomic.Int64)(unsafe.Pointer(&page[at]))
}
