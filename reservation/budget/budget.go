package budget

import (
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/notify"
	"github.com/spillway-db/spillway/tier"
)

// Budget is one limit over all that is allocated through the devices that Wrap
// has returned. It is safe for concurrent use, has no goroutine, and need not be
// closed.
type Budget struct {
	name string

	subscribers notify.List

	mu struct {
		lockrank.Mutex[lockrank.Backend]
		limit    int64
		reserved int64 // the sum of the devices' charged()
		peak     int64
		// Totals that never fall. Their difference is what is live and retired, so a
		// release shows in one of them whatever is admitted at the same time; a
		// difference of what was outstanding before and after would be hidden by that.
		admitted  int64
		reclaimed int64
		refused   int64
		retries   int64
		devices   []*device // not closed
	}
}

// New returns a budget of limit > 0 bytes. Errors call it by its name, which should say where it
// was set; "" is a general one.
func New(limit int64, name string) (*Budget, error) {
	if limit <= 0 {
		return nil, fmt.Errorf("budget: a limit of %d bytes: it must be above 0", limit)
	}
	b := &Budget{name: cmp.Or(name, "the device budget")}
	b.mu.limit = limit
	return b, nil
}

// SetLimit changes the limit to n > 0 bytes. It revokes nothing: a limit below what
// is charged only refuses what is new.
func (b *Budget) SetLimit(n int64) error {
	if n <= 0 {
		return fmt.Errorf("budget: a limit of %d bytes: it must be above 0", n)
	}
	b.mu.Lock()
	changed := b.mu.limit != n
	b.mu.limit = n
	b.mu.Unlock()
	if changed {
		b.notify()
	}
	return nil
}

// Stats is a consistent cut through a budget's books. Sizes are in bytes, as the
// devices charge them. While no call is under way and no space has promised
// anything, Reserved = Live + Retired; always, Admitted - Reclaimed = Live +
// Retired.
type Stats struct {
	Limit     int64
	Reserved  int64 // charged: what remains is Limit - Reserved, or nothing
	Live      int64 // in allocations that are in use
	Retired   int64 // freed, and not known to be finished with
	Pending   int64 // in calls of Alloc that have not returned
	Promised  int64 // by spaces
	Peak      int64 // largest Reserved so far
	Admitted  int64 // allocated so far, and found when a device was wrapped; never falls
	Reclaimed int64 // come back so far; never falls
	Refused   int64 // requests that found no room
	Retries   int64 // requests that would have been refused without the reaping
}

// Stats returns the books.
func (b *Budget) Stats() Stats {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := Stats{
		Limit: b.mu.limit, Reserved: b.mu.reserved, Peak: b.mu.peak,
		Admitted: b.mu.admitted, Reclaimed: b.mu.reclaimed, Refused: b.mu.refused, Retries: b.mu.retries,
	}
	for _, d := range b.mu.devices {
		s.Live += d.books.live + d.books.older
		s.Retired += d.books.retired()
		s.Pending += d.books.pending
		s.Promised += d.books.promised
	}
	return s
}

// Reap asks every device of the budget for what it is done with and returns how many
// bytes were credited.
func (b *Budget) Reap() int64 {
	var n int64
	b.mu.Lock()
	devices := slices.Clone(b.mu.devices)
	b.mu.Unlock()
	for _, d := range devices {
		n += d.Reap()
	}
	return n
}

// Wrap returns dev behind the budget. All allocations that count must go through the returned
// device, which is the one to close. dev must not be used for others. If the budget has dev
// already, Wrap returns the device that it has: sharing a device means sharing its budget. The
// returned device has a method Unwrap, implements tier.Computer, has a tier.Quota for spaces, and
// is safe for concurrent use.
//
// What is outstanding on dev at that moment is charged as live; if there is no room
// for it, that is an OutOfBudgetError.
func (b *Budget) Wrap(dev tier.Device) (tier.Device, error) {
	if dev == nil {
		return nil, errors.New("budget: there is no device to wrap")
	}
	d := &device{inner: dev, budget: b, root: innermost(dev), users: 1}
	name, older := dev.Info().Name, max(0, dev.Outstanding())
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, o := range b.mu.devices {
		switch {
		case same(o.inner, dev) || same(o, dev):
			o.users++
			return o, nil
		case same(o.root, d.root):
			return nil, fmt.Errorf("budget: %s is in the budget already, behind other decorators: its bytes would count twice", name)
		}
	}
	if older > 0 && older > b.mu.limit-b.mu.reserved { // nothing fits also into a limit that was lowered
		return nil, b.refusalLocked(older)
	}
	d.books.older = older
	d.books.allocs = make(map[tier.Addr]*allocation)
	d.books.marks = make(map[tier.Stream][]markedFree)
	b.mu.devices = append(b.mu.devices, d)
	b.mu.admitted += older
	b.changedLocked(older)
	return d, nil
}

// Release ends one use of a device that Wrap has returned, and leaves the wrapped device open. It
// is for callers that do not own the device. With the last use the device leaves the budget, and
// what was outstanding when it was wrapped is credited. Wrap may return another device for it then.
// While bytes are promised on dev, or allocated through it, it stays: they are charged until they
// are freed.
func (b *Budget) Release(dev tier.Device) {
	d, ok := dev.(*device)
	if !ok || d.budget != b {
		return
	}
	d.Reap()
	b.update(d, func() { d.users = max(0, d.users-1) })
}

// innermost is the device at the bottom of a stack of decorators.
func innermost(dev tier.Device) tier.Device {
	for {
		w, ok := dev.(interface{ Unwrap() tier.Device })
		if !ok {
			return dev
		}
		dev = w.Unwrap()
	}
}

// same compares devices, of which those that cannot be compared are none but
// themselves.
func same(a, b tier.Device) bool {
	return reflect.ValueOf(a).Comparable() && reflect.ValueOf(b).Comparable() && a == b
}

// request is what would be added to a device's books.
type request struct {
	alloc   int64 // to pending
	promise int64 // to promised
}

// admit charges a request of d's, or refuses it. If it does not fit, but would if
// everything were reaped that is retired, it reaps and tries once more.
func (b *Budget) admit(d *device, r request) error {
	could, err := b.tryAdmit(d, r, true)
	if err == nil || !could {
		return err
	}
	lockrank.AssertNone("a device reaps")
	b.Reap()
	_, err = b.tryAdmit(d, r, false)
	return err
}

// tryAdmit checks and charges in one step, and says of what it refuses whether
// reaping could help. What may be tried again does not count as refused yet.
func (b *Budget) tryAdmit(d *device, r request, first bool) (could bool, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if d.books.closed {
		return false, fmt.Errorf("budget: the device is %w", tier.ErrClosed)
	}
	n, ok := d.books.more(r)
	if !ok || n > 0 && n > b.mu.limit-b.mu.reserved {
		if ok && first && n <= b.mu.limit-(b.mu.reserved-b.reapableLocked()) {
			return true, b.refusalLocked(r.alloc + r.promise)
		}
		b.mu.refused++
		return false, b.refusalLocked(r.alloc + r.promise)
	}
	if !first {
		b.mu.retries++
	}
	d.books.pending += r.alloc
	d.books.promised += r.promise
	b.changedLocked(n)
	return false, nil
}

// changedLocked notes that n more bytes are charged.
func (b *Budget) changedLocked(n int64) {
	b.mu.reserved += n
	b.mu.peak = max(b.mu.peak, b.mu.reserved)
}

// reapableLocked is how many bytes a reap could credit at most.
func (b *Budget) reapableLocked() (n int64) {
	for _, d := range b.mu.devices {
		n += d.books.reapable()
	}
	return n
}

func (b *Budget) refusalLocked(requested int64) *tier.OutOfBudgetError {
	return &tier.OutOfBudgetError{
		Budget: b.name, Requested: requested, Remaining: max(0, b.mu.limit-b.mu.reserved),
		Current: b.mu.reserved, Limit: b.mu.limit,
	}
}

// update changes d's books by f, which must not charge more than before. It notifies the
// subscribers if that made room.
func (b *Budget) update(d *device, f func()) {
	if b.change(d, f) > 0 {
		b.notify()
	}
}

// change is update without notifying the subscribers. It returns how much less is charged.
func (b *Budget) change(d *device, f func()) (less int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	before := d.books.charged()
	f()
	if d.users == 0 && d.books.unused() {
		b.leaveLocked(d)
	}
	less = before - d.books.charged()
	b.changedLocked(-less)
	return less
}

// notify wakes the waiters: there may be more room.
func (b *Budget) notify() {
	if b.subscribers.IsEmpty() {
		return
	}
	lockrank.AssertNone("a budget's subscribers are called")
	b.subscribers.Each(func(f func()) { f() })
}

// leaveLocked credits what is charged for a device and removes it. Its calls fail from then on.
func (b *Budget) leaveLocked(d *device) {
	b.mu.reclaimed += d.books.older + d.books.live + d.books.retired()
	d.books = books{closed: true, pending: d.books.pending}
	b.mu.devices = slices.DeleteFunc(b.mu.devices, func(o *device) bool { return o == d })
}
