// Package busyengine runs random work on an engine, for tests of metrics and traces, which are
// modules of their own.
package busyengine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
)

// Open opens an engine of 1 MiB of simulated GPU memory, 2 MiB of host memory and a disk of 64 MiB,
// with a quota. The caller closes it.
func Open(t testing.TB, change func(*spillway.Config)) *spillway.Engine {
	t.Helper()
	limit, err := quota.New(quota.Config{Limit: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	cfg := spillway.Config{
		GPUs:          []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}},
		HostMemory:    spillway.Bytes(2 << 20),
		Disks:         []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 << 20)}},
		Limits:        spillway.Limits{SharedQuota: limit},
		MonitorPeriod: time.Millisecond,
		Logger:        slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
	if change != nil {
		change(&cfg)
	}
	eng, err := spillway.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return eng
}

// Workers is the number of goroutines of Work, and so the maximum number of tasks that run at once.
const Workers = 4

// Work puts, moves and drains batches and runs tasks at random, steps times on each worker, with
// more data than GPU and host memory hold. When it returns, its work has ended. Batches remain in
// the repositories of two plans until the engine is closed.
func Work(ctx context.Context, eng *spillway.Engine, seed uint64, steps int) error {
	var repos []*spillway.Repository
	for i := range 2 {
		plan, err := eng.Plan(fmt.Sprintf("query-%d", i))
		if err != nil {
			return err
		}
		for port, operator := range []string{"scan", "join"} {
			repo, err := plan.Repository(operator, port)
			if err != nil {
				return err
			}
			repos = append(repos, repo)
		}
	}
	errs := make([]error, Workers)
	var all sync.WaitGroup
	for i := range errs {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(i)))
			for n := 0; n < steps && errs[i] == nil; n++ {
				repo := repos[rng.IntN(len(repos))]
				what := rng.IntN(10)
				if n < steps/2 && n%4 > 0 { // fill the memories first
					what = 0
				}
				errs[i] = step(ctx, eng, repo, rng, what)
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// step does one operation, which what chooses from 0 to 9.
func step(ctx context.Context, eng *spillway.Engine, repo *spillway.Repository, rng *rand.Rand, what int) error {
	kinds := []tier.Kind{tier.GPU, tier.Host, tier.Disk}
	switch {
	case what < 4:
		return put(ctx, repo, rng, kinds[rng.IntN(2)])
	case what < 5:
		left := 1 + rng.IntN(3)
		for h, err := range repo.Drain(ctx, 0, kinds[rng.IntN(2)], repository.NoWait()) {
			if err != nil {
				return err
			}
			if err := h.Close(); err != nil {
				return err
			}
			if left--; left == 0 {
				break
			}
		}
		return nil
	case what < 8:
		return task(ctx, eng, repo, rng)
	case what < 9:
		b, ok := repo.Peek(0)
		if !ok {
			return nil
		}
		err := eng.Mover().Move(ctx, b, reservation.AnyInTier(kinds[rng.IntN(3)]))
		if errors.Is(err, batch.ErrState) { // another worker took it
			return nil
		}
		return err
	}
	owner := &reservation.Options{Owner: reservation.NewOwner("hold")}
	in := reservation.AnyInTier(kinds[rng.IntN(2)])
	r, err := eng.Reservations().Reserve(ctx, in, int64(rng.IntN(400_000)), owner)
	if err != nil {
		return err
	}
	return r.Release()
}

// put puts a batch of random size.
func put(ctx context.Context, repo *spillway.Repository, rng *rand.Rand, k tier.Kind) error {
	rec := arrowgen.Ints(rng.Uint64(), 1000+rng.IntN(15000), 1)
	defer rec.Release()
	return repo.Put(ctx, 0, rec, repository.WithPlacement(reservation.AnyInTier(k)))
}

// task runs a task on some batches that puts another batch into host memory. The put does not wait
// for memory that tasks hold.
func task(ctx context.Context, eng *spillway.Engine, repo *spillway.Repository, rng *rand.Rand) error {
	claim, err := repo.Claim(ctx, 0, 1+rng.IntN(3), repository.NoWait(), repository.Unordered())
	if err != nil || claim == nil {
		return err
	}
	task := spillway.Task{
		Operator: []string{"sort", "hash"}[rng.IntN(2)],
		Inputs:   []*spillway.Claim{claim},
		Output:   int64(rng.IntN(100_000)),
	}
	return eng.RunTask(ctx, task, func(ctx context.Context, _ *spillway.Grant, _ []*spillway.Handle) error {
		return put(ctx, repo, rng, tier.Host)
	})
}
