package repository

import (
	"context"
	"errors"
	"math"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TakeOption changes how batches leave a repository. An option that a method does not
// name changes nothing there.
type TakeOption func(*taker)

// Unordered skips batches in transit, and so does not wait for them: batches then come
// in the order in which they can be had. It is for consumers to which the order means
// nothing, of Take, Claim, ClaimBytes, Drain and Reader.
func Unordered() TakeOption { return func(t *taker) { t.unordered = true } }

// WaitInput makes Drain and ClaimAll wait for more until the input is closed. Take, Claim,
// ClaimBytes and Reader do so anyway.
func WaitInput() TakeOption { return func(t *taker) { t.waitInput = true } }

// WaitClaims makes Claim and ClaimBytes wait for batches in open claims, which may be restored,
// where they would return a *ClaimedError. A caller that holds the open claim itself waits until
// its context ends.
func WaitClaims() TakeOption { return func(t *taker) { t.waitClaims = true } }

// NoWait makes Take, TakeByID, Claim and ClaimBytes return nil and no error if there is nothing
// that could be had now, also because an older batch is in transit.
func NoWait() TakeOption { return func(t *taker) { t.noWait = true } }

// ReadAhead sets how many batches Drain, and Reader for batches on disk, prefetch at most while the
// caller works: 0 stops that, and more than 64 are 64. Without it they prefetch two. A batch is
// prefetched only while the tier stays below its stop mark, nobody waits for room there, and
// nothing was moved out of there for demand or pressure a moment ago. Nothing is prefetched from a
// disk where batches persist.
func ReadAhead(batches int) TakeOption { return func(t *taker) { t.ahead = max(0, batches) } }

// In makes Drain and Reader fetch batches into spaces of the strategy, instead of those of the tier
// that they choose. For Drain the spaces must be of the tier that it was given.
func In(s reservation.Strategy) TakeOption { return func(t *taker) { t.in = s } }

// Into sets *t to the transit of a batch that Take or TakeByID takes as batch.InTransit. The caller
// owns both.
func Into(t **batch.Transit) TakeOption { return func(own *taker) { own.transit = t } }

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
	t := newTaker(nil, opts)
	t.waitInput = true
	return r.take(ctx, partition, to, t)
}

// TakeByID waits until the batch of that id, which is in some partition, can move
// to the state (see Take), moves it there and takes it. If the repository does
// not hold it, or another takes it meanwhile, the error matches ErrUnknown.
func (r *Repository) TakeByID(
	ctx context.Context, id batch.ID, to batch.State, opts ...TakeOption,
) (*batch.Batch, error) {
	t := newTaker(nil, opts)
	r.mu.Lock()
	closed := r.mu.closed
	t.only = r.mu.entries[id]
	r.mu.Unlock()
	switch {
	case closed:
		return nil, r.closedError()
	case t.only == nil:
		return nil, r.errorf(", batch %d: %w", id, ErrUnknown)
	}
	return r.take(ctx, t.only.part.number, to, t)
}

// take takes a batch for t in the state.
func (r *Repository) take(ctx context.Context, partition int, to batch.State, t *taker) (*batch.Batch, error) {
	switch {
	case to == batch.Idle:
		t.from = idle
	case to == batch.TaskCreated:
		t.from = workable
	case to == batch.InTransit && t.transit != nil:
		t.from = removable
	default:
		const text = ": a batch cannot be taken as %s: want idle, task-created, or in-transit with Into"
		return nil, r.errorf(text, to)
	}
	for {
		c, err := r.claim(ctx, partition, t, true)
		if c == nil {
			return nil, err
		}
		e := c.entries[0]
		switch to {
		case batch.Idle:
			if s := e.b.Info().State; s != batch.Idle {
				err = &batch.StateError{Batch: e.b.ID(), State: s, Op: "take", Status: batch.InvalidState}
			}
		case batch.TaskCreated:
			err = e.b.TryCreateTask()
		default:
			*t.transit, err = e.b.TryTransit()
		}
		if err == nil {
			r.remove(e)
			e.b.Detach(e)
			return e.b, nil
		}
		c.restore()
		if !errors.Is(err, batch.ErrState) {
			return nil, err
		}
		// It was moved or dropped between the claim and the move, as its state shows now.
	}
}

// Claim is a set of batches of one partition that are reserved for a task. They stay in the
// repository, in their places, and no other taker gets them, until the claim is ended by either of
// two: Consume, when the task has succeeded, or Restore, when it has not. It must be ended once; it
// is safe for concurrent use.
//
// While the claim is open the batches are like any others for the monitor: code that works on them
// locks them. Closing the repository takes them back: they are dropped, and the claim ends with
// nothing to do.
type Claim struct {
	r       *Repository
	part    *partition
	brief   bool     // it is not a program's, but of a call that takes or drops a batch
	entries []*entry // in order of arrival; those that the claim still has name it
	ended   bool     // guarded by the repository's lock
}

// Claim claims between 1 and limit batches of the partition, in the order of arrival, for
// a task that can work on any part of the input. It waits for the first as Take does, and
// takes those after it that can be had now: up to the first that is in transit, or, if it
// is Unordered, all others. So a claim may be smaller than what the partition holds; what
// needs the whole partition calls ClaimAll.
//
// If the input is closed and the partition is empty, Claim returns io.EOF. If all that is
// left then is in open claims it returns a *ClaimedError at once: there is more work only
// if one of them is restored. With WaitClaims it waits until they have ended.
func (r *Repository) Claim(ctx context.Context, partition, limit int, opts ...TakeOption) (*Claim, error) {
	if limit < 1 {
		return nil, r.errorf(": the number of batches to claim must be at least 1, got %d", limit)
	}
	t := newTaker(workable, opts)
	t.limit, t.waitInput = limit, true
	return r.claim(ctx, partition, t, false)
}

// ClaimBytes is Claim by bytes instead of a number of batches, for operators whose memory has a
// fixed size. It waits until it can claim at least min bytes, or until the input is closed; then it
// claims what there is, up to max bytes. It claims fewer than min bytes at once if the next batch
// would exceed max. One batch that is larger than max is a claim by itself.
// The bytes of a batch are those of its Arrow data, also where it is compressed. While it waits for
// min bytes the batches stay in memory or on disk, so min must be less than what these can hold.
func (r *Repository) ClaimBytes(
	ctx context.Context, partition int, min, max int64, opts ...TakeOption,
) (*Claim, error) {
	if min < 0 || max < 1 || max < min {
		const text = ": cannot claim from %d to %d bytes: min must be from 0 to max, and max at least 1"
		return nil, r.errorf(text, min, max)
	}
	t := newTaker(workable, opts)
	t.limit, t.min, t.max, t.waitInput = math.MaxInt, min, max, true
	return r.claim(ctx, partition, t, false)
}

// ClaimAll claims all batches that the partition holds, in the order of arrival, for a
// task that needs the whole: the build side of a join, a sort. It claims at once what it can
// have, keeps that, and waits for the others, each once: for those in transit, and for
// those that another call is just taking. If ctx ends before it has all, it restores what
// it has. It does not wait for more to be put, unless WaitInput is given: without that, call
// it when the input is closed.
//
// An empty partition is io.EOF. While open claims hold some of its batches, ClaimAll
// cannot have all: it restores what it has and returns a *ClaimedError at once. While
// another ClaimAll is under way it waits for the end of that first.
func (r *Repository) ClaimAll(ctx context.Context, partition int, opts ...TakeOption) (*Claim, error) {
	t := newTaker(workable, opts)
	t.whole, t.noWait = true, false
	return r.claim(ctx, partition, t, false)
}

// Batches returns what is claimed, in order of arrival. Other users of a batch may have dropped it
// in place.
func (c *Claim) Batches() []*batch.Batch {
	batches := make([]*batch.Batch, len(c.entries))
	for i, e := range c.entries {
		batches[i] = e.b
	}
	return batches
}

// Restore ends the claim of a task that has not succeeded: the batches are where
// they were, before all that came after them, and can be taken. After the claim has
// ended it changes nothing and returns tier.ErrReleased.
func (c *Claim) Restore() error {
	if err := c.end(); err != nil {
		return err
	}
	c.restore()
	return nil
}

// Consume ends the claim of a task that has succeeded: the batches are dropped; the data
// of those with open handles goes with the last of them. If one is just being moved, that is waited
// for; once the engine is closed, it is left to the owner of the Transit. After the claim has ended
// it changes nothing and returns tier.ErrReleased.
func (c *Claim) Consume() error {
	if err := c.end(); err != nil {
		return err
	}
	c.r.mu.Lock()
	c.brief = true // others now wait for its end
	var own []*entry
	for _, e := range c.entries {
		if e.claim == c {
			own = append(own, e)
		}
	}
	c.part.serveLocked()
	c.r.mu.Unlock()
	var failed []error
	for _, e := range own {
		_, _, err := c.discard(context.Background(), e)
		failed = append(failed, err)
	}
	return errors.Join(failed...)
}

// end notes that the claim was ended.
func (c *Claim) end() error {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	if c.ended {
		return c.r.errorf(": the claim was ended: %w", tier.ErrReleased)
	}
	c.ended = true
	return nil
}
