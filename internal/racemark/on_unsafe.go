//go:build race

package racemark

import (
	"runtime"
	"unsafe"
)

// Enabled says whether this is a build for the race detector.
const Enabled = true

// Read says that all of b is read.
func Read(b []byte) {
	for len(b) > 0 {
		runtime.RaceReadRange(unsafe.Pointer(unsafe.SliceData(b)), min(mark, len(b)))
		b = b[min(page, len(b)):]
	}
}

// Write says that all of b is written.
func Write(b []byte) {
	for len(b) > 0 {
		runtime.RaceWriteRange(unsafe.Pointer(unsafe.SliceData(b)), min(mark, len(b)))
		b = b[min(page, len(b)):]
	}
}
