package monitor

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestSmallVictimsBesideHeadroom: of more victims than are looked at in one step the first are too
// large for host with its headroom, and a small one is not.
func TestSmallVictimsBesideHeadroom(t *testing.T) {
	bubble(t, "gpu to host", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 1101*20*kib + 4*kib, host0: 100 * kib, disk0: 4 * kib}, nil)
		var all []*batch.Batch
		all = append(all, w.fillSpace(disk0, 1, 4*kib)...)
		all = append(all, w.fillSpace(host0, 15, 5*kib)...)
		all = append(all, w.put(gpu0, 4*kib, seq(0)))
		all = append(all, w.fillSpace(gpu0, 1101, 20*kib)...)
		w.start()
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		r, err := w.res.Reserve(ctx, specific(gpu0), 2*kib, nil)
		if err != nil {
			t.Errorf("with 25 KiB free in host, of which 20 are headroom, a batch of 4 KiB does not leave for it: %v", err)
		} else {
			r.Release()
		}
		w.end(all...)
	})
}

// fixedQuota is one of which others hold a part for good.
type fixedQuota struct {
	tier.Quota
	limit int64
	left  atomic.Int64
}

func (q *fixedQuota) Charge(n int64) error {
	if q.left.Add(-n) < 0 {
		q.left.Add(n)
		return tier.ErrOutOfBudget
	}
	return nil
}

func (q *fixedQuota) Subscribe(func()) func() { return func() {} }

func (q *fixedQuota) Credit(n int64) { q.left.Add(n) }

func (q *fixedQuota) Remaining() int64 { return q.left.Load() }

func (q *fixedQuota) Limit() int64 { return q.limit }

// TestHeadroomUnderQuota: what others hold of a shared quota is no room: in an empty host, the
// headroom is no more than what is left beside the request.
func TestHeadroomUnderQuota(t *testing.T) {
	bubble(t, "others hold the rest", func(t *testing.T) {
		w := worldOf(t, nil)
		quota := &fixedQuota{limit: 100 * kib}
		quota.left.Store(20 * kib)
		for id, q := range map[tier.ID]tier.Quota{host0: quota, disk0: nil} {
			sp, err := tier.NewSpace(tier.SpaceConfig{
				ID: id, Capacity: 100 * kib, Node: -1, Backend: "phantom", Pool: &phantomPool{}, Quota: q,
				Marks: tier.Marks{Limit: 1, Trigger: 0.8, Stop: 0.6},
			})
			if err != nil {
				t.Fatal(err)
			}
			w.spaces[id] = sp
		}
		w.build(w.headroom, nil)
		b := w.put(disk0, 10*kib, seq(0))
		w.start()
		if n := w.headroom(host0, 15*kib); n > 5*kib {
			t.Errorf("a request for 15 KiB of the 20 that are left is to leave %d", n)
		}
		r, err := w.res.Reserve(t.Context(), specific(host0), 15*kib, &reservation.Options{Purpose: reservation.Incoming})
		if err != nil {
			t.Errorf("in an empty host with 20 KiB of its quota left, 15 KiB: %v", err)
		} else {
			r.Release()
		}
		w.end(b)
	})
}

// TestBrokenDiskRefuses: moves to a broken disk are no sign of life. Who waits is refused soon
// after the disk is known to be broken.
func TestBrokenDiskRefuses(t *testing.T) {
	for _, touched := range []bool{true, false} {
		name := "batches as they were made"
		if touched {
			name = "batches that have been used before"
		}
		bubble(t, name, func(t *testing.T) {
			w := newWorld(t, sizes{host0: 800 * kib, disk0: 6400 * kib}, func(_ *Config, w *world) {
				w.stall = 30 * time.Second
			})
			w.mover.fault = func(_ *batch.Batch, _, _ tier.ID) error { return errors.New("the disk is broken") }
			all := w.fillSpace(host0, 200, 4*kib)
			if touched {
				for i, b := range all {
					b.SetPlace(seq(1000 + i))
				}
			}
			w.start()
			begin := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			_, err := w.res.Reserve(ctx, specific(host0), 4*kib, nil)
			if d := time.Since(begin); d > time.Minute || !errors.Is(err, tier.ErrNoSpace) {
				t.Errorf("after %v and %d failures: %v", d, w.failures(), err)
			} else {
				t.Logf("refused after %v and %d failures", d, w.failures())
			}
			w.end(all...)
		})
	}
}

// TestBrokenDiskKeepsHeadroom: with a broken disk, a Put that would fit without the headroom is
// refused as soon as others are. A consumer still gets the headroom.
func TestBrokenDiskKeepsHeadroom(t *testing.T) {
	bubble(t, "batches on the disk can still be read", func(t *testing.T) {
		w := newWorldWithHeadroom(t, sizes{host0: 64 * kib, disk0: 640 * kib}, func(_ *Config, w *world) {
			w.stall = 30 * time.Second
		})
		w.mover.fault = func(_ *batch.Batch, _, _ tier.ID) error { return errors.New("the disk is broken") }
		all := append(w.fillSpace(disk0, 2, 8*kib), w.fillSpace(host0, 14, 4*kib)...)
		w.start()
		begin := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		r, err := w.res.Reserve(ctx, specific(host0), 4*kib, &reservation.Options{Purpose: reservation.Incoming})
		var full *tier.NoSpaceError
		if d := time.Since(begin); d > 10*time.Second || !errors.As(err, &full) || full.Available != 8*kib || full.Cause == nil {
			t.Errorf("after %v and %d failures: %v", d, w.failures(), err)
		}
		if err == nil {
			r.Release()
		}
		if r, err = w.res.Reserve(ctx, specific(host0), 8*kib, &reservation.Options{Purpose: reservation.Consuming}); err != nil {
			t.Errorf("a consumer: %v", err)
		} else {
			r.Release()
		}
		w.end(all...)
	})
}

// TestOneDiskOfTwo: where one disk is broken and the other is full, a consumer of what is on the
// other can still help.
func TestOneDiskOfTwo(t *testing.T) {
	bubble(t, "a consumer of the healthy disk", func(t *testing.T) {
		disk1 := tier.ID{Kind: tier.Disk, Ordinal: 1}
		w := newWorld(t, sizes{host0: 64 * kib, disk0: 64 * kib, disk1: 64 * kib}, func(_ *Config, w *world) {
			w.stall = 30 * time.Second
		})
		w.mover.fault = func(_ *batch.Batch, _, to tier.ID) error {
			if to == disk0 {
				return errors.New("the disk is broken")
			}
			return nil
		}
		onDisk := w.fillSpace(disk1, 16, 4*kib)
		all := w.fillSpace(host0, 16, 4*kib)
		for i, b := range all {
			b.SetPlace(seq(1000 + i)) // else a first change counts as an arrival
		}
		w.start()
		out := w.reserve(t.Context(), host0, 4*kib)
		for i := range 20 {
			time.Sleep(500 * time.Millisecond) // the consumer's work on a batch
			if len(out) > 0 {
				t.Logf("over at %d, %d failures", i, w.failures())
				break
			}
			if i == 12 {
				if err := onDisk[0].Drop(); err != nil {
					t.Fatal(err)
				}
				onDisk = onDisk[1:]
			} else {
				onDisk[1].SetPlace(seq(1000 + i)) // a sign of life
			}
		}
		synctest.Wait()
		t.Logf("%d failures, gone %+v, moved %d", w.failures(), w.gone, w.moved())
		if o := <-out; o.err != nil {
			t.Errorf("the outcome is %v", o.err)
		} else {
			o.r.Release()
		}
		w.end(append(all, onDisk...)...)
	})
}
