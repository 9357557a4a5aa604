// Package arrowmem lets arrow-go build its arrays in reserved host memory. Allocator is Arrow's
// memory.Allocator over a reservation. Work is an operator's own memory, which grows, and shrinks
// when other requests wait for room.
//
//	reservation.Reservation ── Alloc ──▶ Allocator ──▶ builders, readers, kernels of arrow-go
//	                                        │
//	                                        │ no memory:
//	                                        ├── of New: panics, and Guard returns the error
//	                                        └── of Work: uses the Go heap, and Work.Err returns the error
//
// The mutex of an Allocator has the rank Reservation. It is not held while anything is allocated,
// released or called.
package arrowmem

import (
	"cmp"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Allocator is Arrow's memory.Allocator over a reservation in host memory: arrays are built within
// the promise, and count in the space's books until they are released.
//
// Arrow's interface has no errors. So Allocate and Reallocate of an Allocator that New returned
// panic when there is no memory, and Guard turns these panics into errors. The panic's value is an
// error that wraps the one of reservation.Reservation.Alloc. The Allocator of a Work never panics
// for want of memory: it allocates from the Go heap then.
//
// The caller of Allocate owns the memory until Free. It may outlive the reservation. Release
// returns unused bytes at once, and allocated ones when they are freed. Nothing can be allocated
// from the reservation after it. Memory is zeroed, and aligned to 64 bytes.
//
// A builder whose allocation failed still has the memory that it had before; its Release frees
// that. Builders of binary and string views have lost a buffer by then. Close, when nothing that
// was allocated is in use any more, frees the rest.
//
// An Allocator is safe for concurrent use: builders in several goroutines may share one. It has no
// goroutine of its own. To find the place of an allocation that was not freed, wrap it in arrow-go's
// memory.NewCheckedAllocator.
type Allocator struct {
	r           *reservation.Reservation
	unsupported error        // why the reservation has no memory for arrays; nil in host memory
	heap        *HeapCounter // of a Work; nil: no memory is a panic
	closed      atomic.Bool

	mu struct {
		lockrank.Mutex[lockrank.Reservation]
		blocks   map[*byte]*block // by their addresses
		misused  error            // the first call with a wrong size, or with memory of others
		heap     int64            // bytes of the blocks on the Go heap
		overflow error            // why the last block went to the Go heap; nil after a Grow that covers all of them
	}
}

// block is allocated memory.
type block struct {
	buf   *tier.Buffer // nil if the Go heap has it
	bytes []byte       // all of it, also what is not in use after it shrank in place
}

var _ memory.Allocator = (*Allocator)(nil)

// UnfreedError reports memory that was still allocated when an Allocator was closed.
type UnfreedError struct {
	Space       tier.ID
	Bytes       int64
	Allocations int
}

func (e *UnfreedError) Error() string {
	return fmt.Sprintf("arrowmem: %s: %d bytes of %d allocations were not freed", e.Space, e.Bytes, e.Allocations)
}

// New returns an allocator of the bytes that r promises; the caller still owns r. If r is in other
// than host memory, the error is tier.ErrNotSupported.
func New(r *reservation.Reservation) (*Allocator, error) {
	if r == nil {
		return nil, fmt.Errorf("arrowmem: %w", tier.ErrReleased)
	}
	a := newAllocator(r, nil)
	if a.unsupported != nil {
		return nil, a.unsupported
	}
	return a, nil
}

func newAllocator(r *reservation.Reservation, heap *HeapCounter) *Allocator {
	a := &Allocator{r: r, heap: heap}
	a.mu.blocks = make(map[*byte]*block)
	if s := r.Space(); !s.Kind().IsMemory() {
		a.unsupported = fmt.Errorf("arrowmem: %s: %w: only host memory has addresses for arrays",
			s.ID(), tier.ErrNotSupported)
	}
	return a
}

// Allocate returns size zeroed bytes; nil for 0, and for a negative size, which is an error of
// Close. Like Reservation.Alloc it does not wait for releases. It panics, for Guard, if the
// reservation has no room for them.
func (a *Allocator) Allocate(size int) []byte {
	if size < 0 {
		a.misuse("allocate", size)
	}
	if size <= 0 {
		return nil
	}
	b, err := a.take(size, true)
	if err != nil {
		panic(&refusal{err})
	}
	return b
}

// take allocates size zeroed bytes and enters them as a block. Memory comes from the reservation, or
// else, for a Work if mayOverflow is set, from the Go heap.
func (a *Allocator) take(size int, mayOverflow bool) ([]byte, error) {
	b, err := new(block), a.unsupported
	if a.closed.Load() {
		err = fmt.Errorf("arrowmem: allocate: %w", tier.ErrClosed)
	}
	if err == nil {
		b.buf, err = a.r.Alloc(int64(size))
	}
	switch {
	case err == nil:
		b.bytes = b.buf.Memory().(tier.HostMemory).Extents()[0]
		clear(b.bytes)
	case a.heap == nil || !mayOverflow:
		return nil, err
	default:
		b.bytes = memory.NewGoAllocator().Allocate(size)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.blocks[&b.bytes[0]] = b
	if err != nil {
		a.mu.overflow = err
		a.countHeapLocked(size)
	}
	return b.bytes[:size:size], nil
}

func (a *Allocator) countHeapLocked(n int) {
	a.mu.heap += int64(n)
	a.heap.add(int64(n))
}

// Reallocate makes b, which Allocate or Reallocate returned, size bytes long. It keeps the contents
// as far as they fit, and zeroes the rest. Usually it allocates other memory and frees b; for a
// moment both are charged. It panics, for Guard, if there is no room for that; b is unchanged then.
// Shrinking never fails: it is in place if there is no room, or if little would be saved. An empty b
// is allocated, and a size of 0 or less frees b.
func (a *Allocator) Reallocate(size int, b []byte) []byte {
	if size <= 0 || cap(b) == 0 {
		a.Free(b)
		return a.Allocate(size)
	}
	a.mu.Lock()
	old := a.mu.blocks[&b[:1][0]]
	a.mu.Unlock()
	var next []byte
	switch {
	case old == nil || size > len(old.bytes):
		next = a.Allocate(size)
	case size <= len(old.bytes)*3/4 && int64(size) <= a.r.Unused():
		next, _ = a.take(size, false)
	}
	if next == nil {
		clear(old.bytes[min(cap(b), size):size])
		return old.bytes[:size:size]
	}
	copy(next, b[:cap(b)])
	a.Free(b)
	return next
}

// Free frees b, which Allocate or Reallocate returned. Memory that the allocator did not allocate,
// or that was freed before, changes nothing. Close returns the first such error, which matches
// tier.ErrReleased.
func (a *Allocator) Free(b []byte) {
	if cap(b) == 0 {
		return
	}
	at := &b[:1][0]
	a.mu.Lock()
	old := a.mu.blocks[at]
	delete(a.mu.blocks, at)
	if old != nil && old.buf == nil {
		a.countHeapLocked(-len(old.bytes))
	}
	a.mu.Unlock()
	if old == nil {
		a.misuse("free", len(b))
		return
	}
	_ = old.buf.Release() // the only release: the goroutine that took it out of the table owns it
}

// misuse keeps the first error of a call with a negative size, or with memory that is not the
// allocator's, for Close.
func (a *Allocator) misuse(op string, size int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.misused = cmp.Or(a.mu.misused, fmt.Errorf(
		"arrowmem: cannot %s %d bytes: a wrong size, or memory that was not allocated here, or %w",
		op, size, tier.ErrReleased))
}

// Close ends allocation and frees all memory that is left, which must not be used any more. A
// caller whose arrays live longer closes the allocator after them, or not at all. Close reports
// such memory as an *UnfreedError, and the first call with memory that was not the allocator's. The
// reservation is untouched. A second Close returns tier.ErrClosed.
func (a *Allocator) Close() error {
	if a.closed.Swap(true) {
		return tier.ErrClosed
	}
	a.mu.Lock()
	left, err := a.mu.blocks, a.mu.misused
	a.mu.blocks = make(map[*byte]*block)
	a.mu.Unlock()
	if len(left) == 0 {
		return err
	}
	e := &UnfreedError{Space: a.r.Space().ID(), Allocations: len(left)}
	for _, b := range left {
		e.Bytes += int64(len(b.bytes))
		_ = b.buf.Release() // as in Free
	}
	return errors.Join(err, e)
}

// refusal is the value that an Allocator panics with, so that Guard can distinguish its panics from
// others.
type refusal struct{ error }

func (r *refusal) Unwrap() error { return r.error }

// Guard calls f and returns its error. If f panics because an Allocator had no memory for it, Guard
// returns that as an error, which wraps a *reservation.ExceededError, a *tier.NoSpaceError,
// tier.ErrReleased or tier.ErrClosed. Every other panic goes on, and so does runtime.Goexit.
//
//	err := arrowmem.Guard(func() error {
//		rec = build(allocator) // arrow-go, which has no errors here
//		return nil
//	})
//
// Where arrow-go itself makes a panic an error, as in array.Concatenate and in its readers and
// writers, that error wraps the same ones and f should return it. Guard also finds a panic that was
// wrapped in another error, and returns that one.
//
// Guards may be nested; the innermost one recovers. Only the goroutine that calls Guard is guarded.
// If f starts others, it must guard those too, or the program ends. Kernels of arrow-go's package
// compute start goroutines that nobody can guard: give them the allocator of a Work.
//
// Guard frees nothing that f has built: builders keep the memory that they had before. See
// Allocator.
func Guard(f func() error) (err error) {
	defer func() {
		p := recover() // nil for Goexit, which goes on by itself
		if p == nil {
			return
		}
		var ok bool
		if err, ok = p.(error); !ok || !errors.As(err, new(*refusal)) {
			panic(p)
		}
	}()
	return f()
}
