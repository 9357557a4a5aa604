package monitor

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

var gpu1 = tier.ID{Kind: tier.GPU, Ordinal: 1}

// TestChoiceIsServed: a request for any GPU is served where room can be made, whatever keeps
// the others.
func TestChoiceIsServed(t *testing.T) {
	// serve asks for room, and gives it back.
	serve := func(t *testing.T, w *world, bytes int64, opts *reservation.Options) {
		t.Helper()
		begin := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		r, err := w.res.Reserve(ctx, reservation.AnyInTier(tier.GPU), bytes, opts)
		if took := time.Since(begin); err != nil || took > time.Second {
			t.Errorf("it took %v: %v; %d bytes moved, %d failures, stuck %+v",
				took, err, w.moved(), w.failures(), w.stuck)
		}
		if err != nil {
			return
		}
		if err := r.Release(); err != nil {
			t.Fatal(err)
		}
	}
	bubble(t, "large batches in one, and little room below", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, gpu1: 100 * kib, host0: 100 * kib}, nil)
		all := []*batch.Batch{w.put(gpu0, 78*kib, seq(0))}
		all = append(all, w.fillSpace(gpu1, 39, 2*kib)...)
		all = append(all, w.fillSpace(host0, 35, 2*kib)...)
		w.start()
		serve(t, w, 30*kib, nil)
		w.end(all...)
	})
	// Its owner, as a task does, holds some of the GPU from which nothing can leave: that is no
	// deadlock.
	bubble(t, "an owner", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, gpu1: 100 * kib, host0: 100 * kib}, nil)
		all := []*batch.Batch{w.put(gpu0, 76*kib, seq(0))}
		all = append(all, w.fillSpace(gpu1, 39, 2*kib)...)
		all = append(all, w.fillSpace(host0, 35, 2*kib)...)
		w.start()
		o := reservation.NewOwner("task")
		held, err := w.res.Reserve(t.Context(), reservation.Specific(gpu0), 2*kib, &reservation.Options{Owner: o})
		if err != nil {
			t.Fatal(err)
		}
		serve(t, w, 30*kib, &reservation.Options{Owner: o})
		if err := held.Release(); err != nil {
			t.Fatal(err)
		}
		w.end(all...)
	})
	bubble(t, "a broken copy engine", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, gpu1: 100 * kib, host0: 1000 * kib}, func(c *Config, w *world) {
			w.mover.fault = func(b *batch.Batch, from, to tier.ID) error {
				if from == gpu0 {
					return errors.New("the copy engine of gpu:0 is broken")
				}
				return nil
			}
		})
		all := w.fillSpace(gpu0, 39, 2*kib)
		all = append(all, w.fillSpace(gpu1, 39, 2*kib)...)
		w.start()
		serve(t, w, 30*kib, nil)
		w.end(all...)
	})
	bubble(t, "a device that works on for a minute", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, gpu1: 100 * kib, host0: 1000 * kib}, nil)
		w.pools[gpu0].lag = time.Minute
		gone := w.put(gpu0, 20*kib, seq(0))
		all := w.fillSpace(gpu0, 29, 2*kib) // 78 KiB with what is gone
		all = append(all, w.fillSpace(gpu1, 39, 2*kib)...)
		if err := gone.Drop(); err != nil {
			t.Fatal(err)
		}
		w.start()
		serve(t, w, 30*kib, nil)
		w.end(all...)
	})
	bubble(t, "more small batches than a shortlist has", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 4000 * kib, gpu1: 4000 * kib, host0: 100_000 * kib}, nil)
		all := w.fillSpace(gpu0, 3100, kib)
		used, err := w.res.TryReserve(reservation.Specific(gpu1), 3000*kib, nil) // a task's
		if err != nil {
			t.Fatal(err)
		}
		w.start()
		serve(t, w, 2000*kib, nil)
		if err := used.Release(); err != nil {
			t.Fatal(err)
		}
		w.end(all...)
	})
}

// TestChoicesShareWhatLeaves: eight requests for any GPU lack 8 KiB each. One batch of 64 KiB is
// enough for all of them, with eight GPUs too.
func TestChoicesShareWhatLeaves(t *testing.T) {
	for _, n := range []int{1, 8} {
		bubble(t, fmt.Sprint("GPUs: ", n), func(t *testing.T) {
			spaces := sizes{host0: 10000 * kib}
			for i := range n {
				spaces[tier.ID{Kind: tier.GPU, Ordinal: i}] = 1000 * kib
			}
			w := newWorld(t, spaces, nil)
			var all []*batch.Batch
			for i := range n {
				id := tier.ID{Kind: tier.GPU, Ordinal: i}
				all = append(all, w.fillSpace(id, 12, 64*kib)...) // below the trigger
				if err := w.spaces[id].SetLimit(768 * kib); err != nil {
					t.Fatal(err)
				}
			}
			got := eightWait(t, w) // all wait when the monitor looks
			w.start()
			var rs []*reservation.Reservation
			for range 8 {
				rs = append(rs, <-got)
			}
			settle(time.Minute)
			if w.moved() != 64*kib {
				t.Errorf("%d bytes were moved", w.moved())
			}
			for _, r := range rs {
				if err := r.Release(); err != nil {
					t.Error(err)
				}
			}
			w.end(all...)
		})
	}
}
func eightWait(t *testing.T, w *world) chan *reservation.Reservation {
	got := make(chan *reservation.Reservation, 8)
	for range 8 {
		go func() {
			r, err := w.res.Reserve(t.Context(), reservation.AnyInTier(tier.GPU), 8*kib, nil)
			if err != nil {
				t.Error(err)
			}
			got <- r
		}()
	}
	synctest.Wait()
	return got
}
