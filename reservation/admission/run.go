package admission

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/spillway-db/spillway/internal/lockrank"
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
		"%d were reserved, and at most %d were drawn beside its inputs: %v (give the task less input, or the space more memory)",
		named.Quoted(e.Operator), e.Attempts, size.Saturated(e.Need), e.Space, e.Reserved, e.Peak, e.Err)
}

// Unwrap returns the error of the last attempt.
func (e *AttemptsError) Unwrap() error { return e.Err }

// OutOfMemory reports whether an error is one after which a task is tried again: it
// matches reservation.ErrExceeded, reservation.ErrDeadlock, tier.ErrNoSpace or
// tier.ErrOutOfBudget.
func OutOfMemory(err error) bool {
	return errors.Is(err, reservation.ErrExceeded) || errors.Is(err, reservation.ErrDeadlock) ||
		errors.Is(err, tier.ErrNoSpace) || errors.Is(err, tier.ErrOutOfBudget)
}

// Run admits a task, runs f, and ends the grant. If f runs out of memory, the inputs
// are restored, all that the grant held is released, and the task is tried again with
// a higher estimate: twice what it was given beside its inputs or, if that is more, what it
// had drawn and what was refused to it. After a reservation.DeadlockError the estimate stays,
// and the others are waited for first. After Rules.MaxAttempts of those the error is an
// *AttemptsError. So it is, at once, when an attempt shows that no space could ever hold what the
// task takes: what it had drawn beside its inputs and what was refused to it are more than there
// is, or it was given all that there is. Any other error of f, and any of Admit, ends Run at
// once; the inputs are restored then, too.
// An estimate alone is never the reason: it may be too high.
//
// Running out of memory is an error for which OutOfMemory holds, or a panic with such
// an error, as allocators that cannot return one do. Other panics go on when everything
// is given back. f must free what it has drawn when it fails, and take back what it
// has handed to others. It may end the grant itself. Its context is that of Grant.Owner: if
// f has several goroutines that wait or release, Owner.SetWorkers must say so.
func (a *Admitter) Run(ctx context.Context, e Estimate, f func(context.Context, *Grant) error) error {
	var before error // of the last attempt
	for attempt := 1; ; attempt++ {
		g, err := a.Admit(ctx, e)
		if err != nil && attempt > 1 {
			return fmt.Errorf("%w (attempt %d; the one before: %v)", err, attempt, before)
		}
		if err != nil {
			return err
		}
		reserved := g.r.Bytes()
		again, err := a.once(ctx, &e, g, f)
		if err == nil {
			return nil
		}
		if !again {
			return err
		}
		if ctx.Err() != nil {
			return errors.Join(err, ended(ctx, &e))
		}
		never := a.never(&e, g, reserved, err)
		if never != nil {
			err = never
		}
		if never != nil || attempt == a.rules.MaxAttempts {
			return &AttemptsError{
				Operator: e.Operator, Attempts: attempt, Space: g.r.Space().ID(), Need: g.need, Reserved: reserved, Peak: g.Peak(), Err: err,
			}
		}
		before = err
		e.Least = g.higher(err)
		if told := (*reservation.DeadlockError)(nil); errors.As(err, &told) { // or it would meet the others again
			if werr := told.Wait(ctx); werr != nil {
				return errors.Join(err, werr)
			}
		}
		a.retries.Add(1)
		a.log.LogAttrs(ctx, slog.LevelDebug, "admission: a task ran out of memory and is tried again",
			slog.String("operator", e.Operator), slog.Int("attempt", attempt), slog.Int64("reserved", reserved),
			slog.Int64("peak", g.Peak()), slog.Int64("least", e.Least), slog.Any("error", err))
	}
}

// neverFits returns an *reservation.ExceededError if no space could hold so many bytes even if it
// were empty. inputs adds the bytes of all inputs.
func (a *Admitter) neverFits(e *Estimate, inputs bool, work int64, cause error) error {
	var most *reservation.ExceededError
	for _, s := range a.rules.Strategy.Candidates(a.reservations.Spaces(), nil) {
		if s == nil || s.Lost() != nil { // admission reports that
			continue
		}
		var there, missing int64
		if inputs {
			there, missing = e.in(s)
		}
		need := add(there, charge(s, add(missing, work)))
		if need <= s.Room() {
			return nil
		}
		if most == nil || s.Room() > most.Limit {
			most = &reservation.ExceededError{
				Space: s.ID(), Requested: add(there, add(missing, work)), Available: s.Available(), Limit: s.Room(),
				Cause: cause,
			}
		}
	}
	if most == nil {
		return nil
	}
	return most
}

// never returns why an attempt that failed with err shows that the task can never be done, or nil.
func (a *Admitter) never(e *Estimate, g *Grant, reserved int64, err error) error {
	var exceeded *reservation.ExceededError
	if !errors.Is(err, reservation.ErrExceeded) || errors.As(err, &exceeded) && exceeded.Space != g.r.Space().ID() {
		return nil // it lacks something else
	}
	if exceeded != nil {
		// What was drawn when it was refused is what was promised less what was unused. If the
		// space itself refused, it is not known.
		work := exceeded.Requested
		if exceeded.Requested <= g.r.Space().Room() {
			work = add(work, max(0, exceeded.Limit-exceeded.Available-g.base.Load()))
		}
		if err := a.neverFits(e, g.here.Load(), work, err); err != nil {
			return err
		}
	}
	if e.Inputs != nil && !g.here.Load() {
		return nil // they may have been in the way of each other
	}
	for _, s := range a.rules.Strategy.Candidates(a.reservations.Spaces(), nil) {
		if s == nil || s.Lost() != nil {
			continue
		}
		if there, _ := e.in(s); most(s, s.Room()-there) > reserved {
			return nil
		}
	}
	return err
}

// once runs one attempt and reports whether there may be another after its error.
func (a *Admitter) once(ctx context.Context, e *Estimate, g *Grant, f func(context.Context, *Grant) error) (again bool, err error) {
	done := false
	defer func() { // also after a panic
		if done {
			return
		}
		failed := e.restore(ctx)
		if !g.over.Load() {
			g.note() // Release forgets what is drawn
			failed = errors.Join(failed, g.Release())
		}
		if failed != nil {
			again, err = false, errors.Join(err, failed)
		}
	}()
	if err = call(g.owner.Context(ctx), g, f); err != nil {
		return OutOfMemory(err), err
	}
	done = true
	if g.over.Load() { // f has done that
		return false, nil
	}
	if err := g.Done(g.measured()); err != nil { // the task has succeeded all the same
		a.log.LogAttrs(ctx, slog.LevelWarn, "admission: other code released the reservation of a task, such as a converter of its inputs",
			slog.String("operator", e.Operator), slog.String("space", g.r.Space().ID().String()), slog.Any("error", err))
	}
	return false, nil
}

// call runs f and makes a panic about memory an error.
func call(ctx context.Context, g *Grant, f func(context.Context, *Grant) error) (err error) {
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		e, ok := p.(error)
		if _, order := p.(lockrank.Violation); order || !ok || !OutOfMemory(e) {
			panic(p)
		}
		err = e
	}()
	return f(ctx, g)
}

// higher returns what output and overhead should be taken for after an attempt that
// failed with err.
func (g *Grant) higher(err error) int64 {
	if told := (*reservation.DeadlockError)(nil); errors.As(err, &told) {
		// Others held what it waited for: its estimate was not too low, and to promise it
		// more would only keep that from the wait.
		return max(g.work, g.Peak())
	}
	return max(tier.Page, add(g.work, g.work), add(g.Peak(), requested(err, g.r.Space().ID())))
}

// requested returns how many bytes an error says were refused in a space.
func requested(err error, in tier.ID) (n int64) {
	var (
		exceeded *reservation.ExceededError
		full     *tier.NoSpaceError
		budget   *tier.OutOfBudgetError
	)
	if errors.As(err, &exceeded) && exceeded.Space == in {
		n = max(n, exceeded.Requested)
	}
	if errors.As(err, &full) && full.Space == in {
		n = max(n, full.Requested)
	}
	if errors.As(err, &budget) {
		n = max(n, budget.Requested)
	}
	return n
}
