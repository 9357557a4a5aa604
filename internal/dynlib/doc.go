// Package dynlib calls functions of C libraries that are looked for when the program runs. So
// one binary serves machines with and without them, and is built with cgo or without.
//
//	Open(path) ──▶ Library ── Find(name) ──▶ address ── Call(address, args) ──▶ result
//
// It is for Linux on amd64 and arm64; elsewhere Open fails with errors.ErrUnsupported.
//
// A Library is a plain value without locks, for concurrent use. Arguments of a call that are
// addresses of Go memory must be kept alive, and where they are, by the caller: a function
// marked go:uintptrescapes does that for conversions in its argument list.
package dynlib

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
