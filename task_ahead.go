package spillway

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// tasksAhead is how many waiting tasks have their inputs prefetched at least.
const tasksAhead = 2

// aheadAgain is after how long a fetch that found no room is tried again: then the quiet period of
// convert.Mover is over.
const aheadAgain = 100 * time.Millisecond

// aheadOfTasks prefetches the inputs of tasks that wait to be admitted, those of the oldest first,
// while other tasks work. One goroutine of the engine fetches one batch after the other, so that demand
// never waits for more than one of them.
type aheadOfTasks struct {
	e    *Engine
	poke chan struct{} // something has changed

	mu      sync.Mutex
	waiting []*taskInputs // in the order in which they came
	working int           // tasks
}

// change applies a change to waiting or working, and has the goroutine look at once.
func (a *aheadOfTasks) change(apply func()) {
	a.mu.Lock()
	apply()
	a.mu.Unlock()
	select {
	case a.poke <- struct{}{}:
	default: // it is going to look
	}
}

// leave removes a task from those that wait; it may be gone.
func (a *aheadOfTasks) leave(in *taskInputs) {
	a.change(func() { a.waiting = slices.DeleteFunc(a.waiting, func(w *taskInputs) bool { return w == in }) })
}

// run tries to fetch what comes next, once each: the inputs of as many waiting tasks as work, and of
// tasksAhead at least. After a pass that fetched nothing it waits for a while, or for a change, until
// ctx ends.
func (a *aheadOfTasks) run(ctx context.Context) {
	for {
		a.mu.Lock()
		var next []*taskInputs
		if a.working > 0 {
			next = slices.Clone(a.waiting[:min(len(a.waiting), max(tasksAhead, a.working))])
		}
		a.mu.Unlock()
		fetched := false
		var full [tier.KindCount]bool // tiers without room
		for _, in := range next {
			for _, b := range in.batches[:in.ahead] {
				if slices.Contains(in.skipped, b) {
					continue
				}
				if !a.e.panics.Do("a strategy", func() { fetched = a.bring(ctx, in, b, &full) || fetched }) {
					in.skipped = append(in.skipped, b)
				}
			}
		}
		if fetched {
			continue
		}
		var again <-chan time.Time
		if len(next) > 0 {
			again = time.After(aheadAgain)
		}
		select {
		case <-again:
		case <-a.poke:
		case <-ctx.Done():
			return
		}
	}
}

// bring fetches a batch to where the task may run, if it is clear which GPU that will be, or else to
// host memory, and reports whether it moved the batch. Errors other than a lack of room are left to
// the task.
func (a *aheadOfTasks) bring(ctx context.Context, in *taskInputs, b *batch.Batch, full *[tier.KindCount]bool) bool {
	for _, to := range []reservation.Strategy{in.to, reservation.AnyInTier(tier.Host)} {
		now := b.Info()
		if now.State != batch.Idle && now.State != batch.TaskCreated {
			return false
		}
		spaces := to.Candidates(a.e.reservations.Spaces(), nil)
		spaces = slices.DeleteFunc(spaces, func(s *tier.Space) bool { return s.Lost() != nil })
		if len(spaces) == 0 || spaces[0].Kind().IsDevice() && len(spaces) > 1 {
			continue
		}
		kind := spaces[0].Kind()
		there := slices.ContainsFunc(spaces, func(s *tier.Space) bool { return s.ID() == now.Space })
		if there || now.Space.Kind <= kind || full[kind] {
			continue
		}
		err := a.e.mover.Ahead(ctx, b, to)
		switch {
		case err == nil:
			return true
		case errors.Is(err, tier.ErrNoSpace):
			full[kind] = true
		default:
			in.skipped = append(in.skipped, b)
			return false
		}
	}
	return false
}
