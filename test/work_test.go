package test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/compute"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/tier"
)

// inHostMemory is where the Works of these tests are.
var inHostMemory = spillway.AnyInTier(tier.Host)

// openForWorks opens an engine with host memory of some MiB, and a plan.
func openForWorks(t *testing.T, memory int64) (*spillway.Engine, *spillway.Plan, *tier.Space) {
	t.Helper()
	eng := openMarked(t, memory, func(c *spillway.Config) {
		c.StallTimeout, c.Logger = 3*time.Second, slog.New(slog.DiscardHandler)
	})
	plan, err := eng.Plan("q")
	if err != nil {
		t.Fatal(err)
	}
	return eng, plan, spaceAt(eng, tier.Host, 0)
}

// shareOf returns the Min of a Work that takes a share of what a space has free, with its slack.
func shareOf(s *tier.Space, share float64) int64 {
	return int64(share*float64(s.State().Available)) / 17 * 16
}

func newWork(t *testing.T, plan *spillway.Plan, o spillway.WorkOptions) *spillway.Work {
	t.Helper()
	o.In = inHostMemory
	w, err := plan.Work(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// endWorks closes Works and the engine, and checks that nothing is left.
func endWorks(t *testing.T, eng *spillway.Engine, works ...*spillway.Work) {
	t.Helper()
	for _, w := range works {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	}
	closeEngine(t, eng)
	if s := eng.Stats(); s.HeapOverflow.Bytes != 0 {
		t.Errorf("%d bytes are left on the Go heap", s.HeapOverflow.Bytes)
	}
}

// TestWorkGivesBackHalf: a Work has 90 % of the space and gives back half when it is asked. So a
// request for 40 % proceeds.
func TestWorkGivesBackHalf(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		eng, plan, host := openForWorks(t, 64*mib)
		var w *spillway.Work
		all, want := host.State().Available, int64(0)
		has := shareOf(host, 0.9)
		w = newWork(t, plan, spillway.WorkOptions{
			Operator: "build", Min: has, Reclaim: func(_ context.Context, n int64) int64 {
				want = n
				if err := w.Shrink(has / 2); err != nil {
					t.Error(err)
				}
				return has / 2
			},
		})
		lack := all*4/10 - host.State().Available
		r, err := eng.Reserve(t.Context(), inHostMemory, all*4/10)
		if err != nil {
			t.Fatal(err)
		}
		if want < lack || want > lack+tier.Page {
			t.Errorf("Reclaim was called for %d bytes; want %d", want, lack)
		}
		release(t, r)
		endWorks(t, eng, w)
	})
}

// TestWorkThatGivesNothingBack is named in the error of the request, with its plan, whether it
// returns without having freed anything or hangs. A request waits a second for one that hangs.
func TestWorkThatGivesNothingBack(t *testing.T) {
	t.Parallel()
	for name, hangs := range map[string]bool{"returns": false, "hangs": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				eng, plan, host := openForWorks(t, 64*mib)
				end, need := make(chan struct{}), host.State().Available*4/10
				large := newWork(t, plan, spillway.WorkOptions{
					Operator: "build", Min: shareOf(host, 0.6), Reclaim: func(_ context.Context, n int64) int64 {
						if hangs {
							<-end
						}
						return n
					},
				})
				var small *spillway.Work
				gives := shareOf(host, 0.75)
				small = newWork(t, plan, spillway.WorkOptions{
					Operator: "probe", Min: gives, Reclaim: func(context.Context, int64) int64 {
						freed := gives
						gives = 0 // when it is asked again
						if err := small.Shrink(freed); err != nil {
							t.Error(err)
						}
						return freed
					},
				})
				before := time.Now()
				r, err := eng.Reserve(t.Context(), inHostMemory, gives/2)
				if err != nil {
					t.Fatal(err)
				}
				if took := time.Since(before); hangs != (took >= time.Second) || took > 1500*time.Millisecond {
					t.Errorf("it was served after %v", took)
				}
				_, err = eng.Reserve(t.Context(), inHostMemory, need)
				if !errors.Is(err, spillway.ErrDeadlock) || !strings.Contains(err.Error(), `work of "q/build"`) {
					t.Errorf("%v", err)
				}
				close(end)
				release(t, r)
				endWorks(t, eng, large, small)
			})
		})
	}
}

// TestWorkIsNotReclaimedForItself: a Grow that nobody can serve fails, and its own Reclaim was not
// called.
func TestWorkIsNotReclaimedForItself(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		eng, plan, host := openForWorks(t, 64*mib)
		w := newWork(t, plan, spillway.WorkOptions{
			Operator: "build", Min: shareOf(host, 0.5), Reclaim: func(context.Context, int64) int64 {
				t.Error("Reclaim was called")
				return 0
			},
		})
		other := newWork(t, plan, spillway.WorkOptions{Operator: "probe", Min: shareOf(host, 0.5)})
		if held, _ := eng.Holders(host.ID()); !strings.Contains(held.String(), `owner "work of q/probe"`) {
			t.Errorf("the holders do not name a Work: %s", held)
		}
		if err := w.Grow(t.Context(), shareOf(host, 1)+2*mib); !errors.Is(err, spillway.ErrDeadlock) {
			t.Errorf("Grow: %v", err)
		}
		if err := w.Grow(t.Context(), host.State().Limit); !errors.Is(err, spillway.ErrExceeded) {
			t.Errorf("Grow to more than the space has: %v", err)
		}
		endWorks(t, eng, w, other)
	})
}

// TestWorkHasBatchesEvicted: Min and Grow move batches to the disk.
func TestWorkHasBatchesEvicted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		eng, plan, host := openForWorks(t, 8*mib)
		repo, err := plan.Repository("scan", 0)
		if err != nil {
			t.Fatal(err)
		}
		rec := arrowgen.Ints(1, 40_000, 1)
		defer rec.Release()
		for range 20 {
			if err := repo.Put(t.Context(), 0, rec, in(tier.Host)); err != nil {
				t.Fatal(err)
			}
		}
		asked := false
		all := host.State().Limit - host.State().Held
		w := newWork(t, plan, spillway.WorkOptions{
			Operator: "build", Min: all / 2, Reclaim: func(context.Context, int64) int64 { asked = true; return 0 },
		})
		if err := w.Grow(t.Context(), all/4); err != nil {
			t.Fatal(err)
		}
		if asked {
			t.Error("Reclaim was called although batches could be evicted")
		}
		if err := w.Close(); err != nil {
			t.Error(err)
		}
		n := 0
		for h, err := range repo.Drain(t.Context(), 0, tier.Host) {
			if err != nil {
				t.Fatal(err)
			}
			sameRecord(t, eng, h, rec)
			n++
			if err := h.Close(); err != nil {
				t.Error(err)
			}
		}
		if n != 20 {
			t.Errorf("%d batches are left of 20", n)
		}
		endWorks(t, eng)
	})
}

// sameRecord checks the rows of a batch.
func sameRecord(t *testing.T, eng *spillway.Engine, h *spillway.Handle, want arrow.RecordBatch) {
	t.Helper()
	got, err := eng.Mover().Record(t.Context(), h)
	if err != nil {
		t.Error(err)
		return
	}
	defer got.Release()
	if err := convert.Equal(want, got); err != nil {
		t.Error(err)
	}
}

// TestWorkInStats: arrays beyond a Work are in Engine.Stats until they are released.
func TestWorkInStats(t *testing.T) {
	t.Parallel()
	eng, plan, _ := openForWorks(t, 64*mib)
	w := newWork(t, plan, spillway.WorkOptions{Operator: "join", Min: 1})
	rec := arrowgen.Ints(1, 500_000, 1)
	defer rec.Release()
	ctx := compute.WithAllocator(t.Context(), w.Allocator())
	column := compute.NewDatum(rec.Column(0))
	defer column.Release()
	sum, err := compute.Add(ctx, compute.ArithmeticOptions{}, column, column)
	if err != nil {
		t.Fatal(err)
	}
	got := sum.(*compute.ArrayDatum).MakeArray()
	for i, v := range rec.Column(0).(*array.Int64).Int64Values() {
		if got.(*array.Int64).Value(i) != 2*v {
			t.Fatalf("row %d is wrong", i)
		}
	}
	s := eng.Stats()
	if s.HeapOverflow.Bytes < 4_000_000 || !strings.Contains(s.String(), "on the Go heap") {
		t.Errorf("%+v in\n%s", s.HeapOverflow, s)
	}
	if err := w.Err(); !errors.Is(err, spillway.ErrExceeded) || !strings.Contains(err.Error(), "q/join") {
		t.Errorf("Err: %v", err)
	}
	if err := w.Grow(t.Context(), s.HeapOverflow.Bytes); err != nil || w.Err() != nil {
		t.Errorf("Grow: %v; Err: %v", err, w.Err())
	}
	got.Release()
	sum.Release()
	if s := eng.Stats().HeapOverflow; s.Bytes != 0 || s.Peak < 4_000_000 {
		t.Errorf("at the end: %+v", s)
	}
	endWorks(t, eng, w)
}

// TestWorkOfClosedPlan cannot be made. A Work that was not closed is a leak of the engine.
func TestWorkOfClosedPlan(t *testing.T) {
	t.Parallel()
	eng, plan, _ := openForWorks(t, 64*mib)
	left := newWork(t, plan, spillway.WorkOptions{Operator: "build", Min: mib})
	if _, err := plan.Close(); err != nil {
		t.Fatal(err)
	}
	w, err := plan.Work(t.Context(), spillway.WorkOptions{In: inHostMemory})
	if w != nil || !errors.Is(err, tier.ErrClosed) {
		t.Errorf("%v, %v", w, err)
	}
	var leak *spillway.LeakError
	if err := eng.Close(); !errors.As(err, &leak) || len(leak.Leaks) != 1 || leak.Leaks[0].Bytes != 2*mib {
		t.Errorf("Close: %v", err)
	}
	if err := left.Close(); err != nil {
		t.Errorf("closing the Work after the engine: %v", err)
	}
}

// TestWorksAndBatchesAtRandom: operators with Works put and drain batches, grow and shrink, and build
// arrays. Each wait ends, no row is wrong, and the books are empty at the end.
func TestWorksAndBatchesAtRandom(t *testing.T) {
	t.Parallel()
	var reclaims, evictions atomic.Int64
	for seed := range testseed.Each(t, testseed.Rounds(3, 2)) {
		synctest.Test(t, func(t *testing.T) {
			eng, plan, host := openForWorks(t, 10*mib)
			var all sync.WaitGroup
			for g := range uint64(4) {
				repo, err := plan.Repository(fmt.Sprint("operator ", g), 0)
				if err != nil {
					t.Fatal(err)
				}
				all.Go(func() { operate(t, eng, plan, repo, rand.New(rand.NewPCG(seed, g)), &reclaims) })
			}
			all.Wait()
			if u := host.State().Usage; u.Reserved != 0 {
				t.Errorf("at the end the space has %+v", u)
			}
			for _, e := range eng.Stats().Edges {
				evictions.Add(e.Batches)
			}
			endWorks(t, eng)
		})
	}
	if reclaims.Load() == 0 || evictions.Load() == 0 {
		t.Errorf("%d calls of Reclaim, %d moves: the test shows too little", reclaims.Load(), evictions.Load())
	}
}

// operate does random operations of one operator.
func operate(
	t *testing.T, eng *spillway.Engine, plan *spillway.Plan, repo *spillway.Repository, rng *rand.Rand,
	reclaims *atomic.Int64,
) {
	var mu sync.Mutex // guards w, size and state
	var w *spillway.Work
	var size int64
	var state [][]byte
	shrink := func(want int64) (freed int64) {
		for freed < want && len(state) > 0 {
			freed += int64(len(state[0]))
			w.Allocator().Free(state[0])
			state = state[1:]
		}
		freed = min(max(freed, want), size)
		if err := w.Shrink(freed); errors.Is(err, spillway.ErrExceeded) {
			return 0 // it is still in arrays
		} else if err != nil {
			t.Error(err)
		}
		size -= freed
		return freed
	}
	rec := arrowgen.Ints(rng.Uint64(), 30_000, 1)
	defer rec.Release()
	puts := 0
	fine := func(err error) {
		if err != nil && !errors.Is(err, spillway.ErrExceeded) && !errors.Is(err, spillway.ErrDeadlock) &&
			!errors.Is(err, spillway.ErrNoSpace) {
			t.Error(err)
		}
		if err != nil && w != nil {
			mu.Lock()
			defer mu.Unlock()
			shrink(16 * mib)
		}
	}
	for range testseed.Rounds(600, 300) {
		n := 1 + rng.Int64N(1<<(10+rng.IntN(11)))
		switch what := rng.IntN(8); {
		case w == nil:
			made, err := plan.Work(t.Context(), spillway.WorkOptions{
				Operator: "random",
				In:       inHostMemory,
				Min:      n,
				Max:      12 * mib,
				Reclaim: func(_ context.Context, want int64) int64 {
					reclaims.Add(1)
					mu.Lock()
					defer mu.Unlock()
					if w == nil {
						return 0
					}
					return shrink(want)
				},
			})
			if err == nil {
				mu.Lock()
				w, size = made, n
				mu.Unlock()
			}
			fine(err)
		case what == 0:
			err := w.Grow(t.Context(), n)
			if err == nil {
				mu.Lock()
				size += n
				mu.Unlock()
			}
			fine(err)
		case what == 1:
			err := repo.Put(t.Context(), 0, rec, in(tier.Host))
			if err == nil {
				puts++
			}
			fine(err)
		case what == 2 && puts > 0:
			for h, err := range repo.Drain(t.Context(), 0, tier.Host, repository.NoWait()) {
				if err != nil {
					fine(err)
					break
				}
				sameRecord(t, eng, h, rec)
				puts--
				if err := h.Close(); err != nil {
					t.Error(err)
				}
			}
		case what == 3:
			mu.Lock()
			shrink(w.Requested())
			mu.Unlock()
		case what == 4 && rng.IntN(8) == 0:
			mu.Lock()
			old := w
			for _, b := range state {
				old.Allocator().Free(b)
			}
			w, state, size = nil, nil, 0
			mu.Unlock()
			if err := old.Close(); err != nil {
				t.Error(err)
			}
		default:
			mu.Lock()
			state = append(state, w.Allocator().Allocate(int(n)))
			mu.Unlock()
			if w.Err() != nil {
				fine(w.Grow(t.Context(), n)) // not counted in size: given back by Close
			}
		}
	}
	mu.Lock()
	old := w
	for _, b := range state {
		old.Allocator().Free(b)
	}
	w, state = nil, nil
	mu.Unlock()
	if old != nil {
		if err := old.Close(); err != nil {
			t.Error(err)
		}
	}
}
