package reservation_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// kept is memory that a handle keeps.
type kept struct {
	buf  *tier.Buffer
	hold books.Hold
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

func keepIn(
	t *testing.T,
	m *reservation.Manager,
	in reservation.Strategy,
	o *reservation.Owner,
	n int64,
	batch uint64,
) *kept {
	t.Helper()
	r := mustTry(t, m, in, n, nil)
	k := &kept{buf: mustAlloc(t, r, n)}
	release(t, r)
	k.enter(o, batch)
	return k
}

func (k *kept) enter(o *reservation.Owner, batch uint64) {
	v := books.HoldView{Kind: books.Handle, Memory: k.buf, Bytes: k.buf.Charge(), About: batchOf(batch)}
	if o != nil {
		v.Owner = o
	}
	k.hold.Begin(k.buf.Space().Books, v)
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
		e := calls[15].deadlocked(t)
		if e.Held != 10 || e.Waiters != 16 || len(e.Holdings.Holders) != 16 ||
			e.Holdings.Holders[0].Owner != "task 0" || e.Holdings.Holders[0].Batch != 1 {
			t.Errorf("the error is %+v", *e)
		}
		for _, want := range []string{`"task 15" should release the 10 bytes that it holds`, `1 handle of plan "q", operator join:0, owner "task 0" (batch 1): 10 bytes`, ", 8 more"} {
			if !strings.Contains(e.Error(), want) {
				t.Errorf("%q does not contain %q", e, want)
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

// TestHandlesWithoutAnOwner: handles without an owner may be closed at any moment. So a task which
// waits for them gets the error only after a long time without changes.
func TestHandlesWithoutAnOwner(t *testing.T) {
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

// TestPlainHoldAndWait: sixteen goroutines without an owner hold a handle each, and want as much
// again. One gets the error, with the holders of the room. It closes its handle, and the others go
// on.
func TestPlainHoldAndWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 160, 0)
		var held []*kept
		var calls []*call
		for i := range 16 {
			held = append(held, keep(t, m, nil, 10, uint64(i+1)))
		}
		for range held {
			calls = append(calls, startReserve(t.Context(), m, onGPU0, 10))
			synctest.Wait()
		}
		e := calls[15].stalled(t)
		if e.Requested != 10 || e.Available != 0 || e.Waiters != 16 || len(e.Holdings.Holders) != 1 ||
			e.Holdings.Holders[0].Count != 16 {
			t.Errorf("the error is %+v", *e)
		}
		for _, want := range []string{"nothing has changed for 30s (16 wait)", "close the handles and release the reservations and records that you hold", `16 handles of plan "q", operator join:0 (batch `, "160 bytes"} {
			if !strings.Contains(e.Error(), want) {
				t.Errorf("%q does not contain %q", e, want)
			}
		}
		calls[0].waiting(t)
		before := make(chan error, 1)
		go func() { before <- e.Wait(t.Context()) }()
		synctest.Wait()
		if len(before) > 0 {
			t.Error("there was no wait for the others")
		}
		held[15].close(t)
		for _, c := range calls[:15] {
			release(t, c.served(t))
		}
		if err := <-before; err != nil {
			t.Error(err)
		}
		for _, k := range held[:15] {
			k.close(t)
		}
	})
}

// A handle that is closed and opened again shows that its holder is at work.
func TestBusyHandles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		handle := keep(t, m, nil, 80, 1)
		c := startReserve(t.Context(), m, onGPU0, 50)
		for range 120 {
			time.Sleep(time.Second)
			again := &kept{buf: handle.buf}
			again.enter(nil, 1)
			again.hold.End()
		}
		c.stalled(t)
		handle.close(t)
	})
}
