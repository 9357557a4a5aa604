package permit_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
)

// newPool returns a pool that must be whole when the test ends.
func newPool(t testing.TB, cfg permit.Config) *permit.Pool {
	t.Helper()
	p, err := permit.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Errorf("closing: %v", err)
		}
		full(t, p)
	})
	return p
}

// abc has three budgets of 100 bytes each.
func abc(slots int) permit.Config {
	budgets := []permit.Budget{{Name: "a", Bytes: 100}, {Name: "b", Bytes: 100}, {Name: "c", Bytes: 100}}
	return permit.Config{Budgets: budgets, Slots: &slots}
}

// full checks that nothing of p is held.
func full(t testing.TB, p *permit.Pool) {
	t.Helper()
	for _, b := range p.Stats().Budgets {
		if b.Held != 0 {
			t.Errorf("%d of %d bytes of %s are held", b.Held, b.Total, b.Name)
		}
	}
	if s := p.Stats(); s.HeldSlots != 0 {
		t.Errorf("slots are held: %+v", s)
	}
	if n := p.Stats().Waiting; n != 0 {
		t.Errorf("%d wait", n)
	}
}

// available returns how many bytes of a budget no permit has.
func available(p *permit.Pool, name string) int64 {
	for _, b := range p.Stats().Budgets {
		if b.Name == name {
			return b.Total - b.Held
		}
	}
	return -1
}

// of makes a request of pairs of a name and a number of bytes.
func of(t testing.TB, pairs ...any) permit.Request {
	t.Helper()
	r := permit.Request{Bytes: make(map[string]int64)}
	for i := 0; i < len(pairs); i += 2 {
		r.Bytes[pairs[i].(string)] += int64(pairs[i+1].(int))
	}
	return r
}

func slot() permit.Request { return permit.Request{Spill: true} }

func spill(r permit.Request) permit.Request {
	r.Spill = true
	return r
}

func capped(r permit.Request) permit.Request {
	r.Capped = true
	return r
}

func try(t testing.TB, p *permit.Pool, r permit.Request) *permit.Permit {
	t.Helper()
	got, err := p.TryAcquire(r)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func release(t testing.TB, permits ...*permit.Permit) {
	t.Helper()
	for _, p := range permits {
		if err := p.Release(); err != nil {
			t.Error(err)
		}
	}
}

// releasedTwice checks what Release of a released permit returns.
func releasedTwice(t *testing.T, p *permit.Permit) {
	t.Helper()
	if err := p.Release(); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("a second release: %v", err)
	}
}

// call is an Acquire on a goroutine of its own, inside a synctest bubble.
type call struct {
	over atomic.Bool
	got  *permit.Permit
	err  error
}

func start(ctx context.Context, p *permit.Pool, r permit.Request) *call {
	c := new(call)
	go func() {
		c.got, c.err = p.Acquire(ctx, r)
		c.over.Store(true)
	}()
	synctest.Wait()
	return c
}

func (c *call) waiting(t *testing.T) {
	t.Helper()
	synctest.Wait()
	if c.over.Load() {
		t.Fatalf("it does not wait: %v", c.err)
	}
}

func (c *call) served(t *testing.T) *permit.Permit {
	t.Helper()
	synctest.Wait()
	if !c.over.Load() || c.err != nil {
		t.Fatalf("it was not served: over %v, %v", c.over.Load(), c.err)
	}
	return c.got
}

func (c *call) failed(t *testing.T, want error) {
	t.Helper()
	synctest.Wait()
	if !c.over.Load() || !errors.Is(c.err, want) || c.got != nil {
		t.Fatalf("over %v, %v; want %v", c.over.Load(), c.err, want)
	}
}
