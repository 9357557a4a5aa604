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

// footprint is the room that a payload needs: for its body, and for those of its dictionaries that
// the space does not have yet.
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
	f := footprint{body: desc.Body}
	if all := desc.AllDictionaries(); len(all) > 0 {
		f.dicts = m.cfg.Builtin.Dicts.Of(all)
	}
	return f
}

// pin returns how many bytes the payload takes in a space, and keeps the dictionaries there that it
// did not count until the caller calls unpin. They must not be kept during a wait for room: they
// would take room that the waiter needs.
func (f *footprint) pin(s *tier.Space) (bytes int64, unpin func()) {
	if len(f.dicts) == 0 {
		return f.body, func() {}
	}
	pins, missing := f.dicts[0].Store.Pin(s, f.dicts)
	return s.Charge(f.body) + missing, func() { _ = transfer.ReleaseAll(pins) } // each once
}

// in returns how many bytes the payload would take in a space now.
func (f *footprint) in(s *tier.Space) int64 {
	bytes, unpin := f.pin(s)
	unpin()
	return bytes
}

// without is a strategy less some of its spaces.
type without struct {
	reservation.Strategy
	spaces []*tier.Space
}

// Candidates implements reservation.Strategy.
func (w without) Candidates(all *reservation.Spaces, dst []*tier.Space) []*tier.Space {
	n := len(dst)
	dst = w.Strategy.Candidates(all, dst)
	left := slices.DeleteFunc(dst[n:], func(s *tier.Space) bool { return slices.Contains(w.spaces, s) })
	return dst[:n+len(left)]
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
// A space may refuse the memory that it has promised (see refuses); end documents what follows. One
// goroutine uses a request. It must defer end, for the case of a panic.
type request struct {
	m     *Mover
	to    reservation.Strategy
	what  footprint           // how much room
	room  reservation.Options // whether it leaves headroom free, or may use it
	waits bool                // for room

	// A wait ends with errStale when source is lost, b is dropped, or useless returns true for b. See
	// watch.
	source  *tier.Space
	b       *batch.Batch
	useless func(now batch.Info) bool

	// Of the present attempt.
	r    *reservation.Reservation // zero between attempts
	need int64                    // bytes of r for the footprint
	free int64                    // in its space when the attempt began, r included
	seen uint64                   // tier.State.CleanChanges then
	stop func() bool              // of one that waits: ends the watch for the end of the context

	attempts
}

// attempts is what the failed attempts of a request have shown.
type attempts struct {
	without []*tier.Space         // these spaces are not tried any more
	pieces  map[*tier.Space]int64 // these have been free to so many bytes, but not in one piece
	refusal error                 // the last error of a space that refused its memory
	dropped int64                 // how many bytes of clean images were last dropped for the request
}

// size is for reservation.Options.Sized. Where the room was in pieces the request asks for more bytes than
// were free then, or for all, so that memory must have been freed before it is served. While it waits
// for that, the monitor evicts more batches.
func (q *request) size(s *tier.Space) (bytes int64, unpin func()) {
	bytes, unpin = q.what.pin(s)
	q.need = s.Charge(bytes)
	if free, ok := q.pieces[s]; ok {
		bytes = max(bytes, min(free+tier.Page, wholePages(s.State().Room)))
	}
	return bytes, unpin
}

func wholePages(n int64) int64 { return n / tier.Page * tier.Page }

// reserve begins an attempt: it reserves room in one of the spaces that are left. If none has room
// now, it waits. A request that does not wait drops clean images that keep shared dictionaries in
// use; for waiters the monitor does that.
//
// Only allocations of requests that wait may evict batches for contiguous room. The others are
// for moves that make room, or that take only room that nobody needs.
func (q *request) reserve(ctx context.Context) (r *reservation.Reservation, err error) {
	if q.waits && ctx.Err() != nil {
		return r, context.Cause(ctx)
	}
	to, manager := q.to, q.m.cfg.Reservations
	if len(q.without) > 0 {
		to = without{to, q.without}
	}
	options := q.room
	options.Moving, options.NoClearing = true, !q.waits
	if len(q.what.dicts) > 0 || len(q.pieces) > 0 { // else as many bytes in every space
		options.Sized = q.size
	}
	r, err = manager.TryReserve(to, q.what.body, &options)
	switch full := errors.Is(err, tier.ErrNoSpace); {
	case full && q.waits:
		ctx, done := watch(ctx, q.source, q.b, q.useless)
		defer done()
		r, err = manager.Reserve(ctx, to, q.what.body, &options)
	case full:
		for _, s := range to.Candidates(manager.Spaces(), nil) {
			before, need := s.State().Used(), q.what.in(s)
			if s.DropSharing(need - s.State().Available); s.State().Used() < before && s.State().Available >= need {
				r, err = manager.TryReserve(to, q.what.body, &options)
				break
			}
		}
	}
	switch {
	case err == nil:
		q.r, q.free, q.seen = r, r.Bytes()+r.Space().State().Available, r.Space().State().CleanChanges
		if len(q.pieces) > 0 {
			_ = r.Shrink(r.Bytes() - q.need) // nobody else has it
		}
		if q.waits {
			q.stop = context.AfterFunc(ctx, func() {
				labels.Cancel.Set()
				r.StopClearing()
			})
		}
	case q.refusal == nil:
	case errors.Is(err, reservation.ErrNoCandidate): // no space is left
		err = q.refusal
	default:
		err = fmt.Errorf("%w (before that: %w)", err, q.refusal)
	}
	return r, err
}

// end ends an attempt, which has failed if err is not nil, and releases its room. It reports whether
// another attempt may succeed, and returns the error of the attempt.
//
//	why the attempt has failed                        what follows
//	there is no room to wait for, or too little
//	in a caller's reservation                         the request fails
//	the space was lost                                another attempt, in any other space
//	the space refused its memory:
//	    clean images were in the way                  they are dropped, twice as many each time; another attempt
//	    the free room is in pieces, and it may wait   another attempt there when more is free, or in another space
//	    all of the space was free, or it may not wait,
//	    or a budget or a file system is full          another attempt, never again in this space
//	any other error                                   the request fails
func (q *request) end(err error) (again bool, _ error) {
	if q.r == nil { // reserve has failed, or the room is the caller's
		return false, err
	}
	s, reserved := q.r.Space(), q.r.Bytes()
	if q.waits {
		q.stop()
	}
	_ = q.r.Release() // it fails only if a converter has released it
	q.r = nil
	switch {
	case err == nil:
		return false, nil
	case s.Lost() != nil: // the manager has no more room in it
		q.attempts = attempts{}
		return true, err
	case !refuses(s, err):
		return false, err
	}
	q.refusal = err
	// A file system may turn out to be full only at the write.
	if n := max(1, reserved, 2*q.dropped); n/2 < s.Capacity && s.DropOldest(n, q.seen) {
		q.dropped = n
		return true, err
	}
	full, _ := errors.AsType[*tier.NoSpaceError](err)
	if q.waits && full != nil && full.Largest > 0 && q.free < wholePages(s.State().Room) {
		if q.pieces == nil {
			q.pieces = make(map[*tier.Space]int64)
		}
		q.pieces[s] = q.free
	} else {
		q.without = append(q.without, s)
	}
	return true, err
}

// inRoom makes the attempts of a request. do draws from the reservation, which inRoom releases.
func (q *request) inRoom(ctx context.Context, do func(*reservation.Reservation) error) error {
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
