package test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// snatcher is a program's observer that begins to move a batch as soon as it is in some state.
type snatcher struct {
	batch.Registrar
	batch   atomic.Pointer[batch.Batch] // nil: none
	when    func(batch.Info) bool
	transit *batch.Transit // nil if it could not
	then    func()
}

func (s *snatcher) BatchChanged(b *batch.Batch, now batch.Info) {
	s.Registrar.BatchChanged(b, now)
	if b != s.batch.Load() || !s.when(now) {
		return
	}
	s.batch.Store(nil)
	s.transit, _ = b.TryTransit()
	s.then()
}

// claimOne puts a batch in the GPU that s observes, and claims it.
func (s *snatcher) claimOne(t *testing.T, eng *spillway.Engine, repo *repository.Repository) *repository.Claim {
	t.Helper()
	p, err := eng.Mover().Ingest(t.Context(), numberedRecord(1, 300, wordList(1, 10)), reservation.AnyInTier(tier.GPU))
	if err != nil {
		t.Fatal(err)
	}
	s.Registrar = eng.Observer().(batch.Registrar)
	b, err := batch.New(batch.Options{ID: 1, Payload: p, Observer: s})
	if err == nil {
		err = repo.PutBatch(0, b)
	}
	if err != nil {
		t.Fatal(err)
	}
	c := mustClaim(t, repo, 1)
	s.batch.Store(b)
	return c
}

// TestInputTakenBeforeItsLock: an input that is moved between the look and the lock has no task
// when RunTask has ended.
func TestInputTakenBeforeItsLock(t *testing.T) {
	eng, repo := openTasks(t, 1<<20, 1<<20, 0, 0)
	ctx, cancel := context.WithCancel(t.Context())
	s := &snatcher{when: func(i batch.Info) bool { return i.Pending > 0 }, then: cancel}
	c := s.claimOne(t, eng, repo)
	task := spillway.Task{Inputs: []*repository.Claim{c}, Output: 1000}
	err := eng.RunTask(ctx, task, func(context.Context, *spillway.Grant, []*spillway.Handle) error { return nil })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("it ended with %v", err)
	}
	if s.transit == nil {
		t.Fatal("the input was not taken")
	}
	if err := s.transit.Abort(); err != nil {
		t.Error(err)
	}
	if info := c.Batches()[0].Info(); info.State != batch.Idle || info.Pending != 0 {
		t.Errorf("the input is left as %+v", info)
	}
	closeClean(t, eng)
}

// TestInputsAreGoneBeforeTheirHandles: what has been consumed is not moved.
func TestInputsAreGoneBeforeTheirHandles(t *testing.T) {
	eng, repo := openTasks(t, 1<<20, 1<<20, 0, 0)
	ran := false
	s := &snatcher{when: func(i batch.Info) bool {
		return ran && (i.Active == 0 || i.State == batch.Released)
	}}
	s.then = func() {
		if s.transit != nil {
			t.Errorf("the input could be moved: %v", s.transit.Abort())
		}
	}
	c := s.claimOne(t, eng, repo)
	err := eng.RunTask(t.Context(), spillway.Task{Inputs: []*repository.Claim{c}, Output: 1000},
		func(context.Context, *spillway.Grant, []*spillway.Handle) error { ran = true; return nil })
	if err != nil {
		t.Error(err)
	}
	if s.batch.Load() != nil {
		t.Error("nobody was told that the input is gone")
	}
	closeClean(t, eng)
}

// TestClaimThatTheTaskEnds: a task whose claim cannot be ended by RunTask, because the task has
// done so, gets an error.
func TestClaimThatTheTaskEnds(t *testing.T) {
	for name, end := range map[string]func(*repository.Claim) error{"restored": (*repository.Claim).Restore, "consumed": (*repository.Claim).Consume} {
		t.Run(name, func(t *testing.T) {
			eng, repo := openTasks(t, 1<<20, 1<<20, 1, 300)
			c := mustClaim(t, repo, 1)
			err := eng.RunTask(t.Context(), spillway.Task{Inputs: []*repository.Claim{c}, Output: 1000},
				func(context.Context, *spillway.Grant, []*spillway.Handle) error { return end(c) })
			if !errors.Is(err, tier.ErrReleased) {
				t.Errorf("it ended with %v", err)
			}
			closeClean(t, eng)
		})
	}
}
