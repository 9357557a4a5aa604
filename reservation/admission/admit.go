package admission

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/internal/fairqueue"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// maxStale is after how many outdated plans all inputs count as missing, so that the next plan
// cannot be outdated. Otherwise a task whose inputs leave when it reserves, and are brought back
// when it does not, would never start.
const maxStale = 2

// waiter is a task that waits in a call of Admit. Its states are in the package doc. It is the
// strategy of its own request in the manager.
type waiter struct {
	Estimate
	reservation.Strategy               // names it in errors
	work                 int64         // output and overhead of the task
	stale                int           // how often inputs left a space while bytes were reserved there
	bell                 chan struct{} // of capacity 1

	// Guarded by the Admitter's mutex.
	plans     []plan             // by need; nil until it has looked for the first time
	interrupt context.CancelFunc // ends its wait in the manager
}

// plan is the bytes that a task would take in one space.
type plan struct {
	*tier.Space
	known int64 // all inputs, and the output and overhead that the caller states
	need  int64
	most  int64 // the largest need for which the space could ever have room
	kept  int64 // must stay free when the task starts: see keptLocked
}

// fits reports whether the task may start in the space.
func (p plan) fits() bool { return p.need <= p.State().Available-p.kept }

// Candidates implements reservation.Strategy.
func (w *waiter) Candidates(_ *reservation.Spaces, dst []*tier.Space) []*tier.Space {
	for _, p := range w.plans {
		dst = append(dst, p.Space)
	}
	return dst
}

// sizeIn is for reservation.Options.Sized. It asks also for the bytes that must stay free, so that the
// request waits until they are.
func (w *waiter) sizeIn(s *tier.Space) (bytes int64, _ func()) {
	p := w.plans[slices.IndexFunc(w.plans, func(p plan) bool { return p.Space == s })]
	return add(p.need, p.kept), nil
}

// keptLocked returns how many bytes must stay free in a space when a task starts there: none if it
// is the only task.
func (a *Admitter) keptLocked(s *tier.Space) int64 {
	if a.running[s] == 0 {
		return 0
	}
	return a.aboveLocked(s)
}

// aboveLocked returns how many bytes are between the threshold and the limit of a space. Foreign
// bytes are part of the pressure that the threshold is for. The head reserves these bytes together
// with its need, so they are rounded as the space charges them.
func (a *Admitter) aboveLocked(s *tier.Space) int64 {
	now := s.State()
	mark := int64(float64(s.Capacity)*a.rules.Threshold) - now.External
	return charge(s, max(0, now.Room+now.Held-mark))
}

// fitsLocked reports whether w may start by the plans that it made last.
func (a *Admitter) fitsLocked(w *waiter) bool {
	return w.plans == nil || slices.ContainsFunc(w.plans, func(p plan) bool {
		p.kept = a.keptLocked(p.Space)
		return p.fits()
	})
}

// mayStartLocked reports whether a task may start, with as many bytes kept free as in the plans.
func (a *Admitter) mayStartLocked(ps []plan) bool {
	changed := func(p plan) bool { return p.kept != a.keptLocked(p.Space) }
	return !a.closed.Load() && a.stats.Running < a.rules.Threads && !slices.ContainsFunc(ps, changed)
}

// ring makes a waiter look again. It does nothing for nil.
func ring(w *waiter) {
	if w == nil {
		return
	}
	select {
	case w.bell <- struct{}{}:
	default: // it will look
	}
}

// Admit waits until the task may start, and returns the grant to run it with. The package doc
// describes the estimate and the wait. The caller must end the grant. On an error nothing is held.
//
// A panic of an estimator, a strategy or of the estimate's Inputs is an error.
//
// ctx ends the wait, with an error that matches its cause and its Err. Close ends it with
// tier.ErrClosed. The monitor ends it with a tier.NoSpaceError if nothing can be moved out. Other
// errors match reservation.ErrNoCandidate for a strategy without spaces, tier.ErrLost if all its
// spaces are lost, and reservation.ErrExceeded if the inputs, and the output and overhead that the
// estimate states, could never be in one space together. An estimate that makes no sense is an
// error, too.
func (a *Admitter) Admit(ctx context.Context, e Estimate) (_ *Grant, err error) {
	if e.Input < 0 || e.Least < 0 || e.Output < 0 && e.Output != None || e.Overhead < 0 && e.Overhead != None {
		return nil, fmt.Errorf("admission: task %s: an estimate below 0 makes no sense: "+
			"%d bytes of input, %d of output, %d of overhead, and %d at least",
			named.Quoted(e.Operator), e.Input, e.Output, e.Overhead, e.Least)
	}
	defer guard.Error(&err, "an estimator, a strategy or inputs of a task")
	output, overhead := e.Output, e.Overhead
	if output == 0 || overhead == 0 {
		o, h := a.rules.Estimator.Estimate(e.Operator, e.Input)
		output, overhead = cmp.Or(output, o), cmp.Or(overhead, h)
	}
	e.Owner = cmp.Or(e.Owner, reservation.OwnerOf(ctx), reservation.NewOwner(e.Operator))
	lockrank.AssertNone("a task is to be admitted")
	w := &waiter{
		Estimate: e, Strategy: cmp.Or(e.In, a.rules.Strategy),
		work: max(e.Least, add(max(0, output), max(0, overhead))),
		bell: make(chan struct{}, 1), interrupt: func() {},
	}
	a.mu.Lock()
	a.waiting.Waiters = append(a.waiting.Waiters, w)
	a.mu.Unlock()
	defer a.change(func() { a.waiting.Remove(w) }) // if it did not start
	for ctx.Err() == nil {
		if g, err := a.attempt(ctx, w); g != nil || err != nil {
			return g, err
		}
	}
	return nil, fairqueue.Ended(ctx, fmt.Sprintf("admission: task %s was not admitted", named.Quoted(e.Operator)))
}

// attempt starts the task if it may start now, and waits otherwise. It returns neither a grant nor
// an error if the task has to look again.
func (a *Admitter) attempt(ctx context.Context, w *waiter) (g *Grant, err error) {
	var ps []plan // the least need first
	var most int64
	possible, hasAll := false, true
	for _, s := range w.Strategy.Candidates(a.reservations.Spaces(), nil) {
		p := w.planIn(s, w.stale >= maxStale)
		ps, most = append(ps, p), max(most, p.most)
		hasAll = hasAll && p.need >= p.most
		possible = possible || s.Lost() == nil && p.known <= s.State().Room
	}
	for i, p := range ps {
		if ps[i].need = min(p.need, most); !possible {
			ps[i].need = p.known // which the manager refuses
		}
	}
	slices.SortStableFunc(ps, func(p, q plan) int { return cmp.Compare(p.need, q.need) })

	var r *reservation.Reservation
	defer func() {
		if g == nil {
			_ = r.Release()
		} else {
			_ = r.Shrink(r.Bytes() - min(g.plan.need, g.plan.most))
		}
	}()
	waiting, interrupt := context.WithCancel(ctx)
	defer interrupt()
	a.mu.Lock()
	for i, p := range ps {
		ps[i].kept = a.keptLocked(p.Space)
	}
	w.plans, w.interrupt = ps, interrupt
	may, busy, isHead := a.mayStartLocked(nil), a.stats.Running > 0, a.waiting.Head() == w
	next := a.waiting.Next(a.fitsLocked)
	if next != w {
		ring(next)
	}
	a.mu.Unlock()

	if a.closed.Load() {
		return nil, fmt.Errorf("admission: the admitter is %w", tier.ErrClosed)
	}
	if !possible {
		r, err = a.reservations.TryReserve(w, 0, &reservation.Options{Sized: w.sizeIn}) // which fails
		return nil, err
	}
	options := reservation.Options{Policy: a.rules.Policy, Purpose: reservation.Consuming}
	if i := slices.IndexFunc(ps, plan.fits); may && next == w && i >= 0 {
		// The head gets the error below, if there is another one than too little room.
		r, _ = a.reservations.TryReserve(reservation.Specific(ps[i].ID()), ps[i].need, &options)
	}
	if may && isHead && r == nil {
		options.Sized = w.sizeIn
		r, err = a.reservations.Reserve(waiting, w, 0, &options)
		// Look again if too much must stay free, a limit has changed, or a space was lost. While a
		// task runs, its end may make room in a space from which nothing else can leave.
		again := waiting.Err() != nil || errors.Is(err, reservation.ErrExceeded) || errors.Is(err, tier.ErrLost) ||
			busy && errors.Is(err, tier.ErrNoSpace)
		if err != nil && !again {
			return nil, err
		}
	}
	if r == nil {
		select {
		case <-w.bell:
		case <-ctx.Done():
		}
		return nil, nil
	}

	// Meanwhile inputs may have left the space, and others may have taken the room under the
	// threshold, the idle space, the last thread or the last bypass.
	s := r.Space()
	p := w.planIn(s, false)
	surplus := r.Bytes() - min(p.need, p.most)
	if surplus < 0 {
		w.stale++
	}
	_ = r.SetOwner(w.Owner) // only now, because a task that waits holds nothing
	a.mu.Lock()
	defer a.mu.Unlock()
	isHead = a.waiting.Head() == w
	free := s.State().Available + surplus
	if surplus < 0 || free < a.keptLocked(s) || !a.mayStartLocked(nil) || !isHead && a.waiting.IsClosed() {
		return nil, nil
	}
	g = &Grant{
		a: a, r: r, e: w.Estimate, plan: p, work: w.work, alone: free < a.aboveLocked(s), hasAll: hasAll, output: None,
	}
	a.waiting.Served(w) // Admit wakes others
	a.running[s]++
	a.stats.Running++
	a.stats.Admitted++
	if !isHead {
		a.stats.Passed++
	}
	if g.alone {
		a.stats.Alone++
	}
	return g, nil
}

// planIn plans the task in a space, except for kept. If all is true, it counts all inputs as missing.
func (w *waiter) planIn(s *tier.Space, all bool) plan {
	there, missing := int64(0), w.Input
	if w.Inputs != nil {
		there, missing = w.Inputs(s)
		there, missing = max(0, there), max(0, missing)
	}
	if all {
		there, missing = 0, add(there, missing)
	}
	room := max(0, min(s.State().Room-there, s.Capacity))
	return plan{
		Space: s,
		known: add(there, charge(s, add(missing, add(max(0, w.Output), max(0, w.Overhead))))),
		need:  charge(s, add(missing, w.work)),
		most:  size.Largest(s.Charge, 0, room, room),
	}
}
