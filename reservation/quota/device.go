package quota

import (
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/tier"
)

// budgetedDevice is a device under a budget. It passes all other calls on to the device that it wraps, with
// streams, events and peers as they are: a device that copies to a peer unwraps the peer itself.
//
//	Alloc:      pending ─▶ live ─▶ retired ─▶ credited
//	rolled back:  ◀─┘
//
// An allocation is pending during the call of Alloc, and live until a call of Free has returned.
// Then it is retired until the device has finished with it.
//
// A panic of the wrapped device reaches the caller, with the counters as they would be after an
// error. Callers of devices, such as tier.Space, turn panics into errors.
type budgetedDevice struct {
	decorator
	budget *Budget
	member tier.Quota // of the budget's quota; charged as much as charged() returns

	// The rest is guarded by budget.mu. Sizes are in bytes, as the device charges them.

	promised  int64 // by spaces, before they allocate
	allocated int64 // pending, live or retired
	live      int64
	retired   int64
	allocs    map[tier.Addr]int64 // sizes of the live allocations that no call of Free is freeing
	frees     []*free             // not known to be finished
	closed    bool                // calls fail from now on, and nothing but pending is charged
}

// decorator is embedded for the calls that are passed on.
type decorator struct{ inner }

// inner keeps the embedded field unexported.
type inner = tier.Device

// Unwrap returns the device below the decorator.
func (d decorator) Unwrap() tier.Device { return d.inner }

// free is a free that the device may not have finished. It is not changed.
type free struct {
	stream tier.Stream
	charge int64
	event  tier.Event // recorded after the free; nil if the device refused that
}

// charged returns what the budget charges for d. Promised and allocated bytes cover each other,
// because a space allocates what it has promised before.
func (d *budgetedDevice) charged() int64 { return max(d.promised, d.allocated) }

// charge adds n bytes to counter, which is &d.promised or &d.allocated. If they do not fit, it
// reaps and tries once more.
func (d *budgetedDevice) charge(counter *int64, n int64) error {
	err := d.tryCharge(counter, n)
	if !errors.Is(err, tier.ErrOutOfBudget) {
		return err
	}
	d.budget.Reap()
	if err = d.tryCharge(counter, n); err != nil {
		d.change(func() { d.budget.mu.refused++ })
	}
	return err
}

func (d *budgetedDevice) tryCharge(counter *int64, n int64) error {
	d.budget.mu.Lock()
	defer d.budget.mu.Unlock()
	if d.closed {
		return fmt.Errorf("budget: the device is %w", tier.ErrClosed)
	}
	if more := n - (d.charged() - *counter); more > 0 {
		if err := d.member.Charge(more); err != nil {
			return err
		}
	}
	*counter += n
	d.budget.mu.devices[d] = true
	return nil
}

// change calls f with the budget locked. f must not increase the charge of d. change
// credits what the charge falls by, which notifies the spaces. It notifies them also when a promise
// ends, because the space may have room again although other allocations keep the charge up.
func (d *budgetedDevice) change(f func()) {
	b := d.budget
	b.mu.Lock()
	charged, promised := d.charged(), d.promised
	f()
	credit, ended := charged-d.charged(), d.promised < promised
	if d.charged() == 0 {
		delete(b.mu.devices, d)
	}
	b.mu.Unlock()
	if credit > 0 || ended {
		d.member.Credit(credit)
	}
}

// Alloc implements tier.Device. Over the limit it returns a tier.NoSpaceError, as any device
// without room does, whose cause is a tier.OutOfBudgetError, and does not call the wrapped device.
func (d *budgetedDevice) Alloc(s tier.Stream, size int64) (a tier.Addr, err error) {
	charge := max(0, size, d.inner.Charge(size))
	if err := d.charge(&d.allocated, charge); err != nil {
		if full, ok := errors.AsType[*tier.OutOfBudgetError](err); ok {
			err = &tier.NoSpaceError{
				Requested: size, Available: full.Remaining, Hint: "Budget.SetLimit raises the limit", Cause: err,
			}
		}
		return 0, err
	}
	allocated := false
	defer func() {
		d.change(func() {
			if !allocated || d.closed {
				d.allocated -= charge
				return
			}
			old := d.allocs[a] // freed, but not through d; else 0
			d.allocated -= old
			d.live += charge - old
			d.allocs[a] = charge
		})
	}()
	a, err = d.inner.Alloc(s, size)
	allocated = err == nil
	return a, err
}

// Free implements tier.Device. The bytes are credited when the device is done with them: at once if
// it frees synchronously, otherwise at the next reap, which is a call of Reap, a later Free, or a
// request that does not fit.
//
// A free that the device refuses, for example because its stream is closed, changes nothing. If the
// device was closed without the budget, its bytes stay charged until this Device is closed too.
func (d *budgetedDevice) Free(s tier.Stream, a tier.Addr) error {
	if err := d.free(s, a); err != nil {
		return err
	}
	d.Reap()
	return nil
}

func (d *budgetedDevice) free(s tier.Stream, a tier.Addr) error {
	var charge int64
	d.change(func() {
		charge = d.allocs[a]
		delete(d.allocs, a) // so that it cannot be freed twice
	})
	if charge == 0 {
		return fmt.Errorf("budget: no allocation starts at address %#x", uint64(a))
	}
	freed := false
	var event tier.Event
	defer func() {
		d.change(func() {
			switch {
			case !freed:
				d.allocs[a] = charge
			case !d.closed:
				d.live -= charge
				d.retired += charge
				d.frees = append(d.frees, &free{s, charge, event})
				for i, f := range d.frees { // an event is also after the earlier frees on its stream
					if f.stream == s && f.event == nil {
						d.frees[i] = &free{s, f.charge, event}
					}
				}
			}
		})
	}()
	if err := d.inner.Free(s, a); err != nil {
		return err
	}
	freed = true
	event, _ = d.inner.Record(s)
	return nil
}

// Reap implements tier.Device. It returns the bytes that were credited to the budget: those of
// frees whose event was done before the device was reaped, or all if the device has nothing
// outstanding then. The device's Outstanding is passed on as it is.
func (d *budgetedDevice) Reap() (credit int64) {
	d.budget.mu.Lock()
	frees := slices.Clone(d.frees)
	d.budget.mu.Unlock()
	pending := make(map[*free]bool)
	for _, f := range frees {
		pending[f] = f.event == nil || !isDone(f.event)
	}
	d.inner.Reap()
	idle := d.inner.Outstanding() == 0
	d.change(func() {
		d.frees = slices.DeleteFunc(d.frees, func(f *free) bool {
			busy, known := pending[f]
			finished := known && (idle || !busy)
			if finished {
				credit += f.charge
			}
			return finished
		})
		d.retired -= credit
		d.allocated -= credit
	})
	return credit
}

func isDone(e tier.Event) bool {
	select {
	case <-e.Done():
		return true
	default:
		return false
	}
}

// MemInfo implements tier.Device. The total is at most the limit, and the free bytes are at most
// what remains of the budget.
func (d *budgetedDevice) MemInfo() (free, total int64, err error) {
	free, total, err = d.inner.MemInfo()
	return min(free, max(0, d.member.Remaining())), min(total, d.member.Limit()), err
}

// Close implements tier.Device. It closes the wrapped device and credits what was charged for it,
// even if the device returns an error or was closed before, or if some of its memory stays because
// it is lent (tier.Lender): the budget does not count memory that others hold.
func (d *budgetedDevice) Close() error {
	err := d.inner.Close()
	d.change(func() {
		d.closed = true
		d.allocated -= d.live + d.retired
		d.promised, d.live, d.retired = 0, 0, 0
		d.frees = nil
	})
	return err
}

// Quota implements tier.Limited.
func (d *budgetedDevice) Quota() tier.Quota { return promises{d.member, d} }

// promises charges the reservations of the spaces over a device.
type promises struct {
	tier.Quota
	device *budgetedDevice
}

// Charge implements tier.Quota.
func (p promises) Charge(n int64) error { return p.device.charge(&p.device.promised, n) }

// Credit implements tier.Quota. It reaps first: the device may have finished with bytes that the
// space has freed, which would stay charged.
func (p promises) Credit(n int64) {
	d := p.device
	d.Reap()
	d.change(func() { d.promised -= n })
}
