package spillway_test

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

// snatcher is a program's observer that begins to move a batch when the first task for it is created.
type snatcher struct {
	batch.Registrar
	batch   atomic.Pointer[batch.Batch]
	transit *batch.Transit // nil before it has
	then    func()
}

func (s *snatcher) BatchChanged(b *batch.Batch) {
	s.Registrar.BatchChanged(b)
	if b != s.batch.Load() || b.Info().Pending == 0 {
		return
	}
	s.batch.Store(nil)
	s.transit, _ = b.TryTransit()
	s.then()
}

// TestInputTakenBeforeItsLock: an input that somebody begins to move between the look and the lock is nobody's
// task when RunTask has ended.
func TestInputTakenBeforeItsLock(t *testing.T) {
	eng, repo := openTasks(t, 1<<20, 1<<20, 0, 0)
	p, err := eng.Mover().Ingest(t.Context(), numberedRecord(1, 300, wordList(1, 10)), reservation.AnyInTier(tier.GPU))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	s := &snatcher{Registrar: eng.Observer().(batch.Registrar), then: cancel}
	b, err := batch.New(batch.Options{ID: 1, Payload: p, Observer: s})
	if err == nil {
		err = repo.PutBatch(0, b)
	}
	if err != nil {
		t.Fatal(err)
	}
	c := mustClaim(t, repo, 1)
	s.batch.Store(b)
	task := spillway.Task{Inputs: []*repository.Claim{c}, Output: 1000}
	err = eng.RunTask(ctx, task, func(context.Context, *spillway.Grant, []*spillway.Handle) error { return nil })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("it ended with %v", err)
	}
	if s.transit == nil {
		t.Fatal("the input was not taken")
	}
	if err := s.transit.Abort(); err != nil {
		t.Error(err)
	}
	if info := b.Info(); info.State != batch.Idle || info.Pending != 0 {
		t.Errorf("the input is left as %+v", info)
	}
	closeClean(t, eng)
}
