package reservation_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// A request that heads the lines of two spaces asks for the memory of both.
func TestReclaimInTheSecondOfTwoSpaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := twoSpaces(t)
		full, work := newTask(t, m, "runs").hold(gpu0, 100), mustTry(t, m, reservation.Specific(host), 100, nil)
		defer m.OnReclaim(
			reservation.Reclaimer{Reservation: work, Name: "work", Reclaim: func(_ context.Context, want int64) {
				if err := work.Shrink(want); err != nil {
					t.Error(err)
				}
			}},
		)()
		c := startReserve(t.Context(), m, reservation.AnyInTiers(tier.GPU, tier.Host), 40)
		release(t, c.served(t), full, work)
	})
}

// A waiter that becomes the head because another fits there no more asks for memory.
func TestReclaimForAHeadAfterALowerLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := twoSpaces(t)
		full, work := newTask(t, m, "runs").hold(host, 100), mustTry(t, m, onGPU0, 70, nil)
		first := startReserve(t.Context(), m, reservation.AnyInTiers(tier.GPU, tier.Host), 90)
		first.waiting(t)
		second := startReserve(t.Context(), m, onGPU0, 60)
		second.waiting(t)
		gpu, _ := m.Spaces().ByID(gpu0)
		if err := gpu.SetLimit(80); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		defer m.OnReclaim(
			reservation.Reclaimer{Reservation: work, Name: "work", Reclaim: func(_ context.Context, want int64) {
				if err := work.Shrink(want); err != nil {
					t.Error(err)
				}
			}},
		)()
		time.Sleep(time.Second)
		release(t, second.served(t), full, work)
		release(t, first.served(t))
	})
}

// hookedContext calls a function when a wait asks it for its owner.
type hookedContext struct {
	context.Context
	call func()
}

func (c hookedContext) Value(key any) any {
	c.call()
	return c.Context.Value(key)
}

// A Release between the checks of a Grow and its place in line ends the Grow.
func TestReleaseJustBeforeAGrowWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		r, other := mustTry(t, m, onGPU0, 40, nil), mustTry(t, m, onGPU0, 60, nil)
		ctx := hookedContext{t.Context(), sync.OnceFunc(func() { release(t, r) })}
		c := start(func() (*reservation.Reservation, error) { return r, r.Grow(ctx, 60) })
		c.failed(t, tier.ErrReleased)
		release(t, other)
	})
}

// A limit that changes all the time lets no more requests bypass the head.
func TestBypassUnderAChangingLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, s := one(t, 100, 0)
		held := mustTry(t, m, onGPU0, 50, nil)
		large := startReserve(t.Context(), m, onGPU0, 60)
		large.waiting(t)
		n := 0
		for ; n < 100; n++ {
			if err := s.SetLimit(100 - int64(n%2)); err != nil {
				t.Fatal(err)
			}
			r, err := m.TryReserve(onGPU0, 10, nil)
			if err != nil {
				break
			}
			release(t, r)
		}
		if n != reservation.DefaultBypass {
			t.Errorf("%d bypassed the head; want %d", n, reservation.DefaultBypass)
		}
		release(t, held)
		release(t, large.served(t))
	})
}

// hookedQuota reports room for 100 bytes. grants decides whether it has them.
type hookedQuota struct {
	grants  func(n int64) bool
	notify  func()
	charged atomic.Int64
}

func (q *hookedQuota) Charge(n int64) error {
	if q.grants(n) {
		q.charged.Add(n)
		return nil
	}
	return &tier.OutOfBudgetError{Requested: n}
}

func (q *hookedQuota) Credit(n int64) {
	q.charged.Add(-n)
	if q.notify != nil {
		q.notify()
	}
}

func (q *hookedQuota) Remaining() int64 { return 100 }
func (q *hookedQuota) Limit() int64     { return 100 }

func (q *hookedQuota) Subscribe(f func()) (cancel func()) {
	q.notify = f
	return func() {}
}

// underQuotas is a manager of gpu:0 under quotas and of host memory, of 100 bytes each,
// with a headroom of 10.
func underQuotas(t *testing.T, quotas ...tier.Quota) *reservation.Manager {
	s, err := tier.NewSpace(tier.SpaceConfig{
		ID:       gpu0,
		Capacity: 100,
		Marks:    tier.Marks{Limit: 1},
		Pool:     &heapPool{granule: 1},
		Quota:    tier.Quotas(quotas...),
	})
	if err != nil {
		t.Fatal(err)
	}
	return managerOf(t, reservation.Config{
		Spaces:   []*tier.Space{s, spaceOf(t, "host:0", 100)},
		Headroom: func(tier.ID, int64) int64 { return 10 },
	})
}

// A waiter that a quota refuses, and that finds too little in its other space, wakes the next there.
func TestRefusedWaiterWakesTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var newcomer func()
		m := underQuotas(t, &hookedQuota{grants: func(int64) bool {
			if f := newcomer; f != nil {
				newcomer = nil
				f()
			}
			return false
		}})
		inHost := reservation.Specific(host)
		large, small := mustTry(t, m, inHost, 70, nil), mustTry(t, m, inHost, 30, nil)
		either := startReserve(t.Context(), m, reservation.AnyInTiers(tier.GPU, tier.Host), 60)
		either.waiting(t)
		next := startReserve(t.Context(), m, inHost, 30)
		next.waiting(t)
		var fast *reservation.Reservation
		newcomer = func() { fast = mustTry(t, m, inHost, 40, nil) }
		release(t, large)
		time.Sleep(time.Second)
		release(t, next.served(t), fast)
		time.Sleep(time.Second)
		release(t, either.served(t), small)
	})
}

// A waiter does not retry without pause while one of two quotas refuses what it reports as free.
func TestQuotaThatReportsTooMuch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var open atomic.Bool
		var calls atomic.Int64
		m := underQuotas(
			t,
			&hookedQuota{grants: func(int64) bool { return true }},
			&hookedQuota{grants: func(int64) bool {
				return open.Load() || calls.Add(1) > 1000
			}},
		)
		c := startReserve(t.Context(), m, onGPU0, 60)
		time.Sleep(time.Second)
		if n := calls.Load(); n > 100 {
			t.Fatalf("the quota was charged %d times within a second", n)
		}
		c.waiting(t)
		open.Store(true)
		time.Sleep(time.Second)
		release(t, c.served(t))
	})
}

// ReserveUpTo takes its minimum if the quota refuses more than that, although it reports room.
func TestReserveUpToUnderAQuotaThatReportsTooMuch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := underQuotas(t, &hookedQuota{grants: func(n int64) bool { return n <= 20 }})
		c := start(func() (*reservation.Reservation, error) { return m.ReserveUpTo(t.Context(), onGPU0, 10, 50, nil) })
		r := c.served(t)
		wantReservation(t, r, 10, 10)
		release(t, r)
	})
}

// Bytes charged to a quota are credited if the space has no room any more, or if the reservation that
// they were for was released meanwhile.
func TestQuotaIsCreditedAfterALostRace(t *testing.T) {
	var during func()
	q := &hookedQuota{grants: func(int64) bool {
		if f := during; f != nil {
			during = nil
			f()
		}
		return true
	}}
	m := underQuotas(t, q)
	gpu, _ := m.Spaces().ByID(gpu0)
	during = func() {
		if err := gpu.SetLimit(50); err != nil {
			t.Error(err)
		}
	}
	if _, err := m.TryReserve(onGPU0, 60, nil); !errors.Is(err, reservation.ErrExceeded) || q.charged.Load() != 0 {
		t.Errorf("%v, %d bytes are charged", err, q.charged.Load())
	}
	r := mustTry(t, m, onGPU0, 10, &reservation.Options{Policy: reservation.Ignore()})
	during = func() { release(t, r) }
	if _, err := r.Alloc(20); !errors.Is(err, tier.ErrReleased) || q.charged.Load() != 0 {
		t.Errorf("%v, %d bytes are charged", err, q.charged.Load())
	}
	r = mustTry(t, m, onGPU0, 10, nil)
	during = func() { release(t, r) }
	if err := r.TryGrow(20); !errors.Is(err, tier.ErrReleased) || q.charged.Load() != 0 {
		t.Errorf("%v, %d bytes are charged", err, q.charged.Load())
	}
}

// Two waiters, each next in one space, sleep while the memory of dropped clean images is in the way.
func TestNoSpinWhileCleanImagesAreFreed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var pools []*heapPool
		var spaces []*tier.Space
		for _, id := range []tier.ID{gpu0, host} {
			p := &heapPool{granule: 1}
			s, err := tier.NewSpace(
				tier.SpaceConfig{ID: id, Capacity: 100, Pool: p, Marks: tier.Marks{Limit: 1}},
			)
			if err != nil {
				t.Fatal(err)
			}
			pools, spaces = append(pools, p), append(spaces, s)
		}
		m := managerOf(t, reservation.Config{Spaces: spaces})
		clean := func(i int, n int64) {
			r := mustTry(t, m, reservation.Specific(spaces[i].ID()), n, nil)
			b := mustAlloc(t, r, n)
			release(t, r)
			pools[i].hold = true
			spaces[i].KeepClean([]*tier.Buffer{b}, false, nil, func() { release(t, b) })
			spaces[i].DropAllClean() // and the device is not done with it
		}
		held := mustTry(t, m, onGPU0, 50, nil)
		clean(0, 50)
		clean(1, 100)
		var calls atomic.Int64
		for _, p := range pools {
			p.onCharge = func() {
				if calls.Add(1) == 10_000 {
					t.Error("the waiters spin")
					for _, p := range pools {
						p.reap()
					}
				}
			}
		}
		any := reservation.AnyInTiers(tier.GPU, tier.Host)
		upTo := func(min int64) *call {
			c := start(func() (*reservation.Reservation, error) { return m.ReserveUpTo(t.Context(), any, min, min+1, nil) })
			synctest.Wait()
			return c
		}
		large, small := upTo(95), upTo(45)
		time.Sleep(50 * time.Millisecond)
		for i, p := range pools {
			p.reap()
			p.hold = false
			if i == 0 {
				release(t, small.served(t))
			}
		}
		release(t, large.served(t), held)
	})
}

// A deadlock in one space ends although another space is busy.
func TestDeadlockBesideABusySpace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := twoSpaces(t)
		a, b := newTask(t, m, "a"), newTask(t, m, "b")
		ra, rb := a.hold(gpu0, 50), b.hold(gpu0, 50)
		ctx, cancel := context.WithCancel(t.Context())
		var busy sync.WaitGroup
		for range 2 {
			busy.Go(func() {
				for {
					r, err := m.Reserve(ctx, reservation.Specific(host), 100, nil)
					if err != nil {
						return
					}
					time.Sleep(10 * time.Millisecond)
					release(t, r)
				}
			})
		}
		ca, cb := a.ask(onGPU0, 50), b.ask(onGPU0, 50)
		cb.deadlockedBy(t, time.Second)
		release(t, rb)
		release(t, ca.served(t), ra)
		cancel()
		busy.Wait()
	})
}

// An owner that waits for other things again and again, and runs in between, is not stuck.
func TestShortWaitsAreNoDeadlock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		a, b := newTask(t, m, "a"), newTask(t, m, "b")
		ra, rb := a.hold(gpu0, 50), b.hold(gpu0, 50)
		ca := a.ask(onGPU0, 50)
		for range 1000 {
			done := reservation.Waits(b.o.Context(t.Context()))
			time.Sleep(60 * time.Millisecond)
			done()
			time.Sleep(time.Millisecond)
		}
		ca.waiting(t)
		done := reservation.Waits(b.o.Context(t.Context()))
		ca.deadlocked(t)
		done()
		release(t, ra, rb)
	})
}

// Freed memory that the device still works on comes back by itself.
func TestNoDeadlockWhileTheDeviceIsBusy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &heapPool{granule: 1, hold: true}
		s, err := tier.NewSpace(tier.SpaceConfig{ID: gpu0, Capacity: 100, Pool: p, Marks: tier.Marks{Limit: 1}})
		if err != nil {
			t.Fatal(err)
		}
		m := managerOf(t, reservation.Config{Spaces: []*tier.Space{s}})
		a := newTask(t, m, "a")
		held, r := a.hold(gpu0, 50), mustTry(t, m, onGPU0, 50, nil)
		release(t, mustAlloc(t, r, 50), r)
		c := a.ask(onGPU0, 50)
		c.left(t)
		p.reap()
		release(t, c.served(t), held)
	})
}

// A move ends by itself, however long it takes.
func TestNoDeadlockDuringAMove(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		a := newTask(t, m, "a")
		held, moved := a.hold(gpu0, 50), mustTry(t, m, onGPU0, 50, &reservation.Options{Moving: true})
		c := a.ask(onGPU0, 50)
		c.left(t)
		release(t, moved)
		release(t, c.served(t), held)
	})
}

// Buffers that outlive their reservations have no holder. In an engine they are batches that others
// may consume, and a wait for them is refused. Otherwise it ends as one for bytes that somebody holds
// without an owner.
func TestWaitForBytesOfNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, engine := range []bool{true, false} {
			cfg := reservation.Config{Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100)}}
			if engine {
				cfg.Evict = func(context.Context, tier.ID, int64) (e reservation.Eviction) { return e }
			}
			m := managerOf(t, cfg)
			r := mustTry(t, m, onGPU0, 80, nil)
			b := mustAlloc(t, r, 80)
			release(t, r)
			c := startReserve(t.Context(), m, onGPU0, 50)
			if engine {
				c.waiting(t)
				time.Sleep(reservation.StallTimeout + time.Second)
				_ = c.failed(t, tier.ErrNoSpace)
			} else {
				c.stalled(t)
			}
			release(t, b)
		}
	})
}

// While batches at rest could leave for a slower space, those that hold that space count.
func TestDeadlockOverTheRoomForBatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := twoSpaces(t)
		a, b := newTask(t, m, "a"), newTask(t, m, "b")
		ra, rb, rest := a.hold(gpu0, 10), b.hold(host, 100), mustTry(t, m, onGPU0, 90, nil)
		batch := mustAlloc(t, rest, 90)
		release(t, rest)
		ca := a.ask(onGPU0, 50)
		ca.left(t) // b runs
		cb := b.ask(onGPU0, 20)
		cb.deadlocked(t)
		release(t, batch)
		release(t, ca.served(t), ra, rb)
	})
}

// Memory that was in use before the space was made is no move, which would end by itself.
func TestDeadlockBesideOccupiedMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := twoSpaces(t)
		s, _ := m.Spaces().ByID(host)
		before, err := s.Occupy(100)
		if err != nil {
			t.Fatal(err)
		}
		a := newTask(t, m, "a")
		ra, rest := a.hold(gpu0, 60), mustTry(t, m, onGPU0, 40, nil)
		batch := mustAlloc(t, rest, 40)
		release(t, rest)
		a.ask(onGPU0, 30).stalled(t)
		release(t, batch, ra)
		if err := s.Release(before); err != nil {
			t.Error(err)
		}
	})
}

// That is so as well if several handles keep the same memory, which counts once.
func TestDeadlockBesideHandlesOnOneBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := twoSpaces(t)
		a, b := newTask(t, m, "a"), newTask(t, m, "b")
		one, rest, rb := keep(t, m, a.o, 60, 1), mustTry(t, m, onGPU0, 40, nil), b.hold(host, 100)
		again := &kept{buf: one.buf}
		again.enter(a.o, 1)
		batch := mustAlloc(t, rest, 40)
		release(t, rest)
		ca := a.ask(onGPU0, 30)
		ca.left(t) // b runs
		cb := b.ask(onGPU0, 100)
		if e := cb.deadlocked(t); e.Held != 100 {
			t.Errorf("the error is %+v", *e)
		}
		release(t, rb)
		if e := ca.deadlocked(t); e.Held != 60 {
			t.Errorf("the error is %+v", *e)
		}
		again.hold.End()
		one.close(t)
		release(t, batch)
	})
}

// While memory is reclaimed, owners that all wait are not deadlocked.
func TestNoDeadlockDuringReclaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		a, b := newTask(t, m, "a"), newTask(t, m, "b")
		ra, rb := a.hold(gpu0, 50), b.hold(gpu0, 50)
		defer m.OnReclaim(
			reservation.Reclaimer{Reservation: rb, Name: "work", Reclaim: func(_ context.Context, want int64) {
				time.Sleep(500 * time.Millisecond)
				if err := rb.Shrink(min(want, rb.Unused())); err != nil {
					t.Error(err)
				}
			}},
		)()
		ca, cb := a.ask(onGPU0, 40), b.ask(onGPU0, 40)
		time.Sleep(time.Second)
		cb.waiting(t)
		release(t, ca.served(t))
		release(t, cb.served(t), ra, rb)
	})
}

// describing is what a handle is on. A look for deadlocks calls it with no lock held.
type describing func()

func (f describing) Describe(*tier.Holding) { f() }

// keepDescribing keeps a byte of a space for o. Each look for deadlocks calls f.
func keepDescribing(t *testing.T, m *reservation.Manager, id tier.ID, o *reservation.Owner, f func()) *kept {
	t.Helper()
	k := &kept{buf: drawn(t, m, id, 1)}
	k.hold.Begin(k.buf.Space().Books, books.HoldView{
		Kind: books.Handle, Memory: k.buf, Bytes: 1, Owner: o, About: describing(f),
	})
	return k
}

// drawn returns n bytes of a space that belong to no reservation.
func drawn(t *testing.T, m *reservation.Manager, id tier.ID, n int64) *tier.Buffer {
	t.Helper()
	r := mustTry(t, m, reservation.Specific(id), n, nil)
	defer release(t, r)
	return mustAlloc(t, r, n)
}

// Looking for deadlocks takes little of the time, however long each look takes.
func TestLooksForDeadlocksAreRare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		a := newTask(t, m, "a")
		var looked atomic.Int64 // seconds
		held := a.hold(gpu0, 50)
		rest := keepDescribing(t, m, gpu0, newTask(t, m, "b").o, func() {
			looked.Add(1)
			time.Sleep(time.Second)
		})
		c := a.ask(onGPU0, 50)
		time.Sleep(10 * time.Minute)
		if n := looked.Load(); n < 1 || n > 40 {
			t.Errorf("of 10 minutes it looked for %d s", n)
		}
		rest.close(t)
		time.Sleep(2 * time.Second)
		release(t, c.served(t), held)
	})
}

// hookedPool calls a function when a look for deadlocks first asks it for its room.
type hookedPool struct {
	*heapPool
	looks  func()
	called atomic.Bool
}

func (p *hookedPool) Unsure() int64 {
	stack := make([]byte, 1<<16)
	if bytes.Contains(stack[:runtime.Stack(stack, false)], []byte("isStuck")) && !p.called.Swap(true) {
		p.looks()
	}
	return 0
}

// A look for deadlocks ends no wait if bytes were freed meanwhile.
func TestBytesAreFreedDuringALook(t *testing.T) {
	inHost := reservation.Specific(host)
	for _, atRest := range []bool{false, true} { // batches at rest fill host memory, or owners that wait
		synctest.Test(t, func(t *testing.T) {
			pool := &hookedPool{heapPool: &heapPool{granule: 1}}
			small, err := tier.NewSpace(tier.SpaceConfig{
				ID: gpu0, Capacity: 40, Pool: pool, Marks: tier.Marks{Limit: 1},
			})
			if err != nil {
				t.Fatal(err)
			}
			m := managerOf(t, reservation.Config{
				Spaces:       []*tier.Space{small, spaceOf(t, "host:0", 100)},
				StallTimeout: reservation.DefaultGrace,
				Evict:        func(context.Context, tier.ID, int64) (e reservation.Eviction) { return e },
			})
			a, b := newTask(t, m, "a"), newTask(t, m, "b")
			var first, second releaser
			if atRest {
				first, second = drawn(t, m, host, 50), drawn(t, m, host, 50)
			} else {
				first, second = a.hold(host, 50), b.hold(host, 50)
			}
			pool.looks = func() { release(t, first) }
			ca := a.ask(inHost, 50)
			cb := b.ask(reservation.AnyInTiers(tier.GPU, tier.Host), 100) // looked at second
			time.Sleep(reservation.DefaultGrace + 50*time.Millisecond)
			got := ca.served(t)
			cb.waiting(t)
			release(t, got, second)
			release(t, cb.served(t))
		})
	}
}

// Clean images are dropped for a request that their memory is in the way of.
func TestCleanImagesMakeRoom(t *testing.T) {
	m, s := one(t, 100, 0)
	r := mustTry(t, m, onGPU0, 100, nil)
	buffers := []*tier.Buffer{mustAlloc(t, r, 50), mustAlloc(t, r, 50)}
	release(t, r)
	for _, b := range buffers {
		if s.KeepClean([]*tier.Buffer{b}, false, nil, func() { release(t, b) }) == nil {
			t.Fatal("the buffer is no clean image")
		}
	}
	for i, strategy := range []reservation.Strategy{onGPU0, reservation.AnyInTiers(tier.GPU)} {
		release(t, mustTry(t, m, strategy, 50+50*int64(i), nil))
		if n := s.Evicted(); n != 50*int64(i+1) {
			t.Errorf("%d bytes of clean images were dropped; want %d", n, 50*(i+1))
		}
	}
}

// A nil Reservation has nothing to reclaim.
func TestReclaimerWithoutAReservation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		cancel := m.OnReclaim(reservation.Reclaimer{Reclaim: func(context.Context, int64) { t.Error("called") }})
		held := mustTry(t, m, onGPU0, 100, nil)
		c := startReserve(t.Context(), m, onGPU0, 50)
		time.Sleep(5 * time.Second)
		c.waiting(t)
		cancel()
		release(t, held)
		release(t, c.served(t))
	})
}

// A request for a GPU that is full of batches asks for memory in host, where the batches could go.
func TestReclaimWhereBatchesCouldGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := twoSpaces(t)
		work, other := mustTry(t, m, reservation.Specific(host), 60, nil), mustTry(t, m, reservation.Specific(host), 40, nil)
		full := mustTry(t, m, onGPU0, 100, nil)
		batch := mustAlloc(t, full, 100)
		var asked []string
		reclaimer := func(name string, r *reservation.Reservation, free func()) reservation.Reclaimer {
			return reservation.Reclaimer{Reservation: r, Name: name, Reclaim: func(_ context.Context, want int64) {
				asked = append(asked, fmt.Sprintf("%s: %d", name, want))
				free()
			}}
		}
		defer m.OnReclaim(reclaimer("other", other, func() {}))()
		defer m.OnReclaim(reclaimer("work", work, func() {
			release(t, batch) // as if it had been evicted; first, or the request might ask the other meanwhile
			if err := work.Shrink(50); err != nil {
				t.Error(err)
			}
		}))()
		c := startReserve(t.Context(), m, onGPU0, 30)
		time.Sleep(time.Second)
		c.waiting(t)
		if asked != nil {
			t.Errorf("%q were asked while no batch is at rest", asked)
		}
		release(t, full) // the batch is at rest from now on
		time.Sleep(time.Second / 10)
		release(t, c.served(t), work, other)
		if want := []string{"work: 30"}; !slices.Equal(asked, want) {
			t.Errorf("%q were asked, want %q", asked, want)
		}
	})
}

// A request that finds a Reclaimer busy with another one asks it when that call has returned.
func TestReclaimAfterACallForAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := twoSpaces(t)
		work, rest := mustTry(t, m, reservation.Specific(host), 100, nil), mustTry(t, m, onGPU0, 100, nil)
		batch := mustAlloc(t, rest, 100)
		release(t, rest) // the buffer is at rest
		var asked []int64
		defer m.OnReclaim(
			reservation.Reclaimer{Reservation: work, Name: "work", Reclaim: func(_ context.Context, want int64) {
				asked = append(asked, want)
				time.Sleep(100 * time.Millisecond)
				if err := work.Shrink(want); err != nil {
					t.Error(err)
				}
			}},
		)()
		forGPU := startReserve(t.Context(), m, onGPU0, 10) // asks for memory in host, where batches could go
		forGPU.waiting(t)
		inHost := startReserve(t.Context(), m, reservation.Specific(host), 50)
		time.Sleep(400 * time.Millisecond)
		r := inHost.served(t)
		if want := []int64{10, 40}; !slices.Equal(asked, want) {
			t.Errorf("%v bytes were asked for, want %v", asked, want)
		}
		release(t, batch)
		release(t, forGPU.served(t), r, work)
	})
}

// Close waits for a call of a Reclaimer.
func TestCloseWaitsForReclaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, err := reservation.NewManager(reservation.Config{Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100)}})
		if err != nil {
			t.Fatal(err)
		}
		work := mustTry(t, m, onGPU0, 100, nil)
		returned := false
		defer m.OnReclaim(reservation.Reclaimer{Reservation: work, Name: "work", Reclaim: func(context.Context, int64) {
			time.Sleep(300 * time.Millisecond)
			returned = true
		}})()
		c := startReserve(t.Context(), m, onGPU0, 40)
		c.waiting(t)
		if err := m.Close(); err != nil || !returned {
			t.Errorf("Close returned %v, after the call: %t", err, returned)
		}
		_ = c.failed(t, tier.ErrClosed)
		release(t, work)
	})
}

// The next head asks for memory itself when a Reclaimer has returned that the head before it has asked.
func TestReclaimForTheNextHead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		work := mustTry(t, m, onGPU0, 100, nil)
		var asked []int64
		cancel := m.OnReclaim(
			reservation.Reclaimer{Reservation: work, Name: "work", Reclaim: func(_ context.Context, want int64) {
				asked = append(asked, want)
				if err := work.Shrink(want); err != nil {
					t.Error(err)
				}
				time.Sleep(10 * time.Millisecond) // in which the first request is served
			}},
		)
		first := startReserve(t.Context(), m, onGPU0, 20)
		synctest.Wait()
		second := startReserve(t.Context(), m, onGPU0, 40)
		time.Sleep(time.Second / 10)
		release(t, first.served(t), second.served(t), work)
		if !slices.Equal(asked, []int64{20, 40}) {
			t.Errorf("it was asked for %d bytes", asked)
		}
		cancel()
		cancel() // does nothing
	})
}

// A head that got too little asks the next Reclaimer at once, before any time has passed.
func TestReclaimersAreAskedOneAfterAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		var works []releaser
		for range 4 {
			work := mustTry(t, m, onGPU0, 25, nil)
			works = append(works, work)
			defer m.OnReclaim(reservation.Reclaimer{Reservation: work, Reclaim: func(context.Context, int64) {
				if err := work.Shrink(20); err != nil {
					t.Error(err)
				}
			}})()
		}
		c := startReserve(t.Context(), m, onGPU0, 60)
		synctest.Wait()
		if !c.over() {
			t.Error("the request waits although there is memory to reclaim")
		}
		release(t, c.served(t))
		release(t, works...)
	})
}

// A request that was about to ask for memory when the manager was closed asks for none.
func TestCloseBeforeReclaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		proceed := make(chan struct{})
		m, err := reservation.NewManager(reservation.Config{
			Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100)},
			Evict:  func(context.Context, tier.ID, int64) (e reservation.Eviction) { <-proceed; return e },
		})
		if err != nil {
			t.Fatal(err)
		}
		work := mustTry(t, m, onGPU0, 100, nil)
		defer m.OnReclaim(reservation.Reclaimer{Reservation: work, Name: "work", Reclaim: func(context.Context, int64) {
			t.Error("the reclaimer was called after Close")
		}})()
		c := startReserve(t.Context(), m, onGPU0, 40)
		c.waiting(t)
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		close(proceed)
		_ = c.failed(t, tier.ErrClosed)
		release(t, work)
	})
}

// The error of a refused request names the memory that gave too little, and has some left.
func TestRefusalNamesPassedMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := managerOf(t, reservation.Config{
			Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100)},
			Evict: func(context.Context, tier.ID, int64) reservation.Eviction {
				return reservation.Eviction{Why: func() string { return "enlarge it" }}
			},
		})
		work, gone := mustTry(t, m, onGPU0, 40, nil), mustTry(t, m, onGPU0, 60, nil)
		batch := mustAlloc(t, work, 10) // at rest when it is all that is left
		shrink := func(r *reservation.Reservation, n int64) func(context.Context, int64) {
			return func(context.Context, int64) {
				if err := r.Shrink(n); err != nil {
					t.Error(err)
				}
			}
		}
		defer m.OnReclaim(reservation.Reclaimer{Reservation: work, Name: "sorting", Reclaim: shrink(work, 10)})()
		defer m.OnReclaim(reservation.Reclaimer{Reservation: gone, Name: "joining", Reclaim: shrink(gone, 60)})()
		c := startReserve(t.Context(), m, onGPU0, 80)
		c.waiting(t)
		time.Sleep(reservation.StallTimeout + time.Second)
		err := c.failed(t, reservation.ErrDeadlock)
		want := "too little was given back in time by sorting, which has 30 bytes"
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not contain %q", err, want)
		}
		release(t, work, gone, batch)
	})
}
