package admission

import (
	"math"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// None stands for "none" where 0 means "not known": in an Estimate, that the task has no output or
// overhead; in a Measured, that the output was not measured. No miscalculation leads to this
// number.
const None int64 = math.MinInt64

// Estimate is the memory that a task will need, in bytes. The zero value is a task without any
// input.
type Estimate struct {
	// Operator is the kind of task. Measurements of tasks of one kind count for that kind only.
	Operator string
	// In names the spaces that the task may run in; nil means Rules.Strategy.
	In reservation.Strategy
	// Input is how large the inputs are.
	Input int64
	// Inputs returns how many bytes of the inputs are in a space, and how many would have to be
	// brought there, both as the space charges them. The goroutine that calls Admit or Run calls
	// it, with no lock held. The inputs may be moved at any time, so the numbers may be outdated.
	// If it is nil, all of Input has to be brought, wherever the task runs.
	Inputs func(s *tier.Space) (there, missing int64)
	// Output is for the result of the task, and Overhead for all else: hash tables, copies,
	// scratch. 0 means the Estimator's estimate, None nothing. A task is refused if these and
	// its inputs fit in no space together.
	Output, Overhead int64
	// Least is a lower bound of output and overhead together. Run raises it for a task that ran out
	// of memory. Like an Estimator's estimate it is a guess, for which no task is refused.
	Least int64
	// Owner is the task's, as far as deadlocks are concerned: it holds the grant's reservation, and
	// waits when Run's function does. Nil means that of the context, or else a new one with the
	// operator's name and one goroutine.
	Owner *reservation.Owner
}

// Measured is the memory that a task took, in bytes.
type Measured struct {
	Input  int64 // as in the estimate; 0 means that
	Output int64 // None: it was not measured
	// Peak is the most that it had in use at once besides its inputs; 0: as the Grant measured it.
	Peak int64
}

// add returns a+b, or the largest number if that is more; neither is negative.
func add(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

// charge returns the bytes that n bytes take out of a space. More than the space's capacity stays
// as it is, because rounding it up might overflow.
func charge(s *tier.Space, n int64) int64 {
	if n > s.Capacity {
		return n
	}
	return s.Charge(n)
}
