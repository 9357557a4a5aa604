package spillway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	exec "runtime/trace"
	"slices"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

// Admit waits until a task with that estimate may start in a space of Estimate.In, or else of the
// rules in Limits.Admission. The caller must end the grant, by Done or Release, and draws from its
// reservation.
func (e *Engine) Admit(ctx context.Context, estimate Estimate) (*Grant, error) {
	return e.admitter.Admit(ctx, estimate)
}

// Admitter returns the admitter, which decides which tasks may start.
func (e *Engine) Admitter() *admission.Admitter { return e.admitter }

// Task is a piece of work on batches of repositories.
type Task struct {
	// Operator is the kind of task; see admission.Estimate.
	Operator string
	// Inputs are what the task reads, from Repository.Claim, or from ClaimAll where it
	// needs a whole partition. RunTask ends them.
	Inputs []*repository.Claim
	// Output and Overhead are in bytes; 0 means the estimator's estimate, which it learns from
	// tasks of this kind, and admission.None that there is none. The task is refused if the bytes
	// stated here and the inputs fit in no space together. An estimate is only a guess.
	Output, Overhead int64
	// In names the spaces that the task may run in, for example AnyInTier(Host) for work on the
	// processor. Nil means those of Limits.Admission.Strategy or, without one, any GPU: the nearest
	// to the largest input in slower memory that has room.
	In Strategy
	// ReadAhead is how many of the inputs are prefetched at most while the task waits and others
	// work; 0 means all, below 0 none. They come where the task needs them if it is clear which GPU
	// that is, else to host memory. The rules are those of repository.ReadAhead.
	ReadAhead int
}

// RunTask waits until the task may start, fetches its inputs to the space that it is admitted to, a
// GPU unless Task.In names others, and calls f with open handles on them, in the order of the
// claims. f draws further memory from the grant. It reports by Grant.Produced how much output it
// has made, for the estimates of later tasks. RunTask owns the handles and closes them. The data
// must not be used after f returns.
//
// When f succeeds, the inputs are consumed. When f or a fetch of the inputs runs out of memory
// (see admission.OutOfMemory), the handles are closed and everything that the task held is
// released. The task is then retried with a higher estimate. There are at most
// admission.Rules.MaxAttempts attempts. The attempt that had all the memory of a GPU is the last one
// if it exceeded that. f must have freed what it drew and taken back what it has handed on. After
// the last attempt, and after any other error or a panic, the inputs are where they were in their
// repositories.
//
// The task is an owner (reservation.Owner): f's context, the grant and the handles are its.
// When tasks hold and wait in a circle, one of them gets a *reservation.DeadlockError, which
// counts as running out of memory. If f has several goroutines that wait or release,
// Grant.Owner().SetWorkers must get their number: else the owner counts as stuck when one of them
// waits.
//
// If the inputs can never be in one of the spaces together, with the output and overhead that the
// task states, RunTask fails at once with a *reservation.ExceededError. If an input is in a lost
// GPU, it fails with a *tier.LostError. Nothing is moved in these cases.
func (e *Engine) RunTask(ctx context.Context, t Task, f func(context.Context, *Grant, []*Handle) error) (err error) {
	owner := reservation.OwnerOf(ctx)
	if owner == nil {
		owner = reservation.NewOwner(t.Operator)
	}
	inside := e.calls.Enter()
	leave := func() {
		if inside {
			e.calls.Leave()
			inside = false
		}
	}
	defer leave()
	if exec.IsEnabled() {
		task, end := exec.NewTask(ctx, "spillway task "+owner.Name())
		ctx = task
		defer end.End()
	}
	in := &taskInputs{mover: e.mover, owner: owner}
	var ending error
	done := false
	defer func() { // also after a panic
		if !done {
			ending = in.end(t.Inputs, (*repository.Claim).Restore)
		}
		err = errors.Join(e.heldBy(err), ending)
	}()
	if !inside {
		return fmt.Errorf("spillway: task %q: %w", t.Operator, tier.ErrClosed)
	}
	if i := slices.Index(t.Inputs, nil); i >= 0 {
		t.Inputs = slices.DeleteFunc(slices.Clone(t.Inputs), func(c *repository.Claim) bool { return c == nil })
		return fmt.Errorf("spillway: task %q: input %d is nil", t.Operator, i)
	}
	for _, c := range t.Inputs {
		in.batches = append(in.batches, c.Batches()...)
	}
	for _, b := range in.batches {
		if s := b.Space(); s != nil && s.Lost() != nil {
			return fmt.Errorf("spillway: task %q: bringing batch %d: %w", t.Operator, b.ID(), s.Lost())
		}
	}
	in.to = cmp.Or(t.In, e.cfg.Limits.Admission.Strategy, nearestGPU(in.batches))
	in.announce()
	if in.ahead = len(in.batches); t.ReadAhead != 0 {
		in.ahead = min(in.ahead, max(0, t.ReadAhead))
	}
	e.ahead.change(func() { e.ahead.waiting = append(e.ahead.waiting, in) })
	defer e.ahead.leave(in)
	waiting := time.Now()
	estimate := Estimate{
		Operator: t.Operator, In: in.to, Input: in.bytes(), Inputs: in.charges,
		Output: t.Output, Overhead: t.Overhead, Owner: owner,
	}
	return e.admitter.Run(ctx, estimate, func(ctx context.Context, g *Grant) (err error) {
		e.ahead.leave(in)
		if e.cfg.Events != nil {
			var origin events.Origin
			if len(in.batches) > 0 {
				origin = in.batches[0].Info().Place.Origin()
			}
			origin.Task, origin.TaskID = owner.Name(), e.tasks.Add(1)
			ctx = events.With(ctx, origin)
			begun := time.Now()
			e.cfg.Events(Event{Kind: events.TaskBegun, Context: ctx, Origin: origin, Took: begun.Sub(waiting)})
			err = errPanicked // until it returns something
			defer func() {
				waiting = time.Now() // for the next attempt
				e.cfg.Events(Event{
					Kind: events.TaskEnded, Context: ctx, Origin: origin, Took: waiting.Sub(begun), Err: err,
				})
			}()
		}
		defer func() { // also after a panic
			if !done {
				err = errors.Join(err, in.close())
			}
		}()
		if err := in.bring(ctx, g); err != nil {
			return err
		}
		g.InputsHere()
		e.ahead.change(func() { e.ahead.working++ })
		leave() // so that Close does not wait for f
		err = func() error {
			defer func() {
				inside = e.calls.Enter() // false after Close: the call goes on without
				e.ahead.change(func() { e.ahead.working-- })
			}()
			return f(ctx, g, slices.Clone(in.handles))
		}()
		if err != nil {
			return err
		}
		// Now, so that the next task finds the room; and whatever goes wrong, the task is
		// not tried again, because there is nothing to try it with.
		done, ending = true, in.end(t.Inputs, (*repository.Claim).Consume)
		return nil
	})
}

// errPanicked is the error in the event of a task that panicked.
var errPanicked = errors.New("spillway: the task panicked")

// taskInputs are the batches of a task. It is used by one goroutine at a time.
type taskInputs struct {
	mover   *convert.Mover
	owner   *reservation.Owner
	to      reservation.Strategy // where the task may run
	batches []*batch.Batch
	handles []*Handle // by batch; nil if it is not locked
	pending []bool    // by batch; a task was created for it, until the end

	ahead   int            // so many of the batches are brought ahead
	skipped []*batch.Batch // but for these; for aheadOfTasks alone
}

// nearestGPU is any GPU: the nearest to the largest of the batches that is in slower memory first.
func nearestGPU(batches []*batch.Batch) reservation.Strategy {
	to, largest := reservation.AnyInTier(tier.GPU), int64(-1)
	for _, b := range batches {
		if now := b.Snapshot(); now.Space.Valid() && !now.Space.Kind.IsDevice() && now.Bytes > largest {
			to, largest = reservation.ToUpgrade(now.Space, tier.GPU), now.Bytes
		}
	}
	return to
}

// announce creates tasks for the batches: while the task waits, its inputs have their place in the
// queue, for the monitor to see, whatever it waits for. They have them until the end, so that one
// which runs out of memory keeps its place. A batch that is being moved gets its task when the
// admission looks again.
func (in *taskInputs) announce() {
	if in.pending == nil {
		in.pending = make([]bool, len(in.batches))
	}
	for i, b := range in.batches {
		if !in.pending[i] {
			in.pending[i] = b.TryCreateTask() == nil
		}
	}
}

// bytes returns how large the inputs are as images, wherever they are and however small they are
// there. The output of the task does not depend on that.
func (in *taskInputs) bytes() (n int64) {
	for _, b := range in.batches {
		if now := b.Info(); now.Descriptor != nil {
			n += now.Descriptor.Body
		} else { // a payload that is not the engine's
			n += now.Bytes
		}
	}
	return n
}

// charges is the Inputs of the task's estimate, which is called before each wait.
func (in *taskInputs) charges(s *tier.Space) (there, missing int64) {
	in.announce()
	return in.mover.Charges(s, in.batches...)
}

// bring locks the batches in the grant's space: first those that are there, so that they stay, and
// then the others, with memory that was reserved for them.
func (in *taskInputs) bring(ctx context.Context, g *Grant) (err error) {
	in.handles = make([]*Handle, len(in.batches))
	for i, b := range in.batches {
		// It fails if the batch is elsewhere, being moved, or was dropped.
		if h, err := b.TryRead(g.Reservation().Space().ID()); err == nil {
			h.SetOwner(in.owner)
			in.handles[i] = h
		}
	}
	for i, b := range in.batches {
		if in.handles[i] == nil {
			if in.handles[i], err = in.mover.ReadIn(ctx, b, g.Reservation()); err != nil {
				return err
			}
		}
	}
	return nil
}

// end takes back the tasks of announce, ends the claims, and then lets go of the batches.
func (in *taskInputs) end(claims []*repository.Claim, how func(*repository.Claim) error) error {
	for i, pending := range in.pending {
		if pending {
			_ = in.batches[i].CancelTask() // or it was used up or dropped meanwhile
		}
	}
	in.pending = nil
	var errs []error
	for _, c := range claims {
		errs = append(errs, how(c))
	}
	return errors.Join(append(errs, in.close())...)
}

// close lets go of the batches that are locked.
func (in *taskInputs) close() error {
	var errs []error
	for _, h := range in.handles {
		if h != nil {
			errs = append(errs, h.Close())
		}
	}
	in.handles = nil
	return errors.Join(errs...)
}
