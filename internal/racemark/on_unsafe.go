//go:build race

package racemark

import (
	"runtime"
	"unsafe"
)

const (
	page = 4096
	mark = 64
)

// Enabled reports whether this is a build for the race detector.
const Enabled = true

// Read says that all of b is read.
func Read(b []byte) {
	for len(b) > 0 {
		runtime.RaceReadRange(unsafe.Pointer(unsafe.SliceData(b)), min(mark, len(b)))
		b = behindPage(b)
	}
}

// Write says that all of b is written.
func Write(b []byte) {
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
