package cdevice

import (
	"runtime"
	"unsafe"
)

// memory is what C may point to until free: objects of Go's that the garbage collector neither
// moves nor frees. They have no pointers of Go's in them, and are zero at first.
type memory struct{ pinned runtime.Pinner }

func (m *memory) free() { m.pinned.Unpin() }

// place makes room for n values of a type without pointers. Its address is 0 if n is.
func place[T any](m *memory, n int) (uintptr, []T) {
	if n == 0 {
		return 0, nil
	}
	values := make([]T, n)
	m.pinned.Pin(&values[0])
	return addressOf(&values[0]), values
}

// placeAll makes room for n structs, and for their addresses, which C calls an array of pointers.
func placeAll[T any](m *memory, n int) (pointers uintptr, structs []T) {
	_, structs = place[T](m, n)
	pointers, at := place[uintptr](m, n)
	for i := range structs {
		at[i] = addressOf(&structs[i])
	}
	return pointers, structs
}

// put copies p; 0 for no bytes.
func (m *memory) put(p []byte) uintptr {
	at, to := place[byte](m, len(p))
	copy(to, p)
	return at
}

// text puts a string that ends with 0.
func (m *memory) text(s string) uintptr { return m.put(append([]byte(s), 0)) }

// textAt reads a string that ends with 0.
func textAt(p uintptr) string {
	n := int64(0)
	for *at[byte](p + uintptr(n)) != 0 {
		n++
	}
	return string(several[byte](p, n))
}

// at returns what is at p, nil for 0. It is not in Go's heap, or else kept alive.
func at[T any](p uintptr) *T { return *(**T)(unsafe.Pointer(&p)) }

// several returns the n values at p.
func several[T any](p uintptr, n int64) []T { return unsafe.Slice(at[T](p), n) }

// addressOf returns where a struct is that C is given. A number is no pointer to Go: of a struct on
// the stack, which moves when it grows, it would soon be wrong. So whatever this is called with
// is in the heap.
func addressOf[T any](p *T) uintptr {
	if escape.never {
		escape.to = unsafe.Pointer(p)
	}
	return uintptr(unsafe.Pointer(p))
}

// escape is what the compiler takes the arguments of addressOf to escape to.
var escape struct {
	never bool
	to    unsafe.Pointer
}
