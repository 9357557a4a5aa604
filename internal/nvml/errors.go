package nvml

import "fmt"

// Code is a result of the library, by its numbers, and an error that *Error matches.
type Code int32

// The codes that somebody may want to tell apart.
const (
	success             Code = 0
	ErrInvalidArgument  Code = 2
	ErrNotSupported     Code = 3
	ErrNotFound         Code = 6
	ErrInsufficientSize Code = 7
	ErrDriverNotLoaded  Code = 9
	ErrFunctionNotFound Code = 13
)

func (c Code) Error() string { return fmt.Sprintf("NVML result %d", int32(c)) }

// Error is a call that the library refused. It matches its Code.
type Error struct {
	Call string // the library's function
	Code Code
	Text string // what the library says of the code; may be empty
}

func (e *Error) Error() string {
	if e.Text == "" {
		return fmt.Sprintf("%s: %v", e.Call, e.Code)
	}
	return fmt.Sprintf("%s: %s (%d)", e.Call, e.Text, int32(e.Code))
}

// Is matches the code.
func (e *Error) Is(target error) bool { return target == e.Code }
