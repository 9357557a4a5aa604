package contend

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/spillway-db/spillway/reservation"
)

// slot is one unit that a crowd waits for.
type slot[T any] struct {
	acquire func(context.Context) (T, error)
	release func(T) error
	all     func() bool // reports whether the whole crowd waits
}

// measureWaiters measures a crowd of n, one side after the other: two crowds at
// once would take twice the memory.
func measureWaiters(ctx context.Context, cfg Config, n int) (w Waiters, err error) {
	w.Waiters = n
	b, err := newBench(Unit)
	if err != nil {
		return w, err
	}
	ours := slot[reservation.Reservation]{
		acquire: func(ctx context.Context) (reservation.Reservation, error) { return b.acquire(ctx) },
		release: func(r reservation.Reservation) error { return r.Release() },
		all:     func() bool { d := b.manager.Demand(nil); return len(d) == 1 && d[0].Waiters == n },
	}
	w.Samples.NsPerRelease, w.Samples.NsPerTurn, err = crowd(ctx, cfg, n, ours)
	if err := errors.Join(err, b.close()); err != nil {
		return w, err
	}
	sem := semaphore.NewWeighted(1)
	theirs := slot[struct{}]{
		acquire: func(ctx context.Context) (struct{}, error) { return struct{}{}, sem.Acquire(ctx, 1) },
		release: func(struct{}) error { sem.Release(1); return nil },
		all:     func() bool { return true }, // it does not report waiters; all that is known is that each has come
	}
	w.Samples.SemaphoreNsPerRelease, w.Samples.SemaphoreNsPerTurn, err = crowd(ctx, cfg, n, theirs)
	if err != nil {
		return w, err
	}
	s := w.Samples
	w.NsPerRelease, w.NsPerTurn = median(s.NsPerRelease), median(s.NsPerTurn)
	w.SemaphoreNsPerRelease, w.SemaphoreNsPerTurn = median(s.SemaphoreNsPerRelease), median(s.SemaphoreNsPerTurn)
	return w, nil
}

// crowd holds the slot while n goroutines wait for it, and then releases it again
// and again. Each that is served hands the slot over to be released, and waits anew,
// so that the crowd stays as large. The samples are what the call that releases takes,
// and what it takes until the next one has the slot, in ns; each is measured in rounds of
// its own, because looking at the clock takes time too.
func crowd[T any](ctx context.Context, cfg Config, n int, s slot[T]) (calls, turns []float64, err error) {
	held, err := s.acquire(ctx)
	if err != nil {
		return nil, nil, err
	}
	waiting, cancel := context.WithCancel(ctx)
	served := make(chan T)
	var wg sync.WaitGroup
	var came atomic.Int64
	for range n {
		wg.Go(func() {
			came.Add(1)
			for {
				t, err := s.acquire(waiting)
				if err != nil {
					return
				}
				served <- t
			}
		})
	}
	defer func() {
		cancel()
		go func() {
			wg.Wait()
			close(served)
		}()
		for t := range served { // the waiters that were served just when they were cancelled
			err = errors.Join(err, s.release(t))
		}
	}()
	for int(came.Load()) < n || !s.all() {
		if err := ctx.Err(); err != nil {
			return nil, nil, errors.Join(err, s.release(held))
		}
		runtime.Gosched()
	}
	runtime.GC() // so that the stacks of the crowd are not scanned in the midst of it
	for round := range 2 * cfg.Rounds {
		if err := ctx.Err(); err != nil {
			return nil, nil, errors.Join(err, s.release(held))
		}
		var inCalls time.Duration
		begun := time.Now()
		for range cfg.Releases {
			call := begun
			if round%2 == 0 {
				call = time.Now()
			}
			if err := s.release(held); err != nil {
				return nil, nil, err
			}
			if round%2 == 0 {
				inCalls += time.Since(call)
			}
			var ok bool
			if held, ok = next(ctx, served); !ok {
				return nil, nil, context.Cause(ctx)
			}
		}
		if round%2 == 0 {
			calls = append(calls, float64(inCalls)/float64(cfg.Releases))
		} else {
			turns = append(turns, float64(time.Since(begun))/float64(cfg.Releases))
		}
		cfg.Progress.Step()
	}
	return calls, turns, s.release(held)
}

// next returns what was served, or false if ctx ends the wait for it.
func next[T any](ctx context.Context, served <-chan T) (t T, ok bool) {
	select {
	case t = <-served:
		return t, true
	case <-ctx.Done():
		return t, false
	}
}
