package reservation_test

import (
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/invariants"
)

var bypasses = []int{-1, 1, 2, 3, 0}

func newCrowd(t testing.TB, seed uint64, workers int) (*crowd, *rand.Rand) {
	rng := rand.New(rand.NewPCG(seed, 0))
	f := newField(t, bypasses[seed%uint64(len(bypasses))])
	c := &crowd{f: f, nudge: make(chan struct{}, 1), lines: make([]lineWatch, len(f.spaces))}
	for g := range workers {
		c.workers = append(c.workers, &crowdWorker{
			f: f, all: c, rng: rand.New(rand.NewPCG(seed, uint64(g+1))), begin: make(chan int, 1),
		})
	}
	return c, rng
}

func (c *crowd) start(wg *sync.WaitGroup) {
	for _, w := range c.workers {
		wg.Go(w.run)
	}
}

// burst lets idle workers do n operations each, some or all of them, and returns how many those
// are.
func (c *crowd) burst(n int, some func() bool) (began int) {
	c.epoch.Add(1)
	for _, w := range c.workers {
		if w.state.Load() == idle && some() {
			w.state.Store(running)
			w.begin <- n
			began++
		}
	}
	return began
}

func (c *crowd) interruptOne(rng *rand.Rand) { c.workers[rng.IntN(len(c.workers))].interrupt() }

// releaseOne takes something from an idle worker.
func (c *crowd) releaseOne(rng *rand.Rand) bool {
	first := rng.IntN(len(c.workers))
	for i := range c.workers {
		w := c.workers[(first+i)%len(c.workers)]
		if w.state.Load() == idle && len(w.held) > 0 {
			w.release(w.rng.IntN(len(w.held)))
			return true
		}
	}
	return false
}

// TestCrowdInABubble: in a synctest bubble it is certain when all workers are idle or wait. Then
// the books agree, byte for byte and account by account, no queued waiter can be served, and each
// door is open or shut as it must be: after bursts of many at once, and after single steps.
func TestCrowdInABubble(t *testing.T) {
	seeds := crowdSeeds(t, 400)
	var ops, quiet int64
	for _, seed := range seeds {
		if t.Failed() {
			break
		}
		synctest.Test(t, func(t *testing.T) {
			o, q := crowdInABubble(t, seed)
			ops, quiet = ops+o, quiet+q
		})
	}
	t.Logf("%d operations, %d quiet moments, %d seeds", ops, quiet, len(seeds))
}

func crowdInABubble(t *testing.T, seed uint64) (ops, quiet int64) {
	c, rng := newCrowd(t, seed, 8)
	var wg sync.WaitGroup
	var charges atomic.Uint64
	for i, p := range c.f.pools {
		switch seed % 4 {
		case 0: // let others in where something is decided and not yet done
			p.onCharge = runtime.Gosched
		case 1:
			p.onCharge = func() {
				for range 8 {
					runtime.Gosched()
				}
				c.f.meddle(i, seed+charges.Add(1))
			}
		}
	}
	c.start(&wg)
	defer func() {
		c.end()
		wg.Wait()
		if bad := c.f.failures(); len(bad) > 0 && !t.Failed() {
			t.Errorf("%s, at the end:\n%s", repeat(t, seed), strings.Join(bad, "\n"))
		}
	}()
	what := "the start"
	check := func() bool {
		synctest.Wait()
		quiet++
		bad := c.wrong()
		if len(bad) == 0 {
			bad = c.watch(rng.IntN(3) == 0)
			synctest.Wait()
			bad = append(bad, c.wrong()...)
		}
		if bad = append(bad, c.f.failures()...); len(bad) > 0 {
			t.Errorf("%s, after %s:\n%s", repeat(t, seed), what, strings.Join(bad, "\n"))
		}
		return len(bad) == 0
	}
	for range 25 {
		some := func() bool { return true }
		if rng.IntN(2) == 0 { // often a single one
			left := 1
			some = func() bool { left--; return left == 0 }
		}
		began := c.burst(1+rng.IntN(6), some)
		what = "a burst"
		if !check() {
			break
		}
		for range rng.IntN(4) {
			c.epoch.Add(1) // before: a worker served by this may begin to wait again, at once
			switch rng.IntN(5) {
			case 0:
				what = "a limit"
				c.f.setLimit(rng)
			case 1:
				what = "a release"
				c.releaseOne(rng)
			case 2:
				what = "reaping"
				c.f.pools[2].reap(2)
			default:
				if b := c.f.takeBuffer(rng); rng.IntN(2) == 0 && b != nil {
					what = "freeing"
					c.f.free(b)
				} else if b != nil {
					c.f.keep(b)
				}
			}
			if !check() {
				return c.ops.Load(), quiet
			}
		}
		if began < len(c.workers)/2 {
			what = "a cancellation"
			c.epoch.Add(1)
			c.interruptOne(rng)
			if !check() {
				break
			}
		}
	}
	return c.ops.Load(), quiet
}

// end lets all workers finish and checks that nothing is left.
func (c *crowd) end() {
	for _, w := range c.workers {
		close(w.begin)
	}
	for {
		ended := true
		for _, w := range c.workers {
			w.interrupt()
			ended = ended && w.state.Load() == idle
		}
		if ended {
			break
		}
		runtime.Gosched()
	}
	for _, w := range c.workers {
		for len(w.held) > 0 {
			w.release(0)
		}
	}
	c.f.close()
	if err := c.f.m.Close(); err != nil {
		c.f.fail("closing: %v", err)
	}
}

// patient is how long threads may take to come to rest. Only a defect ever needs
// that long.
const patient = 30 * time.Second

// TestCrowdOfThreads: the same without a bubble, as fast as it goes, with observers that read the
// books all the time. Every so often the workers are stopped, and waiters go on waiting. With no
// other activity, the books must come to agree, and no queued waiter may be left that could be
// served.
func TestCrowdOfThreads(t *testing.T) {
	const workers = 12
	want := int64(100_000)
	if testing.Short() {
		want /= 10
	}
	if invariants.Enabled {
		want /= 50
	}
	seeds := crowdSeeds(t, 0)
	if len(seeds) > 1 { // each is long: one for each bypass
		seeds = seeds[:0]
		for i := range bypasses {
			seeds = append(seeds, uint64(i+1))
		}
	}
	var ops, stops, seen int64
	for _, seed := range seeds {
		if t.Failed() {
			break
		}
		c, rng := newCrowd(t, seed, workers)
		o, n := crowdOfThreads(t, c, seed, rng, want/int64(len(seeds)))
		ops, stops, seen = ops+c.ops.Load(), stops+n, seen+o
	}
	t.Logf("%d operations, stopped %d times, observed %d times", ops, stops, seen)
}

func crowdOfThreads(t *testing.T, c *crowd, seed uint64, rng *rand.Rand, want int64) (seen, stops int64) {
	var charges atomic.Uint32
	for _, p := range c.f.pools {
		p.onCharge = func() { // let others in where something is decided and not yet done
			if charges.Add(1)%16 == 0 {
				runtime.Gosched()
			}
		}
	}
	var wg, observers sync.WaitGroup
	var ended atomic.Bool
	observers.Go(func() {
		for !ended.Load() {
			for i := range c.f.spaces {
				c.f.observe(i)
			}
			seen++
			runtime.Gosched()
		}
	})
	c.start(&wg)
	for c.ops.Load() < want && c.stop(t, seed, "a burst") {
		stops++
		switch {
		case stops%8 == 0: // all that workers hold which do not wait
			for c.releaseOne(rng) {
			}
			for b := c.f.takeBuffer(rng); b != nil; b = c.f.takeBuffer(rng) {
				c.f.free(b)
			}
			c.f.pools[2].reap(1 << 30)
		case stops%8 == 4:
			c.f.setLimit(rng)
		default:
			c.interruptOne(rng)
		}
		if !c.stop(t, seed, "something was given back") {
			break
		}
		if c.burst(100, func() bool { return true }) < len(c.workers)/2 {
			for range len(c.workers) / 2 {
				c.interruptOne(rng)
			}
		}
	}
	c.end()
	wg.Wait()
	ended.Store(true)
	observers.Wait()
	if bad := c.f.failures(); len(bad) > 0 && !t.Failed() {
		t.Errorf("%s:\n%s", repeat(t, seed), strings.Join(bad, "\n"))
	}
	return seen, stops
}

// stop waits until all workers are idle or wait, and no waiter could be served.
func (c *crowd) stop(t *testing.T, seed uint64, what string) bool {
	deadline := time.Now().Add(patient)
	for {
		for c.busy() {
			<-c.nudge
		}
		bad := c.wrong()
		if c.busy() {
			continue
		}
		failed := c.f.failures()
		if len(failed) == 0 && len(bad) == 0 {
			return true
		}
		if len(failed) > 0 || time.Now().After(deadline) {
			t.Errorf("%s, after %s:\n%s", repeat(t, seed), what, strings.Join(append(failed, bad...), "\n"))
			return false
		}
		runtime.Gosched()
	}
}

func (c *crowd) busy() bool {
	for _, w := range c.workers {
		if w.state.Load() == running {
			return true
		}
	}
	return false
}
