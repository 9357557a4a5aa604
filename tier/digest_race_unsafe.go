//go:build race

package tier

import (
	"runtime"
	"unsafe"
)

// read tells the race detector of all bytes at once: each load of a word would tell it of eight.
func read(b []byte) {
	if len(b) > 0 {
		runtime.RaceReadRange(unsafe.Pointer(unsafe.SliceData(b)), len(b))
	}
}
