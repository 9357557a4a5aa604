package waitline

import (
	"context"
	"sync/atomic"
)

// door lets requests pass that do not wait, or not as long as the head of a line, up to a bound.
// Its state is 0 while the line is empty. Otherwise the upper half is the head's number, and the
// lower half the passes that are left. It is atomic, so that passing takes no lock.
type door struct{ state atomic.Uint64 }

// Door is a door's state at one moment.
type Door uint64

// Open reports that the line is empty.
func (d Door) Open() bool { return d == 0 }

// Shut says that no passes are left: what there is, is the head's.
func (d Door) Shut() bool { return d != 0 && d.Passes() == 0 }

// Passes returns how many may pass the head still; 0 if there is no head.
func (d Door) Passes() uint32 { return uint32(d) }

// Door returns the state of the line's door. It takes no lock.
func (l *door) Door() Door { return Door(l.state.Load()) }

// Pass takes a pass from a door that is neither open nor shut. It returns false if the state is
// not d any more. It takes no lock.
func (l *door) Pass(d Door) bool { return l.state.CompareAndSwap(uint64(d), uint64(d-1)) }

// GiveBack gives back a pass, unused, that was taken from d; none of an open door. It returns
// true if the door was shut meanwhile: to a waiter that could have been served. It takes no lock.
func (l *door) GiveBack(d Door) bool {
	for {
		now := l.Door()
		if d.Open() || now>>32 != d>>32 {
			return false // another head has passes of its own
		}
		if l.state.CompareAndSwap(uint64(now), uint64(now+1)) {
			return now.Shut()
		}
	}
}

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
