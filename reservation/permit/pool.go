package permit

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
)

// maxResources is how many resources a pool can have: its budgets, by their place, and after the
// last one its slots.
const maxResources = maxBudgets + 1

type amounts [maxResources]int64

// Pool grants permits. It is safe for concurrent use. The package doc describes its fairness.
type Pool struct {
	names  []string // of the budgets; they never change
	slots  int      // place of the slots, after the budgets
	bypass int

	mu struct {
		lockrank.Mutex[lockrank.Reservation]
		closed    bool
		total     amounts // of the slots: 0 if they are unlimited
		used      amounts
		unlimited bool // slots

		lines   [maxResources]line
		waiting int
		free    *record
		records [][]record // all records, for the leaks
	}
}

// Stats are a pool's numbers at one moment.
type Stats struct {
	Budgets []BudgetStats // in the pool's order
	Waiting int           // requests

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
	cfg = cfg.withDefaults()
	p := &Pool{slots: len(cfg.Budgets), bypass: max(0, cfg.Bypass)}
	for i, b := range cfg.Budgets {
		p.names = append(p.names, b.Name)
		p.mu.total[i] = b.Bytes
	}
	p.setSlotsLocked(*cfg.Slots) // no other goroutine has p yet
	p.growLocked()
	return p, nil
}

// TryAcquire grants all of r now, or changes nothing. Too little of a budget is a
// *tier.OutOfBudgetError, no free slot an error that matches tier.ErrOutOfBudget. A
// request that can never be granted is an *ExceededError. It allocates nothing unless it fails, or
// more permits are held than ever before. The caller must Release the permit.
func (p *Pool) TryAcquire(r Request) (Permit, error) {
	var a ask
	if err := p.understand(&r, &a); err != nil {
		return Permit{}, err
	}
	p.mu.Lock()
	if p.mu.closed {
		p.mu.Unlock()
		return Permit{}, closedError()
	}
	got, ok := p.takeLocked(&a, nil)
	if ok {
		p.mu.Unlock()
		return got, nil
	}
	l := p.lackLocked(&a)
	p.mu.Unlock()
	return Permit{}, p.lackError(l)
}

// Acquire is TryAcquire that waits, first come, first served. A request that can never be granted
// fails at once. So does a wait when limits are lowered that far. ctx ends a wait, with an error
// that matches its cause and its Err. Close ends it with tier.ErrClosed. Nothing is taken in either
// case.
func (p *Pool) Acquire(ctx context.Context, r Request) (Permit, error) {
	var a ask
	if err := p.understand(&r, &a); err != nil {
		return Permit{}, err
	}
	if ctx.Err() != nil {
		return Permit{}, ended(ctx)
	}
	p.mu.Lock()
	if p.mu.closed {
		p.mu.Unlock()
		return Permit{}, closedError()
	}
	got, ok := p.takeLocked(&a, nil)
	if ok {
		p.mu.Unlock()
		return got, nil
	}
	if l, never := p.neverLocked(&a); never {
		p.mu.Unlock()
		return Permit{}, p.lackError(l)
	}
	w := p.enqueueLocked(&a)
	p.mu.Unlock()
	return p.wait(ctx, w)
}

// With waits for a permit like Acquire, runs f with it, and releases it when f returns, panics, or
// ends its goroutine. f must act on ctx and must not release the permit. With returns the error of
// f.
func (p *Pool) With(ctx context.Context, r Request, f func(context.Context, Permit) error) (err error) {
	got, err := p.Acquire(ctx, r)
	if err != nil {
		return err
	}
	defer func() {
		if e := got.Release(); e != nil {
			err = errors.Join(err, e)
		}
	}()
	lockrank.AssertNone("a function runs with a permit")
	return f(ctx, got)
}

// Total returns the bytes of a whole budget, and false if the pool has none of that name.
func (p *Pool) Total(name string) (bytes int64, ok bool) {
	i := p.index(name)
	if i < 0 {
		return 0, false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.total[i], true
}

// Stats returns a consistent picture of the pool.
func (p *Pool) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Stats{
		Budgets: make([]BudgetStats, len(p.names)), Waiting: p.mu.waiting,
		Slots: Unlimited, HeldSlots: int(p.mu.used[p.slots]),
	}
	if !p.mu.unlimited {
		s.Slots = int(p.mu.total[p.slots])
		s.FreeSlots = int(max(0, p.availableLocked(p.slots)))
	}
	for i, name := range p.names {
		s.Budgets[i] = BudgetStats{Name: name, Total: p.mu.total[i], Held: p.mu.used[i]}
	}
	return s
}

// SetTotal changes the bytes of a budget while it is in use. Permits keep their bytes. A waiter
// that needs more than the new total is refused with an *ExceededError. It is an error if bytes is
// 0 or less, or if the sum of all budgets overflows an int64.
func (p *Pool) SetTotal(name string, bytes int64) error {
	i := p.index(name)
	if i < 0 {
		return noBudget(name)
	}
	if bytes <= 0 {
		return fmt.Errorf("permit: budget %q of %d bytes: want more than 0", name, bytes)
	}
	return p.change(i, func() error {
		sum, ok := bytes, true
		for j := range p.names {
			if j != i && ok {
				sum, ok = add(sum, p.mu.total[j])
			}
		}
		if !ok {
			return fmt.Errorf("permit: with budget %q of %d bytes all are more than %d bytes together",
				name, bytes, int64(math.MaxInt64))
		}
		p.mu.total[i] = bytes
		return nil
	})
}

// SetSlots changes the number of slots while they are in use, with the meaning of Config.Slots.
// Permits keep their slots.
func (p *Pool) SetSlots(n int) error {
	if err := validSlots(n); err != nil {
		return err
	}
	return p.change(p.slots, func() error {
		p.setSlotsLocked(n)
		return nil
	})
}

func (p *Pool) setSlotsLocked(n int) {
	p.mu.total[p.slots], p.mu.unlimited = int64(max(0, n)), n == Unlimited
}

// leaks describes the permits that are held now.
func (p *Pool) leaks() []Leak {
	p.mu.Lock()
	defer p.mu.Unlock()
	var leaks []Leak
	for _, slab := range p.mu.records {
		for i := range slab {
			r := &slab[i]
			if !r.held {
				continue
			}
			l := Leak{Slot: r.took[p.slots] > 0, Stack: r.stack.String()}
			for j, name := range p.names {
				if r.took[j] > 0 {
					l.Budgets = append(l.Budgets, Budget{name, r.took[j]})
				}
			}
			leaks = append(leaks, l)
		}
	}
	return leaks
}

// Close ends all waits with tier.ErrClosed and refuses requests from now on. It reports held
// permits as a *LeakError; they stay valid and must be released. A second Close returns
// tier.ErrClosed.
func (p *Pool) Close() error {
	var done over
	p.mu.Lock()
	if p.mu.closed {
		p.mu.Unlock()
		return closedError()
	}
	p.mu.closed = true
	for i := range p.mu.lines {
		for at := p.mu.lines[i].Head(); at != nil; at = p.mu.lines[i].Head() {
			p.failLocked(at.Of, closedError(), &done)
		}
	}
	p.mu.Unlock()
	done.wake()
	if leaks := p.leaks(); len(leaks) > 0 {
		return &LeakError{Leaks: leaks}
	}
	return nil
}

func (p *Pool) index(name string) int {
	for i, n := range p.names {
		if n == name {
			return i
		}
	}
	return -1
}

// ask is a request by the places of the pool's resources.
type ask struct {
	needs  amounts
	capped bool
	stack  invariants.Trace
}

func (p *Pool) understand(r *Request, a *ask) error {
	for i := range r.len() {
		b := r.at(i)
		j := p.index(b.Name)
		if j < 0 {
			return noBudget(b.Name)
		}
		a.needs[j] = b.Bytes
	}
	if r.slot {
		a.needs[p.slots] = 1
	}
	a.capped = r.capped
	if invariants.Enabled {
		a.stack = invariants.Stack()
	}
	return nil
}

// needLocked returns how much of a resource a takes: 0 slots if they are unlimited.
func (p *Pool) needLocked(a *ask, r int) int64 {
	switch {
	case r == p.slots && p.mu.unlimited:
		return 0
	case a.capped:
		return min(a.needs[r], p.mu.total[r])
	}
	return a.needs[r]
}

// availableLocked returns how much of a resource is free; below 0 if permits hold more than a limit
// that was lowered.
func (p *Pool) availableLocked(r int) int64 { return p.mu.total[r] - p.mu.used[r] }

// takeLocked takes all that a needs if it is free and no older waiter has been passed too often. w
// is the waiter of a, or nil.
func (p *Pool) takeLocked(a *ask, w *waiter) (Permit, bool) {
	for r := range p.slots + 1 {
		if need := p.needLocked(a, r); need > 0 && (need > p.availableLocked(r) || p.shutLocked(r, w)) {
			return Permit{}, false
		}
	}
	if p.mu.waiting > 0 {
		p.passLocked(a, w)
	}
	rec := p.recordLocked()
	for r := range p.slots + 1 {
		need := p.needLocked(a, r)
		if r == p.slots {
			need = a.needs[r] // unlimited ones are counted too
		}
		p.mu.used[r] += need
		rec.took[r] = need
	}
	rec.limited = a.needs[p.slots] > 0 && !p.mu.unlimited
	rec.stack = a.stack
	return Permit{rec: rec, gen: rec.gen}, true
}

// giveBackLocked ends a permit. It serves no waiter yet.
func (p *Pool) giveBackLocked(rec *record) {
	for r := range p.slots + 1 {
		if rec.took[r] > 0 {
			p.mu.used[r] -= rec.took[r]
			p.mu.lines[r].dirty = true
		}
	}
	rec.gen++
	rec.held = false
	rec.next, p.mu.free = p.mu.free, rec
}

// lackLocked returns the reason why a is not granted.
func (p *Pool) lackLocked(a *ask) lack {
	if l, never := p.neverLocked(a); never {
		return l
	}
	var l lack
	for r := range p.slots + 1 {
		need := p.needLocked(a, r)
		free := p.availableLocked(r)
		if need == 0 || need <= free && !p.shutLocked(r, nil) {
			continue
		}
		l = lack{resource: r, kept: need <= free, need: need, free: free, used: p.mu.used[r], all: p.mu.total[r]}
		if !l.kept {
			break // a resource that is too small explains more than one that is kept
		}
	}
	return l
}

// neverLocked reports whether a asks for more than a whole budget. A pool always has a slot.
func (p *Pool) neverLocked(a *ask) (lack, bool) {
	for r := range p.slots {
		if need, all := p.needLocked(a, r), p.mu.total[r]; need > all {
			return lack{resource: r, ever: true, need: need, all: all}, true
		}
	}
	return lack{}, false
}
