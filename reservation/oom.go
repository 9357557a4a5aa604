package reservation

import (
	"sync"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
)

// WithOutOfMemory sets a hook that is called when an allocation from the reservation
// fails for want of memory: the promise is used up and the policy refuses, or the
// space or the device has no room. It gets the reservation, the bytes that were asked for, as the
// space charges them, and an ExceededError or a tier.NoSpaceError, or what wraps one. The hook may
// free something, or let the reservation grow, and returns whether the allocation should be tried
// once more. If it returns false, the allocation's error is returned as it was. If the second try
// fails too, the error wraps both, the second before the first. An allocation that could never fit,
// because it is larger than the space's capacity, is refused without a call.
//
// The hook runs on the goroutine that allocates and with no lock held, on several at
// once if several allocate. While it runs, allocations from the same reservation on
// its goroutine do not call it again: they just fail. If it panics, the allocation's error
// wraps the panic and the first cause, and the books are as if it had not been called. Nil is no
// hook.
func WithOutOfMemory(hook func(r Reservation, requested int64, err error) (again bool)) Option {
	return func(s *state) {
		s.memory = nil
		if hook != nil {
			s.memory = &memoryHook{call: hook} // each reservation has its own
		}
	}
}

// memoryHook is the hook of one reservation.
type memoryHook struct {
	call   func(Reservation, int64, error) bool
	inside sync.Map // numbers of the goroutines that run it
}

// ask calls the hook, unless this goroutine is in it already.
func (h *memoryHook) ask(r Reservation, requested int64, first error) (again bool, err error) {
	lockrank.AssertNone("an out-of-memory hook is called")
	id := lockrank.GoroutineID()
	if _, inside := h.inside.LoadOrStore(id, struct{}{}); inside {
		return false, nil
	}
	defer h.inside.Delete(id)
	defer guard.Error(&err, "an out-of-memory hook")
	return h.call(r, requested, first), nil
}
