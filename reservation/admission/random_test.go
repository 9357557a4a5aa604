package admission_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
)

// TestAgainstReference makes random tasks, ends and cancels some, and changes the
// rules; whenever all is quiet, what runs and what waits is held against the rule.
func TestAgainstReference(t *testing.T) {
	for seed := range testseed.Each(t, testseed.Rounds(60, 20)) {
		synctest.Test(t, func(t *testing.T) { againstReference(t, rand.New(rand.NewPCG(seed, 1))) })
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// reference is the rule in its simplest form.
type reference struct {
	capacity int64
	mark     int64
	threads  int
	running  []*refTask
	waiting  []*refTask // in order of arrival
	// How often the present head was passed: at least, and at most, because a task admitted
	// together with the head before may have passed either.
	least, most int
}

type refTask struct {
	*call
	need int64
}

func (r *reference) used() (n int64) {
	for _, t := range r.running {
		n += min(t.need, r.capacity)
	}
	return n
}

// settle takes note of what was admitted, and checks it.
func (r *reference) settle(t *testing.T) {
	before := r.running
	var waiting []*refTask
	passed := 0
	headGone := false
	for i, task := range r.waiting {
		if !task.over() {
			waiting = append(waiting, task)
			continue
		}
		if task.err != nil {
			t.Fatal(task.err)
		}
		r.running = append(r.running, task)
		if i == 0 {
			headGone = true
		} else if len(waiting) > 0 {
			passed++
		}
	}
	r.waiting = waiting
	if headGone {
		r.least, r.most = 0, passed
	} else {
		r.least, r.most = r.least+passed, r.most+passed
	}
	if len(r.running) > r.threads && len(r.running) > len(before) {
		t.Fatalf("%d tasks run on %d threads", len(r.running), r.threads)
	}
	if len(r.running) > len(before) && r.used() > r.mark && len(r.running) > 1 {
		t.Fatalf("%d bytes were admitted in %d tasks; the mark is %d", r.used(), len(r.running), r.mark)
	}
	if r.least > 16 {
		t.Fatalf("the head was passed %d times", r.least)
	}
	if len(r.waiting) == 0 || len(r.running) >= r.threads {
		return
	}
	if len(r.running) == 0 {
		t.Fatalf("nobody runs, and %d wait", len(r.waiting))
	}
	if r.waiting[0].need <= r.mark-r.used() {
		t.Fatalf("the head needs %d of %d-%d and waits", r.waiting[0].need, r.mark, r.used())
	}
	for _, w := range r.waiting[1:] {
		if r.most < 16 && w.need <= r.mark-r.used() {
			t.Fatalf("a task that needs %d of %d-%d waits, though only %d have passed",
				w.need, r.mark, r.used(), r.most)
		}
	}
}

func againstReference(t *testing.T, rng *rand.Rand) {
	const capacity = 1000
	w := newWorld(t, setup{
		cap: capacity, manager: reservation.Config{Bypass: 1000}, Config: with(admission.Rules{Threads: 6}),
	})
	r := &reference{capacity: capacity, mark: 900, threads: 6}
	for range 300 {
		switch k := rng.IntN(20); {
		case k < 10:
			need := rng.Int64N(300)
			if rng.IntN(6) == 0 {
				need = rng.Int64N(1500)
			}
			r.waiting = append(r.waiting, &refTask{w.admit(exactly(need)), need})
		case k < 17 && len(r.running) > 0:
			i := rng.IntN(len(r.running))
			w.end(r.running[i].g)
			r.running = append(r.running[:i], r.running[i+1:]...)
		case k == 17 && len(r.waiting) > 0:
			i := rng.IntN(len(r.waiting))
			r.waiting[i].cancel(errDone)
			r.waiting[i].fails(errDone)
			if r.waiting = append(r.waiting[:i], r.waiting[i+1:]...); i == 0 {
				r.least, r.most = 0, 0
			}
		case k == 18:
			r.mark = 300 + rng.Int64N(700)
			if err := w.SetThreshold((float64(r.mark) + 0.5) / capacity); err != nil {
				t.Fatal(err)
			}
		case k == 19:
			r.threads = 1 + rng.IntN(8)
			if err := w.SetThreads(r.threads); err != nil {
				t.Fatal(err)
			}
		}
		r.settle(t)
		if u := w.gpus[0].State().Used(); u != r.used() {
			t.Fatalf("%d bytes are used, %d by the reference", u, r.used())
		}
	}
	for len(r.running) > 0 {
		w.end(r.running[0].g)
		r.running = r.running[1:]
		r.settle(t)
	}
	if len(r.waiting) > 0 {
		t.Fatalf("%d tasks were never admitted", len(r.waiting))
	}
}

// TestRandomConcurrent lets many goroutines admit, cancel, run out of memory and change
// the rules at once. Threads and threshold hold at every moment, every wait ends, and the
// books end at zero.
func TestRandomConcurrent(t *testing.T) {
	for _, gpus := range []int{1, 3} {
		const capacity, threads = 10_000, 4
		w := newWorld(t, setup{cap: capacity, gpus: gpus, grain: 16, Config: with(admission.Rules{Threads: threads})})
		var mu sync.Mutex
		running := 0
		enter := func(n int) {
			mu.Lock()
			defer mu.Unlock()
			if running += n; running > threads {
				t.Errorf("%d tasks run", running)
			}
		}
		var wg sync.WaitGroup
		for i := range 16 {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(i), uint64(gpus)))
				for range 200 {
					ctx, cancel := context.WithCancel(context.Background())
					if rng.IntN(8) == 0 {
						go cancel()
					}
					e := admission.Estimate{Operator: "x", Input: rng.Int64N(1000), Output: 1 + rng.Int64N(2000)}
					if rng.IntN(10) == 0 {
						e.Least = rng.Int64N(3 * capacity)
					}
					fails := rng.IntN(4)
					err := w.Run(ctx, e, func(_ context.Context, g *admission.Grant) error {
						enter(1)
						defer enter(-1)
						if !g.Alone() && g.Reservation().Bytes() < g.Need() {
							t.Errorf("%d of %d bytes are reserved", g.Reservation().Bytes(), g.Need())
						}
						b, err := g.Alloc(min(g.Reservation().Bytes(), 1+rng.Int64N(500)))
						for range rng.IntN(50) {
							runtime.Gosched()
						}
						if fails--; fails == 0 && g.Reservation().Bytes() < capacity/3 { // there is more to be had
							_, e := g.Alloc(g.Reservation().Bytes() + 1)
							err = errors.Join(err, e)
						}
						return errors.Join(err, b.Release())
					})
					if err != nil && !errors.Is(err, context.Canceled) {
						t.Error(err)
					}
					cancel()
				}
			})
		}
		wg.Wait()
		if s := w.Stats(); s.Running != 0 || s.Waiting != 0 || s.Retried == 0 || s.Passed == 0 || s.Alone == 0 {
			t.Errorf("%+v", s)
		}
	}
}

// TestRandomChanges lets tasks of all sizes run, with other requests, while threshold, limits and
// external bytes change. Every wait ends, and the books end at zero.
func TestRandomChanges(t *testing.T) {
	for seed := range testseed.Each(t, testseed.Rounds(40, 15)) {
		synctest.Test(t, func(t *testing.T) { randomChanges(t, seed) })
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

func randomChanges(t *testing.T, seed uint64) {
	const capacity, threads = 10_000, 4
	w := newWorld(t, setup{cap: capacity, gpus: 2, grain: 16, Config: with(admission.Rules{Threads: threads})})
	var running atomic.Int64
	var all sync.WaitGroup
	pause := func(rng *rand.Rand) { time.Sleep(time.Duration(rng.IntN(100))) }
	for i := range uint64(8) {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(seed, i))
			for range 20 {
				pause(rng)
				e := exactly(rng.Int64N(capacity / 4))
				if rng.IntN(3) == 0 {
					e = exactly(rng.Int64N(2 * capacity))
				}
				err := w.Run(t.Context(), e, func(context.Context, *admission.Grant) error {
					defer running.Add(-1)
					if n := running.Add(1); n > threads {
						t.Errorf("%d tasks run", n)
					}
					pause(rng)
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range uint64(2) {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(seed, 100+i))
			for range 60 {
				pause(rng)
				s, err := w.gpus[rng.IntN(len(w.gpus))], error(nil)
				switch rng.IntN(4) {
				case 0:
					err = w.SetThreshold(0.1 + 0.9*rng.Float64())
				case 1:
					err = s.SetLimit(capacity/4 + rng.Int64N(capacity*3/4))
				case 2:
					s.SetExternal(rng.Int64N(capacity / 2))
				default:
					r, refused := w.m.TryReserve(reservation.Specific(s.ID()), rng.Int64N(capacity/2), nil)
					if refused == nil {
						pause(rng)
						err = r.Release()
					}
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
}
