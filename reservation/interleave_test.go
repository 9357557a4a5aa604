package reservation_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// The tests here make rare interleavings happen every time. Their lever is Pool.Charge: ReserveUpTo
// calls it after it has decided to serve a waiter from a space and before it charges the space.
// Time is virtual: a sleep in there lets all others go as far as they can.

// nth returns a function that calls f when it is called the nth time, by any goroutine.
func nth(n int64, f func()) func() {
	var calls atomic.Int64
	return func() {
		if calls.Add(1) == n {
			f()
		}
	}
}

// While the last pass is out, a waiter that could use it finds the door shut.
// When the pass comes back unused the waiter must be served.
func TestPassThatComesBackIsUsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 1)
		held := mustTry(t, m, onGPU0, 50)
		large := startReserve(t.Context(), m, onGPU0, 90)
		large.waiting(t)
		giveBack := m.TakePass(gpu0)
		small := startReserve(t.Context(), m, onGPU0, 30)
		small.waiting(t)
		giveBack()
		release(t, small.served(t))
		release(t, held)
		release(t, large.served(t))
	})
}

// A passing request that finds that another was faster returns the pass.
func TestPassIsGivenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, s := one(t, 100, 1)
		held := mustTry(t, m, onGPU0, 50)
		large := startReserve(t.Context(), m, onGPU0, 90)
		large.waiting(t)
		s.Pool().(*heapPool).onCharge = nth(2, func() { // the first is for the least
			if err := s.Inside().Reserve(20); err != nil {
				t.Error(err)
			}
		})
		ctx, cancel := context.WithCancel(t.Context())
		late := start(func() (reservation.Reservation, error) { return m.ReserveUpTo(ctx, onGPU0, 40, 45) })
		late.waiting(t)
		if n := passes(t, m, 100); n != 1 {
			t.Errorf("%d passed by; want 1", n)
		}
		cancel()
		late.failed(t, context.Canceled)
		s.Inside().Unreserve(20)
		release(t, held)
		release(t, large.served(t))
	})
}

// A waiter that is cancelled while it is being served gets nothing and keeps
// nothing, and the next one is served instead, by the same pass.
func TestCancelledWhileServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, s := one(t, 100, 1)
		a, b := mustTry(t, m, onGPU0, 50), mustTry(t, m, onGPU0, 50)
		large := startReserve(t.Context(), m, onGPU0, 90)
		large.waiting(t)
		ctx, cancel := context.WithCancel(t.Context())
		doomed := start(func() (reservation.Reservation, error) { return m.ReserveUpTo(ctx, onGPU0, 10, 50) })
		doomed.waiting(t)
		next := startReserve(t.Context(), m, onGPU0, 40)
		next.waiting(t)
		s.Pool().(*heapPool).onCharge = nth(1, func() {
			cancel()
			<-doomed.done
		})
		release(t, a)
		time.Sleep(time.Second)
		doomed.failed(t, context.Canceled)
		release(t, next.served(t))
		wantUsage(t, s, 0, 0, 50)
		release(t, b)
		release(t, large.served(t))
	})
}

// A waiter for either of two spaces is served from one of them, and the other is
// not charged, not even for a moment.
func TestOnlyOneSpaceIsCharged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, spaces := machine(t)
		a, kept := mustTry(t, m, onGPU0, 500), mustTry(t, m, onGPU0, 500)
		b := mustTry(t, m, reservation.Specific(gpu1), 1000)
		large := startReserve(t.Context(), m, onGPU0, 1000) // serves the first line
		large.waiting(t)
		c := start(func() (reservation.Reservation, error) {
			return m.ReserveUpTo(t.Context(), reservation.AnyInTier(tier.GPU), 10, 500)
		})
		c.waiting(t)
		spaces["gpu:0"].Pool().(*heapPool).onCharge = nth(1, func() {
			release(t, b) // c is notified that there is room in the second
			spaces["gpu:1"].ResetPeak()
			time.Sleep(time.Millisecond)
		})
		release(t, a)
		time.Sleep(time.Second)
		r := c.served(t)
		if r.Space() != spaces["gpu:0"] {
			t.Errorf("it was put in %s", r.Space().ID())
		}
		if p := spaces["gpu:1"].Usage().Peak; p != 0 {
			t.Errorf("%d bytes of the second were charged", p)
		}
		release(t, r, kept)
		release(t, large.served(t))
	})
}
