package pump_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/goid"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/pump"
	"github.com/spillway-db/spillway/internal/testseed"
)

// pool lends so many numbers, and never one to two.
type pool struct {
	t    *testing.T
	mu   sync.Mutex
	cond *sync.Cond
	idle []int
	lent map[int]bool
	most int // lent at the same time
	wait int
}

func newPool(t *testing.T, n int) *pool {
	p := &pool{t: t, lent: make(map[int]bool)}
	p.cond = sync.NewCond(&p.mu)
	for i := range n {
		p.idle = append(p.idle, i+1)
	}
	return p
}

func (p *pool) Borrow(ctx context.Context) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wait++
	defer func() { p.wait-- }()
	defer context.AfterFunc(ctx, func() { p.mu.Lock(); defer p.mu.Unlock(); p.cond.Broadcast() })()
	for len(p.idle) == 0 {
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		p.cond.Wait()
	}
	return p.takeLocked(), nil
}

func (p *pool) TryBorrow() (int, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.wait > 0 || len(p.idle) == 0 {
		return 0, false
	}
	return p.takeLocked(), true
}

func (p *pool) takeLocked() int {
	r := p.idle[0]
	p.idle = p.idle[1:]
	p.lent[r] = true
	p.most = max(p.most, len(p.lent))
	return r
}

func (p *pool) Yield(r int) (int, bool) {
	p.mu.Lock()
	wanted := p.wait > 0
	p.mu.Unlock()
	if !wanted {
		return r, true
	}
	p.Return(r)
	return 0, false
}

func (p *pool) Return(r int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.lent[r] {
		p.t.Errorf("%d is returned, and was not lent", r)
	}
	delete(p.lent, r)
	p.idle = append(p.idle, r)
	p.cond.Broadcast()
}

func (p *pool) whole() {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.lent) > 0 || p.wait > 0 {
		p.t.Errorf("%d are still lent, %d wait", len(p.lent), p.wait)
	}
}

var errFails = errors.New("it fails")

// watched is a job that checks how it is called.
type watched struct {
	pump.Job[int]
	nap             func()
	active, most    atomic.Int64 // calls of the job's functions, at the same time
	calls           atomic.Int64
	failAt, panicAt int64 // call; 0 for none
	ended           []atomic.Int64
}

// do is one call.
func (w *watched) do() error {
	n := w.active.Add(1)
	defer w.active.Add(-1)
	for most := w.most.Load(); n > most && !w.most.CompareAndSwap(most, n); most = w.most.Load() {
	}
	w.nap()
	switch w.calls.Add(1) {
	case w.failAt:
		return errFails
	case w.panicAt:
		panic("it panics")
	}
	return nil
}

// watch makes a job of n pieces, each part of whose work takes as long as nap.
func watch(t *testing.T, n, lanes int, p pump.Pool[int], nap func()) *watched {
	w := &watched{nap: nap, ended: make([]atomic.Int64, n)}
	w.Job = pump.Job[int]{Pieces: n, Lanes: lanes, Pool: p}
	var begun, beginning atomic.Int64
	w.Begin = func(_, i int) error {
		if beginning.Add(1) != 1 || int(begun.Add(1)) != i+1 {
			t.Errorf("piece %d is begun out of turn", i)
		}
		defer beginning.Add(-1)
		return w.do()
	}
	w.Do = func(_ context.Context, _, i int) error {
		err := w.do()
		if err == nil {
			err = w.do()
		}
		w.ended[i].Add(1)
		return err
	}
	return w
}

// TestEveryCallFailsOnce: whatever fails or panics, Run returns that, nothing is under way, and the
// pool has all back. Without a failure all pieces are moved once.
func TestEveryCallFailsOnce(t *testing.T) {
	for _, lanes := range []int{1, 2, 5} {
		{
			for _, panics := range []bool{false, true} {
				for at := 0; ; at++ {
					p := newPool(t, 3)
					w := watch(t, 7, lanes, p, func() {})
					if w.failAt = int64(at); panics {
						w.failAt, w.panicAt = 0, int64(at)
					}
					err := w.Run(t.Context())
					what := fmt.Sprintf("%d lanes, call %d, panics %v", lanes, at, panics)
					p.whole()
					met := at > 0 && int(w.calls.Load()) >= at
					var panicked *guard.PanicError
					switch {
					case !met && err != nil, met && !panics && !errors.Is(err, errFails), met && panics && !errors.As(err, &panicked):
						t.Errorf("%s: %v", what, err)
					case met && lanes == 1 && w.calls.Load() != int64(at):
						t.Errorf("%s: %d calls", what, w.calls.Load())
					case w.most.Load() > int64(min(lanes, 3)) || w.active.Load() != 0:
						t.Errorf("%s: %d were under way at most, %d still are", what, w.most.Load(), w.active.Load())
					}
					if !met {
						for i := range w.ended {
							if w.ended[i].Load() != 1 {
								t.Errorf("%s: piece %d was moved %d times", what, i, w.ended[i].Load())
							}
						}
						if at > 0 {
							break
						}
					}
					if t.Failed() {
						return
					}
				}
			}
		}
	}
}

// TestRandomJobs: jobs of random shapes share a pool that is too small for them, and some are
// cancelled. All end.
func TestRandomJobs(t *testing.T) {
	for seed := range testseed.Each(t, testseed.Rounds(300, 60)) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			p := newPool(t, 1+rng.IntN(4))
			var all sync.WaitGroup
			for range 1 + rng.IntN(4) {
				slow := time.Duration(rng.IntN(20)) * time.Millisecond
				w := watch(t, rng.IntN(30), 1+rng.IntN(6), p, func() { time.Sleep(slow) })
				if rng.IntN(2) == 0 {
					w.Quick = 10 * time.Millisecond
				}
				gone := errors.New("gone")
				ctx, cancel := context.WithCancelCause(t.Context())
				if rng.IntN(3) == 0 {
					time.AfterFunc(time.Duration(rng.IntN(300))*time.Millisecond, func() { cancel(gone) })
				}
				all.Go(func() {
					defer cancel(nil)
					err := w.Run(ctx)
					moved := 0
					for i := range w.ended {
						moved += int(w.ended[i].Load())
					}
					if n := w.active.Load(); n != 0 {
						t.Errorf("%d pieces are under way", n)
					}
					if err == nil && moved != w.Pieces || err != nil && !errors.Is(err, gone) {
						t.Errorf("%d of %d pieces were moved: %v", moved, w.Pieces, err)
					}
				})
			}
			all.Wait()
			p.whole()
		})
		if t.Failed() {
			return
		}
	}
}

// TestAllLanesWork: as many pieces are under way as there may be, and no more.
func TestAllLanesWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := watch(t, 40, 4, newPool(t, 9), func() {})
		w.Do = func(context.Context, int, int) error { time.Sleep(time.Millisecond); return w.do() }
		begun := time.Now()
		if err := w.Run(t.Context()); err != nil {
			t.Error(err)
		}
		if took := time.Since(begun); took != 10*time.Millisecond {
			t.Errorf("40 pieces of 1 ms took 4 lanes %v", took)
		}
	})
}

// TestOnePieceStartsNoGoroutine, nor does one lane.
func TestOnePieceStartsNoGoroutine(t *testing.T) {
	caller := goid.ID()
	for _, j := range []pump.Job[struct{}]{{Pieces: 1, Lanes: 8}, {Pieces: 5, Lanes: 1}} {
		j.Do = func(context.Context, struct{}, int) error {
			if here := goid.ID(); here != caller {
				t.Errorf("a piece is moved by goroutine %d, not by %d", here, caller)
			}
			return nil
		}
		if err := j.Run(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// TestFailureEndsWhatIsUnderWay: the others' context ends with the first error, and that is what
// Run returns. No piece is begun after it.
func TestFailureEndsWhatIsUnderWay(t *testing.T) {
	var ended atomic.Int64
	j := pump.Job[struct{}]{Pieces: 9, Lanes: 2, Do: func(ctx context.Context, _ struct{}, i int) error {
		ended.Add(1)
		if i == 1 {
			return errFails
		}
		<-ctx.Done()
		return errors.New("later")
	}}
	if err := j.Run(t.Context()); err != errFails || ended.Load() != 2 {
		t.Errorf("%d pieces: %v", ended.Load(), err)
	}
}

// TestNoPieceIsBegunAfterOneThatCouldNotBe, also while earlier ones are moved.
func TestNoPieceIsBegunAfterOneThatCouldNotBe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := 0
		j := pump.Job[struct{}]{Pieces: 20, Lanes: 8}
		j.Begin = func(_ struct{}, i int) error {
			if begun++; i == 1 {
				return errFails
			}
			return nil
		}
		j.Do = func(context.Context, struct{}, int) error { time.Sleep(time.Second); return nil }
		if err := j.Run(t.Context()); err != errFails || begun != 2 {
			t.Errorf("%d were begun: %v", begun, err)
		}
	})
}

// TestCancelled: what is under way ends, and no other piece is begun.
func TestCancelled(t *testing.T) {
	gone := errors.New("gone")
	for at := range 4 {
		ctx, cancel := context.WithCancelCause(t.Context())
		ended := 0
		j := pump.Job[struct{}]{Pieces: 3, Lanes: 1, Do: func(context.Context, struct{}, int) error {
			if ended++; ended == at {
				cancel(gone)
			}
			return nil
		}}
		if at == 0 {
			cancel(gone)
		}
		if err := j.Run(ctx); at < 3 && err != gone || at == 3 && err != nil || at < 3 && ended != at {
			t.Errorf("cancelled in piece %d: %d ended, %v", at, ended, err)
		}
		cancel(nil)
	}
}

// TestJobsShareAPool: a lane yields to another job that waits, and comes back when that has ended.
func TestJobsShareAPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, 4)
		nap := func(context.Context, int, int) error { time.Sleep(time.Millisecond); return nil }
		begun := time.Now()
		var all sync.WaitGroup
		all.Go(func() {
			long := pump.Job[int]{Pieces: 40, Lanes: 4, Pool: p, Do: nap}
			if err := long.Run(t.Context()); err != nil {
				t.Error(err)
			}
			if took := time.Since(begun); took > 12*time.Millisecond {
				t.Errorf("40 pieces of 1 ms took 4 lanes %v beside a single piece", took)
			}
		})
		time.Sleep(2500 * time.Microsecond)
		short := pump.Job[int]{Pieces: 1, Lanes: 4, Pool: p, Do: nap}
		if err := short.Run(t.Context()); err != nil {
			t.Error(err)
		}
		if took := time.Since(begun); took > 4*time.Millisecond {
			t.Errorf("a single piece waited until %v", took)
		}
		all.Wait()
		p.whole()
	})
}

// TestTheLastPieceIsTheEnd: who has moved it waits for nothing to work in again.
func TestTheLastPieceIsTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, 1)
		ctx, cancel := context.WithCancel(t.Context())
		var other sync.WaitGroup
		j := pump.Job[int]{Pieces: 1, Lanes: 1, Pool: p, Do: func(context.Context, int, int) error {
			other.Go(func() { // and keeps it
				if _, err := p.Borrow(ctx); err != nil {
					t.Error(err)
				}
			})
			synctest.Wait()
			return nil
		}}
		if err := j.Run(t.Context()); err != nil {
			t.Error(err)
		}
		other.Wait()
		cancel()
	})
}

// TestNoMoreLanesThanPieces: what nobody needs stays in the pool.
func TestNoMoreLanesThanPieces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, 9)
		j := pump.Job[int]{Pieces: 3, Lanes: 8, Pool: p, Do: func(context.Context, int, int) error { time.Sleep(time.Millisecond); return nil }}
		if err := j.Run(t.Context()); err != nil || p.most != 3 {
			t.Errorf("%d were lent for 3 pieces: %v", p.most, err)
		}
	})
}

// TestSlowDevice: no more pieces are under way on a device that becomes slow than on one that was
// slow from the beginning, so that a cancelled job ends as soon; on a fast one all lanes work.
func TestSlowDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const lanes = 8
		var underWay, fast, slow atomic.Int64
		j := pump.Job[struct{}]{Pieces: 90, Lanes: lanes, Quick: 5 * time.Millisecond}
		j.Begin = func(_ struct{}, i int) error {
			n := underWay.Add(1)
			switch {
			case i < 40:
				fast.Store(max(fast.Load(), n))
			case i >= 60:
				slow.Store(max(slow.Load(), n))
			}
			return nil
		}
		device := make(chan struct{}, 1) // one copy after the other, as on a stream
		j.Do = func(_ context.Context, _ struct{}, i int) error {
			device <- struct{}{}
			if i < 40 {
				time.Sleep(time.Millisecond)
			} else {
				time.Sleep(80 * time.Millisecond)
			}
			<-device
			underWay.Add(-1)
			return nil
		}
		if err := j.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if fast.Load() != lanes || slow.Load() > 2 {
			t.Errorf("%d were under way while the device was fast, %d when it was slow", fast.Load(), slow.Load())
		}
	})
}
