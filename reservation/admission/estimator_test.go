package admission_test

import (
	"fmt"
	"math"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/reservation/admission"
)

func wantEstimate(t *testing.T, e admission.Estimator, operator string, input, output, overhead int64) {
	t.Helper()
	if o, h := e.Estimate(operator, input); o != output || h != overhead {
		t.Errorf("%s with %d bytes: output %d, overhead %d, want %d, %d", operator, input, o, h, output, overhead)
	}
}

func TestEstimatorLearns(t *testing.T) {
	var e admission.Ratios
	wantEstimate(t, &e, "join", 100, 100, 100)
	e.Observe("join", admission.Measured{Input: 1000, Output: 500, Peak: 3500})
	wantEstimate(t, &e, "join", 100, 50, 300)
	wantEstimate(t, &e, "join", 101, 51, 303)
	wantEstimate(t, &e, "scan", 100, 100, 100) // another kind has learned nothing

	for range 1000 {
		e.Observe("join", admission.Measured{Input: 10, Output: 20, Peak: 20})
	}
	wantEstimate(t, &e, "join", 100, 200, 1)                                // ⌈⌉ of almost nothing
	e.Observe("join", admission.Measured{Input: 10, Output: 20, Peak: 100}) // a peak counts at once
	if _, h := e.Estimate("join", 100); h != 800 {
		t.Errorf("after a peak the overhead is %d, want 800", h)
	}
	e.Observe("join", admission.Measured{Input: 10, Output: 20, Peak: 20}) // and is forgotten slowly
	if _, h := e.Estimate("join", 100); h != 700 {
		t.Errorf("after a lower one the overhead is %d, want 700", h)
	}
	e.Observe("sieve", admission.Measured{Input: 100, Output: 0})
	wantEstimate(t, &e, "sieve", 100, 0, 100) // the peak was not measured
	e.Observe("sum", admission.Measured{Input: 100, Output: admission.None, Peak: 50})
	wantEstimate(t, &e, "sum", 100, 100, 50) // nor the output here
	wantEstimate(t, &e, "source", 0, 0, 0)
	e.Observe("source", admission.Measured{Output: 10, Peak: 640})
	wantEstimate(t, &e, "source", 0, 0, 640)
}

// TestEstimatorIsRobust: nothing that is measured makes an estimate negative, a
// number that overflows, or changes what is not its own.
func TestEstimatorIsRobust(t *testing.T) {
	const huge = math.MaxInt64
	numbers := []int64{0, 1, -1, 7, math.MinInt64, huge, huge - 1, 1 << 53}
	var e admission.Ratios
	for _, in := range numbers {
		for _, out := range numbers {
			for _, peak := range numbers {
				e.Observe("odd", admission.Measured{Input: in, Output: out, Peak: peak})
				for _, n := range numbers {
					if o, h := e.Estimate("odd", n); o < 0 || h < 0 {
						t.Fatalf("after %d, %d, %d: %d bytes give %d and %d", in, out, peak, n, o, h)
					}
				}
			}
		}
	}
	var f admission.Ratios
	f.Observe("x", admission.Measured{Input: -1, Output: 5, Peak: 5})
	f.Observe("x", admission.Measured{Input: 5, Output: -2, Peak: 5})
	f.Observe("x", admission.Measured{Input: 5, Output: 5, Peak: -1})
	wantEstimate(t, &f, "x", 10, 10, 10)
	f.Observe("x", admission.Measured{Input: 1, Output: huge, Peak: huge})
	wantEstimate(t, &f, "x", 1<<40, huge, 0)

	var many admission.Ratios // more operators than it remembers
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 2000 {
				op := fmt.Sprint(g, "-", i)
				many.Observe(op, admission.Measured{Input: 10, Output: 20, Peak: 30})
				if o, h := many.Estimate(op, 100); o != 200 || h != 100 {
					t.Errorf("%s: %d, %d", op, o, h)
				}
			}
		})
	}
	wg.Wait()
	wantEstimate(t, &many, "one more", 100, 200, 100) // it shares a place with others
}

// TestDefaultsByEstimator: 0 means what the estimator says, None nothing, and the least
// holds.
func TestDefaultsByEstimator(t *testing.T) {
	for _, c := range []struct {
		e    admission.Estimate
		want int64
	}{
		{admission.Estimate{Input: 100}, 300},
		{admission.Estimate{Input: 100, Output: 7}, 207},
		{admission.Estimate{Input: 100, Overhead: 7}, 207},
		{admission.Estimate{Input: 100, Output: admission.None}, 200},
		{admission.Estimate{Input: 100, Output: admission.None, Overhead: admission.None}, 100},
		{admission.Estimate{Input: 100, Output: admission.None, Overhead: admission.None, Least: 5}, 105},
		{admission.Estimate{Input: 100, Least: 201}, 301},
		{admission.Estimate{}, 0},
	} {
		w := newWorld(t, setup{cap: 1000})
		g, err := w.Admit(t.Context(), c.e)
		if err != nil {
			t.Fatal(err)
		}
		if g.Need() != c.want || g.Reservation().Bytes() != c.want {
			t.Errorf("%+v: need %d, reserved %d, want %d", c.e, g.Need(), g.Reservation().Bytes(), c.want)
		}
		w.end(g)
	}
}

// TestGrantsAreMeasured: what a task has drawn and produced is what is learned.
func TestGrantsAreMeasured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, setup{cap: 1000})
		g := w.admit(admission.Estimate{Operator: "x", Input: 100}).runs()
		in, err := g.Alloc(100)
		if err != nil {
			t.Fatal(err)
		}
		g.InputsHere()
		a, err := g.Alloc(150)
		if err != nil {
			t.Fatal(err)
		}
		if err := a.Release(); err != nil {
			t.Fatal(err)
		}
		b, err := g.Alloc(40)
		if err != nil {
			t.Fatal(err)
		}
		if g.Peak() != 150 {
			t.Errorf("the peak is %d", g.Peak())
		}
		if err := g.Done(admission.Measured{Output: 50}); err != nil {
			t.Fatal(err)
		}
		for _, b := range []interface{ Release() error }{in, b} {
			if err := b.Release(); err != nil {
				t.Fatal(err)
			}
		}
		wantEstimate(t, w.Estimator(), "x", 100, 50, 100)
		g = w.admit(admission.Estimate{Operator: "x", Input: 200}).runs()
		if g.Need() != 200+100+200 {
			t.Errorf("the next needs %d", g.Need())
		}
		w.end(g)
	})
}
