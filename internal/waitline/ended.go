package waitline

import "context"

// Ended returns the error of a wait that ctx has ended: what, and the cause. It matches the
// cause and the context's error.
func Ended(ctx context.Context, what string) error {
	return &ended{what, ctx.Err(), context.Cause(ctx)}
}

type ended struct {
	what       string
	err, cause error
}

func (e *ended) Error() string   { return e.what + ": " + e.cause.Error() }
func (e *ended) Unwrap() []error { return []error{e.cause, e.err} }
