package permit_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
)

// defaultBypass is the documented value of Config.Bypass.
const defaultBypass = 16

func bubble(t *testing.T, cfg permit.Config, f func(t *testing.T, p *permit.Pool)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { f(t, newPool(t, cfg)) })
}

func TestFirstComeFirstServed(t *testing.T) {
	bubble(t, abc(3), func(t *testing.T, p *permit.Pool) {
		held := try(t, p, of(t, "a", 100))
		var order []int
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				got, err := p.Acquire(t.Context(), of(t, "a", 60))
				order = append(order, i) // one holds it at a time
				if err := errors.Join(err, got.Release()); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
		}
		release(t, held)
		wg.Wait()
		if len(order) != 20 || !slices.IsSorted(order) {
			t.Errorf("served in the order %v", order)
		}
	})
}

// Others may bypass a large request that does not fit, but only so often if they need something that
// it needs, too. From then on what is free of that is kept for it.
func TestBypassIsBounded(t *testing.T) {
	for _, c := range []struct{ bypass, want int }{{0, defaultBypass}, {1, 1}, {3, 3}, {-1, 0}, {-9, 0}} {
		cfg := abc(3)
		cfg.Bypass = c.bypass
		bubble(t, cfg, func(t *testing.T, p *permit.Pool) {
			held := try(t, p, of(t, "a", 50))
			large := start(t.Context(), p, spill(of(t, "a", 60, "b", 10)))
			large.waiting(t)
			for range 50 { // a request that does not pass does not count
				if _, err := p.TryAcquire(of(t, "a", 51)); !errors.Is(err, tier.ErrOutOfBudget) {
					t.Fatal(err)
				}
			}
			for range 100 { // a request for nothing that it needs passes freely
				release(t, try(t, p, of(t, "c", 100)))
			}
			// A request that needs several things that it needs counts once.
			shares := []permit.Request{spill(of(t, "a", 1, "b", 1)), of(t, "a", 50), of(t, "b", 100), slot()}
			for i := range c.want {
				release(t, try(t, p, shares[i%len(shares)]))
			}
			for _, r := range []permit.Request{of(t, "a", 1), of(t, "b", 1), slot()} {
				if _, err := p.TryAcquire(r); !errors.Is(err, tier.ErrOutOfBudget) {
					t.Errorf("what is kept for the oldest: %v", err)
				}
			}
			small := start(t.Context(), p, of(t, "b", 1))
			small.waiting(t)
			release(t, try(t, p, of(t, "c", 100)))
			release(t, held)
			got := large.served(t)
			release(t, got, small.served(t))
		})
	}
}

// TestEachLineHasAHead: requests bypass a large one that waits for one budget only so often although an older
// one waits for another.
func TestEachLineHasAHead(t *testing.T) {
	bubble(t, abc(3), func(t *testing.T, p *permit.Pool) {
		a, b := try(t, p, of(t, "a", 100)), try(t, p, of(t, "b", 50))
		oldest := start(t.Context(), p, of(t, "a", 1))
		large := start(t.Context(), p, of(t, "b", 100, "c", 1))
		for range defaultBypass {
			release(t, try(t, p, of(t, "b", 1, "c", 1)))
		}
		for _, name := range []string{"b", "c"} {
			if _, err := p.TryAcquire(of(t, name, 1)); !errors.Is(err, tier.ErrOutOfBudget) {
				t.Errorf("what is kept for the large one: %v", err)
			}
		}
		release(t, b)
		release(t, large.served(t))
		oldest.waiting(t)
		release(t, a)
		release(t, oldest.served(t))
	})
}

// Waiters, too, pass the oldest within the bound.
func TestSmallWaitersPass(t *testing.T) {
	cfg := abc(3)
	cfg.Bypass = 2
	bubble(t, cfg, func(t *testing.T, p *permit.Pool) {
		x, y := try(t, p, of(t, "a", 50)), try(t, p, of(t, "a", 50))
		large := start(t.Context(), p, of(t, "a", 80))
		var small []*call
		for range 3 {
			small = append(small, start(t.Context(), p, of(t, "a", 10)))
		}
		release(t, x)
		release(t, small[0].served(t), small[1].served(t))
		small[2].waiting(t) // the rest is kept for the oldest
		large.waiting(t)
		release(t, y)
		got := large.served(t)
		release(t, got, small[2].served(t))
	})
}

// A waiter for one budget is not behind waiters for another.
func TestOtherBudgetsPass(t *testing.T) {
	cfg := abc(3)
	cfg.Bypass = -1
	bubble(t, cfg, func(t *testing.T, p *permit.Pool) {
		a, b := try(t, p, of(t, "a", 100)), try(t, p, of(t, "b", 100))
		var first []*call
		for range 300 {
			first = append(first, start(t.Context(), p, of(t, "a", 1)))
		}
		onB := start(t.Context(), p, of(t, "b", 1))
		release(t, b)
		release(t, onB.served(t))
		release(t, a)
		for i, c := range first {
			if i < 100 {
				release(t, c.served(t)) // and each makes room for one of the rest
			}
		}
		for _, c := range first[100:] {
			release(t, c.served(t))
		}
	})
}

// When the oldest waiter is served, the pool no longer keeps anything for it.
func TestNothingIsKeptForTheServed(t *testing.T) {
	cfg := abc(3)
	cfg.Bypass = -1
	bubble(t, cfg, func(t *testing.T, p *permit.Pool) {
		held := try(t, p, of(t, "b", 100))
		both := start(t.Context(), p, of(t, "a", 1, "b", 1))
		behind := start(t.Context(), p, of(t, "a", 1))
		behind.waiting(t)
		release(t, held)
		release(t, both.served(t), behind.served(t))
	})
}

// With budgets needed together, no waiter holds one of them.
func TestWaitersHoldNothing(t *testing.T) {
	bubble(t, abc(3), func(t *testing.T, p *permit.Pool) {
		held := try(t, p, of(t, "b", 100))
		w := start(t.Context(), p, spill(of(t, "a", 100, "b", 1)))
		w.waiting(t)
		if n := available(p, "a"); n != 100 || p.Stats().HeldSlots != 0 {
			t.Errorf("%d of a are available; slots %+v", n, p.Stats())
		}
		release(t, held)
		release(t, w.served(t))
	})
}

func TestCancelledWait(t *testing.T) {
	bubble(t, abc(3), func(t *testing.T, p *permit.Pool) {
		cause := errors.New("enough")
		ctx, cancel := context.WithCancelCause(t.Context())
		held := try(t, p, of(t, "a", 50))
		large := start(ctx, p, of(t, "a", 60))
		for range defaultBypass {
			release(t, try(t, p, of(t, "a", 1)))
		}
		next := start(t.Context(), p, of(t, "a", 10)) // fits, but is kept for the oldest
		next.waiting(t)
		cancel(cause)
		large.failed(t, cause)
		large.failed(t, context.Canceled)
		release(t, next.served(t))
		deadline, stop := context.WithTimeout(t.Context(), time.Hour)
		defer stop()
		late := start(deadline, p, of(t, "a", 60))
		late.waiting(t)
		time.Sleep(time.Hour) // of the bubble's clock
		late.failed(t, context.DeadlineExceeded)
		if p.Stats().Waiting != 0 {
			t.Errorf("%d wait", p.Stats().Waiting)
		}
		if got, err := p.Acquire(ctx, permit.Request{}); !errors.Is(err, cause) || got != nil {
			t.Errorf("with an ended context: %v", err)
		}
		release(t, held)
	})
}

func TestCloseWakesAll(t *testing.T) {
	bubble(t, abc(2), func(t *testing.T, p *permit.Pool) {
		held := try(t, p, spill(of(t, "a", 100)))
		other := try(t, p, slot())
		var waits []*call
		for _, r := range []permit.Request{of(t, "a", 1), of(t, "a", 1, "b", 1), slot(), spill(of(t, "a", 1))} {
			waits = append(waits, start(t.Context(), p, r))
		}
		var leak *permit.LeakError
		if err := p.Close(); !errors.As(err, &leak) || leak.Permits != 2 {
			t.Errorf("closing: %v", err)
		}
		for _, w := range waits {
			w.failed(t, tier.ErrClosed)
		}
		release(t, held, other)
	})
}

func TestLimitsChange(t *testing.T) {
	bubble(t, abc(3), func(t *testing.T, p *permit.Pool) {
		held := try(t, p, of(t, "a", 80))
		w := start(t.Context(), p, of(t, "a", 30))
		w.waiting(t)
		if err := p.SetTotal("a", 110); err != nil {
			t.Fatal(err)
		}
		got := w.served(t)

		// Lowered below what is held: nothing is revoked, nothing granted.
		large, small := start(t.Context(), p, of(t, "a", 60)), start(t.Context(), p, of(t, "a", 40))
		atMost60 := start(t.Context(), p, capped(of(t, "a", 60)))
		if err := p.SetTotal("a", 50); err != nil {
			t.Fatal(err)
		}
		large.failed(t, reservation.ErrExceeded)
		small.waiting(t)
		atMost60.waiting(t)
		if n := available(p, "a"); n != -60 || held.Bytes("a") != 80 || got.Bytes("a") != 30 {
			t.Errorf("%d available; permits have %d and %d", n, held.Bytes("a"), got.Bytes("a"))
		}
		var none *tier.OutOfBudgetError
		if _, err := p.TryAcquire(of(t, "a", 1)); !errors.As(err, &none) || none.Remaining != 0 {
			t.Error(err)
		}
		release(t, held)
		release(t, got)
		release(t, small.served(t))
		last := atMost60.served(t)
		if last.Bytes("a") != 50 {
			t.Errorf("capped to %d", last.Bytes("a"))
		}
		release(t, last)
		for _, c := range []struct {
			name  string
			bytes int64
		}{{"a", 0}, {"a", -1}, {"nobody", 1}} {
			if err := p.SetTotal(c.name, c.bytes); err == nil {
				t.Errorf("%s can be %d", c.name, c.bytes)
			}
		}
		if n, _ := p.Total("a"); n != 50 {
			t.Errorf("a refused change left %d", n)
		}
		full(t, p)
	})
}

func TestSlotsChange(t *testing.T) {
	bubble(t, abc(1), func(t *testing.T, p *permit.Pool) {
		first := try(t, p, slot())
		w, v := start(t.Context(), p, slot()), start(t.Context(), p, slot())
		w.waiting(t)
		if err := p.SetSlots(2); err != nil {
			t.Fatal(err)
		}
		second := w.served(t)
		v.waiting(t)
		if err := p.SetSlots(permit.Unlimited); err != nil {
			t.Fatal(err)
		}
		third := v.served(t)
		s := p.Stats()
		if !third.CanSpill() || third.Limited() || !first.Limited() ||
			s.Slots != permit.Unlimited || s.HeldSlots != 3 || s.FreeSlots != 0 {
			t.Errorf("%v, %v, %+v", third.CanSpill(), third.Limited(), s)
		}
		var many []*permit.Permit
		for range 50 {
			many = append(many, try(t, p, slot()))
		}
		bytes := try(t, p, of(t, "a", 100))
		both := start(t.Context(), p, spill(of(t, "a", 1))) // waits for bytes, and then for a slot as well
		if err := p.SetSlots(1); err != nil {
			t.Fatal(err)
		}
		if s := p.Stats(); s.Slots != 1 || s.HeldSlots != 53 || s.FreeSlots != 0 {
			t.Errorf("fewer slots than are held: %+v", s)
		}
		release(t, bytes)
		both.waiting(t)
		release(t, many...)
		both.waiting(t)
		release(t, second, third)
		both.waiting(t) // first has the only slot
		release(t, first)
		release(t, both.served(t))

		x, y := try(t, p, slot()), start(t.Context(), p, slot())
		y.waiting(t)
		release(t, x)
		release(t, y.served(t))
		for _, s := range []int{0, -2} {
			if err := p.SetSlots(s); err == nil {
				t.Errorf("there can be %v", s)
			}
		}
	})
}

// TestRandomUsers waits, gives up and changes limits at random. No limit is exceeded, all waits
// end, and then the pool has all that it had.
func TestRandomUsers(t *testing.T) {
	for seed := range testseed.Each(t, 4) {
		p := newPool(t, abc(3))
		var spilling atomic.Int64
		var wg sync.WaitGroup
		for g := range 12 {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(seed, uint64(g)))
				for range 400 {
					names := []string{"a", "b", "c"}
					r := of(t, names[rng.IntN(3)], 1+rng.IntN(60), names[rng.IntN(3)], rng.IntN(40))
					r.Spill, r.Capped = rng.IntN(2) == 0, rng.IntN(3) == 0
					ctx, cancel := context.WithCancel(t.Context())
					switch rng.IntN(8) {
					case 0:
						go cancel()
					case 1:
						if err := p.SetTotal("c", int64(100+rng.IntN(50))); err != nil {
							t.Error(err)
						}
					}
					got, err := p.Acquire(ctx, r)
					cancel()
					if err != nil {
						if !errors.Is(err, context.Canceled) {
							t.Error(err)
						}
						continue
					}
					if got.CanSpill() {
						if n := spilling.Add(1); n > 3 {
							t.Errorf("%d have a slot", n)
						}
					}
					if rng.IntN(2) == 0 {
						runtime.Gosched()
					}
					if got.CanSpill() {
						spilling.Add(-1)
					}
					if err := got.Release(); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		full(t, p)
	}
}
