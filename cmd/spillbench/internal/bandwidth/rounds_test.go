package bandwidth

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
)

// script records what the sides of rounds do.
type script struct {
	mu  sync.Mutex
	did []string
}

func (s *script) note(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.did = append(s.did, what)
}

func (s *script) side(name string) transfer {
	return func(_ context.Context, _ int, d direction) error {
		s.note(name + [...]string{"?", ">", "<"}[d])
		return nil
	}
}

// contest returns a bench, and a link between two of its engine's spaces.
func contest(t *testing.T, threads int) (*bench, link) {
	t.Helper()
	cfg := small(engine(t))
	links := cfg.edges()
	return &bench{cfg: &cfg, load: load{64 << 10, threads}}, links[0]
}

// TestTurns: the first round warms up; then ours and raw take turns in being first, and no side has
// two turns in a row.
func TestTurns(t *testing.T) {
	var s script
	b, k := contest(t, 1)
	out, err := b.rounds(t.Context(), k, [...]transfer{s.side("o"), s.side("r"), s.side("a")}, oneWay)
	if err != nil {
		t.Fatal(err)
	}
	var order []byte
	for i, d := range s.did {
		if want := "<><>"[i%4]; d[1] != want {
			t.Fatalf("step %d is %q; want %c", i, d, want)
		}
		if i%4 == 0 {
			order = append(order, d[0])
		}
	}
	if string(order) != "ora"+"ora"+"roa"+"ora" {
		t.Errorf("turns are %q", order)
	}
	for f, samples := range out {
		for side, of := range samples {
			if len(of) != 3 || slices.Min(of) < 0 {
				t.Errorf("step %d of side %d took %v", f, side, of)
			}
		}
	}
}

// TestAtOnce: one half of the threads goes back, both halves transfer at the same time, and the other
// half goes there: all are where they began.
func TestAtOnce(t *testing.T) {
	var s script
	b, _ := contest(t, 4)
	var all sync.WaitGroup
	all.Add(4)
	moves := 0
	ours := func(_ context.Context, i int, d direction) error {
		s.note(fmt.Sprint(i/2, d))
		s.mu.Lock()
		moves++
		together := moves > 2 && moves <= 6
		s.mu.Unlock()
		if together { // so no thread can end before all have begun
			all.Done()
			all.Wait()
		}
		return nil
	}
	took, err := b.turn(t.Context(), ours, atOnce)
	if err != nil || slices.Min(took) <= 0 || len(took) != 3 {
		t.Fatal(took, err)
	}
	slices.Sort(s.did[2:6])
	if want := []string{"0 2", "0 2", "0 1", "0 1", "1 2", "1 2", "1 1", "1 1"}; !slices.Equal(s.did, want) {
		t.Errorf("it did %q", s.did)
	}
	if g := gain([]float64{1, 2, 1}, []float64{1, 1, 1}, []float64{1, 1, 0.5}); g != 1.5 { // of 2, 1, 1.5
		t.Errorf("the gain is %v", g)
	}
}

// TestTurnsEnd: no turn begins after the context has ended.
func TestTurnsEnd(t *testing.T) {
	var s script
	b, k := contest(t, 1)
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	raw := func(context.Context, int, direction) error {
		s.note("r*")
		cancel(cause)
		return nil
	}
	if _, err := b.rounds(ctx, k, [...]transfer{s.side("o"), raw, s.side("a")}, oneWay); !errors.Is(err, cause) {
		t.Errorf("it ends with %v", err)
	}
	if got := strings.Join(s.did, " "); got != "o< o> o< o> r* r* r* r*" {
		t.Errorf("it did %q", got)
	}
}

// TestTransferFails: a failure of any side ends the rounds.
func TestTransferFails(t *testing.T) {
	broken := errors.New("broken")
	b, k := contest(t, 1)
	for who := range 3 {
		var s script
		sides := [...]transfer{s.side("o"), s.side("r"), s.side("a")}
		fine, n := sides[who], 0
		sides[who] = func(ctx context.Context, i int, d direction) error {
			if n++; n == 2 {
				return broken
			}
			return fine(ctx, i, d)
		}
		_, err := b.rounds(t.Context(), k, sides, oneWay)
		if !errors.Is(err, broken) || s.did[len(s.did)-1] != "ora"[who:who+1]+"<" {
			t.Errorf("side %d: %v, after %q", who, err, s.did)
		}
	}
}

// TestFigures: the figures of known samples.
func TestFigures(t *testing.T) {
	_, k := contest(t, 1)
	s := timings{
		ours:  []float64{1, 2, 4}, // seconds for 1 GiB: 1, 0.5 and 0.25 GiB/s
		raw:   []float64{0.5, 2, 1},
		again: []float64{1, 2, 2},
	}
	r := s.row(k, load{1 << 29, 2}, back)
	for _, c := range []struct {
		name      string
		got, want float64
	}{
		{"rate", r.GiBPerS, 0.5},
		{"limit", r.LimitGiBPerS, 1 / 1.5}, // of 0.5, 1, 1, 2, 2, 2
		{"efficiency", r.Efficiency, 0.5},  // of 0.5, 1, 0.25
		{"noise", r.Noise, 0.5},            // of 0.5, 0, 0.5
		{"cv", r.CV, math.Sqrt(3.0 / 7)},   // the mean is 7/12, the variance 7/48
	} {
		if math.Abs(c.got-c.want) > 1e-9 {
			t.Errorf("%s is %v; want %v", c.name, c.got, c.want)
		}
	}
	if v := r.Samples; !slices.Equal(v.GiBPerS, []float64{1, 0.5, 0.25}) ||
		!slices.Equal(v.LimitGiBPerS, []float64{2, 0.5, 1}) ||
		!slices.Equal(v.LimitAgainGiBPerS, []float64{1, 0.5, 0.5}) {
		t.Errorf("the samples are %+v", v)
	}
	if r.From != "host:0" || r.To != "gpu:0" || r.State != "" || r.Bytes != 1<<29 || r.Threads != 2 ||
		r.LimitOf != memmove {
		t.Errorf("%+v", r)
	}
	if !slices.Equal(s[ours], []float64{1, 2, 4}) || !slices.Equal(s[raw], []float64{0.5, 2, 1}) {
		t.Errorf("the timings have changed: %+v", s)
	}

	// A row is inconclusive if ours is no further from the limit than the limit from itself.
	for _, c := range []struct {
		ours float64
		want bool
	}{{1.2, true}, {1 / 1.2, true}, {2, false}, {0.5, false}} {
		s := timings{ours: []float64{c.ours}, raw: []float64{1}, again: []float64{0.8}} // a noise of 0.25
		if r := s.row(k, load{1 << 30, 1}, there); r.Inconclusive != c.want {
			t.Errorf("%v seconds for 1: %+v", c.ours, r)
		}
	}
}
