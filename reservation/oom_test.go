package reservation_test

import (
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// The hook is called with the numbers, frees something, and the second try succeeds.
func TestOutOfMemoryHookHelps(t *testing.T) {
	for name, test := range map[string]struct {
		policy reservation.LimitPolicy
		help   func(r *reservation.Reservation, cached *tier.Buffer, other *reservation.Reservation) error
		cause  error // besides ErrExceeded
	}{
		"by freeing a buffer": {help: func(_ *reservation.Reservation, cached *tier.Buffer, _ *reservation.Reservation) error {
			return cached.Release()
		}},
		"by growing": {help: func(r *reservation.Reservation, _ *tier.Buffer, other *reservation.Reservation) error {
			return errors.Join(other.Shrink(30), r.TryGrow(30))
		}},
		"by making room in the space": {
			policy: reservation.Increase(1.25), cause: tier.ErrNoSpace,
			help: func(_ *reservation.Reservation, _ *tier.Buffer, other *reservation.Reservation) error {
				return other.Shrink(30)
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, s := one(t, 100, 0)
			var cached *tier.Buffer
			other := mustTry(t, m, onGPU0, 40, nil)
			calls := 0
			r := mustTry(t, m, onGPU0, 60, &reservation.Options{Policy: test.policy, OutOfMemory: func(r *reservation.Reservation, requested int64, err error) bool {
				calls++
				m.Demand(nil) // would hang if a lock were held
				if r.Space() != s || requested != 50 || r.Unused() != 20 ||
					r.Bytes() != 60 || s.State().Available != 0 {
					t.Errorf("it was told of %d bytes in %s: %d unused of %d, %d available",
						requested, r.Space().ID(), r.Unused(), r.Bytes(), s.State().Available)
				}
				if !errors.Is(err, reservation.ErrExceeded) || test.cause != nil && !errors.Is(err, test.cause) {
					t.Errorf("the error is %v", err)
				}
				if err := test.help(r, cached, other); err != nil {
					t.Error(err)
				}
				return true
			}})
			cached = mustAlloc(t, r, 40)
			b := mustAlloc(t, r, 50)
			if calls != 1 {
				t.Errorf("the hook was called %d times", calls)
			}
			release(t, b, r, other)
			if s.State().Used() > 0 {
				release(t, cached)
			}
		})
	}
}

// A device without room, in one piece or at all, asks the hook too; other failures do
// not. What could never fit is not asked about either.
func TestOutOfMemoryHookIsAskedAboutMemoryOnly(t *testing.T) {
	m, s := one(t, 100, 0)
	calls := 0
	r := mustTry(t, m, onGPU0, 60, &reservation.Options{OutOfMemory: func(*reservation.Reservation, int64, error) bool { calls++; return false }})
	pool := s.Pool.(*heapPool)
	broken := errors.New("broken")
	fragmented := &tier.NoSpaceError{Requested: 50, Available: 100, Largest: 10}
	budget := &tier.OutOfBudgetError{Requested: 50, Limit: 40}
	for _, test := range []struct {
		fail  error
		size  int64
		calls int
	}{{fragmented, 50, 1}, {budget, 50, 1}, {broken, 50, 0}, {nil, 101, 0}, {nil, -1, 0}, {nil, 61, 1}, {nil, 60, 0}} {
		pool.failWith(test.fail)
		calls = 0
		b, err := r.Alloc(test.size)
		if calls != test.calls {
			t.Errorf("%d bytes, %v: %d calls", test.size, test.fail, calls)
		}
		if test.fail != nil && !errors.Is(err, test.fail) || (err == nil) != (test.size == 60) {
			t.Errorf("%d bytes, %v: %v", test.size, test.fail, err)
		}
		release(t, b)
		wantReservation(t, r, 60, 60)
	}
	release(t, r)
	calls = 0
	if _, err := r.Alloc(10); !errors.Is(err, tier.ErrReleased) || calls != 0 {
		t.Errorf("after the release: %v, %d calls", err, calls)
	}
}

// If the second try fails too, both errors are there, with their numbers; if the
// hook asks for none, the first is as it was.
func TestOutOfMemoryKeepsBothErrors(t *testing.T) {
	m, s := one(t, 100, 0)
	pool := s.Pool.(*heapPool)
	again := true
	r := mustTry(t, m, onGPU0, 60, &reservation.Options{OutOfMemory: func(r *reservation.Reservation, _ int64, _ error) bool {
		pool.failWith(&tier.NoSpaceError{Requested: 70, Available: 100, Largest: 10})
		if err := r.TryGrow(20); err != nil {
			t.Error(err)
		}
		return again
	}})
	_, err := r.Alloc(70)
	var first *reservation.ExceededError
	var second *tier.NoSpaceError
	if !errors.As(err, &first) || first.Available != 60 || !errors.As(err, &second) || second.Largest != 10 ||
		!errors.Is(err, reservation.ErrExceeded) || !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("%+v and %+v", first, second)
	}
	for _, want := range []string{"gpu:0: out of memory for 70 bytes", "another try", "pieces of at most 10", "60 available of 60", "reserve more"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
	wantReservation(t, r, 80, 80)
	again = false
	if _, err := r.Alloc(90); err == nil || strings.Contains(err.Error(), "another try") || !errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("it failed with %v", err)
	}
	release(t, r)
}

// An allocation inside the hook does not call it again, but one from another
// reservation does that of its own; afterwards it is called again.
func TestOutOfMemoryHookDoesNotRecurse(t *testing.T) {
	m, _ := one(t, 100, 0)
	var calls, inner int
	other := mustTry(t, m, onGPU0, 10, &reservation.Options{OutOfMemory: func(*reservation.Reservation, int64, error) bool { inner++; return true }})
	var r *reservation.Reservation
	r = mustTry(t, m, onGPU0, 10, &reservation.Options{OutOfMemory: func(told *reservation.Reservation, _ int64, _ error) bool {
		calls++
		for _, r := range []*reservation.Reservation{r, told, other} {
			if _, err := r.Alloc(20); !errors.Is(err, reservation.ErrExceeded) {
				t.Errorf("inside: %v", err)
			}
		}
		return true
	}})
	for i := range 3 {
		if _, err := r.Alloc(20); !errors.Is(err, reservation.ErrExceeded) {
			t.Error(err)
		}
		if calls != i+1 || inner != i+1 {
			t.Errorf("%d calls and %d of the other's", calls, inner)
		}
	}
	release(t, r, other)
}

// A panic of the hook is part of the allocation's error; the books are as before, and the
// hook works the next time.
func TestOutOfMemoryHookPanics(t *testing.T) {
	m, _ := one(t, 100, 0)
	calls := 0
	cause := errors.New("the hook's")
	r := mustTry(t, m, onGPU0, 10, &reservation.Options{OutOfMemory: func(*reservation.Reservation, int64, error) bool { calls++; panic(cause) }})
	for range 2 {
		if _, err := r.Alloc(20); !errors.Is(err, cause) || !errors.Is(err, reservation.ErrExceeded) {
			t.Errorf("it failed with %v", err)
		}
		wantReservation(t, r, 10, 10)
	}
	if calls != 2 {
		t.Errorf("%d calls", calls)
	}
	release(t, r)
}

// The hook is called for each goroutine's failure, also while another's hook runs.
func TestOutOfMemoryHooksAtOnce(t *testing.T) {
	const n = 8
	m, _ := one(t, n*10, 0)
	var inside sync.WaitGroup
	inside.Add(n)
	var calls atomic.Int64
	r := mustTry(t, m, onGPU0, 0, &reservation.Options{OutOfMemory: func(r *reservation.Reservation, _ int64, _ error) bool {
		calls.Add(1)
		inside.Done()
		inside.Wait() // until all are here
		return r.TryGrow(10) == nil
	}})
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			if b, err := r.Alloc(10); err != nil {
				t.Error(err)
			} else {
				release(t, b)
			}
		})
	}
	all.Wait()
	if calls.Load() != n {
		t.Errorf("%d calls", calls.Load())
	}
	release(t, r)
}
