package peer

import (
	"cmp"
	"context"
	"errors"
	"runtime/debug"
	"slices"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"golang.org/x/sync/errgroup"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// ours is our side: batches that an engine of its own spills. It subscribes to them, so that the
// monitor moves none.
type ours struct {
	r       *runner
	eng     *spillway.Engine
	batches []*batch.Batch // in the order of putting
}

// withOurs opens an engine for f and closes it. f goes through all batches so many times.
func (r *runner) withOurs(ctx context.Context, phase string, passes int64, f func(*ours) error) (err error) {
	r.cfg.Progress.Begin(phase, passes*r.res.Batches)
	debug.FreeOSMemory() // what the peer has left
	eng, err := r.cfg.Open(ctx)
	if err != nil {
		return err
	}
	o := &ours{r: r, eng: eng}
	defer func() {
		for _, b := range o.batches {
			err = errors.Join(err, b.Discard(context.WithoutCancel(ctx)))
		}
		err = errors.Join(err, eng.Close())
	}()
	return f(o)
}

// measure writes and reads everything once. put is what it took to lay the batches out in host
// memory, which is no part of t.
func (o *ours) measure(ctx context.Context) (t Times, put time.Duration, err error) {
	if t.Write, put, err = o.write(ctx); err != nil {
		return t, put, err
	}
	t.Read, err = o.r.timed("spillway", func(f check) error { return o.read(ctx, o.r.cfg.Workers, f) })
	return t, put, err
}

// write puts all batches into host memory, a window at a time, and moves each window to disk.
func (o *ours) write(ctx context.Context) (moved, put time.Duration, err error) {
	window, largest := 0, int64(0) // the first batch in host memory, and what the largest takes there
	spill := func() error {
		start := time.Now()
		err := o.parallel(ctx, o.r.cfg.Workers, o.batches[window:], func(ctx context.Context, b *batch.Batch) error {
			return o.eng.Mover().Move(ctx, b, reservation.AnyInTier(tier.Disk))
		})
		moved += time.Since(start)
		window = len(o.batches)
		return err
	}
	err = o.r.each(ctx, func(_ int, rec arrow.RecordBatch) error {
		l, err := convert.NewLayout(rec)
		if err != nil {
			return err
		}
		host := o.emptiest()
		need := host.Charge(l.Size())
		for _, d := range l.Dictionaries() {
			need += host.Charge(d.Size())
		}
		l.Close()
		largest = max(largest, need)
		// Beside others there must be room for one more batch, which the engine keeps free for consumers.
		if window < len(o.batches) && need+largest > host.Available() {
			if err := spill(); err != nil {
				return err
			}
			host = o.emptiest()
		}
		if room := host.Available(); need > room { // Ingest would choose the disk
			return &reservation.ExceededError{Space: host.ID(), Requested: need, Available: room, Limit: host.Room(),
				Hint: "comparing needs room for a whole batch"}
		}
		start := time.Now()
		p, err := o.eng.Mover().Ingest(ctx, rec, reservation.Specific(host.ID()))
		if err != nil {
			return err
		}
		b, err := o.eng.NewBatch(p)
		if err != nil {
			return err
		}
		b.Subscribe()
		o.batches = append(o.batches, b)
		put += time.Since(start)
		return nil
	})
	if err == nil {
		err = spill()
	}
	return moved, put, err
}

// emptiest returns the host space with the most room.
func (o *ours) emptiest() *tier.Space {
	return slices.MaxFunc(o.eng.Reservations().Spaces().InTier(tier.Host), func(a, b *tier.Space) int {
		return cmp.Compare(a.Available(), b.Available())
	})
}

// read brings every batch back to host memory, which verifies its checksums, calls f with its
// record, and drops it. One worker reads in the order of putting.
func (o *ours) read(ctx context.Context, workers int, f check) error {
	err := o.parallel(ctx, workers, o.batches, func(ctx context.Context, b *batch.Batch) error {
		h, err := o.eng.Mover().Acquire(ctx, b, reservation.AnyInTier(tier.Host))
		if err != nil {
			return err
		}
		rec, err := o.eng.Mover().Record(ctx, h)
		if err == nil {
			err = f(rec)
			rec.Release()
		}
		return errors.Join(err, b.Drop(), h.Close()) // dropped while it is held, so that it is not being moved
	})
	if err == nil {
		o.batches = nil
	}
	return err
}

// parallel calls f with each of the batches, by so many goroutines. One takes them in order.
func (o *ours) parallel(ctx context.Context, workers int, batches []*batch.Batch,
	f func(context.Context, *batch.Batch) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(workers)
	for _, b := range batches {
		group.Go(func() error {
			o.r.cfg.Progress.Step()
			return f(ctx, b)
		})
	}
	return group.Wait()
}
