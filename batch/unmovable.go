package batch

import (
	"errors"
	"fmt"
)

// ErrUnmovable is matched by every UnmovableError.
var ErrUnmovable = errors.New("batch: it cannot be converted")

// UnmovableError says that a batch could not be given another form for a reason that is its
// own: no converter takes its form, its bytes are corrupt, or a converter refused it or
// panicked. The batch is as it was, and other batches can still be moved between the same
// spaces. It matches ErrUnmovable, and what Err matches.
type UnmovableError struct {
	Batch ID // 0 where it is not known
	Err   error
}

func (e *UnmovableError) Error() string {
	if e.Batch == 0 {
		return e.Err.Error()
	}
	return fmt.Sprintf("batch %d cannot be converted: %v", e.Batch, e.Err)
}

// Is matches ErrUnmovable.
func (e *UnmovableError) Is(target error) bool { return target == ErrUnmovable }

// Unwrap returns Err.
func (e *UnmovableError) Unwrap() error { return e.Err }
