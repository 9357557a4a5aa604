package monitor

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestWorldSharesWhatLeaves is TestChoicesShareWhatLeaves where a KiB that was freed lingers in
// each GPU.
func TestWorldSharesWhatLeaves(t *testing.T) {
	const n = 8
	for _, lingers := range []bool{false, true} {
		bubble(t, fmt.Sprint("lingers: ", lingers), func(t *testing.T) {
			host1 := tier.ID{Kind: tier.Host, Ordinal: 1}
			spaces := sizes{host0: 10000 * kib, host1: 10 * kib}
			for i := range n {
				spaces[tier.ID{Kind: tier.GPU, Ordinal: i}] = 1000 * kib
			}
			w := newWorld(t, spaces, nil)
			var all []*batch.Batch
			for i := range n {
				id := tier.ID{Kind: tier.GPU, Ordinal: i}
				all = append(all, w.fillSpace(id, 12, 64*kib)...) // below the trigger
				limit := int64(768 * kib)
				if lingers {
					b := w.put(id, kib, seq(99))
					w.pools[id].lag = time.Hour
					if err := b.Drop(); err != nil {
						t.Fatal(err)
					}
					w.pools[id].lag = 0
					limit += kib
				}
				if err := w.spaces[id].SetLimit(limit); err != nil {
					t.Fatal(err)
				}
			}
			// Somebody waits for what a task has, so the monitor looks.
			held, err := w.res.TryReserve(reservation.Specific(host1), 10*kib)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error)
			go func() {
				_, err := w.res.Reserve(ctx, reservation.Specific(host1), 5*kib)
				ended <- err
			}()
			w.start()
			settle(time.Second)
			w.stop()
			got := eightWait(t, w)
			w.start()
			settle(time.Minute)
			if w.moved() != 64*kib {
				t.Errorf("%d bytes were moved, want %d", w.moved(), 64*kib)
			}
			for range 8 {
				if err := (<-got).Release(); err != nil {
					t.Error(err)
				}
			}
			cancel()
			<-ended
			if err := held.Release(); err != nil {
				t.Error(err)
			}
			settle(2 * time.Hour)
			w.end(all...)
		})
	}
}

// TestNobodyWaitsForWhatLingers: where a device works on for long, batches leave for who waits.
func TestNobodyWaitsForWhatLingers(t *testing.T) {
	bubble(t, "one space", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, nil)
		w.pools[gpu0].lag = time.Hour
		gone := w.put(gpu0, 20*kib, seq(0))
		all := w.fillSpace(gpu0, 29, 2*kib) // 78 KiB with what is gone
		if err := gone.Drop(); err != nil {
			t.Fatal(err)
		}
		w.pools[gpu0].lag = 0
		w.start()
		begin := time.Now()
		o := <-w.reserve(t.Context(), gpu0, 30*kib)
		if o.err != nil || time.Since(begin) > time.Minute {
			t.Fatalf("after %v: %v", time.Since(begin), o.err)
		}
		o.r.Release()
		settle(time.Hour)
		w.end(all...)
	})
}

// TestLingeringDoesNotEmptyTheSpace: a device works on for 10 s, and has until then all that is
// freed. What leaves for a request that lacks 10 KiB is late, too, and no more leaves for it.
func TestLingeringDoesNotEmptyTheSpace(t *testing.T) {
	bubble(t, "one space", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, nil)
		all := w.fillSpace(gpu0, 75, kib) // below the trigger
		w.pools[gpu0].lag = 10 * time.Second
		w.start()
		o := <-w.reserve(t.Context(), gpu0, 35*kib)
		if o.err != nil {
			t.Fatal(o.err)
		}
		if n := w.moved(); n > 10*kib {
			t.Errorf("%d KiB left for a request that lacked 10", n/kib)
		}
		o.r.Release()
		settle(time.Minute)
		w.end(all...)
	})
}

// TestChurnIsNotLingering: bytes come back 20 ms after they were freed, each time. A request of 10
// KiB comes every 5 ms. No more leaves than they lack.
func TestChurnIsNotLingering(t *testing.T) {
	for _, lag := range []time.Duration{0, 20 * time.Millisecond} {
		bubble(t, lag.String(), func(t *testing.T) {
			w := newWorld(t, sizes{gpu0: 1000 * kib, host0: 10000 * kib}, nil)
			all := w.fillSpace(gpu0, 70, 10*kib)
			if err := w.spaces[gpu0].SetLimit(700 * kib); err != nil {
				t.Fatal(err)
			}
			w.pools[gpu0].lag = lag
			w.start()
			var out []<-chan outcomeOf
			const n = 40
			for range n {
				out = append(out, w.reserve(t.Context(), gpu0, 10*kib))
				time.Sleep(5 * time.Millisecond)
			}
			settle(time.Second)
			if got := w.moved() / kib; got > n*10+20 {
				t.Errorf("with a lag of %v %d KiB left for requests of %d", lag, got, n*10)
			}
			for _, c := range out {
				o := <-c
				if o.err != nil {
					t.Fatal(o.err)
				}
				o.r.Release()
			}
			settle(time.Minute)
			w.end(all...)
		})
	}
}

// TestChoiceLeavesASlowDevice: a request for any GPU has room made in the first, which works on for
// an hour. Then as much leaves another, and it is served from there.
func TestChoiceLeavesASlowDevice(t *testing.T) {
	bubble(t, "two GPUs", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, gpu1: 100 * kib, host0: 1000 * kib}, nil)
		all := append(w.fillSpace(gpu0, 39, 2*kib), w.fillSpace(gpu1, 39, 2*kib)...)
		w.pools[gpu0].lag = time.Hour
		w.start()
		begin := time.Now()
		r, err := w.res.Reserve(t.Context(), reservation.AnyInTier(tier.GPU), 30*kib)
		if err != nil {
			t.Fatal(err)
		}
		if took, n := time.Since(begin), w.moved(); took > time.Second || n > 16*kib {
			t.Errorf("it took %v, and %d KiB were moved, want 16", took, n/kib)
		}
		if err := r.Release(); err != nil {
			t.Error(err)
		}
		settle(time.Hour)
		w.end(all...)
	})
}
