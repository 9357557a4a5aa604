package batch

import (
	"context"
	"math"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// A Handle pins a batch's data in its space and lets its holder read it there. Many handles may be
// open at once; the data stays until the last is closed. It must be closed once. It is safe for
// concurrent use. While it is open the space lists it (tier.Leak, Engine.Holders), with the owner
// that its context named (reservation.Owner.Context).
type Handle struct {
	trace   trace   // finds handles that were never closed, in an invariants build
	holding holding // the entry in the space's list
	b       *Batch
	payload Payload
	space   *tier.Space // the payload's
	closed  atomic.Bool
}

// Lock opens a handle for a pending task, of which there is then one less. The data must be in
// space. Lock waits only while the batch is in transit, until ctx ends: any other obstacle is a
// StateError at once.
func (b *Batch) Lock(ctx context.Context, space tier.ID) (*Handle, error) {
	return b.lockAwait(ctx, opening{space: space})
}

// TryLock is Lock, but fails while the batch is in transit.
func (b *Batch) TryLock(space tier.ID) (*Handle, error) { return b.lock(opening{space: space}) }

// Open is Lock, and needs no pending task. The zero space stands for the one in which the data is.
// With last, Open also drops the batch in the same step: closing the last handle frees the data.
func (b *Batch) Open(ctx context.Context, space tier.ID, last bool) (*Handle, error) {
	return b.lockAwait(ctx, opening{space: space, anywhere: !space.Valid(), own: true, last: last})
}

// Read is Open, but leaves pending tasks to their callers.
func (b inside) Read(ctx context.Context, space tier.ID) (*Handle, error) {
	return b.lockAwait(ctx, reading(space))
}

// TryRead is Read, but fails while the batch is in transit.
func (b inside) TryRead(space tier.ID) (*Handle, error) { return b.lock(reading(space)) }

func reading(space tier.ID) opening {
	return opening{space: space, anywhere: !space.Valid(), own: true, keepPending: true}
}

// opening is how a handle is opened: the difference between Lock, Open and Read.
type opening struct {
	space       tier.ID            // where the data must be
	anywhere    bool               // it may be in any space
	own         bool               // needs no pending task
	keepPending bool               // leaves pending tasks pending
	last        bool               // drops the batch
	owner       *reservation.Owner // who holds the handle; nil if unknown
}

func (b *Batch) lockAwait(ctx context.Context, o opening) (h *Handle, err error) {
	o.owner = reservation.OwnerOf(ctx)
	err = b.await(ctx, func() (err error) {
		h, err = b.lock(o)
		return err
	})
	return h, err
}

func (b *Batch) lock(o opening) (*Handle, error) {
	const op = "lock"
	now := b.now() // a callback, so before the lock is taken
	b.mu.Lock()
	err := b.barLocked(op)
	in := b.mu.traits.space
	switch {
	case err != nil:
	case b.mu.tasks.pending == 0 && !o.own:
		err = b.errorLocked(op, TaskNotCreated)
	case in.ID() != o.space && !o.anywhere:
		e := b.errorLocked(op, SpaceMismatch)
		e.Space, e.Want = in.ID(), o.space
		err = e
	}
	if err != nil {
		b.mu.Unlock()
		return nil, err
	}
	h, c := b.openLocked(now, o)
	b.mu.Unlock()
	h.begin(o.owner, c.now.Bytes)
	b.announce(c)
	return h, nil
}

// openLocked opens a handle. After unlocking, the caller calls begin for it and announces the
// change.
func (b *Batch) openLocked(now int64, o opening) (*Handle, change) {
	b.mu.state = Processing
	if b.mu.tasks.pending > 0 && !o.keepPending {
		b.mu.tasks.remove(true)
	}
	if o.last {
		b.mu.state = Released
		b.mu.tasks.cancel()
	}
	if b.mu.tasks.active++; b.mu.tasks.active == 1 {
		b.expectLocked(now)
	}
	b.mu.lastUse = max(b.mu.lastUse, now)
	b.mu.unread = false
	c := b.changeLocked()
	c.event = events.BatchUsed
	return &Handle{b: b, payload: b.mu.payload, space: b.mu.traits.space}, c
}

// begin lists the handle in its space. It calls no method of the payload: if one panicked, the
// handle would stay open, and no caller would have it.
func (h *Handle) begin(owner *reservation.Owner, bytes int64) {
	track(h, &h.trace, "handle", h.b.id)
	v := books.HoldView{Kind: books.Handle, Memory: h.payload, Bytes: bytes, About: h.b.Inside()}
	if owner != nil {
		v.Owner = owner
	}
	h.holding.begin(h.space, v)
}

// Batch returns the batch.
func (h *Handle) Batch() *Batch { return h.b }

// Payload returns the data, which stays the batch's and is valid until Close;
// nil afterwards.
func (h *Handle) Payload() Payload {
	if h.closed.Load() {
		return nil
	}
	return h.payload
}

// Space returns where the data is.
func (h *Handle) Space() *tier.Space { return h.space }

// SetOwner sets the task that holds the handle: errors of waits for room name it, and deadlock
// detection counts it. Nil means no task. It must not be called after Close.
func (h *Handle) SetOwner(o *reservation.Owner) {
	if o == nil {
		h.holding.hold().SetOwner(nil)
		return
	}
	h.holding.hold().SetOwner(o)
}

// Owner returns the task that holds the handle, or nil.
func (h *Handle) Owner() *reservation.Owner {
	o, _ := h.holding.hold().Owner().(*reservation.Owner)
	return o
}

// Close ends the reading. All device work that reads the payload must be done. The last handle's
// Close frees the payload if the batch was dropped, as batches of Repository.Drain are; otherwise
// the batch is idle, or has a task, and may be moved again. A second Close changes nothing and
// returns tier.ErrReleased; an invariants build panics with the stack that took the handle.
func (h *Handle) Close() error {
	if !h.closed.CompareAndSwap(false, true) {
		if invariants.Enabled {
			panic("batch: handle closed twice; it was taken at\n" + h.trace.String())
		}
		return tier.ErrReleased
	}
	h.trace.end()
	h.holding.hold().End()
	b := h.b
	now := b.now()
	b.mu.Lock()
	b.mu.tasks.active--
	b.mu.lastUse = max(b.mu.lastUse, now)
	var payload Payload
	switch {
	case b.mu.state == Released:
		payload = b.takePayloadLocked()
	case b.mu.tasks.active == 0:
		b.mu.state = b.restLocked()
	}
	c := b.changeLocked()
	b.mu.Unlock()
	defer b.announce(c)
	return release(payload)
}

// Values of Info.NextUse and Hint that are not times.
const (
	Never = math.MaxInt64 // the batch will not be used again
	Stay  = math.MinInt64 // the monitor evicts the batch only if there is no other
)

// Hint sets when the batch will be used next, by Options.Clock: in unix nanoseconds, if that is
// nil. Never and Stay are the other hints; 0 takes a hint back. Policies that look at Info.NextUse
// heed it. The next use ends a hint, except Stay: one that begins when no other is under way.
func (b *Batch) Hint(next int64) {
	b.mu.Lock()
	if b.mu.hint == next || b.mu.state == Released {
		b.mu.Unlock()
		return
	}
	b.mu.hint = next
	c := b.changeLocked()
	c.event, c.hint = events.BatchHinted, next
	b.mu.Unlock()
	b.announce(c)
}

// longestGap bounds what is expected between two uses.
const longestGap = int64(100 * 365 * 24 * time.Hour)

// expectLocked is called when a use begins at now. The next use is expected after the mean time
// between uses so far, in which the last interval counts for a quarter.
func (b *Batch) expectLocked(now int64) {
	if b.mu.hint != Stay {
		b.mu.hint = 0
	}
	if b.mu.uses == 0 {
		b.mu.uses = 1
		return
	}
	b.mu.uses += min(1, math.MaxUint8-b.mu.uses)
	gap := min(max(1, now-b.mu.lastUse), longestGap)
	if b.mu.gap > 0 {
		gap = (gap + 3*b.mu.gap) / 4
	}
	b.mu.gap = gap
}

// nextUseLocked is Info.NextUse.
func (b *Batch) nextUseLocked() int64 {
	if b.mu.hint != 0 || b.mu.gap == 0 {
		return b.mu.hint
	}
	return min(b.mu.lastUse, Never-1-b.mu.gap) + b.mu.gap
}
