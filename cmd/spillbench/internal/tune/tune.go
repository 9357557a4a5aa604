// Package tune finds settings with which a piece of work takes less time than with the defaults, and
// says how sure that is. It knows neither the work nor the clock: both are given to Search.
//
//	Settings ─▶ rounds: default, a, b, default, c, d, default …     each value beside the default
//	              │ what is slower leaves, and what the budget has no room for
//	              ▼
//	            those that are faster by more than the variation ─▶ together
//	              │
//	              ▼
//	            pairs: default, together, together, default …       measured anew
//	              │
//	              ▼
//	            Result: together, the best value alone, or the default
//
// A machine is faster at one moment than at another. So each run is compared with those of the default
// right before and after it, and figures are medians of such comparisons. What looked best among many
// values was also lucky. So the last word has a comparison with runs that nothing was chosen by.
//
// The statistics are those of signs: if two configurations are equally fast, each pair is won by
// either with the same chance, whatever the distribution of times is.
//
// Search runs on the goroutine of its caller and takes no locks. Results are plain values.
package tune

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
)

const (
	// leastGain is the smallest gain that is worth a setting that is not the default.
	leastGain = 0.01
	// Of equal values 1 in 64 wins all its 6 runs: it may go on to the last comparison.
	leastRounds, searchLevel = 6, 0.02
	// mostRounds is where a value is known well enough: it has won 9 of 10 runs, or not.
	mostRounds = 10
	// In the last comparison a configuration that is no better is called better once in a hundred
	// times at most: it has to win 7 of 7 pairs, 10 of 11, or 13 of 15.
	leastPairs, mostPairs, lastLevel = 7, 15, 0.01
	// lastShare is the part of the budget for the last comparison.
	lastShare = 0.35
	// looks is how often the default is run, at most, to find out how much the budget has room for.
	looks = 3
	// between is how many values are measured between two runs of the default.
	between = 2
	// recent is of how many runs, about, the mean is that says how long the next will take.
	recent = 8
	// few is how many values are tried at least.
	few = 3
)

// Setting is something that can be set, and the values to try in place of the default. All are the
// caller's words.
type Setting struct {
	Name    string
	Default string
	Values  []string
}

// Choice has a number for each setting: 0 is the default, and i the value i-1.
type Choice []int

// Sample is what a run took, and how many bytes it wrote to disks.
type Sample struct {
	Seconds float64
	Bytes   int64
}

// ErrRefused matches the error of a Measure that cannot work with these values, though others may.
var ErrRefused = errors.New("the values cannot be used")

// Measure does the work once, with these values. Search ends with its error, but for ErrRefused of
// values that are not all defaults.
type Measure func(ctx context.Context, c Choice) (Sample, error)

// Config says what to try, and for how long. All fields are required.
type Config struct {
	Settings []Setting // the most promising first: others may not be tried
	Budget   time.Duration
	Elapsed  func() time.Duration // since the budget began to be used
	Bytes    int64                // that may be written to disks
}

// Outcome says what became of a value.
type Outcome string

// The outcomes.
const (
	Kept    Outcome = "kept"
	Tie     Outcome = "tie"       // neither faster nor slower by more than the variation
	Slower  Outcome = "slower"    // than the default, or the less fast of two
	Second  Outcome = "second"    // faster, but less than another value of the setting
	Unsure  Outcome = "not again" // faster at first, but not in the last comparison
	Refused Outcome = "refused"   // it cannot be used here
	Untried Outcome = "not tried" // there was no room in the budget
)

// Trial is a value that was to be tried.
type Trial struct {
	Setting, Value int // of Config.Settings, and of its Values
	Outcome        Outcome
	Gain           Gain
	Err            error // of Refused
}

// Result is what Search found.
type Result struct {
	Choice Choice
	// Better says that Choice was faster than the default in the last comparison. Else it is the
	// default.
	Better bool
	// Last is the last comparison with the default; without pairs if no value was worth one.
	Last Gain
	// LastDefault and LastChosen are the seconds of its pairs.
	LastDefault, LastChosen []float64
	Trials                  []Trial
	// Variation is how far two runs of the default, one after the other, are apart: the median, as a
	// share.
	Variation float64
	Default   []float64 // seconds of all runs of the default but the first
	Runs      int
	Bytes     int64 // written
	// Open is how many values looked faster in too few runs when the budget had no room for more.
	Open int
	// Short says that the budget was too small to try anything. Needed is then one that is not.
	Short  bool
	Needed time.Duration
}

// Search tries the settings. An error is that of ctx or of measure, beside what was found so far.
func Search(ctx context.Context, cfg Config, measure Measure) (Result, error) {
	s := &search{cfg: cfg, measure: measure}
	s.res.Choice = make(Choice, len(cfg.Settings))
	err := s.run(ctx)
	s.res.Variation = s.variation()
	return s.res, err
}

type search struct {
	cfg     Config
	measure Measure
	res     Result
	apart   []float64 // logarithms of one run of the default by the next
	each    float64   // seconds of a run, with all beside it: the least of the first ones, then a mean
	rounded int       // rounds so far
	before  float64   // seconds of the last run of the default in the rounds; 0 before the first
}

func (s *search) run(ctx context.Context) error {
	least := 2*leastPairs + 1 + leastRounds*roundOf(1)
	for range looks { // the first warms up what only it pays for
		if _, err := s.once(ctx, s.none()); err != nil {
			return err
		}
		if s.affordable() >= least {
			break
		}
	}
	for i, set := range s.cfg.Settings {
		for v := range set.Values {
			s.res.Trials = append(s.res.Trials, Trial{Setting: i, Value: v, Outcome: Untried})
		}
	}
	if s.affordable() < least {
		s.res.Short, s.res.Needed = true, time.Duration(float64(least+looks)*s.each*float64(time.Second))
		return nil
	}
	if err := s.rounds(ctx); err != nil {
		return err
	}
	return s.last(ctx)
}

// none is the default of everything.
func (s *search) none() Choice { return make(Choice, len(s.cfg.Settings)) }

// with is the default but for the values of trials.
func (s *search) with(trials ...int) Choice {
	c := s.none()
	for _, t := range trials {
		c[s.res.Trials[t].Setting] = s.res.Trials[t].Value + 1
	}
	return c
}

// once measures, and keeps the books of the budget.
func (s *search) once(ctx context.Context, c Choice) (float64, error) {
	if err := context.Cause(ctx); err != nil {
		return 0, err
	}
	began := s.cfg.Elapsed()
	sample, err := s.measure(ctx, c)
	s.res.Runs++
	s.res.Bytes += sample.Bytes
	if err == nil && !(sample.Seconds > 0) {
		err = fmt.Errorf("tune: a run took %v seconds", sample.Seconds)
	}
	took := (s.cfg.Elapsed() - began).Seconds()
	if s.res.Runs <= looks && (s.each == 0 || took < s.each) {
		s.each = took
	} else if s.res.Runs > looks {
		s.each += (took - s.each) / recent
	}
	return sample.Seconds, err
}

// affordable is how many more runs the budget has room for.
func (s *search) affordable() int {
	n := math.MaxInt32
	if s.each > 0 {
		n = min(n, int((s.cfg.Budget-s.cfg.Elapsed()).Seconds()/s.each))
	}
	if mean := s.res.Bytes / int64(max(1, s.res.Runs)); mean > 0 {
		n = min(n, int(min((s.cfg.Bytes-s.res.Bytes)/mean, math.MaxInt32)))
	}
	return max(0, n)
}

// pairs is how many pairs the last comparison has, as things are now.
func (s *search) pairs() int {
	return min(max(int(float64(s.affordable())*lastShare/2), leastPairs), mostPairs)
}

// roundOf is how many runs a round of so many values takes; the first of all takes one more.
func roundOf(values int) int { return values + (values+between-1)/between }

// first returns the trials of the first round: the first value of each setting, then the second ones,
// and so on, as many as leave half of the runs to the other rounds.
func (s *search) first(runs int) (trials []int) {
	for depth := 0; ; depth++ {
		more := false
		for t, trial := range s.res.Trials {
			if trial.Value != depth {
				continue
			}
			more = true
			if n := len(trials) + 1; n > few && roundOf(n) > runs/2 {
				return trials
			}
			trials = append(trials, t)
		}
		if !more {
			return trials
		}
	}
}

// rounds measures values beside the default, until it is known which are faster.
func (s *search) rounds(ctx context.Context) error {
	for in := s.first(s.room()); len(in) > 0 && roundOf(len(in)) < s.room(); in = s.promising() {
		slices.Sort(in)
		turn := s.rounded % len(in)
		turned := slices.Concat(in[turn:], in[:turn])
		if s.rounded++; s.rounded%2 == 0 {
			slices.Reverse(turned)
		}
		if err := s.round(ctx, turned); err != nil {
			return err
		}
	}
	for _, t := range s.res.Trials {
		if n := len(t.Gain.Samples); t.Outcome != Refused && t.Gain.Median > 0 && n < leastRounds {
			s.res.Open++
		}
	}
	for t := range s.res.Trials {
		s.judge(&s.res.Trials[t])
	}
	return nil
}

// round measures each of the trials once. Its gain is the logarithm of how much faster it was than the
// default would have been at that time, between the run before and the run after it.
func (s *search) round(ctx context.Context, trials []int) error {
	if s.before == 0 {
		took, err := s.once(ctx, s.none())
		if err != nil {
			return err
		}
		s.before, s.res.Default = took, append(s.res.Default, took)
	}
	for group := range slices.Chunk(trials, between) {
		before, took := s.before, make([]float64, len(group))
		for i, t := range group {
			var err error
			took[i], err = s.once(ctx, s.with(t))
			if errors.Is(err, ErrRefused) && ctx.Err() == nil {
				s.res.Trials[t].Outcome, s.res.Trials[t].Err, took[i] = Refused, err, 0
			} else if err != nil {
				return err
			}
		}
		after, err := s.once(ctx, s.none())
		if err != nil {
			return err
		}
		s.res.Default = append(s.res.Default, after)
		s.apart = append(s.apart, math.Abs(math.Log(after/before)))
		for i, t := range group {
			if took[i] > 0 {
				at := float64(i+1) / float64(len(group)+1)
				usual := (1-at)*math.Log(before) + at*math.Log(after)
				s.res.Trials[t].Gain.add(usual-math.Log(took[i]), searchLevel)
			}
		}
		s.before = after
	}
	return nil
}

// promising returns the trials of the next round: those that were faster so far and are not known well
// enough, the best of them, as many as there is room for until enough is known of them.
func (s *search) promising() (in []int) {
	for t, trial := range s.res.Trials {
		if n := len(trial.Gain.Samples); trial.Outcome != Refused && trial.Gain.Median > 0 && n < mostRounds {
			in = append(in, t)
		}
	}
	slices.SortFunc(in, s.byGain)
	for len(in) > 1 && s.missing(in)*roundOf(len(in)) >= s.room() {
		in = in[:len(in)-1]
	}
	return in
}

// missing is how many more rounds the trials need until enough is known of them all.
func (s *search) missing(trials []int) (rounds int) {
	for _, t := range trials {
		rounds = max(rounds, leastRounds-len(s.res.Trials[t].Gain.Samples))
	}
	return rounds
}

// room is how many runs there are beside those of the last comparison.
func (s *search) room() int { return s.affordable() - 2*s.pairs() }

// byGain has the largest gain first.
func (s *search) byGain(a, b int) int {
	switch ga, gb := s.res.Trials[a].Gain.Median, s.res.Trials[b].Gain.Median; {
	case ga > gb:
		return -1
	case ga < gb:
		return 1
	}
	return a - b
}

// judge says what a trial came to, by its own runs.
func (s *search) judge(t *Trial) {
	switch n := len(t.Gain.Samples); {
	case t.Outcome == Refused || n == 0:
	case s.beyond(t.Gain) && n >= leastRounds:
		t.Outcome = Kept
	case t.Gain.Median < 0 && (n == 1 || t.Gain.High < 0):
		t.Outcome = Slower
	default:
		t.Outcome = Tie
	}
}

// beyond reports whether a gain is more than the variation of runs can make.
func (s *search) beyond(g Gain) bool {
	n := float64(len(g.Samples))
	return g.Low > 0 && g.Median > max(leastGain, s.variation()/math.Sqrt(n))
}

func (s *search) variation() float64 {
	if len(s.apart) == 0 {
		return 0
	}
	return math.Expm1(median(s.apart))
}

// last compares what was faster, together, with the default, and if that is no faster the best value
// alone.
func (s *search) last(ctx context.Context) error {
	var kept []int // the best of each setting, the best setting first
	for t, trial := range s.res.Trials {
		if trial.Outcome == Kept {
			kept = append(kept, t)
		}
	}
	slices.SortFunc(kept, s.byGain)
	kept = slices.DeleteFunc(kept, func(t int) bool {
		better := slices.IndexFunc(kept, func(o int) bool { return s.res.Trials[o].Setting == s.res.Trials[t].Setting })
		if kept[better] == t {
			return false
		}
		s.res.Trials[t].Outcome = Second
		return true
	})
	tries := [][]int{kept}
	if len(kept) > 1 {
		tries = append(tries, kept[:1])
	}
	for _, t := range kept {
		s.res.Trials[t].Outcome = Unsure
	}
	for _, try := range tries {
		pairs := min(mostPairs, s.affordable()/2)
		if len(try) == 0 || pairs < leastPairs {
			break
		}
		if err := s.compare(ctx, s.with(try...), pairs); errors.Is(err, ErrRefused) && ctx.Err() == nil {
			continue
		} else if err != nil {
			return err
		}
		if s.beyond(s.res.Last) {
			s.res.Better, s.res.Choice = true, s.with(try...)
			for _, t := range try {
				s.res.Trials[t].Outcome = Kept
			}
			break
		}
	}
	return nil
}

// compare measures pairs of the default and c, of which each begins every other pair.
func (s *search) compare(ctx context.Context, c Choice, pairs int) error {
	s.res.Last, s.res.LastDefault, s.res.LastChosen = Gain{}, nil, nil
	for i := range pairs {
		order := [2]Choice{s.none(), c}
		if i%2 == 1 {
			order[0], order[1] = order[1], order[0]
		}
		var took [2]float64
		for k := range order {
			var err error
			if took[k], err = s.once(ctx, order[k]); err != nil {
				return err
			}
		}
		usual, chosen := took[i%2], took[1-i%2]
		s.res.Default = append(s.res.Default, usual)
		s.res.LastDefault, s.res.LastChosen = append(s.res.LastDefault, usual), append(s.res.LastChosen, chosen)
		s.res.Last.add(math.Log(usual/chosen), lastLevel)
	}
	return nil
}
