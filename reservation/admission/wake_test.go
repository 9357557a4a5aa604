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
			other, err := w.m.TryReserve(reservation.AnyInTier(tier.GPU), 300, nil)
			if err != nil {
				t.Fatal(err)
			}
			count := make(chan struct{}, 1<<20)
			var calls []*call
			for range waiters {
				in := &inputs{look: func() { count <- struct{}{} }}
				calls = append(calls, w.admit(in.of(exactly(250))))
				synctest.Wait()
			}
			before := len(count)
			if err := other.Shrink(100); err != nil { // too little
				t.Fatal(err)
			}
			synctest.Wait()
			if n := len(count) - before; n != 0 {
				t.Errorf("%d waiters look again for nothing", n)
			}
			if err := other.Shrink(50); err != nil { // enough for one
				t.Fatal(err)
			}
			synctest.Wait()
			looks = len(count) - before
			if s := w.Stats(); s.Running != 2 {
				t.Errorf("%d tasks run", s.Running)
			}
			for _, c := range calls[1:] {
				c.cancel(errDone)
			}
			for _, c := range calls[1:] {
				c.fails(errDone)
			}
			w.end(one, calls[0].runs())
			if err := other.Release(); err != nil {
				t.Fatal(err)
			}
		})
		return looks
	}
	few, many := looksAfterChange(30), looksAfterChange(1500)
	if few == 0 || few >= 10 || few != many {
		t.Errorf("of 30 waiters %d look again after a change, of 1500 %d", few, many)
	}
}

// setForeign sets how many bytes others hold on a device.
func setForeign(s *tier.Space, bytes int64) { s.SetExternal(bytes) }

// TestForeignChangesWhileTheHeadWaits: the threshold that holds when the head starts is the one of
// that moment.
func TestForeignChangesWhileTheHeadWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		one := w.admit(exactly(100)).runs()
		other, err := w.m.TryReserve(reservation.AnyInTier(tier.GPU), 700, nil)
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
		head := w.admit((&inputs{look: w.whenUsed(850, func() {
			if err := w.SetThreshold(0.6); err != nil {
				t.Error(err)
			}
		})}).of(exactly(350)))
		head.waits()
		w.end(two)
		head.waits() // 850 of 600
		w.used(500)
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
		other, err := w.m.TryReserve(reservation.AnyInTier(tier.GPU), 400, nil)
		if err != nil {
			t.Fatal(err)
		}
		head := w.admit(exactly(300))
		head.waits()
		var younger *reservation.Reservation
		done := make(chan error)
		go func() {
			var err error
			younger, err = w.m.Reserve(context.Background(), reservation.AnyInTier(tier.GPU), 400, nil)
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
		for _, r := range []*reservation.Reservation{other, younger} {
			if err := r.Release(); err != nil {
				t.Fatal(err)
			}
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
