package admission

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// AttemptsError reports that a task ran out of memory in each attempt. It matches the errors that
// the error of the last attempt matches.
type AttemptsError struct {
	Operator string
	Attempts int
	Space    tier.ID // of the last attempt, like all fields below
	Need     int64   // estimated; math.MaxInt64 if the sum overflows
	Reserved int64
	Peak     int64 // the most bytes drawn at once beside the inputs
	Err      error
}

func (e *AttemptsError) Error() string {
	return fmt.Sprintf("admission: task %s ran out of memory %d times: in the last attempt it needed %s in %s, "+
		"%d were reserved, and at most %d were drawn beside its inputs: %v "+
		"(give the task less input, or the space more memory)",
		named.Quoted(e.Operator), e.Attempts, size.Saturated(e.Need), e.Space, e.Reserved, e.Peak, e.Err)
}

// Unwrap returns the error of the last attempt.
func (e *AttemptsError) Unwrap() error { return e.Err }

// OutOfMemory reports whether Run retries a task after an error: whether it matches
// reservation.ErrExceeded, reservation.ErrDeadlock, tier.ErrNoSpace or tier.ErrOutOfBudget.
func OutOfMemory(err error) bool {
	return errors.Is(err, reservation.ErrExceeded) || errors.Is(err, reservation.ErrDeadlock) ||
		errors.Is(err, tier.ErrNoSpace) || errors.Is(err, tier.ErrOutOfBudget)
}

// Run admits a task, runs f, and ends the grant. If f runs out of memory, Run restores the inputs,
// releases all that the grant held, and tries the task again with a higher estimate: twice what it
// was given beside its inputs or, if that is more, what it had drawn and what was refused to it.
// After a reservation.DeadlockError the estimate stays, and Run first waits for the others. After
// Rules.MaxAttempts attempts the error is an *AttemptsError. Run returns it at once when an attempt
// shows that no space could ever hold what the task takes: what it had drawn beside its inputs and
// what was refused to it are more than there is, or it was given all that there is. A high estimate
// alone is never the reason. Any other error of f, and any of Admit, ends Run at once; the inputs
// are restored then, too.
//
// Running out of memory is an error for which OutOfMemory returns true, or a panic with such an
// error, as of allocators that cannot return one. Other panics go on when everything is given back.
// f must free what it has drawn when it fails, and take back what it has handed to others. It may
// end the grant itself. Its context is that of Grant.Owner: if f has several goroutines that wait or
// release, call Owner.SetWorkers.
func (a *Admitter) Run(ctx context.Context, e Estimate, f func(context.Context, *Grant) error) error {
	if err := e.prepare(ctx); err != nil {
		return err
	}
	var before error // of the last attempt
	for attempt := 1; ; attempt++ {
		g, err := a.Admit(ctx, e)
		if err != nil && before != nil {
			return fmt.Errorf("%w (attempt %d; the one before: %v)", err, attempt, before)
		}
		if err != nil {
			return err
		}
		again, err := a.once(ctx, &e, g, f)
		if !again {
			return err
		}
		if ctx.Err() != nil {
			return errors.Join(err, e.ended(ctx))
		}
		never := a.never(&e, g, err)
		if never != nil || attempt == a.rules.MaxAttempts {
			return &AttemptsError{
				Operator: e.Operator, Attempts: attempt, Space: g.r.Space().ID(), Need: g.need, Reserved: g.reserved,
				Peak: g.Peak(), Err: cmp.Or(never, err),
			}
		}
		before = err
		e.Least = max(tier.Page, add(g.work, g.work), g.shown(err))
		if deadlock, ok := errors.AsType[*reservation.DeadlockError](err); ok {
			// Others held what it waited for. To reserve more would only keep that from the wait.
			e.Least = max(g.work, g.Peak())
			if werr := deadlock.Wait(ctx); werr != nil {
				return errors.Join(err, werr)
			}
		}
		a.mu.Lock()
		a.stats.Retried++
		a.mu.Unlock()
		a.log.DebugContext(ctx, "admission: a task ran out of memory and is tried again", "operator", e.Operator,
			"attempt", attempt, "reserved", g.reserved, "peak", g.Peak(), "least", e.Least, "error", err)
	}
}

// once runs one attempt and reports whether there may be another after its error.
func (a *Admitter) once(
	ctx context.Context, e *Estimate, g *Grant, f func(context.Context, *Grant) error,
) (again bool, err error) {
	done := false
	defer func() { // also after a panic
		if done {
			return
		}
		p := recover()
		if oom, ok := p.(error); ok && OutOfMemory(oom) {
			p, err = nil, oom
		}
		failed := e.Inputs.Restore(context.WithoutCancel(ctx))
		if ended, err := g.end(nil); !ended { // by f
			failed = errors.Join(failed, err)
		}
		if again = failed == nil && OutOfMemory(err); failed != nil {
			err = errors.Join(err, failed)
		}
		if p != nil {
			panic(p)
		}
	}()
	if err := f(g.e.Owner.Context(ctx), g); err != nil {
		return false, err
	}
	done = true
	if ended, err := g.end(&Measured{Output: g.output}); !ended && err != nil {
		a.log.WarnContext(ctx,
			"admission: other code released the reservation of a task, such as a converter of its inputs",
			"operator", e.Operator, "space", g.r.Space().ID().String(), "error", err)
	}
	return false, nil
}

// shown returns how many bytes beside its inputs the task needs at least, as the error shows: what it
// had drawn and what was refused to it in its space.
func (g *Grant) shown(err error) int64 {
	space := g.r.Space()
	if e, ok := errors.AsType[*reservation.ExceededError](err); ok && e.Space == space.ID() {
		if e.Requested > space.Room() { // the space refused, and its numbers are not of this task
			return e.Requested
		}
		return add(e.Requested, max(0, e.Limit-e.Available-g.base))
	}
	if e, ok := errors.AsType[*tier.NoSpaceError](err); ok && e.Space == space.ID() {
		return add(g.Peak(), e.Requested)
	}
	if e, ok := errors.AsType[*tier.OutOfBudgetError](err); ok {
		return add(g.Peak(), e.Requested)
	}
	return g.Peak()
}

// never returns why an attempt that failed with err shows that the task can never be done: no space
// could hold what it needs, or it was given all that any space has. It returns nil if neither is so.
func (a *Admitter) never(e *Estimate, g *Grant, err error) error {
	exceeded, tooLarge := errors.AsType[*reservation.ExceededError](err)
	if !errors.Is(err, reservation.ErrExceeded) || tooLarge && exceeded.Space != g.r.Space().ID() {
		return nil // it lacks something else
	}
	gotAll := g.inputsHere || e.Inputs == Inputs(none{}) // else its inputs may have been in each other's way
	var largest *reservation.ExceededError
	for _, s := range a.rules.Strategy.Candidates(a.reservations.Spaces(), nil) {
		if s == nil || s.Lost() != nil {
			continue
		}
		there, missing := e.in(s)
		gotAll = gotAll && most(s, s.Room()-there) <= g.reserved
		if !g.inputsHere {
			there, missing = 0, 0
		}
		work := add(missing, g.shown(err))
		tooLarge = tooLarge && add(there, charge(s, work)) > s.Room()
		if largest == nil || s.Room() > largest.Limit {
			largest = &reservation.ExceededError{
				Space: s.ID(), Requested: add(there, work), Available: s.Available(), Limit: s.Room(), Cause: err,
			}
		}
	}
	switch {
	case tooLarge && largest != nil:
		return largest
	case gotAll:
		return err
	}
	return nil
}
