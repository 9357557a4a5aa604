//go:build linux && (amd64 || arm64)

package dynlib

import "github.com/ebitengine/purego"

func open(path string) (handle uintptr, err error) {
	return purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
}

func find(handle uintptr, name string) uintptr {
	fn, err := purego.Dlsym(handle, name)
	if err != nil {
		return 0
	}
	return fn
}

func closeLibrary(handle uintptr) { _ = purego.Dlclose(handle) }

func bind(fn any, handle uintptr, name string) { purego.RegisterLibFunc(fn, handle, name) }

func call(fn uintptr, args []uintptr) uintptr {
	r, _, _ := purego.SyscallN(fn, args...)
	return r
}
