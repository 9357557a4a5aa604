package tier

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/causes"
)

// Sentinels, to be matched with errors.Is.
var (
	// ErrNoSpace: a space has no room now.
	ErrNoSpace = errors.New("no space")
	// ErrReleased: something was released a second time, or used after it.
	ErrReleased = errors.New("already released")
	// ErrClosed: the space, the device or the engine is closed.
	ErrClosed = errors.New("closed")
	// ErrNotSupported: this space or machine cannot do that.
	ErrNotSupported = errors.New("not supported")
	// ErrOutOfBudget: a budget or a quota has no room for a request.
	ErrOutOfBudget = errors.New("out of budget")
	// ErrLost: a device has failed for good, and what was in its memory is gone.
	ErrLost = errors.New("lost")
	// ErrAltered: bytes on a disk are not those that were written.
	ErrAltered = errors.New("altered")
)

// NoSpaceError reports that a space had no room for a request at that moment. It matches
// ErrNoSpace.
type NoSpaceError struct {
	Space     ID     // the zero ID if a device without a space refused
	Requested int64  // bytes asked for
	Available int64  // bytes free under the space's limit at that moment
	Largest   int64  // largest free piece, where fragmentation was the reason; else 0
	Hint      string // the setting that would help; may be empty
	Cause     error  // the error of the backend, the file system, a budget or a quota; may be nil
}

func (e *NoSpaceError) Error() string {
	s := fmt.Sprintf("no space for %d bytes: %d available", e.Requested, e.Available)
	if e.Space.Valid() { // else a device refused, which is not in a space
		s = e.Space.String() + " has " + s
	}
	if e.Largest > 0 {
		s += fmt.Sprintf(" in pieces of at most %d", e.Largest)
	}
	if e.Cause != nil {
		s += ": " + e.Cause.Error()
	}
	if e.Hint != "" {
		s += " (" + e.Hint + ")"
	}
	return s
}

// Unwrap returns ErrNoSpace and the cause.
func (e *NoSpaceError) Unwrap() []error { return []error{ErrNoSpace, e.Cause} }

// OutOfBudgetError reports that a budget or a quota, and not the memory itself, had no room for a
// request. It matches ErrOutOfBudget. It also matches ErrNoSpace, because callers that can do with
// less treat both alike.
type OutOfBudgetError struct {
	Budget    string // what it is called, and where it was set; may be empty
	Requested int64  // bytes asked for, as charged
	Remaining int64  // bytes that could have been had
	Current   int64  // bytes charged at that moment
	Limit     int64  // bytes that may be charged in all
}

func (e *OutOfBudgetError) Error() string {
	name := "the budget"
	if e.Budget != "" {
		name = e.Budget
	}
	return fmt.Sprintf("%s has no room for %d bytes: %d of %d are in use, %d remain",
		name, e.Requested, e.Current, e.Limit, e.Remaining)
}

// Is matches ErrOutOfBudget and ErrNoSpace.
func (e *OutOfBudgetError) Is(target error) bool {
	return target == ErrOutOfBudget || target == ErrNoSpace
}

// LostError reports that a space's device is lost: nothing can be put there any more, and what was
// there cannot be read. It matches ErrLost, and what its cause matches. It is no NoSpaceError: no
// larger space would help.
type LostError struct {
	Space ID
	Bytes int64 // in use there at that moment, which are lost
	Cause error // what the device said
}

func (e *LostError) Error() string {
	return fmt.Sprintf("%s is lost, with the %d bytes in use there: %v (%s)",
		e.Space, e.Bytes, e.Cause, causes.Remedy(causes.GPULost))
}

// Unwrap returns ErrLost and the cause.
func (e *LostError) Unwrap() []error { return []error{ErrLost, e.Cause} }

// AlteredError reports that a file's contents are not what was written there: they were changed, or
// come from another place or time. Only memory that authenticates what it reads, because it is
// encrypted, can detect that. It matches ErrAltered.
type AlteredError struct {
	Volume string // the directory
	File   string // in it
	Offset int64  // in the file, where the bytes begin that do not fit together
	Length int64  // of those bytes
	Cause  error  // why that is known before they are read; nil if they were read
}

func (e *AlteredError) Error() string {
	s := fmt.Sprintf("disk: %d bytes at offset %d of %s in %s are not what was written there",
		e.Length, e.Offset, e.File, e.Volume)
	if e.Cause != nil {
		s += ": " + e.Cause.Error()
	}
	return s
}

// Unwrap returns ErrAltered and the cause.
func (e *AlteredError) Unwrap() []error { return []error{ErrAltered, e.Cause} }
