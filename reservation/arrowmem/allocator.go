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
	"slices"

	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/internal/invariants"
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
// goroutine of its own.
type Allocator struct {
	r    reservation.Reservation
	heap *HeapCounter // of a Work; nil: no memory is a panic

	mu struct {
		lockrank.Mutex[lockrank.Reservation]
		blocks   map[*byte]*block
		misused  error // the first one
		closed   bool
		heap     int64 // bytes of the blocks on the Go heap
		overflow error // why the last block went to the Go heap; nil after a Grow that covers all of them
	}
}

// block is allocated memory. The table of blocks finds it by its address.
type block struct {
	buf   *tier.Buffer     // nil if the Go heap has it
	bytes []byte           // as long as its charge
	size  int              // as requested
	stack invariants.Trace // of the allocation, in an invariants build
}

var _ memory.Allocator = (*Allocator)(nil)

// UnfreedError reports memory that was still allocated when an Allocator was closed.
type UnfreedError struct {
	Space tier.ID
	Bytes int64       // as requested
	Left  []tier.Leak // the largest first; with stacks in an invariants build
}

func (e *UnfreedError) Error() string {
	s := fmt.Sprintf("arrowmem: %s: %d bytes of %d allocations were not freed", e.Space, e.Bytes, len(e.Left))
	if len(e.Left) > 0 && e.Left[0].Stack != "" {
		s += "; the largest was allocated at\n" + e.Left[0].Stack
	}
	return s
}

// New returns an allocator of the bytes that r promises; the caller still owns r. If r is in other
// than host memory, the error is tier.ErrNotSupported.
func New(r reservation.Reservation) (*Allocator, error) {
	if r.IsZero() {
		return nil, fmt.Errorf("arrowmem: %w", tier.ErrReleased)
	}
	a := newAllocator(r, nil)
	if err := a.supported(); err != nil {
		return nil, err
	}
	return a, nil
}

func newAllocator(r reservation.Reservation, heap *HeapCounter) *Allocator {
	a := &Allocator{r: r, heap: heap}
	a.mu.blocks = make(map[*byte]*block)
	return a
}

// supported returns an error if the reservation is in other than host memory.
func (a *Allocator) supported() error {
	if s := a.r.Space(); s.Kind() != tier.Host {
		return fmt.Errorf("arrowmem: %s: %w: only host memory has addresses for arrays", s.ID(), tier.ErrNotSupported)
	}
	return nil
}

// Allocate returns size zeroed bytes; nil for 0. It waits as little as Reservation.Alloc. It panics,
// for Guard, if the reservation has no room for them. A negative size is a panic that Guard does not
// recover; a Work's allocator returns nil, and Work.Close an error.
func (a *Allocator) Allocate(size int) []byte {
	switch {
	case size == 0:
		return nil
	case size < 0 && a.heap == nil:
		panic(fmt.Sprintf("arrowmem: cannot allocate %d bytes", size))
	case size < 0:
		a.misuse("allocate", size)
		return nil
	}
	b, err := a.take(size, nil, true)
	if err != nil {
		panic(&refusal{err})
	}
	return b
}

// take allocates size bytes that begin with those of from, and enters them as a block. Memory comes
// from the reservation, or else, for a Work if mayOverflow is set, from the Go heap.
func (a *Allocator) take(size int, from []byte, mayOverflow bool) ([]byte, error) {
	b := &block{size: size, stack: invariants.Stack()}
	err := a.supported()
	if err == nil {
		b.buf, err = a.r.Alloc(a.charge(size)) // it may grow into all that it is charged
	}
	switch {
	case err == nil:
		b.bytes = b.buf.Memory().(tier.HostMemory).Extents()[0]
	case a.heap == nil || !mayOverflow:
		return nil, err
	default:
		b.bytes = memory.NewGoAllocator().Allocate(size)
		a.heap.add(int64(size))
	}
	n := copy(b.bytes[:size], from)
	clear(b.bytes[n:size])
	a.mu.Lock()
	closed := a.mu.closed
	if !closed {
		a.mu.blocks[&b.bytes[0]] = b
	}
	if err != nil {
		a.mu.heap += int64(size)
		a.mu.overflow = err
	}
	a.mu.Unlock()
	if closed {
		return nil, errors.Join(fmt.Errorf("arrowmem: allocate: %w", tier.ErrClosed), b.buf.Release())
	}
	return b.bytes[:size:size], nil
}

// charge returns the charge of size bytes. A size that can never be allocated is left as it is,
// because rounding it might overflow.
func (a *Allocator) charge(size int) int64 {
	n := int64(size)
	if s := a.r.Space(); n <= s.Capacity() {
		n = s.Charge(n)
	}
	return n
}

// Reallocate makes b, which Allocate or Reallocate returned, size bytes long. It keeps the contents
// as far as they fit, and zeroes the rest. It does so in place if the charge stays the same.
// Otherwise it allocates other memory and frees b; for a moment both are charged. It panics, for
// Guard, if there is no room for that; b is unchanged then. Shrinking never fails. An empty b is
// allocated, and a size of 0 frees b.
func (a *Allocator) Reallocate(size int, b []byte) []byte {
	switch {
	case size < 0 || cap(b) == 0:
		return a.Allocate(size)
	case size == 0:
		a.Free(b)
		return nil
	}
	a.mu.Lock()
	old := a.mu.blocks[address(b)]
	a.mu.Unlock()
	if old == nil {
		if err := a.misuse("reallocate", len(b)); a.heap == nil {
			panic(&refusal{err})
		}
		next := a.Allocate(size)
		copy(next, b)
		return next
	}
	fits, charge := size <= len(old.bytes), a.charge(size)
	if !fits || charge <= int64(len(old.bytes))*3/4 && charge <= a.r.Unused() {
		next, err := a.take(size, old.bytes[:min(size, old.size)], !fits)
		if err == nil {
			a.Free(b)
			return next
		}
		if !fits {
			panic(&refusal{err})
		}
	}
	if size > old.size {
		clear(old.bytes[old.size:size])
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	old.size = size
	return old.bytes[:size:size]
}

// address returns where b starts, which identifies its block; b has a capacity of at least a byte.
func address(b []byte) *byte { return &b[:1][0] }

// Free frees b, which Allocate or Reallocate returned. Memory that the allocator did not allocate,
// or that was freed before, changes nothing. Close returns the first such error, which matches
// tier.ErrReleased. An invariants build panics with it, unless the allocator is a Work's.
func (a *Allocator) Free(b []byte) {
	if cap(b) == 0 {
		return
	}
	at := address(b)
	a.mu.Lock()
	old := a.mu.blocks[at]
	delete(a.mu.blocks, at)
	if old != nil && old.buf == nil {
		a.mu.heap -= int64(len(old.bytes))
	}
	a.mu.Unlock()
	switch {
	case old == nil:
		a.misuse("free", len(b))
	case old.buf == nil:
		a.heap.add(-int64(len(old.bytes)))
	default:
		_ = old.buf.Release() // the only release: the goroutine that took it out of the table owns it
	}
}

// misuse returns the error of a call with a negative size, or with memory that is not the
// allocator's, and keeps the first one for Close. An invariants build panics with it, unless the
// allocator is a Work's, which never panics.
func (a *Allocator) misuse(op string, size int) error {
	err := fmt.Errorf("arrowmem: %s: cannot %s %d bytes: a wrong size, or memory that was not allocated here, or %w",
		a.r.Space().ID(), op, size, tier.ErrReleased)
	if invariants.Enabled && a.heap == nil {
		panic(err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.misused = cmp.Or(a.mu.misused, err)
	return err
}

// Allocated returns how many bytes are allocated and not freed, as requested. It takes time in
// proportion to the number of allocations.
func (a *Allocator) Allocated() (bytes int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, b := range a.mu.blocks {
		bytes += int64(b.size)
	}
	return bytes
}

// Close ends allocation and frees all memory that is left, which must not be used any more. A
// caller whose arrays live longer closes the allocator after them, or not at all. Close reports
// such memory as an *UnfreedError, and the first call with memory that was not the allocator's. The
// reservation is untouched. A second Close returns tier.ErrClosed.
func (a *Allocator) Close() error {
	a.mu.Lock()
	if a.mu.closed {
		a.mu.Unlock()
		return tier.ErrClosed
	}
	left := a.mu.blocks
	errs := []error{a.mu.misused}
	a.mu.closed, a.mu.blocks = true, nil
	a.mu.Unlock()
	e := &UnfreedError{Space: a.r.Space().ID()}
	for _, b := range left {
		e.Bytes += int64(b.size)
		e.Left = append(e.Left, tier.Leak{Space: e.Space, Bytes: int64(b.size), Stack: b.stack.String()})
		errs = append(errs, b.buf.Release())
	}
	if len(left) > 0 {
		slices.SortFunc(e.Left, func(a, b tier.Leak) int { return cmp.Compare(b.Bytes, a.Bytes) })
		errs = append(errs, e)
	}
	return errors.Join(errs...)
}

// refusal is the value that an Allocator panics with, so that Guard can distinguish its panics from
// others.
type refusal struct{ error }

func (r *refusal) Unwrap() error { return r.error }

// Guard calls f and returns its error. If f panics because an Allocator had no memory for it, Guard
// returns that as an error: a *reservation.ExceededError, a *tier.NoSpaceError, or one that matches
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
		e, ok := p.(error)
		var r *refusal
		if !ok || !errors.As(e, &r) {
			panic(p)
		}
		if err = e; e == error(r) {
			err = r.error
		}
	}()
	return f()
}
