package reservation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/spillway-db/spillway/internal/fairqueue"
	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/tier"
)

// Sentinels, for errors.Is. A space that has no room now is tier.ErrNoSpace, one whose device has
// failed for good tier.ErrLost, a reservation that was given up is tier.ErrReleased, and a manager
// that was closed is tier.ErrClosed.
var (
	// ErrExceeded: a request can never fit, or a promise is used up.
	ErrExceeded = errors.New("limit exceeded")
	// ErrDeadlock: waiters wait for each other.
	ErrDeadlock = errors.New("deadlock")
	// ErrNoCandidate: a strategy named no space that the manager has.
	ErrNoCandidate = errors.New("no candidate space")
)

// ExceededError reports that a request is larger than it may ever be: larger than a space's limit,
// so that waiting would be useless, or larger than the rest of a reservation whose policy does not
// let it grow. It matches ErrExceeded and the errors that its cause matches.
type ExceededError struct {
	Space     tier.ID
	Requested int64  // bytes asked for, rounded up as the space charges them; math.MaxInt64 if the sum overflows
	Available int64  // bytes free in the space, or unused in the reservation
	Limit     int64  // bytes that the space's limit allows, or that were promised
	Hint      string // what would help
	Cause     error  // why the promise could not be made larger; may be nil
}

func (e *ExceededError) Error() string {
	s := fmt.Sprintf("%s: %s exceed what may be had: %d available of %d",
		e.Space, size.Saturated(e.Requested), e.Available, e.Limit)
	if e.Cause != nil {
		s += ": " + e.Cause.Error()
	}
	if e.Hint != "" {
		s += " (" + e.Hint + ")"
	}
	return s
}

// Unwrap returns ErrExceeded and the cause, if there is one.
func (e *ExceededError) Unwrap() []error { return []error{ErrExceeded, e.Cause} }

// DeadlockError reports that a request waited for bytes that nobody is left to free: all that hold
// them wait themselves, or have no owner and did nothing for Still. It matches ErrDeadlock. Nothing
// was reserved, and what the owner holds is still its own. It should release what it holds, so that
// the others can go on, wait for them (Wait), and begin again.
type DeadlockError struct {
	Space     tier.ID // the first that was waited for
	Requested int64   // bytes asked for there, rounded up as the space charges them
	Available int64   // bytes free there
	Owner     string  // its name; "" if the wait had no owner
	Held      int64   // bytes that the owner's reservations, handles and records keep where it is waited for
	Waiters   int     // how many waits are stuck, this one included
	Hint      string  // the setting that would help; may be empty
	// Still is how long nothing had changed; 0 if all that hold something are owners that wait.
	Still time.Duration

	Holdings tier.Holdings // what is held in Space, and by whom
	// Passed names the memory that was asked for and gave too little back in time: see Reclaimer.
	Passed []string

	others <-chan struct{} // closed when one of the others has gone on; nil if there are none
}

// Wait waits until another of the stuck waits has gone on, or has failed, or ctx ends. Call it
// after everything was given back and before beginning again. A caller that returns before the
// freed room is taken would take it, and meet the others again. If there are no others it returns
// at once.
func (e *DeadlockError) Wait(ctx context.Context) error {
	if e.others == nil {
		return nil
	}
	select {
	case <-e.others:
		return nil
	case <-ctx.Done():
		return ended(ctx, "waiting for others to go on")
	}
}

func (e *DeadlockError) Error() string {
	who := fmt.Sprintf("all %d waiters wait for each other", e.Waiters)
	switch {
	case e.Still > 0:
		who = fmt.Sprintf("nothing has changed for %v (%d wait)", e.Still.Round(100*time.Millisecond), e.Waiters)
	case e.Waiters == 1:
		who = "nothing else can make room"
	}
	s := fmt.Sprintf("%s has no space for %d bytes: %d available, and %s: ", e.Space, e.Requested, e.Available, who)
	switch {
	case e.Held == 0 && e.Owner == "":
		s += "close the handles and release the reservations and records that you hold, and begin again"
	case e.Held == 0:
		s += fmt.Sprintf("%s, which holds nothing, should begin again when others have gone on", named.Quoted(e.Owner))
	case e.Owner == "":
		s += fmt.Sprintf("release the %d bytes that you hold and begin again", e.Held)
	default:
		s += fmt.Sprintf("%s should release the %d bytes that it holds and begin again", named.Quoted(e.Owner), e.Held)
	}
	if len(e.Holdings.Holders) > 0 {
		s += "; " + e.Holdings.String()
	}
	s += notGiven(e.Passed)
	if e.Hint != "" {
		s += " (" + e.Hint + ")"
	}
	return s
}

// Is matches ErrDeadlock.
func (e *DeadlockError) Is(target error) bool { return target == ErrDeadlock }

// ended is the error of a wait that its context has ended.
func ended(ctx context.Context, what string) error {
	return fairqueue.Ended(ctx, "reservation: "+what)
}

// notGiven lists memory that gave too little back in time.
func notGiven(passed []string) (s string) {
	for _, name := range passed {
		s += "; too little was given back in time by " + name
	}
	return s
}

// lever returns advice on how to make room in a space, by the largest part of what is held there,
// with the hint of the space.
func lever(h tier.Holdings, hint string) string {
	sum := func(all []tier.Holder) (n int64) {
		for _, one := range all {
			n += one.Bytes
		}
		return n
	}
	text, most := "", int64(-1)
	for _, part := range [...]struct {
		bytes int64
		helps string
	}{
		{sum(h.Holders), "close handles, and release records, buffers and reservations there"},
		{sum(h.Batches), "use up or drop batches, or give the slower memories more room for them"},
		{h.Others, "try again when what is being moved has arrived"},
		{h.Retired, "try again when the device has ended the work that may still read what was freed"},
		{h.Engine, "give the space more memory than the engine's own needs"},
		{h.External, "end what else holds memory of the device, such as other programs"},
	} {
		if part.bytes > most {
			text, most = part.helps, part.bytes
		}
	}
	if hint != "" {
		text += "; " + hint
	}
	return text
}

// errKept is the cause of a refusal while there is room.
var errKept = errors.New("what is free is kept for an older request")

// errHeadroom is the cause where what is free is less than the request and its headroom.
var errHeadroom = errors.New("what is free is kept for batches that consumers bring there")

func closedError() error { return fmt.Errorf("reservation: the manager is %w", tier.ErrClosed) }

// exceeded returns the error of a request that can never fit in l: an *ExceededError, or a
// *tier.LostError.
func (l *line) exceeded(bytes int64) error {
	if err := l.space.Lost(); err != nil {
		return err
	}
	return &ExceededError{
		Space:     l.space.ID(),
		Requested: bytes,
		Available: l.space.State().Available,
		Limit:     l.space.State().Room,
		Hint:      l.space.Hint,
	}
}

// exceeded is the error of a request that fits no candidate even when empty. It is about c, or, if that
// is nil, about the candidate with the highest limit. It includes the bytes that a reservation which
// grows already has.
func (w *request) exceeded(c *candidate) error {
	if c == nil {
		best := slices.MaxFunc(w.candidates, func(a, b candidate) int {
			return cmp.Compare(a.line.space.State().Room, b.line.space.State().Room)
		})
		c = &best
	}
	n := c.need
	if n == neverFits {
		n = c.asked
	}
	if w.grows != nil {
		n += min(w.grows.Bytes(), math.MaxInt64-n)
	}
	return c.line.exceeded(n)
}

// noRoom returns the error of a request that does not fit now. It is about the first candidate in
// which it would fit if that were empty; if there is none, it is that of exceeded.
func (w *request) noRoom() error {
	for i := range w.candidates {
		if c := &w.candidates[i]; w.fits(c, c.line.space.State().Room) {
			return c.refusal(nil)
		}
	}
	return w.exceeded(nil)
}

// refusal returns the error of a request that its space refuses. Without a cause it is the line that
// keeps the room for older requests or as headroom, if there is some.
func (c *candidate) refusal(cause error) *tier.NoSpaceError {
	sp, now := c.line.space, c.line.space.State()
	switch {
	case cause != nil:
	case now.Available >= c.need+c.leavesFree(&now):
		cause = errKept
	case now.Available >= c.need:
		cause = errHeadroom
	}
	return &tier.NoSpaceError{
		Space:     sp.ID(),
		Requested: c.need,
		Available: now.Available,
		Hint:      sp.Hint,
		Cause:     cause,
	}
}
