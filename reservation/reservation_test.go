package reservation_test

import (
	"context"
	"errors"
	"math"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

func TestAllocAndFree(t *testing.T) {
	m, s := one(t, 100, 0)
	r := mustTry(t, m, onGPU0, 60, nil)
	a, b := mustAlloc(t, r, 25), mustAlloc(t, r, 35)
	wantReservation(t, r, 60, 0)
	wantUsage(t, s, 60, 0, 0)
	if a.Space() != s || a.Size() != 25 || r.Space() != s {
		t.Errorf("a buffer of %d bytes in %s", a.Size(), a.Space().ID())
	}
	release(t, a)
	wantReservation(t, r, 60, 25) // the promise is restored
	wantUsage(t, s, 35, 0, 25)
	a = mustAlloc(t, r, 25)
	release(t, r)
	wantReservation(t, r, 0, 0)
	wantUsage(t, s, 60, 0, 0)
	release(t, a)
	wantUsage(t, s, 35, 0, 0) // now it is the space's
	release(t, b)
	wantUsage(t, s, 0, 0, 0)
}

func TestReleaseReturnsTheUnusedAtOnce(t *testing.T) {
	m, s := one(t, 100, 0)
	r := mustTry(t, m, onGPU0, 60, nil)
	b := mustAlloc(t, r, 25)
	release(t, r)
	wantUsage(t, s, 25, 0, 0)
	other := mustTry(t, m, onGPU0, 75, nil)
	release(t, b, other)
}

// What a device still works on is neither free nor promised.
func TestRetiredBytesAreNotUnused(t *testing.T) {
	m, s := one(t, 100, 0)
	p := s.Pool.(*heapPool)
	p.hold = true
	r := mustTry(t, m, onGPU0, 60, nil)
	a, b := mustAlloc(t, r, 20), mustAlloc(t, r, 30)
	release(t, a)
	wantReservation(t, r, 60, 10)
	wantUsage(t, s, 30, 20, 10)
	if _, err := r.Alloc(11); !errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("%v", err)
	}
	p.reap()
	wantReservation(t, r, 60, 30)
	wantUsage(t, s, 30, 0, 30)
	release(t, b, r)
	wantUsage(t, s, 0, 30, 0)
	p.reap()
	wantUsage(t, s, 0, 0, 0)
}

// The promise is 100 of the space's 200 bytes, others hold some, and 60 of it
// are in a buffer when 70 more are allocated: 30 are missing.
func TestPolicies(t *testing.T) {
	for _, test := range []struct {
		name     string
		policy   reservation.LimitPolicy
		others   int64
		ok       bool
		promised int64 // after the allocation
		unused   int64
		used     int64 // of the space, by all
	}{
		{"fail", reservation.Fail(), 0, false, 100, 40, 100},
		{"the zero value fails", reservation.LimitPolicy{}, 0, false, 100, 40, 100},
		{"ignore", reservation.Ignore(), 0, true, 100, 0, 130},
		{"ignore up to the capacity", reservation.Ignore(), 70, true, 100, 0, 200},
		{"ignore never goes over it", reservation.Ignore(), 71, false, 100, 40, 171},
		{"increase by the shortfall × 1", reservation.Increase(1), 0, true, 130, 0, 130},
		{"increase by ⌈30 × 1.25⌉ = 38", reservation.Increase(1.25), 0, true, 138, 8, 138},
		{"increase by ⌈30 × 1.1⌉ = 33, though 1.1 is no binary number", reservation.Increase(1.1), 0, true, 133, 3, 133},
		{"increase by ⌈30 × 1.01⌉ = 31", reservation.Increase(1.01), 0, true, 131, 1, 131},
		{"increase by the padded shortfall, exactly", reservation.Increase(1.25), 62, true, 138, 8, 200},
		{"else by the shortfall", reservation.Increase(1.25), 63, true, 130, 0, 193},
		{"else by the shortfall, exactly", reservation.Increase(1.25), 70, true, 130, 0, 200},
		{"else fail", reservation.Increase(1.25), 71, false, 100, 40, 171},
		{"a padding beyond all bounds", reservation.Increase(math.MaxFloat64), 0, true, 130, 0, 130},
	} {
		t.Run(test.name, func(t *testing.T) {
			m, s := one(t, 200, 0)
			others := mustTry(t, m, onGPU0, test.others, nil)
			r := mustTry(t, m, onGPU0, 100, &reservation.Options{Policy: test.policy})
			first := mustAlloc(t, r, 60)
			second, err := r.Alloc(70)
			if (err == nil) != test.ok {
				t.Fatalf("%v", err)
			}
			wantReservation(t, r, test.promised, test.unused)
			if got := s.State().Used(); got != test.used {
				t.Errorf("%d bytes are used; want %d", got, test.used)
			}
			if !test.ok {
				var e *reservation.ExceededError
				if !errors.As(err, &e) || e.Space != gpu0 || e.Requested != 70 || e.Available != 40 || e.Limit != 100 || e.Hint == "" {
					t.Errorf("%+v", err)
				}
				if wantCause := test.policy != reservation.Fail(); errors.Is(err, tier.ErrNoSpace) != wantCause {
					t.Errorf("%v; that there is no space is its cause: %v", err, wantCause)
				}
			}
			release(t, second, first)
			wantReservation(t, r, test.promised, test.promised)
			wantUsage(t, s, 0, 0, test.promised+test.others)
			release(t, r, others)
		})
	}
}

// What was taken beyond the promise goes back to the space first, whichever
// buffer is freed, and the promise is restored only then.
func TestOverdraftIsPaidFirst(t *testing.T) {
	m, s := one(t, 200, 0)
	r := mustTry(t, m, onGPU0, 100, &reservation.Options{Policy: reservation.Ignore()})
	a, b, c := mustAlloc(t, r, 100), mustAlloc(t, r, 30), mustAlloc(t, r, 20)
	wantReservation(t, r, 100, 0)
	wantUsage(t, s, 150, 0, 0)
	if err := r.Shrink(1); !errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("%v", err)
	}
	release(t, b) // 20 are beyond still
	wantReservation(t, r, 100, 0)
	wantUsage(t, s, 120, 0, 0)
	if err := r.TryGrow(30); err != nil { // 20 of them are there
		t.Error(err)
	}
	wantReservation(t, r, 130, 10)
	wantUsage(t, s, 120, 0, 10)
	release(t, a)
	wantReservation(t, r, 130, 110)
	a = mustAlloc(t, r, 140) // 30 beyond
	wantUsage(t, s, 160, 0, 0)
	release(t, r)
	release(t, a, c)
	wantUsage(t, s, 0, 0, 0)
}

func TestGrowAndShrink(t *testing.T) {
	m, s := one(t, 100, 0)
	r := mustTry(t, m, onGPU0, 40, nil)
	b := mustAlloc(t, r, 30)
	ctx := context.Background()
	if err := r.Grow(ctx, 20); err != nil {
		t.Error(err)
	}
	wantReservation(t, r, 60, 30)
	for name, f := range map[string]func() error{
		"Grow below 0":   func() error { return r.Grow(ctx, -1) },
		"Shrink below 0": func() error { return r.Shrink(math.MinInt64) },
		"Alloc below 0":  func() error { _, err := r.Alloc(-1); return err },
	} {
		if err := f(); err == nil || errors.Is(err, reservation.ErrExceeded) {
			t.Errorf("%s: %v", name, err)
		}
	}
	var e *reservation.ExceededError
	if err := r.Shrink(31); !errors.As(err, &e) || e.Requested != 31 || e.Available != 30 || e.Limit != 60 {
		t.Errorf("shrinking below what is used: %v", err)
	}
	for _, n := range []int64{41, math.MaxInt64} {
		if err := r.Grow(ctx, n); !errors.As(err, &e) {
			t.Errorf("growing by %d: %v", n, err)
		}
		if err := r.TryGrow(n); !errors.As(err, &e) {
			t.Errorf("growing by %d: %v", n, err)
		}
	}
	if _, err := r.Alloc(math.MaxInt64); !errors.As(err, &e) || e.Requested != math.MaxInt64 {
		t.Errorf("allocating all there is: %v", err)
	}
	other := mustTry(t, m, onGPU0, 40, nil)
	if err := r.TryGrow(1); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("growing without room: %v", err)
	}
	wantReservation(t, r, 60, 30)
	if err := r.Shrink(30); err != nil {
		t.Error(err)
	}
	if err := r.Shrink(0); err != nil {
		t.Error(err)
	}
	if err := r.TryGrow(0); err != nil {
		t.Error(err)
	}
	wantReservation(t, r, 30, 0)
	wantUsage(t, s, 30, 0, 40)
	release(t, other, b, r)
}

// Two Grow calls of one reservation wait. With what the first is given the second would make it
// larger than the space. The second gets the error at once: it would wait for ever and block all
// others.
func TestGrowThatCannotFitAnyMoreIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		r, other := mustTry(t, m, onGPU0, 40, nil), mustTry(t, m, onGPU0, 60, nil)
		first, second := grow(t, r, 40), grow(t, r, 50)
		first.waiting(t)
		second.waiting(t)
		behind := startReserve(t.Context(), m, onGPU0, 20)
		behind.waiting(t)
		release(t, other)
		first.served(t)
		wantTooLarge(t, second, 130)
		release(t, behind.served(t), r)
	})
}

// So is one that waits while an allocation makes the promise larger.
func TestIncreaseTellsGrow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		r := mustTry(t, m, onGPU0, 40, &reservation.Options{Policy: reservation.Increase(1)})
		other := mustTry(t, m, onGPU0, 60, nil)
		waits := grow(t, r, 50)
		if err := other.Shrink(20); err != nil {
			t.Error(err)
		}
		waits.waiting(t)
		b := mustAlloc(t, r, 60)
		wantTooLarge(t, waits, 110)
		release(t, b, r, other)
	})
}

// A limit that is lowered refuses Grow by what the reservation would have had in all, as
// Shrink has left it.
func TestLoweredLimitRefusesGrow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, s := one(t, 100, 0)
		r, other := mustTry(t, m, onGPU0, 40, nil), mustTry(t, m, onGPU0, 60, nil)
		waits := grow(t, r, 30)
		if err := errors.Join(r.Shrink(10), s.SetLimit(60)); err != nil {
			t.Error(err)
		}
		waits.waiting(t)
		if err := s.SetLimit(59); err != nil {
			t.Error(err)
		}
		wantTooLarge(t, waits, 60)
		release(t, r, other)
	})
}

func wantTooLarge(t *testing.T, c *call, bytes int64) {
	t.Helper()
	var e *reservation.ExceededError
	if err := c.failed(t, reservation.ErrExceeded); !errors.As(err, &e) || e.Requested != bytes {
		t.Errorf("%v; want it to be about %d bytes", err, bytes)
	}
}

func TestGrowRoundsAsTheSpaceDoes(t *testing.T) {
	s := spaceAt(t, "gpu:0", 1024, 256, 0)
	m := managerOf(t, reservation.Config{Spaces: []*tier.Space{s}})
	r := mustTry(t, m, onGPU0, 1, nil)
	if err := r.TryGrow(257); err != nil {
		t.Error(err)
	}
	wantReservation(t, r, 768, 768)
	a, b := mustAlloc(t, r, 1), mustAlloc(t, r, 257)
	release(t, a, b, r)
}

// Whatever the policy did for an allocation that failed then is undone.
func TestFailedAllocLeavesTheReservationAsItWas(t *testing.T) {
	cause := errors.New("the device says no")
	for _, policy := range []reservation.LimitPolicy{reservation.Fail(), reservation.Ignore(), reservation.Increase(1.25)} {
		m, s := one(t, 200, 0)
		r := mustTry(t, m, onGPU0, 100, &reservation.Options{Policy: policy})
		first := mustAlloc(t, r, 60)
		p := s.Pool.(*heapPool)
		p.failWith(cause)
		sizes := []int64{1, 40}
		if policy != reservation.Fail() {
			sizes = append(sizes, 41, 70, 140)
		}
		for _, size := range sizes {
			if b, err := r.Alloc(size); b != nil || !errors.Is(err, cause) {
				t.Errorf("%v: %d bytes: %v, %v", policy, size, b, err)
			}
			wantReservation(t, r, 100, 40)
			wantUsage(t, s, 60, 0, 40)
		}
		release(t, first, r)
	}
}

func TestUseAfterRelease(t *testing.T) {
	m, s := one(t, 100, 0)
	for name, f := range map[string]func(r *reservation.Reservation) error{
		"Alloc":    func(r *reservation.Reservation) error { _, err := r.Alloc(1); return err },
		"Alloc(1)": func(r *reservation.Reservation) error { _, err := r.Alloc(1); return err },
		"Alloc(0)": func(r *reservation.Reservation) error { _, err := r.Alloc(0); return err },
		"Grow":     func(r *reservation.Reservation) error { return r.Grow(t.Context(), 1) },
		"TryGrow":  func(r *reservation.Reservation) error { return r.TryGrow(1) },
		"Shrink":   func(r *reservation.Reservation) error { return r.Shrink(0) },
	} {
		r := mustTry(t, m, onGPU0, 10, &reservation.Options{Policy: reservation.Ignore()})
		release(t, r)
		if err := f(r); !errors.Is(err, tier.ErrReleased) {
			t.Errorf("%s: %v", name, err)
		}
		if err := f(nil); !errors.Is(err, tier.ErrReleased) {
			t.Errorf("%s on nil: %v", name, err)
		}
		wantReservation(t, r, 0, 0)
		wantUsage(t, s, 0, 0, 0)
	}
	var none *reservation.Reservation
	if err := none.Release(); err != nil {
		t.Errorf("Release of nil: %v", err)
	}
}

func TestSecondReleaseChangesNothing(t *testing.T) {
	m, s := one(t, 100, 0)
	r, other := mustTry(t, m, onGPU0, 10, nil), mustTry(t, m, onGPU0, 20, nil)
	release(t, r)
	func() {
		defer func() {
			if p := recover(); (p != nil) != invariants.Enabled {
				t.Errorf("panic: %v", p)
			}
		}()
		if err := r.Release(); !errors.Is(err, tier.ErrReleased) {
			t.Errorf("%v", err)
		}
	}()
	wantUsage(t, s, 0, 0, 20)
	release(t, other)
}

// Many goroutines use one reservation, and free each other's buffers while it is
// released.
func TestReservationIsSafeForConcurrentUse(t *testing.T) {
	const goroutines, rounds = 8, 300
	for _, policy := range []reservation.LimitPolicy{reservation.Fail(), reservation.Ignore(), reservation.Increase(1.5)} {
		m, s := one(t, 1000, 0)
		r := mustTry(t, m, onGPU0, 100, &reservation.Options{Policy: policy})
		buffers := make(chan *tier.Buffer, 8)
		var allocating, freeing sync.WaitGroup
		for g := range goroutines {
			allocating.Go(func() {
				for i := range rounds {
					b, err := r.Alloc(int64(g*7+i%13) + 1)
					switch {
					case err == nil:
						buffers <- b
					case errors.Is(err, tier.ErrReleased), errors.Is(err, reservation.ErrExceeded):
					default:
						t.Error(err)
					}
					if n := int64(i % 5); r.TryGrow(n) == nil {
						if err := r.Shrink(n); err != nil && !errors.Is(err, reservation.ErrExceeded) && !errors.Is(err, tier.ErrReleased) {
							t.Error(err)
						}
					}
					if g == 0 && i == rounds*3/4 {
						release(t, r)
					}
				}
			})
			freeing.Go(func() {
				for b := range buffers {
					if used := s.State().Used(); used > 1000 {
						t.Errorf("%d of 1000 bytes are used", used)
					}
					release(t, b)
				}
			})
		}
		allocating.Wait()
		close(buffers)
		freeing.Wait()
		wantUsage(t, s, 0, 0, 0)
	}
}
