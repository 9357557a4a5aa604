package reservation_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Room is made just while a request begins to wait for it, thousands of times. A wake-up that is
// lost would leave the waiter until the deadline, which only a defect ever reaches.
func TestNoWakeUpIsLost(t *testing.T) {
	rounds := 3000
	if invariants.Enabled {
		rounds = 300 // its locks are a hundred times slower
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	any := reservation.AnyInTier(tier.GPU)
	for name, round := range map[string]func(t *testing.T, m *reservation.Manager, s *tier.Space, spin func()) error{
		"release": func(t *testing.T, m *reservation.Manager, _ *tier.Space, spin func()) error {
			held := mustTry(t, m, onGPU0, 100, nil)
			return race(ctx, m, onGPU0, 60, func() { spin(); release(t, held) })
		},
		"shrink": func(t *testing.T, m *reservation.Manager, _ *tier.Space, spin func()) error {
			held := mustTry(t, m, onGPU0, 100, nil)
			defer release(t, held)
			return race(ctx, m, onGPU0, 60, func() {
				spin()
				if err := held.Shrink(60); err != nil {
					t.Error(err)
				}
			})
		},
		"free": func(t *testing.T, m *reservation.Manager, _ *tier.Space, spin func()) error {
			held := mustTry(t, m, onGPU0, 100, nil)
			b := mustAlloc(t, held, 100)
			release(t, held)
			return race(ctx, m, onGPU0, 60, func() { spin(); release(t, b) })
		},
		"a higher limit": func(t *testing.T, m *reservation.Manager, s *tier.Space, spin func()) error {
			if err := s.SetLimit(70); err != nil {
				t.Fatal(err)
			}
			held := mustTry(t, m, onGPU0, 40, nil)
			defer release(t, held)
			return race(ctx, m, onGPU0, 60, func() {
				spin()
				if err := s.SetLimit(100); err != nil {
					t.Error(err)
				}
			})
		},
		"in either of two": func(t *testing.T, m *reservation.Manager, _ *tier.Space, spin func()) error {
			held, other := mustTry(t, m, onGPU0, 100, nil), mustTry(t, m, reservation.Specific(gpu1), 100, nil)
			defer release(t, other)
			return race(ctx, m, any, 60, func() { spin(); release(t, held) })
		},
		"in both of two": func(t *testing.T, m *reservation.Manager, _ *tier.Space, spin func()) error {
			held, other := mustTry(t, m, onGPU0, 100, nil), mustTry(t, m, reservation.Specific(gpu1), 100, nil)
			return race(ctx, m, any, 60, func() { spin(); release(t, held) }, func() { release(t, other) })
		},
		"release to several": func(t *testing.T, m *reservation.Manager, _ *tier.Space, spin func()) error {
			held := mustTry(t, m, onGPU0, 100, nil)
			more := func() {
				if r, err := m.Reserve(ctx, onGPU0, 40, nil); err != nil {
					t.Error(err)
				} else {
					release(t, r)
				}
			}
			return race(ctx, m, onGPU0, 60, func() { spin(); release(t, held) }, more, more)
		},
		"cancellation of the one before": func(t *testing.T, m *reservation.Manager, _ *tier.Space, spin func()) error {
			held := mustTry(t, m, onGPU0, 30, nil)
			defer release(t, held)
			first, cancel := context.WithCancel(ctx)
			large := startReserve(first, m, onGPU0, 90)
			for len(m.Demand(nil)) == 0 {
				runtime.Gosched()
			}
			err := race(ctx, m, onGPU0, 60, func() { spin(); cancel() })
			if <-large.done; !errors.Is(large.err, context.Canceled) {
				t.Errorf("the large one: %v", large.err)
			}
			return err
		},
		// The last pass is taken by one that then finds no room: while it is out,
		// the waiter that could use it must not be forgotten.
		"a pass that is given back": func(t *testing.T, m *reservation.Manager, _ *tier.Space, spin func()) error {
			held, kept := mustTry(t, m, onGPU0, 60, nil), mustTry(t, m, onGPU0, 40, nil)
			first, cancel := context.WithCancel(ctx)
			large := startReserve(first, m, onGPU0, 90)
			for len(m.Demand(nil)) == 0 {
				runtime.Gosched()
			}
			try := func() {
				spin()
				if r, err := m.TryReserve(onGPU0, 50, nil); err == nil {
					release(t, r)
				}
			}
			err := race(ctx, m, onGPU0, 60, func() { spin(); release(t, held) }, try, try, func() { spin(); cancel() })
			<-large.done
			if large.err == nil {
				t.Error("there was room for the large one")
			}
			release(t, kept)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := spaceOf(t, "gpu:0", 100), spaceOf(t, "gpu:1", 100)
			m := managerOf(t, reservation.Config{Spaces: []*tier.Space{a, b}, Bypass: 1})
			for i := range rounds {
				err := round(t, m, a, func() {
					for range i % 64 * 8 {
						runtime.KeepAlive(i)
					}
				})
				if err != nil {
					t.Fatalf("round %d: %v; %v", i, err, m.Runnable())
				}
				if t.Failed() {
					return
				}
			}
			if n := m.Waits().Count; n < int64(rounds)/100 {
				t.Errorf("only %d waited in %d rounds: the test shows nothing", n, rounds)
			}
		})
	}
}

// race reserves bytes, and gives them back, while the others act, and returns
// when all are done.
func race(ctx context.Context, m *reservation.Manager, s reservation.Strategy, bytes int64, others ...func()) error {
	var wg sync.WaitGroup
	begin := make(chan struct{})
	for _, f := range others {
		wg.Go(func() {
			<-begin
			f()
		})
	}
	close(begin)
	r, err := m.Reserve(ctx, s, bytes, nil)
	if err == nil {
		err = r.Release()
	}
	wg.Wait()
	return err
}
