package admission

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/internal/waitline"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// waiter is a task that waits in a call of Admit. That call does all the work for it; a change only
// wakes it.
type waiter struct {
	at   waitline.Place[*waiter]
	bell chan struct{} // rung, without locks, when it may be able to start

	// Guarded by the Admitter's mutex.
	plans     []plan // as last made; nil before
	cannot    bool   // the head cannot start before no task runs, or none in some space
	reserving *turn  // the head waits for memory
}

// settledLocked reports whether the head has found that it cannot start now, and waits for memory
// or for other tasks to end. Until then no task passes it.
func (w *waiter) settledLocked() bool { return w.reserving != nil || w.cannot }

// turn is what a waiter may do now.
type turn struct {
	head      bool
	alone     bool          // no task runs
	idle      []*tier.Space // where no task runs; nil unless it is the head
	threshold float64
	foreign   int64                   // what others hold in all spaces
	interrupt context.CancelCauseFunc // ends the waiting for memory, when the above has changed
}

// errInterrupted ends a wait for memory under conditions that hold no more.
var errInterrupted = errors.New("admission: the conditions have changed")

// errWait reports that a waiter has to wait for its bell.
var errWait = errors.New("admission: it is not its turn")

// wakes lists the waiters to wake once the lock is free.
type wakes struct {
	rung       []*waiter
	interrupts []context.CancelCauseFunc
}

func (w *wakes) ringLocked(o *waiter) { w.rung = append(w.rung, o) }

// interruptLocked makes o look again, whatever it waits for.
func (w *wakes) interruptLocked(o *waiter) {
	if o.reserving != nil {
		w.interrupts = append(w.interrupts, o.reserving.interrupt)
		o.reserving = nil
		return
	}
	w.ringLocked(o)
}

func (w *wakes) fire() {
	for _, interrupt := range w.interrupts {
		interrupt(errInterrupted)
	}
	for _, o := range w.rung {
		select {
		case o.bell <- struct{}{}:
		default: // it will look anyway
		}
	}
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
	if ctx.Err() != nil {
		return nil, ended(ctx, &e)
	}
	lockrank.AssertNone("a task is to be admitted")
	w := &waiter{bell: make(chan struct{}, 1)}
	if err := a.enqueue(w); err != nil {
		return nil, err
	}
	defer a.leave(w) // nothing, once it is admitted
	defer guard.Error(&err, "an estimator, a strategy or inputs of a task")
	for stale := 0; ; {
		g, err := a.attempt(ctx, w, &e, stale >= maxStale)
		switch {
		case err == nil:
			return g, nil
		case ctx.Err() != nil:
			return nil, ended(ctx, &e)
		case errors.Is(err, errStale):
			stale++
		case errors.Is(err, errInterrupted):
		case errors.Is(err, errWait):
			select {
			case <-w.bell:
			case <-ctx.Done():
				return nil, ended(ctx, &e)
			}
		default:
			return nil, err
		}
	}
}

// errStale: inputs have left the space between the plan and the promise.
var errStale = errors.New("admission: inputs have been moved meanwhile")

// maxStale is after how many plans that were outdated all inputs are counted as
// missing, so that the next one cannot be.
const maxStale = 2

// attempt looks whether it is w's turn and does what it may do then.
func (a *Admitter) attempt(ctx context.Context, w *waiter, e *Estimate, all bool) (*Grant, error) {
	t, err := a.look(w)
	if err != nil {
		return nil, err
	}
	plans, work, err := a.plans(e, all)
	if err != nil {
		return nil, err
	}
	a.remember(w, plans)
	g, err := a.try(plans, t.threshold)
	alone := false
	if err == nil && g.r.IsZero() {
		g, err = a.waitForRoom(ctx, w, t, plans)
		alone = slices.Contains(t.idle, g.space)
	}
	if err != nil {
		return nil, err
	}
	return a.start(ctx, w, t, e, g, work, alone)
}

// start makes a grant of a promise, if the conditions still hold.
func (a *Admitter) start(ctx context.Context, w *waiter, t turn, e *Estimate, g got, work int64, alone bool) (_ *Grant, err error) {
	started := false
	defer func() {
		if !started {
			err = errors.Join(err, e.restore(ctx), g.r.Release())
		}
	}()
	need, missing := g.need, e.hold(g.space)
	switch spare := g.missing - missing; {
	case spare < 0:
		return nil, errStale
	case spare > 0: // more is there than was thought
		need = charge(g.space, add(missing, work))
		if n := g.r.Bytes() - need; n > 0 {
			if err := g.r.Shrink(n); err != nil {
				return nil, err
			}
		}
	}
	used := g.space.Used()
	mark, top := marks(g.space, t.threshold)
	alone = alone && (used > mark || g.keep < g.need)
	// Only here, because a task that waits for admission holds nothing.
	owner := e.owner(ctx)
	if err := g.r.SetOwner(owner); err != nil {
		return nil, err
	}
	if err := a.commit(w, g.ask, alone); err != nil {
		return nil, err
	}
	started = true
	if alone {
		a.log.LogAttrs(ctx, slog.LevelDebug, "admission: a task is admitted only because no other runs there",
			slog.String("operator", e.Operator), slog.String("space", g.space.ID().String()), slog.Int64("need", need),
			slog.Int64("reserved", g.r.Bytes()), slog.Int64("used", used-g.r.Bytes()), slog.Int64("threshold", mark), slog.Int64("limit", top))
	}
	return &Grant{a: a, r: g.r, owner: owner, operator: e.Operator, input: e.input(), need: need, work: work, alone: alone}, nil
}

// waitForRoom is for the head, whose demand the manager publishes.
func (a *Admitter) waitForRoom(ctx context.Context, w *waiter, t turn, plans []plan) (got, error) {
	if !t.head {
		a.handOn(w)
		return got{}, errWait
	}
	list := asks(plans, t.threshold, t.alone, t.idle)
	switch {
	case len(list) == 0 && t.alone:
		s := plans[0].space
		return got{}, &reservation.ExceededError{
			Space: s.ID(), Requested: plans[0].need, Available: s.Available(), Limit: s.Room(), Hint: "raise the space's limit",
		}
	case len(list) == 0:
		return got{}, a.sleep(w, t, plans, nil)
	}
	g, err := a.awaitAsHead(ctx, w, t, list)
	// A space that it did not ask for, because tasks run, may serve it when they have ended.
	if errors.Is(err, tier.ErrNoSpace) && len(list) < len(asks(plans, t.threshold, true, nil)) {
		return got{}, a.sleep(w, t, plans, list)
	}
	return g, err
}

// awaitAsHead is await, until the conditions of t change.
func (a *Admitter) awaitAsHead(ctx context.Context, w *waiter, t turn, list anyOf) (got, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	t.interrupt = cancel
	if !a.begin(w, &t) {
		return got{}, errInterrupted
	}
	defer a.end(w)
	g, err := a.await(ctx, list)
	if err != nil && context.Cause(ctx) == nil && (errors.Is(err, reservation.ErrExceeded) || errors.Is(err, tier.ErrLost)) {
		return got{}, errInterrupted // a limit was lowered just now, or a space lost
	}
	return g, err
}

func (a *Admitter) enqueue(w *waiter) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		return closedError()
	}
	w.at.Of = w
	a.mu.line.Push(&w.at, 0) // what it needs depends on the space, and changes
	if a.mu.line.Len() == 1 {
		a.seen.Store(a.foreign())
	}
	a.waiting.Store(int64(a.mu.line.Len()))
	a.least.Store(0)
	if a.mu.line.Len() == 1 { // from here on, releases matter for which no task waits in a line
		for _, s := range a.reservations.Spaces().All() {
			s.Inside().Attend()
		}
	}
	return nil
}

// leave takes w out of the queue, if it is in it.
func (a *Admitter) leave(w *waiter) {
	a.mu.Lock()
	if !w.at.In() {
		a.mu.Unlock()
		return
	}
	a.removeLocked(w)
	s := a.updateLocked()
	a.mu.Unlock()
	s.fire()
}

func (a *Admitter) removeLocked(w *waiter) {
	a.mu.line.Remove(&w.at)
	a.waiting.Store(int64(a.mu.line.Len()))
	if a.mu.line.Len() == 0 {
		for _, s := range a.reservations.Spaces().All() {
			s.Inside().EndAttend()
		}
	}
}

// look says what w may do; errWait if that is nothing.
func (a *Admitter) look(w *waiter) (turn, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	t := a.turnLocked(w)
	switch {
	case a.mu.closed:
		return turn{}, closedError()
	case a.mu.running >= a.mu.threads || !t.head && (a.mu.line.Door().Shut() || !a.headLocked().settledLocked()):
		return turn{}, errWait
	}
	w.cannot = false
	return t, nil
}

// headLocked returns the oldest waiter; there is one.
func (a *Admitter) headLocked() *waiter { return a.mu.line.Head().Of }

func (a *Admitter) turnLocked(w *waiter) turn {
	head := a.mu.line.Head() == &w.at
	t := turn{head: head, alone: head && a.mu.running == 0, threshold: a.mu.threshold, foreign: a.foreign()}
	if head {
		t.idle = a.idleLocked()
	}
	return t
}

// idleLocked lists the spaces in which no task runs.
func (a *Admitter) idleLocked() (idle []*tier.Space) {
	for _, s := range a.reservations.Spaces().All() {
		if a.mu.in[s] == 0 {
			idle = append(idle, s)
		}
	}
	return idle
}

// foreign returns what others hold in all spaces: the marks depend on it.
func (a *Admitter) foreign() (bytes int64) {
	for _, s := range a.reservations.Spaces().All() {
		bytes = add(bytes, s.Foreign())
	}
	return bytes
}

// holdsLocked reports whether t is still what w may do.
func (a *Admitter) holdsLocked(w *waiter, t *turn) bool {
	now := a.turnLocked(w)
	return !a.mu.closed && a.mu.running < a.mu.threads &&
		now.head == t.head && slices.Equal(now.idle, t.idle) && now.threshold == t.threshold && now.foreign == t.foreign
}

func (a *Admitter) remember(w *waiter, plans []plan) {
	a.mu.Lock()
	defer a.mu.Unlock()
	w.plans = plans
	a.least.Store(0) // until all have been examined
}

// begin notes that the head waits for memory, if it still may.
func (a *Admitter) begin(w *waiter, t *turn) bool {
	var s wakes
	a.mu.Lock()
	ok := a.holdsLocked(w, t)
	if ok {
		w.reserving = t
		a.ringPasserLocked(&w.at, &s)
	}
	a.mu.Unlock()
	s.fire()
	return ok
}

func (a *Admitter) end(w *waiter) {
	a.mu.Lock()
	defer a.mu.Unlock()
	w.reserving = nil
}

// sleep notes that the head cannot start before other tasks have ended, and returns errWait; or
// errInterrupted, if the conditions of t have changed, or there is room meanwhile for one of its
// plans. tried is what it has asked for.
func (a *Admitter) sleep(w *waiter, t turn, plans []plan, tried anyOf) error {
	var s wakes
	a.mu.Lock()
	ok := a.holdsLocked(w, &t)
	if ok {
		w.cannot = true
		a.least.Store(0)
		a.ringPasserLocked(&w.at, &s)
	}
	a.mu.Unlock()
	s.fire()
	// What was freed before cannot was set has woken nobody.
	list := asks(plans, t.threshold, t.alone, t.idle)
	if !ok || len(list) > len(tried) || slices.ContainsFunc(list, ask.hasRoom) {
		return errInterrupted
	}
	return errWait
}

// commit makes w a task that runs, unless its turn has passed: another one runs now, or took the
// last thread or pass. A task that is admitted only because none runs in its space, or none at all
// where it gets less than its need, checks that here again. So two of them cannot both start.
func (a *Admitter) commit(w *waiter, k ask, alone bool) error {
	a.mu.Lock()
	head := a.mu.line.Head() == &w.at
	others := a.mu.in[k.space]
	if k.keep < k.need {
		others = a.mu.running
	}
	switch {
	case a.mu.closed:
		a.mu.Unlock()
		return closedError()
	case a.mu.running >= a.mu.threads, alone && !(head && others == 0), !head && a.mu.line.Door().Shut():
		a.mu.Unlock()
		return errInterrupted
	}
	if !head {
		a.mu.line.Pass(a.mu.line.Door())
		a.mu.passed++
	}
	if alone {
		a.mu.alone++
	}
	a.mu.admitted++
	a.mu.running++
	a.mu.in[k.space]++
	a.removeLocked(w)
	s := a.updateLocked()
	a.mu.Unlock()
	s.fire()
	return nil
}

// updateLocked lists the waiters that may be able to start after a change of the queue, of the
// running tasks, or of the rules. That is the head. If the head waits for room, it is also the
// oldest that may pass it. Each of them wakes the next, whether it starts or not.
func (a *Admitter) updateLocked() (s wakes) {
	first := a.mu.line.Head()
	if first == nil {
		return s
	}
	head := first.Of
	switch {
	case head.reserving == nil:
		head.cannot = false // it will see
		s.ringLocked(head)
	case !a.holdsLocked(head, head.reserving):
		s.interruptLocked(head)
	}
	a.ringPasserLocked(first, &s)
	return s
}

// ringPasserLocked wakes the oldest behind a place that could start now, unless the head can:
// it hears of that by itself.
func (a *Admitter) ringPasserLocked(at *waitline.Place[*waiter], s *wakes) {
	head := a.headLocked()
	if a.mu.running >= a.mu.threads || a.mu.line.Door().Shut() || !head.settledLocked() || head.reserving != nil && head.fitsLocked(a.mu.threshold) {
		return
	}
	least := int64(math.MaxInt64)
	for at = a.mu.line.Next(at); at != nil; at = a.mu.line.Next(at) {
		w := at.Of
		if w.plans == nil { // its need is not known
			a.least.Store(0)
			s.ringLocked(w)
			return
		}
		if w.fitsLocked(a.mu.threshold) {
			a.least.Store(0)
			s.ringLocked(w)
			return
		}
		for i := range w.plans {
			least = min(least, w.plans[i].need)
		}
	}
	if head.cannot { // any change of a limit may be for it
		least = 0
	}
	a.least.Store(least)
}

// fitsLocked reports whether the rule held now, by what is known of w.
func (w *waiter) fitsLocked(threshold float64) bool {
	for i := range w.plans {
		if w.plans[i].fits(threshold) {
			return true
		}
	}
	return false
}

// handOn wakes the next after w that may pass, because w could not.
func (a *Admitter) handOn(w *waiter) {
	var s wakes
	a.mu.Lock()
	if w.at.In() && a.mu.line.Head() != &w.at {
		a.ringPasserLocked(&w.at, &s)
		a.least.Store(0) // only those behind w were looked at
	}
	a.mu.Unlock()
	s.fire()
}

// changed hears of every change of a space, on whatever goroutine.
func (a *Admitter) changed(space *tier.Space, pressed bool) {
	if a.waiting.Load() == 0 {
		return
	}
	f := a.foreign()
	foreign := a.seen.Swap(f) != f
	if pressed && !foreign {
		return
	}
	if foreign || space.Lost() != nil { // a task that counted on it makes another plan
		a.change(func() {})
		return
	}
	if space.Available() < a.least.Load() {
		return
	}
	var s wakes
	a.mu.Lock()
	if first := a.mu.line.Head(); first != nil {
		if head := a.headLocked(); head.cannot && len(asks(head.plans, a.mu.threshold, false, a.idleLocked())) > 0 {
			head.cannot = false
			s.ringLocked(head) // a limit was raised
		}
		a.ringPasserLocked(first, &s)
	}
	a.mu.Unlock()
	s.fire()
}

// ended is the error of a wait that its context has ended.
func ended(ctx context.Context, e *Estimate) error {
	return waitline.Ended(ctx, fmt.Sprintf("admission: task %s was not admitted", named.Quoted(e.Operator)))
}
