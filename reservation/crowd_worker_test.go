package reservation_test

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

const (
	idle = iota
	running
	calling // a request that may wait
)

// crowdWorker does random things, a burst at a time, and records its results. It uses only
// reservations of its own, and buffers of any worker.
type crowdWorker struct {
	f     *field
	all   *crowd
	rng   *rand.Rand
	state atomic.Int32
	begin chan int // how many operations the next burst has

	mu     sync.Mutex
	held   []*entry
	asked  *asked // while it calls
	ctx    context.Context
	cancel context.CancelFunc
}

// choice is a strategy and the spaces that it names.
type choice struct {
	strategy reservation.Strategy
	spaces   []int
}

var choices = []choice{
	{reservation.Specific(gpu0), []int{0}},
	{reservation.Specific(gpu1), []int{1}},
	{reservation.Specific(host), []int{2}},
	{reservation.AnyInTier(tier.GPU), []int{0, 1}},
	{reservation.AnyInTierPreferring(tier.GPU, 1), []int{0, 1}},
	{reservation.AnyInTiers(tier.Host, tier.GPU), []int{0, 1, 2}},
}

var policies = []reservation.LimitPolicy{reservation.Fail(), reservation.Ignore(), reservation.Increase(1.25)}

func (w *crowdWorker) run() {
	for n := range w.begin {
		for range n {
			w.step()
			w.all.ops.Add(1)
		}
		w.state.Store(idle)
		w.all.tell()
	}
}

func (w *crowdWorker) step() {
	bytes := w.rng.Int64N(w.rng.Int64N(700) + 1)
	op := w.rng.IntN(64)
	if len(w.held) >= 4 && op < 22 || len(w.held) == 0 && op >= 22 && op < 48 {
		op = 48 + w.rng.IntN(16)
	}
	switch {
	case op < 12:
		w.reserve(bytes, bytes)
	case op < 16:
		w.try(bytes)
	case op < 22:
		w.reserve(bytes/4, bytes)
	case op < 26:
		w.grow(w.any(), bytes/2)
	case op < 28:
		w.tryGrow(w.any(), bytes/2)
	case op < 31:
		w.shrink(w.any(), bytes/2)
	case op < 41:
		w.alloc(w.any(), 1+bytes/2)
	case op < 54 && len(w.held) > 0:
		w.release(w.rng.IntN(len(w.held)))
	case op < 60:
		if b := w.f.takeBuffer(w.rng); b != nil {
			w.f.free(b)
		}
	case op < 62:
		w.f.pools[2].reap(1 + w.rng.IntN(4))
	case op < 63:
		w.all.workers[w.rng.IntN(len(w.all.workers))].interrupt()
	default:
		w.f.setLimit(w.rng)
	}
	w.f.observe(w.rng.IntN(len(w.f.spaces)))
}

// setLimit sets any limit of any space.
func (f *field) setLimit(rng *rand.Rand) {
	i := rng.IntN(len(f.spaces))
	least := f.leastLimit(i)
	f.limits[i].Add(1)
	if err := f.spaces[i].SetLimit(least + rng.Int64N(f.spaces[i].Capacity-least+1)); err != nil {
		f.fail("%v", err)
	}
}

func (w *crowdWorker) any() *entry { return w.held[w.rng.IntN(len(w.held))] }

// interrupt cancels what w waits for.
func (w *crowdWorker) interrupt() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.asked != nil {
		w.cancel()
	}
}

// call makes a request that may wait, with a context that others may cancel.
func (w *crowdWorker) call(slots []askedSlot, f func(context.Context) error) error {
	w.mu.Lock()
	if w.ctx == nil || w.ctx.Err() != nil {
		w.ctx, w.cancel = context.WithCancel(context.Background())
	}
	ctx := w.ctx
	w.asked = &asked{slots: slots, epoch: int(w.all.epoch.Load())}
	for i := range w.all.lines {
		w.asked.maybe = append(w.asked.maybe, w.all.lines[i].maybe.Load())
		w.asked.limits = append(w.asked.limits, w.all.f.limits[i].Load())
	}
	w.mu.Unlock()
	w.state.Store(calling)
	w.all.tell()
	err := f(ctx)
	w.state.Store(running)
	w.mu.Lock()
	w.asked = nil
	w.mu.Unlock()
	if errors.Is(err, context.Canceled) && ctx.Err() == nil {
		w.f.fail("a context that nobody cancelled ended a wait: %v", err)
	}
	return err
}

func (w *crowdWorker) reserve(least, most int64) {
	c := choices[w.rng.IntN(len(choices))]
	policy := policies[w.rng.IntN(len(policies))]
	var r *reservation.Reservation
	slots := w.f.slots(c, least)
	err := w.call(slots, func(ctx context.Context) (err error) {
		if least == most {
			r, err = w.f.m.Reserve(ctx, c.strategy, most, &reservation.Options{Policy: policy})
		} else {
			r, err = w.f.m.ReserveUpTo(ctx, c.strategy, least, most, &reservation.Options{Policy: policy})
		}
		return err
	})
	if err != nil {
		w.f.judge(err, slots, context.Canceled)
		return
	}
	w.add(r, policy, c, least, most)
}

func (f *field) slots(c choice, bytes int64) []askedSlot {
	var slots []askedSlot
	for _, i := range c.spaces {
		slots = append(slots, askedSlot{i, f.pools[i].round(bytes), 0})
	}
	return slots
}

// judge fails on an error that a request cannot have ended with: too large, for
// one that fits under any limit, or one that is not expected.
func (f *field) judge(err error, slots []askedSlot, expected ...error) {
	if errors.Is(err, reservation.ErrExceeded) {
		for _, s := range slots {
			if s.need <= f.leastLimit(s.space)-s.held {
				f.fail("%d bytes beside %d always fit %s: %v", s.need, s.held, f.spaces[s.space].ID(), err)
			}
		}
		return
	}
	for _, e := range expected {
		if errors.Is(err, e) {
			return
		}
	}
	f.fail("unexpected: %v", err)
}

func (w *crowdWorker) try(bytes int64) {
	c := choices[w.rng.IntN(len(choices))]
	policy := policies[w.rng.IntN(len(policies))]
	r, err := w.f.m.TryReserve(c.strategy, bytes, &reservation.Options{Policy: policy})
	if err != nil {
		w.f.judge(err, w.f.slots(c, bytes), tier.ErrNoSpace)
		return
	}
	w.add(r, policy, c, bytes, bytes)
}

// add writes down what was reserved.
func (w *crowdWorker) add(r *reservation.Reservation, policy reservation.LimitPolicy, c choice, least, most int64) {
	e := &entry{r: r, space: w.f.index(r.Space()), policy: policy, promised: r.Bytes()}
	if !slices.Contains(c.spaces, e.space) {
		w.f.fail("%v gave bytes of %s", c.strategy, r.Space().ID())
	}
	if most > least {
		w.all.overdrawn(e.space) // what it got beyond the least may have passed a waiter, too
	}
	if p := w.f.pools[e.space]; e.promised < p.round(least) || e.promised > p.round(most) {
		w.f.fail("%d bytes of %d to %d", e.promised, least, most)
	}
	w.mu.Lock()
	w.held = append(w.held, e)
	w.mu.Unlock()
	if e.promised > 0 {
		w.all.admitted(e.space)
	}
}

func (w *crowdWorker) promise(e *entry, bytes int64) {
	w.mu.Lock()
	e.promised = bytes
	w.mu.Unlock()
}

func (w *crowdWorker) growth(e *entry, n int64) askedSlot {
	return askedSlot{e.space, w.f.pools[e.space].round(n), e.promised}
}

func (w *crowdWorker) grow(e *entry, n int64) {
	slot := w.growth(e, n)
	err := w.call([]askedSlot{slot}, func(ctx context.Context) error { return e.r.Grow(ctx, n) })
	w.grown(e, slot, err, context.Canceled)
}

func (w *crowdWorker) tryGrow(e *entry, n int64) {
	w.grown(e, w.growth(e, n), e.r.TryGrow(n), tier.ErrNoSpace)
}

func (w *crowdWorker) grown(e *entry, slot askedSlot, err, expected error) {
	if err != nil {
		w.f.judge(err, []askedSlot{slot}, expected)
		return
	}
	w.promise(e, e.promised+slot.need)
	if slot.need > 0 {
		w.all.admitted(e.space)
	}
}

func (w *crowdWorker) shrink(e *entry, n int64) {
	n = min(n, e.unused())
	if err := e.r.Shrink(n); err != nil {
		w.f.fail("shrinking by %d of %d: %v", n, e.unused(), err)
		return
	}
	w.promise(e, e.promised-n)
}

// alloc draws a buffer, which any worker may free.
func (w *crowdWorker) alloc(e *entry, size int64) {
	charge, before := w.f.pools[e.space].round(size), e.unused()
	b, err := e.r.Alloc(size)
	if err != nil {
		// Others may have freed something since, but none takes from this promise.
		if charge <= before || !errors.Is(err, reservation.ErrExceeded) || errors.Is(err, tier.ErrNoSpace) == (e.policy == reservation.Fail()) {
			w.f.fail("%v: %d bytes of %d: %v", e.policy, charge, before, err)
		}
		return
	}
	e.drawn.Add(charge)
	b.Memory().(*tallyMemory).owner = e
	w.f.keep(b)
	now := e.r.Bytes()
	more := int64(0)
	if e.policy == policies[2] {
		more = int64(math.Ceil(1.25 * float64(max(0, charge-before))))
	}
	if now < e.promised || now > e.promised+more {
		w.f.fail("%v: %d bytes of %d made the promise %d", e.policy, charge, before, now)
	}
	w.promise(e, now)
	if charge > before {
		w.all.overdrawn(e.space)
	}
}

func (w *crowdWorker) release(i int) {
	w.mu.Lock()
	e := w.held[i]
	w.held = slices.Delete(w.held, i, i+1)
	w.mu.Unlock()
	if err := e.r.Release(); err != nil {
		w.f.fail("releasing: %v", err)
	}
}
