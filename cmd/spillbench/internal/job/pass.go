package job

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sync/errgroup"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// outputShare is the size of a batch divided by the size of the output of its task.
const outputShare = 16

// each calls work for every batch, in Workers goroutines. The order is that of loading, which is the
// worst case for a memory that has room for a part of the batches.
func (j *job) each(ctx context.Context, work func(ctx context.Context, it *item) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(j.cfg.Workers)
	for i := range j.items {
		group.Go(func() error {
			if err := context.Cause(ctx); err != nil {
				return err
			}
			it := &j.items[i]
			if err := work(ctx, it); err != nil {
				return it.named(err)
			}
			j.cfg.Progress.Step()
			return nil
		})
	}
	return group.Wait()
}

// pass creates a task for every batch, moves each batch to the GPU, or to the fastest tier in which it
// can fit, and compares its digest with the expected one.
func (j *job) pass(ctx context.Context) error {
	for i := range j.items {
		if err := j.items[i].b.CreateTask(ctx); err != nil {
			return j.items[i].named(err)
		}
	}
	return j.each(ctx, func(ctx context.Context, it *item) error {
		var h *batch.Handle
		var err, first error
		for _, kind := range tier.Kinds() {
			h, err = j.cfg.Engine.Mover().Acquire(ctx, it.b, reservation.AnyInTier(kind))
			if !unfit(err) {
				break
			}
			if first == nil {
				first = err
			}
		}
		var wrong error
		switch {
		case errors.Is(err, convert.ErrCorrupt):
			wrong, err = it.named(err), it.b.CancelTask() // which has not begun
		case unfit(err):
			return first
		case err == nil:
			wrong, err = j.compare(ctx, h, it)
			err = errors.Join(err, h.Close())
		}
		if err != nil {
			return err
		}
		j.mu.Lock()
		defer j.mu.Unlock()
		j.res.Checked++
		j.countLocked(it, wrong)
		return nil
	})
}

// unfit reports whether err means that a batch can never fit in a tier.
func unfit(err error) bool {
	return errors.Is(err, reservation.ErrExceeded) || errors.Is(err, reservation.ErrNoCandidate)
}

// runTasks works on every batch in a task of the engine. The engine admits a task when the GPU has room
// for the batch and the output, retries it with more memory if that was too little, and drops the batch
// after success. runTasks leaves corrupt batches, and batches that fit in no GPU.
func (j *job) runTasks(ctx context.Context) error {
	claims := make(map[*batch.Batch]*repository.Claim)
	defer func() {
		for _, c := range claims {
			_ = c.Restore() // the claims of batches that are left
		}
	}()
	for i := range j.items {
		it := &j.items[i]
		c, err := it.repo.Claim(ctx, it.partition, 1) // not necessarily the batch of it
		if err != nil {
			return it.named(err)
		}
		claims[c.Batches()[0]] = c
	}
	return j.each(ctx, func(ctx context.Context, it *item) error {
		output := max(tier.Page, it.b.Info().Bytes/outputShare)
		task := spillway.Task{Operator: "digest", Inputs: []*repository.Claim{claims[it.b]}, Output: output}
		var wrong error
		err := j.cfg.Engine.RunTask(ctx, task, func(ctx context.Context, g *spillway.Grant, h []*batch.Handle) error {
			out, err := g.Alloc(output)
			if err != nil {
				return err
			}
			wrong, err = j.compare(ctx, h[0], it)
			g.Produced(output)
			return errors.Join(err, out.Release())
		})
		j.mu.Lock()
		defer j.mu.Unlock()
		switch {
		case errors.Is(err, convert.ErrCorrupt):
			wrong = it.named(err)
		case unfit(err):
			return nil
		case err != nil:
			return err
		default:
			j.consumed++
		}
		if !it.wrong { // else a pass has found it
			j.countLocked(it, wrong)
		}
		return nil
	})
}

// compare computes the digest of a batch in the space that has it. It returns a mismatch as wrong and
// not as err, because the job goes on with the other batches.
func (j *job) compare(ctx context.Context, h *batch.Handle, it *item) (wrong, err error) {
	got, err := j.cfg.Engine.Mover().Digest(ctx, h)
	switch {
	case errors.Is(err, convert.ErrCorrupt):
		return it.named(err), nil
	case err != nil:
		return nil, err
	case got != it.digest:
		return it.named(fmt.Errorf("the bytes in %s are not those that were loaded: digest %016x, want %016x",
			h.Space().ID(), got.Hash, it.digest.Hash)), nil
	}
	return nil, nil
}

// countLocked adds a mismatch to the result, if there is one.
func (j *job) countLocked(it *item, wrong error) {
	if wrong == nil {
		return
	}
	it.wrong = true
	j.res.Mismatches++
	if errors.Is(wrong, convert.ErrCorrupt) {
		j.res.Corrupt++
	}
	if j.res.First == "" {
		j.res.First = wrong.Error()
	}
}

// drop drops all batches. It returns an error unless the engine had every batch that no task dropped.
func (j *job) drop(ctx context.Context) error {
	left, err := j.plan.Manager().Clear(ctx)
	if err != nil {
		return err
	}
	held := j.consumed
	for _, l := range left {
		held += int64(l.Batches)
	}
	if held != j.res.Batches {
		return fmt.Errorf("%d batches were loaded, and %d were left to drop", j.res.Batches, held)
	}
	return nil
}
