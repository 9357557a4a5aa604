//go:build !amd64 && !arm64

package goid

// Living returns a number that no other goroutine has at the same time; one that begins
// later may get it.
func Living() uintptr { return uintptr(ID()) }
