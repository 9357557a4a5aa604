package arrowmem_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/arrowmem"
	"github.com/spillway-db/spillway/tier"
)

// reserved is the result of a Reserve on another goroutine.
type reserved struct {
	r   *reservation.Reservation
	err error
}

func reserve(ctx context.Context, m *reservation.Manager, bytes int64) <-chan reserved {
	c := make(chan reserved, 1)
	go func() {
		r, err := m.Reserve(ctx, inHost, bytes, nil)
		c <- reserved{r, err}
	}()
	return c
}

// served fails the test unless the request was served, and releases it.
func (got reserved) served(t *testing.T) {
	t.Helper()
	if got.err != nil {
		t.Fatal(got.err)
	}
	release(t, got.r)
}

// TestReclaimLetsAWaiterProceed: a Work has 90 % of the space and gives half of it back when it is
// asked. So a request for 40 % proceeds.
func TestReclaimLetsAWaiterProceed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, s := arenaOf(t, 100*mib)
		var w *arrowmem.Work
		var calls []int64
		var requested int64
		reclaim := func(_ context.Context, want int64) int64 {
			calls = append(calls, want)
			requested = w.Requested()
			if err := w.Shrink(42 * mib); err != nil {
				t.Error(err)
			}
			return 42 * mib
		}
		w = workOf(t, m, nil, arrowmem.WorkOptions{Operator: "build", Min: 84 * mib, Reclaim: reclaim})
		free := s.State().Available
		if w.Requested() != 0 {
			t.Errorf("%d bytes are requested while nobody waits", w.Requested())
		}
		(<-reserve(t.Context(), m, 40*mib)).served(t)
		if want := 40*mib - free; len(calls) != 1 || calls[0] != want || requested != want {
			t.Errorf("Reclaim was called for %v bytes, and %d were requested; want %d", calls, requested, want)
		}
		if s.State().Available != free+42*mib {
			t.Errorf("%d bytes are free at the end", s.State().Available)
		}
	})
}

// TestReclaimByPolling: an operator without Reclaim polls Requested between batches.
func TestReclaimByPolling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := arenaOf(t, 100*mib)
		w := workOf(t, m, nil, arrowmem.WorkOptions{Operator: "build", Min: 84 * mib})
		got := reserve(t.Context(), m, 40*mib)
		synctest.Wait()
		if err := w.Shrink(w.Requested()); err != nil {
			t.Error(err)
		}
		(<-got).served(t)
		if w.Requested() != 0 {
			t.Errorf("%d bytes are requested in the end", w.Requested())
		}
	})
}

// TestReclaimThatFreesNothing is named in the error of the request.
func TestReclaimThatFreesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := arenaOf(t, 100*mib)
		calls := 0
		workOf(t, m, nil, arrowmem.WorkOptions{
			Operator: "build", Min: 84 * mib, Reclaim: func(context.Context, int64) int64 { calls++; return 84 * mib },
		})
		got := <-reserve(t.Context(), m, 40*mib)
		if !errors.Is(got.err, reservation.ErrDeadlock) || !strings.Contains(got.err.Error(), `work of "build"`) {
			t.Errorf("%v", got.err)
		}
		if calls != 1 {
			t.Errorf("Reclaim was called %d times", calls)
		}
	})
}

// TestWorkIsListedByItsName: errors and listings of holders name a Work without an owner.
func TestWorkIsListedByItsName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, s := arenaOf(t, 100*mib)
		workOf(t, m, nil, arrowmem.WorkOptions{Operator: "build", Min: 48 * mib})
		workOf(t, m, nil, arrowmem.WorkOptions{Operator: "probe", Min: 32 * mib})
		got := <-reserve(t.Context(), m, 40*mib)
		var e *reservation.DeadlockError
		if !errors.As(got.err, &e) {
			t.Fatal(got.err)
		}
		if h := e.Holdings.Holders; len(h) != 2 || h[0].Owner != "work of build" || h[0].Bytes != 51*mib ||
			h[1].Owner != "work of probe" {
			t.Errorf("%v", got.err)
		}
		if all := s.Holdings(nil); len(all.Holders) != 2 || all.Holders[0].Owner != "work of build" ||
			all.Holders[0].Bytes != 51*mib {
			t.Errorf("the holders are %+v", all.Holders)
		}
	})
}

// TestReclaimThatHangs is passed over after a second: the next Work is asked, and the error of a
// request names it.
func TestReclaimThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := arenaOf(t, 100*mib)
		end := make(chan struct{})
		var running atomic.Int64
		workOf(t, m, nil, arrowmem.WorkOptions{
			Operator: "hangs", Min: 50 * mib, Reclaim: func(ctx context.Context, _ int64) int64 {
				if running.Add(1) > 1 {
					t.Error("two calls at a time")
				}
				defer running.Add(-1)
				start := time.Now()
				<-ctx.Done()
				if took := time.Since(start); took != time.Second {
					t.Errorf("the context ended after %v", took)
				}
				<-end
				return 0
			},
		})
		var small *arrowmem.Work
		reclaim := func(context.Context, int64) int64 {
			if err := small.Shrink(15 * mib); err != nil {
				t.Error(err)
			}
			return 0
		}
		small = workOf(t, m, nil, arrowmem.WorkOptions{Operator: "frees", Min: 30 * mib, Reclaim: reclaim})
		start := time.Now()
		(<-reserve(t.Context(), m, 25*mib)).served(t)
		if took := time.Since(start); took < time.Second || took > 1100*time.Millisecond {
			t.Errorf("it was served after %v", took)
		}
		got := <-reserve(t.Context(), m, 80*mib)
		if !errors.Is(got.err, reservation.ErrDeadlock) || !strings.Contains(got.err.Error(), `work of "hangs"`) {
			t.Errorf("%v", got.err)
		}
		close(end)
	})
}

// TestReclaimNeverForItsOwnGrow, but for that of another Work.
func TestReclaimNeverForItsOwnGrow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := arenaOf(t, 100*mib)
		var asked []string
		var works [2]*arrowmem.Work
		for i, name := range []string{"grows", "other"} {
			works[i] = workOf(t, m, nil, arrowmem.WorkOptions{
				Operator: name, Min: 32 * mib, Reclaim: func(_ context.Context, want int64) int64 {
					asked = append(asked, name)
					if works[i].Requested() != want {
						t.Errorf("%d bytes are requested; want %d", works[i].Requested(), want)
					}
					if err := works[i].Shrink(20 * mib); err != nil {
						t.Error(err)
					}
					return 0
				},
			})
		}
		if err := works[0].Grow(t.Context(), 50*mib); err != nil {
			t.Fatal(err)
		}
		if fmt.Sprint(asked) != "[other]" {
			t.Errorf("asked: %v", asked)
		}
		if err := works[1].Close(); err != nil {
			t.Fatal(err)
		}
		if err := works[0].Shrink(works[0].Requested()); err != nil {
			t.Fatal(err)
		}
		r := <-reserve(t.Context(), m, 10*mib)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		asked = nil
		err := works[0].Grow(ctx, 8*mib) // which nobody can serve
		if !errors.Is(err, context.DeadlineExceeded) || len(asked) > 0 {
			t.Errorf("Grow: %v; asked: %v", err, asked)
		}
		r.served(t)
	})
}

// TestRequestedIsOfOthers: a Grow that waits is not requested of its own Work.
func TestRequestedIsOfOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := arenaOf(t, 100*mib)
		w := workOf(t, m, nil, arrowmem.WorkOptions{Min: 32 * mib})
		other := workOf(t, m, nil, arrowmem.WorkOptions{Min: 32 * mib})
		ctx, cancel := context.WithCancel(t.Context())
		grown := make(chan error)
		go func() { grown <- w.Grow(ctx, 40*mib) }()
		synctest.Wait()
		if w.Requested() != 0 || other.Requested() == 0 {
			t.Errorf("%d bytes are requested of it, and %d of another", w.Requested(), other.Requested())
		}
		cancel()
		if err := <-grown; !errors.Is(err, context.Canceled) {
			t.Errorf("Grow: %v", err)
		}
	})
}

// TestWorkHasAnOwner: a Work of an owner that runs may be given back at any time, so a request that
// waits for it is no deadlock. If its owner waits too, it is one at once.
func TestWorkHasAnOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := arenaOf(t, 100*mib)
		work := func(name string, min int64) (context.Context, *arrowmem.Work) {
			ctx := reservation.NewOwner(name).Context(t.Context())
			w, err := arrowmem.NewWork(ctx, m, new(arrowmem.HeapCounter), arrowmem.WorkOptions{
				Operator: name, In: inHost, Min: min,
			})
			if err != nil {
				t.Fatal(err)
			}
			return ctx, w
		}
		runs, build := work("build", 48*mib)
		waits, probe := work("probe", 16*mib)
		grown := make(chan error, 1)
		go func() { grown <- probe.Grow(waits, 40*mib) }()
		time.Sleep(time.Minute)
		select {
		case err := <-grown:
			t.Fatalf("the Grow of one ended with %v", err)
		default:
		}
		start := time.Now()
		err := build.Grow(runs, 40*mib)
		if took := time.Since(start); !errors.Is(err, reservation.ErrDeadlock) || took > time.Second {
			t.Errorf("the Grow of the other, after %v: %v", took, err)
		}
		if err := build.Close(); err != nil {
			t.Error(err)
		}
		if err := <-grown; err != nil {
			t.Error(err)
		}
		if err := probe.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestCloseDuringReclaim: Close waits for it, and ends a Grow that waits.
func TestCloseDuringReclaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, s := arenaOf(t, 100*mib)
		end := make(chan struct{})
		var w *arrowmem.Work
		w = workOf(t, m, nil, arrowmem.WorkOptions{
			Operator: "build", Min: 84 * mib, Reclaim: func(context.Context, int64) int64 {
				<-end
				if err := w.Shrink(mib); err != nil {
					t.Error(err)
				}
				return mib
			},
		})
		got := reserve(t.Context(), m, 40*mib)
		synctest.Wait()
		grown, closed := make(chan error, 1), make(chan error, 1)
		go func() { grown <- w.Grow(t.Context(), mib) }()
		synctest.Wait()
		go func() { closed <- w.Close() }()
		synctest.Wait()
		select {
		case err := <-closed:
			t.Fatalf("Close did not wait for Reclaim: %v", err)
		default:
		}
		close(end)
		if err := <-closed; err != nil {
			t.Error(err)
		}
		if err := <-grown; err != nil && !errors.Is(err, tier.ErrReleased) {
			t.Errorf("Grow: %v", err)
		}
		(<-got).served(t)
		if err := w.Close(); !errors.Is(err, tier.ErrReleased) {
			t.Errorf("a second Close: %v", err)
		}
		if s.State().Used() != 0 {
			t.Errorf("%d bytes are used at the end", s.State().Used())
		}
	})
}

// operator is a random user of a Work: it builds arrays, and releases them when it is asked to.
type operator struct {
	t    *testing.T
	name string
	mu   sync.Mutex // guards all below, as WorkOptions.Reclaim recommends
	w    *arrowmem.Work
	size int64 // what it has of w
	all  [][]byte
}

// drop releases arrays until want bytes can be given back, and gives them back.
func (o *operator) drop(want int64) (freed int64) {
	for len(o.all) > 0 && freed < want {
		freed += int64(len(o.all[0]))
		o.free(0)
	}
	freed = min(freed, o.size)
	if err := o.w.Shrink(freed); errors.Is(err, reservation.ErrExceeded) {
		return 0 // what it has released was in the slack, or on the heap
	} else if err != nil {
		o.t.Error(err)
	}
	o.size -= freed
	return freed
}

func (o *operator) free(i int) {
	b := o.all[i]
	for _, at := range []int{0, len(b) / 2, len(b) - 1} {
		if b[at] != byte(len(b))|1 {
			o.t.Errorf("%s: byte %d of %d is %d", o.name, at, len(b), b[at])
		}
	}
	o.w.Allocator().Free(b)
	o.all = append(o.all[:i], o.all[i+1:]...)
}

func (o *operator) add(b []byte) {
	for i := range b {
		b[i] = byte(len(b)) | 1
	}
	o.all = append(o.all, b)
}

// reclaim is called while the operator waits in Grow, too.
func (o *operator) reclaim(_ context.Context, want int64) int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.w == nil {
		return 0
	}
	return o.drop(want)
}

func (o *operator) step(ctx context.Context, m *reservation.Manager, heap *arrowmem.HeapCounter, rng *rand.Rand) error {
	if o.w == nil {
		min := rng.Int64N(3 * mib)
		w, err := arrowmem.NewWork(ctx, m, heap, arrowmem.WorkOptions{
			Operator: o.name, In: inHost, Min: min, Max: 8 * mib, Reclaim: o.reclaim,
		})
		if err != nil {
			return err
		}
		o.mu.Lock()
		defer o.mu.Unlock()
		o.w, o.size = w, min
		return nil
	}
	n := rng.Int64N(1 << (8 + rng.IntN(15)))
	switch rng.IntN(8) {
	case 0: // not under the mutex, so that others can have it reclaimed meanwhile
		err := o.w.Grow(ctx, n)
		o.mu.Lock()
		defer o.mu.Unlock()
		if err == nil {
			o.size += n
		}
		return err
	case 1:
		r, err := m.Reserve(ctx, inHost, n, nil)
		if err != nil {
			return err
		}
		return r.Release()
	case 2:
		if rng.IntN(4) > 0 {
			return nil
		}
		o.mu.Lock()
		w := o.w
		for len(o.all) > rng.IntN(2) {
			o.free(0)
		}
		left := o.all
		o.w, o.all = nil, nil
		o.mu.Unlock()
		err := w.Close()
		for _, b := range left {
			w.Allocator().Free(b)
		}
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	switch i := rng.IntN(len(o.all) + 1); {
	case i == len(o.all):
		o.add(o.w.Allocator().Allocate(int(n) + 1))
	case rng.IntN(3) == 0:
		b := o.all[i]
		o.all = append(o.all[:i], o.all[i+1:]...)
		o.add(o.w.Allocator().Reallocate(int(n)+1, b))
	case rng.IntN(2) == 0:
		o.free(i)
	default:
		o.drop(o.w.Requested())
	}
	return nil
}

// TestWorksAtRandom: operators build arrays, grow and shrink, and reclaim for each other. All waits
// end, no byte of an array changes, and nothing is left at the end.
func TestWorksAtRandom(t *testing.T) {
	for seed := range testseed.Each(t, 3) {
		synctest.Test(t, func(t *testing.T) {
			m, s := arenaOf(t, 10*mib)
			var heap arrowmem.HeapCounter
			var all sync.WaitGroup
			var grown, refused atomic.Int64
			for g := range uint64(4) {
				all.Go(func() {
					rng := rand.New(rand.NewPCG(seed, g))
					o := &operator{t: t, name: fmt.Sprint("operator ", g)}
					ctx := reservation.NewOwner(o.name).Context(t.Context())
					for range testseed.Rounds(1500, 500) {
						err := o.step(ctx, m, &heap, rng)
						switch {
						case err == nil:
							grown.Add(1)
						case errors.Is(err, reservation.ErrExceeded), errors.Is(err, reservation.ErrDeadlock):
							refused.Add(1)
							if o.w != nil {
								o.mu.Lock()
								o.drop(8 * mib)
								o.mu.Unlock()
							}
						default:
							t.Error(err)
						}
					}
					o.mu.Lock()
					w := o.w
					for len(o.all) > 0 {
						o.free(0)
					}
					o.w = nil
					o.mu.Unlock()
					if w != nil {
						if err := w.Close(); err != nil {
							t.Error(err)
						}
					}
				})
			}
			all.Wait()
			if grown.Load() == 0 || refused.Load() == 0 || heap.Stats().Peak == 0 {
				t.Errorf(
					"%d steps, %d refused, %+v: the test shows too little",
					grown.Load(),
					refused.Load(),
					heap.Stats(),
				)
			}
			if s.State().Used() != 0 || heap.Stats().Bytes != 0 {
				t.Errorf("at the end %d bytes are used, and %+v", s.State().Used(), heap.Stats())
			}
		})
	}
}
