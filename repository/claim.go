package repository

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

// Claim is a set of batches of one partition that are set apart for a task. They stay
// in the repository, in their places, and nobody else can take them, until the claim is
// ended by either of two: Consume, when the task has succeeded, or Restore, when it has
// not. It must be ended once; it is safe for concurrent use.
//
// While the claim is open the batches are like any others for the monitor: whoever
// works on them locks them. Closing the repository takes them back: they are dropped,
// and the claim ends with nothing to do.
type Claim struct {
	r       *Repository
	part    *partition
	entries []*entry // in order of arrival
	ended   bool     // guarded by the repository's lock
}

// Claim waits for a batch of the partition that is not in transit, as Take does, and
// claims the oldest such and those after it that can be had now, most in all. If the
// input is closed and the partition is empty, it returns io.EOF; batches that others have
// claimed count as being there, for they may be restored.
func (r *Repository) Claim(ctx context.Context, partition, most int) (*Claim, error) {
	return r.claimMost(ctx, partition, most, true)
}

// TryClaim is Claim without the waiting: if there is nothing now that could be
// claimed, it returns nil and no error.
func (r *Repository) TryClaim(partition, most int) (*Claim, error) {
	return r.claimMost(context.Background(), partition, most, false)
}

func (r *Repository) claimMost(ctx context.Context, partition, most int, wait bool) (*Claim, error) {
	if most < 1 {
		return nil, fmt.Errorf("repository %s: claiming %d batches", r.key, most)
	}
	for {
		first, err := r.claim(ctx, partition, wantTask, wait)
		if first == nil {
			return nil, err
		}
		c, err := r.holdMost(first, most)
		if c != nil || err != nil {
			return c, err
		}
	}
}

// holdMost makes a Claim of an entry that is claimed and of those that can be had
// beside it; nil if the former was dropped meanwhile.
func (r *Repository) holdMost(first *entry, most int) (*Claim, error) {
	var s signals
	r.mu.Lock()
	defer r.unlock(&s)
	if r.mu.closed || first.b.State() == batch.Released {
		r.noteLocked(first, false, &s)
		if r.mu.closed {
			return nil, r.closedError()
		}
		return nil, nil
	}
	c := &Claim{r: r, part: first.part}
	for e := first; e != nil; e = c.part.oldestLocked(eligible[wantTask]...) {
		if e != first {
			c.part.moveLocked(e, claimed)
		}
		e.holder = c
		if c.entries = append(c.entries, e); len(c.entries) == most {
			break
		}
	}
	// The first may have waited for its taker, while older ones came back.
	slices.SortFunc(c.entries, func(a, b *entry) int {
		if a.seq < b.seq {
			return -1
		}
		return 1
	})
	return c, nil
}

// Batches returns what is claimed, in order of arrival. Others who worked on a batch in
// place may have dropped it.
func (c *Claim) Batches() []*batch.Batch {
	batches := make([]*batch.Batch, len(c.entries))
	for i, e := range c.entries {
		batches[i] = e.b
	}
	return batches
}

// Len returns how many batches are claimed.
func (c *Claim) Len() int { return len(c.entries) }

// Restore ends the claim of a task that has not succeeded: the batches stand where
// they stood, before all that came after them, and can be taken. After the claim has
// ended it changes nothing and returns tier.ErrReleased.
func (c *Claim) Restore() error {
	var s signals
	r := c.r
	r.mu.Lock()
	defer r.unlock(&s)
	if err := c.endLocked(); err != nil {
		return err
	}
	for _, e := range c.entries {
		if e.holder == c {
			e.holder = nil
			r.readLocked(e, false, &s)
		}
	}
	// Only now, so that who waits is given the oldest.
	c.part.matchLocked(r.mu.inputClosed, &s)
	return nil
}

// Consume ends the claim of a task that has succeeded: the batches are dropped; the data
// of those with open handles goes with the last of them. If the monitor is just moving
// one, that is waited for. After the claim has ended it changes nothing and returns
// tier.ErrReleased.
func (c *Claim) Consume() error {
	r := c.r
	r.mu.Lock()
	if err := c.endLocked(); err != nil {
		r.mu.Unlock()
		return err
	}
	var own []*entry
	for _, e := range c.entries {
		if e.holder == c {
			e.holder = nil
			own = append(own, e) // and it is claimed still, for what follows
		}
	}
	r.mu.Unlock()
	var failed []error
	for _, e := range own {
		var se *batch.StateError
		if err := discard(e.b); err != nil && !errors.As(err, &se) { // else somebody has dropped it in place
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
