package bandwidth

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
)

// script writes down what a loop does.
type script struct{ did []string }

func (s *script) side(name string) side {
	do := func(what string) transfer {
		return func(context.Context) error {
			s.did = append(s.did, name+what)
			return nil
		}
	}
	return side{prepare: do("="), there: do(">"), back: do("<")}
}

func (s *script) loop(pairs int) loop {
	return loop{
		pairs: pairs, progress: silent{}, ours: s.side("o"), raw: s.side("r"), again: s.side("a"),
		steps: []step{{false, 0}, {true, untimed}, {false, 1}, {true, 2}},
	}
}

// TestTurns: the first round warms up; then ours and raw take turns in being first; and
// nobody comes twice in a row.
func TestTurns(t *testing.T) {
	var s script
	out, err := s.loop(3).run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var order []byte
	for i, d := range s.did {
		if want := "=><><"[i%5]; d[1] != want {
			t.Fatalf("step %d is %q; want %c", i, d, want)
		}
		if i%5 == 0 {
			order = append(order, d[0])
		}
	}
	if string(order) != "ora"+"ora"+"roa"+"ora" {
		t.Errorf("turns are %q", order)
	}
	for f, samples := range out {
		if len(samples.ours) != 3 || len(samples.raw) != 3 || len(samples.again) != 3 {
			t.Errorf("figure %d has %+v", f, samples)
		}
		if slices.Min(samples.ours) < 0 {
			t.Errorf("figure %d took %v", f, samples.ours)
		}
	}
}

// TestUnsteady: rounds in which the disk was not in the state that is measured are done
// again, not counted; and not for ever.
func TestUnsteady(t *testing.T) {
	var s script
	l := s.loop(3)
	asked := 0
	l.steady = func() bool { asked++; return asked != 3 }
	out, err := l.run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if asked != 5 || len(out[0].ours) != 3 {
		t.Errorf("%d rounds, %d kept", asked, len(out[0].ours))
	}
	asked = 0
	l.steady = func() bool { asked++; return false }
	if _, err := l.run(t.Context()); err == nil || !strings.Contains(err.Error(), "0 times") || asked != 2*(1+3) {
		t.Errorf("after %d rounds it ends with %v", asked, err)
	}
}

// TestTurnsEnd: no turn begins after the context has ended.
func TestTurnsEnd(t *testing.T) {
	var s script
	l := s.loop(3)
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	l.raw.back = func(context.Context) error {
		cancel(cause)
		return nil
	}
	if _, err := l.run(ctx); !errors.Is(err, cause) {
		t.Errorf("it ends with %v", err)
	}
	if want := []string{"o=", "o>", "o<", "o>", "o<", "r=", "r>", "r>"}; !slices.Equal(s.did, want) {
		t.Errorf("it did %q", s.did)
	}
}

// TestTransferFails: whichever fails, that is the end.
func TestTransferFails(t *testing.T) {
	broken := errors.New("broken")
	for who := range 3 {
		for what := range 3 {
			var s script
			l := s.loop(3)
			one := []*side{&l.ours, &l.raw, &l.again}[who]
			f := []*transfer{&one.prepare, &one.there, &one.back}[what]
			was, n := *f, 0
			*f = func(ctx context.Context) error {
				if n++; n == 2 {
					return broken
				}
				return was(ctx)
			}
			if _, err := l.run(t.Context()); !errors.Is(err, broken) {
				t.Errorf("side %d, part %d: %v", who, what, err)
			}
		}
		var s script
		l := s.loop(3)
		one := []*side{&l.ours, &l.raw, &l.again}[who]
		one.finish = func() error { return broken }
		if _, err := l.run(t.Context()); !errors.Is(err, broken) {
			t.Errorf("side %d, what follows a turn: %v", who, err)
		}
	}
}

// TestFigures: the figures of samples whose figures are known.
func TestFigures(t *testing.T) {
	const half = 1 << 29
	s := timings{
		ours:  []float64{1, 2, 4}, // seconds for 1 GiB: 1, 0.5 and 0.25 GiB/s
		raw:   []float64{0.5, 2, 1},
		again: []float64{1, 2, 2},
	}
	var r Row
	s.fill(&r, load{half, 2})
	for _, c := range []struct {
		name      string
		got, want float64
	}{
		{"rate", r.GiBPerS, 0.5},
		{"limit", r.Limit, 1 / 1.5},       // of 0.5, 1, 1, 2, 2, 2
		{"efficiency", r.Efficiency, 0.5}, // of 0.5, 1, 0.25
		{"noise", r.Noise, 0.5},           // of 0.5, 0, 0.5
		{"cv", r.CV, math.Sqrt(3.0 / 7)},  // the mean is 7/12, the variance 7/48
	} {
		if math.Abs(c.got-c.want) > 1e-9 {
			t.Errorf("%s is %v; want %v", c.name, c.got, c.want)
		}
	}
	if k := r.Samples; !slices.Equal(k.Ours, []float64{1, 0.5, 0.25}) || !slices.Equal(k.Limit, []float64{2, 0.5, 1}) || !slices.Equal(k.Again, []float64{1, 0.5, 0.5}) {
		t.Errorf("the samples are %+v", k)
	}
	if !slices.Equal(s.ours, []float64{1, 2, 4}) || !slices.Equal(s.raw, []float64{0.5, 2, 1}) {
		t.Errorf("the samples have changed: %+v", s)
	}
}
