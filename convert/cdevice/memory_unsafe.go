package cdevice

import (
	"runtime"
	"unsafe"
)

// memory is what C may point to until free: objects of Go's that the garbage collector neither
// moves nor frees (runtime.Pinner). They have no pointers of Go's in them, as the rules of cgo for
// passing pointers require, and are zero at first. Addresses are stored as uintptr.
type memory struct{ pinned runtime.Pinner }

func (m *memory) free() { m.pinned.Unpin() }

// place allocates n zero values of a type without pointers, pinned until m is freed. It returns
// their address for C and themselves for Go; the address is 0 if n is.
func place[T any](m *memory, n int) (uintptr, []T) {
	if n == 0 {
		return 0, nil
	}
	values := make([]T, n)
	m.pinned.Pin(&values[0])
	return addressOf(&values[0]), values
}

// placeAll allocates n structs and the array of their addresses, as C has children (T **). It
// returns the array's address.
func placeAll[T any](m *memory, n int) (pointers uintptr, structs []T) {
	_, structs = place[T](m, n)
	pointers, at := place[uintptr](m, n)
	for i := range structs {
		at[i] = addressOf(&structs[i])
	}
	return pointers, structs
}

// put copies p into memory of m and returns its address; 0 for no bytes.
func (m *memory) put(p []byte) uintptr {
	at, to := place[byte](m, len(p))
	copy(to, p)
	return at
}

// text copies a string, with a 0 at its end, into memory of m and returns its address.
func (m *memory) text(s string) uintptr { return m.put(append([]byte(s), 0)) }

// textAt copies the string at p, which ends with 0. There is no limit: C strings have no length.
func textAt(p uintptr) string {
	n := int64(0)
	for *at[byte](p + uintptr(n)) != 0 {
		n++
	}
	return string(several[byte](p, n))
}

// at returns what is at p, nil for 0. The memory is C's, or Go memory that is pinned or kept alive.
// It converts through a pointer to p, because vet refuses the direct conversion of a uintptr, which
// is wrong for Go memory that nothing else refers to.
func at[T any](p uintptr) *T { return *(**T)(unsafe.Pointer(&p)) }

// several returns the n values at p as a slice of that memory. The caller must have checked n.
func several[T any](p uintptr, n int64) []T { return unsafe.Slice(at[T](p), n) }

// addressOf returns the address of a struct, for C. A number is no pointer to Go: if the struct
// were on the stack, which moves when it grows, the number would become wrong. So addressOf makes
// its argument escape to the heap, where objects do not move.
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
