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

// each calls work for every batch, on Workers goroutines. The order is that of loading, the worst for
// a memory that holds some of the batches.
func (j *job) each(ctx context.Context, work func(ctx context.Context, i int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(j.cfg.Workers)
	for i := range j.items {
		group.Go(func() error {
			if err := context.Cause(ctx); err != nil {
				return err
			}
			if err := work(ctx, i); err != nil {
				return named(err, j.items[i].want)
			}
			j.cfg.Progress.Step()
			return nil
		})
	}
	return group.Wait()
}

// pass announces work on every batch, brings each to the GPU, and compares its contents with what
// was loaded.
func (j *job) pass(ctx context.Context) error {
	for _, it := range j.items {
		if err := it.b.CreateTask(ctx); err != nil {
			return named(err, it.want)
		}
	}
	return j.each(ctx, func(ctx context.Context, i int) error { return j.check(ctx, &j.items[i]) })
}

// check brings one batch to the GPU, or if it can never fit there to the fastest tier in which it
// can, and compares it. Bytes that are not those that were loaded are a finding and no error: the
// other batches are checked too.
func (j *job) check(ctx context.Context, it *item) error {
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
	switch {
	case errors.Is(err, convert.ErrCorrupt):
		j.count(it, finding{wrong: named(err, it.want)})
		return it.b.CancelTask() // the one that was announced and not begun
	case unfit(err):
		return first
	case err != nil:
		return err
	}
	f, err := j.compare(ctx, h, it.want)
	if err == nil {
		j.count(it, f)
	}
	return errors.Join(err, h.Close())
}

// unfit reports whether err is that of a batch that can never fit a tier.
func unfit(err error) bool {
	return errors.Is(err, reservation.ErrExceeded) || errors.Is(err, reservation.ErrNoCandidate)
}

// runTasks works on every batch by a task of the engine. The engine admits a task when the GPU has
// room for its batch and for its output, retries it with more memory if that was too little, and drops
// the batch when the task has succeeded. Batches that fit no GPU, and corrupt ones, are left.
func (j *job) runTasks(ctx context.Context) error {
	claims := make([]*repository.Claim, 0, len(j.items))
	defer func() {
		for _, c := range claims {
			_ = c.Restore() // those that no task has ended
		}
	}()
	for _, it := range j.items { // in the order of the partitions, so each claim is that of its item
		c, err := it.repo.Claim(ctx, it.want.partition(j.cfg.Partitions), 1)
		if err != nil {
			return named(err, it.want)
		}
		claims = append(claims, c)
	}
	return j.each(ctx, func(ctx context.Context, i int) error {
		it := &j.items[i]
		output := max(tier.Page, it.b.Info().Bytes/outputShare)
		task := spillway.Task{Operator: "digest", Inputs: claims[i : i+1], Output: output}
		var f finding
		err := j.cfg.Engine.RunTask(ctx, task, func(ctx context.Context, g *spillway.Grant, h []*batch.Handle) error {
			out, err := g.Alloc(output)
			if err != nil {
				return err
			}
			f, err = j.compare(ctx, h[0], it.want)
			g.Produced(output)
			return errors.Join(err, out.Release())
		})
		switch {
		case errors.Is(err, convert.ErrCorrupt):
			f.wrong = named(err, it.want)
		case unfit(err):
			return nil
		case err != nil:
			return err
		default:
			j.consumed.Add(1)
		}
		j.mu.Lock()
		defer j.mu.Unlock()
		if !it.wrong { // else a pass has found it
			j.countLocked(it, f)
		}
		return nil
	})
}

// outputShare is the size of a batch, in sizes of the output that its task makes of it.
const outputShare = 16

// finding is the result of a comparison.
type finding struct {
	wrong  error // nil if the bytes are those that were loaded
	onHost bool  // the device could not compute the digest
}

// compare computes the digest of a batch where it is, and compares it with that of what was loaded.
func (j *job) compare(ctx context.Context, h *batch.Handle, want expectation) (f finding, err error) {
	got, onDevice, err := j.cfg.Engine.Mover().Digest(ctx, h)
	switch {
	case errors.Is(err, convert.ErrCorrupt):
		f.wrong = named(err, want)
		return f, nil
	case err != nil:
		return f, err
	case got != want.digest:
		f.wrong = fmt.Errorf("%s: the bytes in %s are not those that were loaded: digest %016x, want %016x",
			want, h.Space().ID(), got.Hash, want.digest.Hash)
	case h.Space().Kind() == tier.GPU && !onDevice:
		// Of a batch without bytes there is nothing to compute, on any device.
		f.onHost = h.Batch().Info().Descriptor.Body > 0
	}
	return f, nil
}

// count adds the finding of a pass to the result. It is safe for concurrent use.
func (j *job) count(it *item, f finding) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.res.Checked++
	j.countLocked(it, f)
}

func (j *job) countLocked(it *item, f finding) {
	j.res.OnHost = j.res.OnHost || f.onHost
	if f.wrong == nil {
		return
	}
	it.wrong = true
	j.res.Mismatches++
	if errors.Is(f.wrong, convert.ErrCorrupt) {
		j.res.Corrupt++
	}
	if j.res.First == "" {
		j.res.First = f.wrong.Error()
	}
}

// drop drops all batches, and makes sure that all that no task has consumed were still there.
func (j *job) drop(ctx context.Context) error {
	left, err := j.plan.Manager().Clear(ctx)
	if err != nil {
		return err
	}
	held := j.consumed.Load()
	for _, l := range left {
		held += int64(l.Batches)
	}
	if held != j.res.Batches {
		return fmt.Errorf("%d batches were loaded, and %d were left to drop", j.res.Batches, held)
	}
	return nil
}
