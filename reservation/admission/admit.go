package admission

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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

// What becomes of an attempt that did not start the task.
var (
	errWait  = errors.New("admission: the task cannot start now")
	errAgain = errors.New("admission: the states of the spaces have changed")
	errStale = errors.New("admission: inputs have been moved meanwhile")
)

// waiter is a task that waits in a call of Admit. Its states are in the package doc.
type waiter struct {
	entry *fairqueue.Entry[*waiter]
	bell  chan struct{} // of capacity 1; rung under the Admitter's mutex

	// Of the head, guarded by the Admitter's mutex.
	stuck     bool                    // it cannot start now: others may bypass it
	asks      plans                   // what it waits for in the manager; nil if it does not
	interrupt context.CancelCauseFunc // ends that wait
}

// ringLocked makes the head look again and, if it is stuck, also those that may bypass it.
func (a *Admitter) ringLocked() {
	n := 0
	for e := range a.waiting.All() {
		select {
		case e.Value.bell <- struct{}{}:
		default: // it will look
		}
		if n++; n == window || !a.mayBypassLocked() {
			return
		}
	}
}

// mayBypassLocked reports whether younger tasks may start before the head: it is stuck, there is no
// room for what it waits for, and not as many as may have bypassed it before.
func (a *Admitter) mayBypassLocked() bool {
	w := a.waiting.Head().Value
	hasRoom := func(p plan) bool { return charge(p.space, p.reserve) <= p.space.Available() }
	return w.stuck && !a.waiting.IsClosed() && !slices.ContainsFunc(w.asks, hasRoom)
}

// stick makes the head w stuck: it waits for asks in the manager or, if there are none, for its
// bell. It returns errWait, or errAgain if asks are outdated.
func (a *Admitter) stick(w *waiter, asks plans, interrupt context.CancelCauseFunc) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.holdLocked(asks) {
		return errAgain
	}
	if asks != nil || len(w.bell) == 0 {
		w.stuck, w.asks, w.interrupt = true, asks, interrupt
		a.ringLocked()
		<-w.bell // which was for the others
	}
	return errWait
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
	if err := e.validate(); err != nil {
		return nil, err
	}
	lockrank.AssertNone("a task is to be admitted")
	w := &waiter{bell: make(chan struct{}, 1), interrupt: func(error) {}}
	a.mu.Lock()
	w.entry = a.waiting.Push(w)
	a.attendLocked(1)
	a.mu.Unlock()
	defer a.change(func() {
		w.entry.Remove() // if it did not start
		a.attendLocked(-1)
	})
	defer guard.Error(&err, "an estimator, a strategy or inputs of a task")
	for stale := 0; ctx.Err() == nil; {
		g, err := a.attempt(ctx, w, &e, stale >= maxStale)
		switch {
		case err == nil:
			return g, nil
		case errors.Is(err, errStale):
			stale++
		case errors.Is(err, errWait):
			select {
			case <-w.bell:
			case <-ctx.Done():
			}
		case ctx.Err() == nil && !errors.Is(err, errAgain):
			return nil, err
		}
	}
	return nil, ended(ctx, &e)
}

// attendLocked makes the spaces report every release while tasks wait: without it they may keep
// released bytes for the next reservation and report nothing. It has the only uses of Attend here.
func (a *Admitter) attendLocked(n int) {
	for _, s := range a.reservations.Spaces().All() {
		if n > 0 {
			s.Inside().Attend()
		} else {
			s.Inside().EndAttend()
		}
	}
}

// attempt starts the task if it may start now. The head waits for room. If all is set, all inputs
// count as missing.
func (a *Admitter) attempt(ctx context.Context, w *waiter, e *Estimate, all bool) (*Grant, error) {
	a.mu.Lock()
	head, closed := a.waiting.Head(), a.closed
	isHead := head == w.entry
	may := a.holdLocked(nil) && (isHead || a.mayBypassLocked())
	a.mu.Unlock()
	if closed {
		return nil, fmt.Errorf("admission: the admitter is %w", tier.ErrClosed)
	}
	if !may {
		return nil, errWait
	}
	work := e.work(a.rules.Estimator)
	ps, err := a.plan(e, work, all)
	if err != nil {
		return nil, err
	}
	options := []reservation.Option{reservation.WithPolicy(a.rules.Policy), reservation.Consuming()}
	for i, p := range ps {
		if p.need > min(p.mark-p.space.Used(), p.space.Available()) {
			continue
		}
		r, err := a.reservations.TryReserve(ps[i:i+1], 0, options...)
		if err == nil {
			return a.start(ctx, w, e, work, p, r)
		}
		if !exceeds(err) && !errors.Is(err, tier.ErrNoSpace) {
			return nil, err
		}
	}
	if !isHead {
		return nil, errWait
	}

	asks, others := ps.asHead()
	if first := ps[0]; asks == nil && first.allIdle {
		return nil, &reservation.ExceededError{
			Space: first.space.ID(), Requested: first.need, Available: first.space.Available(),
			Limit: first.space.Room(), Hint: "raise the space's limit",
		}
	}
	if asks == nil {
		return nil, a.stick(w, nil, w.interrupt)
	}
	waiting, interrupt := context.WithCancelCause(ctx)
	defer interrupt(nil)
	if err := a.stick(w, asks, interrupt); errors.Is(err, errAgain) {
		return nil, err
	}
	r, err := a.reservations.Reserve(waiting, asks, 0, options...)
	a.mu.Lock()
	w.stuck, w.asks = false, nil
	a.mu.Unlock()
	switch {
	case err == nil:
		return a.start(ctx, w, e, work, asks[asks.index(r.Space())], r)
	case exceeds(err):
		return nil, errAgain // a limit was lowered just now, or a space lost
	case errors.Is(err, tier.ErrNoSpace) && others:
		return nil, a.stick(w, nil, interrupt)
	}
	return nil, err
}

// exceeds reports whether a request was refused because of the limits of spaces.
func exceeds(err error) bool {
	return errors.Is(err, reservation.ErrExceeded) || errors.Is(err, tier.ErrLost)
}

// start makes a grant of a reservation by the plan p, if the task may still start: others may have
// taken the room under the mark, the idle space, the last thread or the last bypass.
func (a *Admitter) start(
	ctx context.Context, w *waiter, e *Estimate, work int64, p plan, r reservation.Reservation,
) (_ *Grant, err error) {
	started := false
	defer func() {
		if !started {
			err = errors.Join(err, e.restore(ctx), r.Release())
		}
	}()
	used := p.space.Used() - r.Bytes() + p.keep
	missing := e.hold(p.space)
	if missing > p.missing {
		return nil, errStale
	}
	need := charge(p.space, add(missing, work)) // less, if more is there than was planned for
	if n := r.Bytes() - min(p.keep, need); n > 0 {
		if err := r.Shrink(n); err != nil {
			return nil, err
		}
	}
	owner := e.owner(ctx)
	if err := r.SetOwner(owner); err != nil { // only now, because a waiting task holds nothing
		return nil, err
	}
	alone := false
	a.change(func() {
		now, isHead := a.stateLocked(p.space), a.waiting.Head() == w.entry
		alone = used > now.mark || p.keep < p.need
		if !a.holdLocked(nil) || !isHead && a.waiting.IsClosed() ||
			alone && !(p.alone && now.idle) || p.keep < p.need && !now.allIdle {
			err = errAgain
			return
		}
		started = true
		a.waiting.Served(w.entry)
		a.running[p.space]++
		a.stats.Running++
		a.stats.Admitted++
		if !isHead {
			a.stats.Passed++
		}
		if alone {
			a.stats.Alone++
		}
	})
	if err != nil {
		return nil, err
	}
	if alone {
		a.log.LogAttrs(ctx, slog.LevelDebug, "admission: a task is admitted only because no other runs there",
			slog.String("operator", e.Operator), slog.String("space", p.space.ID().String()),
			slog.Int64("need", need), slog.Int64("reserved", r.Bytes()), slog.Int64("used", used-r.Bytes()),
			slog.Int64("threshold", p.mark), slog.Int64("limit", p.top))
	}
	return &Grant{
		a: a, r: r, owner: owner, operator: e.Operator, input: e.input(), need: need, work: work, alone: alone,
		output: None,
	}, nil
}

// ended returns the error of a wait that ctx has ended.
func ended(ctx context.Context, e *Estimate) error {
	return fairqueue.Ended(ctx, fmt.Sprintf("admission: task %s was not admitted", named.Quoted(e.Operator)))
}
