package batch

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/tier"
)

// State is where a batch is in its life.
//
//   - Idle: the data is whole, in one space, and no task is pending. New makes a batch idle, and so
//     does the end of each use. The monitor may evict it.
//   - TaskCreated: a caller has announced work on the batch (pending tasks > 0) that has not begun.
//     The monitor may still evict it, but prefers others.
//   - Processing: handles are open (active > 0). The data stays where it is.
//   - InTransit: the holder of the Transit replaces the payload. Until the Transit ends, readers and
//     new tasks have to wait.
//   - Released: dropped. The batch is empty or, if handles are open, will be when the last is
//     closed. Batches from Repository.Drain are in this state while the consumer works on them.
//
// The transitions, and the methods that make them:
//
//	from                               to                                 by                        note
//	idle                               task-created                       CreateTask                pending +1
//	task-created, processing           same                               CreateTask                pending +1
//	task-created, processing           processing                         Lock                      pending −1, active +1; the data must be in the space named
//	idle, task-created, processing     processing, released               Open                      as CreateTask, unless one is pending, and Lock; the last as Drop
//	idle, task-created, processing     processing                         Read                      active +1
//	processing                         idle, task-created                 last Handle.Close         task-created if tasks are pending
//	task-created, processing           idle, task-created, processing     CancelTask                pending −1
//	in-transit                         in-transit                         CancelTask                pending −1; see below
//	idle, task-created                 in-transit                         Transit                   no handle is open in these states
//	in-transit                         idle, task-created                 Commit, Abort             task-created if tasks are pending or Commit is asked to create one
//	in-transit                         processing, released               CommitOpen                as Commit and Open
//	idle, task-created, processing     released                           Drop                      the payload is freed: with handles open, after the last
//
// While handles are open a created task only counts as pending: the state stays processing. A task
// may be cancelled while the batch is in transit. Otherwise a caller that gives up its work while
// the monitor happens to move the batch would leave a task behind that is never taken. All other
// operations fail with a StateError. Methods with a context wait for the end of a transit, and for
// nothing else.
type State uint8

// The states.
const (
	Idle State = iota
	TaskCreated
	Processing
	InTransit
	Released
)

// String returns "idle", "task-created", "processing", "in-transit" or
// "released".
func (s State) String() string {
	switch s {
	case Idle:
		return "idle"
	case TaskCreated:
		return "task-created"
	case Processing:
		return "processing"
	case InTransit:
		return "in-transit"
	case Released:
		return "released"
	}
	return "invalid"
}

// Status is why an operation on a batch failed.
type Status uint8

// The reasons.
const (
	TaskNotCreated Status = iota + 1 // there is no pending task to lock for or to cancel
	InvalidState                     // the state does not allow it
	SpaceMismatch                    // the data is in another space than the one named
	MissingData                      // the batch was dropped, or the payload offered lacks its data
)

// String returns "task-not-created", "invalid-state", "space-mismatch" or
// "missing-data".
func (s Status) String() string {
	switch s {
	case TaskNotCreated:
		return "task-not-created"
	case InvalidState:
		return "invalid-state"
	case SpaceMismatch:
		return "space-mismatch"
	case MissingData:
		return "missing-data"
	}
	return "unknown"
}

// ErrState is matched by every StateError.
var ErrState = errors.New("batch: not possible in its state")

// StateError reports that a batch's state did not allow an operation, which changed
// nothing. It matches ErrState, and tier.ErrReleased if the batch was dropped.
type StateError struct {
	Batch  ID
	State  State  // at that moment
	Op     string // "create task", "lock", "cancel task", "transit", "commit", "drop"
	Status Status

	Space, Want tier.ID // with SpaceMismatch: where the data is, and where it was wanted
}

func (e *StateError) Error() string {
	s := fmt.Sprintf("batch %d, %s: %s failed: %s", e.Batch, e.State, e.Op, e.Status)
	if e.Status == SpaceMismatch {
		s += fmt.Sprintf(": it is in %s, not in %s", e.Space, e.Want)
	}
	return s
}

// Is matches ErrState, and tier.ErrReleased if the batch was dropped.
func (e *StateError) Is(target error) bool {
	return target == ErrState || target == tier.ErrReleased && e.State == Released
}
