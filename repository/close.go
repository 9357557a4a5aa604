package repository

import (
	"context"
	"errors"
	"fmt"
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
	for _, p := range r.mu.parts {
		p.matchLocked()
	}
}

func (r *Repository) closeInputLocked() {
	if r.mu.inputClosed {
		return
	}
	r.mu.inputClosed = true
	close(r.ended)
	if r.mu.schema == nil {
		close(r.mu.learned) // it never will be
	}
}

// Close wakes all waiters with tier.ErrClosed and drops the batches that are left. It waits, until
// ctx ends, for batches that are in transit or that a call is taking; if that fails it may be
// called again. A second Close after one that succeeded returns tier.ErrClosed.
func (r *Repository) Close(ctx context.Context) error {
	if !r.shut() {
		return r.closedError()
	}
	_, err := r.close(ctx)
	return err
}

// close clears a repository that is shut. It does nothing if that was done before.
func (r *Repository) close(ctx context.Context) (Leftover, error) {
	left, err := r.clear(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.emptied = len(r.mu.entries) == 0
	return left, err
}

// shut wakes all waiters and refuses all calls from now on; false if nothing is left to be done.
func (r *Repository) shut() bool {
	r.mu.Lock()
	if r.mu.emptied {
		r.mu.Unlock()
		return false
	}
	if !r.mu.closed {
		r.mu.closed = true
		r.closeInputLocked()
		for _, p := range r.mu.parts {
			for w := range queues {
				p.endWaitsLocked(w, r.closedError())
			}
		}
	}
	r.mu.Unlock()
	r.end(r.closedError())
	return true
}

// clear drops all batches that the repository holds now, and returns how many it has dropped.
func (r *Repository) clear(ctx context.Context) (left Leftover, err error) {
	r.mu.Lock()
	var entries []*entry
	for _, n := range slices.Sorted(maps.Keys(r.mu.parts)) {
		entries = append(entries, r.mu.parts[n].allLocked()...)
	}
	r.mu.Unlock()
	left.Key = r.key
	var failed []error
	for _, e := range entries {
		dropped, bytes, err := r.drop(ctx, e, awaitClaimed)
		if err != nil {
			failed = append(failed, err)
		}
		switch {
		case dropped:
			left.Batches++
			left.Bytes += bytes
		case err != nil: // ctx has ended
			return left, errors.Join(failed...)
		}
	}
	return left, errors.Join(failed...)
}

// What drop does about a batch that a taker is about to take.
const (
	awaitClaimed = false // see whether that succeeds
	leaveClaimed = true  // count it as taken
)

// drop drops one batch, if the repository holds it still, as soon as no call is moving it. If dropped
// is false, the only error is that ctx has ended.
func (r *Repository) drop(ctx context.Context, e *entry, leave bool) (dropped bool, bytes int64, _ error) {
	for {
		r.mu.Lock()
		var changed, ended <-chan struct{}
		switch {
		case e.class == gone || leave && e.class == claimed:
			r.mu.Unlock()
			return false, 0, nil
		case e.claim != nil && r.mu.closed: // its holder may keep it for ever, and will find out
			e.holdLocked(nil)
		case e.class == inTransit && r.m.ended.Err() == nil:
			changed, ended = e.awaitLocked(), r.m.ended.Done()
		case e.class == claimed:
			changed = e.awaitLocked()
		default:
			e.part.moveLocked(e, claimed)
		}
		bytes = e.bytes
		r.mu.Unlock()
		if changed != nil {
			select {
			case <-changed:
			case <-ended:
			case <-ctx.Done():
				return false, 0, fmt.Errorf("repository %s, batch %d is %s: %w",
					r.key, e.b.ID(), e.b.Info().State, context.Cause(ctx))
			}
			continue
		}
		err := e.b.Drop()
		se, ok := err.(*batch.StateError) // a StateError that is wrapped is the payload's
		switch {
		case !ok:
			r.remove(e)
			return true, bytes, err
		case se.State == batch.Released || r.m.ended.Err() != nil: // it is gone, or its transit's
			r.remove(e)
			return false, 0, nil
		}
		r.putBack(e) // it is in transit since it was claimed
	}
}

// takeBack drops a batch that was put by a call which failed, unless a consumer has it.
func (r *Repository) takeBack(ctx context.Context, b *batch.Batch) error {
	r.mu.Lock()
	e := r.mu.entries[b.ID()]
	r.mu.Unlock()
	if e == nil || e.b != b {
		return nil
	}
	_, _, err := r.drop(context.WithoutCancel(ctx), e, leaveClaimed)
	return err
}
