package reservation

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/lockrank"
)

// Owner is a task that reserves. What it holds and what it waits for is examined together. So tasks
// that wait for each other are found, and one of them gets ErrDeadlock. Pass it to each reservation
// of the task with WithOwner, and a context of it to what reserves on the task's behalf.
//
// To the manager an owner exists while it has an open reservation or waits. It counts as running
// until as many of its goroutines wait as it has: a running owner may release something. See
// SetWorkers. An owner belongs to the manager that it is first used with. It is safe for concurrent
// use and needs no closing.
type Owner struct {
	name    string
	workers atomic.Int64
	manager atomic.Pointer[Manager]

	// Guarded by owners.Mutex of the manager.
	open map[Reservation]struct{}
	told told
}

// told is what became of the advice to roll back.
type told struct {
	is         bool
	past       int64 // what the owner would have had, had it been served
	rolledBack bool  // it has let go of everything since
	again      bool  // and was served after that
}

// NewOwner returns an owner of one goroutine. The name is for error messages.
func NewOwner(name string) *Owner { return &Owner{name: name} }

// Name returns the owner's name.
func (o *Owner) Name() string { return o.name }

// SetWorkers says how many goroutines work for the owner, and so how many must wait
// before nothing can be expected of it. Below 1 is 1.
func (o *Owner) SetWorkers(n int) {
	o.workers.Store(int64(n))
	o.changed()
}

// changed records a change of what the owner holds, or of what works for it.
func (o *Owner) changed() {
	if o == nil {
		return
	}
	if m := o.manager.Load(); m != nil {
		m.progress.changes.Add(1)
	}
}

func (o *Owner) goroutines() int { return int(max(1, o.workers.Load())) }

// Context returns a context whose waits are the owner's: those of requests made with it that name
// no owner themselves, such as what a mover reserves to bring a batch up. What such requests get
// does not count as held by the owner, because it is soon the batch's. Handles and records that are
// opened with the context are the owner's, and so is the memory that they keep. So an owner of one
// goroutine that waits for room which its own handles and records keep gets the error at once.
func (o *Owner) Context(ctx context.Context) context.Context {
	return context.WithValue(ctx, ownerKey{}, o)
}

type ownerKey struct{}

// OwnerOf returns the owner that Context put into ctx, or nil.
func OwnerOf(ctx context.Context) *Owner {
	o, _ := ctx.Value(ownerKey{}).(*Owner)
	return o
}

// WithOwner sets the owner of the reservation and of its waits, also those of Grow. Nil means no
// owner.
func WithOwner(o *Owner) Option {
	return func(opts options) options { opts.owner = o; return opts }
}

var errOtherManager = errors.New("reservation: the owner belongs to another manager")

// join makes o the manager's.
func (o *Owner) join(m *Manager) error {
	if o == nil || o.manager.Load() == m || o.manager.CompareAndSwap(nil, m) || o.manager.Load() == m {
		return nil
	}
	return errOtherManager
}

// SetOwner sets the reservation's owner from now on, as WithOwner does when it is made. It is for
// requests that wait without an owner, such as those of a task that holds nothing until it is
// admitted. A reservation that has an owner, or was released, is an error.
func (r Reservation) SetOwner(o *Owner) error {
	if r.rec == nil {
		return errReleased("setting the owner")
	}
	if err := o.join(r.rec.line.m); err != nil || o == nil {
		return err
	}
	rec := r.lock()
	if rec == nil {
		return errReleased("setting the owner")
	}
	owned := rec.mu.options.owner != nil
	if !owned {
		rec.mu.optioned, rec.mu.options.owner = true, o
	}
	rec.mu.Unlock()
	if owned {
		return errors.New("reservation: it has an owner already")
	}
	o.opened(r)
	if _, open := r.settings(); !open { // released meanwhile
		o.closed(r, 0)
	}
	return nil
}

// Owner returns the reservation's owner; nil if it has none, or was released.
func (r Reservation) Owner() *Owner {
	o, _ := r.settings()
	return o.owner
}

// owners is the manager's table of owners with open reservations.
type owners struct {
	lockrank.Mutex[lockrank.Reservation] // never held with another of this rank
	open                                 map[*Owner]struct{}
	changes                              atomic.Uint64 // reservations opened and closed so far
}

// opened notes a new reservation of o. Its bytes are charged already, and in closed
// not yet given back: so what owners hold never seems to be more than what is used.
func (o *Owner) opened(r Reservation) {
	if o == nil {
		return
	}
	t := &o.manager.Load().progress.owners
	t.Lock()
	if o.open == nil {
		o.open = make(map[Reservation]struct{})
	}
	t.open[o] = struct{}{}
	o.open[r] = struct{}{}
	t.changes.Add(1)
	o.changed()
	o.told.again = o.told.rolledBack
	t.Unlock()
	o.gotPast(0)
}

// closed notes that r, which promised so much, is being released.
func (o *Owner) closed(r Reservation, promised int64) {
	if o == nil {
		return
	}
	o.gotPast(promised)
	t := &o.manager.Load().progress.owners
	t.Lock()
	defer t.Unlock()
	delete(o.open, r)
	t.changes.Add(1)
	o.changed()
	if len(o.open) > 0 {
		return
	}
	delete(t.open, o)
	if o.told.again { // a whole round without the error
		o.told = told{}
	}
	o.told.rolledBack = o.told.is
}

// gotPast forgets that o was advised to roll back, once it holds what it would have held if it had
// been served then: the next deadlock is another one. beside is what it holds, or held until now,
// in no open reservation, handle or record.
func (o *Owner) gotPast(beside int64) {
	if o == nil {
		return
	}
	m := o.manager.Load()
	t := &m.progress.owners
	t.Lock()
	if !o.told.is {
		t.Unlock()
		return
	}
	open := slices.Collect(maps.Keys(o.open))
	t.Unlock()
	b := m.observeHeld(map[*Owner][]Reservation{o: open})
	b.Settle()
	t.Lock()
	defer t.Unlock()
	if o.told.is && beside+b.AddOwner(o, 1).Total >= o.told.past {
		o.told = told{}
	}
}

// reservations returns the open reservations of all owners, and how many were opened and closed.
func (t *owners) reservations() (open map[*Owner][]Reservation, changes uint64) {
	t.Lock()
	defer t.Unlock()
	open = make(map[*Owner][]Reservation, len(t.open))
	for o := range t.open {
		open[o] = slices.Collect(maps.Keys(o.open))
	}
	return open, t.changes.Load()
}
