package repository

import (
	"context"
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/batch"
)

// CloseInput says that nothing more will be put: a take from an empty partition
// is then io.EOF instead of a wait, and a Put an error. Closing twice does nothing.
func (r *Repository) CloseInput() {
	var s signals
	r.mu.Lock()
	defer r.unlock(&s)
	if r.mu.inputClosed {
		return
	}
	r.mu.inputClosed = true
	s.add(r.ended)
	if r.mu.schema == nil {
		s.add(r.mu.learned) // it never will be
	}
	for _, p := range r.mu.parts {
		p.matchLocked(r, &s)
	}
}

// Close wakes all waiters with tier.ErrClosed and drops what is left. It waits, until ctx ends, for
// batches that are in transit or that are just being taken; if that fails it may be called again. A
// second Close after one that succeeded returns tier.ErrClosed.
func (r *Repository) Close(ctx context.Context) error {
	if !r.shut() {
		return r.closedError()
	}
	_, err := r.clear(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.emptied = len(r.mu.entries) == 0
	return err
}

// shut wakes all waiters and refuses everything from now on; false if nothing is left to be done.
func (r *Repository) shut() bool {
	var s signals
	r.mu.Lock()
	if r.mu.emptied {
		r.mu.Unlock()
		return false
	}
	if !r.mu.closed {
		r.mu.closed = true
		if r.mu.schema == nil && !r.mu.inputClosed {
			s.add(r.mu.learned)
		}
		if !r.mu.inputClosed {
			s.add(r.ended)
		}
		r.mu.inputClosed = true
		for _, p := range r.mu.parts {
			for w := range queues {
				p.endWaitsLocked(w, r.closedError(), &s)
			}
		}
	}
	r.unlock(&s)
	r.end(r.closedError())
	return true
}

// clear drops all that the repository holds now, and returns how much that was.
func (r *Repository) clear(ctx context.Context) (left Leftover, err error) {
	left.Key = r.key
	var failed []error
	for _, b := range r.all() {
		dropped, bytes, err := r.drop(ctx, b, awaitClaimed)
		if dropped {
			left.Batches++
			left.Bytes += bytes
		}
		if err != nil {
			failed = append(failed, err)
		}
		if ctx.Err() != nil && !dropped {
			break
		}
	}
	return left, errors.Join(failed...)
}

// What drop does about a batch that a taker is about to take.
const (
	awaitClaimed = false // see whether that succeeds
	leaveClaimed = true  // count it as taken
)

// drop drops one batch, if the repository holds it still, as soon as it is not being moved.
func (r *Repository) drop(ctx context.Context, b *batch.Batch, leave bool) (dropped bool, bytes int64, _ error) {
	for {
		e, changed, ended := r.claimToDrop(b, leave)
		switch {
		case e != nil:
		case changed == nil:
			return false, 0, nil // gone
		default:
			select {
			case <-changed:
			case <-ended:
			case <-ctx.Done():
				return false, 0, fmt.Errorf("repository %s, batch %d is %s: %w", r.key, b.ID(), b.Info().State, context.Cause(ctx))
			}
			continue
		}
		bytes = b.Info().Bytes
		err := b.Drop()
		se, ok := err.(*batch.StateError) // not wrapped; else it is the payload's
		switch {
		case !ok:
			r.remove(e)
			return true, bytes, err
		case se.State == batch.Released || r.m.ended.Err() != nil:
			r.remove(e)
			return false, 0, nil
		}
		r.putBack(e) // in transit since
	}
}

// claimToDrop claims b for its end, or returns what to wait for, either of two; neither if it is
// gone.
func (r *Repository) claimToDrop(b *batch.Batch, leave bool) (_ *entry, changed, ended <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.mu.entries[b.ID()]
	switch {
	case e == nil || e.b != b || leave && e.class == claimed:
		return nil, nil, nil
	case e.holder != nil && r.mu.closed: // its holder may keep it for ever, and will find out
		e.holdLocked(nil)
		return e, nil, nil
	case e.class == inTransit && r.m.ended.Err() == nil:
		return nil, e.waitLocked(), r.m.ended.Done()
	case e.class == claimed:
		return nil, e.waitLocked(), nil
	}
	e.part.moveLocked(e, claimed)
	return e, nil, nil
}

// waitLocked returns what is closed when the entry changes.
func (e *entry) waitLocked() <-chan struct{} {
	if e.changed == nil {
		e.changed = make(chan struct{})
	}
	return e.changed
}
