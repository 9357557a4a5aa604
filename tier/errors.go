package tier

import (
	"errors"
	"fmt"
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
)

// NoSpaceError says that a space had no room for a request at that moment. It
// matches ErrNoSpace.
type NoSpaceError struct {
	Space     ID
	Requested int64  // bytes asked for
	Available int64  // bytes free under the space's limit at that moment
	Largest   int64  // largest free piece, where fragmentation was the reason; else 0
	Hint      string // the setting that would help; may be empty
	Cause     error  // what the backend or the file system said; may be nil
}

func (e *NoSpaceError) Error() string {
	s := fmt.Sprintf("%s has no space for %d bytes: %d available", e.Space, e.Requested, e.Available)
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

// Is matches ErrNoSpace.
func (e *NoSpaceError) Is(target error) bool { return target == ErrNoSpace }

// Unwrap returns the cause.
func (e *NoSpaceError) Unwrap() error { return e.Cause }
