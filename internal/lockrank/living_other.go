//go:build !amd64 && !arm64

package lockrank

// living returns a number that no other goroutine has at the same time; one that begins
// later may get it.
func living() uintptr { return uintptr(GoroutineID()) }
