package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"golang.org/x/sync/errgroup"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// ours is our side: batches that an engine of its own spills.
type ours struct {
	r   *runner
	eng *spillway.Engine

	repos   []*repository.Repository // by input
	batches []placed                 // in the order of putting; what is put and not given up
	next    int                      // the first that open has not opened
	window  int                      // the first that is in host memory
	largest int64                    // what the largest takes in host memory
}

// placed is a batch and the repository that it was put into.
type placed struct {
	*batch.Batch
	home *repository.Repository
}

// withOurs opens an engine for f and closes it.
func (r *runner) withOurs(ctx context.Context, f func(*ours) error) (err error) {
	r.tidy()
	eng, err := r.cfg.Open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, eng.Close()) }()
	plan, err := eng.Plan("compare")
	if err != nil {
		return err
	}
	o := &ours{r: r, eng: eng}
	for i := range r.cfg.Inputs { // a repository holds batches of one schema
		repo, err := plan.Repository("compare", i)
		if err != nil {
			return err
		}
		o.repos = append(o.repos, repo)
	}
	defer func() { err = errors.Join(err, o.giveBack()) }()
	return f(o)
}

// measure writes and reads everything once. put is what it took to lay the batches
// out in host memory, which is no part of t.
func (o *ours) measure(ctx context.Context, digest uint64) (t Times, put time.Duration, err error) {
	if t.Write, put, err = o.write(ctx); err != nil {
		return t, put, err
	}
	got, took, err := o.read(ctx)
	t.Read = took
	if err == nil {
		err = checkDigest("spillway", got, digest)
	}
	return t, put, err
}

// write puts all batches into host memory, a window at a time, and moves each
// window to disk.
func (o *ours) write(ctx context.Context) (moved, put time.Duration, err error) {
	err = o.r.each(ctx, func(input int, rec arrow.RecordBatch) error {
		space, err := o.room(rec)
		if err == nil && space == nil {
			took, e := o.spill(ctx)
			moved += took
			if err = e; err == nil {
				space, err = o.room(rec)
			}
		}
		if err != nil {
			return err
		}
		start := time.Now()
		err = o.put(ctx, input, rec, space)
		put += time.Since(start)
		return err
	}, nil)
	if err != nil {
		return moved, put, err
	}
	took, err := o.spill(ctx)
	return moved + took, put, err
}

// room returns the host space with the most room for rec below the trigger, at which
// the monitor would begin to move batches that are not timed; nil if others must leave
// first, and an error if they have. Beside others there must be room for one more batch: the engine
// keeps that free for consumers.
func (o *ours) room(rec arrow.RecordBatch) (*tier.Space, error) {
	l, err := convert.NewLayout(rec)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	var best *tier.Space
	var most, need int64
	for _, s := range o.eng.Reservations().Spaces().InTier(tier.Host) {
		room := min(s.Available(), s.Trigger()-1-s.PressureBytes())
		if best == nil || room > most {
			best, most, need = s, room, s.Charge(l.Size())
		}
	}
	if best == nil {
		return nil, fmt.Errorf("there is no host space: %w", tier.ErrNotSupported)
	}
	for _, d := range l.Dictionaries() {
		need += best.Charge(d.Size())
	}
	o.largest = max(o.largest, need)
	switch {
	case need <= most && (o.window == len(o.batches) || need+o.largest <= best.Available()):
		return best, nil
	case o.window < len(o.batches):
		return nil, nil
	}
	return nil, &reservation.ExceededError{Space: best.ID(), Requested: need, Available: max(0, most), Limit: best.Trigger(),
		Hint: "comparing needs room for a whole batch below the trigger"}
}

func (o *ours) put(ctx context.Context, input int, rec arrow.RecordBatch, space *tier.Space) error {
	repo := o.repos[input]
	if err := repo.Put(ctx, 0, rec, repository.WithPlacement(reservation.Specific(space.ID()))); err != nil {
		return err
	}
	b, err := repo.Take(ctx, 0, batch.Idle)
	if err != nil {
		return err
	}
	o.batches = append(o.batches, placed{b, repo})
	return nil
}

// spill moves the window to disk. All of it must be in host memory still: what the monitor
// has moved would not be timed.
func (o *ours) spill(ctx context.Context) (time.Duration, error) {
	window := o.batches[o.window:]
	o.window = len(o.batches)
	for _, b := range window {
		if got := b.Info().Space.Kind; got != tier.Host {
			return 0, fmt.Errorf("batch %d was put into host memory and is in %s", b.ID(), got)
		}
	}
	start := time.Now()
	err := o.parallel(ctx, o.r.cfg.Workers, window, func(ctx context.Context, b *batch.Batch) error {
		return o.eng.Mover().Move(ctx, b, reservation.AnyInTier(tier.Disk))
	})
	return time.Since(start), err
}

// read brings every batch back, touches it and gives it up. At most as many are on
// their way as host memory takes.
func (o *ours) read(ctx context.Context) (digest uint64, took time.Duration, err error) {
	limit := int64(0)
	for _, s := range o.eng.Reservations().Spaces().InTier(tier.Host) {
		limit = max(limit, s.Room())
	}
	workers := min(int64(o.r.cfg.Workers), max(1, limit/max(1, o.largest)))
	var sum atomic.Uint64
	start := time.Now()
	err = o.parallel(ctx, int(workers), o.batches, func(ctx context.Context, b *batch.Batch) error {
		rec, done, err := o.bring(ctx, b)
		if err != nil {
			return err
		}
		sum.Add(touch(rec))
		return done()
	})
	took = time.Since(start)
	if err == nil {
		o.batches, o.window, o.next = nil, 0, 0
	}
	return sum.Load(), took, err
}

// open opens the next batch, in the order of putting.
func (o *ours) open(ctx context.Context) (arrow.RecordBatch, func() error, error) {
	if o.next == len(o.batches) {
		return nil, nil, io.EOF
	}
	b := o.batches[o.next].Batch
	o.next++
	return o.bring(ctx, b)
}

// bring opens b in host memory, where it is moved and so verified by its checksums.
// done gives the record and the batch up.
func (o *ours) bring(ctx context.Context, b *batch.Batch) (_ arrow.RecordBatch, done func() error, err error) {
	h, err := o.eng.Mover().Acquire(ctx, b, reservation.AnyInTier(tier.Host))
	if err != nil {
		return nil, nil, err
	}
	rec, err := o.eng.Mover().Record(ctx, h)
	if err != nil {
		return nil, nil, errors.Join(err, h.Close())
	}
	return rec, func() error {
		rec.Release()
		return errors.Join(b.Drop(), h.Close()) // dropped while it is held, so that it is not being moved
	}, nil
}

// parallel calls f with each of batches, by so many goroutines.
func (o *ours) parallel(ctx context.Context, workers int, batches []placed, f func(context.Context, *batch.Batch) error) error {
	var next atomic.Int64
	group, ctx := errgroup.WithContext(ctx)
	for range min(workers, len(batches)) {
		group.Go(func() error {
			for {
				i := next.Add(1) - 1
				if i >= int64(len(batches)) {
					return nil
				}
				if err := context.Cause(ctx); err != nil {
					return err
				}
				if err := f(ctx, batches[i].Batch); err != nil {
					return err
				}
				o.r.cfg.Progress.Step()
			}
		})
	}
	return group.Wait()
}

// giveBack puts all batches that are left into their repositories. There the engine drops them when
// it is closed, which ends what moves them: on a slow disk a move takes longer than an interrupted
// program may.
func (o *ours) giveBack() error {
	var errs []error
	for _, b := range o.batches {
		if b.Info().State != batch.Released {
			errs = append(errs, b.home.PutBatch(0, b.Batch))
		}
	}
	return errors.Join(errs...)
}
