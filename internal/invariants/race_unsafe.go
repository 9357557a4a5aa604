//go:build race

package invariants

import (
	"runtime"
	"unsafe"
)

const (
	page = 4096
	mark = 64
)

// Race reports whether this is a build for the race detector.
const Race = true

// Reads reports to the race detector that all of b is read.
func Reads(b []byte) {
	for len(b) > 0 {
		runtime.RaceReadRange(unsafe.Pointer(unsafe.SliceData(b)), min(mark, len(b)))
		b = behindPage(b)
	}
}

// Writes is Reads for memory that is written.
func Writes(b []byte) {
	for len(b) > 0 {
		runtime.RaceWriteRange(unsafe.Pointer(unsafe.SliceData(b)), min(mark, len(b)))
		b = behindPage(b)
	}
}

// behindPage returns the part of b that is behind the page in which b begins. So marks lie where
// pages begin, and do not depend on where b does.
func behindPage(b []byte) []byte {
	in := int(uintptr(unsafe.Pointer(unsafe.SliceData(b))) % page)
	return b[min(page-in, len(b)):]
}
