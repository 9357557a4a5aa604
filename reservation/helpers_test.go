package reservation_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

var (
	gpu0 = tier.ID{Kind: tier.GPU}
	gpu1 = tier.ID{Kind: tier.GPU, Ordinal: 1}
	host = tier.ID{Kind: tier.Host}
	// onGPU0 is made once, as in a program that avoids allocations.
	onGPU0 = reservation.Specific(gpu0)
)

// call is a request under way in another goroutine.
type call struct {
	done chan struct{}
	r    *reservation.Reservation
	err  error
}

func start(f func() (*reservation.Reservation, error)) *call {
	c := &call{done: make(chan struct{})}
	go func() {
		defer close(c.done)
		c.r, c.err = f()
	}()
	return c
}

func startReserve(ctx context.Context, m *reservation.Manager, s reservation.Strategy, bytes int64) *call {
	return start(func() (*reservation.Reservation, error) { return m.Reserve(ctx, s, bytes, nil) })
}

func (c *call) over() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// waiting fails unless c waits. The caller is in a synctest bubble.
func (c *call) waiting(t *testing.T) {
	t.Helper()
	synctest.Wait()
	if c.over() {
		t.Fatalf("the request did not wait: %v, %v", c.r, c.err)
	}
}

// served fails unless c was served, and returns its reservation.
func (c *call) served(t *testing.T) *reservation.Reservation {
	t.Helper()
	synctest.Wait()
	if !c.over() {
		t.Fatal("the request still waits")
	}
	if c.err != nil {
		t.Fatalf("the request failed: %v", c.err)
	}
	return c.r
}

// failed fails unless c ended with an error that matches want.
func (c *call) failed(t *testing.T, want error) error {
	t.Helper()
	synctest.Wait()
	if !c.over() {
		t.Fatal("the request still waits")
	}
	if !errors.Is(c.err, want) {
		t.Fatalf("the request ended with %v; want %v", c.err, want)
	}
	return c.err
}

func mustTry(t testing.TB, m *reservation.Manager, s reservation.Strategy, bytes int64, opts *reservation.Options) *reservation.Reservation {
	t.Helper()
	r, err := m.TryReserve(s, bytes, opts)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func mustAlloc(t testing.TB, r *reservation.Reservation, size int64) *tier.Buffer {
	t.Helper()
	b, err := r.Alloc(size)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

type releaser interface{ Release() error }

func release(t testing.TB, rs ...releaser) {
	t.Helper()
	for _, r := range rs {
		if err := r.Release(); err != nil {
			t.Error(err)
		}
	}
}

func wantUsage(t testing.TB, s *tier.Space, live, retired, reserved int64) {
	t.Helper()
	u := s.State().Usage
	if u.Live != live || u.Retired != retired || u.Reserved != reserved {
		t.Errorf("%s has %d live, %d retired, %d reserved; want %d, %d, %d",
			s.ID(), u.Live, u.Retired, u.Reserved, live, retired, reserved)
	}
}

func wantReservation(t testing.TB, r *reservation.Reservation, promised, unused int64) {
	t.Helper()
	if r.Bytes() != promised || r.Unused() != unused {
		t.Errorf("the reservation promises %d, %d unused; want %d, %d", r.Bytes(), r.Unused(), promised, unused)
	}
}
