package monitor

import (
	"context"
	"testing"
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
	w.mon.noteMove(v, from, to, &tier.NoSpaceError{Space: host0})
	if to.refusal.bytes != 0 {
		t.Error("a full space counts as one that refuses what it has")
	}
	if err := full.Drop(); err != nil {
		t.Fatal(err)
	}
	w.mon.noteMove(v, from, to, &tier.NoSpaceError{Space: host0})
	for _, size := range []int64{7 * kib, 8 * kib} {
		w.mon.noteMove(Victim{Batch: b, ID: b.ID(), Bytes: size}, from, to, nil)
		if refused := to.refusal.bound(time.Now(), 0) > 0; refused != (size < 8*kib) {
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
		if used := w.spaces[gpu0].Used(); used != 50*kib {
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
		list, _ := w.mon.victims(w.mon.spaces[0], 1)
		first = list[0].ID
		w.start()
		settle(5 * time.Minute)
		if tries < 2 {
			t.Errorf("it was tried %d times", tries)
		}
		w.end(all...)
	})
}
