package input

import (
	"fmt"

	"github.com/apache/arrow-go/v18/arrow/memory"
)

// limitedAllocator allocates from the Go heap and refuses a single allocation
// that is larger than max, or for which there is no room. It refuses with a panic, as the
// interface has no error; guard makes that an error again. Without it a broken length in a
// file ends the process: the runtime cannot recover from memory that is not there.
type limitedAllocator struct {
	heap memory.GoAllocator
	max  int64
	room func(bytes int64) error // nil: there is always room

	tooLarge bool // an allocation was larger than max

	noRoom error // what room refused with: some readers make a text of it

	// elsewhere is set while a decoder may allocate on goroutines of its own: nothing could
	// catch a panic there.
	elsewhere bool
}

// refusal is what an allocator panics with.
type refusal struct{ error }

// Unwrap returns the reason.
func (r refusal) Unwrap() error { return r.error }

func (a *limitedAllocator) Allocate(size int) []byte {
	a.check(size)
	return a.heap.Allocate(size)
}

func (a *limitedAllocator) Reallocate(size int, b []byte) []byte {
	a.check(size)
	return a.heap.Reallocate(size, b)
}

func (a *limitedAllocator) Free(b []byte) { a.heap.Free(b) }

func (a *limitedAllocator) check(size int) {
	if size < 0 || int64(size) > a.max {
		a.tooLarge = true
		panic(refusal{fmt.Errorf("it asks for %d bytes at once, and at most %d are allowed", size, a.max)})
	}
	if a.room == nil || a.elsewhere {
		return
	}
	if err := a.room(int64(size)); err != nil {
		a.noRoom = err
		panic(refusal{err})
	}
}
