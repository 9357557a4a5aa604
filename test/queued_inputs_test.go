package test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

// olderAndYounger puts 20 batches of 1 MiB into a repository of one plan, and 10 into one of a
// later plan, which gives first. All are in the GPU.
func olderAndYounger(t *testing.T, eng *spillway.Engine) (repos []*repository.Repository, all []*batch.Batch) {
	t.Helper()
	for _, name := range []string{"older", "younger"} {
		plan, err := eng.Plan(name)
		if err != nil {
			t.Fatal(err)
		}
		repo, err := plan.Repository("scan", 0)
		if err != nil {
			t.Fatal(err)
		}
		repos = append(repos, repo)
	}
	all = onGPU(t, eng, 30)
	for i, b := range all {
		if err := repos[i/20].PutBatch(0, b); err != nil {
			t.Fatal(err)
		}
	}
	return repos, all
}

func closeAll(t *testing.T, repos []*repository.Repository) {
	t.Helper()
	for _, repo := range repos {
		if err := repo.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// TestInputsOfAQueuedTaskStay: while a task waits for room, the batches that leave for it are
// others than its own inputs.
func TestInputsOfAQueuedTaskStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		eng := openMarked(t, 64*mib, func(c *spillway.Config) { c.Limits.Admission.Threads = 2 })
		repos, _ := olderAndYounger(t, eng)
		running, err := eng.Admit(t.Context(), spillway.Estimate{Output: 15 * mib, Overhead: admission.None})
		if err != nil {
			t.Fatal(err)
		}
		task := spillway.Task{Inputs: []*repository.Claim{mustClaim(t, repos[1], 10)}, Output: 15 * mib, Overhead: admission.None}
		if err := eng.RunTask(t.Context(), task, func(context.Context, *spillway.Grant, []*spillway.Handle) error {
			for _, e := range eng.Stats().Edges {
				if e.To.Kind == tier.GPU && e.Bytes > 0 {
					t.Errorf("%d bytes had to come back", e.Bytes)
				}
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
		synctest.Wait() // what has left is counted after it made room
		if eng.Stats().Monitor.Bytes == 0 {
			t.Error("nothing has left the GPU: the task did not wait")
		}
		if err := running.Done(admission.Measured{}); err != nil {
			t.Error(err)
		}
		closeAll(t, repos)
		closeClean(t, eng)
	})
}

// TestInputsStayWhateverTheirTaskWaitsFor: so they do while it waits for a thread, or behind a task
// that none may pass.
func TestInputsStayWhateverTheirTaskWaitsFor(t *testing.T) {
	t.Parallel()
	for name, rules := range map[string]admission.Rules{"a thread": {Threads: 1}, "no passing": {Threads: 8, Bypass: -1}} {
		t.Run(name, func(t *testing.T) { synctest.Test(t, func(t *testing.T) { othersLeave(t, rules) }) })
	}
}

func othersLeave(t *testing.T, rules admission.Rules) {
	eng := openMarked(t, 64*mib, func(c *spillway.Config) {
		c.Limits.Admission = rules
		c.GPUMarks.Trigger = 1 // only demand makes batches leave
	})
	repos, all := olderAndYounger(t, eng)
	running, err := eng.Admit(t.Context(), spillway.Estimate{Output: mib, Overhead: admission.None})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 2)
	run := func(claims []*repository.Claim, output int64) {
		task := spillway.Task{Inputs: claims, Output: output, Overhead: admission.None}
		done <- eng.RunTask(t.Context(), task, func(context.Context, *spillway.Grant, []*spillway.Handle) error { return nil })
	}
	go run(nil, 60*mib) // cannot start beside another
	synctest.Wait()
	go run([]*repository.Claim{mustClaim(t, repos[1], 10)}, mib)
	synctest.Wait()
	if s := eng.Admitter().Stats(); s.Waiting != 2 {
		t.Fatalf("%+v: the tasks do not wait", s)
	}
	pending := 0
	for _, b := range all[20:] {
		pending += b.Info().Pending
	}
	r, err := eng.Reserve(t.Context(), spillway.Specific(tier.ID{Kind: tier.GPU}), 40*mib)
	if err != nil {
		t.Fatal(err)
	}
	inputs, others := 0, 0
	for i, b := range all {
		switch {
		case b.Info().Space.Kind == tier.GPU:
		case i >= 20:
			inputs++
		default:
			others++
		}
	}
	if pending != 10 || inputs != 0 || others == 0 {
		t.Errorf("of 10 inputs of a task that waits, %d are known as such; %d had to leave, and %d of 20 others", pending, inputs, others)
	}
	if err := r.Release(); err != nil {
		t.Error(err)
	}
	if err := running.Done(admission.Measured{}); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	closeAll(t, repos)
	closeClean(t, eng)
}

// evictor moves a batch to the host as soon as another is opened, as the monitor may.
type evictor struct {
	batch.Registrar
	eng        *spillway.Engine
	when, what *batch.Batch
	done       atomic.Bool
	err        error
}

func (e *evictor) BatchChanged(b *batch.Batch, now batch.Info) {
	e.Registrar.BatchChanged(b, now)
	if b == e.when && now.State == batch.Processing && !e.done.Swap(true) {
		host := tier.ID{Kind: tier.Host}
		e.err = e.eng.Mover().Evict(context.Background(), []*batch.Batch{e.what}, host, "trigger")[0]
	}
}

// TestInputsThatArriveAreHeld: two inputs are being moved when a task looks, and are in the GPU
// when it starts. They are held from then on. If one leaves just before that, the task needs
// another attempt.
func TestInputsThatArriveAreHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		eng := openMarked(t, 64*mib, func(c *spillway.Config) {
			c.GPUMarks.Trigger = 0.98
			c.Limits.Admission.MaxAttempts = 2
		})
		e := &evictor{Registrar: eng.Observer().(batch.Registrar), eng: eng}
		repo := scanOf(t, eng)
		var all []*batch.Batch
		for i := range 2 {
			p, err := eng.Mover().Ingest(t.Context(), numberedRecord(int64(i), 50_000, wordList(1, 10)), reservation.AnyInTier(tier.GPU))
			if err != nil {
				t.Fatal(err)
			}
			b, err := batch.New(batch.Options{ID: batch.ID(1000 + i), Payload: p, Observer: e})
			if err != nil {
				t.Fatal(err)
			}
			if err := repo.PutBatch(0, b); err != nil {
				t.Fatal(err)
			}
			all = append(all, b)
			defer b.Subscribe()() // the monitor itself leaves it where it is
		}
		e.when, e.what = all[0], all[1]
		claim := mustClaim(t, repo, 2)
		others, err := eng.Reserve(t.Context(), reservation.AnyInTier(tier.GPU), 60*mib)
		if err != nil {
			t.Fatal(err)
		}
		var transits []*batch.Transit
		for _, b := range all {
			tr, err := b.TryTransit()
			if err != nil {
				t.Fatal(err)
			}
			transits = append(transits, tr)
		}
		done := make(chan error)
		go func() {
			task := spillway.Task{Inputs: []*repository.Claim{claim}, Output: 4096, Overhead: admission.None}
			done <- eng.RunTask(t.Context(), task, func(context.Context, *spillway.Grant, []*spillway.Handle) error { return nil })
		}()
		synctest.Wait()
		for _, tr := range transits {
			if err := tr.Abort(); err != nil { // they have arrived
				t.Fatal(err)
			}
		}
		time.Sleep(time.Second)
		if n := eng.Admitter().Stats().Waiting; n != 1 {
			t.Fatalf("%d tasks wait", n)
		}
		if err := others.Release(); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Errorf("the task fails: %v (the input could be moved: %v)", err, e.err == nil)
		}
		if err := repo.Close(t.Context()); err != nil {
			t.Error(err)
		}
		closeClean(t, eng)
	})
}

// TestInputsKeepTheirPlace: a task that is tried again has its place in the queue still.
func TestInputsKeepTheirPlace(t *testing.T) {
	eng, repo := openTasks(t, 1<<20, 1<<20, 2, 300)
	first, behind := mustClaim(t, repo, 1), mustClaim(t, repo, 1)
	b, other := first.Batches()[0], behind.Batches()[0]
	var numbers []uint64
	err := eng.RunTask(t.Context(), spillway.Task{Inputs: []*repository.Claim{first}, Output: 1000}, func(context.Context, *spillway.Grant, []*spillway.Handle) error {
		now := b.Info()
		if now.Pending != 1 {
			t.Errorf("%d tasks are pending", now.Pending)
		}
		if numbers = append(numbers, now.Task); len(numbers) == 2 {
			return nil
		}
		if err := other.TryCreateTask(); err != nil {
			t.Error(err)
		}
		return tier.ErrNoSpace
	})
	if err != nil {
		t.Error(err)
	}
	if len(numbers) != 2 || numbers[0] != numbers[1] || numbers[1] >= other.Info().Task {
		t.Errorf("the input's task is %v, that of the task behind it %d", numbers, other.Info().Task)
	}
	if err := errors.Join(other.CancelTask(), behind.Restore()); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}

// TestTasksOfOthersStay: RunTask uses no task that another caller has created, also where it could
// not create its own because the input was being moved.
func TestTasksOfOthersStay(t *testing.T) {
	for _, moved := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			eng, repo := openTasks(t, 1<<20, 1<<20, 1, 300)
			claim := mustClaim(t, repo, 1)
			b := claim.Batches()[0]
			if err := b.TryCreateTask(); err != nil {
				t.Fatal(err)
			}
			done, failed := make(chan error), errors.New("the task fails")
			run := func() {
				done <- eng.RunTask(t.Context(), spillway.Task{Inputs: []*repository.Claim{claim}, Output: 1000},
					func(context.Context, *spillway.Grant, []*spillway.Handle) error { return failed })
			}
			if moved {
				tr, err := b.TryTransit()
				if err != nil {
					t.Fatal(err)
				}
				go run()
				synctest.Wait()
				if err := tr.Abort(); err != nil {
					t.Fatal(err)
				}
			} else {
				go run()
			}
			if err := <-done; !errors.Is(err, failed) {
				t.Errorf("it ended with %v", err)
			}
			if now := b.Info(); now.Pending != 1 || now.State != batch.TaskCreated {
				t.Errorf("the input is left as %+v", now)
			}
			if h, err := b.TryLock(b.Info().Space); err != nil {
				t.Errorf("the caller that created a task: %v", err)
			} else if err := h.Close(); err != nil {
				t.Error(err)
			}
			closeClean(t, eng)
		})
	}
}
