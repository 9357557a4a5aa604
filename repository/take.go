package repository

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/batch"
)

// TakeOption changes how batches leave a repository. An option that a method does not
// name changes nothing there.
type TakeOption func(*takeOptions)

type takeOptions struct {
	unordered, waitInput, waitClaims, noWait bool
	transit                                  **batch.Transit
	ahead                                    int // batches, or adaptive
}

func takeOptionsOf(opts []TakeOption) (o takeOptions) {
	o.ahead = adaptive
	for _, opt := range opts {
		opt(&o)
	}
	return o
}

// want adds Unordered to w.
func (o takeOptions) want(w want) want {
	if o.unordered {
		w |= unordered
	}
	return w
}

// Unordered skips batches in transit, and so does not wait for them: batches then come
// in the order in which they can be had. It is for consumers to which the order means
// nothing, of Take, Claim, Drain and Reader.
func Unordered() TakeOption { return func(o *takeOptions) { o.unordered = true } }

// WaitInput makes Drain and ClaimAll wait for more until the input is closed. Take, Claim
// and Reader do so anyway.
func WaitInput() TakeOption { return func(o *takeOptions) { o.waitInput = true } }

// WaitClaims makes Claim wait for batches in open claims, which may be restored, where it
// would return a *ClaimedError. A caller that holds the open claim itself waits until its
// context ends.
func WaitClaims() TakeOption { return func(o *takeOptions) { o.waitClaims = true } }

// NoWait makes Take, TakeByID and Claim return nil and no error if there is nothing that could be
// had now, also because an older batch is in transit.
func NoWait() TakeOption { return func(o *takeOptions) { o.noWait = true } }

// ReadAhead sets how many batches Drain, and Reader for batches on disk, bring ahead at most while
// the caller works: 0 stops that, and more than 64 are 64. Without it they are as many as the times
// of the last work and of the last move ask for, up to 8. A batch is brought ahead only while the
// tier stays below its stop mark, nobody waits for room there, and nothing was moved out of there
// for demand or pressure a moment ago. Nothing is brought ahead from a disk where batches persist.
func ReadAhead(batches int) TakeOption { return func(o *takeOptions) { o.ahead = max(0, batches) } }

// Into sets *t to the transit of a batch that Take or TakeByID takes as batch.InTransit. The caller
// owns both.
func Into(t **batch.Transit) TakeOption { return func(o *takeOptions) { o.transit = t } }

// Take waits for a batch of the partition that can move to the state, takes the oldest such, and
// moves it there. The caller then owns the batch and must drop it or hand it on. The states are:
//
//   - batch.Idle: a batch without tasks and handles. Older ones that have some are
//     skipped.
//   - batch.TaskCreated: any batch; a task is created on it, for which the caller must
//     Lock it (or CancelTask). One on which handles are open keeps the state
//     batch.Processing with the task pending.
//   - batch.InTransit, with Into: a batch without open handles. Older ones that have some are
//     skipped.
//
// For processing a batch is taken with a task and locked where it is wanted. Any other state is an
// error.
//
// Batches come in the order of arrival: while an older one is in transit Take waits for
// it, unless it is Unordered. Batches that other takers or claims have are skipped.
//
// If the input is closed and the partition is empty, Take returns io.EOF; batches in
// open claims count as being there. It stops waiting when ctx ends, and when the
// repository is closed with an error that matches tier.ErrClosed. Takers are served in
// the order in which they came.
func (r *Repository) Take(
	ctx context.Context, partition int, to batch.State, opts ...TakeOption,
) (*batch.Batch, error) {
	o := takeOptionsOf(opts)
	w, move, err := r.mover(to, o)
	if err != nil {
		return nil, err
	}
	for {
		e, err := r.claim(ctx, partition, o.want(w), !o.noWait)
		if e == nil {
			return nil, err
		}
		if err := r.finish(e, move); err == nil {
			return e.b, nil
		} else if !errors.Is(err, batch.ErrState) {
			return nil, err
		}
		// It was moved or dropped between the claim and the move, and its entry has been updated.
	}
}

// mover returns the function that moves a batch to a state; it has nothing to do with Config.Mover.
func (r *Repository) mover(to batch.State, o takeOptions) (want, func(*batch.Batch) error, error) {
	switch {
	case to == batch.Idle:
		return wantIdle, mustBeIdle, nil
	case to == batch.TaskCreated:
		return wantTask, (*batch.Batch).TryCreateTask, nil
	case to == batch.InTransit && o.transit != nil:
		return wantTransit, func(b *batch.Batch) (err error) {
			*o.transit, err = b.TryTransit()
			return err
		}, nil
	}
	const text = "repository %s: a batch cannot be taken as %s: want idle, task-created, or in-transit with Into"
	return 0, nil, fmt.Errorf(text, r.key, to)
}

// mustBeIdle moves nothing; an idle batch is in the state already.
func mustBeIdle(b *batch.Batch) error {
	if s := b.Info().State; s != batch.Idle {
		return &batch.StateError{Batch: b.ID(), State: s, Op: "take", Status: batch.InvalidState}
	}
	return nil
}

// TakeByID waits until the batch of that id, which is in some partition, can move
// to the state (see Take), moves it there and takes it. If the repository does
// not hold it, or another takes it meanwhile, the error matches ErrUnknown.
func (r *Repository) TakeByID(
	ctx context.Context, id batch.ID, to batch.State, opts ...TakeOption,
) (*batch.Batch, error) {
	o := takeOptionsOf(opts)
	w, move, err := r.mover(to, o)
	if err != nil {
		return nil, err
	}
	for {
		e, changed, err := r.claimByID(id, w)
		switch {
		case err != nil:
			return nil, err
		case e == nil && o.noWait:
			return nil, nil
		case e == nil:
			select {
			case <-changed:
			case <-r.life.Done():
				return nil, r.closedError()
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
			continue
		}
		if err := r.finish(e, move); err == nil {
			return e.b, nil
		} else if !errors.Is(err, batch.ErrState) {
			return nil, err
		}
	}
}

// claimByID claims the batch of an id, or returns what to wait for.
func (r *Repository) claimByID(id batch.ID, w want) (*entry, <-chan struct{}, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.mu.entries[id]
	switch {
	case r.mu.closed:
		return nil, nil, r.closedError()
	case e == nil:
		return nil, nil, fmt.Errorf("repository %s, batch %d: %w", r.key, id, ErrUnknown)
	case !slices.Contains(eligible[w], e.class):
		return nil, e.awaitLocked(), nil
	}
	e.part.moveLocked(e, claimed)
	return e, nil, nil
}

// finish moves the claimed batch and removes it, or puts it back.
func (r *Repository) finish(e *entry, move func(*batch.Batch) error) error {
	if err := move(e.b); err != nil {
		r.putBack(e)
		return err
	}
	r.remove(e)
	return nil
}

// claim waits for the oldest entry that the taker can have, and moves it to the class claimed, so
// that no other taker gets it. Without wait it returns nil if there is none now. The caller must
// end the claim, by remove or putBack. The exported Claim makes a longer one of several entries.
func (r *Repository) claim(ctx context.Context, partition int, w want, wait bool) (*entry, error) {
	var e *entry
	r.mu.Lock()
	p, err := r.partitionLocked(partition)
	switch {
	case err != nil:
	case r.mu.closed:
		err = r.closedError()
	default:
		if e = p.firstLocked(w); e != nil {
			p.moveLocked(e, claimed)
		} else {
			err = p.endLocked(w)
		}
	}
	if e != nil || err != nil || !wait {
		r.mu.Unlock()
		return e, err
	}
	wt, at := p.waitLocked(w)
	r.mu.Unlock()
	select {
	case <-wt.ready:
		return wt.e, wt.err
	case <-ctx.Done():
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case wt.e != nil: // another goroutine gave us the entry at the same moment
		r.unclaimLocked(wt.e)
		p.matchLocked()
	case wt.err == nil:
		p.leaveLocked(w, at)
	}
	return nil, context.Cause(ctx)
}
