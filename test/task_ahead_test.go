package test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

// oneByOne has a GPU of so much memory, on which one task runs at a time.
func oneByOne(memory int64) func(*spillway.Config) {
	return func(c *spillway.Config) {
		c.GPUs = []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(memory)}}
		c.Limits.Admission.Threads = 1
	}
}

// tasksOf runs a task on each batch, in their order, with some work on each. It returns how long
// they took together.
func tasksOf(t testing.TB, eng *spillway.Engine, repo *repository.Repository, batches, each int, work time.Duration, ahead int) time.Duration {
	t.Helper()
	start := time.Now()
	var all sync.WaitGroup
	errs := make(chan error, batches)
	for range batches / each {
		c, err := repo.Claim(t.Context(), 0, each)
		if err != nil {
			t.Fatal(err)
		}
		queued := eng.Admitter().Stats()
		all.Go(func() {
			task := spillway.Task{Operator: "work", Inputs: []*repository.Claim{c}, Output: tier.Page, Overhead: admission.None, ReadAhead: ahead}
			errs <- eng.RunTask(t.Context(), task, func(context.Context, *spillway.Grant, []*spillway.Handle) error {
				time.Sleep(work)
				return nil
			})
		})
		for s := queued; s.Waiting == queued.Waiting && s.Admitted == queued.Admitted; s = eng.Admitter().Stats() {
			time.Sleep(time.Microsecond) // they are to wait in this order
		}
	}
	all.Wait()
	for range batches / each {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	return time.Since(start)
}

// aheadTo sums what was brought ahead to a tier.
func aheadTo(eng *spillway.Engine, k tier.Kind) (read, used, inVain int64) {
	for _, e := range eng.Stats().Edges {
		if e.To.Kind == k {
			read, used, inVain = read+e.Ahead, used+e.AheadUsed, inVain+e.AheadInVain
		}
	}
	return read, used, inVain
}

// TestTasksReadAhead: the inputs of tasks that wait come up while another task works. So tasks
// whose work takes as long as the disk's take half of the time, because both go on at once.
func TestTasksReadAhead(t *testing.T) {
	t.Parallel()
	const batches = 20
	tried := 0
	for name, share := range map[string]float64{"as long": 1, "shorter": 0.3, "longer": 3} {
		if tried++; testseed.Raced && tried > 1 { // any one: the order of a map is random
			continue
		}
		t.Run(name, func(t *testing.T) {
			var took [2]time.Duration
			var reading, work time.Duration
			for i, ahead := range []int{-1, 0} {
				synctest.Test(t, func(t *testing.T) {
					eng, repo, one := onSlowDisk(t, 8*mib, batches, oneByOne(32*mib))
					reading, work = batches*one, time.Duration(share*float64(one))
					took[i] = tasksOf(t, eng, repo, batches, 1, work, ahead)
					read, used, inVain := aheadTo(eng, tier.GPU)
					if (read > 0) != (ahead == 0) || used != read || inVain != 0 {
						t.Errorf("%d bytes were read ahead, %d used, %d in vain", read, used, inVain)
					}
					if err := repo.Close(t.Context()); err != nil {
						t.Error(err)
					}
					closeClean(t, eng)
				})
			}
			sum, most := reading+batches*work, max(reading, batches*work)
			if took[0] < sum*95/100 || took[1] > most*115/100 {
				t.Errorf("without reading ahead %v, with it %v; the work takes %v, the disk %v", took[0], took[1], batches*work, reading)
			}
		})
	}
}

// TestTasksReadAheadOf: the nearest tasks come first, no more of each than it says, and nothing
// beyond the stop mark. Where the GPU has no room for that, inputs come to host memory. Nothing
// comes while no task works.
func TestTasksReadAheadOf(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name      string
		memory    int64 // of the GPU
		gpus      int
		ahead     int
		gpu, host []uint64 // the batches that come there, by their number
	}{
		{"two tasks", 64 * mib, 1, 0, []uint64{1, 2, 3, 4, 5, 6}, nil},
		{"two of each", 64 * mib, 1, 2, []uint64{1, 2, 4, 5}, nil},
		{"none", 64 * mib, 1, -1, nil, nil},
		{"a small GPU", 4 * mib, 1, 0, []uint64{1, 2}, []uint64{3, 4, 5, 6}},
		{"two GPUs", 64 * mib, 2, 0, nil, []uint64{1, 2, 3, 4, 5, 6}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				eng, repo, _ := onSlowDisk(t, 32*mib, 12, oneByOne(c.memory), func(cfg *spillway.Config) {
					for len(cfg.GPUs) < c.gpus {
						cfg.GPUs = append(cfg.GPUs, cfg.GPUs[0])
					}
				})
				running, err := eng.Admit(t.Context(), spillway.Estimate{Output: 64 << 10, Overhead: admission.None})
				if err != nil {
					t.Fatal(err)
				}
				var claims []*repository.Claim
				done := make(chan error, 10)
				run := func(c *repository.Claim, ahead int, f func()) {
					task := spillway.Task{Inputs: []*repository.Claim{c}, Output: tier.Page, Overhead: admission.None, ReadAhead: ahead}
					done <- eng.RunTask(t.Context(), task, func(context.Context, *spillway.Grant, []*spillway.Handle) error { f(); return nil })
				}
				ended := make(chan struct{})
				claims = append(claims, mustClaim(t, repo, 1))
				go run(claims[0], -1, func() { <-ended })
				synctest.Wait()
				for range 3 {
					claims = append(claims, mustClaim(t, repo, 3))
					go run(claims[len(claims)-1], c.ahead, func() {})
					synctest.Wait()
				}
				time.Sleep(time.Minute)
				if read, _, _ := aheadTo(eng, tier.GPU); read != 0 {
					t.Errorf("%d bytes came while no task of RunTask works", read)
				}
				if err := running.Done(admission.Measured{}); err != nil {
					t.Error(err)
				}
				time.Sleep(time.Minute)
				var gpu, host []uint64
				for _, claim := range claims[1:] {
					for _, b := range claim.Batches() {
						switch now := b.Info(); now.Space.Kind {
						case tier.GPU:
							gpu = append(gpu, uint64(now.Place.Seq))
						case tier.Host:
							host = append(host, uint64(now.Place.Seq))
						}
					}
				}
				first := claims[0].Batches()[0].Info().Place.Seq
				for _, of := range [][]uint64{gpu, host} {
					for i := range of {
						of[i] -= first
					}
				}
				if !slices.Equal(gpu, c.gpu) || !slices.Equal(host, c.host) {
					t.Errorf("to the GPU came %v, want %v; to host memory %v, want %v", gpu, c.gpu, host, c.host)
				}
				close(ended)
				for range claims {
					if err := <-done; err != nil {
						t.Error(err)
					}
				}
				if err := repo.Close(t.Context()); err != nil {
					t.Error(err)
				}
				closeClean(t, eng)
			})
		})
	}
}

// TestTasksReadAheadAgain: inputs that found no room in the GPU come there once it has some.
func TestTasksReadAheadAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		eng, repo, _ := onSlowDisk(t, 32*mib, 3, oneByOne(16*mib))
		gpu := gpuOf(t, eng)
		taken, err := eng.Reserve(t.Context(), reservation.Specific(gpu.ID()), 11*mib) // above the stop mark
		if err != nil {
			t.Fatal(err)
		}
		done, ended := make(chan error, 2), make(chan struct{})
		var claims []*repository.Claim
		for i := range 2 {
			claims = append(claims, mustClaim(t, repo, 1+i))
			go func() {
				task := spillway.Task{Inputs: claims[i : i+1], Output: tier.Page, Overhead: admission.None}
				done <- eng.RunTask(t.Context(), task,
					func(context.Context, *spillway.Grant, []*spillway.Handle) error { <-ended; return nil })
			}()
			synctest.Wait()
		}
		for _, want := range []tier.Kind{tier.Host, tier.GPU} {
			time.Sleep(time.Minute)
			for _, b := range claims[1].Batches() {
				if in := b.Info().Space; in.Kind != want {
					t.Errorf("an input of the task that waits is in %s, want a %s", in, want)
				}
			}
			if want == tier.Host {
				release(t, taken)
			}
		}
		close(ended)
		for range claims {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		if err := repo.Close(t.Context()); err != nil {
			t.Error(err)
		}
		closeClean(t, eng)
	})
}

// TestTasksReadAheadEnds with the engine, and with the wait of the task. What was brought for a
// task that gives up was in vain when it leaves.
func TestTasksReadAheadEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		eng, repo, _ := onSlowDisk(t, 32*mib, 4, oneByOne(64*mib))
		done := make(chan error, 2)
		ended := make(chan struct{})
		ctx, cancel := context.WithCancel(t.Context())
		for i := range 2 {
			c := mustClaim(t, repo, 2)
			go func() {
				task := spillway.Task{Inputs: []*repository.Claim{c}, Output: tier.Page, Overhead: admission.None}
				done <- eng.RunTask(ctx, task, func(context.Context, *spillway.Grant, []*spillway.Handle) error { <-ended; return nil })
			}()
			synctest.Wait()
			time.Sleep(time.Duration(i) * time.Second)
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		close(ended)
		if err := <-done; err != nil {
			t.Error(err)
		}
		read, used, inVain := aheadTo(eng, tier.GPU)
		if read == 0 || used != 0 || inVain != 0 {
			t.Errorf("%d bytes were read ahead, %d used, %d in vain", read, used, inVain)
		}
		for b := range repo.Batches(0) {
			if err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.Disk)); err != nil {
				t.Fatal(err)
			}
		}
		if read, used, inVain = aheadTo(eng, tier.GPU); used != 0 || inVain != read {
			t.Errorf("%d bytes were read ahead, %d used, %d in vain", read, used, inVain)
		}
		closeClean(t, eng)
	})
}

// countedStrategy is a strategy that counts, and takes some time.
type countedStrategy struct {
	reservation.Strategy
	calls *atomic.Int64
}

func (c countedStrategy) Candidates(all *reservation.Spaces, dst []*tier.Space) []*tier.Space {
	c.calls.Add(1)
	time.Sleep(time.Microsecond)
	return c.Strategy.Candidates(all, dst)
}

// TestTasksReadAheadOfSeveralTiers: tasks may run where their inputs are, or in a faster tier.
func TestTasksReadAheadOfSeveralTiers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		to := countedStrategy{reservation.AnyInTiers(tier.Host, tier.Disk), new(atomic.Int64)}
		eng, repo, _ := onSlowDisk(t, 32*mib, 4, func(c *spillway.Config) {
			c.GPUs, c.Limits.Admission.Strategy, c.Limits.Admission.Threads = []spillway.GPUConfig{}, to, 1
		})
		done, ended := make(chan error, 2), make(chan struct{})
		var claims []*repository.Claim
		for range 2 {
			c := mustClaim(t, repo, 2)
			claims = append(claims, c)
			go func() {
				task := spillway.Task{Inputs: []*repository.Claim{c}, Output: tier.Page, Overhead: admission.None}
				done <- eng.RunTask(t.Context(), task, func(context.Context, *spillway.Grant, []*spillway.Handle) error { <-ended; return nil })
			}()
			time.Sleep(time.Second)
		}
		before := to.calls.Load()
		time.Sleep(10 * time.Second)
		if n := to.calls.Load() - before; n > 1000 {
			t.Errorf("the strategy was asked %d times in 10 s", n)
		}
		for _, b := range claims[1].Batches() {
			if in := b.Info().Space; in.Kind != tier.Host {
				t.Errorf("an input of the task that waits is in %s", in)
			}
		}
		close(ended)
		for range 2 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		if err := repo.Close(t.Context()); err != nil {
			t.Error(err)
		}
		closeClean(t, eng)
	})
}

// BenchmarkTasksReadAhead runs tasks on batches from a disk of 200 MiB a second, with as much work
// on each as its reading takes: with read-ahead and without, in turns. The metric is how many times
// as fast.
func BenchmarkTasksReadAhead(b *testing.B) {
	const batches = 40
	var took [2]time.Duration
	for range b.N {
		for i, ahead := range []int{-1, 0} {
			eng, repo, one := onSlowDisk(b, 8*mib, batches, oneByOne(48*mib))
			took[i] += tasksOf(b, eng, repo, batches, 1, one, ahead)
			if err := errors.Join(repo.Close(b.Context()), eng.Close()); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.ReportMetric(took[0].Seconds()/took[1].Seconds(), "times")
}
