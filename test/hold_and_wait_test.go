package test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

const crowdSize = 16

// fullGPU puts batches into host memory, of which the GPU holds as many as there are
// workers and not one more, and returns the repository.
func fullGPU(ctx context.Context, t *testing.T, batches int) (*spillway.Engine, *repository.Repository, *tier.Space) {
	t.Helper()
	eng, repo := openWith(t, 1<<20, 8<<20)
	return eng, repo, fillGPU(ctx, t, eng, repo, batches)
}

// fillGPU does so in an engine whose GPU has 1 MiB, and returns that space.
func fillGPU(
	ctx context.Context,
	t *testing.T,
	eng *spillway.Engine,
	repo *repository.Repository,
	batches int,
) *tier.Space {
	t.Helper()
	rec := arrowgen.Ints(1, 7000, 1) // 16 of them fill the GPU
	defer rec.Release()
	for i := range batches {
		if err := repo.Put(ctx, i, rec, repository.WithPlacement(reservation.AnyInTier(tier.Host))); err != nil {
			t.Fatal(err)
		}
	}
	b, _ := repo.Peek(0)
	gpu := gpuOf(t, eng)
	if n := b.Info().Bytes; gpu.State().Limit/n != crowdSize {
		t.Fatalf(
			"the GPU has room for %d batches of %d bytes, want %d: the test shows nothing",
			gpu.State().Limit/n,
			n,
			crowdSize,
		)
	}
	return gpu
}

// TestHoldAndWaitOnHandles: sixteen goroutines hold a batch on the GPU each and acquire another
// one. Those with the deadlock error give way, and all finish.
func TestHoldAndWaitOnHandles(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // only a hang takes so long
	defer cancel()
	eng, repo, gpu := fullGPU(ctx, t, 2*crowdSize)
	onGPU := reservation.AnyInTier(tier.GPU)
	var told atomic.Int64
	var all, holding sync.WaitGroup
	holding.Add(crowdSize)
	for i := range crowdSize {
		owner := reservation.NewOwner(fmt.Sprint("worker ", i))
		ctx := owner.Context(ctx)
		first, _ := repo.Peek(2 * i)
		second, _ := repo.Peek(2*i + 1)
		all.Go(func() {
			for once := true; ; once = false {
				one, err := eng.Mover().Acquire(ctx, first, onGPU)
				if once {
					holding.Done()
					holding.Wait()
				}
				if err == nil {
					var two *spillway.Handle
					if two, err = eng.Mover().Acquire(ctx, second, onGPU); err == nil {
						err = two.Close()
					}
					err = errors.Join(err, one.Close())
				}
				var e *reservation.DeadlockError
				if !errors.As(err, &e) {
					if err != nil {
						t.Errorf("worker %d: %v", i, err)
					}
					return
				}
				if told.Add(1) == 1 &&
					(e.Held < first.Info().Bytes || len(e.Holdings.Holders) == 0 || e.Holdings.Holders[0].Plan != "p" || e.Space != gpu.ID()) {
					t.Errorf("worker %d was told %+v", i, *e)
				}
				if err := e.Wait(ctx); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	if told.Load() == 0 {
		t.Error("nobody was told: the test shows nothing")
	}
}

// TestTasksHoldAndWait: the same with tasks, which have an input each and acquire another batch.
// They are owners without Options.Owner; one with the error is retried.
func TestTasksHoldAndWait(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // only a hang takes so long
	defer cancel()
	const tasks = 2
	eng, repo := openWith(t, 1<<20, 8<<20)
	if err := eng.Admitter().SetThreads(tasks); err != nil {
		t.Fatal(err)
	}
	if err := eng.Admitter().SetThreshold(1); err != nil {
		t.Fatal(err)
	}
	rec := arrowgen.Ints(1, 45000, 1) // two fit
	defer rec.Release()
	for i := range 2 * tasks {
		if err := repo.Put(ctx, i, rec, repository.WithPlacement(reservation.AnyInTier(tier.Host))); err != nil {
			t.Fatal(err)
		}
	}
	var holding sync.WaitGroup
	holding.Add(tasks)
	var all sync.WaitGroup
	var told atomic.Int64
	for i := range tasks {
		extra, _ := repo.Peek(tasks + i)
		all.Go(func() {
			c, err := repo.Claim(ctx, i, 1)
			if err != nil {
				t.Error(err)
				return
			}
			first := true
			err = eng.RunTask(ctx, spillway.Task{
				Operator: fmt.Sprint(
					"join ",
					i,
				),
				Inputs:   []*repository.Claim{c},
				Output:   admission.None,
				Overhead: admission.None,
			}, func(ctx context.Context, g *spillway.Grant, in []*spillway.Handle) error {
				if o := in[0].Owner(); o != g.Owner() || reservation.OwnerOf(ctx) != o {
					t.Errorf(
						"the input is of %v and the context of %v, want %v",
						o,
						reservation.OwnerOf(ctx),
						g.Owner(),
					)
				}
				if first {
					first = false
					holding.Done()
					holding.Wait()
				}
				h, err := eng.Mover().Acquire(ctx, extra, reservation.AnyInTier(tier.GPU))
				if errors.Is(err, reservation.ErrDeadlock) {
					told.Add(1)
				}
				if err == nil {
					err = h.Close()
				}
				return err
			})
			if err != nil {
				t.Errorf("task %d: %v", i, err)
			}
		})
	}
	all.Wait()
	if told.Load() == 0 {
		t.Error("nobody was told: the test shows nothing")
	}
}

// TestInputThatIsThereIsTheTasks: the handle of an input that lies where the task needs it already
// has the task's owner, as one that is brought does.
func TestInputThatIsThereIsTheTasks(t *testing.T) {
	eng, repo := openWith(t, 1<<20, 8<<20)
	rec := arrowgen.Ints(1, 1000, 1)
	defer rec.Release()
	if err := repo.Put(t.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.GPU))); err != nil {
		t.Fatal(err)
	}
	c, err := repo.Claim(t.Context(), 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := eng.RunTask(t.Context(), spillway.Task{
		Operator: "join", Inputs: []*repository.Claim{c}, Output: admission.None, Overhead: admission.None,
	}, func(_ context.Context, g *spillway.Grant, in []*spillway.Handle) error {
		if o := in[0].Owner(); o == nil || o != g.Owner() {
			t.Errorf("the input is of %v, want %v", o, g.Owner())
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// TestTasksAndGrantsHoldAndWait: two tasks of RunTask and two of Admit hold most of the GPU
// together, and each wants more than is left. None of them names an owner. One gets the deadlock
// error at once, long before StallTimeout, and all of them finish.
func TestTasksAndGrantsHoldAndWait(t *testing.T) { synctest.Test(t, testTasksAndGrantsHoldAndWait) }

func testTasksAndGrantsHoldAndWait(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	eng, repo := openWith(t, 1<<20, 8<<20)
	const tasks, each = 4, 200_000 // and 226,000 bytes are left
	if err := errors.Join(eng.Admitter().SetThreads(tasks), eng.Admitter().SetThreshold(1)); err != nil {
		t.Fatal(err)
	}
	rec := arrowgen.Ints(1, 20000, 1)
	defer rec.Release()
	for i := range tasks {
		if err := repo.Put(
			t.Context(),
			i,
			rec,
			repository.WithPlacement(reservation.AnyInTier(tier.Host)),
		); err != nil {
			t.Fatal(err)
		}
	}
	begun := time.Now()
	var told atomic.Int64
	var holding, all sync.WaitGroup
	holding.Add(tasks)
	var once [tasks]sync.Once
	// work is what each of them does with its grant.
	work := func(ctx context.Context, i int, g *spillway.Grant) error {
		once[i].Do(holding.Done)
		holding.Wait()
		err := g.Reservation().Grow(ctx, 2*each)
		if errors.Is(err, reservation.ErrDeadlock) && told.Add(1) == 1 && time.Since(begun) > time.Second {
			t.Errorf("the first is told after %v", time.Since(begun))
		}
		return err
	}
	for i := range 2 {
		all.Go(func() {
			if err := eng.RunTask(
				ctx,
				spillway.Task{Operator: "run", Output: each, Overhead: admission.None},
				func(ctx context.Context, g *spillway.Grant, _ []*spillway.Handle) error { return work(ctx, i, g) },
			); err != nil {
				t.Errorf("task %d: %v", i, err)
			}
		})
	}
	// A task that is admitted brings its input with the grant's reservation, as RunTask does.
	admitted := func(i int, in *batch.Batch) error {
		g, err := eng.Admit(
			ctx,
			spillway.Estimate{
				Operator: "admit",
				Input:    in.Info().Bytes,
				Output:   each - in.Info().Bytes,
				Overhead: admission.None,
			},
		)
		if err != nil {
			return err
		}
		h, err := eng.Mover().AcquireIn(ctx, in, g.Reservation())
		if err == nil {
			if h.Owner() != g.Owner() {
				t.Errorf("the input is of %v, want %v", h.Owner(), g.Owner())
			}
			err = work(ctx, i, g)
			err = errors.Join(err, h.Close())
		}
		return errors.Join(err, g.Release())
	}
	for i := 2; i < tasks; i++ {
		in, _ := repo.Peek(i)
		all.Go(func() {
			for {
				err := admitted(i, in)
				var e *reservation.DeadlockError
				if !errors.As(err, &e) {
					if err != nil {
						t.Errorf("grant %d: %v", i, err)
					}
					return
				}
				if err := e.Wait(ctx); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	if told.Load() == 0 {
		t.Error("nobody was told: the test shows nothing")
	}
}

// TestDrawnBytesAreHeldOnce: an input that was brought with a task's reservation is held once, by
// the handle or by the reservation. Held twice, it would look as if what others hold were not
// enough.
func TestDrawnBytesAreHeldOnce(t *testing.T) { synctest.Test(t, testDrawnBytesAreHeldOnce) }

func testDrawnBytesAreHeldOnce(t *testing.T) {
	ctx := t.Context()
	eng, repo := openWith(t, 1<<20, 8<<20)
	rec := arrowgen.Ints(1, 40000, 1) // 316 KiB
	defer rec.Release()
	if err := repo.Put(ctx, 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.Host))); err != nil {
		t.Fatal(err)
	}
	input, _ := repo.Peek(0)
	onGPU := reservation.AnyInTier(tier.GPU)
	other, err := eng.Reservations().Reserve(ctx, onGPU, 450<<10, &reservation.Options{Owner: reservation.NewOwner("another, that works")})
	if err != nil {
		t.Fatal(err)
	}
	r, err := eng.Reservations().Reserve(ctx, onGPU, 400<<10, &reservation.Options{Owner: reservation.NewOwner("a task")})
	if err != nil {
		t.Fatal(err)
	}
	h, err := eng.Mover().AcquireIn(ctx, input, r)
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(time.Second, func() {
		if err := other.Release(); err != nil {
			t.Error(err)
		}
	})
	if err := r.Grow(ctx, 400<<10); err != nil {
		t.Errorf("%v, though another owner was to release enough", err)
	}
	if err := errors.Join(h.Close(), r.Release()); err != nil {
		t.Error(err)
	}
}
