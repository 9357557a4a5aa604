package admission

import (
	"math"

	"github.com/spillway-db/spillway/internal/lockrank"
)

// Estimator estimates what tasks take beside their inputs, and learns from what they took. It must
// be safe for concurrent use. It is called with no lock held and should not block.
type Estimator interface {
	// Estimate returns how many bytes of output, and how many beside it, a task of
	// that kind takes for so many bytes of input. Negative numbers count as 0.
	Estimate(operator string, input int64) (output, overhead int64)
	// Observe is called with the measurements of a task that succeeded.
	Observe(operator string, m Measured)
}

const (
	// fading is how many tasks it takes, roughly, until what was measured before
	// counts little.
	fading = 32
	// settling is the share of the way down that an overhead goes when less was
	// measured.
	settling = 8
	// maxOperators bounds what Ratios remembers; the operators beyond share that of the
	// empty name.
	maxOperators = 4096
)

// Ratios is the default Estimator. It learns for each operator by itself:
//
//	output   = ⌈input × O/I⌉    O and I: sums of the outputs and inputs measured so far,
//	                            of which each new measure fades the older by 1/32
//	overhead = ⌈input × h⌉      h: the highest (peak − output)/input measured so far, from
//	                            which each lower measure takes 1/8 of the difference
//
// Before anything was measured, output = input and overhead = input. The overhead rises to a higher
// measure at once, because too low an estimate costs an attempt, and falls to a lower one slowly.
// For tasks without input, the overhead is the peak itself, which rises and falls in the same way,
// and the output is part of it. Results are at most the largest int64.
//
// The zero value is ready, and safe for concurrent use.
type Ratios struct {
	mu        lockrank.Mutex[lockrank.Reservation]
	operators map[string]ratio // by key
}

// key returns where an operator's ratio is. Operators beyond maxOperators share one place.
func (e *Ratios) key(operator string) string {
	if _, known := e.operators[operator]; !known && len(e.operators) >= maxOperators {
		return ""
	}
	return operator
}

// ratio is what is known of one operator.
type ratio struct {
	in, out float64
	over    follower
	bare    follower // bytes taken by tasks without input
}

// follower rises at once and falls slowly.
type follower struct {
	value float64
	known bool
}

func (f *follower) measure(v float64) {
	if !f.known || v > f.value {
		f.value, f.known = v, true
		return
	}
	f.value += (v - f.value) / settling
}

// Estimate implements Estimator.
func (e *Ratios) Estimate(operator string, input int64) (output, overhead int64) {
	if input < 0 {
		return 0, 0
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	r := e.operators[e.key(operator)]
	if input == 0 {
		return 0, times(1, r.bare.value)
	}
	output, overhead = input, input
	if r.in > 0 {
		output = times(input, r.out/r.in)
	}
	if r.over.known {
		overhead = times(input, r.over.value)
	}
	return output, overhead
}

// Observe implements Estimator. What is negative or not known is not learned.
func (e *Ratios) Observe(operator string, m Measured) {
	if m.Input < 0 || m.Peak < 0 || m.Output < 0 && m.Output != None {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.operators == nil {
		e.operators = make(map[string]ratio)
	}
	operator = e.key(operator)
	r := e.operators[operator]
	if m.Input > 0 && m.Output != None {
		const kept = 1 - 1.0/fading
		r.in = r.in*kept + float64(m.Input)
		r.out = r.out*kept + float64(m.Output)
	}
	switch peak := float64(m.Peak); {
	case m.Peak == 0:
	case m.Input == 0:
		r.bare.measure(peak)
	default:
		r.over.measure(max(0, peak-float64(max(0, m.Output))) / float64(m.Input))
	}
	e.operators[operator] = r
}

// times returns ⌈n × f⌉, or the largest number if that is more.
func times(n int64, f float64) int64 {
	v := float64(n) * f
	// What is whole except for the rounding of the ratio, or the last traces of what has
	// faded, is not rounded up.
	if r := math.Round(v); math.Abs(v-r) <= max(1e-12*v, 1e-6) {
		v = r
	}
	if v = math.Ceil(v); v >= math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(v)
}
