package reservation

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// Streams counts what is allocated on each stream of a device, and lets the
// allocations of a stream draw from a reservation that is attached to it. Several
// streams may share a reservation; a stream has at most one.
//
// Streams owns nothing: the owner of an attached reservation releases it, and a stream that was
// closed is forgotten with Forget. It is safe for concurrent use. Its lock is never held with another
// one of a reservation's rank.
type Streams struct {
	manager *Manager
	space   *tier.Space

	mu struct { // also guards the streams' fields
		lockrank.Mutex[lockrank.Reservation]
		streams map[tier.Stream]*stream // the nil stream has the sums of all, also of those that were forgotten
	}
}

// stream has the numbers of one stream.
type stream struct {
	current, peak int64
	attached      *Reservation
}

// NewStreams returns Streams of a GPU space of the manager.
func NewStreams(m *Manager, id tier.ID) (*Streams, error) {
	space, ok := m.Spaces().ByID(id)
	switch {
	case !ok:
		return nil, fmt.Errorf("reservation: streams of %s: %w", id, ErrNoCandidate)
	case !id.Kind.IsDevice():
		return nil, fmt.Errorf("reservation: %s has no streams: %w", id, tier.ErrNotSupported)
	}
	s := &Streams{manager: m, space: space}
	s.mu.streams = map[tier.Stream]*stream{nil: new(stream)}
	return s, nil
}

var errNoStream = errors.New("reservation: a stream is required")

// Attach makes allocations on a stream draw from r, which stays the caller's. A
// stream can have one only, even if that was released meanwhile. r must be of the Streams' own
// space and open.
func (s *Streams) Attach(on tier.Stream, r *Reservation) error {
	switch {
	case on == nil:
		return errNoStream
	case !r.IsOpen():
		return fmt.Errorf("reservation: attach: %w", tier.ErrReleased)
	case r.Space() != s.space:
		return fmt.Errorf("reservation: a reservation in %s cannot be attached to a stream of %s",
			r.Space().ID(), s.space.ID())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.streamLocked(on)
	if st.attached != nil {
		return fmt.Errorf("reservation: a stream of %s has a reservation already", s.space.ID())
	}
	st.attached = r
	return nil
}

// Detach ends what Attach began and returns the reservation, which the caller may
// release now; nil if there was none. Buffers that were drawn from it on the stream
// are counted until they are freed.
func (s *Streams) Detach(on tier.Stream) (r *Reservation) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if st := s.mu.streams[on]; st != nil {
		r, st.attached = st.attached, r
	}
	return r
}

// Forget drops the numbers of a stream that is not used any more, and the reservation that is
// attached to it. Its buffers stay in the total until they are freed.
func (s *Streams) Forget(on tier.Stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if on != nil {
		delete(s.mu.streams, on)
	}
}

// Alloc draws a buffer of size bytes from the reservation that is attached to the stream, as
// Reservation.Alloc does. Without one it takes the bytes from the space, if there is room that no
// waiter has a claim to; else it returns a tier.NoSpaceError. Like Reservation.Alloc it does not
// wait for releases. The caller must release the buffer, on any goroutine and after work on any
// stream: it is credited where it was charged.
func (s *Streams) Alloc(on tier.Stream, size int64) (*tier.Buffer, error) {
	if on == nil {
		return nil, errNoStream
	}
	s.mu.Lock()
	st := s.streamLocked(on)
	r := st.attached
	s.mu.Unlock()
	if r == nil {
		// The reservation ends at once, so that the bytes are the space's when the buffer is freed.
		var err error
		if r, err = s.manager.TryReserve(Specific(s.space.ID()), size, nil); err != nil {
			return nil, err
		}
		defer func() { _ = r.Release() }() // nobody else can have released it
	}
	b, err := r.Alloc(size)
	if b != nil {
		// The bytes are counted off before another request can have them. Otherwise a sum above the
		// capacity would be visible.
		b.OnReclaimed(func(n int64) { s.count(st, -n) })
		// They are counted only now, because a failed allocation is never visible. No goroutine can
		// free the buffer earlier.
		s.count(st, b.Charge())
	}
	return b, err
}

func (s *Streams) count(st *stream, n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, of := range []*stream{st, s.mu.streams[nil]} {
		of.current += n
		of.peak = max(of.peak, of.current)
	}
}

func (s *Streams) streamLocked(on tier.Stream) *stream {
	st := s.mu.streams[on]
	if st == nil {
		st = new(stream)
		s.mu.streams[on] = st
	}
	return st
}

// Usage returns how many bytes are allocated on a stream, as the space charges them, and the most
// that were; zeros for a stream without allocations. A nil stream is all of them together. A buffer
// counts until the device is done with it after its release. Each allocation and each free counts
// as one step, and peak is exact for the order in which they did.
func (s *Streams) Usage(on tier.Stream) (current, peak int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if st := s.mu.streams[on]; st != nil {
		return st.current, st.peak
	}
	return 0, 0
}
