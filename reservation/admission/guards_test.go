package admission_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

// TestRoomBeforeThread: a grant gives its room back before its thread, so that a task woken by the
// end of another finds the room.
func TestRoomBeforeThread(t *testing.T) {
	w := newWorld(t, setup{cap: 1000})
	g, err := w.Admit(t.Context(), exactly(600))
	if err != nil {
		t.Fatal(err)
	}
	gpu := w.gpus[0]
	told := 0
	defer gpu.Subscribe(func(aboveTrigger bool) {
		if told++; !aboveTrigger && w.Stats().Running != 1 {
			t.Errorf("the room comes back when %d tasks run", w.Stats().Running)
		}
	})()
	w.end(g)
	if told == 0 || w.Stats().Running != 0 {
		t.Errorf("told %d times, %d tasks run", told, w.Stats().Running)
	}
}

// TestLastPass: of two tasks that pass the head at once only one gets the last pass, and the other
// gives back what it has reserved and waits.
func TestLastPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000, Config: with(admission.Rules{Bypass: 1})})
		one := w.admit(exactly(100)).runs()
		head := w.admit(exactly(5000))
		head.waits()
		goOn := make(chan struct{})
		slower := w.admit((&inputs{bytes: 10, look: w.whenUsed(560, func() { <-goOn })}).of(exactly(450)))
		slower.waits() // it has its bytes, but is not admitted yet
		w.used(560)
		faster := w.admit(exactly(50)).runs()
		close(goOn)
		slower.waits()
		w.used(150)
		w.end(one, faster)
		w.end(head.runs())
		w.end(slower.runs())
	})
}

// TestServedTwice: a head that waits for room in two spaces and gets it in both at once keeps one
// of them.
func TestServedTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000, gpus: 2})
		for range 100 {
			var full []*reservation.Reservation
			for _, s := range w.gpus {
				r, err := w.m.Reserve(context.Background(), reservation.Specific(s.ID()), 1000, nil)
				if err != nil {
					t.Fatal(err)
				}
				full = append(full, r)
			}
			head := w.admit(exactly(500))
			head.waits()
			for _, r := range full {
				if err := r.Release(); err != nil {
					t.Fatal(err)
				}
			}
			g := head.runs()
			synctest.Wait()
			if n := w.gpus[0].State().Used() + w.gpus[1].State().Used(); n != 500 {
				t.Fatalf("%d bytes are used", n)
			}
			w.end(g)
		}
	})
}

// TestOthersAreFaster: a task for which there was room when it looked is not admitted above the
// threshold, though it has been promised its bytes.
func TestOthersAreFaster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const need = 123
		var w *world
		var other *reservation.Reservation
		asked := 0
		w = newWorld(t, setup{cap: 1000, Config: with(admission.Rules{Threshold: 0.5}), charging: func(n int64) {
			if n != need {
				return
			}
			if asked++; asked == 2 { // the plan was the first
				var err error
				if other, err = w.m.TryReserve(reservation.AnyInTier(tier.GPU), 300, nil); err != nil {
					t.Error(err)
				}
			}
		}})
		one := w.admit(exactly(100)).runs()
		c := w.admit(exactly(need))
		c.waits()
		w.used(400)
		if err := other.Release(); err != nil {
			t.Fatal(err)
		}
		w.end(c.runs(), one)
	})
}

// TestAllOfASmallerSpace: a task that had all memory of one space and exceeded it is tried again if
// another space is larger.
func TestAllOfASmallerSpace(t *testing.T) {
	w := newWorld(t, setup{cap: 1000, gpus: 2})
	if err := w.gpus[1].SetLimit(500); err != nil {
		t.Fatal(err)
	}
	busy, err := w.m.TryReserve(reservation.Specific(w.gpus[0].ID()), 900, nil)
	if err != nil {
		t.Fatal(err)
	}
	var ran []tier.ID
	err = w.Run(t.Context(), exactly(500), func(_ context.Context, g *admission.Grant) error {
		if ran = append(ran, g.Reservation().Space().ID()); len(ran) > 1 {
			return nil
		}
		if err := busy.Release(); err != nil {
			t.Error(err)
		}
		return reservation.ErrExceeded
	})
	if want := []tier.ID{w.gpus[1].ID(), w.gpus[0].ID()}; err != nil || !slices.Equal(ran, want) {
		t.Errorf("the task ran in %v, want %v: %v", ran, want, err)
	}
}

// TestAllThereIs: a task that was given all that there is, with its inputs in place, and exceeded
// that, is not tried again. All others are.
func TestAllThereIs(t *testing.T) {
	gpu := tier.ID{Kind: tier.GPU}
	for name, c := range map[string]struct {
		inputs, there, work int64
		fails               func(g *admission.Grant) error
		again               bool
	}{
		"it has all": {0, 0, 5000, func(*admission.Grant) error { return reservation.ErrExceeded }, false},
		"with its inputs": {100, 100, 900, func(g *admission.Grant) error {
			g.InputsHere()
			return reservation.ErrExceeded
		}, false},
		"its inputs are not there yet": {100, 0, 5000, func(*admission.Grant) error {
			return reservation.ErrExceeded
		}, true},
		"it waited for others": {0, 0, 5000, func(*admission.Grant) error { return reservation.ErrDeadlock }, true},
		"there is no room":     {0, 0, 5000, func(*admission.Grant) error { return tier.ErrNoSpace }, true},
		"there is more":        {0, 0, 999, func(*admission.Grant) error { return reservation.ErrExceeded }, true},
		"beside its inputs":    {100, 100, 899, func(*admission.Grant) error { return reservation.ErrExceeded }, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, setup{cap: 1000, gpus: 2})
			e := exactly(c.work)
			if c.inputs > 0 {
				e = (&inputs{bytes: c.inputs, there: map[tier.ID]int64{gpu: c.there}}).of(e)
			}
			runs := 0
			err := w.Run(t.Context(), e, func(_ context.Context, g *admission.Grant) error {
				if runs++; runs > 1 {
					return nil
				}
				return c.fails(g)
			})
			refused := outOfAttempts(err) && errors.Is(err, reservation.ErrExceeded)
			if c.again && (err != nil || runs != 2) || !c.again && (!refused || runs != 1) {
				t.Errorf("%d runs: %v", runs, err)
			}
		})
	}
}
