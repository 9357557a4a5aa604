package monitor

import (
	"testing"
	"time"

	"github.com/spillway-db/spillway/reservation"
)

// TestRefusalEnds: a move that was as large as one that found no room shows that there is
// room again; a smaller one shows nothing.
func TestRefusalEnds(t *testing.T) {
	w := newWorld(t, sizes{gpu0: 100 * kib, host0: 100 * kib}, nil)
	b := w.put(gpu0, 8*kib, seq(1))
	from, to := w.mon.spaces[0], w.mon.spaces[1]
	now := time.Now()
	to.refusal.note(now, time.Hour, 8*kib, 0)
	for _, size := range []int64{4 * kib, 8 * kib} {
		from.leaving, from.moving, to.moving, from.edges[1].underWay = size, 1, 1, 1
		w.mon.finish(result{choice: choice{Victim: Victim{Batch: b, ID: b.ID(), Bytes: size}, From: 0, To: 1}})
		if refused := to.refusal.bound(now, 0) > 0; refused != (size < 8*kib) {
			t.Errorf("after a move of %d bytes larger ones are refused: %v", size, refused)
		}
		if from.leaving != 0 || from.moving != 0 || to.moving != 0 || from.edges[1].underWay != 0 {
			t.Errorf("after the end of a move: %d bytes leaving, %d and %d moves", from.leaving, from.moving, to.moving)
		}
	}
	w.end(b)
}

// TestDemandThatShrinks: who is served while a step looks is not counted as waiting as well.
func TestDemandThatShrinks(t *testing.T) {
	bubble(t, "in between", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 100 * kib}, nil)
		b := w.put(gpu0, 95*kib, seq(1))
		out := w.reserve(t.Context(), gpu0, 10*kib)
		settle(0)
		w.mon.demand = []reservation.Demand{{Space: gpu0, Bytes: 60 * kib}}
		if got := w.mon.observe(time.Now()).Spaces[0].Waiting; got != 10*kib {
			t.Errorf("%d bytes are waited for, want the 10 KiB that are left", got)
		}
		if err := b.Drop(); err != nil {
			t.Error(err)
		}
		o := <-out
		if o.err != nil {
			t.Fatal(o.err)
		}
		o.r.Release()
		w.end()
	})
}

// TestLoweredLimit: what is above a limit that was lowered moves down, though nobody waits and
// the pressure is below the trigger.
func TestLoweredLimit(t *testing.T) {
	bubble(t, "below the trigger", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, nil)
		all := w.fillSpace(gpu0, 70, kib)
		w.start()
		settle(time.Second)
		if err := w.spaces[gpu0].SetLimit(50 * kib); err != nil {
			t.Fatal(err)
		}
		settle(time.Second)
		if used := w.spaces[gpu0].Used(); used != 50*kib {
			t.Errorf("%d bytes are used, of 50 KiB", used)
		}
		w.end(all...)
	})
}
