package batch

import (
	"context"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/holds"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// A Handle lets its holder read a batch's data where it is. Many handles may be
// open at once; while any is, the data stays. It must be closed once; it is safe
// for concurrent use. While it is open it stands in the account of its space
// (tier.Leak, Engine.Account), with the owner that its context named (reservation.Owner.Context).
type Handle struct {
	trace   trace
	holding holding
	b       *Batch
	payload Payload
	closed  atomic.Bool
}

// Lock opens a handle for a pending task, which it takes; the data must be in
// space. It waits only while the batch is in transit, until ctx ends: any other
// obstacle is a StateError at once.
func (b *Batch) Lock(ctx context.Context, space tier.ID) (*Handle, error) {
	return b.lockAwait(ctx, &space)
}

// LockAny is Lock for the space in which the data is, whichever that is.
func (b *Batch) LockAny(ctx context.Context) (*Handle, error) {
	return b.lockAwait(ctx, nil)
}

// TryLock is Lock, but fails while the batch is in transit.
func (b *Batch) TryLock(space tier.ID) (*Handle, error) {
	var h *Handle
	_, err := b.lock(false, &space, nil, &h)
	return h, err
}

func (b *Batch) lockAwait(ctx context.Context, space *tier.ID) (*Handle, error) {
	var h *Handle
	owner := reservation.OwnerOf(ctx)
	err := b.await(ctx, func(wait bool) (<-chan struct{}, error) { return b.lock(wait, space, owner, &h) })
	return h, err
}

func (b *Batch) lock(wait bool, space *tier.ID, owner *reservation.Owner, out **Handle) (<-chan struct{}, error) {
	const op = "lock"
	now := b.now() // a callback, so before the lock is taken
	b.mu.Lock()
	switch {
	case b.mu.state == InTransit:
		defer b.mu.Unlock()
		if wait {
			return b.waitLocked(), nil
		}
		return nil, b.errorLocked(op, InvalidState)
	case b.mu.state == Released:
		defer b.mu.Unlock()
		return nil, b.errorLocked(op, MissingData)
	case b.mu.pending == 0:
		defer b.mu.Unlock()
		return nil, b.errorLocked(op, TaskNotCreated)
	case space != nil && b.mu.space != *space:
		defer b.mu.Unlock()
		err := b.errorLocked(op, SpaceMismatch)
		err.Space, err.Want = b.mu.space, *space
		return nil, err
	}
	b.mu.state = Processing
	b.mu.pending--
	b.mu.active++
	b.mu.lastUse = max(b.mu.lastUse, now)
	h := &Handle{b: b, payload: b.mu.payload}
	changed, store := b.changeLocked()
	b.mu.Unlock()
	track(h, &h.trace, "handle", b.id)
	v := holds.View{Kind: holds.Handle, Memory: h.payload, Bytes: h.payload.Bytes(), About: b}
	if owner != nil {
		v.Owner = owner
	}
	h.holding.begin(h.payload.Space(), v)
	*out = h
	b.announce(changed, store)
	return nil, nil
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
func (h *Handle) Space() *tier.Space { return h.payload.Space() }

// SetOwner says which task holds the handle: those who wait for room are told of what it
// holds, and of a deadlock. Nil is nobody. It must not be called after Close.
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
	b.mu.active--
	b.mu.lastUse = max(b.mu.lastUse, now)
	var payload Payload
	if b.mu.active == 0 {
		if b.mu.state == Released {
			payload = b.takePayloadLocked()
		} else {
			b.mu.state = b.restLocked()
		}
	}
	changed, store := b.changeLocked()
	b.mu.Unlock()
	defer b.announce(changed, store)
	return release(payload)
}
