package monitor

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// aheadWorld has a GPU and a disk, and copies ahead with write. change may change its settings.
func aheadWorld(t *testing.T, write func(b *batch.Batch) int64, change ...func(c *Config)) *world {
	return newWorld(t, sizes{gpu0: 100 * kib, disk0: 1000 * kib}, func(c *Config, _ *world) {
		c.AheadRate = 1000 * kib
		c.WriteAhead = func(_ context.Context, b *batch.Batch, _ time.Duration) (int64, error) { return write(b), nil }
		for _, f := range change {
			f(c)
		}
	})
}

// firstVictim is the batch that is to leave the GPU first.
func (w *world) firstVictim() *batch.Batch {
	list := w.firstVictims(1)
	return list[0].Batch
}

// TestWhatChangesDuringASearch for batches to copy ahead is looked at again when it is over.
func TestWhatChangesDuringASearch(t *testing.T) {
	bubble(t, "the first", func(t *testing.T) {
		var first batch.ID
		var all []*batch.Batch
		tries := 0
		var w *world
		w = aheadWorld(t, func(b *batch.Batch) int64 {
			switch {
			case b.ID() == first:
				tries++
			case tries == 1: // once
				tries++
				for _, b := range all {
					if b.ID() == first {
						w.use(b)
					}
				}
			}
			return 0
		}, func(c *Config) {
			c.Policy = PlanOrder() // a use changes no place
			c.AheadRate = kib      // a job has one batch
		})
		all = w.fillSpace(gpu0, 75, kib) // between the marks
		first = w.firstVictim().ID()
		w.start()
		settle(5 * time.Minute)
		if tries < 3 {
			t.Errorf("it was not tried again")
		}
		w.end(all...)
	})
}

// TestWrittenWhenADiskHasRoom: a disk's marks are raised, and nothing else changes.
func TestWrittenWhenADiskHasRoom(t *testing.T) {
	bubble(t, "marks", func(t *testing.T) {
		var room atomic.Bool
		var copied atomic.Int64
		w := aheadWorld(t, func(*batch.Batch) int64 {
			if !room.Load() {
				return 0
			}
			copied.Add(1)
			return kib
		})
		if err := w.spaces[disk0].SetMarks(tier.Marks{Limit: 1, Trigger: 0.02, Stop: 0.01}); err != nil {
			t.Fatal(err)
		}
		all := w.fillSpace(gpu0, 75, kib) // between the marks
		w.start()
		settle(time.Minute)
		room.Store(true)
		if err := w.spaces[disk0].SetMarks(tier.Marks{Limit: 1, Trigger: 0.8, Stop: 0.6}); err != nil {
			t.Fatal(err)
		}
		settle(3 * time.Second)
		if copied.Load() == 0 {
			t.Error("nothing was copied")
		}
		w.end(all...)
	})
}

// TestWrittenWhenPutBack: a batch that was in use when it was to be moved is copied ahead when it
// may be moved again.
func TestWrittenWhenPutBack(t *testing.T) {
	bubble(t, "busy", func(t *testing.T) {
		var inUse batch.ID
		var tries, others atomic.Int64
		w := aheadWorld(t, func(b *batch.Batch) int64 {
			if others.Add(1); b.ID() == inUse {
				tries.Add(1)
			}
			return 0
		}, func(c *Config) { c.Period = 3 * time.Second })
		w.mover.fault = func(b *batch.Batch, _, _ tier.ID) error {
			if b.ID() == inUse {
				return &batch.StateError{Batch: b.ID()}
			}
			return nil
		}
		all := w.fillSpace(gpu0, 70, kib) // between the marks
		inUse = w.firstVictim().ID()
		w.start()
		r, err := w.res.Reserve(t.Context(), specific(gpu0), 31*kib, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Release(); err != nil {
			t.Fatal(err)
		}
		settle(time.Millisecond)
		for w.spaces[gpu0].State().Used() < 70*kib {
			all = append(all, w.put(gpu0, kib, seq(0))) // is no victim before it
		}
		settle(time.Second)
		poke(w.mon.wake)
		settle(time.Second)
		if tries.Load() > 0 || others.Load() == 0 {
			t.Errorf("%d tries to copy it, of %d", tries.Load(), others.Load())
		}
		settle(10 * time.Second)
		if tries.Load() == 0 {
			t.Error("it was not copied")
		}
		w.end(all...)
	})
}

// TestWrittenWhenNoLongerLeased: a batch whose memory is leased, and no other, can be copied.
func TestWrittenWhenNoLongerLeased(t *testing.T) {
	bubble(t, "leased", func(t *testing.T) {
		var first batch.ID
		var tries atomic.Int64
		w := aheadWorld(t, func(b *batch.Batch) int64 {
			if b.ID() == first {
				tries.Add(1)
			}
			return 0
		})
		all := w.fillSpace(gpu0, 75, kib) // between the marks
		victim := w.firstVictim()
		first = victim.ID()
		end, ok := imageOf(t, victim).Buffers()[0].TryLease()
		if !ok {
			t.Fatal("no lease")
		}
		w.start()
		settle(time.Minute)
		if end(); tries.Load() > 0 {
			t.Error("it was tried")
		}
		settle(time.Minute)
		if tries.Load() == 0 {
			t.Error("it was not tried")
		}
		w.end(all...)
	})
}

// TestWrittenAfterLessPressure: the pressure falls below the stop mark for a moment.
func TestWrittenAfterLessPressure(t *testing.T) {
	bubble(t, "falls", func(t *testing.T) {
		var all []*batch.Batch
		var r *reservation.Reservation
		seen := make(map[batch.ID]int)
		var w *world
		w = aheadWorld(t, func(b *batch.Batch) int64 {
			if len(seen) == 0 {
				_ = r.Release()
				time.AfterFunc(time.Millisecond, func() { r, _ = w.res.TryReserve(specific(gpu0), 5*kib, nil) })
			}
			seen[b.ID()]++
			return 0
		})
		all = w.fillSpace(gpu0, 57, kib)
		r, _ = w.res.TryReserve(specific(gpu0), 5*kib, nil)
		w.start()
		settle(time.Minute)
		if len(seen) < 2 {
			t.Errorf("%d batches were tried", len(seen))
		}
		_ = r.Release()
		w.end(all...)
	})
}

// TestAheadKeepsTheRate: a batch that takes longer than a time.Duration can be is one all the same.
// What was not written, because others use the disks, is not charged.
func TestAheadKeepsTheRate(t *testing.T) {
	bubble(t, "slow", func(t *testing.T) {
		var tries atomic.Int64
		w := newWorld(t, sizes{gpu0: 100 << 30, disk0: 1000 << 30}, func(c *Config, _ *world) {
			c.AheadRate = 1
			c.WriteAhead = func(_ context.Context, b *batch.Batch, _ time.Duration) (int64, error) {
				tries.Add(1)
				return b.Info().Bytes, nil
			}
		})
		all := w.fillSpace(gpu0, 7, 10<<30) // between the marks
		w.start()
		settle(time.Hour)
		if n := tries.Load(); n != 1 {
			t.Errorf("%d batches were written in an hour, at a byte a second", n)
		}
		w.end(all...)
	})
	bubble(t, "turns", func(t *testing.T) {
		var tries, written atomic.Int64
		w := newWorld(t, sizes{gpu0: 100 * kib, disk0: 1000 * kib}, func(c *Config, _ *world) {
			c.AheadRate = 1
			c.WriteAhead = func(_ context.Context, b *batch.Batch, _ time.Duration) (int64, error) {
				if tries.Add(1) < 3 {
					return 0, context.Canceled
				}
				written.Add(1)
				return b.Info().Bytes, nil
			}
		})
		all := w.fillSpace(gpu0, 75, kib)
		w.start()
		settle(10 * time.Second)
		if n := written.Load(); n != 1 {
			t.Errorf("%d batches were written after %d tries", n, tries.Load())
		}
		w.end(all...)
	})
}

// TestCopiedAreLookedAtAgain: a space is left alone when a search has found nothing to copy, not
// after one in which something was copied: that may be gone again.
func TestCopiedAreLookedAtAgain(t *testing.T) {
	bubble(t, "once more", func(t *testing.T) {
		var tries atomic.Int64
		w := aheadWorld(t, func(b *batch.Batch) int64 {
			if tries.Add(1) == 1 {
				return kib
			}
			return 0
		})
		all := w.fillSpace(gpu0, 75, kib)
		w.start()
		settle(5 * time.Minute)
		if n := tries.Load(); n != 2*15 {
			t.Errorf("%d batches were tried, want the 15 above the stop mark twice", n)
		}
		w.end(all...)
	})
}

// TestNeedEndsACopy: the copy in progress ends at once when a space needs room.
func TestNeedEndsACopy(t *testing.T) {
	bubble(t, "the trigger", func(t *testing.T) {
		var begun, ended atomic.Int64
		w := newWorld(t, sizes{gpu0: 100 * kib, disk0: 1000 * kib}, func(c *Config, _ *world) {
			c.AheadRate = 1000 * kib
			c.WriteAhead = func(ctx context.Context, _ *batch.Batch, _ time.Duration) (int64, error) {
				begun.Add(1)
				<-ctx.Done()
				ended.Add(1)
				return 0, ctx.Err()
			}
		})
		all := w.fillSpace(gpu0, 75, kib)
		w.start()
		settle(10 * time.Second)
		if begun.Load() != 1 || ended.Load() != 0 {
			t.Errorf("%d copies were begun, %d have ended", begun.Load(), ended.Load())
		}
		all = append(all, w.fillSpace(gpu0, 5, kib)...)
		settle(time.Millisecond)
		if ended.Load() != 1 {
			t.Error("the copy goes on although the pressure is at the trigger")
		}
		w.end(all...)
	})
}
