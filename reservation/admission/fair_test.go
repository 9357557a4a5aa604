package admission_test

import (
	"context"
	"errors"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

func TestThreadsCap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000, Config: with(admission.Rules{Threads: 2})})
		one, two := w.admit(exactly(1)).runs(), w.admit(exactly(0)).runs()
		three := w.admit(exactly(1))
		three.waits()
		four := w.admit(exactly(1))
		four.waits()
		if d := w.m.Demand(nil); len(d) != 0 {
			t.Errorf("who waits for a thread asks for memory: %+v", d)
		}
		w.end(one)
		one = three.runs() // the older
		four.waits()
		if err := w.SetThreads(3); err != nil {
			t.Fatal(err)
		}
		g := four.runs()
		if err := w.SetThreads(1); err != nil {
			t.Fatal(err)
		}
		five := w.admit(exactly(1))
		w.end(one, two)
		five.waits() // one runs still
		w.end(g)
		w.end(five.runs())
		if err := w.SetThreads(0); err == nil {
			t.Error("no threads at all were accepted")
		}
	})
}

// TestThreadIsTakenWhileWaitingForMemory: the head waits for memory, others pass it and
// take the last thread; the head gets neither more threads than there are nor lost.
func TestThreadIsTakenWhileWaitingForMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000, Config: with(admission.Rules{Threads: 2})})
		one := w.admit(exactly(500)).runs()
		head := w.admit(exactly(600))
		head.waits()
		passer := w.admit(exactly(100)).runs()
		head.waits()
		if d := w.m.Demand(nil); len(d) != 0 {
			t.Errorf("without a thread the head asks for memory: %+v", d)
		}
		w.end(passer)
		head.waits()
		if d := w.m.Demand(nil); len(d) != 1 || d[0].Bytes != 700 {
			t.Errorf("the demand is %+v", d)
		}
		w.end(one)
		w.end(head.runs())
	})
}

func TestThresholdChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		one := w.admit(exactly(400)).runs()
		if err := w.SetThreshold(0.5); err != nil {
			t.Fatal(err)
		}
		two := w.admit(exactly(101))
		two.waits()
		if err := w.SetThreshold(0.501); err != nil {
			t.Fatal(err)
		}
		g := two.runs()
		if err := w.SetThreshold(0.1); err != nil {
			t.Fatal(err)
		}
		three := w.admit(exactly(50))
		w.end(one)
		three.waits() // 101 are used
		w.end(g)
		w.end(three.runs())
		for _, f := range []float64{0, -1, 1.01, math.NaN(), math.Inf(1)} {
			if err := w.SetThreshold(f); err == nil {
				t.Errorf("a threshold of %v was accepted", f)
			}
		}
	})
}

// TestLimitChanges: limits of spaces that change while tasks wait are heeded.
func TestLimitChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		one := w.admit(exactly(100)).runs()
		if err := w.gpus[0].SetLimit(400); err != nil {
			t.Fatal(err)
		}
		more := w.admit(exactly(50)).runs()
		two := w.admit(exactly(500)) // more than there can be
		two.waits()
		behind := w.admit(exactly(550))
		behind.waits()
		w.end(more) // all look again, and none can start
		behind.waits()
		if err := w.gpus[0].SetLimit(600); err != nil {
			t.Fatal(err)
		}
		g := two.runs()
		behind.cancel(errDone)
		behind.fails(errDone)
		three := w.admit(exactly(300))
		three.waits()
		if err := w.gpus[0].SetLimit(200); err != nil { // can never be now, beside others
			t.Fatal(err)
		}
		three.waits()
		w.end(one, g)
		g = three.runs()
		if n := g.Reservation().Bytes(); n != 200 {
			t.Errorf("%d bytes are reserved", n)
		}
		w.end(g)
	})
}

func TestCancelWhileWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000, Config: with(admission.Rules{Bypass: -1})})
		one := w.admit(exactly(500)).runs()
		head := w.admit(exactly(600))
		head.waits()
		second := w.admit(exactly(500))
		second.waits()
		third := w.admit(exactly(300))
		third.waits() // no task may pass
		why := errors.New("not wanted any more")
		second.cancel(why)
		err := second.fails(why)
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%v does not match context.Canceled", err)
		}
		third.waits()
		head.cancel(why)
		head.fails(why)
		w.end(third.runs(), one) // the next one ran at once
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := w.Admit(ctx, exactly(1)); !errors.Is(err, context.Canceled) {
			t.Errorf("with a context that had ended: %v", err)
		}
	})
}

// TestFairBypass: 16 small tasks pass a large one that cannot start, not 17, however memory is
// freed. Then it has its turn, and the count starts again.
func TestFairBypass(t *testing.T) {
	for _, large := range []int64{950, 850} { // above the threshold, so that it waits for all others; and below
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, setup{cap: 1000, manager: reservation.Config{Bypass: 1000}})
			one := w.admit(exactly(100)).runs()
			head := w.admit(exactly(large))
			head.waits()
			for range 16 {
				w.end(w.admit(exactly(10)).runs())
			}
			late := w.admit(exactly(10))
			late.waits()
			second := w.admit(exactly(890))
			second.waits()
			if s := w.Stats(); s.Passed != 16 {
				t.Errorf("%d tasks have passed", s.Passed)
			}
			w.end(one)
			g := head.runs()
			if large == 850 {
				w.end(late.runs())
			} else {
				late.waits()
			}
			w.end(g)
			if large == 950 {
				w.end(late.runs())
			}
			g = second.runs()
			third := w.admit(exactly(500))
			third.waits()
			w.end(w.admit(exactly(10)).runs()) // passes the new head
			w.end(g)
			w.end(third.runs())
		})
	}
}

// TestPassersAreWoken: a task that may pass is woken when memory becomes free, the oldest first,
// behind others that do not fit.
func TestPassersAreWoken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000, manager: reservation.Config{Bypass: 1000}})
		one, two := w.admit(exactly(600)).runs(), w.admit(exactly(290)).runs()
		head := w.admit(exactly(800))
		head.waits()
		mid, small, smaller := w.admit(exactly(400)), w.admit(exactly(200)), w.admit(exactly(50))
		mid.waits()
		small.waits()
		smaller.waits()
		w.end(two)
		g1, g2 := small.runs(), smaller.runs()
		mid.waits()
		head.waits()
		w.end(one)
		g3 := mid.runs() // 250 are used: the head does not fit
		head.waits()
		w.end(g1, g2, g3)
		w.end(head.runs())
	})
}

// TestPassersAreWokenByOthers: also by what is freed beside the admitter.
func TestPassersAreWokenByOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000, Config: with(admission.Rules{Threshold: 0.8})})
		one := w.admit(exactly(300)).runs()
		other, err := w.m.TryReserve(reservation.AnyInTier(tier.GPU), 500, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range []int64{850, 600} { // above the threshold, and below
			head := w.admit(exactly(n))
			head.waits()
			small := w.admit(exactly(100))
			small.waits()
			if err := other.Shrink(100); err != nil {
				t.Fatal(err)
			}
			w.end(small.runs())
			head.waits()
			head.cancel(errDone)
			head.fails(errDone)
			if err := other.TryGrow(100); err != nil {
				t.Fatal(err)
			}
		}
		w.end(one)
		if err := other.Release(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestAloneNoMore: a task that has begun to pass before, and starts while another is about to be let
// in alone, keeps that one out, for then a task runs.
func TestAloneNoMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		one := w.admit(exactly(100)).runs()
		goOn := make(chan struct{})
		var second *call
		first := w.admit((&inputs{bytes: 10, look: w.whenUsed(950, func() {
			close(goOn)
			<-second.done
		})}).of(exactly(940)))
		first.waits()
		second = w.admit((&inputs{bytes: 10, look: w.whenUsed(130, func() { <-goOn })}).of(exactly(20)))
		second.waits() // it has its bytes, but is not admitted yet
		w.used(130)
		w.end(one)
		first.waits()
		w.end(second.runs())
		g := first.runs()
		if !g.Alone() {
			t.Error("it is not alone")
		}
		w.end(g)
	})
}

// TestLastThread: of two tasks that start at once only one gets the last thread, and the other gives
// back what it has reserved.
func TestLastThread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000, Config: with(admission.Rules{Threads: 2})})
		one := w.admit(exactly(100)).runs()
		other, err := w.m.TryReserve(reservation.AnyInTier(tier.GPU), 700, nil)
		if err != nil {
			t.Fatal(err)
		}
		head := w.admit(exactly(250))
		head.waits()
		goOn := make(chan struct{})
		slow := w.admit((&inputs{bytes: 10, look: w.whenUsed(860, func() { <-goOn })}).of(exactly(50)))
		slow.waits()
		w.used(860)
		if err := other.Release(); err != nil {
			t.Fatal(err)
		}
		g := head.runs()
		close(goOn)
		slow.waits()
		w.used(350)
		w.end(g)
		w.end(slow.runs(), one)
	})
}

// TestNobodyPassesWhoMayStart: while the oldest looks whether it can start, no other starts before
// it.
func TestNobodyPassesWhoMayStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		goOn := make(chan struct{})
		head := w.admit((&inputs{look: func() { <-goOn }}).of(exactly(100)))
		head.waits()
		small := w.admit(exactly(1))
		small.waits()
		close(goOn)
		w.end(head.runs(), small.runs())
		if s := w.Stats(); s.Passed != 0 {
			t.Errorf("%+v", s)
		}
	})
}

// TestHeadThatCannotStartLetsOthersPass: as soon as it has found that.
func TestHeadThatCannotStartLetsOthersPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		one := w.admit(exactly(500)).runs()
		goOn := make(chan struct{})
		head := w.admit((&inputs{look: func() { <-goOn }}).of(exactly(600)))
		head.waits()
		small := w.admit(exactly(1))
		small.waits()
		close(goOn)
		w.end(small.runs())
		head.waits()
		w.end(one)
		w.end(head.runs())
	})
}

// TestWokenForNothing: a waiter that is woken, and then needs more because its inputs have left,
// wakes the next one.
func TestWokenForNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		id := w.gpus[0].ID()
		one, two := w.admit(exactly(600)).runs(), w.admit(exactly(250)).runs()
		head := w.admit(exactly(800))
		head.waits()
		in := &inputs{bytes: 300, there: map[tier.ID]int64{id: 300}}
		second := w.admit(in.of(exactly(100)))
		second.waits()
		third := w.admit(exactly(90))
		third.waits()
		in.there[id] = 0
		w.end(two)
		w.end(third.runs())
		second.waits()
		head.waits()
		w.end(one)
		w.end(head.runs())
		w.end(second.runs())
	})
}

// TestRoomAfterALongWait: room that a consumer frees in one space after a long wait is the head's: it
// does not wait for another task's end in another space.
func TestRoomAfterALongWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000, gpus: 2})
		one := w.admit(exactly(100)).runs()
		idle := w.gpus[1-one.Reservation().Space().ID().Ordinal].ID()
		rest, err := w.m.TryReserve(reservation.Specific(idle), 200, nil)
		if err != nil {
			t.Fatal(err)
		}
		c := w.admit(exactly(950))
		c.waits()
		time.Sleep(reservation.StallTimeout / 2)
		if err := rest.Release(); err != nil {
			t.Fatal(err)
		}
		g := c.runs()
		w.end(g)
		w.end(one)
	})
}
