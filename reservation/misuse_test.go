package reservation_test

import (
	"context"
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// operations are all that take a number of bytes, on a manager of one space and a
// reservation of 256 bytes in it.
var operations = map[string]func(ctx context.Context, m *reservation.Manager, r *reservation.Reservation, n int64) error{
	"Reserve": func(ctx context.Context, m *reservation.Manager, _ *reservation.Reservation, n int64) error {
		return giveBack(m.Reserve(ctx, onGPU0, n, nil))
	},
	"TryReserve": func(_ context.Context, m *reservation.Manager, _ *reservation.Reservation, n int64) error {
		return giveBack(m.TryReserve(onGPU0, n, nil))
	},
	"ReserveUpTo, least": func(ctx context.Context, m *reservation.Manager, _ *reservation.Reservation, n int64) error {
		return giveBack(m.ReserveUpTo(ctx, onGPU0, n, max(n, 100), nil))
	},
	"ReserveUpTo, most": func(ctx context.Context, m *reservation.Manager, _ *reservation.Reservation, n int64) error {
		return giveBack(m.ReserveUpTo(ctx, onGPU0, 0, n, nil))
	},
	"Grow": func(ctx context.Context, _ *reservation.Manager, r *reservation.Reservation, n int64) error {
		return r.Grow(ctx, n)
	},
	"TryGrow": func(_ context.Context, _ *reservation.Manager, r *reservation.Reservation, n int64) error {
		return r.TryGrow(n)
	},
	"Shrink": func(_ context.Context, _ *reservation.Manager, r *reservation.Reservation, n int64) error {
		return r.Shrink(n)
	},
	"Alloc": func(_ context.Context, _ *reservation.Manager, r *reservation.Reservation, n int64) error {
		b, err := r.Alloc(n)
		if err != nil {
			return err
		}
		return b.Release()
	},
}

// giveBack releases what was reserved.
func giveBack(r *reservation.Reservation, err error) error {
	if err != nil {
		return err
	}
	return r.Release()
}

// For any number of bytes, each operation succeeds or returns an error of the right kind at once,
// and changes nothing then. The space has 1000 bytes and charges multiples of 256. So 744 more than
// the reservation's 256 are there, of which 512 can be charged. 768 in one piece do not fit beside
// them, but would in an empty space.
func TestAnyNumberOfBytes(t *testing.T) {
	const (
		done      = "done"
		senseless = "senseless" // neither about room nor about limits
		exceeded  = "exceeded"
		waits     = "a wait" // or no space now
	)
	want := func(op string, n int64) string {
		switch {
		case n < 0:
			return senseless
		case op == "ReserveUpTo, most":
			return done // what there is
		case op == "Shrink" || op == "Alloc":
			if n > 256 {
				return exceeded
			}
		case op == "Grow" || op == "TryGrow":
			if n > 512 {
				return exceeded
			}
		case n > 768:
			return exceeded
		case n > 512:
			return waits
		}
		return done
	}
	for op, f := range operations {
		for _, n := range []int64{
			math.MinInt64, math.MinInt64 + 1, -256, -1, 0, 1, 255, 256, 257, 512, 513, 769, 999, 1000, 1001, 1 << 40,
			math.MaxInt64 - 256, math.MaxInt64 - 255, math.MaxInt64 - 1, math.MaxInt64,
		} {
			s := spaceAt(t, "gpu:0", 1000, 256, 0)
			ctx, cancel := context.WithCancel(t.Context())
			m := managerOf(t, reservation.Config{
				Spaces: []*tier.Space{s},
				Events: func(events.Event) { cancel() }, // a request that begins to wait need not wait long
			})
			r := mustTry(t, m, onGPU0, 256, nil)
			err := f(ctx, m, r, n)
			cancel()
			got := done
			switch {
			case errors.Is(err, reservation.ErrExceeded):
				got = exceeded
				var e *reservation.ExceededError
				if !errors.As(err, &e) || e.Requested < n || e.Space != gpu0 {
					t.Errorf("%s of %d: %+v", op, n, err)
				}
			case errors.Is(err, tier.ErrNoSpace), errors.Is(err, context.Canceled):
				got = waits
			case err != nil:
				got = senseless
			}
			if got != want(op, n) {
				t.Errorf("%s of %d: %v; want it %s", op, n, err, want(op, n))
			}
			if err != nil {
				wantReservation(t, r, 256, 256)
				wantUsage(t, s, 0, 0, 256)
			}
			if d := m.Demand(nil); len(d) != 0 {
				t.Errorf("%s of %d left demand: %+v", op, n, d)
			}
			release(t, r)
		}
	}
}

// After Close of the manager nothing more is promised, and what was can be used.
func TestOperationsAfterClose(t *testing.T) {
	for op, f := range operations {
		s := spaceOf(t, "gpu:0", 1000)
		m, err := reservation.NewManager(reservation.Config{Spaces: []*tier.Space{s}})
		if err != nil {
			t.Fatal(err)
		}
		r := mustTry(t, m, onGPU0, 256, nil)
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		var want error = tier.ErrClosed
		if op == "Shrink" || op == "Alloc" {
			want = nil
		}
		if err := f(t.Context(), m, r, 100); !errors.Is(err, want) {
			t.Errorf("%s: %v; want %v", op, err, want)
		}
		release(t, r)
		wantUsage(t, s, 0, 0, 0)
	}
}

// A released reservation affects no other, even when others have been made since, which may use its
// record.
func TestReleasedReservationTouchesNoOther(t *testing.T) {
	for _, n := range []int64{-1, 0, 1, 256, math.MaxInt64} {
		m, s := one(t, 10_000, 0)
		old := mustTry(t, m, onGPU0, 256, &reservation.Options{Policy: reservation.Increase(1.25)})
		release(t, old)
		var others []*reservation.Reservation
		for range 20 {
			others = append(others, mustTry(t, m, onGPU0, 256, nil))
		}
		for _, op := range []string{"Grow", "TryGrow", "Shrink", "Alloc"} {
			if err := operations[op](
				t.Context(),
				m,
				old,
				n,
			); err == nil ||
				n >= 0 && n <= 256 && !errors.Is(err, tier.ErrReleased) {
				t.Errorf("%s of %d: %v", op, n, err)
			}
		}
		if err, panicked := releaseAgain(old); !panicked && !errors.Is(err, tier.ErrReleased) {
			t.Errorf("a second release: %v", err)
		}
		wantReservation(t, old, 0, 0)
		for _, r := range others {
			wantReservation(t, r, 256, 256)
		}
		wantUsage(t, s, 0, 0, 20*256)
		for _, r := range others {
			release(t, r)
		}
	}
}

// releaseAgain releases, and says whether that panicked, as a second release does in
// an invariants build.
func releaseAgain(r *reservation.Reservation) (err error, panicked bool) {
	defer func() {
		if p := recover(); p != nil {
			if !invariants.Enabled {
				panic(p)
			}
			panicked = true
		}
	}()
	return r.Release(), false
}

// Of two goroutines that release at once exactly one does it, while a third reserves
// and releases what may be kept in the same place.
func TestReleaseAtOnceHappensOnce(t *testing.T) {
	rounds := 5000
	if invariants.Enabled {
		rounds = 200
	}
	m, s := one(t, 1000, 0)
	for range rounds {
		r := mustTry(t, m, onGPU0, 100, nil)
		var wg sync.WaitGroup
		var once, again atomic.Int32
		begin := make(chan struct{})
		for range 2 {
			wg.Go(func() {
				<-begin
				switch err, panicked := releaseAgain(r); {
				case panicked, errors.Is(err, tier.ErrReleased):
					again.Add(1)
				case err == nil:
					once.Add(1)
				default:
					t.Error(err)
				}
			})
		}
		wg.Go(func() {
			<-begin
			other := mustTry(t, m, onGPU0, 50, nil)
			if other.Bytes() != 50 {
				t.Errorf("somebody else's is %d bytes", other.Bytes())
			}
			release(t, other)
		})
		close(begin)
		wg.Wait()
		if once.Load() != 1 || again.Load() != 1 {
			t.Fatalf("%d released it, and %d were told that it is released", once.Load(), again.Load())
		}
		wantUsage(t, s, 0, 0, 0)
		if t.Failed() {
			return
		}
	}
}

// TestUseOfAReleasedReservation: who still uses a reservation that another has released does not
// touch the next one, which has its record. The race detector looks on.
func TestUseOfAReleasedReservation(t *testing.T) {
	m, spaces := machine(t)
	s := spaces["gpu:0"]
	var wg sync.WaitGroup
	handed := make(chan *reservation.Reservation, 64)
	for range 3 {
		wg.Go(func() {
			for r := range handed {
				_ = r.TryGrow(40)
				_ = r.Shrink(40)
				if b, err := r.Alloc(40); err == nil && b != nil {
					_ = r.Shrink(1)
					_ = b.Release()
				}
				r.Bytes()
				r.Unused()
			}
		})
	}
	for i := range testseed.Rounds(60_000, 10_000) {
		r, err := m.TryReserve(onGPU0, 80, nil)
		if err != nil {
			continue
		}
		handed <- r
		if i%3 == 0 {
			r2 := r
			b, _ := r2.Alloc(80)
			_ = r.Release()
			if b != nil {
				_ = b.Release()
			}
			continue
		}
		_ = r.Release()
	}
	close(handed)
	wg.Wait()
	if u := s.State().Usage; u.Used() != 0 || u.Reserved != 0 {
		t.Errorf("%+v", u)
	}
}
