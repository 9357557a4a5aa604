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

func (s *script) side(name string) side {
	return side{
		prepare: func(context.Context) error { s.note(name + "="); return nil },
		move: func(_ context.Context, _ int, d direction) error {
			s.note(name + [...]string{"?", ">", "<"}[d])
			return nil
		},
		finish: func() error { s.note(name + "."); return nil },
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
	out, err := b.rounds(t.Context(), k, [3]side{s.side("o"), s.side("r"), s.side("a")}, onDisk)
	if err != nil {
		t.Fatal(err)
	}
	var order []byte
	for i, d := range s.did {
		if want := "=><><."[i%6]; d[1] != want {
			t.Fatalf("step %d is %q; want %c", i, d, want)
		}
		if i%6 == 0 {
			order = append(order, d[0])
		}
	}
	if string(order) != "ora"+"ora"+"roa"+"ora" {
		t.Errorf("turns are %q", order)
	}
	for f, samples := range out {
		if len(samples.ours) != 3 || len(samples.raw) != 3 || len(samples.again) != 3 || slices.Min(samples.ours) < 0 {
			t.Errorf("figure %d has %+v", f, samples)
		}
	}
}

// TestAtOnce: both halves of the threads transfer at the same time, and come back one after the
// other.
func TestAtOnce(t *testing.T) {
	var s script
	b, _ := contest(t, 4)
	var all sync.WaitGroup
	all.Add(4)
	moves := 0
	ours := side{move: func(_ context.Context, i int, d direction) error {
		s.note(fmt.Sprint(i/2, d))
		s.mu.Lock()
		moves++
		first := moves <= 4
		s.mu.Unlock()
		if first { // so no thread can end before all have begun
			all.Done()
			all.Wait()
		}
		return nil
	}}
	took, err := b.turn(t.Context(), ours, atOnce)
	if err != nil || slices.Min(took) <= 0 || len(took) != 3 {
		t.Fatal(took, err)
	}
	slices.Sort(s.did[:4])
	if want := []string{"0 1", "0 1", "1 2", "1 2", "0 2", "0 2", "1 1", "1 1"}; !slices.Equal(s.did, want) {
		t.Errorf("it did %q", s.did)
	}
	if g := gain([]float64{1, 2, 1}, []float64{1, 1, 1}, []float64{1, 1, 0.5}); g != 1.5 { // of 2, 1, 1.5
		t.Errorf("the gain is %v", g)
	}
}

// TestUnsteady: rounds in which the disk's room was not in the measured state are repeated, and do
// not count; and not for ever.
func TestUnsteady(t *testing.T) {
	var s script
	b, k := contest(t, 1)
	rounds, bad := 0, func(round int) bool { return round == 3 }
	ours := s.side("o")
	ours.finish = func() error {
		rounds++
		b.unsteady = bad(rounds)
		return nil
	}
	out, err := b.rounds(t.Context(), k, [3]side{ours, s.side("r"), s.side("a")}, inMemory)
	if err != nil || rounds != 5 || len(out[0].ours) != 3 {
		t.Errorf("%d rounds, %d kept, %v", rounds, len(out[0].ours), err)
	}
	rounds, bad = 0, func(int) bool { return true }
	_, err = b.rounds(t.Context(), k, [3]side{ours, s.side("r"), s.side("a")}, inMemory)
	if err == nil || !strings.Contains(err.Error(), "only 0 of 8 rounds") || rounds != 2*(1+3) {
		t.Errorf("after %d rounds it ends with %v", rounds, err)
	}
}

// TestTurnsEnd: no turn begins after the context has ended.
func TestTurnsEnd(t *testing.T) {
	var s script
	b, k := contest(t, 1)
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	raw := s.side("r")
	raw.move = func(context.Context, int, direction) error {
		s.note("r*")
		cancel(cause)
		return nil
	}
	if _, err := b.rounds(ctx, k, [3]side{s.side("o"), raw, s.side("a")}, inMemory); !errors.Is(err, cause) {
		t.Errorf("it ends with %v", err)
	}
	if got := strings.Join(s.did, " "); got != "o= o< o> o< o> o. r= r* r* r* r* r." {
		t.Errorf("it did %q", got)
	}
}

// TestTransferFails: any failure ends the rounds, and the side's turn is finished.
func TestTransferFails(t *testing.T) {
	broken := errors.New("broken")
	b, k := contest(t, 1)
	for who := range 3 {
		for part := range 3 {
			var s script
			sides := []side{s.side("o"), s.side("r"), s.side("a")}
			one := &sides[who]
			fine := *one
			switch part {
			case 0:
				one.prepare = func(context.Context) error { return broken }
			case 1:
				n := 0
				one.move = func(ctx context.Context, i int, d direction) error {
					if n++; n == 2 {
						return broken
					}
					return fine.move(ctx, i, d)
				}
			case 2:
				one.finish = func() error { return errors.Join(fine.finish(), broken) }
			}
			_, err := b.rounds(t.Context(), k, [3]side(sides), inMemory)
			if !errors.Is(err, broken) || s.did[len(s.did)-1] != "ora"[who:who+1]+"." {
				t.Errorf("side %d, part %d: %v, after %q", who, part, err, s.did)
			}
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
	r := s.row(k, load{1 << 29, 2}, step{first: back, state: "rewritten"})
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
	if r.From != "host:0" || r.To != "gpu:0" || r.State != "rewritten" || r.Bytes != 1<<29 || r.Threads != 2 ||
		r.LimitOf != memmove {
		t.Errorf("%+v", r)
	}
	if !slices.Equal(s.ours, []float64{1, 2, 4}) || !slices.Equal(s.raw, []float64{0.5, 2, 1}) {
		t.Errorf("the timings have changed: %+v", s)
	}

	// A row is inconclusive if ours is no further from the limit than the limit from itself.
	for _, c := range []struct {
		ours float64
		want bool
	}{{1.2, true}, {1 / 1.2, true}, {2, false}, {0.5, false}} {
		s := timings{ours: []float64{c.ours}, raw: []float64{1}, again: []float64{0.8}} // a noise of 0.25
		if r := s.row(k, load{1 << 30, 1}, step{first: there}); r.Inconclusive != c.want {
			t.Errorf("%v seconds for 1: %+v", c.ours, r)
		}
	}
}
