package tune

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// machine is one on which a run takes a second, but for what values, noise and drift make of it. Its
// clock is its own.
type machine struct {
	effect  map[[2]int]float64 // of a setting and its value, as the logarithm of the speed
	noise   float64            // standard deviation of the logarithm of a run's time
	drift   float64            // of the logarithm of the time, a run
	bytes   int64
	refuses map[[2]int]error
	rnd     *rand.Rand
	now     time.Duration
	runs    int
}

func (m *machine) elapsed() time.Duration { return m.now }

func (m *machine) measure(ctx context.Context, c Choice) (Sample, error) {
	log := m.drift * float64(m.runs)
	m.runs++
	if m.noise > 0 {
		log += m.noise * m.rnd.NormFloat64()
	}
	for i, v := range c {
		if err := m.refuses[[2]int{i, v}]; err != nil {
			return Sample{}, err
		}
		log -= m.effect[[2]int{i, v}]
	}
	took := math.Exp(log)
	m.now += time.Duration(took*float64(time.Second)) + 50*time.Millisecond
	return Sample{took, m.bytes}, context.Cause(ctx)
}

// settings are n with two values each.
func settings(n int) (all []Setting) {
	for i := range n {
		all = append(all, Setting{Name: fmt.Sprint("s", i), Default: "d", Values: []string{"a", "b"}})
	}
	return all
}

func (m *machine) search(t *testing.T, n int, budget time.Duration) Result {
	t.Helper()
	r, err := Search(t.Context(), Config{Settings: settings(n), Budget: budget, Elapsed: m.elapsed, Bytes: 1 << 40}, m.measure)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestFindsWhatIsFaster: on machines that vary, a gain that is larger than that is found, with the
// settings that make it and none that harms.
func TestFindsWhatIsFaster(t *testing.T) {
	for name, c := range map[string]struct {
		noise, drift float64
		effect       map[[2]int]float64
		want         Choice
	}{
		"one value":            {0.02, 0, map[[2]int]float64{{2, 1}: 0.2}, Choice{0, 0, 1, 0, 0, 0}},
		"the better of two":    {0.02, 0, map[[2]int]float64{{2, 1}: 0.1, {2, 2}: 0.3}, Choice{0, 0, 2, 0, 0, 0}},
		"two settings":         {0.02, 0, map[[2]int]float64{{0, 1}: 0.2, {4, 2}: 0.2}, Choice{1, 0, 0, 0, 2, 0}},
		"others are slower":    {0.02, 0, map[[2]int]float64{{0, 1}: -0.3, {0, 2}: -0.2, {1, 1}: -0.1, {5, 2}: 0.15}, Choice{0, 0, 0, 0, 0, 2}},
		"a machine that slows": {0.02, 0.005, map[[2]int]float64{{3, 2}: 0.2}, Choice{0, 0, 0, 2, 0, 0}},
		"much noise":           {0.1, 0, map[[2]int]float64{{1, 1}: 0.7}, Choice{0, 1, 0, 0, 0, 0}},
	} {
		found := 0
		for seed := range uint64(20) {
			m := &machine{effect: c.effect, noise: c.noise, drift: c.drift, rnd: rand.New(rand.NewPCG(seed, 1))}
			r := m.search(t, 6, 3*time.Minute)
			all := r.Better
			for i, v := range r.Choice {
				all = all && (c.want[i] == 0 || v == c.want[i]) && c.effect[[2]int{i, v}] >= 0
			}
			if all {
				found++
			}
		}
		if found < 18 {
			t.Errorf("%s: found in %d of 20 searches", name, found)
		}
	}
}

// TestWorseIsNeverCalledBetter: where every value is slower than the default, no noise makes one of
// them the result.
func TestWorseIsNeverCalledBetter(t *testing.T) {
	effect := make(map[[2]int]float64)
	for i := range 6 {
		effect[[2]int{i, 1}], effect[[2]int{i, 2}] = -0.02, -0.05
	}
	for _, noise := range []float64{0.005, 0.02, 0.05, 0.1, 0.3} {
		for seed := range uint64(200) {
			m := &machine{effect: effect, noise: noise, drift: 0.002, rnd: rand.New(rand.NewPCG(seed, 2))}
			if r := m.search(t, 6, 2*time.Minute); r.Better {
				t.Errorf("noise %v, seed %d: %v is called better: %v", noise, seed, r.Choice, r.Last)
			}
		}
	}
}

// TestEqualIsRarelyCalledBetter: where no value has an effect, one is called better by chance in no more
// searches than the last comparison allows.
func TestEqualIsRarelyCalledBetter(t *testing.T) {
	called, searches := 0, 0
	for _, noise := range []float64{0.02, 0.1} {
		for seed := range uint64(500) {
			m := &machine{noise: noise, rnd: rand.New(rand.NewPCG(seed, 3))}
			r := m.search(t, 6, 2*time.Minute)
			if searches++; r.Better {
				called++
			}
			if !r.Better && slices.ContainsFunc(r.Choice, func(v int) bool { return v != 0 }) {
				t.Fatalf("%+v is not better, and no default", r)
			}
		}
	}
	if called > searches/100 {
		t.Errorf("called better in %d of %d searches", called, searches)
	}
}

// TestTiesKeepTheDefault: where all are equally fast, or faster by less than is worth it, the default
// stays, and no time is spent on a last comparison.
func TestTiesKeepTheDefault(t *testing.T) {
	for _, gain := range []float64{0, 0.009} {
		m := &machine{effect: map[[2]int]float64{{0, 1}: gain, {1, 2}: gain}}
		r := m.search(t, 3, time.Minute)
		if r.Better || !slices.Equal(r.Choice, Choice{0, 0, 0}) || len(r.LastChosen) > 0 {
			t.Errorf("gain %v: %+v", gain, r)
		}
		for _, trial := range r.Trials {
			if trial.Outcome != Tie {
				t.Errorf("gain %v: %+v", gain, trial)
			}
		}
	}
}

// TestBudget: no search takes more time, or writes more, than it may, by a run; one that could not
// decide anything says so at once, and what would be enough is.
func TestBudget(t *testing.T) {
	for _, budget := range []time.Duration{time.Second, 15 * time.Second, 45 * time.Second, time.Minute, 10 * time.Minute} {
		for seed := range uint64(30) {
			m := &machine{noise: 0.1, effect: map[[2]int]float64{{0, 1}: 0.4}, rnd: rand.New(rand.NewPCG(seed, 4))}
			r := m.search(t, 8, budget)
			if m.now > budget+3*time.Second {
				t.Errorf("a budget of %v: took %v", budget, m.now)
			}
			if r.Runs != m.runs || r.Short != (budget <= 15*time.Second) || r.Short && (r.Runs != looks || r.Better) {
				t.Errorf("a budget of %v: %+v", budget, r)
			}
			if !r.Short {
				continue
			}
			again := &machine{rnd: rand.New(rand.NewPCG(seed, 4)), noise: 0.001}
			if r := again.search(t, 8, r.Needed*3/2); r.Short {
				t.Errorf("%v would be enough, and is not", r.Needed)
			}
		}
	}
	m := &machine{bytes: 1 << 30}
	r, err := Search(t.Context(), Config{Settings: settings(8), Budget: time.Hour, Elapsed: m.elapsed, Bytes: 50 << 30}, m.measure)
	if err != nil || r.Bytes > 50<<30 || r.Bytes != int64(r.Runs)<<30 {
		t.Errorf("%d bytes, %v", r.Bytes, err)
	}
}

// TestSmallBudgetTriesTheFirst: what there is no room for is not tried, and says so.
func TestSmallBudgetTriesTheFirst(t *testing.T) {
	m := &machine{}
	r := m.search(t, 20, 60*time.Second)
	tried := 0
	for _, trial := range r.Trials {
		if trial.Outcome != Untried {
			tried++
			if trial.Value != 0 {
				t.Errorf("%+v was tried before the first values", trial)
			}
		}
	}
	if tried < 3 || tried > 20 {
		t.Errorf("%d values were tried", tried)
	}
	if got := r.Reason(settings(20), 19); !strings.HasPrefix(got, "not tried: ") {
		t.Error(got)
	}
}

// TestOpen: a search whose budget ends while something still looks faster says so, and keeps the
// default; one that ends by itself leaves nothing open.
func TestOpen(t *testing.T) {
	for _, c := range []struct {
		slower float64 // of each run after the tenth
		open   bool
	}{{0, false}, {3, true}} {
		m := &machine{effect: map[[2]int]float64{{0, 1}: 0.3}}
		slower := c.slower
		r, err := Search(t.Context(), Config{Settings: settings(3), Budget: time.Minute, Elapsed: m.elapsed, Bytes: 1 << 40}, func(ctx context.Context, c Choice) (Sample, error) {
			s, err := m.measure(ctx, c)
			if m.runs > 10 {
				m.now += time.Duration(slower * float64(time.Second))
			}
			return s, err
		})
		if err != nil || (r.Open > 0) != c.open || r.Better == c.open {
			t.Errorf("%+v: %+v, %v", c, r, err)
		}
	}
}

// TestRefused: a value that cannot be used is left out, also the best together; any other error, and
// one of the default, ends the search.
func TestRefused(t *testing.T) {
	refused := fmt.Errorf("too large: %w", ErrRefused)
	m := &machine{refuses: map[[2]int]error{{0, 1}: refused, {1, 1}: refused}, effect: map[[2]int]float64{{2, 1}: 0.2}}
	r := m.search(t, 3, time.Minute)
	if !r.Better || !slices.Equal(r.Choice, Choice{0, 0, 1}) || r.Trials[0].Outcome != Refused {
		t.Errorf("%+v", r)
	}
	if got := r.Reason(settings(3), 0); !strings.Contains(got, "a cannot be used here: too large") {
		t.Error(got)
	}
	broken := errors.New("broken")
	for _, m := range []*machine{{refuses: map[[2]int]error{{2, 2}: broken}}, {refuses: map[[2]int]error{{0, 0}: refused}}} {
		if _, err := Search(t.Context(), Config{Settings: settings(3), Budget: time.Minute, Elapsed: m.elapsed, Bytes: 1}, m.measure); !errors.Is(err, broken) && !errors.Is(err, refused) {
			t.Errorf("ended with %v", err)
		}
	}
}

// TestInterrupted: a search ends with its context, whichever run is under way.
func TestInterrupted(t *testing.T) {
	for after := range 40 {
		ctx, cancel := context.WithCancel(t.Context())
		m := &machine{effect: map[[2]int]float64{{0, 1}: 0.3}}
		_, err := Search(ctx, Config{Settings: settings(3), Budget: time.Minute, Elapsed: m.elapsed, Bytes: 1 << 40}, func(ctx context.Context, c Choice) (Sample, error) {
			if m.runs == after {
				cancel()
			}
			return m.measure(ctx, c)
		})
		if cancel(); !errors.Is(err, context.Canceled) || m.runs > after+1 {
			t.Errorf("after %d runs: %v, %d runs", after, err, m.runs)
		}
	}
}

// TestRank: the bounds are those of coins.
func TestRank(t *testing.T) {
	for _, c := range []struct {
		n     int
		level float64
		want  int
	}{{1, 0.05, 0}, {4, 0.05, 0}, {5, 0.02, 0}, {6, 0.02, 1}, {8, 0.05, 2}, {10, 0.02, 2}, {6, 0.01, 0}, {7, 0.01, 1}, {10, 0.01, 1}, {11, 0.01, 2}, {18, 0.01, 4}} {
		if got := rank(c.n, c.level); got != c.want {
			t.Errorf("of %d at %v: %d, want %d", c.n, c.level, got, c.want)
		}
	}
}

// TestReasons: each outcome is said in words, with what was measured.
func TestReasons(t *testing.T) {
	gain := func(logs ...float64) (g Gain) {
		for _, l := range logs {
			g.add(l, searchLevel)
		}
		return g
	}
	set := []Setting{{"workers", "4", []string{"8", "2"}}}
	for _, c := range []struct {
		first, second Trial
		want          string
	}{
		{Trial{Outcome: Kept, Gain: gain(0.1, 0.1, 0.1, 0.1, 0.1)}, Trial{Value: 1, Outcome: Slower, Gain: gain(-0.2)}, "8 was 10.5 % faster (10.5 to 10.5 % in 5 runs) than 4"},
		{Trial{Outcome: Slower, Gain: gain(-0.3)}, Trial{Value: 1, Outcome: Slower, Gain: gain(-0.2)}, "2 was slower in the only run"},
		{Trial{Outcome: Tie, Gain: gain(0.01, -0.01)}, Trial{Value: 1, Outcome: Untried}, "no value was faster by more than runs vary; the best, 8, was 0.0 % faster (-1.0 to 1.0 % in 2 runs); 1 more not tried"},
		{Trial{Outcome: Kept, Gain: gain(0.1, 0.9, 0.2, 0.3, 0.2, 0.3)}, Trial{Value: 1, Outcome: Second, Gain: gain(0.1)}, "8 was faster than 4 in the median of 6 runs, which vary too much for a figure"},
		{Trial{Outcome: Kept, Gain: gain(1.02)}, Trial{Value: 1, Outcome: Untried}, "8 was faster than 4 in the only run; 1 more not tried"},
		{Trial{Outcome: Unsure, Gain: gain(0.1, 0.2)}, Trial{Value: 1, Outcome: Second, Gain: gain(0.1)}, "8 was 16.2 % faster (10.5 to 22.1 % in 2 runs) at first, but not in the last comparison"},
	} {
		r := Result{Trials: []Trial{c.first, c.second}}
		if got := r.Reason(set, 0); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
		r.Variation = 0.6
		if got := r.Reason(set, 0); strings.Contains(got, "%") {
			t.Errorf("of figures that are noise: %q", got)
		}
	}
}
