package reservation_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
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

func (k task) hold(id tier.ID, n int64) *reservation.Reservation {
	k.t.Helper()
	return mustTry(k.t, k.m, reservation.Specific(id), n, &reservation.Options{Owner: k.o})
}

// ask begins to wait for n bytes; later calls are younger.
func (k task) ask(s reservation.Strategy, n int64) *call {
	k.t.Helper()
	c := start(func() (*reservation.Reservation, error) {
		return k.m.Reserve(context.Background(), s, n, &reservation.Options{Owner: k.o})
	})
	synctest.Wait()
	return c
}

func grow(t *testing.T, r *reservation.Reservation, n int64) *call {
	c := start(func() (*reservation.Reservation, error) { return r, r.Grow(context.Background(), n) })
	synctest.Wait()
	return c
}

// deadlocked fails unless c gets a DeadlockError within a second.
func (c *call) deadlocked(t *testing.T) *reservation.DeadlockError {
	t.Helper()
	c.waiting(t)
	return c.deadlockedBy(t, time.Second)
}

// deadlockedBy fails unless c has a DeadlockError after d.
func (c *call) deadlockedBy(t *testing.T, d time.Duration) *reservation.DeadlockError {
	t.Helper()
	time.Sleep(d)
	var e *reservation.DeadlockError
	if err := c.failed(t, reservation.ErrDeadlock); !errors.As(err, &e) {
		t.Fatalf("the error is %v", err)
	}
	return e
}

// stalled fails unless c gets a DeadlockError after StallTimeout, and within a second of it.
func (c *call) stalled(t *testing.T) *reservation.DeadlockError {
	t.Helper()
	time.Sleep(reservation.StallTimeout - 5*time.Second)
	c.waiting(t)
	return c.deadlockedBy(t, 6*time.Second)
}

// left fails if c gets an error within a minute.
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
	for name, more := range map[string]func(k task, r *reservation.Reservation) *call{
		"grow":    func(k task, r *reservation.Reservation) *call { return grow(k.t, r, 50) },
		"reserve": func(k task, r *reservation.Reservation) *call { return k.ask(onGPU0, 50) },
		"up to": func(k task, r *reservation.Reservation) *call {
			c := start(func() (*reservation.Reservation, error) {
				return k.m.ReserveUpTo(context.Background(), onGPU0, 50, 60, &reservation.Options{Owner: k.o})
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
				e := cb.deadlocked(t)
				if e.Space != gpu0 || e.Requested != 50 || e.Available != 0 || e.Owner != "b" || e.Held != 50 || e.Waiters != 2 ||
					e.Hint != "enlarge gpu:0" ||
					e.Still != 0 ||
					len(e.Holdings.Holders) != 2 {
					t.Errorf("the error is %+v", *e)
				}
				for _, want := range []string{"all 2 waiters wait for each other", `reservations, owner "a": 50 bytes`} {
					if !strings.Contains(e.Error(), want) {
						t.Errorf("%q does not contain %q", e, want)
					}
				}
				ca.left(t) // b runs now
				wantReservation(t, rb, 50, 50)
				others := start(func() (*reservation.Reservation, error) {
					return nil, e.Wait(context.Background())
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

// The same without owners, whose activity is unknown, takes StallTimeout.
func TestDeadlockWithoutOwners(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		ra, rb := mustTry(t, m, onGPU0, 50, nil), mustTry(t, m, onGPU0, 50, nil)
		ca := grow(t, ra, 50)
		cb := grow(t, rb, 50)
		e := cb.stalled(t)
		if e.Held != 50 || e.Owner != "" || e.Waiters != 2 || e.Still < reservation.StallTimeout {
			t.Errorf("the error is %+v", *e)
		}
		if want := "release the 50 bytes that you hold"; !strings.Contains(e.Error(), want) {
			t.Errorf("%q does not contain %q", e, want)
		}
		ca.waiting(t)
		release(t, rb)
		release(t, ca.served(t))
	})
}

// With StallTimeout below 0 the program decides how long it waits.
func TestDeadlockWithoutOwnersIsOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := managerOf(t, reservation.Config{Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100)}, StallTimeout: -1})
		r := mustTry(t, m, onGPU0, 100, nil)
		c := startReserve(t.Context(), m, onGPU0, 50)
		c.left(t)
		release(t, r)
		release(t, c.served(t))
	})
}

func TestDeadlockOfThreeInACircle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ids := []tier.ID{gpu0, gpu1, host}
		m := managerOf(t, reservation.Config{Spaces: []*tier.Space{
			spaceOf(t, "gpu:0", 100), spaceOf(t, "gpu:1", 100), spaceOf(t, "host:0", 100),
		}})
		var tasks []task
		var held []*reservation.Reservation
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
		if e := calls[2].deadlocked(t); e.Waiters != 3 || e.Space != gpu0 || e.Held != 80 {
			t.Errorf("the error is %+v", e)
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
		b.ask(reservation.Specific(host), 50).deadlocked(t)
		release(t, rb)
		release(t, ca.served(t), ra)
	})
}

// An owner that runs and holds something where it is waited for may make room: there is no error,
// however long that takes. Once it waits too, or has given its bytes back, there is one.
func TestSlowConsumerIsNoDeadlock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := twoSpaces(t)
		a, b, c := newTask(t, m, "a"), newTask(t, m, "b"), newTask(t, m, "c")
		ra, rb, slow := a.hold(gpu0, 35), b.hold(gpu0, 35), c.hold(gpu0, 30)
		ca, cb := a.ask(onGPU0, 40), b.ask(onGPU0, 40)
		for range 10 {
			ca.left(t)
			cb.waiting(t)
		}
		cc := c.ask(onGPU0, 10)
		cc.deadlocked(t)
		ca.left(t)
		release(t, slow)
		cb.deadlocked(t)
		release(t, rb)
		release(t, ca.served(t), ra)
	})
}

// Bytes without an owner may come back as long as something changes.
func TestNoDeadlockWhileTheBooksChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		a, b := newTask(t, m, "a"), newTask(t, m, "b")
		ra, rb, others := a.hold(gpu0, 20), b.hold(gpu0, 20), mustTry(t, m, onGPU0, 60, nil)
		ca, cb := a.ask(onGPU0, 60), b.ask(onGPU0, 60)
		for range 50 {
			time.Sleep(reservation.StallTimeout / 2)
			if err := others.Shrink(1); err != nil {
				t.Fatal(err)
			}
		}
		ca.waiting(t)
		cb.stalled(t)
		release(t, others)
		release(t, ca.served(t), ra, rb)
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
		if e := second.deadlocked(t); e.Waiters != 3 {
			t.Errorf("the error is %+v", e)
		}
		first.left(t) // one of b's goroutines runs again
		b.o.SetWorkers(-1)
		first.deadlocked(t) // it is b's only one now
		release(t, rb)
		release(t, ca.served(t))
	})
}

// A goroutine that waits for something other than room, such as a handle, does not run either.
func TestWaitsForOtherThings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		a, b := newTask(t, m, "a"), newTask(t, m, "b")
		ra, rb := a.hold(gpu0, 50), b.hold(gpu0, 50)
		cb := b.ask(onGPU0, 20)
		cb.left(t)
		done := reservation.Waits(a.o.Context(t.Context()))
		cb.deadlocked(t)
		done()
		cb = b.ask(onGPU0, 20)
		cb.left(t)
		reservation.Waits(t.Context())() // without an owner it does nothing
		release(t, ra)
		release(t, cb.served(t), rb)
	})
}

// A wait for any of several spaces is stuck when all of them are.
func TestDeadlockNeedsAllCandidates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := twoSpaces(t)
		a, b, c := newTask(t, m, "a"), newTask(t, m, "b"), newTask(t, m, "c")
		ra, rb, rc := a.hold(gpu0, 50), b.hold(gpu0, 50), c.hold(host, 90)
		either := a.ask(reservation.AnyInTiers(tier.GPU, tier.Host), 50)
		either.left(t)
		cb := b.ask(onGPU0, 50)
		cb.left(t) // a has what it wants when c releases something
		cc := c.ask(onGPU0, 50)
		if e := cc.deadlocked(t); e.Waiters != 3 || e.Held != 90 {
			t.Errorf("the error is %+v", e)
		}
		release(t, rc)
		got := either.served(t)
		if got.Space().ID() != host {
			t.Errorf("it was put in %s", got.Space().ID())
		}
		release(t, ra, got)
		release(t, cb.served(t), rb)
	})
}

// Bytes that can be evicted are worth waiting for. Evict is called without locks.
func TestNoDeadlockWhileSomethingIsMovable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var movable atomic.Bool
		var m *reservation.Manager
		var asked atomic.Int64
		m = managerOf(t, reservation.Config{
			Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100), spaceOf(t, "host:0", 100)},
			Evict: func(_ context.Context, id tier.ID, _ int64) reservation.Eviction {
				m.Demand(nil) // would hang, or panic in an invariants build
				if id != gpu0 {
					t.Errorf("evicting from %s", id)
				}
				asked.Add(1)
				return reservation.Eviction{Coming: movable.Load()}
			},
		})
		movable.Store(true)
		a, b := newTask(t, m, "a"), newTask(t, m, "b")
		ra, rb := a.hold(gpu0, 50), b.hold(gpu0, 50)
		ca, cb := a.ask(onGPU0, 50), b.ask(onGPU0, 50)
		ca.left(t)
		cb.waiting(t)
		movable.Store(false)
		cb.deadlocked(t)
		release(t, rb)
		got := ca.served(t)
		n := asked.Load()
		time.Sleep(long)
		if asked.Load() != n {
			t.Error("Evict is called although nobody waits")
		}
		release(t, got, ra)
	})
}

// The youngest request whose owner holds something that others wait for gets the error: one that
// holds nothing helps no other.
func TestVictim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := twoSpaces(t)
		a, b, c, d := newTask(t, m, "a"), newTask(t, m, "b"), newTask(t, m, "c"), newTask(t, m, "d")
		ra, rb, rd := a.hold(gpu0, 50), b.hold(gpu0, 50), d.hold(host, 10)
		ca, cb := a.ask(onGPU0, 20), b.ask(onGPU0, 20)
		cc, cd := c.ask(onGPU0, 20), d.ask(onGPU0, 20)
		cb.deadlocked(t)
		release(t, rb)
		for _, c := range []*call{ca, cc} {
			release(t, c.served(t))
		}
		release(t, cd.served(t), ra, rd)

		others := mustTry(t, m, onGPU0, 100, nil)
		old, young := newTask(t, m, "e").ask(onGPU0, 20), newTask(t, m, "f").ask(onGPU0, 20)
		if e := young.stalled(t); e.Held != 0 || !strings.Contains(e.Error(), `"f", which holds nothing`) {
			t.Errorf("the error is %v", e)
		}
		old.waiting(t)
		release(t, others)
		release(t, old.served(t))
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
		cb.deadlocked(t)
		release(t, rb)
		release(t, ca.served(t))
	})
}

func TestSetOwner(t *testing.T) {
	m, _ := one(t, 100, 0)
	first := reservation.NewOwner("first")
	named := mustTry(t, m, onGPU0, 10,
		&reservation.Options{Owner: first, Name: "name"})
	if named.Owner() != first {
		t.Errorf("a name has replaced the owner: %v", named.Owner())
	}
	release(t, named)
	r := mustTry(t, m, onGPU0, 10, nil)
	o := reservation.NewOwner("a")
	if err := errors.Join(r.SetOwner(nil), r.SetOwner(o)); err != nil || r.Owner() != o || o.Name() != "a" {
		t.Errorf("%v, the owner is %v", err, r.Owner())
	}
	if err := r.SetOwner(reservation.NewOwner("b")); err == nil || r.Owner() != o {
		t.Errorf("a second owner: %v", err)
	}
	release(t, r)
	if err := r.SetOwner(o); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("a released reservation: %v", err)
	}
}
