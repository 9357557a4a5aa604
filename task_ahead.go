package spillway

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// tasksAhead is of how many tasks that wait to be admitted the inputs are brought ahead at least.
const tasksAhead = 2

// aheadAgain is after how long what found no room is tried again: then the quiet period of
// convert.Mover is over.
const aheadAgain = 100 * time.Millisecond

// aheadOfTasks brings the inputs of tasks that wait to be admitted, those of the oldest first,
// while other tasks work. One goroutine brings one batch after the other, so that demand never
// waits for more than one of them. It ends when no task waits, or none works.
type aheadOfTasks struct {
	e    *Engine
	poke chan struct{} // there is something new

	mu      sync.Mutex
	waiting []*taskInputs // in the order in which they came
	working int           // tasks
	running bool          // the goroutine
}

// wait notes that a task waits; it is called once for each.
func (a *aheadOfTasks) wait(in *taskInputs) {
	a.mu.Lock()
	a.waiting = append(a.waiting, in)
	a.mu.Unlock()
	a.look()
}

// leave notes that a task waits no more, if it did, for the first time.
func (a *aheadOfTasks) leave(in *taskInputs) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if i := slices.Index(a.waiting, in); i >= 0 {
		a.waiting = slices.Delete(a.waiting, i, i+1)
	}
}

// work runs the work of a task, which is no more waiting.
func (a *aheadOfTasks) work(f func() error) error {
	a.mu.Lock()
	a.working++
	a.mu.Unlock()
	defer func() {
		a.mu.Lock()
		a.working--
		a.mu.Unlock()
	}()
	a.look()
	return f()
}

// look starts the goroutine, or has it look at once.
func (a *aheadOfTasks) look() {
	a.mu.Lock()
	start := !a.running && a.working > 0 && len(a.waiting) > 0 && a.e.calls.Enter()
	a.running = a.running || start
	a.mu.Unlock()
	if !start {
		select {
		case a.poke <- struct{}{}:
		default:
		}
		return
	}
	go func() {
		labels.TaskAhead.Set()
		defer a.e.calls.Leave()
		for a.pass() {
		}
	}()
}

// pass tries to bring what comes next, once each, and waits if nothing came. It returns false when
// there is nothing more to do.
func (a *aheadOfTasks) pass() bool {
	ctx := a.e.mover.Inside().Ended()
	next := a.next()
	if next == nil || ctx.Err() != nil {
		return false
	}
	came := false
	var full [tier.Disk + 1]bool // tiers without room
	for _, in := range next {
		for _, b := range in.batches[:in.ahead] {
			if slices.Contains(in.skipped, b) {
				continue
			}
			if !a.e.panics.Do("a strategy", func() { came = a.bring(ctx, in, b, &full) || came }) {
				in.skipped = append(in.skipped, b)
			}
		}
	}
	if came {
		return true
	}
	again := time.NewTimer(aheadAgain)
	defer again.Stop()
	select {
	case <-again.C:
	case <-a.poke:
	case <-ctx.Done():
	}
	return true
}

// next returns the tasks whose inputs are to be brought: as many as work, and two at least. Without
// any the goroutine has ended.
func (a *aheadOfTasks) next() []*taskInputs {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.working == 0 || len(a.waiting) == 0 {
		a.running = false
		return nil
	}
	return slices.Clone(a.waiting[:min(len(a.waiting), max(tasksAhead, a.working))])
}

// bring fetches a batch to where the task may run, if it is clear which GPU that will be, or else to
// host memory, and reports whether it moved the batch. Errors other than a lack of room are left to
// the task.
func (a *aheadOfTasks) bring(ctx context.Context, in *taskInputs, b *batch.Batch, full *[tier.Disk + 1]bool) bool {
	all := a.e.reservations.Spaces()
	for _, to := range []reservation.Strategy{in.to, reservation.AnyInTier(tier.Host)} {
		now := b.Info()
		spaces := to.Candidates(all, nil)
		spaces = slices.DeleteFunc(spaces, func(s *tier.Space) bool { return s.Lost() != nil })
		if len(spaces) == 0 {
			continue
		}
		kind := spaces[0].Kind()
		resting := now.State == batch.Idle || now.State == batch.TaskCreated
		there := slices.ContainsFunc(spaces, func(s *tier.Space) bool { return s.ID() == now.Space })
		if !resting || there || now.Space.Kind <= kind || full[kind] || kind == tier.GPU && len(spaces) > 1 {
			continue
		}
		err := a.e.mover.Inside().Ahead(ctx, b, to)
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
