package reservation_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Whatever makes room ends a wait. held holds all of the space's 100 bytes, 40
// of them in a buffer; 30 are waited for.
func TestWaitEndsBy(t *testing.T) {
	for name, act := range map[string]func(t *testing.T, s *tier.Space, held *reservation.Reservation, b *tier.Buffer){
		"release": func(t *testing.T, _ *tier.Space, held *reservation.Reservation, _ *tier.Buffer) {
			release(t, held)
		},
		"shrink": func(t *testing.T, _ *tier.Space, held *reservation.Reservation, _ *tier.Buffer) {
			if err := held.Shrink(30); err != nil {
				t.Error(err)
			}
		},
		"freeing a buffer of a released reservation": func(t *testing.T, s *tier.Space, held *reservation.Reservation, b *tier.Buffer) {
			if err := s.SetLimit(80); err != nil { // so that the release alone is not enough
				t.Error(err)
			}
			release(t, held)
			synctest.Wait()
			release(t, b)
		},
		"freeing a buffer and shrinking": func(t *testing.T, _ *tier.Space, held *reservation.Reservation, b *tier.Buffer) {
			release(t, b) // its bytes are held's again
			if err := held.Shrink(100); err != nil {
				t.Error(err)
			}
		},
		"reaping": func(t *testing.T, s *tier.Space, held *reservation.Reservation, b *tier.Buffer) {
			p := s.Pool.(*heapPool)
			p.hold = true
			if err := s.SetLimit(60); err != nil {
				t.Error(err)
			}
			release(t, held, b)
			wantUsage(t, s, 0, 40, 0)
			p.reap()
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m, s := one(t, 100, 0)
				held := mustTry(t, m, onGPU0, 100, nil)
				b := mustAlloc(t, held, 40)
				c := startReserve(t.Context(), m, onGPU0, 30)
				c.waiting(t)
				act(t, s, held, b)
				r := c.served(t)
				wantReservation(t, r, 30, 30)
				release(t, r)
				if held.Bytes() > 0 {
					release(t, held)
				}
				if s.State().Used() > 0 {
					release(t, b)
				}
			})
		})
	}
}

func TestRaisedLimitEndsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, s := one(t, 100, 0)
		if err := s.SetLimit(60); err != nil {
			t.Fatal(err)
		}
		held := mustTry(t, m, onGPU0, 50, nil)
		c := startReserve(t.Context(), m, onGPU0, 40)
		c.waiting(t)
		if err := s.SetLimit(89); err != nil {
			t.Fatal(err)
		}
		c.waiting(t)
		if err := s.SetLimit(90); err != nil {
			t.Fatal(err)
		}
		release(t, c.served(t), held)
	})
}

// TestRoomIsHeldWhileOneWaits: a request that can never fit any more ends also if the space has told
// nobody that less of it can be free, as when a device panics while it frees memory.
func TestRoomIsHeldWhileOneWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := spaceOf(t, "gpu:0", 100)
		m := managerOf(t, reservation.Config{Spaces: []*tier.Space{s}, StallTimeout: -1})
		held := mustTry(t, m, onGPU0, 50, nil)
		w := startReserve(t.Context(), m, onGPU0, 60)
		w.waiting(t)
		s.Hold(50)
		time.Sleep(time.Second)
		_ = w.failed(t, reservation.ErrExceeded)
		release(t, held)
	})
}

// A limit that falls below what is waited for makes the wait vain.
func TestLoweredLimitRefusesWaiters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, spaces := machine(t)
		a, b := mustTry(t, m, onGPU0, 1000, nil), mustTry(t, m, reservation.Specific(gpu1), 1000, nil)
		either := startReserve(t.Context(), m, reservation.AnyInTier(tier.GPU), 500)
		first := startReserve(t.Context(), m, onGPU0, 500)
		small := startReserve(t.Context(), m, onGPU0, 400)
		either.waiting(t)
		first.waiting(t)
		small.waiting(t)
		if err := spaces["gpu:0"].SetLimit(499); err != nil {
			t.Fatal(err)
		}
		err := first.failed(t, reservation.ErrExceeded)
		var e *reservation.ExceededError
		if !errors.As(err, &e) || e.Requested != 500 || e.Limit != 499 {
			t.Errorf("%v", err)
		}
		either.waiting(t) // it may fit the other
		small.waiting(t)
		if got := m.Demand(nil); len(got) != 2 || got[0].Bytes != 400 || got[1].Bytes != 500 {
			t.Errorf("demand is %+v", got)
		}
		// It must not block those that fit, and comes back in its old place when the limit does.
		release(t, a)
		release(t, small.served(t))
		a = mustTry(t, m, onGPU0, 499, nil)
		later := startReserve(t.Context(), m, onGPU0, 450)
		later.waiting(t)
		if err := spaces["gpu:0"].SetLimit(1000); err != nil {
			t.Fatal(err)
		}
		r := either.served(t)
		if r.Space() != spaces["gpu:0"] {
			t.Errorf("it was put in %s", r.Space().ID())
		}
		later.waiting(t)
		release(t, r, a, b)
		release(t, later.served(t))
	})
}

func TestWaitIsForAnyCandidate(t *testing.T) {
	for _, free := range []int{0, 1} {
		synctest.Test(t, func(t *testing.T) {
			m, spaces := machine(t)
			held := []*reservation.Reservation{mustTry(t, m, onGPU0, 1000, nil), mustTry(t, m, reservation.Specific(gpu1), 1000, nil)}
			c := startReserve(t.Context(), m, reservation.AnyInTier(tier.GPU), 700)
			c.waiting(t)
			want := []reservation.Demand{
				{Space: gpu0, Bytes: 700, Waiters: 1}, {Space: gpu1, Bytes: 700, Waiters: 1},
			}
			if got := m.Demand(nil); !slices.Equal(got, want) {
				t.Errorf("demand is %+v; want %+v", got, want)
			}
			release(t, held[free])
			r := c.served(t)
			if want := []*tier.Space{spaces["gpu:0"], spaces["gpu:1"]}[free]; r.Space() != want {
				t.Errorf("it was put in %s", r.Space().ID())
			}
			if got := m.Demand(nil); len(got) != 0 {
				t.Errorf("demand is %+v", got)
			}
			release(t, r, held[1-free])
			if p := spaces["host:0"].State().Peak; p != 0 {
				t.Errorf("%d bytes of host memory were used", p)
			}
		})
	}
}

func TestWaitOfReserveUpTo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		a, b := mustTry(t, m, onGPU0, 90, nil), mustTry(t, m, onGPU0, 10, nil)
		c := start(func() (*reservation.Reservation, error) { return m.ReserveUpTo(t.Context(), onGPU0, 20, 95, nil) })
		c.waiting(t)
		if got := m.Demand(nil); len(got) != 1 || got[0].Bytes != 20 {
			t.Errorf("demand is %+v", got)
		}
		release(t, b)
		c.waiting(t)
		release(t, a)
		r := c.served(t)
		wantReservation(t, r, 95, 95)
		release(t, r)
	})
}

func TestCancelledWaitLetsTheNextRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, s := one(t, 100, -1) // no request may pass
		held := mustTry(t, m, onGPU0, 50, nil)
		why := errors.New("changed my mind")
		ctx, cancel := context.WithCancelCause(t.Context())
		large := startReserve(ctx, m, onGPU0, 90)
		large.waiting(t)
		small := startReserve(t.Context(), m, onGPU0, 40)
		small.waiting(t) // there is room, but not past the large one
		cancel(why)
		err := large.failed(t, why)
		if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "waiting for 90 bytes in gpu:0: changed my mind") {
			t.Errorf("%v", err)
		}
		release(t, small.served(t), held)
		wantUsage(t, s, 0, 0, 0)
		if got := m.Demand(nil); len(got) != 0 {
			t.Errorf("demand is %+v", got)
		}
	})
}

func TestDeadlineEndsWaitOnTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		held := mustTry(t, m, onGPU0, 100, nil)
		begun := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		_, err := m.Reserve(ctx, onGPU0, 1, nil)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		if d := time.Since(begun); d != 3*time.Second {
			t.Errorf("it took %v", d)
		}
		if err := held.Grow(ctx, 0); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("growing then: %v", err)
		}
		release(t, held)
		if _, err := m.Reserve(ctx, onGPU0, 1, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a request after the deadline: %v", err)
		}
		const took = 3 * time.Second
		if got := m.Waits(); got.Count != 1 || got.Total != took || got.P50 != took || got.P99 != took || got.Max != took || got.Within[1<<31] != 0 || got.Within[1<<32] != 1 {
			t.Errorf("waits are %+v; want one of %v", got, took)
		}
	})
}

func TestCloseEndsAllWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := spaceOf(t, "gpu:0", 100)
		m, err := reservation.NewManager(reservation.Config{Spaces: []*tier.Space{s}})
		if err != nil {
			t.Fatal(err)
		}
		held := mustTry(t, m, onGPU0, 100, nil)
		var calls []*call
		for i := range 20 {
			calls = append(calls, startReserve(t.Context(), m, onGPU0, int64(i+1)))
		}
		calls = append(calls, start(func() (*reservation.Reservation, error) {
			r, err := m.Reserve(t.Context(), onGPU0, 0, nil)
			if err != nil {
				return nil, err
			}
			defer r.Release()
			return nil, r.Grow(t.Context(), 10)
		}))
		for _, c := range calls {
			c.waiting(t)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		for _, c := range calls {
			c.failed(t, tier.ErrClosed)
		}
		release(t, held)
		wantUsage(t, s, 0, 0, 0)
	})
}

// The oldest waiter evicts, on its goroutine, as long as that moves something; the others do not.
func TestHeadEvicts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var m *reservation.Manager
		var calls []int64
		var parts []*reservation.Reservation
		m = managerOf(t, reservation.Config{
			Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100)},
			Evict: func(_ context.Context, id tier.ID, bytes int64) reservation.Eviction {
				if len(m.Demand(nil)) != 1 { // no lock is held: this must not deadlock
					t.Error("evicting for a request that does not wait")
				}
				if calls = append(calls, bytes); len(parts) == 0 {
					return reservation.Eviction{Coming: true}
				}
				release(t, parts[0])
				parts = parts[1:]
				return reservation.Eviction{Moved: 20}
			},
		})
		held := mustTry(t, m, onGPU0, 60, nil)
		parts = append(parts, mustTry(t, m, onGPU0, 20, nil), mustTry(t, m, onGPU0, 20, nil))
		if _, err := m.TryReserve(onGPU0, 1, nil); err == nil {
			t.Error("a full space had room")
		}
		if calls != nil {
			t.Error("evicted though nobody waits")
		}
		c := startReserve(t.Context(), m, onGPU0, 50)
		c.waiting(t)
		if want := []int64{50, 30, 10}; !slices.Equal(calls[:3], want) {
			t.Errorf("evicted %d bytes, want %d first", calls, want)
		}
		d := startReserve(t.Context(), m, onGPU0, 70)
		d.waiting(t)
		e := startReserve(t.Context(), m, onGPU0, 65)
		e.waiting(t)
		got := m.Demand(make([]reservation.Demand, 1))
		if want := (reservation.Demand{Space: gpu0, Bytes: 185, Waiters: 3}); len(got) != 2 || got[1] != want {
			t.Errorf("demand is %+v; want %+v after an empty one", got, want)
		}
		release(t, held)
		release(t, c.served(t))
		release(t, d.served(t))
		release(t, e.served(t))
	})
}

// A wait whose context ends while it evicts is over when Evict returns, and the next head evicts.
func TestCancelledEviction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := make(chan struct{}, 16)
		m := managerOf(t, reservation.Config{
			Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100)},
			Evict: func(ctx context.Context, _ tier.ID, _ int64) reservation.Eviction {
				begun <- struct{}{}
				<-ctx.Done() // a move is aborted
				return reservation.Eviction{}
			},
		})
		held := mustTry(t, m, onGPU0, 100, nil)
		ctx, cancel := context.WithCancel(t.Context())
		first := startReserve(ctx, m, onGPU0, 50)
		<-begun
		next, stop := context.WithCancel(t.Context())
		second := startReserve(next, m, onGPU0, 50)
		second.waiting(t)
		if len(begun) != 0 {
			t.Error("two requests evict from one space")
		}
		cancel()
		_ = first.failed(t, context.Canceled)
		<-begun
		stop()
		_ = second.failed(t, context.Canceled)
		release(t, held)
	})
}

// Room that comes free in a slower space while a request evicts, for which it was too late to be
// seen, is worth another call at once.
func TestRoomBelowDuringAnEviction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var below, part *reservation.Reservation
		calls := 0
		m := managerOf(t, reservation.Config{
			Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100), spaceOf(t, "host:0", 100)},
			Evict: func(context.Context, tier.ID, int64) (e reservation.Eviction) {
				if calls++; calls == 1 {
					release(t, below)
				} else {
					release(t, part)
					e.Moved = 60
				}
				return e
			},
		})
		below = mustTry(t, m, reservation.Specific(host), 100, nil)
		part = mustTry(t, m, onGPU0, 60, nil)
		held := mustTry(t, m, onGPU0, 40, nil)
		c := startReserve(t.Context(), m, onGPU0, 60)
		release(t, c.served(t), held)
	})
}

// A function of the program's that ends the goroutine of a waiter keeps no other from being served.
func TestGoexitOfAWaiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		exit := runtime.Goexit
		m := managerOf(t, reservation.Config{
			Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100)},
			Evict:  func(context.Context, tier.ID, int64) (e reservation.Eviction) { exit(); return e },
		})
		held := mustTry(t, m, onGPU0, 100, nil)
		first := startReserve(t.Context(), m, onGPU0, 60)
		<-first.done
		exit = func() {}
		second := startReserve(t.Context(), m, onGPU0, 60)
		second.waiting(t)
		if n := m.Waits().Waiting; n != 1 {
			t.Errorf("%d wait, want one", n)
		}
		release(t, held)
		release(t, second.served(t))
	})
}

// A panic of Evict, and of a listener of the space, ends no wait and keeps no waiter from being
// served, now or later.
func TestPanickingListenersWedgeNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := spaceOf(t, "gpu:0", 100)
		var log bytes.Buffer
		m := managerOf(t, reservation.Config{
			Spaces: []*tier.Space{s}, Logger: slog.New(slog.NewTextHandler(&log, nil)),
			Evict: func(context.Context, tier.ID, int64) reservation.Eviction { panic("subscriber") },
		})
		defer s.Subscribe(func(bool) { panic("listener") })()
		held := mustTry(t, m, onGPU0, 100, nil)
		c := startReserve(t.Context(), m, onGPU0, 60)
		c.waiting(t)
		release(t, held)
		got := c.served(t)
		d := startReserve(t.Context(), m, onGPU0, 60)
		d.waiting(t)
		release(t, got)
		release(t, d.served(t))
		wantUsage(t, s, 0, 0, 0)
		if !strings.Contains(log.String(), "panic=subscriber") {
			t.Errorf("the log says %q", log.String())
		}
	})
}

// A strategy that panics is an error, and the next request is served.
func TestPanickingStrategy(t *testing.T) {
	m, s := one(t, 100, 0)
	if _, err := m.Reserve(t.Context(), broken{}, 10, nil); err == nil || !strings.Contains(err.Error(), "a strategy panicked: no idea") {
		t.Errorf("reserving: %v", err)
	}
	release(t, mustTry(t, m, onGPU0, 100, nil))
	wantUsage(t, s, 0, 0, 0)
}

type broken struct{}

func (broken) Candidates(*reservation.Spaces, []*tier.Space) []*tier.Space { panic("no idea") }
func (broken) String() string                                              { return "broken" }

// restingIn fills bytes of a space with a buffer that nobody holds, as that of a batch at rest.
func restingIn(t *testing.T, m *reservation.Manager, id tier.ID, bytes int64) *tier.Buffer {
	t.Helper()
	r := mustTry(t, m, reservation.Specific(id), bytes, nil)
	b := mustAlloc(t, r, bytes)
	release(t, r)
	return b
}

// Where batches at rest fill the spaces of a request and none can leave, it is refused after
// StallTimeout, with the reason. One that may be served elsewhere waits.
func TestRefuseEndsWaitsThatAreStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := managerOf(t, reservation.Config{
			Spaces: []*tier.Space{spaceOf(t, "gpu:0", 1000), spaceOf(t, "gpu:1", 1000)},
			Evict: func(_ context.Context, id tier.ID, _ int64) (e reservation.Eviction) {
				if id == gpu0 {
					e.Why = func() string { return "use a larger disk" }
				}
				return e
			},
		})
		a, b := restingIn(t, m, gpu0, 1000), mustTry(t, m, reservation.Specific(gpu1), 950, nil)
		stuck := startReserve(t.Context(), m, onGPU0, 100)
		stuck2 := startReserve(t.Context(), m, onGPU0, 5)
		either := startReserve(t.Context(), m, reservation.AnyInTier(tier.GPU), 100)
		time.Sleep(reservation.StallTimeout - time.Second)
		other := startReserve(t.Context(), m, reservation.Specific(gpu1), 100)
		for _, c := range []*call{stuck, stuck2, either, other} {
			c.waiting(t)
		}
		time.Sleep(2 * time.Second)
		err := stuck.failed(t, tier.ErrNoSpace)
		stuck2.failed(t, tier.ErrNoSpace)
		var e *tier.NoSpaceError
		if !errors.As(err, &e) || e.Space != gpu0 || e.Requested != 100 || e.Available != 0 || e.Hint != "use a larger disk" {
			t.Errorf("%+v", err)
		}
		either.waiting(t)
		other.waiting(t)
		if n := m.Waits().Refused; n != 2 {
			t.Errorf("%d were refused; want 2", n)
		}
		rest := mustAlloc(t, b, 950)
		release(t, b)
		time.Sleep(reservation.StallTimeout + time.Second)
		either.failed(t, tier.ErrNoSpace)
		err = other.failed(t, tier.ErrNoSpace)
		if !errors.As(err, &e) || e.Space != gpu1 || e.Available != 50 || e.Hint == "use a larger disk" {
			t.Errorf("%+v", err)
		}
		release(t, a, rest)
	})
}

// The large one is refused; the one behind it, for which there is room, is not.
func TestRefuseServesThoseBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := managerOf(t, reservation.Config{
			Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100)}, Bypass: -1,
			Evict: func(context.Context, tier.ID, int64) (e reservation.Eviction) { return e },
		})
		held := restingIn(t, m, gpu0, 50)
		large := startReserve(t.Context(), m, onGPU0, 90)
		large.waiting(t)
		small := startReserve(t.Context(), m, onGPU0, 40)
		small.waiting(t)
		time.Sleep(reservation.StallTimeout + time.Second)
		large.failed(t, tier.ErrNoSpace)
		release(t, small.served(t), held)
	})
}

func TestWaitStats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		if got := m.Waits(); got.Count != 0 || got.Total != 0 || got.Max != 0 || got.Within[1<<40] != 0 {
			t.Errorf("waits are %+v at the start", got)
		}
		for i := range 100 {
			held := mustTry(t, m, onGPU0, 100, nil)
			c := startReserve(t.Context(), m, onGPU0, 1)
			c.waiting(t)
			time.Sleep(time.Duration(i+1) * time.Millisecond)
			release(t, held)
			release(t, c.served(t))
		}
		got := m.Waits()
		if got.Count != 100 || got.Total != 5050*time.Millisecond || got.Max != 100*time.Millisecond {
			t.Errorf("waits are %+v", got)
		}
		for name, p := range map[string][2]time.Duration{"P50": {got.P50, 50 * time.Millisecond}, "P99": {got.P99, 99 * time.Millisecond}} {
			if p[0] < p[1] || p[0] > p[1]*17/16 {
				t.Errorf("%s is %v; want %v or up to a sixteenth more", name, p[0], p[1])
			}
		}
	})
}

// TestWaitsThatAreNotOver: they are counted while they wait, and by their owners, and not afterwards.
func TestWaitsThatAreNotOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		held := mustTry(t, m, onGPU0, 100, nil)
		first := startReserve(reservation.NewOwner("sort").Context(t.Context()), m, onGPU0, 1)
		first.waiting(t)
		time.Sleep(3 * time.Second)
		second := startReserve(t.Context(), m, onGPU0, 1)
		second.waiting(t)
		third := startReserve(t.Context(), m, onGPU0, 1)
		third.waiting(t)
		time.Sleep(time.Second)
		if w := m.Waits(); w.Waiting != 3 || w.Oldest != 4*time.Second || w.Count != 0 {
			t.Errorf("waits are %+v", w)
		}
		want := []reservation.Blocked{{Owner: "sort", Waiting: 1, SoFar: 4 * time.Second}, {Waiting: 2, SoFar: 2 * time.Second}}
		if b := m.Blocked(); !slices.Equal(b, want) {
			t.Errorf("%+v wait; want %+v", b, want)
		}
		release(t, held)
		release(t, first.served(t), second.served(t), third.served(t))
		if w := m.Waits(); w.Waiting != 0 || w.Oldest != 0 || w.Count != 3 {
			t.Errorf("waits are %+v at the end", w)
		}
		want = []reservation.Blocked{{Owner: "sort", Waits: 1, Total: 4 * time.Second, Longest: 4 * time.Second}, {Waits: 2, Total: 2 * time.Second, Longest: time.Second}}
		if b := m.Blocked(); !slices.Equal(b, want) {
			t.Errorf("%+v have waited; want %+v", b, want)
		}
	})
}

// TestManyNamesWait: however many owners wait, a thousand or so are told apart.
func TestManyNamesWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		held := mustTry(t, m, onGPU0, 100, nil)
		ctx, cancel := context.WithCancel(t.Context())
		const waiters = 3000
		var all sync.WaitGroup
		for i := range waiters {
			all.Go(func() {
				_, _ = m.Reserve(ctx, onGPU0, 1, &reservation.Options{Owner: reservation.NewOwner(fmt.Sprint("task-", i))})
			})
		}
		synctest.Wait()
		var waiting int64
		names := m.Blocked()
		for _, b := range names {
			waiting += b.Waiting
		}
		if n := m.Waits().Waiting; waiting != waiters || n != waiters || len(names) > 1025 {
			t.Errorf("of %d waiters %d are counted, and %d by %d names", waiters, n, waiting, len(names))
		}
		cancel()
		all.Wait()
		release(t, held)
	})
}
