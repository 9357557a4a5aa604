//go:build !linux || !(amd64 || arm64)

package dynlib

import (
	"errors"
	"fmt"
	"runtime"
)

// Library is there so that programs compile; none can be opened here.
type Library struct{}

// Open fails.
func Open(string) (Library, error) {
	return Library{}, fmt.Errorf("on %s/%s: %w", runtime.GOOS, runtime.GOARCH, errors.ErrUnsupported)
}

// Find finds nothing.
func (Library) Find(string) uintptr { return 0 }

// Close does nothing.
func (Library) Close() {}

// Call panics: no address can exist here.
func Call(uintptr, []uintptr) uintptr { panic("dynlib: a call without a library") }
