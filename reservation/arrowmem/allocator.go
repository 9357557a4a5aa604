// Package arrowmem lets arrow-go build its arrays in the bytes of a reservation: an Allocator is
// Arrow's memory.Allocator over a reservation in host memory.
//
//	reservation.Reservation ── draws ──▶ Allocator ──▶ builders, readers, kernels of arrow-go
//	                                     │ panics, for Arrow's interface has no errors
//	                                     ▼
//	                                     Guard ──▶ error
//
// The mutex of an Allocator has the rank Reservation and is not held while anything is drawn,
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

// Allocator is Arrow's memory.Allocator over a reservation in host memory: arrays
// are built inside the promise, and count in the space's books until they are
// released.
//
// Arrow's interface knows no errors, so Allocate and Reallocate panic when there is
// no memory, and Guard makes these panics errors again. The panic's value is an error
// that wraps what reservation.Reservation.Alloc returned.
//
// The caller of Allocate owns the memory until Free. It may outlive the reservation. Release
// returns what is unused at once, and what is allocated when it is freed. After it, nothing new can
// be allocated. Memory is zeroed, and aligned to 64 bytes.
//
// A builder that was refused in the middle still has what it had before; its
// Release frees that. Those of binary and string views have lost a buffer by then.
// Close, when nothing that was allocated is in use any more, frees what is left.
//
// An Allocator is safe for concurrent use: builders in several goroutines may share
// one. It has no goroutine of its own.
type Allocator struct {
	r reservation.Reservation

	mu struct {
		lockrank.Mutex[lockrank.Reservation] // not held while anything is drawn or released
		blocks                               map[*byte]block
		bytes                                int64 // of all blocks, as asked for
		misused                              error // the first time
		closed                               bool
	}
}

// block is memory that was allocated, by its address.
type block struct {
	buf   *tier.Buffer
	bytes []byte           // as long as what it is charged
	size  int              // as asked for
	stack invariants.Trace // the allocation's stack; only in an invariants build
}

var _ memory.Allocator = (*Allocator)(nil)

// UnfreedError says what was still allocated when an Allocator was closed.
type UnfreedError struct {
	Space tier.ID
	Bytes int64       // as asked for
	Left  []tier.Leak // the largest first; with stacks in an invariants build
}

func (e *UnfreedError) Error() string {
	s := fmt.Sprintf("arrowmem: %s: %d bytes of %d allocations were not freed", e.Space, e.Bytes, len(e.Left))
	if len(e.Left) > 0 && e.Left[0].Stack != "" {
		s += "; the largest was allocated at\n" + e.Left[0].Stack
	}
	return s
}

// New returns an allocator of the bytes that r promises; r stays the
// caller's. Only host memory can be allocated from: for other spaces it is
// tier.ErrNotSupported.
func New(r reservation.Reservation) (*Allocator, error) {
	if r.IsZero() {
		return nil, fmt.Errorf("arrowmem: %w", tier.ErrReleased)
	}
	if r.Space().Kind() != tier.Host {
		return nil, fmt.Errorf("arrowmem: an Arrow allocator in %s: %w: only host memory has addresses that arrays can use",
			r.Space().ID(), tier.ErrNotSupported)
	}
	a := &Allocator{r: r}
	a.mu.blocks = make(map[*byte]block)
	return a, nil
}

// Allocate returns size bytes, all zero; nil for none. It waits as little as Reservation.Alloc. It
// panics, for Guard, if the reservation has no room for them.
func (a *Allocator) Allocate(size int) []byte {
	if size < 0 {
		panic(fmt.Sprintf("arrowmem: cannot allocate %d bytes", size))
	}
	if size == 0 {
		return nil
	}
	b, err := a.draw(size)
	if err != nil {
		panic(&refusal{err})
	}
	clear(b.bytes[:size])
	if err := a.keep(b); err != nil {
		panic(&refusal{err})
	}
	return b.bytes[:size:size]
}

// draw gets a block. All of what it is charged is its own, to grow into.
func (a *Allocator) draw(size int) (block, error) {
	space := a.r.Space()
	buf, err := a.r.Alloc(a.charge(size))
	if err != nil {
		return block{}, err
	}
	mem, ok := buf.Memory().(tier.HostMemory)
	if !ok || len(mem.Extents()) != 1 {
		return block{}, errors.Join(fmt.Errorf("arrowmem: %s has no memory in one piece for arrays: %w", space.ID(), tier.ErrNotSupported), buf.Release())
	}
	return block{buf: buf, bytes: mem.Extents()[0], size: size, stack: invariants.Stack()}, nil
}

// charge is what size bytes are charged; what can never be had is left as it is, for
// to round it might overflow.
func (a *Allocator) charge(size int) int64 {
	if n := int64(size); n > a.r.Space().Capacity() {
		return n
	}
	return a.r.Space().Charge(int64(size))
}

// keep enters a block. If the allocator was closed meanwhile it is given up.
func (a *Allocator) keep(b block) error {
	a.mu.Lock()
	closed := a.mu.closed
	if !closed {
		a.mu.blocks[address(b.bytes)] = b
		a.mu.bytes += int64(b.size)
	}
	a.mu.Unlock()
	if closed {
		return errors.Join(fmt.Errorf("arrowmem: allocate: %w", tier.ErrClosed), b.buf.Release())
	}
	return nil
}

// Reallocate makes b, which Allocate or Reallocate returned, size bytes long. The
// contents stay as far as they fit, and what is added is zero. In place, if that is
// charged the same; else in other memory, and b is freed. Then both are charged for a
// moment. It panics, for Guard, if there is no room for that, and b is as it was. To make
// it shorter never fails. Nothing, of an empty b, is allocated, and a size of 0 frees b.
func (a *Allocator) Reallocate(size int, b []byte) []byte {
	switch {
	case size < 0:
		panic(fmt.Sprintf("arrowmem: cannot allocate %d bytes", size))
	case cap(b) == 0:
		return a.Allocate(size)
	case size == 0:
		a.Free(b)
		return nil
	}
	old, ok := a.resize(size, b)
	if !ok {
		panic(&refusal{a.misuse("reallocate", b)})
	}
	if old.size == size {
		return old.bytes[:size:size]
	}
	next, err := a.draw(size)
	switch {
	case err != nil && size < old.size:
		a.shorten(size, b)
		return old.bytes[:size:size]
	case err != nil:
		panic(&refusal{err})
	}
	n := copy(next.bytes[:size], old.bytes[:old.size])
	clear(next.bytes[n:size])
	if err := a.keep(next); err != nil {
		panic(&refusal{err})
	}
	a.Free(b)
	return next.bytes[:size:size]
}

// resize returns b's block; with the new size if it is better left where it is:
// when it fits, and too little would be saved, or there is no room inside the
// promise, to move it.
func (a *Allocator) resize(size int, b []byte) (block, bool) {
	unused, charge := a.r.Unused(), a.charge(size)
	a.mu.Lock()
	defer a.mu.Unlock()
	old, ok := a.mu.blocks[address(b)]
	if !ok || size > len(old.bytes) {
		return old, ok
	}
	if charge <= old.buf.Charge()*3/4 && charge <= unused {
		return old, true
	}
	if size > old.size {
		clear(old.bytes[old.size:size])
	}
	return a.setSizeLocked(old, size), true
}

// address is where b starts, which names its block; b has room for at least one byte.
func address(b []byte) *byte { return &b[:1][0] }

func (a *Allocator) setSizeLocked(b block, size int) block {
	a.mu.bytes += int64(size - b.size)
	b.size = size
	a.mu.blocks[address(b.bytes)] = b
	return b
}

// shorten makes b's block shorter where it is.
func (a *Allocator) shorten(size int, b []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if old, ok := a.mu.blocks[address(b)]; ok {
		a.setSizeLocked(old, size)
	}
}

// Free gives b back, which Allocate or Reallocate returned. Memory that is not the
// allocator's, or no longer, changes nothing. An invariants build panics with an error that
// matches tier.ErrReleased. In other builds Close returns the first one.
func (a *Allocator) Free(b []byte) {
	if cap(b) == 0 {
		return
	}
	at := address(b)
	a.mu.Lock()
	old, ok := a.mu.blocks[at]
	if ok {
		delete(a.mu.blocks, at)
		a.mu.bytes -= int64(old.size)
	}
	a.mu.Unlock()
	if !ok {
		_ = a.misuse("free", b)
		return
	}
	_ = old.buf.Release() // the only release: the goroutine that took it out of the table owns it
}

// misuse keeps the error of a call with memory that is not the allocator's.
func (a *Allocator) misuse(op string, b []byte) error {
	err := fmt.Errorf("arrowmem: %s: cannot %s %d bytes: they were not allocated here, or %w", a.r.Space().ID(), op, len(b), tier.ErrReleased)
	if invariants.Enabled {
		panic(err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.misused == nil {
		a.mu.misused = err
	}
	return err
}

// Allocated returns how many bytes are allocated and not freed, as asked for.
func (a *Allocator) Allocated() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.bytes
}

// leaksOf lists what is allocated and not freed, as asked for, the largest first.
func leaksOf(id tier.ID, blocks map[*byte]block) []tier.Leak {
	var out []tier.Leak
	for _, b := range blocks {
		out = append(out, tier.Leak{Space: id, Bytes: int64(b.size), Stack: b.stack.String()})
	}
	slices.SortFunc(out, func(a, b tier.Leak) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Stack, b.Stack))
	})
	return out
}

// Close ends allocation and frees what is left, which must not be used any more. A caller whose
// arrays live longer closes the allocator after them, or not at all. Close reports what was left,
// as an *UnfreedError, and the first call with memory that was not the allocator's. The reservation
// is untouched. A second Close returns tier.ErrClosed.
func (a *Allocator) Close() error {
	a.mu.Lock()
	if a.mu.closed {
		a.mu.Unlock()
		return tier.ErrClosed
	}
	left, bytes, misused := a.mu.blocks, a.mu.bytes, a.mu.misused
	a.mu.closed, a.mu.blocks, a.mu.bytes = true, nil, 0
	a.mu.Unlock()
	if len(left) == 0 {
		return misused
	}
	id := a.r.Space().ID()
	errs := []error{&UnfreedError{Space: id, Bytes: bytes, Left: leaksOf(id, left)}, misused}
	for _, b := range left {
		errs = append(errs, b.buf.Release())
	}
	return errors.Join(errs...)
}

// refusal is what an Allocator panics with, so that Guard can distinguish its panics from others.
type refusal struct{ error }

func (r *refusal) Unwrap() error { return r.error }

// Guard calls f and returns its error. If f panics because an Allocator could not
// give it memory, Guard returns that as an error: a *reservation.ExceededError, a
// *tier.NoSpaceError, or one that matches tier.ErrReleased or tier.ErrClosed. Every
// other panic goes on, and so does runtime.Goexit.
//
//	err := arrowmem.Guard(func() error {
//		rec = build(allocator) // arrow-go, which knows no errors here
//		return nil
//	})
//
// Where arrow-go itself makes a panic an error, as in array.Concatenate and in its
// readers and writers, that error wraps the same ones and is f's to return. A panic
// that is wrapped in an error on its way is found too, and returned as it is.
//
// Guards may be nested; the innermost one recovers. Only the goroutine that calls Guard is guarded.
// If f starts others, it must guard those too, or the program ends.
//
// What f had built is not freed: builders keep the memory that they had before. See
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
