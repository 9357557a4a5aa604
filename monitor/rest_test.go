package monitor

import (
	"context"
	"testing"
	"time"

	"github.com/spillway-db/spillway/reservation"
)

// slowPolicy takes a while to order victims.
type slowPolicy struct{ Policy }

func (p slowPolicy) Order(now int64, list []Victim) {
	time.Sleep(time.Millisecond)
	p.Policy.Order(now, list)
}

// TestWokenWaitersRest: the end of each use of a batch wakes a waiter for which nothing can leave. It
// looks for moves a tenth of the time, and finds a batch that can leave soon after it is woken.
func TestWokenWaitersRest(t *testing.T) {
	bubble(t, "full", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 100 * kib}, func(c *Config, w *world) {
			c.Policy = slowPolicy{PlanOrder()}
		})
		all := append(w.fillSpace(gpu0, 10, 10*kib), w.fillSpace(host0, 10, 10*kib)...)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		out := w.reserve(ctx, gpu0, 5*kib)
		settle(time.Second)
		before := w.mon.Stats().Steps
		for range 10_000 {
			w.use(all[0])
			time.Sleep(100 * time.Microsecond)
		}
		// A list takes 1 ms, and then 10 ms pass.
		if n := w.mon.Stats().Steps - before; n < 20 || n > 100 {
			t.Errorf("%d lists of moves were looked for in a second", n)
		}
		if len(out) > 0 {
			t.Fatalf("the wait has ended: %v", (<-out).err)
		}
		w.use(all[0])                // wakes it, and then there is something to move
		for _, b := range all[18:] { // one of them is headroom
			if err := b.Drop(); err != nil {
				t.Fatal(err)
			}
		}
		begin := time.Now()
		o := <-out
		if took := time.Since(begin); o.err != nil || took > restMax+5*time.Millisecond {
			t.Errorf("served after %v: %v", took, o.err)
		}
		o.r.Release()
		w.end(all[:18]...)
	})
}

// releasingPolicy releases a reservation when it first orders victims.
type releasingPolicy struct {
	Policy
	release func()
}

func (p *releasingPolicy) Order(now int64, list []Victim) {
	if p.release != nil {
		p.release()
		p.release = nil
	}
	p.Policy.Order(now, list)
}

// TestRoomFreedByOthersIsNoFailure: when others free enough bytes while victims are chosen, no batch
// moves. The space does not rest then as if nothing could leave it, and is not reported as stuck.
func TestRoomFreedByOthersIsNoFailure(t *testing.T) {
	bubble(t, "freed", func(t *testing.T) {
		policy := &releasingPolicy{Policy: PlanOrder()}
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 100 * kib}, func(c *Config, _ *world) { c.Policy = policy })
		all := w.fillSpace(gpu0, 7, 10*kib)
		take := func() *reservation.Reservation {
			r, err := w.res.TryReserve(specific(gpu0), 12*kib, nil)
			if err != nil {
				t.Fatal(err)
			}
			return r
		}
		r := take()
		policy.release = func() { r.Release() }
		w.start()
		settle(time.Millisecond)
		if policy.release != nil || w.moved() > 0 {
			t.Fatalf("victims were chosen: %t; %d bytes moved: want a choice and no move",
				policy.release == nil, w.moved())
		}
		r = take()
		settle(w.mon.cfg.Period * 2)
		if w.moved() == 0 || len(w.stuck) > 0 {
			t.Errorf("%d bytes moved at the trigger, %d times reported as stuck: want a move and no report",
				w.moved(), len(w.stuck))
		}
		r.Release()
		w.end(all...)
	})
}
