package budget

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// Device is a device behind a budget; Budget.Wrap makes it. It implements
// tier.Device and tier.Computer and hands everything on to the device that it wraps,
// with streams, events and peers as they are. It is safe for concurrent use.
//
// A panic of the wrapped device goes on to the caller, with the books as they would
// be after an error: who calls devices makes panics errors where the stack has been
// looked at, as tier.Space does, and a decorator should not be what hides it.
type Device struct {
	inner  tier.Device
	root   tier.Device // what inner is at the bottom
	budget *Budget
	books  books // guarded by budget.mu
}

var (
	_ tier.Device   = (*Device)(nil)
	_ tier.Computer = (*Device)(nil)
)

// Unwrap returns the device behind the budget.
func (d *Device) Unwrap() tier.Device { return d.inner }

// Budget returns the budget.
func (d *Device) Budget() *Budget { return d.budget }

// Info implements tier.Device.
func (d *Device) Info() tier.DeviceInfo { return d.inner.Info() }

// Charge implements tier.Device.
func (d *Device) Charge(size int64) int64 { return d.inner.Charge(size) }

const hint = "a higher limit of the budget would help"

// Alloc implements tier.Device. Over the limit it is a tier.NoSpaceError, as of any
// device without room, whose cause is a tier.OutOfBudgetError; the wrapped device is
// not called then.
func (d *Device) Alloc(s tier.Stream, size int64) (a tier.Addr, err error) {
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
		d.Reap() // what this call has hidden from those who reaped meanwhile
	}
	return a, nil
}

// allocated notes an allocation, and says whether there are frees that only
// Outstanding tells about.
func (d *Device) allocated(a tier.Addr, charge int64) (vague bool) {
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

// Free implements tier.Device. The bytes are credited when the device is done with
// them, which is at once if it frees synchronously, and else when somebody reaps:
// through Reap, by a later Free, or because a request does not fit.
//
// An event that tells about it is recorded here, behind the free. If the device
// refuses to record it, or the event says that the stream has failed, the device's
// Outstanding tells instead. That is also how the bytes of allocations are credited
// that are older than the budget, and those of a synchronous free.
//
// A free that the device refuses, also because its stream is closed, changes
// nothing. If the device was closed behind the budget's back its bytes stay charged
// until this Device is closed too.
func (d *Device) Free(s tier.Stream, a tier.Addr) error {
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
func (d *Device) beginFree(a tier.Addr) (*allocation, error) {
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
func (d *Device) free(s tier.Stream, a tier.Addr, f *allocation) error {
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
func (d *Device) endFree(s tier.Stream, a tier.Addr, f *allocation, freed bool, e tier.Event) {
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
		if b.allocs[a] == f { // else the address is somebody else's by now
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

// Reap implements tier.Device. It returns the bytes that were credited to the
// budget.
func (d *Device) Reap() int64 {
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

// Outstanding implements tier.Device: it is what the wrapped device says, which may
// have finished with more than was credited so far.
func (d *Device) Outstanding() int64 { return d.inner.Outstanding() }

// MemInfo implements tier.Device. The total is the limit if that is less than the
// device has, and what is free is no more than remains of the budget.
func (d *Device) MemInfo() (free, total int64) {
	free, total = d.inner.MemInfo()
	b := d.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	return min(free, max(0, b.mu.limit-b.mu.reserved)), min(total, b.mu.limit)
}

// Close implements tier.Device. It closes the wrapped device; what was charged for
// it is credited, for its memory is gone, and it leaves the budget. That is so too if
// the device says that it was closed before, or that something went wrong, and if some
// of the memory stays because it is lent (tier.Lender): the budget knows nothing of what others have.
func (d *Device) Close() error {
	lockrank.AssertNone("a device is closed")
	err := d.inner.Close()
	b := d.budget
	b.update(d, func() {
		b.mu.reclaimed += d.books.older + d.books.live + d.books.retired()
		d.books = books{closed: true, pending: d.books.pending}
		b.leaveLocked(d)
	})
	return err
}

// CopyToDevice implements tier.Device.
func (d *Device) CopyToDevice(s tier.Stream, dst tier.Addr, src []byte) error {
	return d.inner.CopyToDevice(s, dst, src)
}

// CopyToHost implements tier.Device.
func (d *Device) CopyToHost(s tier.Stream, dst []byte, src tier.Addr) error {
	return d.inner.CopyToHost(s, dst, src)
}

// CopyPeer implements tier.Device. The peer is handed on as it is: the device that
// copies unwraps it.
func (d *Device) CopyPeer(s tier.Stream, dst tier.Addr, dstDevice tier.Device, src tier.Addr, size int64) error {
	return d.inner.CopyPeer(s, dst, dstDevice, src, size)
}

// CopyRegions implements tier.Device.
func (d *Device) CopyRegions(s tier.Stream, regions []tier.Region) error {
	return d.inner.CopyRegions(s, regions)
}

// Fill implements tier.Device.
func (d *Device) Fill(s tier.Stream, dst tier.Addr, value byte, size int64) error {
	return d.inner.Fill(s, dst, value, size)
}

// NewStream implements tier.Device.
func (d *Device) NewStream() (tier.Stream, error) { return d.inner.NewStream() }

// Record implements tier.Device.
func (d *Device) Record(s tier.Stream) (tier.Event, error) { return d.inner.Record(s) }

// WaitEvent implements tier.Device.
func (d *Device) WaitEvent(s tier.Stream, e tier.Event) error { return d.inner.WaitEvent(s, e) }

// Digest implements tier.Computer: ErrNotSupported if the wrapped device does not
// compute.
func (d *Device) Digest(s tier.Stream, src tier.Addr, size, first int64, out *tier.Digest) error {
	return digest(d.inner, s, src, size, first, out)
}

func digest(inner tier.Device, s tier.Stream, src tier.Addr, size, first int64, out *tier.Digest) error {
	c, ok := inner.(tier.Computer)
	if !ok {
		return fmt.Errorf("budget: %s does not compute: %w", inner.Info().Name, tier.ErrNotSupported)
	}
	return c.Digest(s, src, size, first, out)
}
