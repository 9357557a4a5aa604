package repository

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

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
	entries []*entry // in order of arrival
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
		return nil, fmt.Errorf("repository %s: the number of batches to claim must be at least 1, got %d",
			r.key, limit)
	}
	o := takeOptionsOf(opts)
	w := o.want(wantClaim)
	if o.waitClaims {
		w = o.want(wantTask)
	}
	for {
		first, err := r.claim(ctx, partition, w, !o.noWait)
		if first == nil {
			return nil, err
		}
		c, err := r.holdUpTo(first, w, limit)
		if c != nil || err != nil {
			return c, err
		}
	}
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
	if takeOptionsOf(opts).waitInput {
		select {
		case <-r.ended:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	r.mu.Lock()
	p, err := r.partitionLocked(partition)
	r.mu.Unlock()
	if err != nil {
		return nil, err
	}
	select {
	case p.gathering <- struct{}{}: // at once, also if ctx has ended
	default:
		select {
		case p.gathering <- struct{}{}:
		case <-r.life.Done():
			return nil, r.closedError()
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	defer func() { <-p.gathering }()
	r.mu.Lock()
	defer r.mu.Unlock()
	c := &Claim{r: r, part: p}
	for last := p.last; err == nil; {
		awaited, others := c.gatherLocked(last)
		switch {
		case r.mu.closed:
			err = r.closedError()
		case others:
			c.giveBackLocked()
			err = p.claimedErrorLocked()
		case awaited != nil:
			changed := awaited.awaitLocked()
			r.mu.Unlock()
			select {
			case <-changed:
			case <-r.life.Done():
				err = r.closedError()
			case <-ctx.Done():
				err = context.Cause(ctx)
			}
			r.mu.Lock()
		case len(c.entries) > 0:
			slices.SortFunc(c.entries, older)
			return c, nil
		case p.n == 0:
			err = io.EOF
		default: // others have taken or dropped all that was there: begin again
			last = p.last
		}
	}
	c.giveBackLocked()
	p.matchLocked()
	return nil, err
}

// gatherLocked claims the entries up to the one with seq last that can be had now. It returns one
// that it must wait for, which is in transit or in the hands of a call, and whether other claims
// hold some. Without either, the claim is complete, and has no batch that was dropped in place.
func (c *Claim) gatherLocked(last uint64) (awaited *entry, others bool) {
	p := c.part
	for _, from := range eligible[wantTask] {
		for q, ok := p.sets[from].Min(); ok && q.seq <= last; q, ok = p.sets[from].Min() {
			p.moveLocked(q.e, claimed)
			c.addLocked(q.e)
		}
	}
	for _, from := range []class{inTransit, claimed} {
		p.sets[from].Ascend(func(q queued) bool {
			switch {
			case q.seq > last:
				return false
			case q.e.claim == nil:
				awaited = q.e
			case q.e.claim != c:
				others = true
			}
			return !others
		})
	}
	if awaited == nil && !others {
		c.entries = slices.DeleteFunc(c.entries, func(e *entry) bool {
			dropped := e.b.Inside().Cut().State == batch.Released
			if dropped {
				e.holdLocked(nil)
				c.r.unclaimLocked(e)
			}
			return dropped
		})
	}
	p.matchLocked() // the waits of other claims may end with an error now
	return awaited, others
}

// claimedErrorLocked returns the error for a partition of which open claims hold batches.
func (p *partition) claimedErrorLocked() error {
	return &ClaimedError{Key: p.r.key, Partition: p.number, Claimed: p.held, Batches: p.n}
}

// addLocked adds an entry that is claimed.
func (c *Claim) addLocked(e *entry) {
	e.holdLocked(c)
	c.entries = append(c.entries, e)
}

// holdUpTo makes a Claim of an entry that is claimed and of those that can be had now with it; nil
// if the former was dropped meanwhile.
func (r *Repository) holdUpTo(first *entry, w want, limit int) (*Claim, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := first.part
	if r.mu.closed || first.b.Inside().Cut().State == batch.Released {
		r.unclaimLocked(first)
		p.matchLocked()
		if r.mu.closed {
			return nil, r.closedError()
		}
		return nil, nil
	}
	c := &Claim{r: r, part: p}
	c.addLocked(first)
	for len(c.entries) < limit {
		e := p.firstLocked(w)
		if e == nil {
			break
		}
		p.moveLocked(e, claimed)
		c.addLocked(e)
	}
	p.matchLocked() // the waits of other claims may end with an error now
	// The first may have waited for its taker, while older ones came back.
	slices.SortFunc(c.entries, older)
	return c, nil
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
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	if err := c.endLocked(); err != nil {
		return err
	}
	c.giveBackLocked()
	c.part.matchLocked() // only here, so that a waiter gets the oldest
	return nil
}

// letGoLocked ends the hold on an entry that is claimed still, and reports whether there was one:
// the end of the repository takes it away.
func (e *entry) letGoLocked() bool {
	held := e.claim != nil
	e.holdLocked(nil)
	return held
}

// giveBackLocked puts the entries back that the claim still holds. The caller calls matchLocked.
func (c *Claim) giveBackLocked() {
	for _, e := range c.entries {
		if e.letGoLocked() {
			c.r.unclaimLocked(e)
		}
	}
}

// Consume ends the claim of a task that has succeeded: the batches are dropped; the data
// of those with open handles goes with the last of them. If one is just being moved, that is waited
// for; once the engine is closed, it is left to the owner of the Transit. After the claim has ended
// it changes nothing and returns tier.ErrReleased.
func (c *Claim) Consume() error {
	r := c.r
	r.mu.Lock()
	if err := c.endLocked(); err != nil {
		r.mu.Unlock()
		return err
	}
	var own []*entry
	for _, e := range c.entries {
		if e.letGoLocked() {
			own = append(own, e) // and it is claimed still, for what follows
		}
	}
	r.mu.Unlock()
	var failed []error
	for _, e := range own {
		err := r.m.discard(e.b)
		// A batch with one of these errors was dropped in place, or is its transit's.
		if _, ok := err.(*batch.StateError); !ok && err != context.Cause(r.m.ended) {
			failed = append(failed, err)
		}
		r.remove(e)
	}
	return errors.Join(failed...)
}

func (c *Claim) endLocked() error {
	if c.ended {
		return fmt.Errorf("repository %s: the claim was ended: %w", c.r.key, tier.ErrReleased)
	}
	c.ended = true
	return nil
}
