package admission_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

// outOfMemory are all the errors after which a task is tried again.
var outOfMemory = []error{
	&reservation.ExceededError{}, &tier.NoSpaceError{}, &tier.OutOfBudgetError{}, &reservation.DeadlockError{},
	fmt.Errorf("wrapped: %w", &tier.NoSpaceError{}),
}

// TestReleasedBetweenAttempts: after each attempt that ran out of memory everything is released
// before the next is admitted.
func TestReleasedBetweenAttempts(t *testing.T) {
	for _, panics := range []bool{false, true} {
		for _, oom := range outOfMemory {
			t.Run(fmt.Sprintf("%T,%v", oom, panics), func(t *testing.T) {
				w := newWorld(t, setup{cap: 1 << 20})
				runs := 0
				e := admission.Estimate{Input: 100}
				err := w.Run(t.Context(), e, func(_ context.Context, g *admission.Grant) error {
					runs++
					if u := w.gpus[0].State().Used(); u != g.Reservation().Bytes() {
						t.Errorf("run %d: %d bytes are used, and %d are its own", runs, u, g.Reservation().Bytes())
					}
					switch {
					case runs == 3:
						return nil
					case panics:
						panic(oom)
					}
					return oom
				})
				if err != nil || runs != 3 {
					t.Errorf("after %d runs: %v", runs, err)
				}
				if s := w.Stats(); s.Retried != 2 || s.Admitted != 3 || s.Running != 0 {
					t.Errorf("%+v", s)
				}
			})
		}
	}
}

// TestTenAttempts: a task is tried ten times and not more, and the error has all numbers.
func TestTenAttempts(t *testing.T) {
	for _, most := range []int{0, 1, 3} {
		w := newWorld(t, setup{cap: 1 << 30, Config: with(admission.Rules{MaxAttempts: most})})
		want := most
		if most == 0 {
			want = 10
		}
		runs := 0
		last := &reservation.ExceededError{Space: w.gpus[0].ID(), Requested: 4242, Hint: "a hint"}
		e := admission.Estimate{Operator: "join", Input: 100}
		err := w.Run(t.Context(), e, func(context.Context, *admission.Grant) error {
			runs++
			return last
		})
		var ae *admission.AttemptsError
		if !errors.As(err, &ae) || !errors.Is(err, reservation.ErrExceeded) {
			t.Fatalf("%v", err)
		}
		if runs != want || ae.Attempts != want || ae.Err != error(last) || ae.Operator != "join" ||
			ae.Space != w.gpus[0].ID() || ae.Reserved != ae.Need {
			t.Errorf("%d runs: %+v", runs, ae)
		}
		for _, says := range []string{"join", fmt.Sprint(want, " times"), "gpu:0", "4242", "a hint"} {
			if !strings.Contains(err.Error(), says) {
				t.Errorf("%q does not say %s", err, says)
			}
		}
	}
}

// TestNeedAboveTheSpace: a grant has the need of its task also where the space has less. Only a sum
// that overflows is the largest number. The error of the last attempt has the numbers.
func TestNeedAboveTheSpace(t *testing.T) {
	const capacity, grain, largest = 1 << 20, 4096, math.MaxInt64
	for _, c := range []struct {
		input, work, need int64
		text              string
	}{
		{0, capacity - 1, capacity, "needed 1048576 bytes"},
		{0, capacity + 1, capacity + 1, "needed 1048577 bytes"},
		{grain, 3 * capacity, 3*capacity + grain, "needed 3149824 bytes"},
		{0, 1 << 60, 1 << 60, "needed 1152921504606846976 bytes"},
		{10, largest - 10, largest, "needed 8 EiB or more"},
		{11, largest - 10, largest, "needed 8 EiB or more"},
	} {
		w := newWorld(t, setup{cap: capacity, grain: grain, Config: with(admission.Rules{MaxAttempts: 1})})
		e := exactly(c.work)
		e.Operator, e.Input = "sort", c.input
		err := w.Run(t.Context(), e, func(_ context.Context, g *admission.Grant) error {
			if g.Need() != c.need || g.Reservation().Bytes() != capacity {
				t.Errorf("%+v: the grant needs %d, with %d reserved", c, g.Need(), g.Reservation().Bytes())
			}
			return reservation.ErrExceeded
		})
		for _, part := range []string{c.text, "1048576 were reserved", "at most 0 were drawn"} {
			overflow := fmt.Sprint(int64(largest))
			if err == nil || !strings.Contains(err.Error(), part) || strings.Contains(err.Error(), overflow) {
				t.Errorf("%+v: %v does not have %q", c, err, part)
			}
		}
	}
}

// TestHigherEstimate: the next attempt has twice as much or, if that is more, what was
// drawn and refused; the input is not doubled.
func TestHigherEstimate(t *testing.T) {
	w := newWorld(t, setup{cap: 1 << 20})
	var reserved []int64
	e := admission.Estimate{Input: 1000, Output: 10_000, Overhead: admission.None}
	err := w.Run(t.Context(), e, func(_ context.Context, g *admission.Grant) error {
		reserved = append(reserved, g.Reservation().Bytes())
		switch len(reserved) {
		case 1:
			return &tier.NoSpaceError{Space: tier.ID{Kind: tier.Disk}, Requested: 1 << 40} // not of this space
		case 2:
			b, err := g.Alloc(15_000)
			if err != nil {
				return err
			}
			_, err = g.Alloc(50_000)
			return errors.Join(err, b.Release())
		case 3:
			return &tier.OutOfBudgetError{Requested: 200_000} // which no reservation helps
		}
		return nil
	})
	if want := []int64{11_000, 21_000, 66_000, 131_000}; err != nil || !slices.Equal(reserved, want) {
		t.Errorf("reserved %d, want %d: %v", reserved, want, err)
	}
}

// TestHigherEstimateByWhatIsLeft: what an attempt has drawn without Note, and not freed yet, counts
// too.
func TestHigherEstimateByWhatIsLeft(t *testing.T) {
	w := newWorld(t, setup{cap: 1 << 20})
	var left *tier.Buffer
	var reserved []int64
	err := w.Run(t.Context(), exactly(100_000), func(_ context.Context, g *admission.Grant) (err error) {
		if reserved = append(reserved, g.Reservation().Bytes()); len(reserved) == 2 {
			return nil
		}
		if left, err = g.Reservation().Alloc(90_000); err != nil {
			return err
		}
		_, err = g.Reservation().Alloc(300_000)
		return err
	})
	if want := []int64{100_000, 390_000}; err != nil || !slices.Equal(reserved, want) {
		t.Errorf("reserved %d, want %d: %v", reserved, want, err)
	}
	if err := left.Release(); err != nil {
		t.Fatal(err)
	}
}

// TestHigherEstimateStops: estimates that double for ever end at what the space has.
func TestHigherEstimateStops(t *testing.T) {
	w := newWorld(t, setup{cap: 1000, Config: with(admission.Rules{MaxAttempts: 100})})
	runs := 0
	err := w.Run(t.Context(), exactly(300), func(_ context.Context, g *admission.Grant) error {
		runs++
		if n := g.Reservation().Bytes(); runs > 3 && n != 1000 {
			t.Errorf("run %d has %d bytes", runs, n)
		}
		return reservation.ErrDeadlock
	})
	if !outOfAttempts(err) || !errors.Is(err, reservation.ErrDeadlock) || runs != 100 {
		t.Errorf("after %d: %v", runs, err)
	}
}

// TestOtherErrorsEndRun: they are not tried again; all is given back.
func TestOtherErrorsEndRun(t *testing.T) {
	other := errors.New("another error")
	for _, c := range []struct {
		name   string
		f      func() error
		want   error
		panics bool
	}{
		{"error", func() error { return other }, other, false},
		{"panic", func() error { panic(other) }, nil, true},
		{"panic of no error", func() error { panic("no error") }, nil, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, setup{cap: 1000})
			runs := 0
			defer func() {
				if p := recover(); (p != nil) != c.panics {
					t.Errorf("panicked with %v", p)
				}
				if s := w.Stats(); runs != 1 || s.Running != 0 || w.gpus[0].State().Used() != 0 {
					t.Errorf("%d runs, %+v", runs, s)
				}
			}()
			err := w.Run(t.Context(), admission.Estimate{Input: 10}, func(context.Context, *admission.Grant) error {
				runs++
				return c.f()
			})
			if !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
		})
	}
}

// TestRunIsCancelled: between and in the attempts.
func TestRunIsCancelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		block := w.admit(exactly(800)).runs()
		ctx, cancel := context.WithCancelCause(t.Context())
		over := make(chan error)
		runs := 0
		go func() {
			over <- w.Run(ctx, admission.Estimate{Input: 10}, func(context.Context, *admission.Grant) error {
				runs++
				return &reservation.ExceededError{Space: w.gpus[0].ID(), Requested: 500}
			})
		}()
		synctest.Wait() // the second attempt waits for 510 bytes
		why := errors.New("enough")
		cancel(why)
		err := <-over
		if !errors.Is(err, why) || !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "attempt 2") {
			t.Errorf("%v", err)
		}
		if runs != 1 {
			t.Errorf("%d runs", runs)
		}
		w.end(block)
	})
}

// TestRunLearns: a task that succeeded reports what it took; one that failed does not.
func TestRunLearns(t *testing.T) {
	w := newWorld(t, setup{cap: 1 << 20})
	e := admission.Estimate{Operator: "x", Input: 1000}
	runs := 0
	err := w.Run(t.Context(), e, func(_ context.Context, g *admission.Grant) error {
		runs++
		b, err := g.Alloc(5000)
		if err != nil {
			wantEstimate(t, w.Estimator(), "x", 1000, 1000, 1000)
			return err
		}
		g.Produced(1500)
		g.Produced(500)
		return b.Release()
	})
	if err != nil || runs < 2 {
		t.Fatalf("%d runs: %v", runs, err)
	}
	wantEstimate(t, w.Estimator(), "x", 1000, 2000, 3000)
	runs = 0
	err = w.Run(t.Context(), e, func(_ context.Context, g *admission.Grant) error {
		runs++
		b, err := g.Alloc(5000)
		if err != nil {
			return err
		}
		return errors.Join(b.Release(), g.Release()) // f may end it
	})
	if err != nil || runs != 1 {
		t.Errorf("what was learned did not help: %d runs, %v", runs, err)
	}
}

// TestOwner: the reservation and the context of a task are its owner's: the estimate's, or else
// that of the context, or else a new one with the operator's name.
func TestOwner(t *testing.T) {
	mine, callers := reservation.NewOwner("mine"), reservation.NewOwner("the caller's")
	for _, c := range []struct {
		owner *reservation.Owner
		ctx   context.Context
		want  string
	}{
		{mine, callers.Context(t.Context()), "mine"},
		{nil, callers.Context(t.Context()), "the caller's"},
		{nil, t.Context(), "join"},
	} {
		w := newWorld(t, setup{cap: 1000})
		if c.owner != nil {
			c.owner = reservation.NewOwner(c.owner.Name())
		}
		e := admission.Estimate{Operator: "join", Output: 10, Overhead: admission.None, Owner: c.owner}
		var first *reservation.Owner
		err := w.Run(c.ctx, e, func(ctx context.Context, g *admission.Grant) error {
			o := g.Owner()
			if first == nil {
				first = o
				return tier.ErrNoSpace
			}
			if o != first {
				t.Errorf("the second attempt has another owner, %q", o.Name())
			}
			if o.Name() != c.want || c.owner != nil && o != c.owner ||
				g.Reservation().Owner() != o || reservation.OwnerOf(ctx) != o {
				t.Errorf("the owner is %q, want %q", o.Name(), c.want)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// TestPolicy: a task may draw more than was reserved for it if the rules' policy lets it.
func TestPolicy(t *testing.T) {
	w := newWorld(t, setup{cap: 1000, Config: with(admission.Rules{Policy: reservation.Increase(1)})})
	err := w.Run(t.Context(), exactly(10), func(_ context.Context, g *admission.Grant) error {
		b, err := g.Alloc(500)
		if err != nil {
			return err
		}
		return b.Release()
	})
	if s := w.Stats(); err != nil || s.Retried != 0 {
		t.Errorf("%v, %+v", err, s)
	}
}

// TestDeadlockIsNoLowEstimate: a task that others were in the way of is tried again with the same
// estimate, and not before one of them has gone on.
func TestDeadlockIsNoLowEstimate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		other := reservation.NewOwner("other")
		gpu := reservation.AnyInTier(tier.GPU)
		held, err := w.m.TryReserve(gpu, 400, &reservation.Options{Owner: other})
		if err != nil {
			t.Fatal(err)
		}
		waits := make(chan struct{})
		var reserved []int64
		var goneOn atomic.Bool
		over := make(chan error)
		go func() {
			over <- w.Run(t.Context(), exactly(400), func(ctx context.Context, g *admission.Grant) error {
				if reserved = append(reserved, g.Reservation().Bytes()); len(reserved) == 2 {
					if !goneOn.Load() {
						t.Error("it is tried again before the other has gone on")
					}
					return nil
				}
				<-waits
				r, err := w.m.Reserve(ctx, gpu, 300, nil)
				return errors.Join(err, r.Release())
			})
		}()
		synctest.Wait()
		go func() {
			synctest.Wait() // until the line below waits
			close(waits)
		}()
		more, err := w.m.Reserve(other.Context(t.Context()), gpu, 300, nil)
		if err != nil {
			t.Fatal(err)
		}
		goneOn.Store(true)
		if err := errors.Join(more.Release(), held.Release(), <-over); err != nil {
			t.Error(err)
		}
		if !slices.Equal(reserved, []int64{400, 400}) {
			t.Errorf("reserved %d", reserved)
		}
	})
}
