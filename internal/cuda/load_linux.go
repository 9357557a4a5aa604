//go:build linux && (amd64 || arm64)

package cuda

import "github.com/ebitengine/purego"

// loader opens a library of the system. purego does that without cgo; other
// packages that could have been used need a C compiler for each target.
type loader struct{ handle uintptr }

func openLibrary(path string) (loader, error) {
	h, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	return loader{h}, err
}

// find returns a function's address, 0 if there is none.
func (l loader) find(name string) uintptr {
	fn, err := purego.Dlsym(l.handle, name)
	if err != nil {
		return 0
	}
	return fn
}

// close gives a library up of which nothing was called.
func (l loader) close() { _ = purego.Dlclose(l.handle) }

// invoke calls fn and returns its int.
func invoke(fn uintptr, args []uintptr) Code {
	r, _, _ := purego.SyscallN(fn, args...)
	return Code(int32(r))
}
