package test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// twoOnGPU puts two batches on the GPU that fill most of it.
func twoOnGPU(ctx context.Context, t *testing.T) (*spillway.Engine, [2]*batch.Batch, *tier.Space) {
	t.Helper()
	eng, repo := openWith(t, 1<<20, 4<<20)
	var all [2]*batch.Batch
	for i := range all {
		gpu := repository.WithPlacement(reservation.AnyInTier(tier.GPU))
		if err := repo.Put(ctx, i, numberedRecord(int64(i), 9000, wordList(1, 1)), gpu); err != nil {
			t.Fatal(err)
		}
		for b := range repo.Batches(i) {
			all[i] = b
		}
		if s := all[i].Info(); s.Space.Kind != tier.GPU {
			t.Fatalf("%d bytes lie in %s: the test shows nothing", s.Bytes, s.Space)
		}
	}
	space, _ := eng.Reservations().Spaces().ByID(tier.ID{Kind: tier.GPU})
	if free := space.State().Available; free > space.State().Limit*2/5 {
		t.Fatalf("%d of %d bytes are free: the test shows nothing", free, space.State().Limit)
	}
	return eng, all, space
}

// What is on the GPU and can be moved is moved: there is no deadlock error.
func TestOwnersWaitForTheMonitor(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // only a hang takes so long
	defer cancel()
	eng, _, space := twoOnGPU(ctx, t)
	on := reservation.Specific(space.ID())
	a, err := eng.Reservations().Reserve(ctx, on, space.State().Available,
		&reservation.Options{Owner: reservation.NewOwner("a")})
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Grow(ctx, space.State().Limit/4); err != nil {
		t.Fatal(err)
	}
	if eng.Stats().Edges == nil {
		t.Error("nothing was moved: the test shows nothing")
	}
	if err := a.Release(); err != nil {
		t.Error(err)
	}
}

// Two tasks work on a batch each and want more room than is left. One of them gets the error,
// closes its batch, and begins again when the other is done.
func TestDeadlockThroughTheEngine(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // only a hang takes so long
	defer cancel()
	eng, batches, space := twoOnGPU(ctx, t)
	on := reservation.Specific(space.ID())
	begin, told := make(chan struct{}, len(batches)), make(chan *reservation.DeadlockError, 100)
	both := make(chan struct{})
	work := func(name string, b *batch.Batch) error {
		owner := reservation.NewOwner(name)
		ctx := owner.Context(ctx)
		for first := true; ; first = false {
			h, err := eng.Mover().Acquire(ctx, b, on)
			if err == nil && first {
				begin <- struct{}{}
				<-both
			}
			var r *reservation.Reservation
			if err == nil {
				if r, err = eng.Reservations().Reserve(ctx, on, space.State().Limit/2, &reservation.Options{Owner: owner}); err == nil {
					err = r.Release()
				}
				err = errors.Join(err, h.Close())
			}
			var e *reservation.DeadlockError
			if !errors.As(err, &e) {
				return err
			}
			told <- e
			if err := e.Wait(ctx); err != nil { // until the other has the room
				return err
			}
		}
	}
	done := make(chan error)
	for i, b := range batches {
		go func() { done <- work([]string{"a", "b"}[i], b) }()
	}
	<-begin
	<-begin
	close(both)
	if err := errors.Join(<-done, <-done); err != nil {
		t.Fatal(err)
	}
	if len(told) == 0 {
		t.Fatal("nobody was told: the test shows nothing")
	}
	for range len(told) {
		if e := <-told; e.Space != space.ID() || e.Requested < space.State().Limit/2 || e.Hint == "" {
			t.Errorf("it was told %+v", e)
		}
	}
}
