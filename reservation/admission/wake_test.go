package admission_test

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

// TestWakeUpsAreBounded: how many waiters look again after a change does not grow with their
// number, and none looks without a change.
func TestWakeUpsAreBounded(t *testing.T) {
	looksAfterChange := func(waiters int) (looks int) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, setup{cap: 1000})
			one := w.admit(exactly(500)).runs()
			other, err := w.m.TryReserve(reservation.AnyInTier(tier.GPU), 300)
			if err != nil {
				t.Fatal(err)
			}
			count := make(chan struct{}, 1<<20)
			var calls []*call
			for range waiters {
				e := exactly(600)
				e.Inputs = &inputs{there: map[tier.ID]int64{}, look: func() { count <- struct{}{} }}
				calls = append(calls, w.admit(e))
				synctest.Wait()
			}
			before := len(count)
			if err := other.Shrink(1); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			looks = len(count) - before
			for _, c := range calls {
				c.cancel(errDone)
			}
			for _, c := range calls {
				c.fails(errDone)
			}
			w.end(one)
			if err := other.Release(); err != nil {
				t.Fatal(err)
			}
		})
		return looks
	}
	few, many := looksAfterChange(300), looksAfterChange(1500)
	if few == 0 || few >= 300 || few != many {
		t.Errorf("of 300 waiters %d look again after a change, of 1500 %d", few, many)
	}
}

// setForeign sets how many bytes others hold on a device.
func setForeign(s *tier.Space, bytes int64) { s.SetForeign(bytes) }

// TestForeignChangesWhileTheHeadWaits: the threshold that holds when the head starts is the one of
// that moment.
func TestForeignChangesWhileTheHeadWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		one := w.admit(exactly(100)).runs()
		other, err := w.m.TryReserve(reservation.AnyInTier(tier.GPU), 700)
		if err != nil {
			t.Fatal(err)
		}
		head := w.admit(exactly(150)) // 800 of 900 are used
		head.waits()
		setForeign(w.gpus[0], 100)
		if err := other.Shrink(50); err != nil {
			t.Fatal(err)
		}
		head.waits() // it would come to 900, of 800
		setForeign(w.gpus[0], 50)
		head.waits() // of 850
		if err := other.Shrink(50); err != nil {
			t.Fatal(err)
		}
		w.end(head.runs())
		setForeign(w.gpus[0], 200)
		head = w.admit(exactly(150)) // 700 of 700 are used
		head.waits()
		setForeign(w.gpus[0], 0)
		w.end(head.runs(), one)
		if err := other.Release(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestCloseEndsManyWaits: also those of more waiters than one change wakes.
func TestCloseEndsManyWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000, Config: with(admission.Rules{Bypass: -1})})
		one := w.admit(exactly(800)).runs()
		var calls []*call
		for range 600 {
			calls = append(calls, w.admit(exactly(500)))
		}
		synctest.Wait()
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		for _, c := range calls {
			c.fails(tier.ErrClosed)
		}
		w.end(one)
	})
}

// TestThresholdFallsWhileTheHeadIsServed: a head that was served before it has seen that the
// threshold was lowered gives its bytes back.
func TestThresholdFallsWhileTheHeadIsServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		one := w.admit(exactly(500)).runs()
		two := w.admit(exactly(300)).runs()
		in := &inputs{there: map[tier.ID]int64{}}
		in.hold = func() {
			if err := w.SetThreshold(0.6); err != nil {
				t.Error(err)
			}
		}
		e := exactly(350)
		e.Inputs = in
		head := w.admit(e)
		head.waits()
		w.end(two)
		head.waits() // 850 of 600
		w.used(500)
		if in.held != 1 || in.restored != 1 {
			t.Errorf("held %d times, restored %d times", in.held, in.restored)
		}
		w.end(one)
		w.end(head.runs())
	})
}

// TestHeadKeepsItsPlace: a change that does not concern the head leaves it where it waits in the
// manager, before younger requests.
func TestHeadKeepsItsPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		one := w.admit(exactly(500)).runs()
		other, err := w.m.TryReserve(reservation.AnyInTier(tier.GPU), 400)
		if err != nil {
			t.Fatal(err)
		}
		head := w.admit(exactly(300))
		head.waits()
		var younger reservation.Reservation
		done := make(chan error)
		go func() {
			var err error
			younger, err = w.m.Reserve(context.Background(), reservation.AnyInTier(tier.GPU), 400)
			done <- err
		}()
		synctest.Wait()
		for _, n := range []int64{1, 299} {
			head.waits()
			if err := other.Shrink(n); err != nil {
				t.Fatal(err)
			}
		}
		g := head.runs()
		w.used(900)
		w.end(one, g)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		for _, r := range []reservation.Reservation{other, younger} {
			if err := r.Release(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestNobodyPassesAServedHead: a task that arrives while the head has its bytes and is about to
// start does not start before it.
func TestNobodyPassesAServedHead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		one := w.admit(exactly(100)).runs()
		other, err := w.m.TryReserve(reservation.AnyInTier(tier.GPU), 500)
		if err != nil {
			t.Fatal(err)
		}
		goOn := make(chan struct{})
		in := &inputs{there: map[tier.ID]int64{}, hold: func() { <-goOn }}
		e := exactly(500)
		e.Inputs = in
		head := w.admit(e)
		head.waits()
		if err := other.Release(); err != nil {
			t.Fatal(err)
		}
		head.waits()
		if in.held != 1 {
			t.Fatalf("held %d times", in.held)
		}
		small := w.admit(exactly(1))
		small.waits()
		close(goOn)
		w.end(one, head.runs(), small.runs())
		if s := w.Stats(); s.Passed != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// TestLimitFallsBeforeTheHeadKnows: a head whose wait in the manager ends because of a lower limit,
// before the admitter has noticed the limit, goes on waiting.
func TestLimitFallsBeforeTheHeadKnows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000, changed: synctest.Wait})
		one := w.admit(exactly(500)).runs()
		head := w.admit(exactly(600))
		synctest.Wait()
		if err := w.gpus[0].SetLimit(550); err != nil {
			t.Fatal(err)
		}
		head.waits()
		w.end(one)
		g := head.runs()
		if n := g.Reservation().Bytes(); n != 550 {
			t.Errorf("%d bytes are reserved", n)
		}
		w.end(g)
	})
}
