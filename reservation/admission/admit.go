package admission

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/internal/fairqueue"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// window is how many waiters from the head on one change wakes.
const window = 256

// maxStale is after how many outdated plans all inputs are counted as missing, so that the next
// plan cannot be outdated.
const maxStale = 2

// waiter is a task that waits in a call of Admit. Its states are in the package doc.
type waiter struct {
	Estimate
	work  int64 // what the task takes beside its inputs, as last estimated
	stale int   // outdated plans so far
	entry *fairqueue.Entry[*waiter]
	bell  chan struct{} // of capacity 1; rung under the Admitter's mutex

	// Of the head, guarded by the Admitter's mutex.
	stuck     bool               // it cannot start now: others may bypass it
	asks      plans              // what it waits for in the manager; nil if it does not
	interrupt context.CancelFunc // ends that wait
}

// ringLocked makes the head look again and, if it is stuck, also those that may bypass it.
func (a *Admitter) ringLocked() {
	n, more := 0, a.mayBypassLocked()
	for e := range a.waiting.All() {
		select {
		case e.Value.bell <- struct{}{}:
		default: // it will look
		}
		if n++; n == window || !more {
			return
		}
	}
}

// mayBypassLocked reports whether younger tasks may start before the head: it is stuck, there is no
// room for what it waits for, and not as many as may have bypassed it before.
func (a *Admitter) mayBypassLocked() bool {
	head := a.waiting.Head().Value
	hasRoom := func(p plan) bool { return charge(p.Space, p.reserve) <= p.Available() }
	return head.stuck && !a.waiting.IsClosed() && !slices.ContainsFunc(head.asks, hasRoom)
}

// stick makes the head w stuck: it waits for asks in the manager or, if there are none, for its
// bell. It returns false if the states have changed on which that is based.
func (a *Admitter) stick(w *waiter, asks plans, interrupt context.CancelFunc) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.holdLocked(asks) {
		return false
	}
	if asks != nil || len(w.bell) == 0 {
		w.stuck, w.asks, w.interrupt = true, asks, interrupt
		a.ringLocked()
		<-w.bell // which was for the others
	}
	return true
}

// Admit waits until the task may start, and returns the grant to run it with. The package doc
// describes the estimate and the wait. The caller must end the grant. On an error nothing is held,
// neither memory nor inputs.
//
// A panic of an estimator, a strategy or of the inputs is an error.
//
// ctx ends the wait, with an error that matches its cause and its Err. Close ends it with
// tier.ErrClosed. The monitor ends it with a tier.NoSpaceError if nothing can be moved out. Other
// errors match reservation.ErrNoCandidate for a strategy without spaces, tier.ErrLost if all its
// spaces are lost, and reservation.ErrExceeded if the limits of the spaces leave no room at all. An
// estimate that makes no sense is an error, too.
func (a *Admitter) Admit(ctx context.Context, e Estimate) (_ *Grant, err error) {
	if err := e.prepare(ctx); err != nil {
		return nil, err
	}
	lockrank.AssertNone("a task is to be admitted")
	w := &waiter{Estimate: e, bell: make(chan struct{}, 1), interrupt: func() {}}
	a.mu.Lock()
	w.entry = a.waiting.Push(w)
	a.mu.Unlock()
	defer a.change(func() {
		w.entry.Remove() // if it did not start
	})
	defer guard.Error(&err, "an estimator, a strategy or inputs of a task")
	for ctx.Err() == nil {
		if g, err := a.attempt(ctx, w); g != nil || err != nil && ctx.Err() == nil {
			return g, err
		}
	}
	return nil, e.ended(ctx)
}

// ended returns the error of a wait that ctx has ended.
func (e *Estimate) ended(ctx context.Context) error {
	return fairqueue.Ended(ctx, fmt.Sprintf("admission: task %s was not admitted", named.Quoted(e.Operator)))
}

// attempt starts the task if it may start now, and waits otherwise. It returns neither a grant nor
// an error if the task has to look again.
func (a *Admitter) attempt(ctx context.Context, w *waiter) (*Grant, error) {
	a.mu.Lock()
	closed, isHead := a.closed, a.waiting.Head() == w.entry
	may := a.holdLocked(nil) && (isHead || a.mayBypassLocked())
	a.mu.Unlock()
	sleep := func() (*Grant, error) {
		select {
		case <-w.bell:
		case <-ctx.Done():
		}
		return nil, nil
	}
	switch {
	case closed:
		return nil, fmt.Errorf("admission: the admitter is %w", tier.ErrClosed)
	case !may:
		return sleep()
	}
	ps, err := a.plan(w)
	if err != nil {
		return nil, err
	}
	options := []reservation.Option{reservation.WithPolicy(a.rules.Policy), reservation.Consuming()}
	for i, p := range ps {
		if p.need > min(p.mark-p.Used(), p.Available()) {
			continue
		}
		r, err := a.reservations.TryReserve(ps[i:i+1], 0, options...)
		if err == nil { // else the head will get the error, if that is not for want of room
			return a.start(ctx, w, p, r)
		}
	}

	if !isHead {
		return sleep()
	}
	asks, allIdle := ps.asHead(), ps[0].allIdle
	waiting, interrupt := context.WithCancel(ctx)
	defer interrupt()
	switch s := ps[0].Space; {
	case asks == nil && allIdle:
		return nil, &reservation.ExceededError{
			Space: s.ID(), Requested: ps[0].need, Limit: s.Room(), Hint: "raise the space's limit",
		}
	case !a.stick(w, asks, interrupt):
		return nil, nil
	case asks == nil:
		return sleep()
	}
	r, err := a.reservations.Reserve(waiting, asks, 0, options...)
	a.mu.Lock()
	w.stuck, w.asks = false, nil
	a.mu.Unlock()
	switch {
	case err == nil:
		return a.start(ctx, w, asks[asks.index(r.Space())], r)
	case errors.Is(err, reservation.ErrExceeded), errors.Is(err, tier.ErrLost), waiting.Err() != nil:
		return nil, nil // a limit was lowered just now, or a space lost
	case errors.Is(err, tier.ErrNoSpace) && len(asks) < len(ps) && !allIdle:
		if a.stick(w, nil, interrupt) { // when tasks have ended, another space may serve it
			return sleep()
		}
		return nil, nil
	}
	return nil, err
}

// start makes a grant of a reservation by the plan p. It returns no grant if the task has to look
// again: inputs have left the space, or others have taken the room under the mark, the idle space,
// the last thread or the last bypass.
func (a *Admitter) start(ctx context.Context, w *waiter, p plan, r reservation.Reservation) (g *Grant, err error) {
	defer func() {
		if g == nil {
			err = errors.Join(err, w.Inputs.Restore(context.WithoutCancel(ctx)), r.Release())
		}
	}()
	used := p.Used() - r.Bytes() + p.keep
	missing := add(w.Input, max(0, w.Inputs.Hold(p.Space)))
	if missing > p.missing {
		w.stale++
		return nil, nil
	}
	need := charge(p.Space, add(missing, w.work)) // less, if more is there than was planned for
	if n := r.Bytes() - min(p.keep, need); n > 0 {
		if err := r.Shrink(n); err != nil {
			return nil, err
		}
	}
	if err := r.SetOwner(w.Owner); err != nil { // only now, because a waiting task holds nothing
		return nil, err
	}
	reserved := r.Bytes()
	less := p.keep < p.need
	a.mu.Lock()
	now, isHead := a.stateLocked(p.Space), a.waiting.Head() == w.entry
	alone := less || used > now.mark
	if a.holdLocked(nil) && (isHead || !a.waiting.IsClosed()) &&
		(!alone || p.alone && now.idle) && (!less || now.allIdle) {
		g = &Grant{
			a: a, r: r, e: w.Estimate, need: need, work: w.work, reserved: reserved, alone: alone, output: None,
		}
		a.waiting.Served(w.entry) // Admit wakes others
		a.running[p.Space]++
		a.stats.Running++
		a.stats.Admitted++
		if !isHead {
			a.stats.Passed++
		}
		if alone {
			a.stats.Alone++
		}
	}
	a.mu.Unlock()
	if g != nil && g.alone {
		a.log.DebugContext(ctx, "admission: a task is admitted only because no other runs there",
			"operator", w.Operator, "space", p.ID().String(), "need", need, "reserved", reserved,
			"used", used-reserved, "threshold", p.mark, "limit", p.top)
	}
	return g, nil
}
