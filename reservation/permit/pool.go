package permit

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"math"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/fairqueue"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// Pool grants permits. It is safe for concurrent use. The package doc describes its fairness.
type Pool struct {
	bypass    int
	resources []*resource // the budgets in their order, and then the slots
	budgets   map[string]*resource
	slots     *resource

	mu struct { // also guards the resources, and the permits until they are granted
		lockrank.Mutex[lockrank.Reservation]
		closed  bool
		held    map[*Permit]bool
		waiting int
	}
}

// A resource is a budget, or the slots.
type resource struct {
	name  string // "" of the slots; does not change
	total int64  // unlimited if there is no limit
	used  int64  // may be above total after that was lowered
	line  fairqueue.Queue[*Permit]
}

// unlimited is the total of slots that have no limit. Then any number of requests may bypass the
// head of their line: it does not wait for a slot.
const unlimited = math.MaxInt64

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

// New returns a pool, which the caller must Close.
func New(cfg Config) (*Pool, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Budgets == nil {
		cfg.Budgets = []Budget{{Device, 256 << 20}, {Host, 512 << 20}}
	}
	if cfg.Slots == nil {
		cfg.Slots = new(16)
	}
	p := &Pool{bypass: cmp.Or(cfg.Bypass, 16), budgets: make(map[string]*resource), slots: new(resource)}
	for _, b := range cfg.Budgets {
		r := &resource{name: b.Name, total: b.Bytes}
		r.line.Bypass = p.bypass
		p.budgets[b.Name] = r
		p.resources = append(p.resources, r)
	}
	p.resources = append(p.resources, p.slots)
	p.mu.held = make(map[*Permit]bool)
	return p, p.SetSlots(*cfg.Slots)
}

// TryAcquire grants all of r now, or changes nothing. Too little of a budget is a
// *tier.OutOfBudgetError, no free slot an error that matches tier.ErrOutOfBudget. A
// request that can never be granted is an *ExceededError. The caller must Release the permit.
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
			p.wakeLocked(got, fairqueue.Ended(ctx, "permit: not granted"))
			p.serveLocked() // the lines may have been closed in its favor
		}
		p.mu.Unlock()
	}
	if got.err != nil {
		return nil, got.err
	}
	return got, nil
}

// request grants r if it fits. If not, it refuses r or, if wait is set, puts it into the lines.
func (p *Pool) request(r Request, wait bool) (*Permit, error) {
	got := &Permit{request: r, pool: p, stack: invariants.Stack()}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := got.neverLocked(); err != nil {
		return nil, err
	}
	switch {
	case got.fitsLocked():
		p.grantLocked(got)
	case !wait:
		return nil, got.lackLocked()
	default:
		got.done = make(chan struct{})
		for of := range got.needsLocked() {
			got.places = append(got.places, of.line.Push(got))
		}
		p.mu.waiting++
	}
	return got, nil
}

// neverLocked returns why the pool can never grant p, or nil. Slots are no reason: there is always
// at least one.
func (p *Permit) neverLocked() error {
	if p.pool.mu.closed {
		return closedError()
	}
	for _, b := range p.request.budgets {
		of := p.pool.budgets[b.Name]
		if of == nil {
			return fmt.Errorf("permit: %q: %w", b.Name, ErrNoBudget)
		}
		if b.Bytes > of.total && !p.request.capped {
			return &ExceededError{Budget: b.Name, Requested: b.Bytes, Limit: of.total}
		}
	}
	return nil
}

// fitsLocked reports whether all that p needs is free, and not kept for an older waiter.
func (p *Permit) fitsLocked() bool {
	for of, n := range p.needsLocked() {
		if n > of.total-of.used || of.line.IsClosed() && of.line.Head().Value != p {
			return false
		}
	}
	return true
}

// lackLocked returns why p does not fit. p is in no line.
func (p *Permit) lackLocked() error {
	for of, n := range p.needsLocked() {
		free := of.total - of.used
		if n <= free && !of.line.IsClosed() {
			continue
		}
		var err error = &tier.OutOfBudgetError{
			Budget:    fmt.Sprintf("permit budget %q (SetTotal makes it larger)", of.name),
			Requested: n, Remaining: max(0, free), Current: of.used, Limit: of.total,
		}
		if of == p.pool.slots {
			err = fmt.Errorf("permit: no spill slot is free: %d of %d are taken (Config.Slots or SetSlots "+
				"makes them more): %w", of.used, of.total, tier.ErrOutOfBudget)
		}
		if n <= free {
			err = fmt.Errorf("permit: the free part is kept for an older request: %w", err)
		}
		return err
	}
	return nil
}

// grantLocked takes all that got needs, which fits.
func (p *Pool) grantLocked(got *Permit) {
	has := Request{slot: got.request.slot, budgets: make([]Budget, 0, len(got.request.budgets))}
	for of, n := range got.needsLocked() {
		of.used += n
		of.line.Bypassed() // if got is the head itself, its removal resets the count
		if of != p.slots {
			has.bytes += n
			has.budgets = append(has.budgets, Budget{of.name, n})
		}
	}
	got.request = has
	got.limited = p.slots.total != unlimited
	p.mu.held[got] = true
}

// wakeLocked ends the wait of got.
func (p *Pool) wakeLocked(got *Permit, err error) {
	for _, e := range got.places {
		e.Remove()
	}
	got.places = nil
	got.err = err
	p.mu.waiting--
	close(got.done)
}

// serveLocked grants the waiting requests that fit. It begins again after each grant, because a
// waiter that leaves may have been the head of several lines.
func (p *Pool) serveLocked() {
	for again := true; again; {
		again = false
		for _, r := range p.resources {
			if e := r.line.Next((*Permit).fitsLocked); e != nil {
				p.grantLocked(e.Value)
				p.wakeLocked(e.Value, nil)
				again = true
			}
		}
	}
}

// With waits for a permit like Acquire, runs f with it, and releases it when f returns, panics, or
// ends its goroutine. f must act on ctx and must not release the permit. With returns the error of
// f.
func (p *Pool) With(ctx context.Context, r Request, f func(context.Context, *Permit) error) (err error) {
	got, err := p.Acquire(ctx, r)
	if err != nil {
		return err
	}
	defer func() { err = cmp.Or(err, got.Release()) }()
	lockrank.AssertNone("a function runs with a permit")
	return f(ctx, got)
}

// Total returns the bytes of a whole budget, and false if the pool has none of that name.
func (p *Pool) Total(name string) (bytes int64, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r := p.budgets[name]; r != nil {
		return r.total, true
	}
	return 0, false
}

// Stats returns a consistent picture of the pool.
func (p *Pool) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Stats{Waiting: p.mu.waiting, Slots: Unlimited, HeldSlots: int(p.slots.used)}
	if p.slots.total != unlimited {
		s.Slots = int(p.slots.total)
		s.FreeSlots = max(0, s.Slots-s.HeldSlots)
	}
	for _, r := range p.resources[:len(p.budgets)] {
		s.Budgets = append(s.Budgets, BudgetStats{r.name, r.total, r.used})
	}
	return s
}

// SetTotal changes the bytes of a budget while it is in use. Permits keep their bytes. A waiter
// that needs more than the new total is refused with an *ExceededError. It is an error if bytes is
// 0 or less, or if the sum of all budgets overflows an int64.
func (p *Pool) SetTotal(name string, bytes int64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	changed := p.budgets[name]
	if changed == nil {
		return fmt.Errorf("permit: %q: %w", name, ErrNoBudget)
	}
	var cfg Config
	for _, r := range p.budgets {
		if r != changed {
			cfg.Budgets = append(cfg.Budgets, Budget{r.name, r.total})
		}
	}
	cfg.Budgets = append(cfg.Budgets, Budget{name, bytes})
	if err := cfg.Validate(); err != nil {
		return err
	}
	changed.total = bytes
	for e := range changed.line.All() {
		if err := e.Value.neverLocked(); err != nil {
			p.wakeLocked(e.Value, err)
		}
	}
	p.serveLocked()
	return nil
}

// SetSlots changes the number of slots while they are in use, with the meaning of Config.Slots.
// Permits keep their slots.
func (p *Pool) SetSlots(n int) error {
	if err := (Config{Slots: &n}).Validate(); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.slots.total, p.slots.line.Bypass = int64(n), p.bypass
	if n == Unlimited {
		p.slots.total, p.slots.line.Bypass = unlimited, math.MaxInt
	}
	p.serveLocked()
	return nil
}

// Close ends all waits with tier.ErrClosed and refuses requests from now on. It reports held
// permits as a *LeakError; they stay valid and must be released. A second Close returns
// tier.ErrClosed.
func (p *Pool) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.closed {
		return closedError()
	}
	p.mu.closed = true
	for _, r := range p.resources {
		for e := range r.line.All() {
			p.wakeLocked(e.Value, closedError())
		}
	}
	var leak LeakError
	for held := range p.mu.held {
		leak.Leaks = append(leak.Leaks, Leak{held.request.budgets, held.request.slot, held.stack.String()})
	}
	if leak.Leaks == nil {
		return nil
	}
	return &leak
}

// Permit is a granted request, and must be released once. It may be used on any goroutine; after
// its release it has nothing. A nil Permit has nothing, and its release does nothing.
//
// The pool makes a permit when it gets the request. If that does not fit, the permit waits: it has a
// place in the line of each resource that it needs. A call that releases something, or changes a
// limit, grants it; the end of its context, Close, and a budget that has become too small set err.
// Each of them removes it from all lines and closes done. From the grant to its release the permit
// is in Pool.mu.held, its bytes and its slot count as used, and its request does not change.
type Permit struct {
	request  Request // what it is to have, and from the grant on what it has
	limited  bool    // it was granted while the slots were limited
	released atomic.Bool
	pool     *Pool
	stack    invariants.Trace // of the call that requested it

	done   chan struct{}               // nil if it never waited
	places []*fairqueue.Entry[*Permit] // none if it does not wait
	err    error
}

// needsLocked yields each resource that the permit needs, and how much it would get now or has got.
func (p *Permit) needsLocked() iter.Seq2[*resource, int64] {
	return func(yield func(*resource, int64) bool) {
		for _, b := range p.request.budgets {
			of := p.pool.budgets[b.Name]
			if p.request.capped {
				b.Bytes = min(b.Bytes, of.total)
			}
			if !yield(of, b.Bytes) {
				return
			}
		}
		if p.request.slot {
			yield(p.pool.slots, 1)
		}
	}
}

// holds returns what the permit has: nothing after its release.
func (p *Permit) holds() Request {
	if p == nil || p.released.Load() {
		return Request{}
	}
	return p.request
}

// Bytes returns how many bytes of a budget the permit has; after its release 0.
func (p *Permit) Bytes(name string) int64 {
	for _, b := range p.holds().budgets {
		if b.Name == name {
			return b.Bytes
		}
	}
	return 0
}

// TotalBytes returns how many bytes the permit has of all budgets together. After its release it
// returns tier.ErrReleased.
func (p *Permit) TotalBytes() (int64, error) {
	if p == nil || p.released.Load() {
		return 0, fmt.Errorf("permit: total bytes: %w", tier.ErrReleased)
	}
	return p.request.bytes, nil
}

// CanSpill reports whether the permit has a slot, so that its holder may write to disk.
func (p *Permit) CanSpill() bool { return p.holds().slot }

// Limited reports whether the permit's slot is one of a limited number.
func (p *Permit) Limited() bool { return p.CanSpill() && p.limited }

// Release gives everything back, and serves the requests that wait for it. A second release changes
// nothing and returns tier.ErrReleased. An invariants build panics on it, with the stack of the
// call that took the permit. Release of a nil Permit does nothing.
func (p *Permit) Release() error {
	if p == nil {
		return nil
	}
	if p.released.Swap(true) {
		if invariants.Enabled {
			panic("permit: released twice; it was taken at\n" + p.stack.String())
		}
		return fmt.Errorf("permit: %w", tier.ErrReleased)
	}
	pool := p.pool
	pool.mu.Lock()
	defer pool.mu.Unlock()
	delete(pool.mu.held, p)
	for of, n := range p.needsLocked() {
		of.used -= n
	}
	pool.serveLocked()
	return nil
}
