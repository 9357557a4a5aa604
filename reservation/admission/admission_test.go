package admission_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

// TestStrict: up to the threshold exactly, and not a byte more, while a task runs.
func TestStrict(t *testing.T) {
	for _, limit := range []float64{1, 0.95, 0.9, 0.5} {
		for _, threshold := range []float64{0.3, 0.5, 0.9, 1} {
			t.Run(fmt.Sprintf("limit=%v,threshold=%v", limit, threshold), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					rules := admission.Rules{Threshold: threshold}
					w := newWorld(t, setup{cap: 1000, limit: limit, Config: with(rules)})
					mark := int64(1000 * min(limit, threshold))
					first := w.admit(exactly(100)).runs()
					fits := w.admit(exactly(mark - 100)).runs()
					w.used(mark)
					if fits.Alone() {
						t.Error("the second is alone")
					}
					w.end(fits)
					above := w.admit(exactly(mark - 99))
					above.waits()
					w.used(100) // what waits holds nothing
					w.end(first)
					w.end(above.runs())
				})
			})
		}
	}
}

// TestStrictAgainstOthers: what reservations beside the admitter take counts as used, and
// their release lets the next task in.
func TestStrictAgainstOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000, Config: with(admission.Rules{Threshold: 0.6})})
		other, err := w.m.TryReserve(reservation.AnyInTier(tier.GPU), 500, nil)
		if err != nil {
			t.Fatal(err)
		}
		one := w.admit(exactly(50)).runs()
		two := w.admit(exactly(51))
		two.waits()
		if d := w.m.Demand(nil); len(d) != 1 || d[0].Waiters != 1 || d[0].Bytes != 51+400 {
			t.Errorf("the demand is %+v, want the need and what must stay free above the threshold", d)
		}
		if err := other.Shrink(1); err != nil {
			t.Fatal(err)
		}
		w.end(two.runs(), one)
		if err := other.Release(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestStrictInUnits: the task that waits gets in as soon as the rule holds, and not before, where
// threshold and limit are no whole number of the units in which the space charges; also beside a
// reservation that has promised parts of them.
func TestStrictInUnits(t *testing.T) {
	const unit, capacity, quarter = 256, 1 << 20, 256 << 10
	for _, limit := range []float64{0.8, 0.9, 0.95, 1} {
		for _, threshold := range []float64{0.75, 0.7501, 0.7502, 0.77, 0.79} {
			t.Run(fmt.Sprintf("limit=%v,threshold=%v", limit, threshold), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t, setup{
						cap: capacity, limit: limit, grain: unit, Config: with(admission.Rules{Threshold: threshold}),
					})
					top, under := int64(float64(capacity)*limit), int64(float64(capacity)*threshold)
					mark := top - (top-under+unit-1)/unit*unit
					rest := mark/unit*unit - 2*quarter // with two quarters as much as fits
					full := []*admission.Grant{
						w.admit(exactly(quarter)).runs(),
						w.admit(exactly(quarter)).runs(),
						w.admit(exactly(rest)).runs(),
					}
					next := w.admit(exactly(quarter))
					next.waits()
					more := w.admit(exactly(unit))
					more.waits()
					w.end(full[0])
					next.runs()
					more.waits()
					w.used(mark / unit * unit)
					w.end(full[1], full[2], next.g)
					w.end(more.runs())

					other, err := w.m.TryReserve(reservation.AnyInTier(tier.GPU), 3*quarter, nil)
					if err != nil {
						t.Fatal(err)
					}
					one := w.admit(exactly(0)).runs() // so that no task is let in alone
					c := w.admit(exactly(quarter))
					c.waits()
					for _, above := range []int64{unit + 1, unit - 1, 1} {
						if err := other.Shrink(other.Bytes() - (mark - quarter) - above); err != nil {
							t.Fatal(err)
						}
						c.waits()
					}
					if err := other.Shrink(1); err != nil {
						t.Fatal(err)
					}
					w.end(c.runs(), one)
					if err := other.Release(); err != nil {
						t.Fatal(err)
					}
				})
			})
		}
	}
}

// TestOneTaskIfNoneRuns: of tasks that are larger than the threshold one runs at a time.
func TestOneTaskIfNoneRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000, limit: 0.95, Config: with(admission.Rules{Threshold: 0.5})})
		var calls []*call
		for range 5 {
			calls = append(calls, w.admit(exactly(7000)))
		}
		for n := range calls {
			var running []*admission.Grant
			for _, c := range calls {
				if c.over() {
					running = append(running, c.g)
				}
			}
			if len(running) != n+1 {
				t.Fatalf("%d of 5 tasks were admitted after %d have ended", len(running), n)
			}
			w.used(950)
			for _, c := range calls {
				if c.over() && c.g != nil {
					if !c.g.Alone() || c.g.Need() != 7000 {
						t.Errorf("the grant is %v, %d", c.g.Alone(), c.g.Need())
					}
				}
			}
			for _, c := range calls {
				if c.over() && !ended(c) {
					w.end(c.g)
					c.cancel(errDone)
					c.err = errDone
					break
				}
			}
		}
		if s := w.Stats(); s.Alone != 5 || s.Admitted != 5 {
			t.Errorf("%+v", s)
		}
	})
}

var errDone = errors.New("done")

func ended(c *call) bool { return errors.Is(c.err, errDone) }

// TestAloneWaitsForRoom: a task that is let in because none runs still waits until
// its bytes can be reserved, publishes that demand, and ends with the typed error when
// they never can.
func TestAloneWaitsForRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		other, err := w.m.TryReserve(reservation.AnyInTier(tier.GPU), 300, nil)
		if err != nil {
			t.Fatal(err)
		}
		c := w.admit(exactly(5000))
		c.waits()
		if d := w.m.Demand(nil); len(d) != 1 || d[0].Bytes != 1000 {
			t.Fatalf("the demand is %+v", d)
		}
		time.Sleep(reservation.StallTimeout + time.Second) // nobody releases anything
		var stuck *reservation.DeadlockError
		err = c.fails(reservation.ErrDeadlock)
		if !errors.As(err, &stuck) || stuck.Available != 700 || stuck.Held != 0 {
			t.Errorf("refused with %v", err)
		}
		c = w.admit(exactly(5000))
		c.waits()
		if err := other.Release(); err != nil {
			t.Fatal(err)
		}
		w.end(c.runs())
	})
}

// TestAloneInItsSpace: a task that is larger than the threshold may start in a GPU where none runs,
// if that can have its need. In the other it waits for the tasks there.
func TestAloneInItsSpace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000, gpus: 2})
		one := w.admit(exactly(100)).runs()
		two := w.admit(exactly(950)).runs()
		if two.Reservation().Space() == one.Reservation().Space() || two.Reservation().Bytes() != 950 || !two.Alone() {
			r := two.Reservation()
			t.Errorf("it runs in %s with %d bytes, alone: %v", r.Space().ID(), r.Bytes(), two.Alone())
		}
		c := w.admit(exactly(950))
		c.waits()
		w.end(one)
		three := c.runs()
		if three.Reservation().Space() == two.Reservation().Space() || !three.Alone() {
			t.Errorf("it runs in %s, alone: %v", three.Reservation().Space().ID(), three.Alone())
		}
		w.end(two, three)
		if s := w.Stats(); s.Alone != 2 {
			t.Errorf("%+v", s)
		}
	})
	synctest.Test(t, func(t *testing.T) { // room is made there alone
		w := newWorld(t, setup{cap: 1000, gpus: 2})
		one := w.admit(exactly(100)).runs()
		idle := 1 - one.Reservation().Space().ID().Ordinal
		others, err := w.m.TryReserve(reservation.Specific(w.gpus[idle].ID()), 200, nil)
		if err != nil {
			t.Fatal(err)
		}
		c := w.admit(exactly(950))
		c.waits()
		if d := w.m.Demand(nil); len(d) != 1 || d[0].Space != w.gpus[idle].ID() || d[0].Bytes != 950 {
			t.Errorf("the demand is %+v", d)
		}
		small := w.admit(exactly(750)).runs() // passes
		c.waits()
		if small.Reservation().Space() != one.Reservation().Space() {
			t.Errorf("it runs in %s", small.Reservation().Space().ID())
		}
		if err := others.Release(); err != nil {
			t.Fatal(err)
		}
		w.end(c.runs(), small, one)
	})
	synctest.Test(t, func(t *testing.T) { // less than its need is given only where none runs at all
		w := newWorld(t, setup{cap: 1000, gpus: 2})
		if err := w.gpus[1].SetLimit(400); err != nil {
			t.Fatal(err)
		}
		one := w.admit(exactly(100)).runs()
		c := w.admit(exactly(1200))
		c.waits()
		w.end(one)
		w.end(c.runs())
	})
}

// TestAloneInAFullSpace: a task larger than the threshold that might start alone in a GPU which is
// full for good is not refused: it fits in the other as soon as the task there has ended.
func TestAloneInAFullSpace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000, gpus: 2})
		one := w.admit(exactly(100)).runs()
		idle := w.gpus[1-one.Reservation().Space().ID().Ordinal].ID()
		rest, err := w.m.TryReserve(reservation.Specific(idle), 200, nil) // batches at rest, which cannot leave
		if err != nil {
			t.Fatal(err)
		}
		c := w.admit(exactly(950))
		c.waits()
		time.Sleep(reservation.StallTimeout / 2)
		c.waits()
		w.end(one)
		w.end(c.runs())
		if err := rest.Release(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestNeedIsCharged: the need is used from the moment of admission, by the space's
// rounding, so that two tasks that would each fit do not both start.
func TestNeedIsCharged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1024, grain: 64})
		one := w.admit(exactly(500)).runs()
		w.used(512)
		two := w.admit(exactly(500))
		two.waits() // 0.9 of 1024 are 921
		if _, err := w.m.TryReserve(reservation.AnyInTier(tier.GPU), 513, nil); !errors.Is(err, tier.ErrNoSpace) {
			t.Errorf("somebody else was promised what a task has: %v", err)
		}
		b, err := one.Alloc(500)
		if err != nil {
			t.Fatal(err)
		}
		w.used(512)
		if _, err := one.Alloc(1); !errors.Is(err, reservation.ErrExceeded) {
			t.Errorf("more than was reserved: %v", err)
		}
		w.end(one)
		g := two.runs() // none runs, but the buffer that is left is still charged
		w.used(1024)
		if !g.Alone() {
			t.Error("the second was not admitted alone")
		}
		w.end(g)
		w.used(512)
		if err := b.Release(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestInputsAlreadyThereCountZero: only what must be brought is needed; also by space:
// the task goes where its inputs are.
func TestInputsAlreadyThereCountZero(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000, gpus: 2})
		one := w.admit(exactly(700)).runs() // in gpu:0, which is the first of equals
		in := &inputs{bytes: 600, there: map[tier.ID]int64{w.gpus[0].ID(): 600}}
		two := w.admit(in.of(exactly(150))).runs()
		if two.Reservation().Space() != w.gpus[0] || two.Need() != 150 || two.Reservation().Bytes() != 150 {
			t.Errorf("the task is in %s and needs %d", two.Reservation().Space().ID(), two.Need())
		}
		in = &inputs{bytes: 600, there: map[tier.ID]int64{w.gpus[0].ID(): 100}}
		three := w.admit(in.of(exactly(150))).runs() // fits only where less is used than in gpu:0
		if three.Reservation().Space() != w.gpus[1] || three.Need() != 750 {
			t.Errorf("the task is in %s and needs %d", three.Reservation().Space().ID(), three.Need())
		}
		w.end(one, two, three)
	})
}

// TestInputsBeforeRoom: a task goes where its inputs are also if only the other space is below its
// trigger.
func TestInputsBeforeRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000, gpus: 2, host: true})
		for _, s := range w.gpus {
			if err := s.SetMarks(tier.Marks{Limit: 1, Trigger: 0.5, Stop: 0.4}); err != nil {
				t.Fatal(err)
			}
		}
		other, err := w.m.TryReserve(reservation.Specific(w.gpus[0].ID()), 600, nil)
		if err != nil {
			t.Fatal(err)
		}
		in := &inputs{bytes: 100, there: map[tier.ID]int64{w.gpus[0].ID(): 100}}
		g := w.admit(in.of(exactly(50))).runs()
		if g.Reservation().Space() != w.gpus[0] {
			t.Errorf("the task is in %s", g.Reservation().Space().ID())
		}
		w.end(g)
		if err := other.Release(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestAloneLeavesItsInputs: what a task reserves that runs alone leaves room for those
// of its inputs that are there.
func TestAloneLeavesItsInputs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		input, err := w.m.TryReserve(reservation.AnyInTier(tier.GPU), 300, nil)
		if err != nil {
			t.Fatal(err)
		}
		in := &inputs{bytes: 300, there: map[tier.ID]int64{w.gpus[0].ID(): 300}}
		g := w.admit(in.of(exactly(5000))).runs()
		w.used(1000)
		w.end(g)
		if err := input.Release(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestInputsThatLeave: inputs that leave the space while the task is being admitted are
// counted in the end, and nothing is left of the attempts.
func TestInputsThatLeave(t *testing.T) {
	for _, returns := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, setup{cap: 1000})
			id := w.gpus[0].ID()
			in := &inputs{bytes: 200, there: map[tier.ID]int64{id: 200}}
			leave := w.whenUsed(50, func() { in.there[id] = 0 })
			in.look = func() {
				if leave(); returns && w.gpus[0].State().Used() == 0 {
					in.there[id] = 200
				}
			}
			g := w.admit(in.of(exactly(50))).runs()
			want := int64(250)
			if returns {
				want = 50
			}
			if g.Need() != want || g.Reservation().Bytes() != want {
				t.Errorf("%d bytes are reserved, want %d", g.Reservation().Bytes(), want)
			}
			w.end(g)
		})
	}
}

// TestInputsThatLeaveAgainAndAgain: a task starts although its inputs leave whenever its bytes are
// reserved, and return whenever they are not, as reading ahead brings them back.
func TestInputsThatLeaveAgainAndAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		id := w.gpus[0].ID()
		in := &inputs{bytes: 200, there: map[tier.ID]int64{}}
		looks := 0
		in.look = func() {
			if in.there[id] = 0; w.gpus[0].State().Used() == 0 {
				in.there[id] = 200
			}
			if looks++; looks > 100 {
				panic("the task is not admitted")
			}
		}
		g := w.admit(in.of(exactly(50))).runs()
		if g.Need() != 250 || g.Reservation().Bytes() != 250 {
			t.Errorf("%d bytes are reserved, want 250", g.Reservation().Bytes())
		}
		w.end(g)
	})
}

func TestOverflowingEstimate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000, grain: 64})
		const huge = math.MaxInt64
		for _, e := range []admission.Estimate{
			{Input: huge, Output: huge, Overhead: huge, Least: huge},
			{Input: huge},
			(&inputs{bytes: huge}).of(exactly(1)),
			{Output: huge, Overhead: 1},
			{Input: huge, Output: huge, Overhead: huge},
		} {
			err := w.admit(e).fails(reservation.ErrExceeded)
			if strings.Contains(err.Error(), fmt.Sprint(int64(huge))) {
				t.Errorf("a sum that overflows is shown as a number: %v", err)
			}
		}
		for _, e := range []admission.Estimate{{Input: 500, Least: huge}, {Least: huge}} {
			g := w.admit(e).runs()
			if n := g.Reservation().Bytes(); n != 960 || !g.Alone() {
				t.Errorf("%+v: %d bytes are reserved, want what the space has", e, n)
			}
			c := w.admit(e)
			c.waits()
			w.end(g)
			w.end(c.runs())
		}
	})
}

func TestNegativeEstimates(t *testing.T) {
	w := newWorld(t, setup{cap: 1000})
	for _, e := range []admission.Estimate{
		{Input: -1}, {Output: -1}, {Overhead: -5}, {Least: -1},
		{Input: admission.None}, {Least: admission.None}, {Output: admission.None + 1},
	} {
		if _, err := w.Admit(t.Context(), e); err == nil || !strings.Contains(err.Error(), "makes no sense") {
			t.Errorf("%+v: %v", e, err)
		}
		err := w.Run(t.Context(), e, func(context.Context, *admission.Grant) error { t.Error("it ran"); return nil })
		if err == nil || !strings.Contains(err.Error(), "makes no sense") {
			t.Errorf("%+v: %v", e, err)
		}
	}
}

// TestErrorsCutNames: a task may be named by its whole query, of which an error has the beginning.
func TestErrorsCutNames(t *testing.T) {
	name := strings.Repeat("SELECT ", 1000)
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		first := w.admit(admission.Estimate{Input: 1000}).runs()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, late := w.Admit(ctx, admission.Estimate{Operator: name, Input: 1000})
		_, negative := w.Admit(t.Context(), admission.Estimate{Operator: name, Input: -1})
		w.end(first)
		for _, err := range []error{late, negative, &admission.AttemptsError{Operator: name, Err: tier.ErrNoSpace}} {
			if err == nil || !strings.Contains(err.Error(), `task "SELECT SELECT`) || len(err.Error()) > 500 {
				t.Errorf("%v", err)
			}
		}
	})
}

func TestValidate(t *testing.T) {
	w := newWorld(t, setup{cap: 10})
	for name, c := range map[string]admission.Config{
		"no manager":         {},
		"negative threshold": {Reservations: w.m, Rules: admission.Rules{Threshold: -0.1}},
		"threshold above 1":  {Reservations: w.m, Rules: admission.Rules{Threshold: 1.1}},
		"no number":          {Reservations: w.m, Rules: admission.Rules{Threshold: math.NaN()}},
		"negative threads":   {Reservations: w.m, Rules: admission.Rules{Threads: -1}},
		"negative attempts":  {Reservations: w.m, Rules: admission.Rules{MaxAttempts: -1}},
		"a policy of less":   {Reservations: w.m, Rules: admission.Rules{Policy: reservation.Increase(0.5)}},
	} {
		if _, err := admission.New(c); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestNoCandidate(t *testing.T) {
	w := newWorld(t, setup{cap: 10, Config: with(admission.Rules{Strategy: reservation.AnyInTier(tier.Disk)})})
	if _, err := w.Admit(t.Context(), exactly(1)); !errors.Is(err, reservation.ErrNoCandidate) {
		t.Errorf("without a space: %v", err)
	}
}

func TestCloseWakesAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		g := w.admit(exactly(800)).runs()
		var calls []*call
		for range 5 {
			calls = append(calls, w.admit(exactly(200)))
		}
		synctest.Wait()
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		for _, c := range calls {
			c.fails(tier.ErrClosed)
		}
		if _, err := w.Admit(t.Context(), exactly(1)); !errors.Is(err, tier.ErrClosed) {
			t.Errorf("after closing: %v", err)
		}
		if err := w.Close(); !errors.Is(err, tier.ErrClosed) {
			t.Errorf("a second close: %v", err)
		}
		w.end(g)
	})
}

func TestManagerClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		g := w.admit(exactly(800)).runs()
		c := w.admit(exactly(200))
		c.waits()
		if err := w.m.Close(); err != nil {
			t.Fatal(err)
		}
		c.fails(tier.ErrClosed)
		w.end(g)
	})
}

func TestGrantEndsOnce(t *testing.T) {
	w := newWorld(t, setup{cap: 1000})
	g, err := w.Admit(t.Context(), exactly(10))
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Done(admission.Measured{}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(g.Release(), g.Done(admission.Measured{})); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("a second end: %v", err)
	}
	if s := w.Stats(); s.Running != 0 {
		t.Errorf("%+v", s)
	}
}

// TestAnyOfSeveralSpaces: a task that fits nowhere waits for all, and takes the one that
// has room first; nothing is left in the others.
func TestAnyOfSeveralSpaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000, gpus: 3})
		var gs []*admission.Grant
		for range 3 {
			gs = append(gs, w.admit(exactly(800)).runs())
		}
		c := w.admit(exactly(500))
		c.waits()
		if d := w.m.Demand(nil); len(d) != 3 {
			t.Errorf("the demand is %+v", d)
		}
		at := gs[1].Reservation().Space()
		w.end(gs[1])
		g := c.runs()
		if g.Reservation().Space() != at {
			t.Errorf("it runs in %s", g.Reservation().Space().ID())
		}
		if d := w.m.Demand(nil); len(d) != 0 {
			t.Errorf("the demand is %+v", d)
		}
		d := w.admit(exactly(500))
		d.waits()
		d.cancel(errDone)
		d.fails(errDone)
		w.end(g, gs[0], gs[2])
		for _, s := range w.gpus {
			if s.State().Used() != 0 {
				t.Errorf("%s has %d in use", s.ID(), s.State().Used())
			}
		}
	})
}

// TestPanickingEstimator: a panic of a callback is an error, and leaves no task in the queue.
func TestPanickingEstimator(t *testing.T) {
	w := newWorld(t, setup{cap: 1000, Config: admission.Config{Rules: admission.Rules{Estimator: panics{}}}})
	_, err := w.Admit(t.Context(), admission.Estimate{Input: 1})
	if err == nil || !strings.Contains(err.Error(), "panicked: no idea") {
		t.Errorf("it failed with %v", err)
	}
	g, err := w.Admit(t.Context(), exactly(10))
	if err != nil {
		t.Fatal(err)
	}
	w.end(g)
}

type panics struct{}

func (panics) Estimate(string, int64) (int64, int64) { panic("no idea") }
func (panics) Observe(string, admission.Measured)    {}
