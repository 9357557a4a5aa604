package bandwidth

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
)

// transfer moves all bytes of a load one way.
type transfer func(context.Context) error

// side is one of those that are compared.
type side struct {
	prepare     transfer     // before each turn; may be nil
	there, back transfer     // back may be nil: then it need not be done
	finish      func() error // after each turn, also one that failed; may be nil
}

// step is a part of a turn: a transfer, and which figure it is a sample of.
type step struct {
	back   bool
	figure int // below figures, or untimed
}

// A turn has at most so many figures: writing in each state, and reading.
const (
	figures = 3
	untimed = -1
)

// loop takes turns: ours, raw, and again, which is raw once more.
type loop struct {
	pairs            int
	ours, raw, again side
	steps            []step
	before           transfer // each round; may be nil
	// steady reports whether the round that has ended is worth counting; nil: always.
	steady   func() bool
	progress Progress
}

// timings are seconds, in the order of the rounds.
type timings struct{ ours, raw, again []float64 }

// run returns the timings of each figure. The first round warms up.
func (l loop) run(ctx context.Context) (out [figures]timings, err error) {
	sides := [...]side{l.ours, l.raw, l.again}
	for round, kept := 0, 0; kept < l.pairs; round++ {
		if round > 2*l.pairs+1 {
			return out, fmt.Errorf("bandwidth: after %d rounds the disk's room was %d times in the state that was to be measured", round, kept)
		}
		order := [...]int{0, 1, 2}
		if kept%2 == 1 {
			order = [...]int{1, 0, 2} // again is the last, so that no side comes twice in a row
		}
		if l.before != nil {
			if err := l.before(ctx); err != nil {
				return out, err
			}
		}
		var took [len(sides)][figures]float64
		for _, who := range order {
			if took[who], err = l.turn(ctx, sides[who]); err != nil {
				return out, err
			}
		}
		if steady := l.steady == nil || l.steady(); round == 0 || !steady {
			continue
		}
		kept++
		l.progress.Step()
		for f := range out {
			t := &out[f]
			t.ours, t.raw, t.again = append(t.ours, took[0][f]), append(t.raw, took[1][f]), append(t.again, took[2][f])
		}
	}
	return out, nil
}

// turn does the steps and returns how long those that are timed took, in seconds.
func (l loop) turn(ctx context.Context, s side) (took [figures]float64, err error) {
	if err := context.Cause(ctx); err != nil {
		return took, err
	}
	if s.finish != nil {
		defer func() { err = errors.Join(err, s.finish()) }()
	}
	if s.prepare != nil {
		if err := s.prepare(ctx); err != nil {
			return took, err
		}
	}
	for _, st := range l.steps {
		f := s.there
		if st.back {
			f = s.back
		}
		if f == nil {
			continue
		}
		begun := time.Now()
		if err := f(ctx); err != nil {
			return took, err
		}
		if st.figure != untimed {
			took[st.figure] = time.Since(begun).Seconds()
		}
	}
	return took, nil
}

// fill puts the figures of a load into r.
func (t timings) fill(r *Row, l load) {
	gib := float64(l.total()) / (1 << 30)
	var ratios, noise []float64
	rates := make([]float64, 0, len(t.ours))
	for i, s := range t.ours {
		rates = append(rates, gib/s)
		r.Samples.Limit, r.Samples.Again = append(r.Samples.Limit, gib/t.raw[i]), append(r.Samples.Again, gib/t.again[i])
		ratios = append(ratios, t.raw[i]/s)
		noise = append(noise, math.Abs(t.raw[i]/t.again[i]-1))
	}
	r.CV, r.Samples.Ours = variation(rates), rates
	r.GiBPerS, r.Efficiency, r.Noise = median(rates), median(ratios), median(noise)
	r.Limit = gib / median(append(slices.Clone(t.raw), t.again...))
}

// variation is the standard deviation as a share of the mean.
func variation(v []float64) float64 {
	mean, sum := 0.0, 0.0
	for _, x := range v {
		mean += x / float64(len(v))
	}
	for _, x := range v {
		sum += (x - mean) * (x - mean)
	}
	if len(v) < 2 || mean == 0 {
		return 0
	}
	return math.Sqrt(sum/float64(len(v)-1)) / mean
}

// median returns the middle of v, which stays as it is.
func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}
