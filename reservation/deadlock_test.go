package reservation_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// long is when a wait without a DeadlockError will never get one.
const long = time.Minute

// task is an owner and what it holds.
type task struct {
	t *testing.T
	m *reservation.Manager
	o *reservation.Owner
}

func newTask(t *testing.T, m *reservation.Manager, name string) task {
	return task{t, m, reservation.NewOwner(name)}
}

func (k task) hold(id tier.ID, n int64) reservation.Reservation {
	k.t.Helper()
	return mustTry(k.t, k.m, reservation.Specific(id), n, reservation.WithOwner(k.o))
}

// ask begins to wait for n bytes; later calls are younger.
func (k task) ask(s reservation.Strategy, n int64) *call {
	k.t.Helper()
	c := start(func() (reservation.Reservation, error) {
		return k.m.Reserve(context.Background(), s, n, reservation.WithOwner(k.o))
	})
	synctest.Wait()
	return c
}

func grow(t *testing.T, r reservation.Reservation, n int64) *call {
	c := start(func() (reservation.Reservation, error) { return r, r.Grow(context.Background(), n) })
	synctest.Wait()
	return c
}

// The advice of a DeadlockError.
const rollBack, split = false, true

// told fails unless c gets a DeadlockError within a second.
func (c *call) told(t *testing.T, advice bool) *reservation.DeadlockError {
	t.Helper()
	c.waiting(t)
	time.Sleep(time.Second)
	var e *reservation.DeadlockError
	if err := c.failed(t, reservation.ErrDeadlock); !errors.As(err, &e) || e.Split != advice {
		t.Fatalf("it was told %v; want the advice to split: %v", err, advice)
	}
	return e
}

// left fails if c is not left alone.
func (c *call) left(t *testing.T) {
	t.Helper()
	time.Sleep(long)
	c.waiting(t)
}

func twoSpaces(t *testing.T) *reservation.Manager {
	return managerOf(t, reservation.Config{Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100), spaceOf(t, "host:0", 100)}})
}

// Two owners hold half each and want the rest. The youngest gets the error and rolls back, the
// other goes on, and then the first succeeds.
func TestDeadlockOfTwo(t *testing.T) {
	for name, more := range map[string]func(k task, r reservation.Reservation) *call{
		"grow":    func(k task, r reservation.Reservation) *call { return grow(k.t, r, 50) },
		"reserve": func(k task, r reservation.Reservation) *call { return k.ask(onGPU0, 50) },
		"up to": func(k task, r reservation.Reservation) *call {
			c := start(func() (reservation.Reservation, error) {
				return k.m.ReserveUpTo(context.Background(), onGPU0, 50, 60, reservation.WithOwner(k.o))
			})
			synctest.Wait()
			return c
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m, _ := one(t, 100, 0)
				a, b := newTask(t, m, "a"), newTask(t, m, "b")
				ra, rb := a.hold(gpu0, 50), b.hold(gpu0, 50)
				ca := more(a, ra)
				ca.left(t) // b runs and may release
				cb := more(b, rb)
				e := cb.told(t, rollBack)
				if e.Space != gpu0 || e.Requested != 50 || e.Available != 0 || e.Owner != "b" || e.Held != 50 || e.Waiters != 2 || e.Hint != "enlarge gpu:0" {
					t.Errorf("it was told %+v", *e)
				}
				ca.left(t) // b runs now
				wantReservation(t, rb, 50, 50)
				others := start(func() (reservation.Reservation, error) {
					return reservation.Reservation{}, e.Wait(context.Background())
				})
				others.left(t)
				ctx, cancel := context.WithCancel(context.Background())
				cancel()
				if err := e.Wait(ctx); !errors.Is(err, context.Canceled) {
					t.Errorf("waiting without time: %v", err)
				}
				release(t, rb)
				got := ca.served(t)
				others.served(t)
				again := b.ask(onGPU0, 100)
				again.left(t)
				if got != ra {
					release(t, got)
				}
				release(t, ra)
				release(t, again.served(t))
			})
		})
	}
}

func TestDeadlockOfThreeInACircle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ids := []tier.ID{gpu0, gpu1, host}
		m := managerOf(t, reservation.Config{Spaces: []*tier.Space{
			spaceOf(t, "gpu:0", 100), spaceOf(t, "gpu:1", 100), spaceOf(t, "host:0", 100),
		}})
		var tasks []task
		var held []reservation.Reservation
		var calls []*call
		for i, id := range ids {
			tasks = append(tasks, newTask(t, m, fmt.Sprint(i)))
			held = append(held, tasks[i].hold(id, 80))
		}
		for i, k := range tasks {
			if i > 0 {
				calls[0].left(t)
			}
			calls = append(calls, k.ask(reservation.Specific(ids[(i+1)%3]), 30))
		}
		if e := calls[2].told(t, rollBack); e.Waiters != 3 || e.Space != gpu0 {
			t.Errorf("it was told %+v", e)
		}
		release(t, held[2])
		release(t, calls[1].served(t), held[1])
		release(t, calls[0].served(t), held[0])
	})
}

// Each waits in one space for what the other holds there.
func TestDeadlockAcrossSpaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := twoSpaces(t)
		a, b := newTask(t, m, "a"), newTask(t, m, "b")
		ra, rb := a.hold(host, 60), b.hold(gpu0, 60)
		ca := a.ask(onGPU0, 50)
		ca.left(t)
		b.ask(reservation.Specific(host), 50).told(t, rollBack)
		release(t, rb)
		release(t, ca.served(t), ra)
	})
}

// A running owner, or anything without an owner, may make room for the waiters: there is no error.
// When that has ended, there is one.
func TestNoAlarm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := twoSpaces(t)
		a, b, c := newTask(t, m, "a"), newTask(t, m, "b"), newTask(t, m, "c")
		ra, rb, rc := a.hold(gpu0, 35), b.hold(gpu0, 35), c.hold(gpu0, 30)
		ca, cb := a.ask(onGPU0, 30), b.ask(onGPU0, 30)
		ca.left(t) // c's are enough
		// Bytes without an owner are waited for as long as an owner runs that could free them.
		release(t, rc)
		got := ca.served(t)
		buf := mustAlloc(t, got, 30)
		release(t, got)
		rc = c.hold(host, 1)
		ca = a.ask(onGPU0, 30)
		ca.left(t)
		cb.waiting(t)
		release(t, rc)
		ca.told(t, rollBack)
		release(t, ra)
		release(t, cb.served(t), rb, buf)
	})
}

// Bytes without an owner may come back while they change.
func TestNoAlarmWhileTheBooksChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		a, b := newTask(t, m, "a"), newTask(t, m, "b")
		ra, rb, others := a.hold(gpu0, 20), b.hold(gpu0, 20), mustTry(t, m, onGPU0, 60)
		ca, cb := a.ask(onGPU0, 60), b.ask(onGPU0, 60)
		for range 50 {
			time.Sleep(reservation.DefaultGrace / 2)
			if err := others.Shrink(1); err != nil {
				t.Fatal(err)
			}
		}
		ca.waiting(t)
		cb.told(t, rollBack)
		release(t, others)
		release(t, ca.served(t), ra, rb)
	})
}

// An owner that gives reservations back is at work, also where they hold no bytes.
func TestNoAlarmWhileAnOwnerReleases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		a, b := newTask(t, m, "a"), newTask(t, m, "b")
		ra, rb, others := a.hold(gpu0, 20), b.hold(gpu0, 20), mustTry(t, m, onGPU0, 60)
		var empty []reservation.Reservation
		for range 50 {
			empty = append(empty, a.hold(gpu0, 0))
		}
		ca, cb := a.ask(onGPU0, 60), b.ask(onGPU0, 60)
		for _, r := range empty {
			time.Sleep(reservation.DefaultGrace / 2)
			release(t, r)
		}
		ca.waiting(t)
		cb.told(t, rollBack)
		release(t, others)
		release(t, ca.served(t), ra, rb)
	})
}

// A certain deadlock is reported although others run, and although all bytes without an owner
// change all the time.
func TestDeadlockOfSomeWhileOthersRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := managerOf(t, reservation.Config{
			Spaces:  []*tier.Space{spaceOf(t, "gpu:0", 100), spaceOf(t, "host:0", 100)},
			Movable: func(tier.ID) bool { return true },
		})
		a, b, c, d := newTask(t, m, "a"), newTask(t, m, "b"), newTask(t, m, "c"), newTask(t, m, "d")
		ra, rb, rc, rd := a.hold(gpu0, 40), b.hold(gpu0, 40), c.hold(host, 90), d.hold(gpu0, 20)
		cd := d.ask(reservation.Specific(host), 20) // c makes room for it some day
		ca, cb := a.ask(onGPU0, 30), b.ask(onGPU0, 30)
		time.Sleep(time.Second) // d has 20 and a lacks 30
		cb.failed(t, reservation.ErrDeadlock)
		ca.waiting(t)
		cd.left(t)
		release(t, rb)
		release(t, ca.served(t), ra, rc)
		release(t, cd.served(t), rd)
	})
}

// An owner waits when all its goroutines do.
func TestWorkersOfAnOwner(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		a, b := newTask(t, m, "a"), newTask(t, m, "b")
		b.o.SetWorkers(2)
		ra, rb := a.hold(gpu0, 50), b.hold(gpu0, 50)
		ca, first := grow(t, ra, 40), grow(t, rb, 30)
		ca.left(t)
		first.waiting(t)
		second := b.ask(onGPU0, 40)
		if e := second.told(t, rollBack); e.Waiters != 3 {
			t.Errorf("it was told %+v", e)
		}
		first.left(t) // one of b's goroutines runs again
		b.o.SetWorkers(-1)
		first.waiting(t)
		time.Sleep(time.Second) // it is b's only one now; b has had an error already, a has not
		ca.failed(t, reservation.ErrDeadlock)
		release(t, ra)
		release(t, first.served(t))
	})
}

// A wait for any of several spaces is stuck when all of them are.
func TestDeadlockNeedsAllCandidates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := twoSpaces(t)
		a, b, c := newTask(t, m, "a"), newTask(t, m, "b"), newTask(t, m, "c")
		ra, rb, rc := a.hold(gpu0, 50), b.hold(gpu0, 50), c.hold(host, 90)
		either := a.ask(reservation.AnyInTiers(tier.GPU, tier.Host), 50)
		cb := b.ask(onGPU0, 50)
		either.left(t)
		cb.waiting(t)
		cc := c.ask(onGPU0, 50) // holds nothing of the GPU, but of what a waits for
		cc.told(t, rollBack)
		release(t, rc)
		got := either.served(t)
		if got.Space().ID() != host {
			t.Errorf("it was put in %s", got.Space().ID())
		}
		release(t, ra, got)
		release(t, cb.served(t), rb)
	})
}

// Bytes that can be moved are worth waiting for. The monitor's answer is heeded, and it is called
// without locks.
func TestNoAlarmWhileSomethingIsMovable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var movable atomic.Bool
		var m *reservation.Manager
		asked := make(map[tier.ID]int)
		m = managerOf(t, reservation.Config{
			Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100), spaceOf(t, "host:0", 100)},
			Movable: func(id tier.ID) bool {
				m.Demand(nil) // would hang, or panic in an invariants build
				asked[id]++
				return movable.Load()
			},
		})
		movable.Store(true)
		a, b := newTask(t, m, "a"), newTask(t, m, "b")
		ra, rb, batches := a.hold(gpu0, 25), b.hold(gpu0, 25), mustTry(t, m, onGPU0, 50)
		ca, cb := a.ask(onGPU0, 50), b.ask(onGPU0, 50)
		ca.left(t)
		cb.waiting(t)
		movable.Store(false)
		time.Sleep(reservation.DefaultGrace)
		cb.waiting(t) // it may have begun just now
		cb.told(t, rollBack)
		if asked[gpu0] == 0 || asked[host] > 0 {
			t.Errorf("it was asked %v", asked)
		}
		release(t, batches)
		got := ca.served(t)
		n := asked[gpu0]
		time.Sleep(long)
		if asked[gpu0] != n {
			t.Error("it looks although nobody waits")
		}
		release(t, got, ra, rb)
	})
}

// The door is shut for an owner that would fit; a waiter at it cannot be served.
func TestDeadlockBehindAShutDoor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := managerOf(t, reservation.Config{Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100)}, Bypass: -1})
		a, b := newTask(t, m, "a"), newTask(t, m, "b")
		ra, rb := a.hold(gpu0, 40), b.hold(gpu0, 40)
		head := startReserve(t.Context(), m, onGPU0, 90)
		head.waiting(t)
		ca, cb := a.ask(onGPU0, 10), b.ask(onGPU0, 10)
		e := cb.told(t, rollBack)
		ca.failed(t, reservation.ErrDeadlock) // without b's 40 the head would lack 30 still
		if err := errors.Join(e.Wait(context.Background()), (&reservation.DeadlockError{}).Wait(context.Background())); err != nil {
			t.Error(err) // a got the error, so that b need not wait for it
		}
		release(t, ra, rb)
		release(t, head.served(t))
	})
}

// The youngest owner that holds something that others wait for gets the error: an owner that holds
// nothing helps no other. If no owner holds anything, those who have the room have StuckAfter to
// give some back. Then the youngest gets the error.
func TestVictim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := twoSpaces(t)
		a, b, c, d := newTask(t, m, "a"), newTask(t, m, "b"), newTask(t, m, "c"), newTask(t, m, "d")
		ra, rb, rd := a.hold(gpu0, 50), b.hold(gpu0, 50), d.hold(host, 10)
		ca, cb := a.ask(onGPU0, 20), b.ask(onGPU0, 20)
		cc, cd := c.ask(onGPU0, 20), d.ask(onGPU0, 20)
		time.Sleep(time.Second)
		cb.failed(t, reservation.ErrDeadlock)
		release(t, rb)
		for _, c := range []*call{ca, cc} {
			release(t, c.served(t))
		}
		release(t, cd.served(t), ra, rd)

		others := mustTry(t, m, onGPU0, 100)
		old, young := newTask(t, m, "e").ask(onGPU0, 20), newTask(t, m, "f").ask(onGPU0, 20)
		time.Sleep(2 * reservation.DefaultGrace)
		young.waiting(t)
		time.Sleep(reservation.StuckAfter)
		young.failed(t, reservation.ErrDeadlock)
		old.waiting(t)
		release(t, others)
		release(t, old.served(t))
	})
}

// An owner that had the error before does not get it again while there is another. When all have
// had it, the youngest should split its work.
func TestSplitWhenAllHaveRolledBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		a, b := newTask(t, m, "a"), newTask(t, m, "b")
		ra, rb := a.hold(gpu0, 50), b.hold(gpu0, 50)
		ca, cb := grow(t, ra, 50), grow(t, rb, 50)
		cb.told(t, rollBack)
		cb = grow(t, rb, 50) // it does not
		ca.told(t, rollBack)
		ca = grow(t, ra, 50)
		ca.told(t, split)
		ca = grow(t, ra, 50)
		ca.told(t, split)
		release(t, ra)
		release(t, cb.served(t))
		// b has got past the point of its error: that is forgotten.
		rb = b.hold(gpu0, 50)
		ra = a.hold(gpu0, 50)
		ca, cb = grow(t, ra, 50), grow(t, rb, 50)
		cb.told(t, rollBack)
		release(t, rb)
		release(t, ca.served(t))
	})
}

// An owner's error is forgotten when it has rolled back, and done something from beginning to end.
func TestRollBackIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		a, b := newTask(t, m, "a"), newTask(t, m, "b")
		round := func(victim, other task) {
			t.Helper()
			ro, rv := other.hold(gpu0, 50), victim.hold(gpu0, 50)
			co, cv := grow(t, ro, 50), grow(t, rv, 50)
			cv.told(t, rollBack)
			release(t, rv)
			release(t, co.served(t))
		}
		round(b, a)
		release(t, b.hold(gpu0, 10)) // less than it wanted, but all of it
		round(b, a)
		// Rolling back alone is not enough: now a gets the error although it is the older.
		ra, rb := a.hold(gpu0, 50), b.hold(gpu0, 50)
		ca, cb := grow(t, ra, 50), grow(t, rb, 50)
		ca.told(t, rollBack)
		release(t, ra)
		release(t, cb.served(t))
	})
}

// A wait is an owner's by its context too.
func TestOwnerOfAContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		a, b := newTask(t, m, "a"), newTask(t, m, "b")
		ra, rb := a.hold(gpu0, 50), b.hold(gpu0, 50)
		ca := grow(t, ra, 50)
		cb := startReserve(b.o.Context(t.Context()), m, onGPU0, 50)
		cb.told(t, rollBack)
		release(t, rb)
		release(t, ca.served(t))
	})
}

func TestOwnerBelongsToOneManager(t *testing.T) {
	m, _ := one(t, 100, 0)
	other, _ := one(t, 100, 0)
	o := reservation.NewOwner("a")
	if o.Name() != "a" || o.Goroutines() != 1 {
		t.Errorf("the owner is %q with %d workers", o.Name(), o.Goroutines())
	}
	r := mustTry(t, m, onGPU0, 10, reservation.WithOwner(o))
	if _, err := other.TryReserve(onGPU0, 10, reservation.WithOwner(o)); err == nil {
		t.Error("another manager took it")
	}
	held := mustTry(t, other, onGPU0, 100)
	if _, err := other.Reserve(o.Context(t.Context()), onGPU0, 10); err == nil || errors.Is(err, reservation.ErrDeadlock) {
		t.Errorf("a wait in another manager: %v", err)
	}
	release(t, r, held)
	if _, err := reservation.NewManager(reservation.Config{Spaces: m.Spaces().All(), Grace: -1}); err == nil {
		t.Error("a negative grace is accepted")
	}
}

// Close waits for a look that is under way, and then there are no more.
func TestCloseEndsTheLooks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked, answer := make(chan struct{}), make(chan struct{})
		m, err := reservation.NewManager(reservation.Config{
			Spaces:  []*tier.Space{spaceOf(t, "gpu:0", 100)},
			Movable: func(tier.ID) bool { asked <- struct{}{}; <-answer; return false },
		})
		if err != nil {
			t.Fatal(err)
		}
		a := newTask(t, m, "a")
		ra, others := a.hold(gpu0, 40), mustTry(t, m, onGPU0, 50)
		c := grow(t, ra, 20)
		<-asked
		var closed sync.WaitGroup
		over := false
		closed.Go(func() {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
			over = true
		})
		c.failed(t, tier.ErrClosed)
		if over {
			t.Error("Close did not wait for the look")
		}
		close(answer)
		closed.Wait()
		time.Sleep(long) // a look would block in asked, and the bubble would report that
		release(t, ra, others)
	})
}
