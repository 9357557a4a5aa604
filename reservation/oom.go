package reservation

import (
	"errors"
	"fmt"
	"sync"

	"github.com/spillway-db/spillway/internal/goid"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// OutOfMemory is what an out-of-memory hook is called with. Sizes are bytes.
type OutOfMemory struct {
	Reservation Reservation // the allocation was from this
	Space       tier.ID
	Requested   int64 // as the space charges it
	Unused      int64 // of the promise, in no buffer
	Promised    int64 // in all
	Available   int64 // free in the space
	Err         error // an ExceededError or a tier.NoSpaceError, or what wraps one
}

// OutOfMemoryError is an allocation that failed, and failed again after its hook had
// asked for one more try. It matches whatever either error matches, and errors.As
// finds the numbers of the second first.
type OutOfMemoryError struct {
	Space         tier.ID
	Requested     int64 // bytes, as the space charges them
	First, Second error
}

func (e *OutOfMemoryError) Error() string {
	return fmt.Sprintf("%s: out of memory for %d bytes, also after its hook asked for another try: %v; before that: %v",
		e.Space, e.Requested, e.Second, e.First)
}

// Unwrap returns both errors.
func (e *OutOfMemoryError) Unwrap() []error { return []error{e.Second, e.First} }

// WithOutOfMemory sets a hook that is called when an allocation from the reservation
// fails for want of memory: the promise is used up and the policy refuses, or the
// space or the device has no room. The hook may free something, or let the
// reservation grow, and returns whether the allocation should be tried once more. If it
// returns false, the allocation's error is returned as it was; if the second try fails
// too, an OutOfMemoryError that has both errors. What could never fit, because it is
// larger than the space's capacity, is refused without asking.
//
// The hook runs on the goroutine that allocates and with no lock held, on several at
// once if several allocate. While it runs, allocations from the same reservation on
// its goroutine do not call it again: they just fail. If it panics, the allocation's error
// says so beside the first cause, and the books are as if it had not been called. Nil is no
// hook.
func WithOutOfMemory(hook func(OutOfMemory) (again bool)) Option {
	return func(o options) options {
		o.memory = nil
		if hook != nil {
			o.memory = &memoryHook{call: hook} // each reservation has its own
		}
		return o
	}
}

// memoryHook is the hook of one reservation.
type memoryHook struct {
	call   func(OutOfMemory) bool
	inside sync.Map // numbers of the goroutines that run it
}

// again asks the hook about an allocation that failed with first, and tries it again
// if it should.
func (h *memoryHook) again(r Reservation, size int64, first error, try func() (*tier.Buffer, error)) (*tier.Buffer, error) {
	space := r.Space()
	if size > space.Capacity() || !errors.Is(first, ErrExceeded) && !errors.Is(first, tier.ErrNoSpace) {
		return nil, first
	}
	out := OutOfMemory{
		Reservation: r, Space: space.ID(), Requested: space.Charge(size),
		Unused: r.Unused(), Promised: r.Bytes(), Available: space.Available(), Err: first,
	}
	again, err := h.ask(out)
	if err != nil {
		return nil, errors.Join(first, err)
	}
	if !again {
		return nil, first
	}
	b, second := try()
	if second != nil {
		return nil, &OutOfMemoryError{Space: out.Space, Requested: out.Requested, First: first, Second: second}
	}
	return b, nil
}

// ask calls the hook, unless this goroutine is in it already.
func (h *memoryHook) ask(out OutOfMemory) (again bool, err error) {
	lockrank.AssertNone("an out-of-memory hook is called")
	id := goid.ID()
	if _, inside := h.inside.LoadOrStore(id, struct{}{}); inside {
		return false, nil
	}
	defer h.inside.Delete(id)
	defer guard.Error(&err, "an out-of-memory hook")
	return h.call(out), nil
}
