package monitor

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
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
		w.mon.finish([]result{{choice: choice{Victim: Victim{Batch: b, ID: b.ID(), Bytes: size}, From: 0, To: 1}}})
		if refused := to.refusal.bound(now, 0) > 0; refused != (size < 8*kib) {
			t.Errorf("after a move of %d bytes larger ones are refused: %v", size, refused)
		}
		if from.leaving != 0 || from.moving != 0 || to.moving != 0 || from.edges[1].underWay != 0 {
			t.Errorf("after the end of a move: %d bytes leaving, %d and %d moves", from.leaving, from.moving, to.moving)
		}
	}
	w.end(b)
}

// TestRefusalAndRoomMeanwhile: room that came free while a move failed for room is worth another
// try at once.
func TestRefusalAndRoomMeanwhile(t *testing.T) {
	w := newWorld(t, sizes{gpu0: 100 * kib, host0: 100 * kib}, nil)
	b := w.put(gpu0, 8*kib, seq(1))
	from, to := w.mon.spaces[0], w.mon.spaces[1]
	for _, usedBefore := range []int64{0, 4 * kib} { // nothing is used afterwards
		to.refusal = refusal{}
		from.leaving, from.moving, to.moving, from.edges[1].underWay = 8*kib, 1, 1, 1
		w.mon.finish([]result{{
			choice:     choice{Victim: Victim{Batch: b, ID: b.ID(), Bytes: 8 * kib}, From: 0, To: 1},
			usedBefore: usedBefore, err: &tier.NoSpaceError{Space: host0, Requested: 8 * kib},
		}})
		if refused := to.refusal.bound(time.Now(), to.Used()) > 0; refused != (usedBefore == 0) {
			t.Errorf("%d bytes came free during the move; moves are refused: %v", usedBefore, refused)
		}
	}
	w.end(b)
}

// TestDemandThatShrinks: a waiter that is served while a step looks is not counted as waiting as
// well.
func TestDemandThatShrinks(t *testing.T) {
	bubble(t, "in between", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 100 * kib}, nil)
		b := w.put(gpu0, 95*kib, seq(1))
		out := w.reserve(t.Context(), gpu0, 10*kib)
		settle(0)
		w.mon.demand = []reservation.Demand{{Space: gpu0, Bytes: 60 * kib}}
		if got := w.mon.observe(time.Now(), nil).Spaces[0].Waiting; got != 10*kib {
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
		if used := w.spaces[gpu0].Used(); used != 50*kib {
			t.Errorf("%d bytes are used, of 50 KiB", used)
		}
		w.end(all...)
	})
}

// TestExecutorGivesBack: an executor moves the victims that it was given one after the other. Those
// behind one that failed, or took long, are victims again at once.
func TestExecutorGivesBack(t *testing.T) {
	for _, c := range []struct {
		name  string
		takes time.Duration // a batch
		fails int           // which move does
		moved int
	}{
		{"quick", 0, -1, 4},
		{"not too slow", time.Millisecond, -1, 3}, // the third begins after 2 ms
		{"slow", time.Minute, -1, 1},
		{"the second fails", 0, 1, 1},
	} {
		bubble(t, c.name, func(t *testing.T) {
			w := newWorld(t, sizes{gpu0: 100 * kib, host0: 100 * kib}, nil)
			w.mover.bytesA = c.takes
			calls := 0
			w.mover.fault = func(*batch.Batch, tier.ID, tier.ID) error {
				if calls++; calls == c.fails+1 {
					return errors.New("broken")
				}
				return nil
			}
			var all []*batch.Batch
			var moves []decide.Move
			for i := range 4 {
				b := w.put(gpu0, kib, seq(i))
				all = append(all, b)
				moves = append(moves, w.chosen(b, decide.Trigger))
			}
			if w.mon.begin(t.Context(), moves) {
				t.Fatal("the moves are outdated")
			}
			if n := len(w.victims(gpu0, 0)); n != 0 || w.mon.spaces[0].edges[1].underWay != 1 {
				t.Errorf("%d victims while one executor has all; %d are at work", n, w.mon.spaces[0].edges[1].underWay)
			}
			w.mon.executors.Wait()
			w.mon.drain()
			want := 4 - c.moved
			if c.fails >= 0 {
				want-- // it pauses
			}
			if n := len(w.victims(gpu0, 0)); n != want || w.mon.spaces[0].edges[1].underWay != 0 || w.mon.spaces[0].leaving != 0 {
				t.Errorf("%d victims are left, want %d", n, want)
			}
			if s := w.mon.Stats(); int(s.Moves) != c.moved || s.NoRoom != 0 {
				t.Errorf("%+v, want %d moves", s, c.moved)
			}
			w.end(all...)
		})
	}
}

// chosen is a move of a batch of a KiB to the second space, as a step decides on it.
func (w *world) chosen(b *batch.Batch, reason string) decide.Move {
	w.mon.shortlist = append(w.mon.shortlist, Victim{Batch: b, ID: b.ID(), Bytes: kib})
	return decide.Move{Victim: decide.Victim{N: len(w.mon.shortlist) - 1, Bytes: kib}, To: 1, Reason: reason}
}

// TestExecutorLooksAgain: a batch that an executor has yet to move stays where it is if it was
// moved meanwhile, or has a subscriber.
func TestExecutorLooksAgain(t *testing.T) {
	for _, c := range []struct {
		name  string
		what  func(t *testing.T, w *world, b *batch.Batch)
		place tier.ID
	}{
		{"moved", func(t *testing.T, w *world, b *batch.Batch) {
			if err := (&slowMover{w: w}).Relieve(t.Context(), b, disk0, decide.Demand); err != nil {
				t.Error(err)
			}
		}, disk0},
		{"subscribed to", func(_ *testing.T, _ *world, b *batch.Batch) { b.Subscribe() }, gpu0},
	} {
		bubble(t, c.name, func(t *testing.T) {
			w := newWorld(t, sizes{gpu0: 100 * kib, host0: 100 * kib, disk0: 100 * kib}, nil)
			first, second := w.put(gpu0, kib, seq(0)), w.put(gpu0, kib, seq(1))
			once := true
			w.mover.fault = func(*batch.Batch, tier.ID, tier.ID) error {
				if once {
					once = false
					c.what(t, w, second)
				}
				return nil
			}
			w.mon.begin(t.Context(), []decide.Move{w.chosen(first, decide.Demand), w.chosen(second, decide.Demand)})
			w.mon.executors.Wait()
			w.mon.drain()
			if at := second.Info().Space; at != c.place || w.mon.Stats().Moves != 1 {
				t.Errorf("it is in %s, want %s; %+v", at, c.place, w.mon.Stats())
			}
			w.end(first, second)
		})
	}
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
		list, _ := w.mon.victims(nil, 0, byKind{}, 1)
		first = list[0].ID
		w.start()
		settle(5 * time.Minute)
		if tries < 2 {
			t.Errorf("it was tried %d times", tries)
		}
		w.end(all...)
	})
}
