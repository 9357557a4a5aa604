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

// TestLingeringChoicesShareWhatLeaves: eight requests for any GPU lack 1 byte each, or what those
// before them lack. One batch of 25 bytes is enough for all, also where a byte lingers in each GPU.
func TestLingeringChoicesShareWhatLeaves(t *testing.T) {
	for _, lingering := range []int64{0, 1} {
		var ids []tier.ID
		var shapes []shape
		var any []want
		for i := range 8 {
			ids = append(ids, tier.ID{Kind: tier.GPU, Ordinal: i})
			shapes = append(shapes, shape{used: 79, limit: 79, retired: lingering, lingering: lingering, victims: []int64{25, 25, 25}})
			any = append(any, want{i, 2})
		}
		s := build(append(ids, host0), append(shapes, shape{limit: 10000})...)
		for range 8 {
			s.Choices = append(s.Choices, any)
		}
		moved := int64(0)
		for _, m := range planStep(s).out.Moves {
			moved += m.Victim.Bytes
		}
		if moved > 25 {
			t.Errorf("with %d bytes that linger in each GPU %d bytes leave for eight requests of 2, want 25", lingering, moved)
		}
	}
}

// TestAByteLingers: a GPU in which one of 10 retired bytes lingers, and a small batch leaving is
// enough, is better than one that must move much more.
func TestAByteLingers(t *testing.T) {
	s := build([]tier.ID{gpu0, gpu1, host0},
		shape{used: 99, retired: 1, lingering: 1, victims: []int64{5, 5}},
		shape{used: 100, victims: []int64{30, 30, 30}},
		shape{limit: 10000})
	for i := range s.Spaces[:2] {
		s.Spaces[i].Trigger = 101
	}
	s.Choices = [][]want{{{0, 5}, {1, 5}}}
	moved := int64(0)
	for _, m := range planStep(s).out.Moves {
		moved += m.Victim.Bytes
	}
	if moved > 5 {
		t.Errorf("%d bytes leave, and 5 are enough", moved)
	}
}

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
