package peer

import (
	"context"
	"errors"
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

func (o *ours) close(ctx context.Context) (err error) {
	for _, b := range o.batches {
		err = errors.Join(err, b.Discard(ctx))
	}
	return errors.Join(err, o.eng.Close())
}

// write puts batches into host memory until that is full, moves them to disk, and goes on with the
// next.
func (o *ours) write(ctx context.Context, _ bool) (moved, put time.Duration, err error) {
	window := 0 // the first batch in host memory
	spill := func() error {
		start := time.Now()
		err := o.parallel(ctx, o.batches[window:], func(ctx context.Context, b *batch.Batch) error {
			return o.eng.Mover().Move(ctx, b, reservation.AnyInTier(tier.Disk))
		})
		moved += time.Since(start)
		window = len(o.batches)
		return err
	}
	err = o.r.each(ctx, func(_ int, rec arrow.RecordBatch) error {
		start := time.Now()
		p, err := o.eng.Mover().TryIngest(ctx, rec, reservation.AnyInTier(tier.Host))
		if errors.Is(err, tier.ErrNoSpace) && window < len(o.batches) {
			if err := spill(); err != nil {
				return err
			}
			start = time.Now()
			p, err = o.eng.Mover().TryIngest(ctx, rec, reservation.AnyInTier(tier.Host))
		}
		put += time.Since(start)
		if err != nil {
			return err
		}
		in := p.Space().Kind() // before the monitor can move the batch
		b, err := o.eng.NewBatch(p)
		if err != nil {
			return err
		}
		b.Subscribe()
		o.batches = append(o.batches, b)
		if host := o.eng.Reservations().Spaces().InTier(tier.Host)[0]; !in.IsMemory() {
			return &reservation.ExceededError{
				Space: host.ID(), Requested: convert.LogicalBytes(rec),
				Available: host.State().Available, Limit: host.State().Room,
				Hint: "comparing needs room for a whole batch",
			}
		}
		return nil
	})
	if err == nil {
		err = spill()
	}
	return moved, put, err
}

// read brings every batch back to host memory, which verifies its checksums, calls f with its
// record, and drops it. One worker reads in the order of putting.
func (o *ours) read(ctx context.Context, f check) error {
	err := o.parallel(ctx, o.batches, func(ctx context.Context, b *batch.Batch) error {
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

// parallel calls f with each of the batches, by as many goroutines as there are workers. One takes them in order.
func (o *ours) parallel(ctx context.Context, batches []*batch.Batch,
	f func(context.Context, *batch.Batch) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(o.r.cfg.Workers)
	for _, b := range batches {
		group.Go(func() error {
			o.r.cfg.Progress.Step()
			return f(ctx, b)
		})
	}
	return group.Wait()
}
