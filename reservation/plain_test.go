package reservation_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// toldPlain fails unless c is told of a deadlock between 20 and 40 s from now, as somebody
// unknown.
func (c *call) toldPlain(t *testing.T) *reservation.DeadlockError {
	t.Helper()
	time.Sleep(20 * time.Second)
	c.waiting(t)
	time.Sleep(20 * time.Second)
	var e *reservation.DeadlockError
	if err := c.failed(t, reservation.ErrDeadlock); !errors.As(err, &e) || e.Owner != "" || e.Held != 0 || e.Still < 20*time.Second {
		t.Fatalf("it was told %v", err)
	}
	return e
}

// TestPlainHoldAndWait: sixteen goroutines of no owner hold a handle each, and want as much
// again. One is told who holds the room. It closes its handle, and the others go on.
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
		e := calls[15].toldPlain(t)
		if e.Requested != 10 || e.Available != 0 || e.Waiters != 16 || len(e.Holders) != 8 || e.MoreHolders != 8 || e.Holders[0].Batch != 1 {
			t.Errorf("it was told %+v", *e)
		}
		for _, want := range []string{"nothing has changed for 30s (16 wait)", "close the handles and release the records that you hold", `10 bytes by a handle on batch 1 of plan "q"`, "and 8 more"} {
			if !strings.Contains(e.Error(), want) {
				t.Errorf("%q does not say %q", e, want)
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

// TestPlainWaitsThatAreLeft: a wait without an owner is left alone as long as somebody may
// free what it lacks: where something happens, where an owner runs, where more than handles
// keep is lacking, and where the program says so.
func TestPlainWaitsThatAreLeft(t *testing.T) {
	const long = 10 * time.Minute
	for name, tt := range map[string]struct {
		handle, rest int64 // bytes that a handle keeps, and a reservation
		after        time.Duration
		owner        bool // the reservation has an owner, who runs
		during       func(t *testing.T, m *reservation.Manager)
	}{
		"a reservation holds all":      {rest: 100},
		"the handle's would not do":    {handle: 40, rest: 60},
		"an owner runs":                {handle: 60, rest: 40, owner: true},
		"the program wants it":         {handle: 100, after: -1},
		"not for so long":              {handle: 100, after: 2 * long},
		"handles are closed elsewhere": {handle: 100, during: func(t *testing.T, m *reservation.Manager) { other(t, m, true) }},
		"room is taken elsewhere":      {handle: 100, during: func(t *testing.T, m *reservation.Manager) { other(t, m, false) }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				gpu, elsewhere := spaceOf(t, "gpu:0", 100), spaceOf(t, "host:0", 1<<20)
				m := managerOf(t, reservation.Config{Spaces: []*tier.Space{gpu, elsewhere}, StuckAfter: tt.after})
				k := newTask(t, m, "task")
				if !tt.owner {
					k.o = nil
				}
				var rest reservation.Reservation
				if tt.rest > 0 {
					rest = k.hold(gpu0, tt.rest)
				}
				var handle *kept
				if tt.handle > 0 {
					handle = keep(t, m, nil, tt.handle, 1)
				}
				ctx, cancel := context.WithTimeout(t.Context(), long)
				defer cancel()
				c := start(func() (reservation.Reservation, error) { return m.Reserve(ctx, onGPU0, 50) })
				c.waiting(t)
				for end := time.Now().Add(long - time.Second); time.Now().Before(end); time.Sleep(time.Second) {
					if tt.during != nil {
						tt.during(t, m)
					}
				}
				c.waiting(t)
				time.Sleep(2 * time.Second)
				err := c.failed(t, context.DeadlineExceeded)
				for _, want := range []string{
					map[bool]string{true: fmt.Sprintf("1 handle of plan \"q\", operator join:0 (batch 1): %d bytes", tt.handle), false: "no open handle or record keeps any"}[tt.handle > 0],
					"0 of 100 bytes are available",
				} {
					if !tt.owner && !strings.Contains(err.Error(), want) {
						t.Errorf("%q does not say %q", err, want)
					}
				}
				if tt.rest > 0 {
					release(t, rest)
				}
				if handle != nil {
					handle.close(t)
				}
			})
		})
	}
}

// other does something in host memory that is over, or lasts, a moment later.
func other(t *testing.T, m *reservation.Manager, handle bool) {
	if handle {
		r := mustTry(t, m, reservation.Specific(host), 10)
		k := &kept{buf: mustAlloc(t, r, 10)}
		release(t, r)
		k.enter(nil, 9)
		k.close(t)
		return
	}
	r := mustTry(t, m, reservation.Specific(host), 1)
	t.Cleanup(func() { release(t, r) })
}

// TestPlainWaitsThatKeepComing: others that begin to wait do not put off the news, which
// one of the first gets.
func TestPlainWaitsThatKeepComing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		handle := keep(t, m, nil, 100, 1)
		ctx, cancel := context.WithCancel(t.Context())
		var calls []*call
		for range 20 {
			calls = append(calls, startReserve(ctx, m, onGPU0, 10))
			time.Sleep(2 * time.Second)
		}
		var told []int
		for i, c := range calls {
			if c.over() {
				c.failed(t, reservation.ErrDeadlock)
				told = append(told, i)
			}
		}
		if len(told) != 1 || told[0] > 4 {
			t.Errorf("those who were told are %v, want one of the first", told)
		}
		cancel()
		for _, c := range calls {
			<-c.done
		}
		handle.close(t)
	})
}

// TestPlainWaitsBesideOwners: an owner that is in its own way is told at once, also while
// waits without an owner, which are looked at less often, are under way. Beside one that
// waits behind the same handles the owner is told.
func TestPlainWaitsBesideOwners(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := twoSpaces(t)
		handle := keep(t, m, nil, 100, 1)
		ctx, cancel := context.WithCancel(t.Context())
		plain := startReserve(ctx, m, onGPU0, 10)
		time.Sleep(time.Second)
		k := newTask(t, m, "task")
		r := k.hold(host, 60)
		k.ask(reservation.Specific(host), 50).told(t, reservation.RollBack)
		k.ask(reservation.Specific(host), 50).told(t, reservation.Split)
		release(t, r)
		asked := k.ask(onGPU0, 10)
		time.Sleep(40 * time.Second)
		var e *reservation.DeadlockError
		if err := asked.failed(t, reservation.ErrDeadlock); !errors.As(err, &e) || e.Held != 0 || len(e.Holders) != 1 || strings.Contains(err.Error(), "the 0 bytes") {
			t.Errorf("it was told %v", err)
		}
		plain.waiting(t)
		cancel()
		plain.failed(t, context.Canceled)
		handle.close(t)
	})
}
