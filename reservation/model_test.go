package reservation_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// reference is one space with its waiters, in the plainest words: a list, walked
// from its head after each step.
type reference struct {
	limit, used int64
	bypass      int
	waiters     []*modelWaiter // in the order in which they came
	passes      int            // left at the door of waiters[0]
}

type modelWaiter struct {
	call    *call
	cancel  func()
	bytes   int64
	outcome string // "", "served", "cancelled", "refused"
}

func (m *reference) begin(head *modelWaiter) {
	if len(m.waiters) > 0 && m.waiters[0] != head {
		m.passes = m.bypass
	}
}

func (m *reference) head() *modelWaiter {
	if len(m.waiters) == 0 {
		return nil
	}
	return m.waiters[0]
}

// try is a request that does not wait; it says whether it is served.
func (m *reference) try(bytes int64) bool {
	if bytes > m.limit-m.used {
		return false
	}
	if len(m.waiters) > 0 && bytes > 0 {
		if m.passes == 0 {
			return false
		}
		m.passes--
	}
	m.used += bytes
	return true
}

func (m *reference) wait(w *modelWaiter) {
	head := m.head()
	m.waiters = append(m.waiters, w)
	m.begin(head)
}

func (m *reference) leave(w *modelWaiter, outcome string) {
	head := m.head()
	w.outcome = outcome
	m.waiters = slices.DeleteFunc(m.waiters, func(o *modelWaiter) bool { return o == w })
	m.begin(head)
}

// settle serves all waiters that can be served.
func (m *reference) settle() {
again:
	for i, w := range m.waiters {
		if w.bytes > m.limit-m.used {
			continue
		}
		if i > 0 {
			if m.passes == 0 {
				return
			}
			m.passes--
		}
		m.used += w.bytes
		m.leave(w, "served")
		goto again
	}
}

// Random operations, one at a time, give exactly what the reference gives: the waiters served,
// their order, the waiters left, what is used.
func TestOneSpaceAgainstAReference(t *testing.T) {
	for seed := range testseed.Each(t, testseed.Rounds(60, 20)) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { againstReference(t, seed) })
		})
	}
}

func againstReference(t *testing.T, seed uint64) {
	const capacity, steps = 100, 250
	rng := rand.New(rand.NewPCG(seed, 1))
	bypass := 1 + rng.IntN(4)
	m, s := one(t, capacity, bypass)
	ref := &reference{limit: capacity, bypass: bypass}
	var held []*reservation.Reservation
	var all []*modelWaiter
	for step := range steps {
		bytes := 1 + rng.Int64N(rng.Int64N(60)+1)
		what := ""
		switch op := rng.IntN(12); {
		case op < 3:
			what = fmt.Sprintf("TryReserve(%d)", bytes)
			r, err := m.TryReserve(onGPU0, bytes, nil)
			if ok := ref.try(bytes); ok != (err == nil) {
				t.Fatalf("step %d: %s: %v; the reference: %v", step, what, err, ok)
			}
			if err == nil {
				held = append(held, r)
			}
		case op < 6 && len(ref.waiters) < 20:
			what = fmt.Sprintf("Reserve(%d)", bytes)
			ctx, cancel := context.WithCancel(t.Context())
			w := &modelWaiter{bytes: bytes, cancel: cancel}
			all = append(all, w)
			if ref.try(bytes) {
				w.outcome = "served"
			} else {
				ref.wait(w)
			}
			w.call = startReserve(ctx, m, onGPU0, bytes)
		case op < 9 && len(held) > 0:
			i := rng.IntN(len(held))
			what = fmt.Sprintf("Release(%d)", held[i].Bytes())
			ref.used -= held[i].Bytes()
			release(t, held[i])
			held = slices.Delete(held, i, i+1)
		case op < 10 && len(held) > 0:
			r := held[rng.IntN(len(held))]
			n := min(bytes, r.Bytes())
			what = fmt.Sprintf("Shrink(%d)", n)
			ref.used -= n
			if err := r.Shrink(n); err != nil {
				t.Fatal(err)
			}
		case op < 11 && len(held) > 0:
			r := held[rng.IntN(len(held))]
			what = fmt.Sprintf("TryGrow(%d)", bytes)
			ok := r.Bytes()+bytes <= capacity && ref.try(bytes)
			if err := r.TryGrow(bytes); ok != (err == nil) {
				t.Fatalf("step %d: %s: %v; the reference: %v", step, what, err, ok)
			}
		case len(ref.waiters) > 0:
			w := ref.waiters[rng.IntN(len(ref.waiters))]
			what = fmt.Sprintf("cancel(%d)", w.bytes)
			w.cancel()
			ref.leave(w, "cancelled")
		}
		ref.settle()
		synctest.Wait()
		wantUsage(t, s, 0, 0, ref.used)
		var demand int64
		for _, w := range ref.waiters {
			demand += w.bytes
		}
		want := []reservation.Demand{{Space: gpu0, Bytes: demand, Waiters: len(ref.waiters)}}
		if got := m.Demand(nil); !slices.Equal(got, want[:min(1, len(ref.waiters))]) {
			t.Fatalf("step %d: %s: demand is %+v; want %+v", step, what, got, want)
		}
		all = slices.DeleteFunc(all, func(w *modelWaiter) bool {
			if w.call.over() != (w.outcome != "") {
				t.Fatalf("step %d: %s: the wait for %d is over: %v; the reference: %q", step, what, w.bytes, w.call.over(), w.outcome)
			}
			switch w.outcome {
			case "served":
				held = append(held, w.call.served(t))
			case "cancelled":
				w.call.failed(t, context.Canceled)
			}
			if w.outcome != "" {
				w.cancel()
			}
			return w.outcome != ""
		})
		if t.Failed() {
			t.Fatalf("step %d: %s", step, what)
		}
	}
	for _, w := range all {
		w.cancel()
	}
	synctest.Wait()
	for _, w := range all {
		<-w.call.done
		if w.call.err == nil {
			held = append(held, w.call.r)
		}
	}
	for _, r := range held {
		release(t, r)
	}
}

// worker does random things to reservations of its own, and to buffers of any worker. What it holds
// is in its books, correctly whenever it sleeps or waits.
type worker struct {
	rng  *rand.Rand
	bags *bags

	mu   sync.Mutex // so that the race detector knows that the checks are over
	held []*modelReservation
}

type modelReservation struct {
	r        *reservation.Reservation
	promised int64
}

// bags is where buffers are handed from one worker to another.
type bags struct {
	mu      sync.Mutex
	buffers []*tier.Buffer
}

func (b *bags) put(buf *tier.Buffer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.buffers = append(b.buffers, buf)
}

func (b *bags) take(rng *rand.Rand) *tier.Buffer {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.buffers) == 0 {
		return nil
	}
	i := rng.IntN(len(b.buffers))
	buf := b.buffers[i]
	b.buffers[i] = b.buffers[len(b.buffers)-1]
	b.buffers = b.buffers[:len(b.buffers)-1]
	return buf
}

// Many goroutines at once: never is more used than there is. Whenever all of them wait or sleep,
// every byte is accounted for and no queued waiter can be served. Time is virtual, so a wait that a
// deadline ends costs none.
func TestManyGoroutinesAgainstBooks(t *testing.T) {
	for seed := range testseed.Each(t, 6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { manyGoroutines(t, seed) })
		})
	}
}

func manyGoroutines(t *testing.T, seed uint64) {
	const goroutines, steps = 12, 400
	m, byName := machine(t)
	spaces := m.Spaces().All()
	policies := []reservation.LimitPolicy{reservation.Fail(), reservation.Ignore(), reservation.Increase(1.25)}
	var bags bags
	var wg sync.WaitGroup
	workers := make([]*worker, goroutines)
	for g := range workers {
		w := &worker{rng: rand.New(rand.NewPCG(seed, uint64(g))), bags: &bags}
		workers[g] = w
		wg.Go(func() {
			for range steps {
				w.step(t, m, policies)
				time.Sleep(time.Duration(w.rng.IntN(5)) * 100 * time.Microsecond)
				for _, s := range spaces {
					if used := s.State().Used(); used < 0 || used > s.Capacity {
						t.Errorf("%s: %d of %d bytes are used", s.ID(), used, s.Capacity)
					}
				}
			}
			for len(w.held) > 0 {
				w.release(t, 0)
			}
		})
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		wg.Wait()
	}()
	rng := rand.New(rand.NewPCG(seed, 99))
	gpu := byName["gpu:0"]
	quiet := 0
	for running := true; running && !t.Failed(); quiet++ {
		select {
		case <-done:
			running = false
		case <-time.After(time.Millisecond):
		}
		if rng.IntN(10) == 0 {
			if err := gpu.SetLimit(500 + rng.Int64N(501)); err != nil {
				t.Error(err)
			}
		}
		synctest.Wait() // all sleep or wait
		checkBooks(t, spaces, workers, &bags)
		if stuck := m.Runnable(); len(stuck) > 0 {
			t.Errorf("left waiting: %v", stuck)
		}
	}
	<-done
	for b := bags.take(rng); b != nil; b = bags.take(rng) {
		release(t, b)
	}
	stats := m.Waits()
	if quiet < 50 || stats.Count < 50 {
		t.Errorf("%d quiet moments and %d waits: the test shows nothing", quiet, stats.Count)
	}
}

// checkBooks adds up what all workers hold.
func checkBooks(t *testing.T, spaces []*tier.Space, workers []*worker, bags *bags) {
	t.Helper()
	type sums struct{ reserved, live int64 }
	want := map[*tier.Space]*sums{}
	for _, s := range spaces {
		want[s] = new(sums)
	}
	for _, w := range workers {
		w.mu.Lock()
		for _, h := range w.held {
			if h.r.Bytes() != h.promised {
				t.Errorf("a reservation promises %d bytes; want %d", h.r.Bytes(), h.promised)
			}
			want[h.r.Space()].reserved += h.r.Unused()
		}
		w.mu.Unlock()
	}
	bags.mu.Lock()
	defer bags.mu.Unlock()
	for _, b := range bags.buffers {
		want[b.Space()].live += b.Charge()
	}
	for _, s := range spaces {
		wantUsage(t, s, want[s].live, 0, want[s].reserved)
	}
}

func (w *worker) strategy() reservation.Strategy {
	switch w.rng.IntN(6) {
	case 0:
		return reservation.AnyInTier(tier.GPU)
	case 1:
		return reservation.AnyInTierPreferring(tier.GPU, 1)
	case 2:
		return reservation.AnyInTiers(tier.GPU, tier.Host)
	case 3:
		return reservation.ToDowngrade(gpu0, tier.Host)
	default:
		return onGPU0
	}
}

func (w *worker) step(t *testing.T, m *reservation.Manager, policies []reservation.LimitPolicy) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+w.rng.IntN(20))*time.Millisecond)
	defer cancel()
	bytes := w.rng.Int64N(w.rng.Int64N(900) + 1)
	policy := &reservation.Options{Policy: policies[w.rng.IntN(len(policies))]}
	op := w.rng.IntN(16)
	if len(w.held) > 4 {
		op = 9
	}
	switch {
	case op < 4:
		w.keep(t)(m.Reserve(ctx, w.strategy(), bytes, policy))
	case op < 5:
		w.keep(t)(m.TryReserve(w.strategy(), bytes, policy))
	case op < 6:
		w.keep(t)(m.ReserveUpTo(ctx, w.strategy(), bytes/4, bytes, policy))
	case op < 8:
		if b := w.bags.take(w.rng); b != nil { // of any worker
			release(t, b)
		}
	case len(w.held) == 0:
	case op < 10:
		w.release(t, w.rng.IntN(len(w.held)))
	default:
		w.use(ctx, t, w.held[w.rng.IntN(len(w.held))], op, 1+bytes)
	}
}

func (w *worker) use(ctx context.Context, t *testing.T, h *modelReservation, op int, bytes int64) {
	switch {
	case op < 14:
		b, err := h.r.Alloc(bytes)
		expected(t, err)
		if err == nil {
			w.bags.put(b)
		}
	case op < 15:
		err := h.r.Grow(ctx, bytes)
		expected(t, err)
		if err == nil {
			w.promise(h, h.promised+bytes)
		}
	default:
		err := h.r.Shrink(bytes)
		expected(t, err)
		if err == nil {
			w.promise(h, h.promised-bytes)
		}
	}
	w.promise(h, max(h.promised, h.r.Bytes())) // Increase
}

func (w *worker) promise(h *modelReservation, bytes int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	h.promised = bytes
}

func (w *worker) keep(t *testing.T) func(*reservation.Reservation, error) {
	return func(r *reservation.Reservation, err error) {
		expected(t, err)
		if err == nil {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.held = append(w.held, &modelReservation{r, r.Bytes()})
		}
	}
}

func (w *worker) release(t *testing.T, i int) {
	w.mu.Lock()
	h := w.held[i]
	w.held = slices.Delete(w.held, i, i+1)
	w.mu.Unlock()
	release(t, h.r)
}

// expected fails on an error that random operations cannot have caused.
func expected(t *testing.T, err error) {
	t.Helper()
	for _, e := range []error{nil, tier.ErrNoSpace, reservation.ErrExceeded, context.DeadlineExceeded} {
		if errors.Is(err, e) {
			return
		}
	}
	t.Errorf("unexpected: %v", err)
}
