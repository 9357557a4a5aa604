package repository

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/compact"
	"github.com/spillway-db/spillway/internal/labels"
)

// CloseInput ends the input: a take from an empty partition is then io.EOF instead of a wait, and a
// Put is an error. A second call does nothing.
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
	r.mu.emptied = r.mu.records.Len() == 0
	return left, err
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
		r.mu.ids = compact.Order{} // who asks by id gets an error
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

// From manyEntries on, a few goroutines drop what a repository holds: a million take one of them
// about a second.
const manyEntries = 10_000

// atOnce is how many entries are claimed, and removed, under the lock in one go.
const atOnce = 256

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
		workers.Go(func() {
			labels.Drop.Set()
			lefts[i], failed[i] = r.dropEach(ctx, all[i*len(all)/n:(i+1)*len(all)/n])
		})
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
func (r *Repository) dropEach(ctx context.Context, entries []entry) (left Leftover, err error) {
	left.Key = r.key
	var failed []error
	count := func(dropped bool, bytes int64, err error) {
		if dropped {
			left.Batches++
			left.Bytes += bytes
		}
		if err != nil {
			failed = append(failed, err)
		}
	}
	for len(entries) > 0 {
		done, others := r.dropAtOnce(entries[:min(atOnce, len(entries))], count)
		entries = entries[done:]
		if len(entries) > 0 && done < atOnce {
			others = append(others, entries[0])
			entries = entries[1:]
		}
		for _, e := range others {
			dropped, bytes, err := r.drop(ctx, e, awaitClaimed)
			count(dropped, bytes, err)
			if ctx.Err() != nil && !dropped {
				return left, errors.Join(failed...)
			}
		}
	}
	return left, errors.Join(failed...)
}

// dropAtOnce drops entries up to the first that must be waited for, and returns how many those are.
// others, which are among them, were not dropped: they are in transit since they were claimed.
func (r *Repository) dropAtOnce(entries []entry, count func(dropped bool, bytes int64, err error)) (done int, others []entry) {
	var s signals
	own := make([]entry, 0, len(entries))
	bytes := make([]int64, 0, len(entries))
	r.mu.Lock()
	for _, e := range entries {
		n, rec := r.recordLocked(e)
		if n != 0 && (rec.class == claimed || rec.class == inTransit) {
			break
		}
		if done++; n != 0 {
			r.mu.list[rec.part].moveLocked(n, rec, claimed)
			own, bytes = append(own, e), append(bytes, rec.bytes)
		}
	}
	r.mu.Unlock()
	gone := own[:0]
	for i, e := range own {
		dropped, again, err := r.dropClaimed(e)
		if again {
			others = append(others, e)
			continue
		}
		if !dropped {
			r.remove(e)
			continue
		}
		count(true, bytes[i], err)
		gone = append(gone, e)
	}
	r.mu.Lock()
	defer r.unlock(&s)
	var p *partition
	for _, e := range gone {
		n, rec := r.recordLocked(e) // it is claimed, so it is there
		if next := r.mu.list[rec.part]; next != p {
			p.matchIfLocked(r, &s)
			p = next
		}
		r.takeOutLocked(n, &s)
	}
	p.matchIfLocked(r, &s)
	return done, others
}

// What drop does about a batch that a taker is about to take.
const (
	awaitClaimed = false // see whether that succeeds
	leaveClaimed = true  // count it as taken
)

// drop drops one batch, if the repository holds it still, as soon as it is not being moved.
func (r *Repository) drop(ctx context.Context, e entry, leave bool) (dropped bool, bytes int64, _ error) {
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
			r.remove(e)
			if !dropped {
				bytes = 0
			}
			return dropped, bytes, err
		}
	}
}

// dropClaimed drops a batch whose entry is claimed. again says that this must be tried again,
// because the batch is in transit since; then the entry is not claimed any more. Else the caller
// removes it.
func (r *Repository) dropClaimed(e entry) (dropped, again bool, _ error) {
	err := e.b.Inside().DropFrom(&r.store)
	se, ok := err.(*batch.StateError) // not wrapped; else it is the payload's
	switch {
	case !ok:
		return true, false, err
	case se.State == batch.Released || r.m.ended.Err() != nil:
		return false, false, nil
	}
	r.putBack(e)
	return false, true, nil
}

// takeBack drops a batch that was put by a call which failed, unless a consumer has it.
func (r *Repository) takeBack(ctx context.Context, b *batch.Batch) error {
	r.mu.Lock()
	n := r.numberLocked(b)
	if n == 0 {
		r.mu.Unlock()
		return nil
	}
	e := entry{b, r.mu.records.At(n).seq}
	r.mu.Unlock()
	_, _, err := r.drop(context.WithoutCancel(ctx), e, leaveClaimed)
	return err
}

// claimToDrop claims an entry for its end, and returns its bytes. Else they are -1, and it returns
// what to wait for, either of two; neither if it is gone.
func (r *Repository) claimToDrop(e entry, leave bool) (bytes int64, changed, ended <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n, rec := r.recordLocked(e)
	if rec == nil || leave && rec.class == claimed {
		return -1, nil, nil
	}
	p := r.mu.list[rec.part]
	switch {
	case rec.holder != unheld && r.mu.closed: // its holder may keep it for ever, and will find out
		p.holdLocked(rec, unheld)
		return rec.bytes, nil, nil
	case rec.class == inTransit && r.m.ended.Err() == nil:
		return -1, r.awaitLocked(e.b), r.m.ended.Done()
	case rec.class == claimed:
		return -1, r.awaitLocked(e.b), nil
	}
	p.moveLocked(n, rec, claimed)
	return rec.bytes, nil, nil
}
