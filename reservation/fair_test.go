package reservation_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// passes takes and gives back 10 bytes as often as that is possible, at most
// limit times.
func passes(t *testing.T, m *reservation.Manager, limit int) int {
	t.Helper()
	for n := range limit {
		r, err := m.TryReserve(onGPU0, 10, nil)
		if err != nil {
			if !errors.Is(err, tier.ErrNoSpace) || !strings.Contains(err.Error(), "is kept for an older request") {
				t.Errorf("%v", err)
			}
			return n
		}
		release(t, r)
	}
	return limit
}

// Small requests may pass a large one that has no room yet, but only so often;
// then what there is is kept for it.
func TestBypassIsBounded(t *testing.T) {
	for _, test := range []struct{ bypass, want int }{{0, reservation.DefaultBypass}, {1, 1}, {3, 3}, {-1, 0}, {-7, 0}} {
		synctest.Test(t, func(t *testing.T) {
			m, _ := one(t, 100, test.bypass)
			held := mustTry(t, m, onGPU0, 50, nil)
			large := startReserve(t.Context(), m, onGPU0, 60)
			large.waiting(t)
			for range 100 { // requests that do not pass do not count
				if _, err := m.TryReserve(onGPU0, 70, nil); !errors.Is(err, tier.ErrNoSpace) {
					t.Fatal(err)
				}
			}
			if n := passes(t, m, 100); n != test.want {
				t.Fatalf("%d passed by; want %d", n, test.want)
			}
			small := startReserve(t.Context(), m, onGPU0, 10)
			small.waiting(t)
			if err := held.TryGrow(1); !errors.Is(err, tier.ErrNoSpace) {
				t.Errorf("growing past a shut door: %v", err)
			}
			growing := start(func() (*reservation.Reservation, error) { return held, held.Grow(t.Context(), 1) })
			growing.waiting(t)
			if err := held.Shrink(10); err != nil {
				t.Error(err)
			}
			release(t, large.served(t))
			release(t, small.served(t))
			growing.served(t)
			release(t, held)
		})
	}
}

// The allocations of a reservation that may exceed its promise need passes like any request.
func TestPoliciesRespectTheDoor(t *testing.T) {
	for _, policy := range []reservation.LimitPolicy{reservation.Ignore(), reservation.Increase(1)} {
		synctest.Test(t, func(t *testing.T) {
			m, _ := one(t, 100, 2)
			held := mustTry(t, m, onGPU0, 50, &reservation.Options{Policy: policy})
			large := startReserve(t.Context(), m, onGPU0, 60)
			large.waiting(t)
			b := mustAlloc(t, held, 50)
			c := mustAlloc(t, held, 1)
			d := mustAlloc(t, held, 1)
			_, err := held.Alloc(1)
			if !errors.Is(err, reservation.ErrExceeded) || !errors.Is(err, tier.ErrNoSpace) || !strings.Contains(err.Error(), "is kept for an older request") {
				t.Errorf("%v: %v", policy, err)
			}
			release(t, b, c, d, held)
			release(t, large.served(t))
		})
	}
}

func TestSmallWaitersPassWithinTheBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		a, b := mustTry(t, m, onGPU0, 50, nil), mustTry(t, m, onGPU0, 50, nil)
		large := startReserve(t.Context(), m, onGPU0, 80)
		large.waiting(t)
		tooLarge := startReserve(t.Context(), m, onGPU0, 60)
		tooLarge.waiting(t)
		var small []*call
		for range 2 {
			small = append(small, startReserve(t.Context(), m, onGPU0, 25))
			synctest.Wait()
		}
		release(t, a)
		release(t, small[0].served(t), small[1].served(t))
		large.waiting(t)
		tooLarge.waiting(t)
		release(t, b)
		release(t, large.served(t))
		release(t, tooLarge.served(t))
	})
}

// No fitting request is let in while the door is shut, but all are when the one that it was shut
// for is gone.
func TestANewHeadBringsNewPasses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 3)
		held := mustTry(t, m, onGPU0, 50, nil)
		ctx, cancel := context.WithCancel(t.Context())
		first := startReserve(ctx, m, onGPU0, 60)
		first.waiting(t)
		second := startReserve(t.Context(), m, onGPU0, 70)
		second.waiting(t)
		if n := passes(t, m, 100); n != 3 {
			t.Fatalf("%d passed by; want 3", n)
		}
		small := startReserve(t.Context(), m, onGPU0, 10)
		small.waiting(t)
		cancel()
		first.failed(t, context.Canceled)
		release(t, small.served(t)) // one of the new passes
		if n := passes(t, m, 100); n != 2 {
			t.Errorf("%d passed by; want 2", n)
		}
		second.waiting(t)
		release(t, held)
		release(t, second.served(t))
	})
}

func TestEqualWaitersAreServedInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		held := mustTry(t, m, onGPU0, 100, nil)
		var calls []*call
		for range 50 {
			calls = append(calls, startReserve(t.Context(), m, onGPU0, 40))
			synctest.Wait()
		}
		release(t, held)
		for i := range calls { // two run at a time
			r := calls[i].served(t)
			if i+2 < len(calls) {
				calls[i+2].waiting(t)
			}
			release(t, r)
		}
	})
}

// A waiter in two lines leaves both, and those behind it in the other one are served.
func TestServedElsewhereMakesWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := spaceOf(t, "gpu:0", 100), spaceOf(t, "gpu:1", 100)
		m := managerOf(t, reservation.Config{Spaces: []*tier.Space{a, b}, Bypass: -1})
		heldA, heldB := mustTry(t, m, onGPU0, 50, nil), mustTry(t, m, reservation.Specific(gpu1), 50, nil)
		either := startReserve(t.Context(), m, reservation.AnyInTier(tier.GPU), 80)
		either.waiting(t)
		small := startReserve(t.Context(), m, onGPU0, 10)
		small.waiting(t)
		release(t, heldB)
		r := either.served(t)
		if r.Space() != b {
			t.Errorf("it was put in %s", r.Space().ID())
		}
		release(t, small.served(t), r, heldA)
	})
}

// A large request among a stream of small ones that keep the space busy gets in
// after no more of them than may pass.
func TestLargeAmongAStreamOfSmall(t *testing.T) {
	const streams, bypass = 5, 16
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, bypass)
		ctx, cancel := context.WithCancel(t.Context())
		var served, waits atomic.Int64
		var wg sync.WaitGroup
		for i := range streams {
			wg.Go(func() {
				for ctx.Err() == nil {
					r, err := m.Reserve(ctx, onGPU0, 20, nil)
					if err != nil {
						continue
					}
					served.Add(1)
					time.Sleep(time.Duration(i+1) * time.Millisecond)
					release(t, r)
				}
			})
		}
		for range 20 {
			// The others act at whole milliseconds, so none is served just now.
			time.Sleep(17*time.Millisecond + 500*time.Microsecond)
			var before int64
			large := start(func() (*reservation.Reservation, error) {
				before = served.Load()
				return m.Reserve(ctx, onGPU0, 100, nil)
			})
			<-large.done
			if large.err != nil {
				t.Fatal(large.err)
			}
			if n := served.Load() - before; n > bypass {
				t.Errorf("%d were served before it; want at most %d", n, bypass)
			} else {
				waits.Add(n)
			}
			release(t, large.r)
		}
		if waits.Load() == 0 {
			t.Error("nobody ever passed by: the test shows nothing")
		}
		cancel()
		wg.Wait()
	})
}

func TestReleaseEndsAWaitingGrow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, s := one(t, 100, 0)
		held, other := mustTry(t, m, onGPU0, 60, nil), mustTry(t, m, onGPU0, 40, nil)
		growing := start(func() (*reservation.Reservation, error) { return nil, held.Grow(t.Context(), 20) })
		growing.waiting(t)
		release(t, held)
		growing.failed(t, tier.ErrReleased)
		release(t, other)
		wantUsage(t, s, 0, 0, 0)
	})
}

func TestGrowWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, s := one(t, 100, 0)
		held, other := mustTry(t, m, onGPU0, 60, nil), mustTry(t, m, onGPU0, 40, nil)
		ctx, cancel := context.WithCancel(t.Context())
		growing := start(func() (*reservation.Reservation, error) { return nil, held.Grow(ctx, 20) })
		growing.waiting(t)
		want := []reservation.Demand{{Space: gpu0, Bytes: 20, Waiters: 1}}
		if got := m.Demand(nil); !slices.Equal(got, want) {
			t.Errorf("demand is %+v; want %+v", got, want)
		}
		cancel()
		growing.failed(t, context.Canceled)
		wantReservation(t, held, 60, 60)
		growing = start(func() (*reservation.Reservation, error) { return nil, held.Grow(t.Context(), 20) })
		growing.waiting(t)
		if err := other.Shrink(20); err != nil {
			t.Error(err)
		}
		growing.served(t)
		wantReservation(t, held, 80, 80)
		wantUsage(t, s, 0, 0, 100)
		// What could never be is refused at once, for what is held is not given up
		// while it waits.
		var e *reservation.ExceededError
		if err := held.Grow(t.Context(), 21); !errors.As(err, &e) || e.Requested != 101 || e.Limit != 100 {
			t.Errorf("%v", err)
		}
		// A limit that is lowered makes a wait vain.
		growing = start(func() (*reservation.Reservation, error) { return nil, held.Grow(t.Context(), 15) })
		growing.waiting(t)
		if err := s.SetLimit(94); err != nil {
			t.Error(err)
		}
		growing.failed(t, reservation.ErrExceeded)
		wantReservation(t, held, 80, 80)
		release(t, held, other)
	})
}
