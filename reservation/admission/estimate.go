package admission

import (
	"cmp"
	"context"
	"fmt"
	"math"

	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// None stands for "none" where 0 means "not known": in an Estimate, that the task has no output or
// overhead; in a Measured, that the output was not measured. No miscalculation leads to this number.
const None int64 = math.MinInt64

// Estimate is what a task will need, in bytes. The zero value is a task without any input.
type Estimate struct {
	// Operator is the kind of task. Measurements of tasks of one kind count for that kind only.
	Operator string
	// Input is how many bytes of input have to be brought to the space, beside Inputs.
	Input int64
	// Inputs are those that may be in the space already; may be nil.
	Inputs Inputs
	// Output and Overhead are what the task will take for its result, and beside that: hash tables,
	// copies, scratch. 0 means the Estimator's estimate, None nothing.
	Output, Overhead int64
	// Least is a lower bound of output and overhead together: what a task is known to need that
	// ran out of memory.
	Least int64
	// Owner is the task's, as far as deadlocks are concerned: it holds the grant's reservation, and
	// waits when Run's function does. Nil means that of the context, or else a new one with the
	// operator's name and one goroutine.
	Owner *reservation.Owner
}

// Inputs are the data that a task reads, in the spaces where they are. The goroutine that calls
// Admit or Run calls the methods, with no lock held.
type Inputs interface {
	// Bytes returns how large they are in all.
	Bytes() int64
	// In returns how many bytes of them are in the space, and how many would have to be brought
	// there, both as the space charges them. The inputs may be moved at any time, so the numbers
	// may be outdated.
	In(s *tier.Space) (there, missing int64)
	// Hold keeps the inputs that are in the space there, until Restore, and returns how many bytes
	// of others have to be brought. It must not wait.
	Hold(s *tier.Space) (missing int64)
	// Restore ends what Hold began and what the task did since: the inputs are whole,
	// in their place in the order, and may be moved. They need not be in the space in
	// which they were. It is called after each Hold except for a task that succeeds.
	Restore(ctx context.Context) error
}

// none are the inputs of a task without any.
type none struct{}

func (none) Bytes() int64                          { return 0 }
func (none) In(*tier.Space) (there, missing int64) { return 0, 0 }
func (none) Hold(*tier.Space) (missing int64)      { return 0 }
func (none) Restore(context.Context) error         { return nil }

// prepare fills in the inputs and the owner. Negative bytes are an error.
func (e *Estimate) prepare(ctx context.Context) error {
	e.Inputs = cmp.Or[Inputs](e.Inputs, none{})
	e.Owner = cmp.Or(e.Owner, reservation.OwnerOf(ctx), reservation.NewOwner(e.Operator))
	if e.Input >= 0 && e.Least >= 0 && (e.Output >= 0 || e.Output == None) && (e.Overhead >= 0 || e.Overhead == None) {
		return nil
	}
	return fmt.Errorf("admission: task %s: an estimate below 0 makes no sense: "+
		"%d bytes of input, %d of output, %d of overhead, and %d at least",
		named.Quoted(e.Operator), e.Input, e.Output, e.Overhead, e.Least)
}

// input returns how large all inputs are.
func (e *Estimate) input() int64 { return add(e.Input, max(0, e.Inputs.Bytes())) }

// in returns how many bytes of the inputs are in a space and how many are not.
func (e *Estimate) in(s *tier.Space) (there, missing int64) {
	there, missing = e.Inputs.In(s)
	return max(0, there), add(e.Input, max(0, missing))
}

// outputAndOverhead returns what the task will take beside its inputs.
func (e *Estimate) outputAndOverhead(by Estimator) int64 {
	output, overhead := e.Output, e.Overhead
	if output == 0 || overhead == 0 {
		o, h := by.Estimate(e.Operator, e.input())
		if output == 0 {
			output = o
		}
		if overhead == 0 {
			overhead = h
		}
	}
	return max(e.Least, add(max(0, output), max(0, overhead)))
}

// Measured is what a task took, in bytes.
type Measured struct {
	Input  int64 // as in the estimate; 0 means that
	Output int64 // None: it was not measured
	// Peak is the most that it had in use at once beside its inputs; 0: what the Grant measured.
	Peak int64
}

// add returns a+b, or the largest number if that is more; neither is negative.
func add(a, b int64) int64 {
	if a > math.MaxInt64-b {
		return math.MaxInt64
	}
	return a + b
}

// charge returns the bytes that n bytes take out of a space. Numbers so large that rounding them up
// might overflow stay as they are.
func charge(s *tier.Space, n int64) int64 {
	if n > max(math.MaxInt64/2, s.Capacity()) {
		return n
	}
	return s.Charge(n)
}

// most returns the largest size whose charge is at most room bytes.
func most(s *tier.Space, room int64) int64 {
	room = max(0, min(room, s.Capacity()))
	return size.Largest(s.Charge, 0, room, room)
}
