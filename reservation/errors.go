package reservation

import (
	"context"
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/tier"
)

// Sentinels, to be matched with errors.Is. A space that has no room now is
// tier.ErrNoSpace, a reservation that was given up is tier.ErrReleased, and a
// manager that was closed is tier.ErrClosed.
var (
	// ErrExceeded: a request can never fit, or a promise is used up.
	ErrExceeded = errors.New("limit exceeded")
	// ErrDeadlock: everybody waits and nobody can give way.
	ErrDeadlock = errors.New("deadlock")
	// ErrNoCandidate: a strategy named no space that the manager has.
	ErrNoCandidate = errors.New("no candidate space")
)

// ExceededError says that a request is larger than it may ever be: larger than
// a space's limit, so that waiting would be in vain, or larger than what is left
// of a reservation whose policy does not let it grow. It matches ErrExceeded, and
// what its cause matches.
type ExceededError struct {
	Space     tier.ID
	Requested int64  // bytes asked for, rounded up as the space charges them
	Available int64  // bytes free in the space, or unused in the reservation
	Limit     int64  // bytes that the space's limit allows, or that were promised
	Hint      string // what would help
	Cause     error  // why the promise could not be made larger; may be nil
}

func (e *ExceededError) Error() string {
	s := fmt.Sprintf("%s: %d bytes exceed what may be had: %d available of %d", e.Space, e.Requested, e.Available, e.Limit)
	if e.Cause != nil {
		s += ": " + e.Cause.Error()
	}
	if e.Hint != "" {
		s += " (" + e.Hint + ")"
	}
	return s
}

// Is matches ErrExceeded.
func (e *ExceededError) Is(target error) bool { return target == ErrExceeded }

// Unwrap returns the cause.
func (e *ExceededError) Unwrap() error { return e.Cause }

// DeadlockError tells a waiter that it waits for those who wait for it. It
// matches ErrDeadlock.
type DeadlockError struct {
	Waiters int    // how many wait, this one included
	Advice  string // what would help: give up what is held, or split the work
}

func (e *DeadlockError) Error() string {
	s := fmt.Sprintf("all %d waiters wait for each other", e.Waiters)
	if e.Advice != "" {
		s += ": " + e.Advice
	}
	return s
}

// Is matches ErrDeadlock.
func (e *DeadlockError) Is(target error) bool { return target == ErrDeadlock }

// endedError is a wait that its context ended. It matches the context's error
// and its cause.
type endedError struct {
	what       string
	err, cause error
}

func ended(ctx context.Context, what string) error {
	return &endedError{what, ctx.Err(), context.Cause(ctx)}
}

func (e *endedError) Error() string { return "reservation: " + e.what + ": " + e.cause.Error() }

func (e *endedError) Unwrap() []error { return []error{e.cause, e.err} }

// errKept is the cause of a refusal while there is room.
var errKept = errors.New("what is free is kept for an older request")

func closedError() error { return fmt.Errorf("reservation: the manager is %w", tier.ErrClosed) }
