package input

import (
	"fmt"

	"github.com/apache/arrow-go/v18/arrow/memory"
)

// limitedAllocator allocates from the Go heap and refuses a single allocation
// that is larger than max. It refuses with a panic, as the interface has no
// error; guard makes that an error again. Without it a broken length in a file
// ends the process: the runtime cannot recover from memory that is not there.
type limitedAllocator struct {
	heap memory.GoAllocator
	max  int64
}

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
		panic(fmt.Errorf("it asks for %d bytes at once, and at most %d are allowed", size, a.max))
	}
}
