package repository

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/spillway-db/spillway/batch"
)

// CloseInput ends the input: a take from an empty partition is then io.EOF instead of a wait, and a
// Put is an error. A second call does nothing.
func (r *Repository) CloseInput() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closeInputLocked()
}

func (r *Repository) closeInputLocked() {
	r.mu.inputClosed = true
	for _, p := range r.mu.parts {
		p.serveLocked()
	}
}

// Close wakes all waiters with tier.ErrClosed and drops the batches that are left. It waits, until
// ctx ends, for batches that are in transit or that a call is taking; if that fails it may be
// called again. A second Close after one that succeeded returns tier.ErrClosed.
func (r *Repository) Close(ctx context.Context) error {
	if !r.shut() {
		return r.closedError()
	}
	_, err := r.clear(ctx)
	return err
}

// shut wakes all waiters and refuses all calls from now on; false if nothing is left to be done.
func (r *Repository) shut() bool {
	r.mu.Lock()
	emptied := r.mu.closed && len(r.mu.entries) == 0
	r.mu.closed = true
	r.closeInputLocked()
	r.mu.Unlock()
	r.end(r.closedError())
	return !emptied
}

// clear drops all batches that the repository holds now, and returns how many it has dropped.
func (r *Repository) clear(ctx context.Context) (Leftover, error) {
	left := Leftover{Key: r.key}
	var failed []error
	r.mu.Lock()
	all := slices.SortedFunc(maps.Values(r.mu.entries), older)
	r.mu.Unlock()
	for _, e := range all {
		dropped, bytes, err := r.drop(ctx, e, true)
		if !dropped && err != nil { // ctx has ended
			err = r.errorf(", batch %d is %s: %w", e.b.ID(), e.b.Info().State, err)
			return left, errors.Join(append(failed, err)...)
		}
		failed = append(failed, err)
		if dropped {
			left.Batches++
			left.Bytes += bytes
		}
	}
	return left, errors.Join(failed...)
}

// drop drops one batch, if the repository holds it still, as soon as no call is taking or moving
// it. Without waits it leaves a batch that is claimed to the claimer.
func (r *Repository) drop(ctx context.Context, e *entry, waits bool) (dropped bool, bytes int64, _ error) {
	c, err := r.claim(ctx, e.part.number, &taker{only: e, noWait: !waits}, true)
	if c == nil || len(c.entries) == 0 {
		return false, 0, err
	}
	return c.discard(ctx, e)
}

// discard drops the batch of an entry of the claim, which leaves, and returns how many bytes it was
// charged. It waits for the end of a move of the batch. If ctx ends first, the claim is restored.
// Once the engine is closed, a batch in transit is left to the owner of the Transit.
func (c *Claim) discard(ctx context.Context, e *entry) (dropped bool, bytes int64, _ error) {
	r := c.r
	if now := e.b.Snapshot(); now.State != batch.Released {
		bytes = now.Bytes
	}
	inner, done := within(ctx, r.m.ended)
	defer done()
	err := e.b.Discard(inner)
	// A StateError that is wrapped is the payload's.
	_, gone := err.(*batch.StateError)
	switch {
	case gone || r.m.ended.Err() != nil && errors.Is(err, context.Cause(r.m.ended)):
		r.remove(e)
		e.b.Detach(e)
		return false, 0, nil
	case inner.Err() != nil && errors.Is(err, context.Cause(inner)):
		c.restore()
		return false, 0, err
	}
	r.remove(e)
	return true, bytes, err
}
