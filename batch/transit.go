package batch

import (
	"context"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/tier"
)

// A Transit is the right to give a batch another form. Nobody else reads, moves
// or drops the batch until it ends by Commit or Abort, of which exactly one takes
// effect. It is safe for concurrent use.
type Transit struct {
	trace   trace
	b       *Batch
	payload Payload
	ended   atomic.Bool
}

// Transit takes the batch in transit. It waits only while another has it in
// transit, until ctx ends; open handles are a StateError at once. The caller must
// Commit or Abort; a deferred Abort after a Commit does nothing.
func (b *Batch) Transit(ctx context.Context) (*Transit, error) {
	var t *Transit
	err := b.await(ctx, func(wait bool) (<-chan struct{}, error) { return b.transit(wait, &t) })
	return t, err
}

// TryTransit is Transit, but fails while another has the batch in transit.
func (b *Batch) TryTransit() (*Transit, error) {
	var t *Transit
	_, err := b.transit(false, &t)
	return t, err
}

func (b *Batch) transit(wait bool, out **Transit) (<-chan struct{}, error) {
	const op = "transit"
	b.mu.Lock()
	switch b.mu.state {
	case InTransit:
		defer b.mu.Unlock()
		if wait {
			return b.waitLocked(), nil
		}
		return nil, b.errorLocked(op, InvalidState)
	case Processing:
		defer b.mu.Unlock()
		return nil, b.errorLocked(op, InvalidState)
	case Released:
		defer b.mu.Unlock()
		return nil, b.errorLocked(op, MissingData)
	}
	b.mu.state = InTransit
	t := &Transit{b: b, payload: b.mu.payload}
	changed, store := b.changeLocked()
	b.mu.Unlock()
	track(t, &t.trace, "transit", b.id)
	*out = t
	b.announce(changed, store)
	return nil, nil
}

// Batch returns the batch.
func (t *Transit) Batch() *Batch { return t.b }

// Payload returns the form that the batch has, which stays the batch's and is
// valid until the transit ends; nil afterwards.
func (t *Transit) Payload() Payload {
	if t.ended.Load() {
		return nil
	}
	return t.payload
}

// Commit makes p the batch's form and ends the transit; createTask also creates a
// task, in the same step, so that nobody can move the batch away in between. The
// old form is then released, so all device work that reads it must be done.
//
// On an error nothing has changed: the transit is open still and p is the
// caller's. A p without data, or with another number of rows than the batch, is
// a StateError; a transit that has ended is tier.ErrReleased. Committing the form
// that the batch already has is allowed and releases nothing.
func (t *Transit) Commit(p Payload, createTask bool) error {
	if t.ended.Load() {
		return tier.ErrReleased
	}
	desc, space, err := t.check(p)
	if err != nil {
		return err
	}
	if !t.ended.CompareAndSwap(false, true) {
		return tier.ErrReleased
	}
	t.trace.end()
	b := t.b
	b.watch(p)
	b.mu.Lock()
	b.mu.payload, b.mu.space = p, space
	if desc != nil {
		b.mu.desc = desc
	}
	if createTask {
		b.mu.pending++
	}
	b.mu.state = b.restLocked()
	changed, store := b.changeLocked()
	b.mu.Unlock()
	defer b.announce(changed, store)
	if p != t.payload {
		// The batch has its data whatever this says, so that it is not Commit's
		// error: somebody released what was not theirs.
		if err := release(t.payload); err != nil && invariants.Enabled {
			panic("batch: the old payload was released by somebody else: " + err.Error())
		}
	}
	return nil
}

// check looks at what is offered, before anything changes.
func (t *Transit) check(p Payload) (*Descriptor, tier.ID, error) {
	missing := &StateError{Batch: t.b.id, State: InTransit, Op: "commit", Status: MissingData}
	if p == nil || p.Space() == nil {
		return nil, tier.ID{}, missing
	}
	desc, old := descriptorOf(p), t.b.Descriptor()
	if desc != nil && old != nil && desc.Rows != old.Rows {
		return nil, tier.ID{}, missing
	}
	return desc, p.Space().ID(), nil
}

// Abort ends the transit and leaves the batch as it was. It returns
// tier.ErrReleased if the transit has ended.
func (t *Transit) Abort() error {
	if !t.ended.CompareAndSwap(false, true) {
		return tier.ErrReleased
	}
	t.trace.end()
	b := t.b
	b.mu.Lock()
	b.mu.state = b.restLocked()
	changed, store := b.changeLocked()
	b.mu.Unlock()
	b.announce(changed, store)
	return nil
}
