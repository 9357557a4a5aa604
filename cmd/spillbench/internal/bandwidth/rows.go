package bandwidth

import (
	"math"
	"slices"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

// The sides of a round.
const (
	ours  = iota
	raw   // the limit
	again // the limit once more
)

// timings are the seconds that one step took each side, in the order of the rounds.
type timings [3][]float64

// limits returns the times of raw and of raw again.
func (t timings) limits() []float64 { return slices.Concat(t[raw], t[again]) }

// row returns the row of one step.
func (t timings) row(k link, l load, d direction) report.BandwidthRow {
	r := report.BandwidthRow{
		From: k.from.ID().String(), To: k.to.ID().String(), Bytes: l.bytes, Threads: l.threads, LimitOf: k.limit,
	}
	if d == back {
		r.From, r.To = r.To, r.From
	}
	if k.limit == diskIO {
		r.State = "rewritten"
	}
	gib := float64(l.total()) / (1 << 30)
	var ratios, noise []float64
	for i, s := range t[ours] {
		r.Samples.GiBPerS = append(r.Samples.GiBPerS, gib/s)
		r.Samples.LimitGiBPerS = append(r.Samples.LimitGiBPerS, gib/t[raw][i])
		r.Samples.LimitAgainGiBPerS = append(r.Samples.LimitAgainGiBPerS, gib/t[again][i])
		ratios = append(ratios, t[raw][i]/s)
		noise = append(noise, math.Abs(t[raw][i]/t[again][i]-1))
	}
	r.GiBPerS, r.CV = median(r.Samples.GiBPerS), variation(r.Samples.GiBPerS)
	r.LimitGiBPerS = gib / median(t.limits())
	r.Efficiency, r.Noise = median(ratios), median(noise)
	r.Inconclusive = math.Abs(r.Efficiency-1) <= r.Noise
	return r
}

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
	sum, squares, n := 0.0, 0.0, float64(len(v))
	for _, x := range v {
		sum += x
		squares += x * x
	}
	if n < 2 || sum == 0 {
		return 0
	}
	return math.Sqrt(max(0, squares-sum*sum/n)/(n-1)) / (sum / n)
}

// median returns the middle of v, and does not change v.
func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return (v[(len(v)-1)/2] + v[len(v)/2]) / 2
}
