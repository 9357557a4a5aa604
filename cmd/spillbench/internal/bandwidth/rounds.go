package bandwidth

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

// direction is that of a transfer along a link.
type direction int

const (
	stay  direction = iota // the thread does nothing
	there                  // from → to
	back                   // to → from
)

// side is ours, or raw: one of the contestants of a round.
type side struct {
	prepare func(ctx context.Context) error // before each turn; may be nil
	// move transfers the bytes of thread i. Calls for several threads run at the same time.
	move   func(ctx context.Context, i int, d direction) error
	finish func() error // after each turn, also one that failed; may be nil
}

// step is a part of a turn, in which the first and the second half of the threads transfer at the
// same time. A single thread belongs to the first half. The duration is a sample of the figure.
type step struct {
	figure        int // below figures, or untimed
	first, second direction
}

// timings are the seconds that one figure's step took, in the order of the rounds.
type timings struct{ ours, raw, again []float64 }

// rounds lets ours, raw and raw again take turns, each doing all steps, until there are as many
// rounds as pairs. The first round warms up; unsteady rounds are repeated.
func (b *bench) rounds(ctx context.Context, k link, sides [3]side, steps []step) (out [figures]timings, err error) {
	b.cfg.Progress.Begin(b.name(k), int64(b.cfg.Pairs))
	for round, kept := 0, 0; kept < b.cfg.Pairs; round++ {
		if round > 2*b.cfg.Pairs+1 {
			return out, fmt.Errorf("bandwidth: in only %d of %d rounds was the disk's room in the measured state",
				kept, round)
		}
		order := [...]int{0, 1, 2}
		if kept%2 == 1 {
			order[0], order[1] = 1, 0 // again stays last, so that no side has two turns in a row
		}
		b.unsteady = false
		var took [len(sides)][figures]float64
		for _, who := range order {
			if took[who], err = b.turn(ctx, sides[who], steps); err != nil {
				return out, err
			}
		}
		if round == 0 || b.unsteady {
			continue
		}
		kept++
		b.cfg.Progress.Step()
		for f := range out {
			t := &out[f]
			t.ours, t.raw, t.again = append(t.ours, took[0][f]), append(t.raw, took[1][f]), append(t.again, took[2][f])
		}
	}
	return out, nil
}

// turn does the steps, and returns the seconds that the timed ones took.
func (b *bench) turn(ctx context.Context, s side, steps []step) (took [figures]float64, err error) {
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
	for _, st := range steps {
		begun := time.Now()
		err := together(b.load.threads, func(i int) error {
			d := st.first
			if i >= (b.load.threads+1)/2 {
				d = st.second
			}
			if d == stay {
				return nil
			}
			return s.move(ctx, i, d)
		})
		if err != nil {
			return took, err
		}
		if st.figure != untimed {
			took[st.figure] = time.Since(begun).Seconds()
		}
	}
	return took, nil
}

// row returns the row of one figure.
func (t timings) row(k link, l load, f figureRow) report.BandwidthRow {
	r := report.BandwidthRow{
		From: k.from.ID().String(), To: k.to.ID().String(), Bytes: l.bytes, Threads: l.threads,
		State: f.state, LimitOf: k.limit, Samples: noSamples(),
	}
	if f.d == back {
		r.From, r.To = r.To, r.From
	}
	gib := float64(l.total()) / (1 << 30)
	var ratios, noise []float64
	for i, s := range t.ours {
		r.Samples.GiBPerS = append(r.Samples.GiBPerS, gib/s)
		r.Samples.LimitGiBPerS = append(r.Samples.LimitGiBPerS, gib/t.raw[i])
		r.Samples.LimitAgainGiBPerS = append(r.Samples.LimitAgainGiBPerS, gib/t.again[i])
		ratios = append(ratios, t.raw[i]/s)
		noise = append(noise, math.Abs(t.raw[i]/t.again[i]-1))
	}
	r.GiBPerS, r.CV = median(r.Samples.GiBPerS), variation(r.Samples.GiBPerS)
	r.LimitGiBPerS = gib / median(t.limits())
	r.Efficiency, r.Noise = median(ratios), median(noise)
	r.Inconclusive = math.Abs(r.Efficiency-1) <= r.Noise
	return r
}

// noSamples returns samples that are empty lists in JSON, and not null.
func noSamples() report.BandwidthSamples {
	return report.BandwidthSamples{GiBPerS: []float64{}, LimitGiBPerS: []float64{}, LimitAgainGiBPerS: []float64{}}
}

// limits returns the times of raw and of raw again.
func (t timings) limits() []float64 { return slices.Concat(t.raw, t.again) }

// gain returns how many times as fast both directions at once are as one after the other, as the
// median of the rounds.
func gain(atOnce, first, second []float64) float64 {
	var all []float64
	for i, s := range atOnce {
		all = append(all, (first[i]+second[i])/s)
	}
	return median(all)
}

// variation returns the standard deviation as a share of the mean.
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

// median returns the middle of v, and does not change v.
func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}
