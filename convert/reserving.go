package convert

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// footprint is the room that a payload needs. It depends on the space (see in), because
// dictionaries that the space already has need none.
type footprint struct {
	body  int64                  // bytes of the image's body
	dicts []*transfer.Dictionary // the shared dictionaries, each once
}

// footprint returns the room that a payload of a descriptor needs in another space. A program's own
// payload has no descriptor, and needs as many bytes as it is charged now.
func (m *Mover) footprint(desc *batch.Descriptor, charged int64) footprint {
	if desc == nil {
		return footprint{body: charged}
	}
	return footprint{body: desc.Body, dicts: m.cfg.Builtin.Dicts.Of(desc.AllDictionaries())}
}

// in returns how many bytes to reserve in a space.
func (t *footprint) in(s *tier.Space) int64 {
	if len(t.dicts) == 0 {
		return t.body
	}
	return s.Charge(t.body) + t.dicts[0].Store.Missing(s, t.dicts)
}

// sized is a strategy with a size of its own in each space: a reservation.Sized.
type sized struct {
	reservation.Strategy
	what *footprint
}

// BytesIn implements reservation.Sized.
func (s sized) BytesIn(space *tier.Space, _ int64) int64 { return s.what.in(space) }

// errGone means that a reservation is too small: a shared dictionary, which was in the target when
// the room was reserved, was freed there since. The caller reserves again.
var errGone = errors.New("convert: a dictionary left the space")

// pin takes a reference to each dictionary that r's space already has, for a caller that allocates a
// body and the missing dictionaries from r and then calls unpin. If r is too small for the missing
// ones, the error is errGone. The references must not be held during a wait for room: they would keep
// room in use that the waiter needs.
func (m *Mover) pin(r reservation.Reservation, what *footprint) (unpin func(), err error) {
	pins, missing := m.cfg.Builtin.Dicts.Pin(r.Space(), what.dicts)
	unpin = func() { _ = transfer.ReleaseAll(pins) } // each once
	if r.Unused() < r.Space().Charge(what.body)+missing {
		unpin()
		return nil, errGone
	}
	return unpin, nil
}

// request is a request for room in a space of a strategy, for a record that is laid out, or for a
// batch that is moved, copied or opened. Its caller makes attempts until end returns false:
//
//	r, err := q.reserve(ctx)
//	if err == nil {
//		err = … // draws from r
//	}
//	again, err := q.end(err)
//
// A space may refuse the memory that it has promised (see refuses). Then the next attempts are in
// the other spaces. A request is a strategy itself: the caller's, without the spaces that have
// refused. One goroutine uses a request. It must defer end, for the case of a panic.
type request struct {
	reservation.Strategy // the caller's
	m                    *Mover
	what                 footprint          // how much room
	origin               reservation.Option // leaves headroom free, or may use it: Incoming, Consuming, …
	waits                bool               // for room

	// A wait ends with errStale when source is lost, b is dropped, or useless returns true for b. See
	// watch.
	source  *tier.Space
	b       *batch.Batch
	useless func(now batch.Info) bool

	r    reservation.Reservation // of the present attempt; zero between attempts
	free int64                   // in its space when the attempt began, r included
	seen uint64                  // tier.Space.CopyChanges then
	stop func() bool             // ends the watch that keeps r from evicting more when the context ends

	attempts
}

// attempts is what the failed attempts of a request have shown.
type attempts struct {
	without []*tier.Space // these spaces are not tried any more
	refusal error         // the last error of a space that refused its memory
	dropped int64         // how many bytes of clean images were last dropped for the request
	// pieces is a space where the room is free, but not in one piece, although batches were evicted
	// for that (reservation.Config.Clear). When the other spaces have no room, a request that waits
	// waits there until enough bytes are free: more than at the last attempt, so that memory must have
	// been freed. The wait is demand, for which the monitor evicts more batches.
	pieces *tier.Space
	enough int64
}

// Candidates implements reservation.Strategy.
func (q *request) Candidates(all *reservation.Spaces, dst []*tier.Space) []*tier.Space {
	n := len(dst)
	dst = q.Strategy.Candidates(all, dst)
	left := slices.DeleteFunc(dst[n:], func(s *tier.Space) bool { return slices.Contains(q.without, s) })
	return dst[:n+len(left)]
}

// reserve begins an attempt: it reserves room in one of the spaces that are left. If none has room
// now, it waits. A request that does not wait drops clean images that keep shared dictionaries in
// use; for waiters the monitor does that.
//
// Only allocations of requests that wait may evict batches for contiguous room. The others are
// for moves that make room, or that take only room that nobody needs.
func (q *request) reserve(ctx context.Context) (r reservation.Reservation, err error) {
	if q.waits && ctx.Err() != nil {
		return r, context.Cause(ctx)
	}
	to, manager := q.Strategy, q.m.cfg.Reservations
	if len(q.without) > 0 {
		to = q
	}
	if len(q.what.dicts) > 0 { // else as many bytes in every space
		to = sized{to, &q.what}
	}
	options := []reservation.Option{reservation.Moving(), q.origin}
	if !q.waits {
		options = append(options, reservation.WithoutClearing())
	}
	r, err = manager.TryReserve(to, q.what.body, options...)
	switch full := errors.Is(err, tier.ErrNoSpace); {
	case full && !q.waits:
		for _, s := range to.Candidates(manager.Spaces(), nil) {
			before, need := s.Used(), q.what.in(s)
			if s.DropSharing(need - s.Available()); s.Used() < before && s.Available() >= need {
				r, err = manager.TryReserve(to, q.what.body, options...)
				break
			}
		}
	case full, err != nil && q.pieces != nil:
		ctx, done := watch(ctx, q.source, q.b, q.useless)
		defer done()
		if q.pieces == nil {
			r, err = manager.Reserve(ctx, to, q.what.body, options...)
			break
		}
		need, id := q.pieces.Charge(q.what.in(q.pieces)), q.pieces.ID()
		enough := max(need, min(q.enough, wholePages(q.pieces.Room())))
		if r, err = manager.Reserve(ctx, reservation.Specific(id), enough, options...); err == nil {
			_ = r.Shrink(r.Bytes() - need) // nobody else has it
		}
	}
	switch {
	case err == nil:
		q.r, q.free, q.seen = r, r.Bytes()+r.Space().Available(), r.Space().CopyChanges()
		q.stop = context.AfterFunc(ctx, func() {
			labels.Cancel.Set()
			r.StopClearing()
		})
	case q.refusal == nil:
	case errors.Is(err, reservation.ErrNoCandidate): // no space is left
		err = q.refusal
	default:
		err = fmt.Errorf("%w (before that: %w)", err, q.refusal)
	}
	return r, err
}

func wholePages(n int64) int64 { return n / tier.Page * tier.Page }

// end ends an attempt, which has failed if err is not nil, and releases its room. It reports whether
// another attempt may succeed, because the space was lost, a dictionary left it, or it refused its
// memory and clean images were dropped or other spaces are left. It returns the error of the attempt.
func (q *request) end(err error) (again bool, _ error) {
	if q.r.IsZero() { // reserve has failed
		// While the request waited for enough room in pieces, the space may have been lost, and others may
		// have room. Or its limit may have fallen, and the space may still hold what the request needs.
		again = q.pieces != nil && (q.pieces.Lost() != nil || errors.Is(err, reservation.ErrExceeded))
		if again {
			q.attempts = attempts{}
		}
		return again, err
	}
	s, need := q.r.Space(), q.r.Bytes()
	q.stop()
	_ = q.r.Release() // it fails only if a converter has released it
	q.r = reservation.Reservation{}
	if err == nil {
		return false, nil
	}
	switch {
	case s.Lost() != nil: // the manager has no more room in it
		q.attempts = attempts{}
		return true, err
	case errors.Is(err, errGone):
		return true, err
	case !refuses(s, err):
		return false, err
	}
	q.refusal = err
	// A file system may turn out to be full only at the write.
	if n := max(1, need, 2*q.dropped); n/2 < s.Capacity() && s.DropOldest(n, q.seen) {
		q.dropped = n
		return true, err
	}
	q.without = append(q.without, s)
	switch full, _ := errors.AsType[*tier.NoSpaceError](err); {
	case !q.waits || full == nil || full.Largest == 0:
	case q.free < wholePages(s.Room()) && (q.pieces == nil || q.pieces == s):
		q.pieces, q.enough = s, q.free+tier.Page
	case q.pieces == s: // all of the space was free
		q.pieces = nil
	}
	return true, err
}

// inRoom makes the attempts of a request. do draws from the reservation, which inRoom releases.
func (q *request) inRoom(ctx context.Context, do func(reservation.Reservation) error) error {
	defer q.end(nil) // after a panic
	for {
		r, err := q.reserve(ctx)
		if err == nil {
			err = do(r)
		}
		if again, err := q.end(err); !again {
			return err
		}
	}
}

// refuses reports whether err means that a space did not give the memory that it had promised.
// There are three causes: the free room is in pieces; others hold the device's memory, or a budget,
// that the space's ledger does not count; or the file system is full. It happens when memory is
// allocated or, on a disk, written.
func refuses(s *tier.Space, err error) bool {
	full, ok := errors.AsType[*tier.NoSpaceError](err)
	return ok && (full.Space == s.ID() || !full.Space.Valid()) || // a pool need not know its space
		errors.Is(err, tier.ErrOutOfBudget)
}
