package test

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

// olderAndYounger puts 20 batches of 1 MiB into a repository of one plan, and 10 into one of a later
// plan, which gives first. All are in the GPU.
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

// TestInputsOfAQueuedTaskStay: while a task waits for room, the batches that leave for it are others
// than its own inputs.
func TestInputsOfAQueuedTaskStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		eng := openMarked(t, 64*mib)
		repos, _ := olderAndYounger(t, eng)
		running, err := eng.Admit(t.Context(), spillway.Estimate{Output: 15 * mib, Overhead: admission.None})
		if err != nil {
			t.Fatal(err)
		}
		task := spillway.Task{Inputs: []*repository.Claim{mustClaim(t, repos[1], 10)}, Output: 15 * mib, Overhead: admission.None}
		if err := eng.RunTask(t.Context(), task, func(context.Context, *spillway.Grant, []*spillway.Handle) error {
			if eng.Stats().Monitor.Bytes == 0 {
				t.Error("nothing has left the GPU: the task did not wait")
			}
			for _, e := range eng.Stats().Edges {
				if e.To.Kind == tier.GPU && e.Bytes > 0 {
					t.Errorf("%d bytes had to come back", e.Bytes)
				}
			}
			return nil
		}); err != nil {
			t.Error(err)
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
	for name, rules := range map[string]admission.Rules{"a thread": {Threads: 1}, "no passing": {Threads: 8, Bypass: -1}} {
		t.Run(name, func(t *testing.T) { synctest.Test(t, func(t *testing.T) { othersLeave(t, rules) }) })
	}
}

func othersLeave(t *testing.T, rules admission.Rules) {
	eng := openMarked(t, 64*mib, func(c *spillway.Config) { c.Limits.Admission = rules })
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
