package monitor

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

// TestRefusalEnds: a move that was as large as one that found no room shows that there is room again;
// a smaller one shows nothing. A move that found no room because the books had none shows nothing
// either.
func TestRefusalEnds(t *testing.T) {
	w := newWorld(t, sizes{gpu0: 100 * kib, host0: 100 * kib}, nil)
	b := w.put(gpu0, 8*kib, seq(1))
	from, to := w.mon.spaces[0], w.mon.spaces[1]
	full := w.put(host0, 98*kib, seq(2))
	v := Victim{Batch: b, ID: b.ID(), Bytes: 8 * kib}
	w.mon.noted(v, from, to, &tier.NoSpaceError{Space: host0})
	way := &from.edges[to.place]
	if way.refuses != 0 {
		t.Error("a full space counts as one that refuses what it has")
	}
	if err := full.Drop(); err != nil {
		t.Fatal(err)
	}
	w.mon.noted(v, from, to, &tier.NoSpaceError{Space: host0})
	for _, size := range []int64{7 * kib, 8 * kib} {
		w.mon.noted(Victim{Batch: b, ID: b.ID(), Bytes: size}, from, to, nil)
		if refused := way.refused(time.Now(), to.State().Used()) > 0; refused != (size < 8*kib) {
			t.Errorf("after a move of %d bytes, refused is %t", size, refused)
		}
	}
	w.end(b)
}

// TestLoweredLimit: what is above a lowered limit moves down, though there are no waiters and the
// pressure is below the trigger.
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
		if used := w.spaces[gpu0].State().Used(); used != 50*kib {
			t.Errorf("%d bytes are used, of 50 KiB", used)
		}
		w.end(all...)
	})
}

// TestWritingAheadComesBack: others use the disks when a batch is to be written ahead, and none of
// those behind it can be copied. It is tried again, though nothing has changed.
func TestWritingAheadComesBack(t *testing.T) {
	bubble(t, "one batch", func(t *testing.T) {
		var first batch.ID
		tries := 0
		w := newWorld(t, sizes{gpu0: 100 * kib, disk0: 1000 * kib}, func(c *Config, _ *world) {
			c.AheadRate = kib // a job has one batch
			c.WriteAhead = func(_ context.Context, b *batch.Batch, _ time.Duration) (int64, error) {
				if b.ID() != first {
					return 0, nil
				}
				if tries++; tries == 1 {
					return 0, context.Canceled
				}
				return kib, nil
			}
		})
		all := w.fillSpace(gpu0, 75, kib) // between the marks
		list := w.firstVictims(1)
		first = list[0].ID
		w.start()
		settle(5 * time.Minute)
		if tries < 2 {
			t.Errorf("it was tried %d times", tries)
		}
		w.end(all...)
	})
}

// TestListEnds: a list of moves ends when the space has as few bytes in use as the list was for, also
// if other goroutines freed them.
func TestListEnds(t *testing.T) {
	bubble(t, "a release", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, func(c *Config, w *world) {
			c.MovesPerEdge = 1
		})
		all := w.fillSpace(gpu0, 6, 10*kib)
		r, err := w.res.TryReserve(specific(gpu0), 40*kib, nil)
		if err != nil {
			t.Fatal(err)
		}
		out := w.reserve(t.Context(), gpu0, 30*kib)
		time.Sleep(5 * time.Microsecond) // during the first move
		if err := r.Shrink(30 * kib); err != nil {
			t.Fatal(err)
		}
		o := <-out
		if o.err != nil || w.moved() != 10*kib {
			t.Errorf("%v; %d bytes were moved, want one batch", o.err, w.moved())
		}
		o.r.Release()
		r.Release()
		w.end(all...)
	})
}

// TestListIsShort: no move of a list begins later than listTime after the list, so that a waiter soon
// looks at what has changed.
func TestListIsShort(t *testing.T) {
	bubble(t, "slow moves", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, func(c *Config, w *world) {
			c.MovesPerEdge = 1
			w.mover.bytesA = time.Millisecond
		})
		all := w.fillSpace(gpu0, 60, kib)
		most := int64(listTime/time.Millisecond+1) * kib
		if e := w.mon.Evict(t.Context(), gpu0, 30*kib); e.Moved == 0 || e.Moved > most {
			t.Errorf("one list moved %d bytes, want at most %d", e.Moved, most)
		}
		w.end(all...)
	})
}

// TestReleaseEndsTheSearch: a waiter that finds batch after batch in use is served when others free the
// room that it lacks, and looks for no more batches.
func TestReleaseEndsTheSearch(t *testing.T) {
	bubble(t, "all in use", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, func(c *Config, w *world) {
			c.MovesPerEdge = 1
			w.mover.bytesA = time.Millisecond
			w.mover.fault = func(b *batch.Batch, _, _ tier.ID) error {
				return &batch.StateError{Batch: b.ID(), State: batch.Processing}
			}
		})
		all := w.fillSpace(gpu0, 60, kib)
		r, err := w.res.TryReserve(specific(gpu0), 40*kib, nil)
		if err != nil {
			t.Fatal(err)
		}
		out := w.reserve(t.Context(), gpu0, 30*kib)
		time.Sleep(1500 * time.Microsecond)
		if err := r.Shrink(30 * kib); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		o := <-out
		if took := time.Since(begin); o.err != nil || took > time.Millisecond || w.failures() > 2 {
			t.Errorf("%v after %v and %d moves", o.err, took, w.failures())
		}
		o.r.Release()
		r.Release()
		w.end(all...)
	})
}

// TestCancelledEvictionShowsNothing: a space counts as one from which nothing can leave when the moves
// have shown it, and not when a waiter has given up.
func TestCancelledEvictionShowsNothing(t *testing.T) {
	bubble(t, "during a move", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, func(c *Config, w *world) {
			w.mover.bytesA = time.Second
		})
		b := w.put(gpu0, 90*kib, seq(1))
		ctx, cancel := context.WithCancel(t.Context())
		out := w.reserve(ctx, gpu0, 30*kib)
		settle(time.Second)
		cancel()
		if o := <-out; !errors.Is(o.err, context.Canceled) || w.mon.spaces[0].dry.Load() != nil {
			t.Errorf("%v; dry is %v", o.err, w.mon.spaces[0].dry.Load())
		}
		w.end(b)
	})
}

// TestFailedMoveWakesNobody: the end of a move that failed is no new victim, or waiters would retry the
// move without pause.
func TestFailedMoveWakesNobody(t *testing.T) {
	w := newWorld(t, sizes{gpu0: 100 * kib, host0: 100 * kib}, nil)
	gains := &gaining{Monitor: w.mon}
	b, err := batch.New(batch.Options{ID: w.ids.Next(), Payload: w.image(gpu0, kib), Observer: gains, Place: seq(1)})
	if err != nil {
		t.Fatal(err)
	}
	tr, err := b.TryTransit()
	if err != nil {
		t.Fatal(err)
	}
	tr.Abort()
	if w.use(b); gains.n != 1 {
		t.Errorf("a failed move and a use woke waiters %d times, want once", gains.n)
	}
	w.end(b)
}

// TestNextAfterTheMonitor: a waiter that found the monitor at work evicts when that is done.
func TestNextAfterTheMonitor(t *testing.T) {
	bubble(t, "at once", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, func(c *Config, w *world) {
			w.mover.bytesA = 10 * time.Microsecond
		})
		w.start()
		all := w.fillSpace(gpu0, 80, kib)
		synctest.Wait() // the monitor moves two batches, in 10 µs
		out := w.reserve(t.Context(), gpu0, 50*kib)
		begin := time.Now()
		o := <-out
		if took := time.Since(begin); o.err != nil || took > tickOfWaiters/2 {
			t.Errorf("served after %v: %v", took, o.err)
		}
		o.r.Release()
		w.end(all...)
	})
}

// tickOfWaiters is how often the reservation manager looks after its oldest waiter.
const tickOfWaiters = 25 * time.Millisecond
