//go:build linux && (amd64 || arm64)

package dynlib

import (
	"runtime"

	"github.com/ebitengine/purego"
)

// Library is a library that is open.
type Library struct{ handle uintptr }

// Open opens the library that the dynamic linker finds by path, with all libraries that it
// needs. Its symbols are no other library's to find. purego does that without cgo; other
// packages that could have been used need a C compiler for each target.
func Open(path string) (Library, error) {
	runtime.LockOSThread() // the linker keeps for each thread what went wrong
	defer runtime.UnlockOSThread()
	h, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	return Library{h}, err
}

// Find returns a function's address, 0 if there is none.
func (l Library) Find(name string) uintptr {
	fn, err := purego.Dlsym(l.handle, name)
	if err != nil {
		return 0
	}
	return fn
}

// Close gives the library up. Nothing of it may be in use.
func (l Library) Close() { _ = purego.Dlclose(l.handle) }

// Call calls fn and returns what it does. Of a function that returns an int the lower half counts.
func Call(fn uintptr, args []uintptr) uintptr {
	r, _, _ := purego.SyscallN(fn, args...)
	return r
}
