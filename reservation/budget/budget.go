package budget

import (
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// Budget is one limit for everything that is allocated through the devices that Wrap has returned.
// It is safe for concurrent use and need not be closed.
type Budget struct {
	name string

	mu struct {
		lockrank.Mutex[lockrank.Backend]
		totals      Stats     // but for the sums over devices, which statsLocked adds
		devices     []*device // until they have left
		subscribers []*func()
	}
}

// New returns a budget of limit > 0 bytes. Its errors contain name, which should name the place
// where the limit was set; "" stands for a general name.
func New(limit int64, name string) (*Budget, error) {
	b := &Budget{name: cmp.Or(name, "the device budget")}
	if err := b.SetLimit(limit); err != nil {
		return nil, err
	}
	return b, nil
}

// SetLimit changes the limit to n > 0 bytes. It revokes nothing: while more than n bytes are
// charged, new requests are refused.
func (b *Budget) SetLimit(n int64) error {
	if n <= 0 {
		return fmt.Errorf("budget: a limit of %d bytes: it must be above 0", n)
	}
	b.update(func() { b.mu.totals.Limit = n })
	return nil
}

// Stats is a consistent snapshot of a budget. Sizes are in bytes, as the devices charge them. While
// no call is in progress and no space has promised anything, Reserved = Live + Retired. At all
// times, Admitted - Reclaimed = Live + Retired.
type Stats struct {
	Limit     int64
	Reserved  int64 // charged: what remains is Limit - Reserved, or nothing
	Live      int64 // in allocations that are in use
	Retired   int64 // freed, and not known to be finished
	Pending   int64 // in calls of Alloc that have not returned
	Promised  int64 // by spaces
	Peak      int64 // largest Reserved so far
	Admitted  int64 // allocated so far, and found when a device was wrapped; never falls
	Reclaimed int64 // credited so far; never falls
	Refused   int64 // requests that found no room
	Retries   int64 // requests that would have been refused without reaping
}

// Stats returns a snapshot of the budget.
func (b *Budget) Stats() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.statsLocked()
}

// statsLocked also records the peak. It is called before each change that lowers Reserved.
func (b *Budget) statsLocked() Stats {
	s := b.mu.totals
	for _, d := range b.mu.devices {
		s.Reserved += d.charged()
		s.Live += d.live + d.older
		s.Retired += d.retired()
		s.Pending += d.pending
		s.Promised += d.promised
		s.Admitted += d.admitted
		s.Reclaimed += d.reclaimed
	}
	s.Peak = max(s.Peak, s.Reserved)
	b.mu.totals.Peak = s.Peak
	return s
}

// Reap reaps every device of the budget and returns how many bytes were credited.
func (b *Budget) Reap() (n int64) {
	b.mu.Lock()
	devices := slices.Clone(b.mu.devices)
	b.mu.Unlock()
	for _, d := range devices {
		n += d.Reap()
	}
	return n
}

// Wrap returns dev under the budget. All allocations that count must go through the returned
// device, which is the one to close; dev must not be used for others. If dev is in the budget
// already, Wrap returns the device that it returned before: sharing a device means sharing its
// budget. The returned device has a method Unwrap, implements tier.Computer and tier.Limited, and
// is safe for concurrent use.
//
// Bytes that are outstanding on dev at that moment are charged as live. If they do not fit, Wrap
// returns an OutOfBudgetError.
func (b *Budget) Wrap(dev tier.Device) (tier.Device, error) {
	if dev == nil {
		return nil, errors.New("budget: there is no device to wrap")
	}
	older := max(0, dev.Outstanding())
	d := &device{
		decorator: decorator{dev}, root: innermost(dev), budget: b,
		users: 1, older: older, admitted: older, allocs: make(map[tier.Addr]*allocation),
	}
	name := dev.Info().Name
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, o := range b.mu.devices {
		switch {
		case same(o.inner, dev) || same(o, dev):
			o.users++
			return o, nil
		case same(o.root, d.root):
			return nil, fmt.Errorf("budget: %s is in the budget already, behind other decorators: "+
				"its bytes would count twice", name)
		}
	}
	if s := b.statsLocked(); older > 0 && older > s.Limit-s.Reserved { // an empty device always fits
		return nil, b.refusal(s, older)
	}
	b.mu.devices = append(b.mu.devices, d)
	return d, nil
}

// Release ends one use of a device that Wrap has returned, and leaves the wrapped device open. It
// is for callers that do not own the device. After the last use the device leaves the budget, which
// credits the bytes that Wrap found on it, and Wrap may return another device for it. The device
// stays while bytes are promised on it or allocated through it: they are charged until they are
// freed.
func (b *Budget) Release(dev tier.Device) {
	if d, ok := dev.(*device); ok && d.budget == b {
		d.Reap()
		b.update(func() { d.users = max(0, d.users-1) })
	}
}

// innermost returns the device at the bottom of a stack of decorators.
func innermost(dev tier.Device) tier.Device {
	for {
		w, ok := dev.(interface{ Unwrap() tier.Device })
		if !ok {
			return dev
		}
		dev = w.Unwrap()
	}
}

// same reports whether a and b are one device. Devices whose types are not comparable never are.
func same(a, b tier.Device) bool {
	return reflect.ValueOf(a).Comparable() && reflect.ValueOf(b).Comparable() && a == b
}

// admit charges n more bytes in d's counter, which is &d.pending or &d.promised. If they do not
// fit, but would if everything retired were free, it reaps and tries once more.
func (b *Budget) admit(d *device, counter *int64, n int64) error {
	reapable, err := b.tryAdmit(d, counter, n, false)
	if reapable {
		b.Reap()
		_, err = b.tryAdmit(d, counter, n, true)
	}
	return err
}

func (b *Budget) tryAdmit(d *device, counter *int64, n int64, reaped bool) (reapable bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if d.closed {
		return false, errClosed
	}
	// Promised and allocated bytes cover each other: only what exceeds the larger is charged.
	covered := max(d.promised, d.allocated()) - d.allocated()
	if counter == &d.promised {
		covered = max(d.promised, d.allocated()) - d.promised
	}
	s := b.statsLocked()
	missing := n - covered - max(0, s.Limit-s.Reserved)
	switch {
	case missing > 0 && missing <= s.Retired && !reaped:
		return true, nil
	case missing > 0:
		b.mu.totals.Refused++
		return false, b.refusal(s, n)
	case reaped:
		b.mu.totals.Retries++
	}
	*counter += n
	return false, nil
}

func (b *Budget) refusal(s Stats, requested int64) error {
	return &tier.OutOfBudgetError{
		Budget: b.name, Requested: requested, Remaining: max(0, s.Limit-s.Reserved),
		Current: s.Reserved, Limit: s.Limit,
	}
}

// update changes the budget by f, which must not charge more than before. Unused devices leave the
// budget then, and the subscribers are notified if there may be more room.
func (b *Budget) update(f func()) {
	b.mu.Lock()
	before := b.statsLocked()
	f()
	b.mu.devices = slices.DeleteFunc(b.mu.devices, func(d *device) bool {
		if d.users > 0 && !d.closed || d.promised > 0 || d.allocated() > 0 {
			return false
		}
		d.leave()
		b.mu.totals.Admitted += d.admitted
		b.mu.totals.Reclaimed += d.admitted
		return true
	})
	after := b.statsLocked()
	subscribers := slices.Clone(b.mu.subscribers)
	b.mu.Unlock()
	if after.Limit == before.Limit && after.Reserved >= before.Reserved && after.Promised >= before.Promised {
		return
	}
	lockrank.AssertNone("a budget's subscribers are called")
	for _, f := range subscribers {
		(*f)()
	}
}
