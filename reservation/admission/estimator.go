package admission

import (
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/size"
)

// Estimator estimates the output and overhead of tasks, and learns from tasks that have ended. It
// must be safe for concurrent use. It is called with no lock held and should not block.
type Estimator interface {
	// Estimate returns how many bytes of output, and of overhead, a task of that
	// kind takes for so many bytes of input. Negative numbers count as 0.
	Estimate(operator string, input int64) (output, overhead int64)
	// Observe is called with the measurements of a task that succeeded.
	Observe(operator string, m Measured)
}

const (
	// kept is the share of older measures that a new one leaves.
	kept = 1 - 1.0/32
	// settling is the share of the way down that an overhead goes when less was measured.
	settling = 8
	// maxOperators bounds the memory of Ratios. The operators beyond share the place of the empty
	// name.
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
	mu     lockrank.Mutex[lockrank.Reservation]
	ratios map[kind]ratio
}

// kind is a kind of task: an operator, with input or without any.
type kind struct {
	operator string
	bare     bool
}

// ratio has the measures of a kind of task.
type ratio struct {
	in, out float64
	over    float64 // overhead for each byte of input, or without any
	known   bool    // an overhead was measured
}

// kind returns where a ratio is.
func (e *Ratios) kind(operator string, input int64) kind {
	k := kind{operator, input == 0}
	if _, known := e.ratios[k]; !known && len(e.ratios) >= maxOperators {
		k.operator = ""
	}
	return k
}

// Estimate implements Estimator.
func (e *Ratios) Estimate(operator string, input int64) (output, overhead int64) {
	input = max(0, input)
	e.mu.Lock()
	defer e.mu.Unlock()
	r := e.ratios[e.kind(operator, input)]
	output, overhead = input, input
	if r.in > 0 {
		output = size.Times(r.out/r.in, input)
	}
	if r.known {
		overhead = size.Times(r.over, max(1, input))
	}
	return output, overhead
}

// Observe implements Estimator. It ignores negative numbers and those that are not known.
func (e *Ratios) Observe(operator string, m Measured) {
	if m.Input < 0 || m.Peak < 0 || m.Output < 0 && m.Output != None {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ratios == nil {
		e.ratios = make(map[kind]ratio)
	}
	k := e.kind(operator, m.Input)
	r := e.ratios[k]
	if m.Input == 0 {
		m.Output = None
	}
	if m.Output != None {
		r.in = r.in*kept + float64(m.Input)
		r.out = r.out*kept + float64(m.Output)
	}
	if m.Peak > 0 {
		over := float64(max(0, m.Peak-max(0, m.Output))) / float64(max(1, m.Input))
		if r.known && over < r.over {
			over = r.over + (over-r.over)/settling
		}
		r.over, r.known = over, true
	}
	e.ratios[k] = r
}
