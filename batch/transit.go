package batch

import (
	"context"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// A Transit is the right to give a batch another form. No other code reads, moves or drops the
// batch until it ends by Commit or Abort, of which exactly one takes effect. It is safe for
// concurrent use.
type Transit struct {
	trace   trace
	b       *Batch
	payload Payload
	desc    *Descriptor // of the batch
	keeps   bool        // a commit keeps the payload as a copy
	copied  func(used bool)
	kept    bool   // it did
	why     string // that a commit notes; "": nothing is
	unread  bool   // and that the batch has moved to a slower tier
	ended   atomic.Bool
}

// Transit takes the batch in transit. It waits only while another has it in
// transit, until ctx ends; open handles are a StateError at once. The caller must
// Commit or Abort; a deferred Abort after a Commit does nothing.
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

// Payload returns the form that the batch has, which stays the batch's and is
// valid until the transit ends; nil afterwards.
func (t *Transit) Payload() Payload {
	if t.ended.Load() {
		return nil
	}
	return t.payload
}

// Commit makes p the batch's form and ends the transit; createTask also creates a task, in the same
// step, so that the batch cannot be moved away in between. The old form is then released, so all
// device work that reads it must be done.
//
// On an error nothing has changed: the transit is open still and p is the
// caller's. A p without data, or with another number of rows than the batch, is a StateError; a
// panic of p's is an error; a transit that has ended is tier.ErrReleased. Committing the form that
// the batch already has is allowed and releases nothing.
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

// CommitOpen is Commit, and opens a handle in the same step, as Open does. So the batch is never
// seen at rest in between.
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

// commit makes p the batch's form. end, which is called with the lock held, ends the transit.
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
	// The bytes of another descriptor may be others: copies are of those that the batch had.
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

// releaseOld releases the form that the batch had. The batch has its data whatever this returns, so
// an error is not Commit's: other code released what was not its own. A panic of a program's
// payload ends here, because the caller must get the handle that is open.
func (t *Transit) releaseOld() {
	if !invariants.Enabled {
		lockrank.AssertNone("a payload is released")
		t.b.panics().Do("Payload.Release", func() { _ = t.payload.Release() })
	} else if err := release(t.payload); err != nil {
		panic("batch: the old payload was released by other code: " + err.Error())
	}
}

// check looks at what is offered, before anything changes.
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
