package job

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// pass announces work on every batch, brings each to the GPU, and compares its contents with what
// was loaded. The order is that of loading, the worst for a memory that holds some of them.
func (j *job) pass(ctx context.Context) error {
	for _, it := range j.items {
		if err := it.b.CreateTask(ctx); err != nil {
			return named(err, it.want)
		}
	}
	var next atomic.Int64
	var found findings
	group, ctx := errgroup.WithContext(ctx)
	for range min(j.cfg.Workers, max(1, len(j.items))) {
		group.Go(func() error {
			for {
				i := next.Add(1) - 1
				if i >= int64(len(j.items)) {
					return nil
				}
				if err := context.Cause(ctx); err != nil {
					return err
				}
				if err := j.check(ctx, j.items[i], &found); err != nil {
					return named(err, j.items[i].want)
				}
				j.cfg.Progress.Step()
			}
		})
	}
	err := group.Wait()
	found.addTo(j.res)
	return err
}

// check works on one batch. Bytes that are not those that were loaded are a
// finding and no error: the others are checked too.
func (j *job) check(ctx context.Context, it item, found *findings) (err error) {
	h, err := j.acquire(ctx, it.b)
	if errors.Is(err, convert.ErrCorrupt) {
		found.mismatch(named(err, it.want))
		return it.b.CancelTask() // the one that was announced and not begun
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	got, onDevice, err := j.cfg.Engine.Mover().Digest(ctx, h)
	switch {
	case errors.Is(err, convert.ErrCorrupt):
		found.mismatch(named(err, it.want))
	case err != nil:
		return err
	case got != it.want.digest:
		found.mismatch(fmt.Errorf("%s: the bytes in %s are not those that were loaded: digest %016x, want %016x",
			it.want, h.Space().ID(), got.Hash, it.want.digest.Hash))
	default:
		// Of a batch without bytes there is nothing to compute, on any device.
		empty := it.b.Info().Descriptor.Body == 0
		found.match(h.Space().Kind() == tier.GPU && !onDevice && !empty)
	}
	return nil
}

// acquire brings b to the GPU, or if it can never fit there to the fastest tier
// in which it can.
func (j *job) acquire(ctx context.Context, b *batch.Batch) (*batch.Handle, error) {
	var first error
	for _, to := range tiers() {
		h, err := j.cfg.Engine.Mover().Acquire(ctx, b, to)
		if err == nil {
			return h, nil
		}
		if !errors.Is(err, reservation.ErrExceeded) && !errors.Is(err, reservation.ErrNoCandidate) {
			return nil, err
		}
		if first == nil {
			first = err
		}
	}
	return nil, first
}

// findings collects what the workers of a pass see.
type findings struct {
	mu         sync.Mutex
	checked    int64
	mismatches int64
	corrupt    int64 // of these
	first      string
	onHost     bool
}

func (f *findings) match(onHost bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.checked++
	f.onHost = f.onHost || onHost
}

func (f *findings) mismatch(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.checked++
	f.mismatches++
	if errors.Is(err, convert.ErrCorrupt) {
		f.corrupt++
	}
	if f.first == "" {
		f.first = err.Error()
	}
}

func (f *findings) addTo(r *Result) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r.Checked += f.checked
	r.Mismatches += f.mismatches
	r.Corrupt += f.corrupt
	r.OnHost = r.OnHost || f.onHost
	if r.First == "" {
		r.First = f.first
	}
}

// drain drops all batches, and makes sure that they were all still there.
func (j *job) drain(ctx context.Context) error {
	left, err := j.plan.Manager().Clear(ctx)
	if err != nil {
		return err
	}
	held := int64(0)
	for _, l := range left {
		held += int64(l.Batches)
	}
	if held != j.res.Batches {
		return fmt.Errorf("%d batches were loaded, and %d were left to drop", j.res.Batches, held)
	}
	return nil
}
