// Package dynlib calls functions of C libraries that are looked for when the program runs. So
// one binary serves machines with and without them, and is built with cgo or without.
//
//	Open(path) ──▶ Library ── Find(name) ──▶ address ── Call(address, args) ──▶ result
//
// It is for Linux on amd64 and arm64; elsewhere Open fails with errors.ErrUnsupported. purego does
// this without cgo; other packages that could have been used need a C compiler for each target.
//
// A Library is a plain value without locks, for concurrent use. Arguments of a call that are
// addresses of Go memory must be kept alive, and where they are, by the caller: a function
// marked go:uintptrescapes does that for conversions in its argument list.
package dynlib

import (
	"errors"
	"fmt"
	"runtime"
)

// Supported reports whether this system can open libraries.
const Supported = runtime.GOOS == "linux" && (runtime.GOARCH == "amd64" || runtime.GOARCH == "arm64")

// Library is a library that is open.
type Library struct{ handle uintptr }

// Open opens the library that the dynamic linker finds by path, with all libraries that it
// needs. Its symbols are no other library's to find.
func Open(path string) (Library, error) {
	if !Supported {
		return Library{}, fmt.Errorf("on %s/%s: %w", runtime.GOOS, runtime.GOARCH, errors.ErrUnsupported)
	}
	runtime.LockOSThread() // the linker keeps for each thread what went wrong
	defer runtime.UnlockOSThread()
	h, err := open(path)
	return Library{h}, err
}

// Find returns a function's address, 0 if there is none.
func (l Library) Find(name string) uintptr { return find(l.handle, name) }

// Close gives the library up. Nothing of it may be in use.
func (l Library) Close() { closeLibrary(l.handle) }

// Bind makes the function that fn points to call the library's function of that name. It panics
// if there is none. Its calls use reflection, so they are for tests.
func Bind(l Library, name string, fn any) { bind(fn, l.handle, name) }

// Call calls fn and returns what it does. Of a function that returns an int the lower half counts.
func Call(fn uintptr, args []uintptr) uintptr { return call(fn, args) }

// Text returns the text before the first zero byte, looking at no byte behind it: what b is
// made of may not all be there. So it goes byte by byte; bytes.IndexByte reads many at once.
func Text(b []byte) string {
	for i := range b {
		if b[i] == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}
