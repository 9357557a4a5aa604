package cdevice

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// memory is what C may point to for as long as it likes: mapped, so that neither Go's garbage
// collector nor C's allocator manages it. It is zero at first. If mapping fails, err is set, and
// what is taken from then on is Go's: it can be written, and must not be given to C.
type memory struct {
	blocks [][]byte
	rest   []byte
	err    error
}

const blockSize = 16 << 10

// take returns n bytes, aligned to 8.
func (m *memory) take(n int) (uintptr, []byte) {
	n = (n + 7) &^ 7
	if n > len(m.rest) {
		size := (n + blockSize - 1) / blockSize * blockSize
		b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			m.err, m.rest = fmt.Errorf("cdevice: mapping %d bytes: %w", n, err), make([]byte, size)
		} else {
			m.blocks, m.rest = append(m.blocks, b), b
		}
	}
	b := m.rest[:n:n]
	m.rest = m.rest[n:]
	return uintptr(unsafe.Pointer(unsafe.SliceData(b))), b
}

// free gives everything back.
func (m *memory) free() {
	for _, b := range m.blocks {
		_ = unix.Munmap(b) // it is what was mapped
	}
	m.blocks, m.rest = nil, nil
}

// put copies p to memory of C's; 0 for no bytes.
func (m *memory) put(p []byte) uintptr {
	if len(p) == 0 {
		return 0
	}
	a, b := m.take(len(p))
	copy(b, p)
	return a
}

// text puts a string that ends with 0.
func (m *memory) text(s string) uintptr { return m.put(append([]byte(s), 0)) }

// place makes room for n values of a type without pointers.
func place[T any](m *memory, n int) (uintptr, []T) {
	if n == 0 {
		return 0, nil
	}
	var t T
	a, b := m.take(n * int(unsafe.Sizeof(t)))
	return a, unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), n)
}

// placeAll makes room for n structs, and for their addresses, which C calls an array of pointers.
func placeAll[T any](m *memory, n int) (pointers uintptr, structs []T) {
	first, structs := place[T](m, n)
	pointers, at := place[uintptr](m, n)
	for i := range structs {
		at[i] = first + uintptr(i)*unsafe.Sizeof(structs[i])
	}
	return pointers, structs
}

// at returns what is at p, which is not 0 and not in Go's heap, or else kept alive.
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

// textMost is how long a name or a format may be.
const textMost = 1 << 20

// textAt reads up to the 0; false if there is none within textMost.
func textAt(p uintptr) (string, bool) {
	for n := uintptr(0); n < textMost; n++ {
		if *at[byte](p + n) == 0 {
			return string(several[byte](p, int64(n))), true
		}
	}
	return "", false
}
