package tune

import (
	"math"
	"slices"
)

// Gain is how much faster something was than the default in several comparisons, as a share: 0.25 does
// in 100 seconds what took 125.
type Gain struct {
	Median float64
	// Low and High bound the gain: the true median is below Low, and above High, with a chance that
	// the level of the comparison allows. Of comparisons that are too few for that they are the
	// least and the largest.
	Low, High float64
	Samples   []float64 // in the order of the comparisons

	logs []float64
}

// add adds a comparison, as the logarithm of the ratio of the two times.
func (g *Gain) add(log, level float64) {
	g.logs = append(g.logs, log)
	g.Samples = append(g.Samples, math.Expm1(log))
	sorted := slices.Sorted(slices.Values(g.logs))
	k := max(1, rank(len(sorted), level))
	g.Median = math.Expm1(median(sorted))
	g.Low, g.High = math.Expm1(sorted[k-1]), math.Expm1(sorted[len(sorted)-k])
}

// mostNoise is the variation beyond which a gain has no percentage: the figure would be of the noise.
const mostNoise = 0.5

// Vague reports whether a gain is no figure to print: it is of one comparison, its bounds are far
// apart, or two runs of the default, one after the other, differ by as much as variation.
func (g Gain) Vague(variation float64) bool {
	return len(g.Samples) < 2 || variation > mostNoise || (1+g.High)/(1+g.Low)-1 > mostNoise
}

// rank returns the largest k so that the k-th smallest of n comparisons is above the true median with
// a chance of at most level; 0 if there is none. It is that of k-1 heads or fewer of n coins.
func rank(n int, level float64) (k int) {
	chance, sum := math.Pow(0.5, float64(n)), 0.0 // of exactly k heads, and of fewer
	for ; k < n; k++ {
		if sum += chance; sum > level {
			return k
		}
		chance *= float64(n-k) / float64(k+1)
	}
	return k
}

// median is the mean of the two in the middle where their number is even.
func median(values []float64) float64 {
	s := slices.Sorted(slices.Values(values))
	n := len(s)
	return (s[(n-1)/2] + s[n/2]) / 2
}
