package admission_test

import (
	"context"
	"errors"
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
	defer gpu.Subscribe(func(pressed bool) {
		if told++; !pressed && w.Stats().Running != 1 {
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
		in := &inputs{bytes: 10, there: map[tier.ID]int64{}}
		var faster *admission.Grant
		in.hold = func() {
			if in.held == 1 { // it has its bytes, but is not admitted yet
				var err error
				if faster, err = w.Admit(t.Context(), exactly(50)); err != nil {
					t.Error(err)
				}
			}
		}
		e := exactly(100)
		e.Inputs = in
		slower := w.admit(e)
		slower.waits()
		if in.restored != 1 {
			t.Errorf("restored %d times", in.restored)
		}
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
			var full []reservation.Reservation
			for _, s := range w.gpus {
				r, err := w.m.Reserve(context.Background(), reservation.Specific(s.ID()), 1000)
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
			if n := w.gpus[0].Used() + w.gpus[1].Used(); n != 500 {
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
		var other reservation.Reservation
		asked := 0
		w = newWorld(t, setup{cap: 1000, Config: with(admission.Rules{Threshold: 0.5}), charging: func(n int64) {
			if n != need {
				return
			}
			if asked++; asked == 2 { // the plan was the first
				var err error
				if other, err = w.m.TryReserve(reservation.AnyInTier(tier.GPU), 300); err != nil {
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

// TestNever: a task is not tried again only if what it lacked is shown to be more than there is.
func TestNever(t *testing.T) {
	const capacity = 1000
	gpu := tier.ID{Kind: tier.GPU}
	draws := func(t *testing.T, g *admission.Grant, inputs, more int64) error {
		b, err := g.Alloc(inputs)
		if err != nil {
			t.Fatal(err)
		}
		g.InputsHere()
		_, err = g.Alloc(more)
		return errors.Join(err, b.Release())
	}
	for name, c := range map[string]struct {
		inputs, there int64
		output        int64
		fails         func(t *testing.T, g *admission.Grant) error
		again         bool
	}{
		"it lacks room elsewhere": {0, 0, 5000, func(*testing.T, *admission.Grant) error {
			return &reservation.ExceededError{Space: tier.ID{Kind: tier.Host}, Requested: 1 << 40, Limit: 1}
		}, true},
		"its inputs are not there yet": {100, 0, 5000, func(*testing.T, *admission.Grant) error {
			return &reservation.ExceededError{Space: gpu, Requested: 10}
		}, true},
		"it has all": {100, 100, 5000, func(_ *testing.T, g *admission.Grant) error {
			g.InputsHere()
			return reservation.ErrExceeded
		}, false},
		"it waited for others": {0, 0, 5000, func(*testing.T, *admission.Grant) error {
			return reservation.ErrDeadlock
		}, true},
		"with its inputs it fits": {400, 0, 100, func(t *testing.T, g *admission.Grant) error {
			return draws(t, g, 400, 300)
		}, true},
		"with them it does not": {400, 0, 100, func(t *testing.T, g *admission.Grant) error {
			return draws(t, g, 400, 601)
		}, false},
		"it drew inputs before": {0, 0, 500, func(t *testing.T, g *admission.Grant) error {
			return draws(t, g, 450, 551)
		}, true},
		"what it drew and asked for": {0, 0, 600, func(_ *testing.T, g *admission.Grant) error {
			b, err := g.Alloc(500)
			if err != nil {
				return err
			}
			_, err = g.Alloc(501)
			return errors.Join(err, b.Release())
		}, false},
		"one is too large": {0, 0, 100, func(_ *testing.T, g *admission.Grant) error {
			_, err := g.Alloc(capacity + 1)
			return err
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, setup{cap: capacity})
			e := exactly(c.output)
			if c.inputs > 0 {
				e.Inputs = &inputs{bytes: c.inputs, there: map[tier.ID]int64{gpu: c.there}}
			}
			runs := 0
			err := w.Run(t.Context(), e, func(_ context.Context, g *admission.Grant) error {
				if runs++; runs > 1 {
					return nil
				}
				return c.fails(t, g)
			})
			refused := outOfAttempts(err) && errors.Is(err, reservation.ErrExceeded)
			if c.again && (err != nil || runs != 2) || !c.again && (!refused || runs != 1) {
				t.Errorf("%d runs: %v", runs, err)
			}
		})
	}
}
