package budget

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/ledger"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// device is a device behind a budget. It passes everything on to the device that it wraps, with
// streams, events and peers as they are: a device that copies to a peer unwraps it itself.
//
// A panic of the wrapped device goes on to the caller, with the books as they would be after an
// error. Callers of devices, such as tier.Space, turn panics into errors where the stack is at
// hand. A decorator should not hide it.
type device struct {
	inner
	root   tier.Device // what inner is at the bottom
	budget *Budget
	books  books // guarded by budget.mu
	users  int   // calls of Wrap without their Release; guarded by budget.mu
}

// inner is embedded for what is passed on as it is.
type inner = tier.Device

var (
	_ tier.Device   = (*device)(nil)
	_ tier.Computer = (*device)(nil)
)

// Unwrap returns the device behind the budget.
func (d *device) Unwrap() tier.Device { return d.inner }

const hint = "Budget.SetLimit raises the limit"

// Alloc implements tier.Device. Over the limit it returns a tier.NoSpaceError, as any device
// without room does, whose cause is a tier.OutOfBudgetError, and does not call the wrapped device.
func (d *device) Alloc(s tier.Stream, size int64) (a tier.Addr, err error) {
	if size <= 0 {
		return 0, fmt.Errorf("budget: cannot allocate %d bytes", size)
	}
	charge := max(size, d.inner.Charge(size))
	lockrank.AssertNone("a device allocates")
	if err := d.budget.admit(d, request{alloc: charge}); err != nil {
		var full *tier.OutOfBudgetError
		if errors.As(err, &full) {
			return 0, &tier.NoSpaceError{Requested: size, Available: full.Remaining, Hint: hint, Cause: err}
		}
		return 0, err
	}
	returned := false
	defer func() {
		if !returned {
			d.budget.update(d, func() { d.books.pending -= charge })
		}
	}()
	if a, err = d.inner.Alloc(s, size); err != nil {
		return 0, err
	}
	returned = true
	if d.allocated(a, charge) {
		d.Reap() // what this call has hidden from concurrent calls of Reap
	}
	return a, nil
}

// allocated records an allocation. vague reports that there are frees of which only Outstanding
// shows the end.
func (d *device) allocated(a tier.Addr, charge int64) (vague bool) {
	d.budget.update(d, func() {
		b := &d.books
		b.pending -= charge
		if b.closed { // meanwhile, and the memory is gone with the device
			return
		}
		if old := b.allocs[a]; old != nil && !old.freeing {
			// It was freed, and not through the budget.
			b.live -= old.charge
			b.freed += old.charge
			b.unmarked += old.charge
		}
		b.allocs[a] = &allocation{charge: charge}
		b.live += charge
		d.budget.mu.admitted += charge
		vague = b.unmarked > 0
	})
	return vague
}

// Free implements tier.Device. The bytes are credited when the device is done with them. That is at
// once if it frees synchronously. Otherwise it is at the next reap: through Reap, by a later Free,
// or because a request does not fit.
//
// An event is recorded behind the free to show its end. If the device refuses to record it, or the
// event reports that the stream has failed, the device's Outstanding is used. The same goes for
// allocations that are older than the budget, and for a synchronous free.
//
// A free that the device refuses, also because its stream is closed, changes
// nothing. If the device was closed behind the budget's back its bytes stay charged
// until this Device is closed too.
func (d *device) Free(s tier.Stream, a tier.Addr) error {
	lockrank.AssertNone("a device frees")
	f, err := d.beginFree(a)
	if err != nil {
		return err
	}
	if err := d.free(s, a, f); err != nil {
		return err
	}
	d.Reap()
	return nil
}

// beginFree finds what is to be freed: nil if it is older than the budget.
func (d *device) beginFree(a tier.Addr) (*allocation, error) {
	b := d.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	f := d.books.allocs[a]
	switch {
	case d.books.closed:
		return nil, fmt.Errorf("budget: the device is %w", tier.ErrClosed)
	case f == nil && d.books.older == 0 || f != nil && f.freeing:
		return nil, fmt.Errorf("budget: no allocation starts at address %#x", uint64(a))
	case f != nil:
		f.freeing = true
		d.books.freeing += f.charge
		d.books.freed += f.charge
	}
	return f, nil
}

// free frees and records an event behind it.
func (d *device) free(s tier.Stream, a tier.Addr, f *allocation) error {
	var freed bool
	var e tier.Event
	if f != nil {
		defer func() { d.endFree(s, a, f, freed, e) }()
	}
	if err := d.inner.Free(s, a); err != nil {
		return err
	}
	freed = true
	if f != nil {
		if behind, err := d.inner.Record(s); err == nil {
			e = behind
		}
	}
	return nil
}

// endFree makes what was freed retired, or leaves it live.
func (d *device) endFree(s tier.Stream, a tier.Addr, f *allocation, freed bool, e tier.Event) {
	d.budget.update(d, func() {
		b := &d.books
		f.freeing = false
		if b.closed {
			return
		}
		b.freeing -= f.charge
		if !freed {
			return
		}
		if b.allocs[a] == f { // else the address belongs to a newer allocation
			delete(b.allocs, a)
		}
		b.live -= f.charge
		if e == nil {
			b.unmarked += f.charge
			return
		}
		b.number++
		b.marks[s] = append(b.marks[s], markedFree{number: b.number, event: e, charge: f.charge})
		b.marked += f.charge
	})
}

// Reap implements tier.Device. It returns the bytes that were credited to the budget. The device
// may have finished with more: its Outstanding is passed on as it is.
func (d *device) Reap() int64 {
	b := d.budget
	b.mu.Lock()
	s := d.books.look()
	b.mu.Unlock()
	// In this order: what is done before the device reaps is reaped by it.
	s.ask()
	d.inner.Reap()
	outstanding := int64(0)
	if s.open {
		outstanding = d.inner.Outstanding()
	}
	var credit int64
	b.update(d, func() {
		credit = d.books.settle(s, outstanding) // nothing if it was closed meanwhile
		b.mu.reclaimed += credit
	})
	return credit
}

// MemInfo implements tier.Device. The total is the limit if that is less than the
// device has, and what is free is no more than remains of the budget.
func (d *device) MemInfo() (free, total int64) {
	free, total = d.inner.MemInfo()
	b := d.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	return min(free, max(0, b.mu.limit-b.mu.reserved)), min(total, b.mu.limit)
}

// Close implements tier.Device. It closes the wrapped device, credits what was charged for it,
// because its memory is gone, and removes it from the budget. It does so even if the device returns
// an error or was closed before. It also does so if some of the memory stays because it is lent
// (tier.Lender): the budget does not count what others have.
func (d *device) Close() error {
	lockrank.AssertNone("a device is closed")
	err := d.inner.Close()
	b := d.budget
	b.update(d, func() { b.leaveLocked(d) })
	return err
}

// Digest implements tier.Computer: ErrNotSupported if the wrapped device does not
// compute.
func (d *device) Digest(s tier.Stream, src tier.Addr, size, first int64, out *tier.Digest) error {
	return digest(d.inner, s, src, size, first, out)
}

func digest(inner tier.Device, s tier.Stream, src tier.Addr, size, first int64, out *tier.Digest) error {
	c, ok := inner.(tier.Computer)
	if !ok {
		return fmt.Errorf("budget: %s does not compute: %w", inner.Info().Name, tier.ErrNotSupported)
	}
	return c.Digest(s, src, size, first, out)
}

// Quota returns what a tier.Space over the device charges for its reservations.
func (d *device) Quota() tier.Quota { return quota{d} }

type quota struct{ d *device }

func (q quota) Charge(n int64) error { return q.d.budget.admit(q.d, request{promise: n}) }

func (q quota) Credit(n int64) {
	if q.retired() {
		// The device was done with the bytes before the space knew; without this they
		// might stay charged.
		q.d.Reap()
	}
	q.d.budget.change(q.d, func() { q.d.books.promised -= n })
	// Even if no less is charged, because more is allocated than promised, the space has room
	// again. Only this call wakes its waiters.
	q.d.budget.notify()
}

func (q quota) retired() bool {
	q.d.budget.mu.Lock()
	defer q.d.budget.mu.Unlock()
	return q.d.books.retired() > 0
}

// Remaining is 0 once the device is closed. Otherwise a space would retry for ever what cannot be
// charged.
func (q quota) Remaining() int64 {
	b := q.d.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	if q.d.books.closed {
		return 0
	}
	return ledger.Left(b.mu.limit, b.mu.reserved, q.d.books.charged())
}

func (q quota) Limit() int64 {
	b := q.d.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.limit
}

func (q quota) Subscribe(f func()) (cancel func()) { return q.d.budget.subscribers.Add(f) }
