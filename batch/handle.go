package batch

import (
	"context"
	"math"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/holds"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// A Handle lets its holder read a batch's data where it is. Many handles may be open at once; while
// any is, the data stays. It must be closed once; it is safe for concurrent use. While it is open
// it is part of the account of its space (tier.Leak, Engine.Holders), with the owner that its
// context named (reservation.Owner.Context).
type Handle struct {
	trace   trace
	holding holding
	b       *Batch
	payload Payload
	space   *tier.Space // the payload's
	closed  atomic.Bool
}

// Lock opens a handle for a pending task, which it takes; the data must be in
// space. It waits only while the batch is in transit, until ctx ends: any other
// obstacle is a StateError at once.
func (b *Batch) Lock(ctx context.Context, space tier.ID) (*Handle, error) {
	return b.lockAwait(ctx, opening{space: space})
}

// TryLock is Lock, but fails while the batch is in transit.
func (b *Batch) TryLock(space tier.ID) (*Handle, error) { return b.lock(opening{space: space}) }

// Open is Lock for a task of its own, unless one is pending. The zero space is the one in which
// the data is. With last the batch is dropped in the same step: its data goes with its handles.
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

// opening is how a handle is opened.
type opening struct {
	space       tier.ID
	anywhere    bool // in any space
	own         bool // without a pending task, too
	keepPending bool // a pending task stays pending
	last        bool // and the batch is dropped
	owner       *reservation.Owner
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

// openLocked opens a handle. The caller calls begin for it and announces the change once the lock
// is free.
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

// begin enters the handle into the account of its space. It calls nothing of the payload, which
// might panic while the handle is open and nobody has it.
func (h *Handle) begin(owner *reservation.Owner, bytes int64) {
	track(h, &h.trace, "handle", h.b.id)
	v := holds.View{Kind: holds.Handle, Memory: h.payload, Bytes: bytes, About: h.b.Inside()}
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

// Close ends the reading; all device work that reads the payload must be done. If
// the batch was dropped and this is its last handle, the payload is freed. A
// second Close changes nothing and returns tier.ErrReleased; an invariants build
// panics with the stack that took the handle.
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

// Values of Info.NextUse and Hint that are no time.
const (
	Never = math.MaxInt64 // it will not be used again
	Stay  = math.MinInt64 // it is to stay where it is as long as other batches can leave
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

// expectLocked is called when a use begins at now. The next is expected after the mean of what has
// lain between uses so far; the last counts for a quarter.
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
