package test

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestWaitWhileAnotherOwnerRuns: an owner has a batch in memory of its own reservation, holds a
// handle on it, and waits for as much as another owner holds, which runs and does nothing for minutes.
// The wait goes on: the memory of the batch must not count for both the reservation and the handle.
func TestWaitWhileAnotherOwnerRuns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		eng := openMarked(t, mib, func(c *spillway.Config) {
			c.StallTimeout = time.Second
			c.GPUMarks = tier.Marks{Limit: 1, Trigger: 1, Stop: 0.9}
		})
		repo := scanOf(t, eng)
		rec := arrowgen.Ints(1, 40_000, 1) // a third of the GPU
		defer rec.Release()
		if err := repo.Put(t.Context(), 0, rec, in(tier.Host)); err != nil {
			t.Fatal(err)
		}
		b, _ := repo.Peek(0)
		gpu := gpuOf(t, eng)
		onGPU := reservation.Specific(gpu.ID())
		waits, runs := reservation.NewOwner("waits"), reservation.NewOwner("runs")
		own, err := eng.Reservations().Reserve(t.Context(), onGPU, b.Info().Bytes, &reservation.Options{Owner: waits})
		if err != nil {
			t.Fatal(err)
		}
		handle, err := eng.Mover().AcquireIn(t.Context(), b, own)
		if err != nil {
			t.Fatal(err)
		}
		need := gpu.State().Available
		others, err := eng.Reservations().Reserve(t.Context(), onGPU, need, &reservation.Options{Owner: runs})
		if err != nil {
			t.Fatal(err)
		}
		got := make(chan error, 1)
		go func() {
			r, err := eng.Reservations().Reserve(t.Context(), onGPU, need, &reservation.Options{Owner: waits})
			if err == nil {
				err = r.Release()
			}
			got <- err
		}()
		time.Sleep(2 * time.Minute)
		select {
		case err := <-got:
			t.Errorf("the wait ended with %v, while the other owner runs", err)
			got <- nil
		default:
		}
		if err := others.Release(); err != nil {
			t.Error(err)
		}
		if err := errors.Join(<-got, handle.Close(), own.Release()); err != nil {
			t.Error(err)
		}
		closeRepo(t, eng, repo)
	})
}

// TestOneStuckWaitFailsAtATime: goroutines without an owner hold a batch each and wait for another.
// One of them gets the error and takes its time, less than StallTimeout, to close its batch. No other
// wait fails meanwhile, because all can go on then.
func TestOneStuckWaitFailsAtATime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const stallTimeout = 10 * time.Second
		eng := openMarked(t, mib, func(c *spillway.Config) {
			c.HostMemory, c.StallTimeout, c.GPUMarks = spillway.Bytes(8*mib), stallTimeout, tier.Marks{}
		})
		repo := scanOf(t, eng)
		fillGPU(t.Context(), t, eng, repo, 2*crowdSize)
		onGPU := reservation.AnyInTier(tier.GPU)
		var failed atomic.Int64
		var all, holding sync.WaitGroup
		holding.Add(crowdSize)
		for i := range crowdSize {
			first, _ := repo.Peek(2 * i)
			second, _ := repo.Peek(2*i + 1)
			all.Go(func() {
				one, err := eng.Mover().Acquire(t.Context(), first, onGPU)
				holding.Done()
				if err != nil {
					t.Errorf("worker %d: %v", i, err)
					return
				}
				holding.Wait()
				two, err := eng.Mover().Acquire(t.Context(), second, onGPU)
				switch {
				case errors.Is(err, reservation.ErrDeadlock):
					failed.Add(1)
					time.Sleep(stallTimeout * 9 / 10)
				case err != nil:
					t.Errorf("worker %d: %v", i, err)
				default:
					if err := two.Close(); err != nil {
						t.Error(err)
					}
				}
				if err := one.Close(); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if n := failed.Load(); n != 1 {
			t.Errorf("%d waits failed, want 1", n)
		}
		closeRepo(t, eng, repo)
	})
}
