package repository

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"

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

// From manyEntries on, a few goroutines drop what a repository holds: a million take one of them 1
// to
// 2 s.
const manyEntries = 10_000

// clear drops all that the repository holds now, and returns how much that was.
func (r *Repository) clear(ctx context.Context) (left Leftover, err error) {
	all := r.all()
	if len(all) < manyEntries {
		return r.dropEach(ctx, all)
	}
	n := min(runtime.GOMAXPROCS(0), 4)
	lefts, failed := make([]Leftover, n), make([]error, n)
	var workers sync.WaitGroup
	for i := range n {
		workers.Go(func() { lefts[i], failed[i] = r.dropEach(ctx, all[i*len(all)/n:(i+1)*len(all)/n]) })
	}
	workers.Wait()
	left.Key = r.key
	for _, l := range lefts {
		left.Batches += l.Batches
		left.Bytes += l.Bytes
	}
	return left, errors.Join(failed...)
}

// dropEach drops those of the entries that the repository holds still.
func (r *Repository) dropEach(ctx context.Context, entries []*entry) (left Leftover, err error) {
	left.Key = r.key
	var failed []error
	for _, e := range entries {
		dropped, bytes, err := r.drop(ctx, e, awaitClaimed)
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
func (r *Repository) drop(ctx context.Context, e *entry, leave bool) (dropped bool, bytes int64, _ error) {
	b := e.b
	for {
		bytes, changed, ended := r.claimToDrop(e, leave)
		switch {
		case bytes >= 0:
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
		if dropped, again, err := r.dropClaimed(e); !again {
			if !dropped {
				bytes = 0
			}
			return dropped, bytes, err
		}
	}
}

// dropClaimed drops a batch whose entry is claimed, and says if that must be tried again: the batch
// is in transit since.
func (r *Repository) dropClaimed(e *entry) (dropped, again bool, _ error) {
	e.b.Inside().Unstore(&r.store) // which need not hear of what it does itself
	err := e.b.Drop()
	se, ok := err.(*batch.StateError) // not wrapped; else it is the payload's
	switch {
	case !ok:
		r.remove(e)
		return true, false, err
	case se.State == batch.Released || r.m.ended.Err() != nil || !r.storeAgain(e):
		r.remove(e)
		return false, false, nil
	}
	r.putBack(e)
	return false, true, nil
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

// storeAgain makes the repository the holder of a batch that it has not let go of. It reports
// whether it could: the batch may be in another by now, or dropped.
func (r *Repository) storeAgain(e *entry) bool {
	r.mu.Lock()
	_, tell, err := e.b.Inside().Store(&r.store, r.placeLocked(e.seq, e.part.number))
	r.mu.Unlock()
	if err == nil {
		tell()
	}
	return err == nil
}

// claimToDrop claims an entry for its end, and returns its bytes. Else they are -1, and it returns
// what to wait for, either of two; neither if it is gone.
func (r *Repository) claimToDrop(e *entry, leave bool) (bytes int64, changed, ended <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case e.gone || leave && e.class == claimed:
		return -1, nil, nil
	case e.holder != nil && r.mu.closed: // its holder may keep it for ever, and will find out
		e.holdLocked(nil)
		return e.bytes, nil, nil
	case e.class == inTransit && r.m.ended.Err() == nil:
		return -1, e.waitLocked(), r.m.ended.Done()
	case e.class == claimed:
		return -1, e.waitLocked(), nil
	}
	e.part.moveLocked(e, claimed)
	return e.bytes, nil, nil
}

// waitLocked returns what is closed when the entry changes.
func (e *entry) waitLocked() <-chan struct{} {
	if e.changed == nil {
		e.changed = make(chan struct{})
	}
	return e.changed
}
