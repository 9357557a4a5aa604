package reservation_test

import (
	"errors"
	"testing"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// clearer is a manager of one space whose memory is in pieces until Clear was called so often.
type clearer struct {
	*reservation.Manager
	pool  *heapPool
	space *tier.Space
	need  int // calls of enough until there is a piece; below 0: never
	calls int // of Clear
	tries int // of enough
	panic any
}

var inPieces = &tier.NoSpaceError{Requested: 100, Available: 500, Largest: 50}

func newClearer(t *testing.T, need int) *clearer {
	c := &clearer{space: spaceOf(t, "gpu:0", 1000), need: need}
	c.pool = c.space.Pool.(*heapPool)
	c.pool.failWith(inPieces)
	c.Manager = managerOf(t, reservation.Config{Spaces: []*tier.Space{c.space}, Clear: func(id tier.ID, enough func() bool) {
		c.calls++
		if id != gpu0 {
			t.Errorf("%s is cleared", id)
		}
		if c.panic != nil {
			panic(c.panic)
		}
		for range 5 {
			if c.tries++; c.tries == c.need {
				c.pool.failWith(nil)
			}
			if enough() {
				return
			}
		}
	}})
	return c
}

// TestClear: promised bytes in pieces are allocated after other batches have been moved out of the
// way, and not tried after that. Other refusals, and WithoutClearing, move nothing.
func TestClear(t *testing.T) {
	draw := func(c *clearer, opts *reservation.Options) (*reservation.Reservation, *tier.Buffer, error) {
		r := mustTry(t, c.Manager, onGPU0, 100, opts)
		b, err := r.Alloc(100)
		return r, b, err
	}
	for _, need := range []int{1, 3} {
		c := newClearer(t, need)
		r, b, err := draw(c, nil)
		if err != nil || c.calls != 1 || c.tries != need {
			t.Fatalf("cleared %d times, %d tries: %v", c.calls, c.tries, err)
		}
		wantUsage(t, c.space, 100, 0, 0)
		release(t, b, r)
	}

	c := newClearer(t, -1)
	r, _, err := draw(c, nil)
	if !errors.Is(err, inPieces) || c.tries != 5 {
		t.Errorf("%d tries: %v", c.tries, err)
	}
	wantUsage(t, c.space, 0, 0, 100)
	if _, err := r.Alloc(101); !errors.Is(err, reservation.ErrExceeded) || c.calls != 1 {
		t.Errorf("cleared %d times for more than was promised: %v", c.calls, err)
	}
	c.pool.failWith(&tier.NoSpaceError{Requested: 100})
	if _, err := r.Alloc(100); !errors.Is(err, tier.ErrNoSpace) || c.calls != 1 {
		t.Errorf("cleared %d times for what is not in pieces: %v", c.calls, err)
	}
	c.pool.failWith(inPieces)
	c.panic = "in Clear"
	func() {
		defer func() {
			if p := recover(); p != c.panic {
				t.Errorf("it panicked with %v", p)
			}
		}()
		_, err := r.Alloc(100)
		t.Errorf("it did not panic: %v", err)
	}()
	wantUsage(t, c.space, 0, 0, 100)
	release(t, r)

	c = newClearer(t, 1)
	r, _, err = draw(c, &reservation.Options{NoClearing: true})
	if !errors.Is(err, inPieces) || c.calls != 0 {
		t.Errorf("cleared %d times though it was not wanted: %v", c.calls, err)
	}
	release(t, r)

	// The program's hook is called when that has not helped.
	c = newClearer(t, -1)
	var told []int
	r, b, err := draw(c, &reservation.Options{OutOfMemory: func(*reservation.Reservation, int64, error) bool {
		told = append(told, c.tries)
		c.pool.failWith(nil)
		return true
	}})
	if err != nil || len(told) != 1 || told[0] != 5 {
		t.Errorf("the hook was asked after %d tries: %v", told, err)
	}
	release(t, b, r)
}

// TestStopClearing: nothing is moved for a reservation that has stopped clearing. The one that
// comes after it has room cleared again.
func TestStopClearing(t *testing.T) {
	c := newClearer(t, 1)
	r := mustTry(t, c.Manager, onGPU0, 100, nil)
	r.StopClearing()
	if _, err := r.Alloc(100); !errors.Is(err, tier.ErrNoSpace) || c.calls != 0 {
		t.Errorf("cleared %d times: %v", c.calls, err)
	}
	release(t, r)
	r.StopClearing()
	r = mustTry(t, c.Manager, onGPU0, 100, nil)
	b, err := r.Alloc(100)
	if err != nil || c.calls != 1 {
		t.Errorf("afterwards cleared %d times: %v", c.calls, err)
	}
	release(t, b, r)
}
