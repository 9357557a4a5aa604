package batch

import (
	"context"
	"fmt"
	"math"
	"runtime"
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
	b       *Batch
	payload Payload
	space   *tier.Space // the payload's
	closed  atomic.Bool
	own     books.Hold
	hold    *books.Hold // the entry in the space's list: own, except in invariants builds; see pinLocked
	stack   invariants.Trace
	lost    runtime.Cleanup // see onForgotten
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
	return b.lockAwait(ctx, opening{space: space, own: true, last: last})
}

// Read is Open, but leaves pending tasks to their callers.
func (b *Batch) Read(ctx context.Context, space tier.ID) (*Handle, error) {
	return b.lockAwait(ctx, opening{space: space, own: true, keepPending: true})
}

// TryRead is Read, but fails while the batch is in transit.
func (b *Batch) TryRead(space tier.ID) (*Handle, error) {
	return b.lock(opening{space: space, own: true, keepPending: true})
}

// opening is how a handle is opened: the difference between Lock, Open and Read.
type opening struct {
	space       tier.ID            // where the data must be; the zero ID with own: anywhere
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

func (b *Batch) lock(o opening) (h *Handle, err error) {
	const op = "lock"
	now := b.clock() // a callback, so before the lock is taken
	err = b.update(func() (c change, err error) {
		in := b.mu.Space
		switch err := b.barLocked(op); {
		case err != nil:
			return c, err
		case b.mu.Pending == 0 && !o.own:
			return c, b.errorLocked(op, TaskNotCreated)
		case in != o.space && (o.space.Valid() || !o.own):
			return c, &StateError{
				Batch: b.id, State: b.mu.State, Op: op, Status: SpaceMismatch, Space: in, Want: o.space,
			}
		}
		h = b.pinLocked(&c, o, now)
		return c, nil
	})
	return h, err
}

// longestGap bounds what is expected between two uses.
const longestGap = int64(100 * 365 * 24 * time.Hour)

// pinLocked opens a handle and lists it in its space. It calls no method of the payload: if one
// panicked, the handle would stay open, and no caller would have it.
//
// If no other handle is open, a use begins, and ends a hint other than Stay. The next use is
// expected after the mean time between uses so far, in which the last interval counts for a
// quarter.
func (b *Batch) pinLocked(c *change, o opening, now int64) *Handle {
	if b.mu.Pending > 0 && !o.keepPending {
		if b.mu.Pending--; b.mu.Pending == 0 {
			b.mu.Task = 0
		} else { // no numbers are kept of the others, so they count as young as can be
			b.mu.Task = created.Load()
		}
	}
	if o.last {
		b.mu.released, b.mu.Pending, b.mu.Task = true, 0, 0
	}
	if b.mu.Active++; b.mu.Active == 1 {
		if b.mu.hint != Stay {
			b.mu.hint = 0
		}
		if b.mu.Uses > 0 {
			gap := min(max(1, now-b.mu.LastUse), longestGap)
			if b.mu.gap > 0 {
				gap = (gap + 3*b.mu.gap) / 4
			}
			b.mu.gap = gap
		}
		b.mu.Uses += min(1, math.MaxUint8-b.mu.Uses)
	}
	b.mu.LastUse = max(b.mu.LastUse, now)
	b.mu.Unread = false
	if c.ahead == nil { // else a commit ends one prefetch, and begins the next
		c.ahead, c.outcome, b.mu.ahead = b.mu.ahead, events.AheadUsed, nil
	}
	c.event = events.BatchUsed
	h := &Handle{b: b, payload: b.mu.Payload, space: b.mu.space}
	h.hold = &h.own
	if invariants.Enabled {
		h.hold = new(books.Hold) // the space must not keep a forgotten handle from the garbage collector
		h.stack = invariants.Stack()
		h.lost = onForgotten(h, "handle", b.id, h.stack)
	}
	v := books.HoldView{Kind: books.Handle, Memory: h.payload, Bytes: b.mu.Bytes, About: b}
	if o.owner != nil {
		v.Owner = o.owner
	}
	h.hold.Begin(h.space.Books, v)
	return h
}

// forgotten is a variable for the test's sake.
var forgotten = func(message string) { panic(message) }

// onForgotten reports a handle or a transit that the garbage collector finds open, because nobody
// can end it any more, until the cleanup is stopped. Only an invariants build calls it.
func onForgotten[T any](holder *T, kind string, id ID, taken invariants.Trace) runtime.Cleanup {
	return runtime.AddCleanup(holder, func(id ID) {
		forgotten(fmt.Sprintf("batch: a %s on batch %d was forgotten open; it was taken at\n%s", kind, id, taken))
	}, id)
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
		h.hold.SetOwner(nil)
		return
	}
	h.hold.SetOwner(o)
}

// Owner returns the task that holds the handle, or nil.
func (h *Handle) Owner() *reservation.Owner {
	o, _ := h.hold.Owner().(*reservation.Owner)
	return o
}

// Close ends the reading. All device work that reads the payload must be done. The last handle's
// Close frees the payload if the batch was dropped, as batches of Repository.Drain are; otherwise
// the batch is idle, or has a task, and may be moved again. A second Close changes nothing and
// returns tier.ErrReleased; an invariants build panics with the stack that took the handle.
func (h *Handle) Close() error {
	if !h.closed.CompareAndSwap(false, true) {
		if invariants.Enabled {
			panic("batch: handle closed twice; it was taken at\n" + h.stack.String())
		}
		return tier.ErrReleased
	}
	h.lost.Stop()
	h.hold.End()
	b := h.b
	now := b.clock()
	return b.update(func() (c change, err error) {
		b.mu.Active--
		b.mu.LastUse = max(b.mu.LastUse, now)
		return c, nil
	})
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
	_ = b.update(func() (c change, err error) {
		if b.mu.hint == next || b.mu.released {
			return c, errUnchanged
		}
		b.mu.hint, c.event, c.hint = next, events.BatchHinted, next
		return c, nil
	})
}
