package reservation

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/tier"
)

// Reservation is a promise of bytes in one space, from which Alloc draws buffers. The caller must
// release it once. It is safe for concurrent use, and buffers may be freed from any goroutine.
//
// It is a small value that may be copied and compared; copies are the same promise. The zero value
// is no reservation: it has no space, its Release does nothing, and its other methods return
// tier.ErrReleased.
//
// At any moment its bytes are either unused or drawn, that is charged to buffers:
//
//	unused ──Alloc──▶ drawn ──buffer freed──▶ unused, or free after Release
type Reservation struct{ state *state }

// state is what all copies of a Reservation share. The promise, whose bytes the space's books count,
// has a lock of its own; the rest is set before the reservation is open.
type state struct {
	manager  *Manager
	line     *line
	promise  books.Promise
	policy   LimitPolicy
	memory   *memoryHook // see WithOutOfMemory; may be nil
	origin   origin
	noClear  atomic.Bool // see WithoutClearing
	arriving int64       // its part of line.arriving

	size   func(*tier.Space) (bytes int64, release func()) // see Sized; may be nil
	resign func()                                          // ends what size was based on; may be nil
}

// IsZero reports whether r is the zero value, and so no reservation.
func (r Reservation) IsZero() bool { return r.state == nil }

// Space returns where the bytes are.
func (r Reservation) Space() *tier.Space {
	if r.state == nil {
		return nil
	}
	return r.state.line.space
}

// Bytes returns how many bytes are promised, in use or not; 0 after Release.
func (r Reservation) Bytes() int64 { return r.view().Promised }

// Unused returns how many of the promised bytes are in no buffer; 0 after
// Release.
func (r Reservation) Unused() int64 { return r.view().Unused }

// IsOpen reports whether r has not been released. The zero Reservation is not open.
func (r Reservation) IsOpen() bool {
	if r.state == nil {
		return false
	}
	_, open := r.state.promise.View()
	return open
}

// Owner returns the reservation's owner, nil if it has none.
func (r Reservation) Owner() *Owner {
	o, _ := r.view().Owner.(*Owner)
	return o
}

func (r Reservation) view() (v books.PromiseView) {
	if r.state != nil {
		v, _ = r.state.promise.View()
	}
	return v
}

// SetOwner sets the reservation's owner from now on, as WithOwner does when it is made. It is for
// requests that wait without an owner, such as those of a task that holds nothing until it is
// admitted. A reservation that has an owner, or was released, is an error.
func (r Reservation) SetOwner(o *Owner) error {
	switch {
	case !r.IsOpen():
		return errReleased("setting the owner")
	case o == nil:
		return nil
	case !r.state.promise.SetOwner(o):
		return errors.New("reservation: it has an owner already")
	}
	return nil
}

// Alloc draws a buffer of size bytes in one piece, which the caller must release. It takes
// Space.Charge(size) bytes. If fewer are unused, the policy (LimitPolicy) decides, and a refusal is
// an ExceededError. In a lost space the error is a tier.LostError. Alloc does not wait for
// releases. If the free room is in pieces, it calls Config.Clear, which may evict batches. If that
// is not enough, it returns a tier.NoSpaceError with the length of the largest piece. After an
// error the reservation is as it was. A size of 0 gives a nil buffer.
func (r Reservation) Alloc(size int64) (*tier.Buffer, error) { return r.AllocCuts(size, nil) }

// AllocCuts is Alloc for memory that may be split at cuts: ascending multiples
// of tier.Page below size. Only host and disk memory is ever split.
func (r Reservation) AllocCuts(size int64, cuts []int64) (*tier.Buffer, error) {
	return r.AllocCounted(size, cuts, nil)
}

// AllocCounted is AllocCuts, and calls reclaimed with the charge of the buffer just before its bytes
// are credited. reclaimed may be nil; it must be quick and must not block.
func (r Reservation) AllocCounted(size int64, cuts []int64, reclaimed func(n int64)) (*tier.Buffer, error) {
	s := r.state
	if s == nil {
		return nil, errReleased("alloc")
	}
	b, err := s.tryAlloc(size, cuts, reclaimed)
	if err != nil {
		return r.allocAgain(err, size, func() (*tier.Buffer, error) { return s.tryAlloc(size, cuts, reclaimed) })
	}
	return b, nil
}

// allocAgain does what may help an allocation that has failed with err, and tries again: it has batches
// evicted where the free room is in pieces, and then asks the out-of-memory hook.
func (r Reservation) allocAgain(err error, size int64, try func() (*tier.Buffer, error)) (b *tier.Buffer, _ error) {
	s, space := r.state, r.state.line.space
	if clear := s.manager.config.Clear; clear != nil && inPieces(err) && !s.noClear.Load() {
		lockrank.AssertNone("batches are evicted for contiguous room")
		clear(space.ID(), func() bool {
			if err != nil { // also if it is called once more than it should be
				b, err = try()
			}
			return !inPieces(err) || s.noClear.Load()
		})
	}
	if s.memory == nil || size > space.Capacity() || !errors.Is(err, ErrExceeded) && !errors.Is(err, tier.ErrNoSpace) {
		return b, err
	}
	requested := space.Charge(size)
	again, panicked := s.memory.ask(r, requested, err)
	switch {
	case panicked != nil:
		return nil, errors.Join(err, panicked)
	case !again:
		return nil, err
	}
	b, second := try()
	if second != nil {
		return nil, fmt.Errorf("%s: out of memory for %d bytes, also after its hook asked for another try: %w; "+
			"before that: %w", space.ID(), requested, second, err)
	}
	return b, nil
}

// inPieces reports whether an allocation failed because what is free is in pieces.
func inPieces(err error) bool {
	full, ok := errors.AsType[*tier.NoSpaceError](err)
	return ok && full.Largest > 0
}

// StopClearing does for r from now on what WithoutClearing does for a new reservation. A call of
// Config.Clear in progress ends at the next call of its function enough.
func (r Reservation) StopClearing() {
	if r.state != nil {
		r.state.noClear.Store(true)
	}
}

func (s *state) tryAlloc(size int64, cuts []int64, reclaimed func(n int64)) (*tier.Buffer, error) {
	space := s.line.space
	if size < 0 {
		return nil, fmt.Errorf("reservation: %s: cannot allocate %d bytes", space.ID(), size)
	}
	n := charge(space, size)
	if n == neverFits {
		return nil, s.line.exceeded(size)
	}
	grown, err := s.draw(n)
	if err != nil || size == 0 {
		return nil, err
	}
	b, err := space.Draw(&s.promise, size, cuts, reclaimed)
	if err != nil {
		space.Freed(s.promise.Resize(-grown).Freed)
		return nil, err
	}
	if grown > 0 {
		s.changed()
	}
	return b, nil
}

// Promote is Alloc of the memory of a clean image in r's space, which the caller has taken. After
// an error it still is a clean image, and the caller must release it.
func (r Reservation) Promote(c *tier.Clean) error {
	s := r.state
	if s == nil {
		return errReleased("promote")
	}
	grown, err := s.draw(c.Bytes())
	if err != nil {
		return err
	}
	s.line.space.Promote(c, &s.promise)
	if grown > 0 {
		s.changed()
	}
	return nil
}

// draw turns n unused bytes into live ones by Promise.Draw. If fewer are unused, it reserves the rest
// where the policy allows that. It returns by how much the promise grew.
func (s *state) draw(n int64) (grown int64, err error) {
	space, increases := s.line.space, s.policy.kind == policyIncrease
	var extra int64 // reserved beyond what was unused
	for {
		v, _ := s.promise.View()
		out := s.promise.Draw(n, extra, increases)
		if !out.Released && out.Short == 0 {
			space.Freed(out.Freed)
			if increases {
				grown = extra
			}
			return grown, nil
		}
		asks := []int64{out.Short}
		switch {
		case out.Released || s.policy.kind == policyFail:
			asks = nil
		case increases:
			asks = []int64{size.Times(s.policy.padding, out.Short), out.Short}
		}
		more, cause := int64(0), error(nil)
		for i := 0; i < len(asks) && more == 0; i++ {
			w := request{grows: s, candidates: []candidate{{line: s.line, need: asks[i], asked: asks[i]}}}
			var ok bool
			if ok, cause = s.manager.takeIn(&w, &w.candidates[0]); ok {
				more = asks[i]
			} else if cause == nil {
				cause = w.noRoom()
			}
		}
		if more > 0 {
			extra += more
			continue
		}
		if extra > 0 {
			space.Books().Unreserve(extra)
			space.Freed(extra)
		}
		if out.Released {
			return 0, errReleased("alloc")
		}
		hint := "reserve more, or with the policy Increase or Ignore"
		if s.policy.kind != policyFail {
			hint = "reserve more from the start, or free some of it"
		}
		return 0, &ExceededError{
			Space: space.ID(), Requested: n, Available: v.Unused, Limit: v.Promised, Hint: hint, Cause: cause,
		}
	}
}

// Shrink gives n unused bytes back. More than are unused is an ExceededError
// and changes nothing.
func (r Reservation) Shrink(n int64) error {
	s := r.state
	if s == nil {
		return errReleased("shrink")
	}
	space := s.line.space
	if n < 0 {
		return fmt.Errorf("reservation: %s: cannot shrink by %d bytes", space.ID(), n)
	}
	v := r.view()
	switch out := s.promise.Resize(-n); {
	case out.Released:
		return errReleased("shrink")
	case out.Short > 0:
		return &ExceededError{
			Space: space.ID(), Requested: n, Available: n - out.Short, Limit: v.Promised,
			Hint: "only what is in no buffer can be given back",
		}
	}
	space.Freed(n)
	s.changed()
	return nil
}

// Release gives the promise up: what is unused returns to the space at once,
// and what is in buffers when they are freed. Grow calls that wait end with
// tier.ErrReleased. A second release, also of a copy, changes nothing and returns
// tier.ErrReleased (an invariants build panics with the stack that took the
// reservation). Release of the zero Reservation does nothing.
func (r Reservation) Release() error {
	s := r.state
	if s == nil {
		return nil
	}
	out := s.promise.Release()
	if out.Released {
		if invariants.Enabled {
			stack := r.view().Stack
			panic("reservation: released twice; it was taken at\n" + stack.String())
		}
		return tier.ErrReleased
	}
	if s.arriving > 0 {
		s.line.arriving.Add(-s.arriving)
	}
	s.line.space.Freed(out.Freed)
	s.changed()
	if s.resign != nil {
		s.resign()
	}
	return nil
}

func errReleased(op string) error { return fmt.Errorf("reservation: %s: %w", op, tier.ErrReleased) }
