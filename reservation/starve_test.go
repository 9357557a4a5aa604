package reservation_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// boundOf is how many may pass, by what Config.Bypass says.
var boundOf = map[int]int{0: 16, -1: 0, 1: 1, 64: 64}

// stream is goroutines that keep a space of 100 bytes full, ten bytes each, and come
// back at once. It counts how often one was served.
type stream struct {
	served atomic.Int64
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// startStream starts it and returns when it fills the space. The caller is in a
// bubble; those of the stream act at whole milliseconds of its time.
func startStream(t *testing.T, m *reservation.Manager) *stream {
	ctx, cancel := context.WithCancel(t.Context())
	s := &stream{cancel: cancel}
	for i := range 10 {
		s.wg.Go(func() {
			for ctx.Err() == nil {
				r, err := m.Reserve(ctx, onGPU0, 10, nil)
				if err != nil {
					continue
				}
				s.served.Add(1)
				time.Sleep(time.Duration(i+1) * time.Millisecond)
				release(t, r)
			}
		})
	}
	time.Sleep(20*time.Millisecond + 500*time.Microsecond)
	synctest.Wait()
	return s
}

func (s *stream) end() {
	s.cancel()
	s.wg.Wait()
}

// Among small ones that would keep the space full for ever, a large request gets in
// after as many of them as may pass it, and not one more.
func TestLargeIsNotStarved(t *testing.T) {
	for bypass, bound := range boundOf {
		synctest.Test(t, func(t *testing.T) {
			m, _ := one(t, 100, bypass)
			small := startStream(t, m)
			before := small.served.Load()
			r, err := m.Reserve(t.Context(), onGPU0, 100, nil)
			if err != nil {
				t.Fatal(err)
			}
			if n := small.served.Load() - before; n != int64(bound) {
				t.Errorf("bypass %d: %d were served before it; want %d", bypass, n, bound)
			}
			release(t, r)
			small.end()
		})
	}
}

// A waiter behind k others can be passed by k+1 times as many, as each of the k is the head in its
// turn, and by no more.
func TestKWaitersInFrontThatGo(t *testing.T) {
	for _, k := range []int{0, 1, 10} {
		synctest.Test(t, func(t *testing.T) {
			const bypass = 4
			m, _ := one(t, 100, bypass)
			held := mustTry(t, m, onGPU0, 50, nil)
			var cancels []func()
			for range k {
				ctx, cancel := context.WithCancel(t.Context())
				cancels = append(cancels, cancel)
				startReserve(ctx, m, onGPU0, 100).waiting(t)
			}
			last := startReserve(t.Context(), m, onGPU0, 100)
			last.waiting(t)
			passed := passes(t, m, 1000)
			for _, cancel := range cancels {
				cancel()
				last.waiting(t)
				passed += passes(t, m, 1000)
			}
			if want := (k + 1) * bypass; passed != want {
				t.Errorf("%d passed; want %d", passed, want)
			}
			release(t, held)
			release(t, last.served(t))
		})
	}
}

// In a stream of small requests those that wait for all of the space are served in their order, and
// small ones pass only while the bound lets them.
func TestKWaitersInFront(t *testing.T) {
	for _, k := range []int{1, 3, 10} {
		synctest.Test(t, func(t *testing.T) {
			const bypass = 4
			m, _ := one(t, 100, bypass)
			small := startStream(t, m)
			before := small.served.Load()
			var order []int
			var wg sync.WaitGroup
			for i := range k + 1 {
				wg.Go(func() {
					r, err := m.Reserve(t.Context(), onGPU0, 100, nil)
					if err != nil {
						t.Error(err)
						return
					}
					order = append(order, i) // the holder of all is alone
					if n, most := small.served.Load()-before, int64((i+1)*bypass); n > most {
						t.Errorf("%d small ones were served before number %d; want at most %d", n, i, most)
					}
					release(t, r)
				})
				synctest.Wait()
			}
			wg.Wait()
			for i := range order {
				if order[i] != i {
					t.Errorf("they were served in the order %v", order)
				}
			}
			small.end()
		})
	}
}

// Within the bound no small request waits for a large one that cannot run yet. The first beyond it
// does, and what is freed then is kept, byte by byte, until the large one fits, which it does at
// that very release.
func TestWithinTheBoundNobodyWaits(t *testing.T) {
	for bypass, bound := range boundOf {
		synctest.Test(t, func(t *testing.T) {
			m, s := one(t, 1000, bypass)
			var held []*reservation.Reservation
			for range 10 {
				held = append(held, mustTry(t, m, onGPU0, 50, nil))
			}
			large := startReserve(t.Context(), m, onGPU0, 1000)
			large.waiting(t)
			for i := range bound {
				r, err := m.Reserve(t.Context(), onGPU0, 5, nil) // a bubble ends with a panic if it waits
				if err != nil || m.Waits().Count != 0 {
					t.Fatalf("number %d: %v, %d waited", i, err, m.Waits().Count)
				}
				held = append(held, r)
			}
			late := startReserve(t.Context(), m, onGPU0, 5)
			late.waiting(t)
			for i, r := range held {
				large.waiting(t)
				late.waiting(t)
				if _, err := m.TryReserve(onGPU0, 1, nil); !errors.Is(err, tier.ErrNoSpace) {
					t.Fatalf("%d free bytes were not kept: %v", s.State().Available, err)
				}
				release(t, r)
				if i == len(held)-1 {
					release(t, large.served(t))
				}
			}
			release(t, late.served(t))
		})
	}
}

// A head that is cancelled, or whose time is up, is gone at that moment, and all that were kept
// waiting for its sake run at the same moment.
func TestHeadThatGoesLetsAllRun(t *testing.T) {
	for name, makeContext := range map[string]func(context.Context) (context.Context, func()){
		"cancelled": func(ctx context.Context) (context.Context, func()) {
			ctx, cancel := context.WithCancel(ctx)
			return ctx, cancel
		},
		"its time is up": func(ctx context.Context) (context.Context, func()) {
			ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
			return ctx, func() { time.Sleep(3 * time.Second); cancel() }
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m, s := one(t, 100, -1)
				held := mustTry(t, m, onGPU0, 50, nil)
				ctx, end := makeContext(t.Context())
				head := startReserve(ctx, m, onGPU0, 90)
				head.waiting(t)
				var calls []*call
				for range 5 {
					calls = append(calls, startReserve(t.Context(), m, onGPU0, 10))
					synctest.Wait()
				}
				begun := time.Now()
				end()
				err := head.failed(t, ctx.Err())
				if !strings.HasPrefix(err.Error(), "reservation: waiting for 90 bytes in gpu:0: ") {
					t.Errorf("%v", err)
				}
				for _, c := range calls {
					release(t, c.served(t))
				}
				if d := time.Since(begun); d > 3*time.Second {
					t.Errorf("it took %v", d)
				}
				if d := m.Demand(nil); len(d) != 0 {
					t.Errorf("demand is %+v", d)
				}
				wantUsage(t, s, 0, 0, 50)
				release(t, held)
			})
		})
	}
}

// A head of two lines is passed within the bound of each, by themselves; served from
// one it leaves the other, whose next head brings passes of its own.
func TestHeadOfTwoLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const bypass = 3
		a, b := spaceOf(t, "gpu:0", 100), spaceOf(t, "gpu:1", 100)
		m := managerOf(t, reservation.Config{Spaces: []*tier.Space{a, b}, Bypass: bypass})
		onGPU1 := reservation.Specific(gpu1)
		heldA, heldB := mustTry(t, m, onGPU0, 50, nil), mustTry(t, m, onGPU1, 50, nil)
		either := startReserve(t.Context(), m, reservation.AnyInTier(tier.GPU), 100)
		either.waiting(t)
		pass := func(s reservation.Strategy) (n int) {
			for ; n < 100; n++ {
				r, err := m.TryReserve(s, 10, nil)
				if err != nil {
					return n
				}
				release(t, r)
			}
			return n
		}
		if n := pass(onGPU0); n != bypass {
			t.Errorf("%d passed in the first; want %d", n, bypass)
		}
		if n := pass(reservation.AnyInTier(tier.GPU)); n != bypass {
			t.Errorf("%d passed in the second; want %d", n, bypass)
		}
		next := startReserve(t.Context(), m, onGPU0, 80)
		next.waiting(t)
		release(t, heldB)
		r := either.served(t)
		if r.Space() != b {
			t.Errorf("it was put in %s", r.Space().ID())
		}
		next.waiting(t)
		if n := pass(onGPU0); n != bypass {
			t.Errorf("%d passed the next head; want %d", n, bypass)
		}
		release(t, heldA)
		release(t, next.served(t), r)
	})
}

// Grow is in the line like any request: behind older ones, with room or without, and as the head it
// is passed no more often.
func TestGrowStandsInLine(t *testing.T) {
	for bypass, bound := range boundOf {
		synctest.Test(t, func(t *testing.T) {
			m, _ := one(t, 100, bypass)
			r, other := mustTry(t, m, onGPU0, 20, nil), mustTry(t, m, onGPU0, 40, nil)
			ctx, cancel := context.WithCancel(t.Context())
			large := startReserve(ctx, m, onGPU0, 90)
			large.waiting(t)
			growing := start(func() (*reservation.Reservation, error) { return r, r.Grow(t.Context(), 50) })
			growing.waiting(t)
			if n := passes(t, m, 1000); n != bound {
				t.Errorf("bypass %d: %d passed the large one; want %d", bypass, n, bound)
			}
			cancel()
			large.failed(t, context.Canceled)
			growing.waiting(t) // 40 are free
			if n := passes(t, m, 1000); n != bound {
				t.Errorf("bypass %d: %d passed Grow; want %d", bypass, n, bound)
			}
			if err := other.Shrink(10); err != nil {
				t.Error(err)
			}
			growing.served(t)
			wantReservation(t, r, 70, 70)
			release(t, r, other)
		})
	}
}

// With the limit lowered below what the head needs, the head gets the error at once, without a
// release, and those behind it run.
func TestLoweredLimitUnblocksThoseBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, s := one(t, 100, -1)
		r := mustTry(t, m, onGPU0, 40, nil)
		head := startReserve(t.Context(), m, onGPU0, 90)
		head.waiting(t)
		growing := start(func() (*reservation.Reservation, error) { return r, r.Grow(t.Context(), 45) })
		growing.waiting(t)
		next := startReserve(t.Context(), m, onGPU0, 40)
		next.waiting(t)
		if err := s.SetLimit(80); err != nil {
			t.Fatal(err)
		}
		var e *reservation.ExceededError
		if err := head.failed(t, reservation.ErrExceeded); !errors.As(err, &e) || e.Requested != 90 || e.Limit != 80 {
			t.Errorf("%v", err)
		}
		growing.failed(t, reservation.ErrExceeded) // 40 are kept while it waits for 45
		got := next.served(t)
		wantReservation(t, r, 40, 40)
		release(t, got, r)
	})
}

// Thirty thousand waiters are served in the order in which they came. One in the
// midst of them that is cancelled is gone at once, and Close ends the rest.
func TestThirtyThousandWaiters(t *testing.T) {
	n := mostGoroutines
	if testing.Short() || invariants.Enabled {
		n /= 20
	}
	s := spaceOf(t, "gpu:0", 10)
	came := make(chan struct{}, 1) // so that they come in order
	m, err := reservation.NewManager(reservation.Config{Spaces: []*tier.Space{s}, Events: func(e events.Event) {
		if e.Kind == events.WaitBegun {
			came <- struct{}{}
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	held := mustTry(t, m, onGPU0, 10, nil)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	half, middle := n/2, n/4
	var order []int
	var closed atomic.Int64
	var wg sync.WaitGroup
	halfway := make(chan *reservation.Reservation)
	gone := make(chan error, 1)
	for i := range n {
		wg.Go(func() {
			mine := t.Context()
			if i == middle {
				mine = ctx
			}
			r, err := m.Reserve(mine, onGPU0, 10, nil)
			switch {
			case i == middle:
				gone <- err
			case errors.Is(err, tier.ErrClosed):
				closed.Add(1)
			case err != nil:
				t.Error(err)
			default:
				order = append(order, i) // the holder of all is alone
				if i == half {
					halfway <- r
					return
				}
				release(t, r)
			}
		})
		<-came
	}
	if d := m.Demand(nil); len(d) != 1 || d[0].Waiters != n || d[0].Bytes != 10*int64(n) {
		t.Errorf("demand is %+v", d)
	}
	cancel()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Errorf("the cancelled one: %v", err)
	}
	if d := m.Demand(nil); d[0].Waiters != n-1 {
		t.Errorf("demand is %+v", d)
	}
	release(t, held)
	held = <-halfway
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
	release(t, held)
	if len(order) != half || closed.Load() != int64(n-half-1) {
		t.Errorf("%d of %d were served, and %d told that it is closed", len(order), n, closed.Load())
	}
	want := 0
	for _, i := range order {
		if want == middle {
			want++
		}
		if i != want {
			t.Fatalf("number %d was served when it was the turn of %d", i, want)
		}
		want++
	}
	wantUsage(t, s, 0, 0, 0)
}
