package reservation_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/holds"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// kept is memory that a handle keeps.
type kept struct {
	buf  *tier.Buffer
	hold holds.Hold
}

// batchOf is what a handle is on.
type batchOf uint64

func (b batchOf) Describe(h *tier.Holding) {
	h.Batch, h.Plan, h.Operator = uint64(b), "q", "join"
}

// keep draws n bytes that belong to no reservation afterwards, and holds them for o.
func keep(t *testing.T, m *reservation.Manager, o *reservation.Owner, n int64, batch uint64) *kept {
	t.Helper()
	return keepIn(t, m, onGPU0, o, n, batch)
}

func keepIn(t *testing.T, m *reservation.Manager, in reservation.Strategy, o *reservation.Owner, n int64, batch uint64) *kept {
	t.Helper()
	r := mustTry(t, m, in, n)
	k := &kept{buf: mustAlloc(t, r, n)}
	release(t, r)
	k.enter(o, batch)
	return k
}

func (k *kept) enter(o *reservation.Owner, batch uint64) {
	v := holds.View{Kind: holds.Handle, Memory: k.buf, Bytes: k.buf.Charge(), About: batchOf(batch)}
	if o != nil {
		v.Owner = o
	}
	k.hold.Begin(k.buf.Space().Inside().Holds(), v)
}

func (k *kept) close(t *testing.T) {
	t.Helper()
	k.hold.End()
	release(t, k.buf)
}

// TestDeadlockOfHandles: sixteen tasks hold a handle each, and want as much again. One gets the
// error, with what it holds and the holders of the rest, and lets the others go on.
func TestDeadlockOfHandles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 160, 0)
		var tasks []task
		var held []*kept
		var calls []*call
		for i := range 16 {
			k := newTask(t, m, fmt.Sprint("task ", i))
			tasks, held = append(tasks, k), append(held, keep(t, m, k.o, 10, uint64(i+1)))
		}
		for i, k := range tasks {
			calls = append(calls, startReserve(k.o.Context(t.Context()), m, onGPU0, 10))
			synctest.Wait()
			if i == len(tasks)-2 {
				calls[0].left(t) // the last one runs and may close its handle
			}
		}
		e := calls[15].told(t, rollBack)
		if e.Held != 10 || e.Waiters != 16 || len(e.Holders) != 8 || e.MoreHolders != 8 || e.Holders[0].Batch != 1 || e.Holders[0].Owner != "task 0" {
			t.Errorf("it was told %+v", *e)
		}
		for _, want := range []string{`"task 15" should release the 10 bytes that it holds`, `10 bytes by a handle on batch 1 of plan "q"`, "and 8 more"} {
			if !strings.Contains(e.Error(), want) {
				t.Errorf("%q does not say %q", e, want)
			}
		}
		calls[0].left(t) // task 15 runs
		held[15].close(t)
		for _, c := range calls[:15] {
			release(t, c.served(t))
		}
		for _, k := range held[:15] {
			k.close(t)
		}
	})
}

// TestReaderInItsOwnWay: a task of one goroutine waits for room which its own open records keep. It
// gets the error at once, although others hold some and may release it: that would not be enough.
// With two goroutines it goes on waiting, because the other may release them.
func TestReaderInItsOwnWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, space := one(t, 100, 0)
		k := newTask(t, m, "reader")
		mine, others := keep(t, m, k.o, 60, 1), keep(t, m, nil, 40, 2)
		again := &kept{buf: mine.buf} // a record on the same memory: it counts once
		again.enter(k.o, 1)
		c := startReserve(k.o.Context(t.Context()), m, onGPU0, 50)
		e := c.told(t, rollBack)
		if e.Held != 60 || e.Requested != 50 || e.Waiters != 1 || len(e.Holders) != 2 {
			t.Errorf("it was told %+v", *e)
		}
		k.o.SetWorkers(2)
		c = startReserve(k.o.Context(t.Context()), m, onGPU0, 50)
		c.left(t)
		k.o.SetWorkers(1)
		c.told(t, split) // it had the error before, and did not
		again.hold.End()
		// The others' are enough for 30.
		c = startReserve(k.o.Context(t.Context()), m, onGPU0, 30)
		c.waiting(t)
		time.Sleep(10 * time.Second)
		c.waiting(t)
		others.close(t)
		release(t, c.served(t))
		mine.close(t)
		if len(space.Inside().Holds().Append(nil)) != 0 {
			t.Error("holds are left in the account")
		}
	})
}

// TestSharedMemoryCountsOnce: what two tasks hold together is out of reach once. What is
// left is enough for a third, which runs.
func TestSharedMemoryCountsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		a, b, c := newTask(t, m, "a"), newTask(t, m, "b"), newTask(t, m, "c")
		shared := keep(t, m, a.o, 40, 1)
		same := &kept{buf: shared.buf}
		same.enter(b.o, 1)
		rc := c.hold(gpu0, 60)
		ca, cb := a.ask(onGPU0, 50), b.ask(onGPU0, 50)
		ca.left(t) // c's are enough
		cb.waiting(t)
		// With c stuck too no owner can go on.
		e := grow(t, rc, 10).told(t, rollBack)
		if e.Waiters != 3 || e.Held != 60 {
			t.Errorf("it was told %+v", *e)
		}
		release(t, rc)
		release(t, ca.served(t))
		release(t, cb.served(t))
		same.hold.End()
		shared.close(t)
	})
}

// TestStrangersAreGivenTime: handles of unknown owners may be closed at any moment. So a task which
// waits for them gets the error only after a long time without changes.
func TestStrangersAreGivenTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		k := newTask(t, m, "a")
		r, others := k.hold(gpu0, 20), keep(t, m, nil, 60, 1)
		c := grow(t, r, 50)
		time.Sleep(20 * time.Second)
		c.waiting(t)
		time.Sleep(20 * time.Second)
		c.failed(t, reservation.ErrDeadlock)
		others.close(t)
		release(t, r)
	})
}

// waitingOwners makes n owners that hold one byte each and wait for two, and returns what ends
// them.
func waitingOwners(t *testing.T, m *reservation.Manager, n int) (end func()) {
	ctx, cancel := context.WithCancel(t.Context())
	busy := newTask(t, m, "busy") // it runs, and holds enough for all: there is no error
	rest := busy.hold(gpu0, int64(n))
	var held []reservation.Reservation
	var calls []*call
	var tasks []task
	for i := range n {
		k := newTask(t, m, fmt.Sprint(i))
		tasks, held = append(tasks, k), append(held, k.hold(gpu0, 1))
	}
	for _, k := range tasks {
		calls = append(calls, start(func() (reservation.Reservation, error) {
			return m.Reserve(ctx, onGPU0, 2, reservation.WithOwner(k.o))
		}))
	}
	synctest.Wait()
	return func() {
		cancel()
		for _, c := range calls {
			<-c.done
			if !errors.Is(c.err, context.Canceled) {
				t.Errorf("a wait ended with %v", c.err)
			}
		}
		for _, r := range held {
			release(t, r)
		}
		release(t, rest)
	}
}

// TestLooksAreNearlyLinear: a look at four times as many owners takes about four times as
// many steps, and while nothing changes the books are not read again.
func TestLooksAreNearlyLinear(t *testing.T) {
	steps := make(map[int]int)
	for _, n := range []int{100, 400} {
		synctest.Test(t, func(t *testing.T) {
			m, _ := one(t, int64(2*n), 0)
			end := waitingOwners(t, m, n)
			time.Sleep(time.Second)
			synctest.Wait()
			reads, sum := m.Looks()
			if reads == 0 || sum < n {
				t.Fatalf("%d looks took %d steps: the test shows nothing", reads, sum)
			}
			steps[n] = sum / reads
			time.Sleep(10 * time.Second)
			synctest.Wait()
			if again, _ := m.Looks(); again != reads {
				t.Errorf("the books were read %d times while nothing changed", again-reads)
			}
			extra := newTask(t, m, "one more").ask(onGPU0, 2)
			time.Sleep(time.Second)
			synctest.Wait()
			if again, _ := m.Looks(); again == reads {
				t.Error("the books were not read again when somebody began to wait")
			}
			end()
			release(t, extra.served(t))
		})
	}
	if most := 10 * 400; steps[400] > 5*steps[100] || steps[400] > most {
		t.Errorf("a look takes %d steps for 100 owners and %d for 400, want at most 5 times as many and %d", steps[100], steps[400], most)
	}
}
