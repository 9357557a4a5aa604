package reservation_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// toldPlain fails unless c, without an owner, gets a DeadlockError between 20 and 40 s from now.
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

// TestPlainWaitsThatAreLeft: a wait without an owner goes on as long as what it lacks may be freed,
// as long as something happens there, and where the program says so.
func TestPlainWaitsThatAreLeft(t *testing.T) {
	const long = 10 * time.Minute
	for name, tt := range map[string]struct {
		handle, rest int64 // bytes that a handle keeps, and a reservation
		own          int64 // of rest, what is the engine's own
		after        time.Duration
		busy         bool // other handles on the batch are opened and closed
	}{
		"a reservation holds all":   {rest: 100},
		"the handle's would not do": {handle: 40, rest: 60},
		"the engine has much":       {rest: 100, own: 45},
		"the program wants it":      {handle: 100, after: -1},
		"not for so long":           {handle: 100, after: 2 * long},
		"there are other handles":   {handle: 80, busy: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				gpu, elsewhere := spaceOf(t, "gpu:0", 100), spaceOf(t, "host:0", 1<<20)
				m := managerOf(t, reservation.Config{Spaces: []*tier.Space{gpu, elsewhere}, StuckAfter: tt.after})
				var rest reservation.Reservation
				if tt.rest > 0 {
					rest = mustTry(t, m, onGPU0, tt.rest)
					gpu.Inside().Hold(tt.own)
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
					if tt.busy {
						again := &kept{buf: handle.buf}
						again.enter(nil, 1)
						again.hold.End()
					}
				}
				c.waiting(t)
				time.Sleep(2 * time.Second)
				err := c.failed(t, context.DeadlineExceeded)
				for _, want := range []string{
					map[bool]string{true: fmt.Sprintf("1 handle of plan \"q\", operator join:0 (batch 1): %d bytes", tt.handle), false: fmt.Sprintf("reservations without an owner: %d bytes", tt.rest-tt.own)}[tt.handle > 0],
					fmt.Sprintf("%d of 100 bytes are available", 100-tt.handle-tt.rest),
				} {
					if !strings.Contains(err.Error(), want) {
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

// TestPlainWaitsBesideOwners: an owner that blocks itself gets the error at once, also beside waits
// without an owner, which are examined less often. Both errors name handles of unknown owners that
// are in the way.
func TestPlainWaitsBesideOwners(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := twoSpaces(t)
		handle := keep(t, m, nil, 100, 1)
		plain := startReserve(t.Context(), m, onGPU0, 10)
		time.Sleep(time.Second)
		k := newTask(t, m, "task")
		r := k.hold(host, 60)
		k.ask(reservation.Specific(host), 50).told(t, rollBack)
		k.ask(reservation.Specific(host), 50).told(t, split)
		release(t, r)
		asked := k.ask(onGPU0, 10)
		time.Sleep(40 * time.Second)
		var e *reservation.DeadlockError
		if err := asked.failed(t, reservation.ErrDeadlock); !errors.As(err, &e) || e.Held != 0 || len(e.Holders) != 1 || strings.Contains(err.Error(), "the 0 bytes") {
			t.Errorf("it was told %v", err)
		}
		plain.failed(t, reservation.ErrDeadlock)
		handle.close(t)
	})
}

// TestPlainWaitsOfSeveralSpaces: a wait with several candidates goes on as long as one of them may
// become free. Then its error names the one where handles keep the room, also while much happens in
// another space, where an owner runs.
func TestPlainWaitsOfSeveralSpaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := managerOf(t, reservation.Config{Spaces: []*tier.Space{spaceOf(t, "gpu:0", 100), spaceOf(t, "host:0", 100), spaceOf(t, "disk:0", 100)}})
		disk := reservation.Specific(tier.ID{Kind: tier.Disk})
		stop := make(chan struct{})
		var busy sync.WaitGroup
		k := newTask(t, m, "runs")
		busy.Go(func() {
			for range 600 {
				release(t, mustTry(t, m, disk, 10, reservation.WithOwner(k.o)))
				keepIn(t, m, disk, nil, 10, 3).close(t)
				select {
				case <-stop:
					return
				case <-time.After(time.Second):
				}
			}
		})
		full := mustTry(t, m, reservation.Specific(host), 100)
		handle := keep(t, m, nil, 60, 9)
		c := startReserve(t.Context(), m, reservation.AnyInTiers(tier.Host, tier.GPU), 50)
		time.Sleep(5 * time.Minute)
		c.waiting(t)
		more := startReserve(t.Context(), m, onGPU0, 50)
		if e := more.toldPlain(t); e.Space != gpu0 || len(e.Holders) != 1 || e.Holders[0].Batch != 9 {
			t.Errorf("it was told %v", e)
		}
		c.waiting(t)
		release(t, full)
		release(t, c.served(t))
		second := keepIn(t, m, reservation.Specific(host), nil, 70, 7)
		if e := startReserve(t.Context(), m, reservation.AnyInTiers(tier.GPU, tier.Host), 50).toldPlain(t); e.Space != (tier.ID{Kind: tier.Host}) || len(e.Holders) != 1 || e.Holders[0].Batch != 7 {
			t.Errorf("it was told %v", e)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		late := start(func() (reservation.Reservation, error) {
			return m.Reserve(ctx, reservation.AnyInTiers(tier.GPU, tier.Host), 50)
		})
		time.Sleep(11 * time.Second)
		if err := late.failed(t, context.DeadlineExceeded); !strings.Contains(err.Error(), "70 bytes") {
			t.Errorf("%q does not name the handle", err)
		}
		close(stop)
		busy.Wait()
		second.close(t)
		handle.close(t)
	})
}

// TestPlainWaitsBesideRenewedOnes: a wait that is given up and begun anew, again and again,
// does not put off the news for another.
func TestPlainWaitsBesideRenewedOnes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := one(t, 100, 0)
		handle := keep(t, m, nil, 100, 1)
		c := startReserve(t.Context(), m, onGPU0, 50)
		for range 14 {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			if _, err := m.Reserve(ctx, onGPU0, 50); !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			cancel()
		}
		c.failed(t, reservation.ErrDeadlock)
		handle.close(t)
	})
}
