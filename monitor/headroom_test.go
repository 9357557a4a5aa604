package monitor

import (
	"errors"
	"testing"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestMonitorHeadroom: each memory keeps room for the largest batch elsewhere, and a disk none.
func TestMonitorHeadroom(t *testing.T) {
	bubble(t, "three tiers", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 64 * kib, host0: 64 * kib, disk0: 64 * kib}, nil)
		want := func(id tier.ID, need, n int64) {
			t.Helper()
			if got := w.headroom(id, need); got != n {
				t.Errorf("a request for %d bytes in %s leaves %d free, want %d", need, id, got, n)
			}
		}
		drop := func(b interface{ Drop() error }) {
			t.Helper()
			if err := b.Drop(); err != nil {
				t.Fatal(err)
			}
		}
		want(host0, kib, 0)
		want(disk0, kib, 0)
		a, b := w.put(gpu0, 10*kib, seq(0)), w.put(gpu0, 9*kib, seq(1))
		want(gpu0, kib, 0) // there is none elsewhere
		want(host0, kib, 10*kib)
		want(host0, 60*kib, 4*kib) // no more than there ever is beside it
		want(disk0, kib, 0)
		drop(a)
		want(host0, kib, 9*kib) // the largest that is left
		drop(b)
		want(host0, kib, 0)
		c := w.put(disk0, 33*kib, seq(2))
		want(host0, kib, 0) // of a batch of more than half the space
		drop(c)
		d := w.put(disk0, 32*kib, seq(3))
		want(gpu0, kib, 32*kib)
		r, err := w.res.TryReserve(specific(gpu0), 50*kib, nil)
		if err != nil {
			t.Fatal(err)
		}
		want(gpu0, kib, 13*kib) // beside what work has
		r.Release()
		want(tier.ID{Kind: tier.GPU, Ordinal: 7}, kib, 0)
		w.start()
		w.end(d)
	})
}

// TestHeadroomForTheLost: what lies in a lost GPU can be brought nowhere, so nothing is left free
// for it.
func TestHeadroomForTheLost(t *testing.T) {
	bubble(t, "two GPUs", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 64 * kib, gpu1: 64 * kib, host0: 64 * kib}, nil)
		b := w.put(gpu1, 30*kib, seq(0))
		w.start()
		w.pools[gpu1].Lose(errors.New("lost"))
		settle(time.Second)
		if w.spaces[gpu1].Lost() == nil {
			t.Fatal("not lost")
		}
		for _, id := range []tier.ID{gpu0, host0} {
			if n := w.headroom(id, kib); n != 0 {
				t.Errorf("%d bytes of %s are left free for a batch that is lost", n, id)
			}
		}
		w.end(b)
	})
}

// TestHeadroomBesideAHugeBatch: one batch that is larger than half a GPU gets no headroom there.
// All others still do.
func TestHeadroomBesideAHugeBatch(t *testing.T) {
	bubble(t, "three tiers", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 64 * kib, host0: 640 * kib, disk0: 640 * kib}, nil)
		small := w.put(disk0, 10*kib, seq(0))
		huge := w.put(disk0, 33*kib, seq(1))
		if n := w.headroom(gpu0, kib); n != 10*kib {
			t.Errorf("%d bytes are left free for a batch of 10 KiB, beside one of 33", n)
		}
		half := w.put(disk0, 32*kib, seq(2))
		if n := w.headroom(gpu0, kib); n != 32*kib {
			t.Errorf("%d bytes are left free for a batch of 32 KiB, beside one of 33", n)
		}
		w.start()
		w.end(small, huge, half)
	})
}

// TestHeadroomBesidePutsAtOnce: what is being put is no work that ends. So puts at once leave the
// same headroom as puts one after the other.
func TestHeadroomBesidePutsAtOnce(t *testing.T) {
	bubble(t, "two tiers", func(t *testing.T) {
		w := newWorld(t, sizes{host0: 64 * kib, disk0: 64 * kib}, nil)
		all := []*batch.Batch{w.put(disk0, 10*kib, seq(0))}
		var puts []*reservation.Reservation
		for i := range 8 {
			n := w.headroom(host0, 7*kib)
			if n != 10*kib {
				t.Errorf("%d bytes are left free beside %d puts, want 10 KiB", n, i)
			}
			if w.spaces[host0].State().Available < 7*kib+n {
				break
			}
			r, err := w.res.TryReserve(specific(host0), 7*kib, &reservation.Options{Purpose: reservation.Incoming})
			if err != nil {
				t.Fatal(err)
			}
			puts = append(puts, r)
		}
		for i, r := range puts {
			all = append(all, w.fill(r, seq(i+1)))
		}
		if n := w.res.Arriving(host0); n != 0 || len(puts) != 7 {
			t.Errorf("%d bytes are still arriving of %d puts", n, len(puts))
		}
		w.start()
		w.end(all...)
	})
}

// TestHeadroomOfCompressedBatches: it is for batches as consumers fetch them.
func TestHeadroomOfCompressedBatches(t *testing.T) {
	w := newWorld(t, sizes{host0: 100 * kib, disk0: 100 * kib}, nil)
	r, err := w.res.TryReserve(specific(disk0), 10*kib, nil)
	if err != nil {
		t.Fatal(err)
	}
	buf, err := r.Alloc(10 * kib)
	if err := errors.Join(err, r.Release()); err != nil {
		t.Fatal(err)
	}
	b, err := batch.New(batch.Options{
		ID: w.ids.Next(), Observer: w.mon,
		Payload: payload.New(payload.Parts{
			Descriptor: &batch.Descriptor{Rows: 1, Body: 40 * kib}, Space: w.spaces[disk0],
			Buffers: []*tier.Buffer{buf}, Type: payload.CompressedImage, Runs: make([]payload.Run, 1),
		}),
	})
	if err != nil {
		t.Fatal(err)
	}
	if n, _ := w.mon.Headroom(host0); n != 40*kib {
		t.Errorf("%d bytes are left free for a batch of %d", n, 40*kib)
	}
	w.end(b)
}
