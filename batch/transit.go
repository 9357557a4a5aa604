package batch

import (
	"context"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// A Transit is the right to replace a batch's payload, in this or another space. No other code
// reads, moves or drops the batch until the Transit ends by Commit or Abort, of which exactly one
// takes effect. It is safe for concurrent use.
//
// Before the commit, Inside().Keep and Arrives set what the commit also does.
type Transit struct {
	trace   trace
	b       *Batch
	payload Payload         // the batch's, until the commit
	desc    *Descriptor     // the batch's
	keeps   bool            // Keep: the commit keeps the old payload as a clean image
	copied  func(used bool) // called when that clean image is used or dropped; may be nil
	kept    bool            // the commit did keep it
	why     string          // Arrives: the reason of the move, for statistics; "" for none
	unread  bool            // Arrives: the batch moves to a slower tier
	ended   atomic.Bool
}

// Transit takes the batch in transit. It waits only while another caller has it in transit, until
// ctx ends; open handles are a StateError at once. The caller must Commit or Abort; a deferred
// Abort after a Commit does nothing.
func (b *Batch) Transit(ctx context.Context) (t *Transit, err error) {
	err = b.await(ctx, func() (err error) {
		t, err = b.TryTransit()
		return err
	})
	return t, err
}

// TryTransit is Transit, but fails while another has the batch in transit.
func (b *Batch) TryTransit() (*Transit, error) {
	const op = "transit"
	b.mu.Lock()
	err := b.barLocked(op)
	if b.mu.state == Processing {
		err = b.errorLocked(op, InvalidState)
	}
	if err != nil {
		b.mu.Unlock()
		return nil, err
	}
	b.mu.state = InTransit
	t := &Transit{b: b, payload: b.mu.payload, desc: b.mu.desc}
	c := b.changeLocked()
	b.mu.Unlock()
	track(t, &t.trace, "transit", b.id)
	b.announce(c)
	return t, nil
}

// Payload returns the batch's present payload, which stays the batch's and is valid until the
// transit ends; nil afterwards.
func (t *Transit) Payload() Payload {
	if t.ended.Load() {
		return nil
	}
	return t.payload
}

// Commit makes p the batch's payload and ends the transit. With createTask it also creates a task
// in the same step, so that nobody can move the batch away in between. Then it releases the old
// payload, or keeps it as a clean image, so all device work that reads the old payload must be
// done.
//
// After an error nothing has changed: the transit is still open, and p is the caller's. A p without
// data, or with another number of rows than the batch, is a StateError; a panic of p is an error; a
// transit that has ended is tier.ErrReleased. Committing the batch's present payload is allowed and
// releases nothing.
func (t *Transit) Commit(p Payload, createTask bool) error {
	return t.commit(p, func() change {
		b := t.b
		if createTask {
			b.mu.tasks.add()
		}
		b.mu.state = b.restLocked()
		return b.changeLocked()
	})
}

// CommitOpen is Commit, and opens a handle in the same step, as Open does. With last it also drops
// the batch. So the monitor never sees the batch at rest in between.
func (t *Transit) CommitOpen(ctx context.Context, p Payload, last bool) (h *Handle, err error) {
	return t.commitOpen(ctx, p, opening{last: last})
}

// CommitRead is CommitOpen of a transit of b, but leaves pending tasks to their callers.
func (b inside) CommitRead(ctx context.Context, t *Transit, p Payload) (h *Handle, err error) {
	return t.commitOpen(ctx, p, opening{keepPending: true})
}

func (t *Transit) commitOpen(ctx context.Context, p Payload, o opening) (h *Handle, err error) {
	now := t.b.now()
	var opened change
	err = t.commit(p, func() change {
		h, opened = t.b.openLocked(now, o)
		return opened
	})
	if err == nil {
		h.begin(reservation.OwnerOf(ctx), opened.now.Bytes)
	}
	return h, err
}

// commit makes p the batch's payload. It calls end with the lock held, which sets the batch's next
// state and returns the change.
func (t *Transit) commit(p Payload, end func() change) error {
	if t.ended.Load() {
		return tier.ErrReleased
	}
	traits, err := t.check(p)
	if err != nil {
		return err
	}
	if !t.ended.CompareAndSwap(false, true) {
		return tier.ErrReleased
	}
	t.trace.end()
	b := t.b
	var now int64
	if t.why != "" {
		now = b.now()
	}
	b.watch(p)
	// With another descriptor the bytes may differ, and clean images have the old ones.
	stale := traits.desc != nil && t.desc != nil && traits.desc != t.desc
	var kept *copyOf
	if t.keeps && p != t.payload && !stale {
		kept = keep(t.payload, t.copied)
		t.kept = kept != nil
	}
	b.mu.Lock()
	b.holdLocked(p, traits)
	if t.why != "" {
		b.mu.why, b.mu.since, b.mu.unread = t.why, now, b.mu.unread || t.unread
	}
	over := b.addCopyLocked(kept, stale)
	c := end()
	b.mu.Unlock()
	defer b.announce(c)
	if p != t.payload && kept == nil {
		t.releaseOld()
	}
	dropCopies(over)
	return nil
}

// releaseOld releases the old payload. The batch already has its new one, so an error here, which
// means that other code released the old payload, is not an error of Commit. releaseOld recovers a
// panic of a program's payload, because the caller must get the handle that is open.
func (t *Transit) releaseOld() {
	if !invariants.Enabled {
		lockrank.AssertNone("a payload is released")
		t.b.panics().Do("Payload.Release", func() { _ = t.payload.Release() })
	} else if err := release(t.payload); err != nil {
		panic("batch: the old payload was released by other code: " + err.Error())
	}
}

// check returns the traits of a new payload, or an error if the batch cannot have it. It changes
// nothing.
func (t *Transit) check(p Payload) (traits payloadTraits, err error) {
	if p != nil {
		if traits, err = inspect(p); err != nil {
			return payloadTraits{}, err
		}
	}
	if traits.space == nil || traits.desc != nil && t.desc != nil && traits.desc.Rows != t.desc.Rows {
		return payloadTraits{}, &StateError{Batch: t.b.id, State: InTransit, Op: "commit", Status: MissingData}
	}
	return traits, nil
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
	c := b.changeLocked()
	b.mu.Unlock()
	b.announce(c)
	return nil
}
