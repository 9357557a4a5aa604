// Package permit limits what transfers have under way: bytes of several budgets
// and spill slots, asked for all at once. A Permit is taken for the time of one
// transfer, where a reservation is kept for as long as there is data.
//
//	Request ── Acquire, TryAcquire ──▶ Pool ── grants ──▶ Permit ── Release ──┐
//	                                    ▲ budgets, slots, waiters             │
//	                                    └─────────────────────────────────────┘
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
// Waiters are served first come, first served, with a bounded bypass. Each budget has a line of the
// waiters that need some of it, and so have the slots. While the head of a line does not fit, others
// that fit may be served before it, but at most Config.Bypass. Then the pool keeps for it what is free
// of everything of which it heads the line. A request that needs nothing of that passes freely.
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
	"iter"
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
	// Bypass is how many requests may be served before the head of a line while that does not fit. 0
	// means 16. If it is negative, no request may bypass the head.
	Bypass int
}

// Validate returns the error that New would return.
func (c Config) Validate() error {
	_, err := New(c)
	return err
}

// Request lists what a permit is to have. The zero value asks for nothing, and each open pool grants
// it.
type Request struct {
	Bytes map[string]int64 // by the names of the budgets
	Spill bool             // a slot, which writing to disk requires
	// Capped limits each number of bytes to the budget's total. It is for transfers that can work with
	// less, and must not be refused when a budget is small.
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
	budgets []*budget // in their order
	slots   *budget   // counts slots instead of bytes; a Total of math.MaxInt64 is no limit
	bypass  int

	mu struct { // also guards the budgets above, and the permits until they are granted
		lockrank.Mutex[lockrank.Reservation]
		waiting int
		arrived int64 // requests that have waited so far
		held    int   // permits
		closed  bool
	}
}

type budget struct {
	BudgetStats
	line fairqueue.Queue[*Permit] // waiters that need some of it; lacksLocked bounds the bypasses, not the queue
}

func newBudget(name string, total int64) *budget {
	return &budget{BudgetStats{Name: name, Total: total}, fairqueue.Queue[*Permit]{Bypass: math.MaxInt}}
}

// New returns a pool, which the caller must Close.
func New(cfg Config) (*Pool, error) {
	if cfg.Budgets == nil {
		cfg.Budgets = []Budget{{Device, 256 << 20}, {Host, 512 << 20}}
	}
	if len(cfg.Budgets) == 0 {
		return nil, errors.New("permit: a pool needs a budget (nil means the defaults)")
	}
	p := &Pool{slots: newBudget("", 0), bypass: cmp.Or(cfg.Bypass, 16)}
	for _, b := range cfg.Budgets {
		if b.Name == "" || p.budget(b.Name) != nil || b.Bytes < 1 {
			return nil, fmt.Errorf("permit: budget %q of %d bytes: want a name of its own and more than 0 bytes",
				b.Name, b.Bytes)
		}
		p.budgets = append(p.budgets, newBudget(b.Name, b.Bytes))
	}
	if err := p.SetSlots(*cmp.Or(cfg.Slots, new(16))); err != nil {
		return nil, err
	}
	return p, nil
}

// budget returns the budget of that name; nil if there is none.
func (p *Pool) budget(name string) *budget {
	for _, b := range p.budgets {
		if b.Name == name {
			return b
		}
	}
	return nil
}

// TryAcquire grants all of r now, or changes nothing. Too little of a budget is a
// *tier.OutOfBudgetError, no free slot an error that matches tier.ErrOutOfBudget. A request that can
// never be granted is an error that matches reservation.ErrExceeded. The caller must Release the
// permit.
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
		if len(got.places) > 0 { // else the wait has ended at the same moment
			got.endWaitLocked(fairqueue.Ended(ctx, "permit: not granted"))
			p.serveLocked() // some of what is free may have been kept for it
		}
		p.mu.Unlock()
	}
	if got.err != nil {
		return nil, got.err
	}
	return got, nil
}

// request grants r if it fits. If not, it refuses r or, if wait is set, puts it into the queue.
func (p *Pool) request(r Request, wait bool) (*Permit, error) {
	got := &Permit{pool: p, has: make(map[*budget]int64), capped: r.Capped}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.closed {
		return nil, errClosed
	}
	for name, n := range r.Bytes {
		switch of := p.budget(name); {
		case of == nil:
			return nil, fmt.Errorf("permit: %q: %w", name, ErrNoBudget)
		case n < 0:
			return nil, fmt.Errorf("permit: %d bytes of budget %q: want at least 0", n, name)
		case n > 0:
			got.has[of] = n
		}
	}
	if err := got.fitTotalsLocked(); err != nil {
		return nil, err
	}
	if r.Spill {
		got.has[p.slots] = 1
	}
	lacks := got.lacksLocked()
	switch {
	case lacks == nil:
		got.grantLocked()
		return got, nil
	case wait:
		got.done = make(chan struct{})
		for of := range got.has {
			got.places = append(got.places, of.line.Push(got))
		}
		p.mu.waiting++
		p.mu.arrived++
		got.arrival = p.mu.arrived
		return got, nil
	case lacks == p.slots:
		return nil, fmt.Errorf("permit: no spill slot is free: %d of %d are taken (SetSlots makes them more): %w",
			lacks.Held, lacks.Total, tier.ErrOutOfBudget)
	}
	return nil, &tier.OutOfBudgetError{
		Budget: fmt.Sprintf("permit budget %q (SetTotal makes it larger)", lacks.Name), Requested: got.has[lacks],
		Remaining: max(0, lacks.Total-lacks.Held), Current: lacks.Held, Limit: lacks.Total,
	}
}

// serveLocked grants the waiting requests that fit, the oldest first.
func (p *Pool) serveLocked() {
	for p.mu.waiting > 0 {
		var oldest *Permit
		for of := range p.linesLocked() {
			e := of.line.Next(func(w *Permit) bool { return w.lacksLocked() == nil })
			if e != nil && (oldest == nil || e.Value.arrival < oldest.arrival) {
				oldest = e.Value
			}
		}
		if oldest == nil {
			return
		}
		oldest.grantLocked()
		oldest.endWaitLocked(nil)
	}
}

// linesLocked yields the budgets and the slots for which somebody waits.
func (p *Pool) linesLocked() iter.Seq[*budget] {
	return func(yield func(*budget) bool) {
		for _, of := range append(slices.Clip(p.budgets), p.slots) {
			if of.line.Len() > 0 && !yield(of) {
				return
			}
		}
	}
}

// Total returns the bytes of a whole budget, and false if the pool has none of that name.
func (p *Pool) Total(name string) (bytes int64, ok bool) {
	for _, b := range p.Stats().Budgets {
		if b.Name == name {
			return b.Total, true
		}
	}
	return 0, false
}

// Stats returns a consistent picture of the pool.
func (p *Pool) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Stats{Waiting: p.mu.waiting, Slots: Unlimited, HeldSlots: int(p.slots.Held)}
	if p.slots.Total != math.MaxInt64 {
		s.Slots = int(p.slots.Total)
		s.FreeSlots = max(0, s.Slots-s.HeldSlots)
	}
	for _, b := range p.budgets {
		s.Budgets = append(s.Budgets, b.BudgetStats)
	}
	return s
}

// SetTotal changes the bytes of a budget while it is in use. Permits keep their bytes. A waiter
// that needs more than the new total is refused with an error that matches reservation.ErrExceeded.
// It is an error if bytes is 0 or less.
func (p *Pool) SetTotal(name string, bytes int64) error {
	switch b := p.budget(name); {
	case b == nil:
		return fmt.Errorf("permit: %q: %w", name, ErrNoBudget)
	case bytes < 1:
		return fmt.Errorf("permit: budget %q of %d bytes: want more than 0", name, bytes)
	default:
		p.setTotal(b, bytes)
		return nil
	}
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
	p.setTotal(p.slots, int64(n))
	return nil
}

func (p *Pool) setTotal(of *budget, total int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	of.Total = total
	for e := range of.line.All() {
		if err := e.Value.fitTotalsLocked(); err != nil {
			e.Value.endWaitLocked(err)
		}
	}
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
	for of := range p.linesLocked() {
		for e := range of.line.All() {
			e.Value.endWaitLocked(errClosed)
		}
	}
	if p.mu.held > 0 {
		return &LeakError{p.mu.held}
	}
	return nil
}

var errClosed = fmt.Errorf("permit: the pool is %w", tier.ErrClosed)

// Permit is a granted request, and must be released once. It may be used on any goroutine; after
// its release it has nothing. Release of a nil Permit does nothing.
//
// The pool makes a permit when it gets the request. If that does not fit, the permit has a place in
// the line of each thing that it needs. A call that releases something, or changes a limit, grants
// it; the end of its context, Close, and a budget that has become too small set err. Each of them
// removes it from the lines and closes done. From the grant to its release, what it has counts as
// held and does not change.
type Permit struct {
	pool     *Pool
	has      map[*budget]int64 // bytes, or 1 slot; before the grant what it needs
	capped   bool
	limited  bool // it was granted while the slots were limited
	released atomic.Bool

	places   []*fairqueue.Entry[*Permit] // while it waits
	arrival  int64                       // its number among those that have waited
	bypassed int                         // requests that were served before it while it headed a line
	done     chan struct{}               // nil if it never waited
	err      error
}

// fitTotalsLocked returns an error if the permit needs more bytes than a budget has in all. If it is
// capped, it needs at most these from now on.
func (p *Permit) fitTotalsLocked() error {
	for of, n := range p.has {
		switch {
		case n <= of.Total:
		case p.capped:
			p.has[of] = of.Total
		default:
			return fmt.Errorf("permit: %d bytes of budget %q, which has %d in all (SetTotal makes it larger): %w",
				n, of.Name, of.Total, reservation.ErrExceeded)
		}
	}
	return nil
}

// lacksLocked returns something that the permit needs and that is not free, or that is kept for the
// head of its line; nil if there is none.
func (p *Permit) lacksLocked() *budget {
	for of, n := range p.has {
		head := p.beforeLocked(of)
		kept := head != nil && head.bypassed >= p.pool.bypass && of.Total < math.MaxInt64
		if kept || n > of.Total-of.Held {
			return of
		}
	}
	return nil
}

// beforeLocked returns the head of a line, unless that is p.
func (p *Permit) beforeLocked(of *budget) *Permit {
	if head := of.line.Head(); head != nil && head.Value != p {
		return head.Value
	}
	return nil
}

// grantLocked takes all that the permit needs, which fits. Each other head of a line counts that once.
func (p *Permit) grantLocked() {
	var bypassed []*Permit
	for of, n := range p.has {
		of.Held += n
		if head := p.beforeLocked(of); head != nil && !slices.Contains(bypassed, head) {
			head.bypassed++
			bypassed = append(bypassed, head)
		}
	}
	p.limited = p.pool.slots.Total < math.MaxInt64
	p.pool.mu.held++
}

// endWaitLocked removes the permit from the lines and wakes the goroutine that waits for it.
func (p *Permit) endWaitLocked(err error) {
	for _, e := range p.places {
		e.Remove()
	}
	p.places, p.err = nil, err
	p.pool.mu.waiting--
	close(p.done)
}

// Bytes returns how many bytes of a budget the permit has; after its release 0.
func (p *Permit) Bytes(name string) int64 {
	if p.released.Load() {
		return 0
	}
	return p.has[p.pool.budget(name)]
}

// TotalBytes returns how many bytes the permit has of all budgets together. After its release it
// returns tier.ErrReleased.
func (p *Permit) TotalBytes() (total int64, err error) {
	if p.released.Load() {
		return 0, fmt.Errorf("permit: total bytes: %w", tier.ErrReleased)
	}
	for _, b := range p.pool.budgets {
		total += p.has[b]
	}
	return total, nil
}

// CanSpill reports whether the permit has a slot, so that its holder may write to disk.
func (p *Permit) CanSpill() bool { return p.has[p.pool.slots] > 0 && !p.released.Load() }

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
	for of, n := range p.has {
		of.Held -= n
	}
	p.pool.serveLocked()
	return nil
}
