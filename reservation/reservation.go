package reservation

import (
	"cmp"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/tier"
)

// Reservation is a promise of bytes in one space, from which Alloc draws buffers. The caller must
// release it once. It is safe for concurrent use, and buffers may be freed from any goroutine.
//
// A nil Reservation has no space and no bytes. Its Release does nothing, and its other methods return
// tier.ErrReleased.
//
// At any moment its bytes are either unused or drawn, that is charged to buffers:
//
//	unused ──Alloc──▶ drawn ──buffer freed──▶ unused, or free after Release
//
// The space's books guard the promise, whose bytes they count. All else, but for noClearing, is set
// before the reservation is open.
type Reservation struct {
	manager    *Manager
	line       *line
	promise    books.Promise
	padding    float64 // of the policy Increase
	policy     policyKind
	purpose    Purpose
	noClearing atomic.Bool // Options.NoClearing, or after StopClearing
	memory     *memoryHook // nil without Options.OutOfMemory
	arriving   int64       // its part of line.arriving
	headroom   int64       // how many bytes it has left free
	sized      func(s *tier.Space) (bytes int64, release func())
	resign     func() // ends what Options.Sized was based on; may be nil
}

// memoryHook is Options.OutOfMemory of one reservation.
type memoryHook struct {
	call   func(r *Reservation, requested int64, err error) (again bool)
	inside sync.Map // numbers of the goroutines that run it
}

// Space returns where the bytes are.
func (r *Reservation) Space() *tier.Space {
	if r == nil {
		return nil
	}
	return r.line.space
}

// Bytes returns how many bytes are promised, in use or not; 0 after Release.
func (r *Reservation) Bytes() int64 { return r.view().Promised }

// Unused returns how many of the promised bytes are in no buffer; 0 after
// Release.
func (r *Reservation) Unused() int64 { return r.view().Unused }

// IsOpen reports whether r has not been released. A nil Reservation is not open.
func (r *Reservation) IsOpen() bool { return r.view().Open }

// Owner returns the reservation's owner, nil if it has none.
func (r *Reservation) Owner() *Owner {
	o, _ := r.view().Owner.(*Owner)
	return o
}

func (r *Reservation) view() (v books.PromiseView) {
	if r != nil {
		v = r.promise.View()
	}
	return v
}

// SetOwner sets the reservation's owner from now on, as Options.Owner does when it is made. It is for
// requests that wait without an owner, such as those of a task that holds nothing until it is
// admitted. A reservation that has an owner, or was released, is an error.
func (r *Reservation) SetOwner(o *Owner) error {
	switch {
	case !r.IsOpen():
		return errReleased("setting the owner")
	case o == nil:
		return nil
	case !r.promise.SetOwner(o):
		return errors.New("reservation: it has an owner already")
	}
	return nil
}

// Alloc draws a buffer of size bytes, which the caller must release. It is in one piece, or may be
// split at cuts: ascending multiples of tier.Page below size. Only host and disk memory is ever split.
//
// It takes Space.Charge(size) bytes. If fewer are unused, the policy (LimitPolicy) decides, and a
// refusal is an ExceededError. In a lost space the error is a tier.LostError. Alloc does not wait for
// releases. If the free room is in pieces, it calls Config.Clear, which may evict batches. If that
// is not enough, it returns a tier.NoSpaceError with the length of the largest piece. After an
// error the reservation is as it was. A size of 0 gives a nil buffer.
func (r *Reservation) Alloc(size int64, cuts ...int64) (*tier.Buffer, error) {
	if r == nil {
		return nil, errReleased("alloc")
	}
	b, err := r.tryAlloc(size, cuts)
	if err == nil {
		return b, nil
	}
	space, first := r.line.space, err
	if clear := r.manager.config.Clear; clear != nil && inPieces(first) && !r.noClearing.Load() {
		lockrank.AssertNone("batches are evicted for contiguous room")
		var b *tier.Buffer
		clear(space.ID(), func() bool {
			if first != nil { // also if it is called once more than it should be
				b, first = r.tryAlloc(size, cuts)
			}
			return !inPieces(first) || r.noClearing.Load()
		})
		if first == nil {
			return b, nil
		}
	}
	if r.memory == nil || size > space.Capacity ||
		!errors.Is(first, ErrExceeded) && !errors.Is(first, tier.ErrNoSpace) {
		return nil, first
	}
	requested := space.Charge(size)
	again, panicked := r.askForMemory(requested, first)
	switch {
	case panicked != nil:
		return nil, errors.Join(first, panicked)
	case !again:
		return nil, first
	}
	if b, err = r.tryAlloc(size, cuts); err != nil {
		return nil, fmt.Errorf("%s: out of memory for %d bytes, also after its hook asked for another try: %w; "+
			"before that: %w", space.ID(), requested, err, first)
	}
	return b, nil
}

// askForMemory calls Options.OutOfMemory, unless this goroutine is in it already.
func (r *Reservation) askForMemory(requested int64, first error) (again bool, err error) {
	lockrank.AssertNone("an out-of-memory hook is called")
	id := lockrank.GoroutineID()
	if _, inside := r.memory.inside.LoadOrStore(id, struct{}{}); inside {
		return false, nil
	}
	defer r.memory.inside.Delete(id)
	defer guard.Error(&err, "an out-of-memory hook")
	return r.memory.call(r, requested, first), nil
}

// inPieces reports whether an allocation failed because what is free is in pieces.
func inPieces(err error) bool {
	full, ok := errors.AsType[*tier.NoSpaceError](err)
	return ok && full.Largest > 0
}

// StopClearing does for r from now on what Options.NoClearing does for a new reservation. A call of
// Config.Clear in progress ends at the next call of its function enough.
func (r *Reservation) StopClearing() {
	if r != nil {
		r.noClearing.Store(true)
	}
}

func (r *Reservation) tryAlloc(size int64, cuts []int64) (*tier.Buffer, error) {
	space := r.line.space
	if size < 0 {
		return nil, fmt.Errorf("reservation: %s: cannot allocate %d bytes", space.ID(), size)
	}
	n := charge(space, size)
	if n == neverFits {
		return nil, r.line.exceeded(size)
	}
	grown, err := r.draw(n)
	if err != nil || size == 0 {
		return nil, err
	}
	b, err := space.Draw(&r.promise, size, cuts)
	if err != nil {
		space.NotifyFreed(r.promise.Resize(-grown).Freed)
		return nil, err
	}
	if grown > 0 {
		r.changed()
	}
	return b, nil
}

// Promote is Alloc of the memory of a clean image in r's space, which the caller has taken. After
// an error it still is a clean image, and the caller must release it.
func (r *Reservation) Promote(c *tier.Clean) error {
	if r == nil {
		return errReleased("promote")
	}
	grown, err := r.draw(c.Bytes())
	if err != nil {
		return err
	}
	r.line.space.Promote(c, &r.promise)
	if grown > 0 {
		r.changed()
	}
	return nil
}

// draw turns n unused bytes into live ones by Promise.Draw. If fewer are unused, it reserves the rest
// where the policy allows that. It returns by how much the promise grew.
func (r *Reservation) draw(n int64) (grown int64, err error) {
	space, increases := r.line.space, r.policy == policyIncrease
	var extra int64 // reserved beyond what was unused
	for {
		v := r.promise.View()
		out := r.promise.Draw(n, extra, increases)
		if !out.Released && out.Short == 0 {
			space.NotifyFreed(out.Freed)
			if increases {
				grown = extra
			}
			return grown, nil
		}
		asks := []int64{out.Short}
		switch {
		case out.Released || r.policy == policyFail:
			asks = nil
		case increases:
			asks = []int64{size.Times(r.padding, out.Short), out.Short}
		}
		var more int64
		var cause error
		for _, ask := range asks {
			w := request{grows: r, candidates: []candidate{{line: r.line, need: ask, asked: ask}}}
			var ok bool
			if ok, cause = r.manager.takeIn(&w, &w.candidates[0]); ok {
				more = ask
				break
			}
			cause = cmp.Or[error](cause, w.candidates[0].refusal(nil))
		}
		if more > 0 {
			extra += more
			continue
		}
		if extra > 0 {
			space.Books.Unreserve(extra)
			space.NotifyFreed(extra)
		}
		if out.Released {
			return 0, errReleased("alloc")
		}
		hint := "reserve more, or with the policy Increase or Ignore"
		if r.policy != policyFail {
			hint = "reserve more from the start, or free some of it"
		}
		return 0, &ExceededError{
			Space: space.ID(), Requested: n, Available: v.Unused, Limit: v.Promised, Hint: hint, Cause: cause,
		}
	}
}

// Shrink gives n unused bytes back. More than are unused is an ExceededError
// and changes nothing.
func (r *Reservation) Shrink(n int64) error {
	if r == nil {
		return errReleased("shrink")
	}
	space := r.line.space
	if n < 0 {
		return fmt.Errorf("reservation: %s: cannot shrink by %d bytes", space.ID(), n)
	}
	promised := r.Bytes()
	switch out := r.promise.Resize(-n); {
	case out.Released:
		return errReleased("shrink")
	case out.Short > 0:
		return &ExceededError{
			Space: space.ID(), Requested: n, Available: n - out.Short, Limit: promised,
			Hint: "only what is in no buffer can be given back",
		}
	}
	space.NotifyFreed(n)
	r.changed()
	return nil
}

// Release gives the promise up: what is unused returns to the space at once,
// and what is in buffers when they are freed. Grow calls that wait end with
// tier.ErrReleased. A second release changes nothing and returns tier.ErrReleased (an invariants
// build panics with the stack that took the reservation). Release of a nil Reservation does nothing.
func (r *Reservation) Release() error {
	if r == nil {
		return nil
	}
	out := r.promise.Release()
	if out.Released {
		if invariants.Enabled {
			stack := r.view().Stack
			panic("reservation: released twice; it was taken at\n" + stack.String())
		}
		return tier.ErrReleased
	}
	if r.arriving > 0 {
		r.line.arriving.Add(-r.arriving)
	}
	r.line.space.NotifyFreed(out.Freed)
	r.changed()
	if r.resign != nil {
		r.resign()
	}
	return nil
}

func errReleased(op string) error { return fmt.Errorf("reservation: %s: %w", op, tier.ErrReleased) }
