//go:build !linux || !(amd64 || arm64)

package dynlib

// Without an open library nobody has a handle, or an address to call.
const unreachable = "dynlib: a call without a library"

func open(string) (handle uintptr, err error) { panic(unreachable) }
func find(uintptr, string) uintptr            { return 0 }
func closeLibrary(uintptr)                    {}
func bind(any, uintptr, string)               { panic(unreachable) }
func call(uintptr, []uintptr) uintptr         { panic(unreachable) }
