package admission_test

import (
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
		w := newWorld(t, setup{cap: 1000, Config: admission.Config{Rules: admission.Rules{Bypass: -1}}})
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
