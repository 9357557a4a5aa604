package reservation_test

import (
	"errors"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// hookedQuota is a quota without a limit that does something when it charges.
type hookedQuota struct {
	brokenQuota
	onCharge func()
}

func (q *hookedQuota) Charge(n int64) error {
	if f := q.onCharge; f != nil {
		q.onCharge = nil
		f()
	}
	return q.brokenQuota.Charge(n)
}

// A waiter that is served while the space is lost goes on waiting for the others.
func TestLostWhileServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, p := &hookedQuota{brokenQuota: brokenQuota{room: 100}}, &losablePool{heapPool: heapPool{granule: 1}}
		s, err := tier.NewSpace(tier.SpaceConfig{ID: gpu0, Capacity: 100, Fractions: tier.Fractions{Limit: 1}, Pool: p, Quota: q})
		if err != nil {
			t.Fatal(err)
		}
		m := managerOf(t, reservation.Config{Spaces: []*tier.Space{s, spaceOf(t, "host:0", 100)}})
		onGPU, onHost := mustTry(t, m, onGPU0, 100), mustTry(t, m, reservation.Specific(host), 100)
		c := startReserve(t.Context(), m, reservation.AnyInTiers(tier.GPU, tier.Host), 60)
		c.waiting(t)
		q.onCharge = func() { p.Lose(errGone) }
		release(t, onGPU)
		c.waiting(t)
		if s.Lost() == nil {
			t.Fatal("it was not lost")
		}
		release(t, onHost)
		if r := c.served(t); r.Space().ID() != host {
			t.Errorf("it was served from %s", r.Space().ID())
		} else {
			release(t, r)
		}
	})
}

// A reservation that is released while it grows for an allocation keeps nothing of what was
// charged.
func TestReleasedWhileAllocating(t *testing.T) {
	for _, policy := range []reservation.LimitPolicy{reservation.Ignore(), reservation.Increase(2)} {
		q := &hookedQuota{brokenQuota: brokenQuota{room: 100}}
		s, err := tier.NewSpace(tier.SpaceConfig{ID: gpu0, Capacity: 100, Fractions: tier.Fractions{Limit: 1}, Pool: &heapPool{granule: 1}, Quota: q})
		if err != nil {
			t.Fatal(err)
		}
		m := managerOf(t, reservation.Config{Spaces: []*tier.Space{s}})
		r := mustTry(t, m, onGPU0, 10, reservation.WithPolicy(policy))
		q.onCharge = func() { release(t, r) }
		if _, err := r.Alloc(30); !errors.Is(err, tier.ErrReleased) {
			t.Errorf("%v: it was allocated: %v", policy, err)
		}
		if n := s.Used(); n != 0 {
			t.Errorf("%v: %d bytes are in use", policy, n)
		}
	}
}

// If a quota panics while a waiter is served, others can be served later.
func TestPanicWhileServing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &hookedQuota{brokenQuota: brokenQuota{room: 100}}
		s, err := tier.NewSpace(tier.SpaceConfig{ID: gpu0, Capacity: 100, Fractions: tier.Fractions{Limit: 1}, Pool: &heapPool{granule: 1}, Quota: q})
		if err != nil {
			t.Fatal(err)
		}
		m := managerOf(t, reservation.Config{Spaces: []*tier.Space{s, spaceOf(t, "host:0", 100)}})
		all, others := mustTry(t, m, onGPU0, 100), mustTry(t, m, reservation.Specific(host), 100)
		panicked := make(chan any, 1)
		go func() {
			defer func() { panicked <- recover() }()
			_, _ = m.Reserve(t.Context(), onGPU0, 60)
		}()
		synctest.Wait()
		c := startReserve(t.Context(), m, reservation.Specific(host), 60)
		c.waiting(t)
		q.onCharge = func() { panic("boom") }
		release(t, all)
		if p := <-panicked; p != "boom" {
			t.Errorf("it panicked with %v", p)
		}
		release(t, others)
		release(t, c.served(t))
	})
}

// Without waiters a space reports releases as before: none that keeps its bytes at hand.
func TestNobodyAttendsInTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := tier.NewSpace(tier.SpaceConfig{
			ID: gpu0, Capacity: 1 << 20, Fractions: tier.Fractions{Limit: 1, Trigger: 1, Stop: 0.9}, Pool: &heapPool{granule: 1},
		})
		if err != nil {
			t.Fatal(err)
		}
		m := managerOf(t, reservation.Config{Spaces: []*tier.Space{s}})
		told := 0
		defer s.Inside().Subscribe(func(_ *tier.Space, pressed bool) {
			if !pressed {
				told++
			}
		})()
		round := func() int {
			told = 0
			for range 5 {
				release(t, mustTry(t, m, onGPU0, 10))
			}
			return told
		}
		before := round()
		if before == 5 {
			t.Fatal("each release is told of, also when nobody waits")
		}
		all := mustTry(t, m, onGPU0, 1<<20)
		c := startReserve(t.Context(), m, onGPU0, 60)
		c.waiting(t)
		release(t, all)
		release(t, c.served(t))
		if after := round(); after != before {
			t.Errorf("five releases were told %d times, and %d times when somebody had waited", before, after)
		}
	})
}

// TestNobodyIsForgottenAfterAPanic: a charge that panics while it passes others by, and again while
// those are served, leaves them to the next release.
func TestNobodyIsForgottenAfterAPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := &hookedQuota{brokenQuota: brokenQuota{room: 100}}
		s, err := tier.NewSpace(tier.SpaceConfig{ID: gpu0, Capacity: 100, Fractions: tier.Fractions{Limit: 1}, Pool: &heapPool{granule: 1}, Quota: q})
		if err != nil {
			t.Fatal(err)
		}
		m := managerOf(t, reservation.Config{Spaces: []*tier.Space{s}, Bypass: 1})
		held := mustTry(t, m, onGPU0, 50)
		large := startReserve(t.Context(), m, onGPU0, 60)
		large.waiting(t)
		var small *call
		boom := func() { panic("boom") }
		q.onCharge = func() {
			small = startReserve(t.Context(), m, onGPU0, 10)
			small.waiting(t)
			q.onCharge = boom
			boom()
		}
		func() {
			defer func() {
				if p := recover(); p != "boom" {
					t.Errorf("the panic is %v", p)
				}
			}()
			_, _ = m.TryReserve(onGPU0, 10)
		}()
		q.onCharge = nil
		release(t, held)
		release(t, large.served(t), small.served(t))
	})
}

// TestServedIsNoDemand: a request whose bytes are in use already is no demand for who makes room.
func TestServedIsNoDemand(t *testing.T) {
	for _, strategy := range []reservation.Strategy{onGPU0, reservation.AnyInTiers(tier.GPU, tier.Host)} {
		synctest.Test(t, func(t *testing.T) {
			p := &heapPool{granule: 1}
			s, err := tier.NewSpace(tier.SpaceConfig{ID: gpu0, Capacity: 100, Fractions: tier.Fractions{Limit: 1}, Pool: p})
			if err != nil {
				t.Fatal(err)
			}
			m := managerOf(t, reservation.Config{Spaces: []*tier.Space{s, spaceOf(t, "host:0", 100)}})
			all, others := mustTry(t, m, onGPU0, 100), mustTry(t, m, reservation.Specific(host), 100)
			first := startReserve(t.Context(), m, strategy, 60)
			first.waiting(t)
			second := startReserve(t.Context(), m, onGPU0, 50)
			second.waiting(t)
			looked := false
			defer s.Inside().Subscribe(func(_ *tier.Space, pressed bool) {
				if !pressed || looked || s.Used() != 60 { // when the first is charged, it is at the trigger
					return
				}
				looked = true
				demand, choices := m.Inside().Waiting(nil, nil)
				if len(demand) != 1 || demand[0].Bytes != 50 || demand[0].Waiters != 1 || len(choices) != 0 {
					t.Errorf("while %s is served: %+v and %+v", strategy, demand, choices)
				}
			})()
			if err := s.SetMarks(tier.Fractions{Limit: 1, Trigger: 0.6, Stop: 0.5}); err != nil {
				t.Fatal(err)
			}
			release(t, all)
			release(t, first.served(t))
			release(t, second.served(t))
			release(t, others)
			if !looked {
				t.Error("the test shows nothing")
			}
			if demand, choices := m.Inside().Waiting(nil, nil); len(demand)+len(choices) > 0 {
				t.Errorf("nothing waits, but %+v and %+v", demand, choices)
			}
		})
	}
}
