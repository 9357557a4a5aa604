package admission

import (
	"context"
	"errors"
	"fmt"
	"slices"

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
	Peak     int64 // the most bytes drawn at once besides the inputs
	Err      error
}

func (e *AttemptsError) Error() string {
	return fmt.Sprintf("admission: task %s ran out of memory %d times: in the last attempt it needed %s in %s, "+
		"%d were reserved, and at most %d were drawn besides its inputs: %v "+
		"(give the task less input, or the space more memory)",
		named.Quoted(e.Operator), e.Attempts, size.Saturated(e.Need), e.Space, e.Reserved, e.Peak, e.Err)
}

// Unwrap returns the error of the last attempt.
func (e *AttemptsError) Unwrap() error { return e.Err }

// OutOfMemory reports whether Run retries a task after an error: whether it matches
// reservation.ErrExceeded, reservation.ErrDeadlock, tier.ErrNoSpace or tier.ErrOutOfBudget.
func OutOfMemory(err error) bool {
	all := []error{reservation.ErrExceeded, reservation.ErrDeadlock, tier.ErrNoSpace, tier.ErrOutOfBudget}
	return slices.ContainsFunc(all, func(one error) bool { return errors.Is(err, one) })
}

// Run admits a task, runs f, and ends the grant. If f runs out of memory, Run tries the task again
// with a higher estimate: twice the last one or, if that is more, the bytes that the task had drawn
// besides its inputs and the bytes that its reservation or its space refused. After a
// reservation.DeadlockError the estimate stays, and Run first waits for the others. After
// Rules.MaxAttempts attempts the error is an *AttemptsError. Run returns it earlier if the task had
// its inputs in place and as much memory as any space could give, and exceeded that. Any other
// error of f, and any of Admit, ends Run at once.
//
// Running out of memory is an error for which OutOfMemory returns true, or a panic with such an
// error, as of allocators that cannot return one. Other panics go on when everything is given back.
// When f fails, it must free its buffers, restore its inputs, and take back the memory that it has
// handed to others. It may end the grant itself. Its context is that of Grant.Owner: if f has
// several goroutines that wait or release, call Owner.SetWorkers.
func (a *Admitter) Run(ctx context.Context, e Estimate, f func(context.Context, *Grant) error) error {
	var before error // of the last attempt
	for attempt := 1; ; attempt++ {
		g, err := a.Admit(ctx, e)
		if err != nil {
			if before != nil {
				err = fmt.Errorf("%w (attempt %d; the one before: %v)", err, attempt, before)
			}
			return err
		}
		if err = g.run(ctx, f); !OutOfMemory(err) {
			return err
		}
		e = g.e // with the owner
		// Before all inputs are there, they may be in each other's way.
		inputsHere := g.inputsHere || e.Inputs == nil
		if g.hasAll && inputsHere && errors.Is(err, reservation.ErrExceeded) || attempt == a.rules.MaxAttempts {
			return &AttemptsError{
				Operator: e.Operator, Attempts: attempt, Space: g.plan.ID(), Need: g.plan.need,
				Reserved: min(g.plan.need, g.plan.most), Peak: g.Peak(), Err: err,
			}
		}
		if deadlock, ok := errors.AsType[*reservation.DeadlockError](err); ok {
			// Others held the memory that it waited for. To reserve more would only prolong that
			// wait.
			_ = deadlock.Wait(ctx) // if ctx has ended, Admit returns that
		} else {
			shown := g.Peak()
			if exceeded, ok := errors.AsType[*reservation.ExceededError](err); ok && exceeded.Space == g.plan.ID() {
				shown = add(shown, exceeded.Requested)
			}
			e.Least = max(tier.Page, add(g.work, g.work), shown)
		}
		a.mu.Lock()
		a.stats.Retried++
		a.mu.Unlock()
		before = err
	}
}

// run runs one attempt and ends the grant.
func (g *Grant) run(ctx context.Context, f func(context.Context, *Grant) error) (err error) {
	defer func() { // also after a panic
		p := recover()
		_ = g.Release() // if neither Done nor f did
		oom, ok := p.(error)
		switch {
		case ok && OutOfMemory(oom):
			err = oom
		case p != nil:
			panic(p)
		}
	}()
	if err = f(g.e.Owner.Context(ctx), g); err == nil {
		_ = g.Done(Measured{Output: g.output})
	}
	return err
}
