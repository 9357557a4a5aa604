// Package permit limits what transfers have under way: bytes of several budgets
// and spill slots, asked for all at once. A Permit is taken for the time of one
// transfer, where a reservation is kept for as long as there is data.
//
//	Request -- Acquire, TryAcquire --> Pool -- grants --> Permit -- Release --+
//	                                    ^ budgets, slots, waiters             |
//	                                    +-------------------------------------+
//
// A Pool has named budgets of bytes in a fixed order, and slots, which limit how many
// transfers write to disk at once. A Request names bytes of some of the budgets, or
// none, and may ask for a slot:
//
//	slots configured   asked   granted     CanSpill   Limited
//	n                  yes     one of n    yes        yes
//	n                  no      none        no         no
//	unlimited          yes     unlimited   yes        no
//	unlimited          no      none        no         no
//
// It is granted all or nothing, under one lock. So two requests for the same two budgets never hold
// one each and wait for the other.
//
// A pool of n slots grants n. An engine's monitor takes slots like its users, and writes without
// one, one transfer at a time, if all are taken: users may wait for the room that it makes.
//
// # Waiting
//
// Waiters are served first come, first served, with a bounded bypass. The oldest waiter for a
// budget, or for the slots, is its head. While a head does not fit, others that fit may be served
// before it, but at most Config.Bypass that need something of which it is the head. Then the pool
// keeps what is free of that for it. A request that needs nothing of that passes freely.
//
// A wait ends when the request is granted, when its context ends, by Close, or when lowered limits
// make it impossible to grant.
//
// Waits must point downwards: the holder of a permit must not wait for room in a memory, nor for
// another permit. A caller that needs both takes the room first and the permit last, around the
// transfer only.
//
// # Ownership
//
// The caller owns a Permit and must Release it once, on any goroutine. A Pool belongs to its
// creator. It owns no goroutine. Close wakes the waiters and reports the permits that are still
// held. Those stay valid until they are released.
//
// # Locks
//
// A Pool has one mutex, of the rank Reservation. No lock is taken under it.
package permit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/fairqueue"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// The budgets that a pool has by default. The converters of disks charge Host for the pinned memory
// that a transfer uses.
const (
	Device = "device" // the budget of device memory
	Host   = "host"   // the budget of pinned host memory
)

// Unlimited as a number of slots means that every request for a slot is granted one.
const Unlimited = -1

// Budget is a named number of bytes.
type Budget struct {
	Name  string
	Bytes int64
}

// Config describes a Pool. The zero value has 256 MiB of Device, 512 MiB of Host, and 16 slots. A
// budget of 0 bytes, an empty list of budgets and 0 slots are errors.
type Config struct {
	// Budgets are the pool's budgets in their order. Nil means Device and
	// Host; an empty list that is not nil is an error.
	Budgets []Budget
	// Slots is the number of spill slots, as new(8), or Unlimited. Nil means 16.
	Slots *int
	// Bypass is how many requests may be served before a head while that does not fit. 0 means 16.
	// If it is negative, no request may bypass a head.
	Bypass int
}

// Validate returns the error that New would return.
func (c Config) Validate() error {
	_, err := New(c)
	return err
}

// Request lists what a permit is to have. The zero value asks for nothing, and each open pool
// grants it.
type Request struct {
	Bytes map[string]int64 // by the names of the budgets
	Spill bool             // a slot, which writing to disk requires
	// Capped limits each number of bytes to the budget's total. It is for transfers that can work
	// with less, and must not be refused when a budget is small.
	Capped bool
}

// ErrNoBudget reports that a request names a budget that the pool does not have. Other errors match
// tier.ErrOutOfBudget (not now), reservation.ErrExceeded (never), tier.ErrReleased and
// tier.ErrClosed.
var ErrNoBudget = errors.New("no such budget")

// LeakError reports that permits were still held at Close. Pool.Stats returns what they hold.
type LeakError struct{ Permits int }

func (e *LeakError) Error() string {
	return fmt.Sprintf("permit: %d permits were not released (Pool.Stats returns what they hold)", e.Permits)
}

// Stats are a pool's numbers at one moment.
type Stats struct {
	Budgets []BudgetStats // in the pool's order
	Waiting int           // requests that wait

	Slots     int // or Unlimited
	HeldSlots int // may be above Slots after SetSlots
	FreeSlots int // 0 if Slots is Unlimited
}

// BudgetStats are one budget's bytes. Held may be above Total after SetTotal.
type BudgetStats struct {
	Name        string
	Total, Held int64
}

// Pool grants permits. It is safe for concurrent use. The package doc describes its fairness.
type Pool struct {
	// all are the slots, which are counted as bytes are, and then the budgets in their order. A
	// Total of math.MaxInt64 is no limit. The names never change; mu guards the numbers.
	all    []BudgetStats
	number map[string]int // of a budget in all
	bypass int

	mu struct {
		lockrank.Mutex[lockrank.Reservation]
		queue  []*Permit // waiters, in order of arrival
		held   int       // permits
		closed bool
	}
}

// New returns a pool, which the caller must Close.
func New(cfg Config) (*Pool, error) {
	if cfg.Budgets == nil {
		cfg.Budgets = []Budget{{Device, 256 << 20}, {Host, 512 << 20}}
	}
	if len(cfg.Budgets) == 0 {
		return nil, errors.New("permit: a pool needs a budget (nil means the defaults)")
	}
	p := &Pool{all: make([]BudgetStats, 1), number: make(map[string]int), bypass: cmp.Or(cfg.Bypass, 16)}
	for _, b := range cfg.Budgets {
		if b.Name == "" || p.number[b.Name] > 0 || b.Bytes < 1 {
			return nil, fmt.Errorf("permit: budget %q of %d bytes: want a name of its own and more than 0 bytes",
				b.Name, b.Bytes)
		}
		p.number[b.Name] = len(p.all)
		p.all = append(p.all, BudgetStats{Name: b.Name, Total: b.Bytes})
	}
	if err := p.SetSlots(*cmp.Or(cfg.Slots, new(16))); err != nil {
		return nil, err
	}
	return p, nil
}

// TryAcquire grants all of r now, or changes nothing. Too little of a budget is a
// *tier.OutOfBudgetError, no free slot an error that matches tier.ErrOutOfBudget. A request that
// can never be granted is an error that matches reservation.ErrExceeded. The caller must Release
// the permit.
func (p *Pool) TryAcquire(r Request) (*Permit, error) { return p.request(r, false) }

// Acquire is TryAcquire that waits, first come, first served. A request that can never be granted
// fails at once. So does a wait when limits are lowered that far. ctx ends a wait, with an error
// that matches its cause and its Err. Close ends it with tier.ErrClosed. Nothing is taken in either
// case.
func (p *Pool) Acquire(ctx context.Context, r Request) (*Permit, error) {
	if ctx.Err() != nil {
		return nil, fairqueue.Ended(ctx, "permit: not granted")
	}
	got, err := p.request(r, true)
	if err != nil || got.done == nil {
		return got, err
	}
	lockrank.AssertNone("a permit is waited for")
	select {
	case <-got.done:
	case <-ctx.Done():
		p.mu.Lock()
		if i := slices.Index(p.mu.queue, got); i >= 0 { // else the wait has ended at the same moment
			got.err = fairqueue.Ended(ctx, "permit: not granted")
			p.mu.queue = slices.Delete(p.mu.queue, i, i+1)
			p.serveLocked() // some of what is free may have been kept for it
		}
		p.mu.Unlock()
	}
	if got.err != nil {
		return nil, got.err
	}
	return got, nil
}

// request grants r if it fits. If not, it refuses r or, if wait is set, leaves it in the queue.
func (p *Pool) request(r Request, wait bool) (*Permit, error) {
	got := &Permit{pool: p, has: make([]int64, len(p.all)), capped: r.Capped}
	for name, n := range r.Bytes {
		i := p.number[name]
		if i == 0 {
			return nil, fmt.Errorf("permit: %q: %w", name, ErrNoBudget)
		}
		if n < 0 {
			return nil, fmt.Errorf("permit: %d bytes of budget %q: want at least 0", n, name)
		}
		got.has[i] = n
	}
	if r.Spill {
		got.has[0] = 1
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.closed {
		return nil, errClosed
	}
	p.mu.queue = append(p.mu.queue, got)
	lacks := p.serveLocked()
	switch {
	case got.err != nil:
		return nil, got.err
	case lacks < 0:
		return got, nil
	case wait:
		got.done = make(chan struct{})
		return got, nil
	}
	p.mu.queue = p.mu.queue[:len(p.mu.queue)-1]
	of := p.all[lacks]
	if lacks == 0 {
		return nil, fmt.Errorf("permit: no spill slot is free: %d of %d are taken (SetSlots makes them more): %w",
			of.Held, of.Total, tier.ErrOutOfBudget)
	}
	return nil, &tier.OutOfBudgetError{
		Budget: fmt.Sprintf("permit budget %q (SetTotal makes it larger)", of.Name), Requested: got.has[lacks],
		Remaining: max(0, of.Total-of.Held), Current: of.Held, Limit: of.Total,
	}
}

// serveLocked removes the requests that fit from the queue, the oldest first, and those that can
// never fit. Those behind a request that it grants cannot have made one before it fit, so one pass
// is enough. It returns something that the last request in the queue lacks, by its number, or -1 if
// it is granted.
func (p *Pool) serveLocked() (lacks int) {
	heads := make([]*Permit, len(p.all)) // of each of all
	p.mu.queue = slices.DeleteFunc(p.mu.queue, func(w *Permit) bool {
		lacks = -1
		for i, n := range w.has {
			of, head := &p.all[i], heads[i]
			if n > of.Total && w.capped {
				n, w.has[i] = of.Total, of.Total
			}
			kept := head != nil && head.bypassed >= p.bypass && of.Total < math.MaxInt64
			switch {
			case n > of.Total:
				w.err = fmt.Errorf("permit: %d bytes of budget %q, which has %d in all (SetTotal makes it larger): %w",
					n, of.Name, of.Total, reservation.ErrExceeded)
			case n > 0 && (kept || n > of.Total-of.Held):
				lacks = i
			}
		}
		granted := lacks < 0 && w.err == nil
		var passed []*Permit // heads that have counted w
		for i, n := range w.has {
			head := heads[i]
			switch {
			case n == 0 || w.err != nil:
			case granted:
				p.all[i].Held += n
				if head != nil && !slices.Contains(passed, head) {
					head.bypassed++
					passed = append(passed, head)
				}
			case head == nil:
				heads[i] = w
			}
		}
		if granted {
			w.limited = p.all[0].Total < math.MaxInt64
			p.mu.held++
		}
		over := granted || w.err != nil
		if over && w.done != nil {
			close(w.done)
		}
		return over
	})
	return lacks
}

// Total returns the bytes of a whole budget, and false if the pool has none of that name.
func (p *Pool) Total(name string) (bytes int64, ok bool) {
	i := p.number[name]
	p.mu.Lock()
	defer p.mu.Unlock()
	if i == 0 {
		return 0, false
	}
	return p.all[i].Total, true
}

// Stats returns a consistent picture of the pool.
func (p *Pool) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	slots := p.all[0]
	s := Stats{
		Budgets: slices.Clone(p.all[1:]), Waiting: len(p.mu.queue),
		Slots: Unlimited, HeldSlots: int(slots.Held),
	}
	if slots.Total != math.MaxInt64 {
		s.Slots = int(slots.Total)
		s.FreeSlots = max(0, s.Slots-s.HeldSlots)
	}
	return s
}

// SetTotal changes the bytes of a budget while it is in use. Permits keep their bytes. A waiter
// that needs more than the new total is refused with an error that matches reservation.ErrExceeded.
// It is an error if bytes is 0 or less.
func (p *Pool) SetTotal(name string, bytes int64) error {
	i := p.number[name]
	switch {
	case i == 0:
		return fmt.Errorf("permit: %q: %w", name, ErrNoBudget)
	case bytes < 1:
		return fmt.Errorf("permit: budget %q of %d bytes: want more than 0", name, bytes)
	}
	p.setTotal(i, bytes)
	return nil
}

// SetSlots changes the number of slots while they are in use, with the meaning of Config.Slots.
// Permits keep their slots.
func (p *Pool) SetSlots(n int) error {
	switch {
	case n == Unlimited:
		n = math.MaxInt
	case n < 1:
		return fmt.Errorf("permit: a pool of %d slots: want at least 1, or Unlimited", n)
	}
	p.setTotal(0, int64(n))
	return nil
}

func (p *Pool) setTotal(i int, total int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all[i].Total = total
	p.serveLocked()
}

// Close ends all waits with tier.ErrClosed and refuses requests from now on. It reports held
// permits as a *LeakError; they stay valid and must be released. A second Close returns
// tier.ErrClosed.
func (p *Pool) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.closed {
		return errClosed
	}
	p.mu.closed = true
	for _, w := range p.mu.queue {
		w.err = errClosed
		close(w.done)
	}
	p.mu.queue = nil
	if p.mu.held > 0 {
		return &LeakError{p.mu.held}
	}
	return nil
}

var errClosed = fmt.Errorf("permit: the pool is %w", tier.ErrClosed)

// Permit is a granted request, and must be released once. It may be used on any goroutine; after
// its release it has nothing. Release of a nil Permit does nothing.
//
// The pool makes a permit when it gets the request. If that does not fit, the permit is in the
// queue. A call that releases something, or changes a limit, grants it; the end of its context,
// Close, and a budget that has become too small set err. Each of them removes it from the queue and
// wakes the goroutine that waits. From the grant to its release, what it has counts as held and
// does not change.
type Permit struct {
	pool     *Pool
	has      []int64 // 0 or 1 slot, and bytes, as in pool.all; before the grant what it needs
	capped   bool
	limited  bool // it was granted while the slots were limited
	released atomic.Bool

	bypassed int           // requests that were served before it while it was a head
	done     chan struct{} // nil if it never waited
	err      error
}

// Bytes returns how many bytes of a budget the permit has; after its release 0.
func (p *Permit) Bytes(name string) int64 {
	i := p.pool.number[name]
	if i == 0 || p.released.Load() {
		return 0
	}
	return p.has[i]
}

// TotalBytes returns how many bytes the permit has of all budgets together. After its release it
// returns tier.ErrReleased.
func (p *Permit) TotalBytes() (total int64, err error) {
	if p.released.Load() {
		return 0, fmt.Errorf("permit: total bytes: %w", tier.ErrReleased)
	}
	for _, n := range p.has[1:] {
		total += n
	}
	return total, nil
}

// CanSpill reports whether the permit has a slot, so that its holder may write to disk.
func (p *Permit) CanSpill() bool { return p.has[0] > 0 && !p.released.Load() }

// Limited reports whether the permit's slot is one of a limited number.
func (p *Permit) Limited() bool { return p.limited && p.CanSpill() }

// Release gives everything back, and serves the requests that wait for it. A second release changes
// nothing and returns tier.ErrReleased. Release of a nil Permit does nothing.
func (p *Permit) Release() error {
	if p == nil {
		return nil
	}
	if p.released.Swap(true) {
		return fmt.Errorf("permit: %w", tier.ErrReleased)
	}
	p.pool.mu.Lock()
	defer p.pool.mu.Unlock()
	p.pool.mu.held--
	for i, n := range p.has {
		p.pool.all[i].Held -= n
	}
	p.pool.serveLocked()
	return nil
}
