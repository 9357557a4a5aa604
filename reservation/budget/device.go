package budget

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// device is a device under a budget. It passes all other calls on to the device that it wraps, with
// streams, events and peers as they are: a device that copies to a peer unwraps the peer itself.
//
//	Alloc:      pending ─▶ live ─▶ retired ─▶ reclaimed
//	rolled back:  ◀─┘       ◀── a Free that fails
//
// An allocation is pending during the call of Alloc, and live until the call of Free begins. Then
// it is retired until the device has finished with it. Allocations that Wrap found on the device
// are older until the device has finished with them: their sizes are unknown, so it is not known
// which of them are retired.
//
// A panic of the wrapped device reaches the caller, with the counters as they would be after an
// error. Callers of devices, such as tier.Space, turn panics into errors.
type device struct {
	decorator
	root   tier.Device // the innermost device that inner wraps
	budget *Budget

	// The rest is guarded by budget.mu. Counters are in bytes, as the device charges them.

	users     int   // calls of Wrap without their Release
	promised  int64 // by spaces, before they allocate
	pending   int64
	live      int64
	older     int64
	admitted  int64 // total that was allocated or found by Wrap; never falls
	reclaimed int64 // total that was credited; never falls
	byEvents  int64 // total of the frees whose event is done; never falls

	allocs map[tier.Addr]*allocation // live, or in a call of Free
	frees  []*free                   // those whose event is not known to be done
	closed bool                      // calls fail from now on, and nothing but pending is charged
}

// decorator is embedded for the calls that are passed on.
type decorator struct{ inner }

// inner keeps the embedded field unexported.
type inner = tier.Device

// Unwrap returns the device below the decorator.
func (d decorator) Unwrap() tier.Device { return d.inner }

// Digest implements tier.Computer. It returns ErrNotSupported if the wrapped device does not
// compute.
func (d decorator) Digest(s tier.Stream, src tier.Addr, size, first int64, out *tier.Digest) error {
	c, ok := d.inner.(tier.Computer)
	if !ok {
		return fmt.Errorf("budget: %s does not compute: %w", d.Info().Name, tier.ErrNotSupported)
	}
	return c.Digest(s, src, size, first, out)
}

// allocation is one that was made through the budget.
type allocation struct {
	charge  int64
	freeing bool // a call of Free is in progress
}

// free is a free with an event recorded after it.
type free struct {
	event  tier.Event
	charge int64
}

var errClosed = fmt.Errorf("budget: the device is %w", tier.ErrClosed)

func (d *device) retired() int64 { return d.admitted - d.reclaimed - d.older - d.live }

// allocated returns the bytes of allocations made through the budget.
func (d *device) allocated() int64 { return d.admitted - d.reclaimed - d.older + d.pending }

func (d *device) charged() int64 { return d.older + max(d.promised, d.allocated()) }

// leave credits what is charged, except for the bytes of Alloc calls that are in progress.
func (d *device) leave() {
	d.closed = true
	d.promised, d.live, d.older, d.reclaimed = 0, 0, 0, d.admitted
}

var (
	_ tier.Computer = (*device)(nil)
	_ tier.Limited  = (*device)(nil)
)

// Alloc implements tier.Device. Over the limit it returns a tier.NoSpaceError, as any device
// without room does, whose cause is a tier.OutOfBudgetError, and does not call the wrapped device.
func (d *device) Alloc(s tier.Stream, size int64) (a tier.Addr, err error) {
	if size <= 0 {
		return 0, fmt.Errorf("budget: cannot allocate %d bytes", size)
	}
	charge := max(size, d.inner.Charge(size))
	lockrank.AssertNone("a device allocates")
	if err := d.budget.admit(d, &d.pending, charge); err != nil {
		if full, ok := errors.AsType[*tier.OutOfBudgetError](err); ok {
			err = &tier.NoSpaceError{
				Requested: size, Available: full.Remaining, Hint: "Budget.SetLimit raises the limit", Cause: err,
			}
		}
		return 0, err
	}
	allocated, reap := false, false
	defer func() {
		d.budget.update(func() {
			d.pending -= charge
			if !allocated || d.closed {
				return
			}
			if old := d.allocs[a]; old != nil && !old.freeing {
				d.live -= old.charge // it was freed, but not through the budget
			}
			d.allocs[a] = &allocation{charge: charge}
			d.admitted += charge
			d.live += charge
			reap = d.retired() > 0
		})
		if reap {
			d.Reap() // this call may have hidden finished frees from concurrent calls of Reap
		}
	}()
	if a, err = d.inner.Alloc(s, size); err != nil {
		return 0, err
	}
	allocated = true
	return a, nil
}

// Free implements tier.Device. The bytes are credited when the device is done with them: at once if
// it frees synchronously, otherwise at the next reap, which is a call of Reap, a later Free, or a
// request that does not fit.
//
// A free that the device refuses, for example because its stream is closed, changes nothing. If the
// device was closed without the budget, its bytes stay charged until this Device is closed too.
func (d *device) Free(s tier.Stream, a tier.Addr) error {
	lockrank.AssertNone("a device frees")
	err := d.free(s, a)
	if err == nil {
		d.Reap()
	}
	return err
}

func (d *device) free(s tier.Stream, a tier.Addr) error {
	f, err := d.beginFree(a)
	if err != nil {
		return err
	}
	freed := false
	var event tier.Event
	defer func() {
		d.budget.update(func() {
			f.freeing = false
			switch {
			case d.closed:
				return
			case !freed:
				d.live += f.charge
				return
			case d.allocs[a] == f: // otherwise the address belongs to a newer allocation
				delete(d.allocs, a)
			}
			if event != nil {
				d.frees = append(d.frees, &free{event, f.charge})
			}
		})
	}()
	if err := d.inner.Free(s, a); err != nil {
		return err
	}
	freed = true
	event, _ = d.inner.Record(s) // without an event, Outstanding shows the end
	return nil
}

// beginFree retires the allocation at a. One that is older than the budget has a charge of 0.
func (d *device) beginFree(a tier.Addr) (*allocation, error) {
	d.budget.mu.Lock()
	defer d.budget.mu.Unlock()
	f := d.allocs[a]
	switch {
	case d.closed:
		return nil, errClosed
	case f == nil && d.older > 0:
		return new(allocation), nil
	case f == nil || f.freeing:
		return nil, fmt.Errorf("budget: no allocation starts at address %#x", uint64(a))
	}
	f.freeing = true
	d.live -= f.charge
	return f, nil
}

// Reap implements tier.Device. It returns the bytes that were credited to the budget. The device
// may have finished with more: its Outstanding is passed on as it is.
func (d *device) Reap() (credit int64) {
	b := d.budget
	b.mu.Lock()
	admitted, frees := d.admitted, slices.Clone(d.frees)
	b.mu.Unlock()
	ended := make(map[*free]error)
	for _, f := range frees {
		select {
		case <-f.event.Done():
			ended[f] = f.event.Err()
		default:
		}
	}
	d.inner.Reap()
	outstanding := d.inner.Outstanding()
	b.update(func() {
		if d.closed {
			return
		}
		d.frees = slices.DeleteFunc(d.frees, func(f *free) bool {
			err, done := ended[f]
			if done && err == nil { // after an error the free may not have happened
				d.byEvents += f.charge
			}
			return done
		})
		finished := max(d.byEvents, admitted-outstanding)
		credit = max(0, min(finished-d.reclaimed, d.older+d.retired()))
		d.reclaimed += credit
		d.older = min(d.older, d.admitted-d.reclaimed-d.live) // what exceeds the retired bytes
	})
	return credit
}

// MemInfo implements tier.Device. The total is at most the limit, and the free bytes are at most
// what remains of the budget.
func (d *device) MemInfo() (free, total int64) {
	free, total = d.inner.MemInfo()
	s := d.budget.Stats()
	return min(free, max(0, s.Limit-s.Reserved)), min(total, s.Limit)
}

// Close implements tier.Device. It closes the wrapped device, credits what was charged for it, and
// removes it from the budget, even if the device returns an error or was closed before. It also
// does so if some of the memory stays because it is lent (tier.Lender): the budget does not count
// memory that others hold.
func (d *device) Close() error {
	lockrank.AssertNone("a device is closed")
	err := d.inner.Close()
	d.budget.update(d.leave)
	return err
}

// Quota implements tier.Limited.
func (d *device) Quota() tier.Quota { return quota{d} }

// quota charges the reservations of the spaces over a device.
type quota struct{ d *device }

func (q quota) Charge(n int64) error { return q.d.budget.admit(q.d, &q.d.promised, n) }

// Credit reaps first: the device may have finished with bytes that the space has freed, which
// would stay charged. The subscribers are notified even if the device charges no less because more
// is allocated than promised: the space itself has room again.
func (q quota) Credit(n int64) {
	q.d.Reap()
	q.d.budget.update(func() { q.d.promised -= n })
}

// Remaining is 0 once the device is closed, so that no space retries a charge that never succeeds.
// Over the limit it is the device's share of the excess, rounded up so that the shares cover it.
func (q quota) Remaining() int64 {
	b := q.d.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.statsLocked()
	left := s.Limit - s.Reserved
	switch {
	case q.d.closed:
		return 0
	case left < 0:
		return int64(math.Floor(float64(left) * float64(q.d.charged()) / float64(s.Reserved)))
	}
	return left
}

func (q quota) Limit() int64 { return q.d.budget.Stats().Limit }

func (q quota) Subscribe(f func()) (cancel func()) {
	b := q.d.budget
	b.update(func() { b.mu.subscribers = append(b.mu.subscribers, &f) })
	return func() {
		b.update(func() {
			b.mu.subscribers = slices.DeleteFunc(b.mu.subscribers, func(o *func()) bool { return o == &f })
		})
	}
}
