package convert

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// takes is the room that a payload needs. It depends on the space: in returns the bytes for one.
// Dictionaries that the space already has need none, and a table's buffers are rounded one by one.
type takes struct {
	body  int64                  // bytes of the image's body
	table *batch.Descriptor      // of a batch that becomes a table; else nil
	dicts []*transfer.Dictionary // the shared dictionaries, each once
}

// takes returns the room that a payload of a descriptor needs in another space as that form; "" means
// as an image. A program's own payload has no descriptor, and needs as many bytes as it is charged now.
func (m *Mover) takes(desc *batch.Descriptor, charged int64, form batch.PayloadType) takes {
	if desc == nil {
		return takes{body: charged}
	}
	t := takes{body: desc.Body, dicts: m.cfg.Builtin.Dicts.Of(desc.AllDictionaries())}
	if form == batch.GPUTable {
		t.table = desc
	}
	return t
}

// bodyIn returns how many bytes to reserve for the body alone.
func (t *takes) bodyIn(s *tier.Space) int64 {
	if t.table == nil {
		return t.body
	}
	return max(t.body, transfer.TableBytes(t.table, s))
}

// in returns how many bytes to reserve in a space.
func (t *takes) in(s *tier.Space) int64 {
	n := t.bodyIn(s)
	if len(t.dicts) == 0 {
		return n
	}
	return s.Charge(n) + t.dicts[0].Store.Missing(s, t.dicts)
}

// of returns the strategy to, but asking each space for the bytes that in returns.
func (t *takes) of(to reservation.Strategy) reservation.Strategy {
	if t.table == nil && len(t.dicts) == 0 {
		return to // as many bytes in every space, for which the manager has a fast path
	}
	return sized{to, t}
}

// sized is a strategy with a size of its own in each space: a reservation.Sized.
type sized struct {
	reservation.Strategy
	what *takes
}

func (s sized) BytesIn(space *tier.Space, _ int64) int64 { return s.what.in(space) }

// errGone means that a reservation is too small: a shared dictionary, which was in the target when
// the room was reserved, was freed there since. inRoom then reserves again.
var errGone = errors.New("convert: a dictionary left the space")

// pinned runs f, which allocates a body and its missing dictionaries from r. Meanwhile it holds a
// reference to each dictionary that r's space already has. If r is too small for the missing ones,
// the error is errGone. The references do not outlive f: held during a wait for room, they would keep
// room in use that the waiter needs.
func (m *Mover) pinned(r reservation.Reservation, what *takes, f func() error) (err error) {
	if len(what.dicts) == 0 {
		return f()
	}
	pins, missing := m.cfg.Builtin.Dicts.Pin(r.Space(), what.dicts)
	defer func() { err = errors.Join(err, transfer.ReleaseAll(pins)) }()
	if r.Unused() < r.Space().Charge(what.bodyIn(r.Space()))+missing {
		return errGone
	}
	return f()
}

// errand is work that needs a reservation in a space of a strategy, such as laying out a record or
// moving a batch. inRoom reserves and calls do, perhaps several times.
type errand struct {
	to     reservation.Strategy
	what   *takes             // how much room
	origin reservation.Option // whether the request leaves headroom free or may use it: Incoming, Consuming, …
	waits  bool               // for room
	slower bool               // try slower tiers if no space of to is large enough
	// until returns a context that ends when waiting for room has become useless. The caller must
	// call done. It may be nil.
	until func(context.Context) (_ context.Context, done func())
	do    func(reservation.Reservation) error // draws from the reservation, which inRoom then releases
}

// reserve reserves the errand's room in a space of the strategy, and waits for it if wait is set.
// The option Moving keeps allocations from evicting others when the free room is in pieces: inRoom
// handles that case, and a move of the monitor must not start further moves.
func (m *Mover) reserve(ctx context.Context, e *errand, to reservation.Strategy, wait bool) (reservation.Reservation, error) {
	if wait && ctx.Err() != nil {
		return reservation.Reservation{}, context.Cause(ctx)
	}
	asked, piecemeal := e.what.of(to), reservation.Moving()
	r, err := m.cfg.Reservations.TryReserve(asked, e.what.body, piecemeal, e.origin)
	if !wait && errors.Is(err, tier.ErrNoSpace) && m.dropSharing(asked, e.what) {
		r, err = m.cfg.Reservations.TryReserve(asked, e.what.body, piecemeal, e.origin)
	}
	if wait && errors.Is(err, tier.ErrNoSpace) {
		if e.until != nil {
			var done func()
			ctx, done = e.until(ctx)
			defer done()
		}
		r, err = m.cfg.Reservations.Reserve(ctx, asked, e.what.body, piecemeal, e.origin)
	}
	if err != nil && e.slower && wait == e.waits {
		return m.reserveSlower(ctx, e, to, err)
	}
	return r, err
}

// dropSharing drops clean images that keep shared dictionaries in use, until the first space of the
// strategy has room for what. It reports whether it freed anything. It is for requests that do not
// wait; for waiters the monitor does the same.
func (m *Mover) dropSharing(asked reservation.Strategy, what *takes) (freed bool) {
	for _, s := range asked.Candidates(m.cfg.Reservations.Spaces(), nil) {
		before, need := s.Used(), what.in(s)
		s.DropSharing(need - s.Available())
		freed = freed || s.Used() < before
		if s.Available() >= need {
			break
		}
	}
	return freed
}

// inRoom reserves, does the errand, and releases the reservation. A space may refuse the memory
// that it has promised (see refuses). Then inRoom tries the strategy's other spaces. If none of
// them has room now and the errand may wait, there are two cases. If a space has the bytes but not
// in one piece, inRoom clears that space; otherwise it waits for the others. If the space that was
// tried last is lost meanwhile, inRoom begins again without it; it also begins again after errGone.
//
// The errand gives back what it took (a transit, a handle, the reservation) before inRoom waits
// again, and only one goroutine clears a space at a time. So waiters for contiguous room do not
// hold what the others wait for.
func (m *Mover) inRoom(ctx context.Context, e *errand) error {
	for {
		last, err := m.inRoomOnce(ctx, e)
		gone := errors.Is(err, errGone)
		if err == nil || !gone && (last == nil || last.Lost() == nil) {
			return err
		}
	}
}

// inRoomOnce is inRoom without the retries after errGone and after a lost space. It returns the space
// that was tried last, nil if there was no room.
func (m *Mover) inRoomOnce(ctx context.Context, e *errand) (last *tier.Space, err error) {
	t := &try{m: m, errand: e, left: without{e.to, nil}}
	if err := t.next(ctx, e.waits); err != nil {
		return nil, err
	}
	for t.refused() && t.next(ctx, false) == nil {
	}
	for e.waits && t.refused() {
		if t.pieces != nil {
			return t.pieces, t.clear(ctx)
		}
		if err := t.next(ctx, true); errors.Is(err, reservation.ErrNoCandidate) || errors.Is(err, reservation.ErrExceeded) {
			break // there is no other, or it would never fit there
		} else if err != nil {
			return t.last, fmt.Errorf("%w (before that: %w)", err, t.err)
		}
	}
	return t.last, t.err
}

// try is an errand in progress, and the spaces that inRoomOnce has tried so far.
type try struct {
	m *Mover
	*errand
	left without // the spaces not tried yet

	last   *tier.Space // the space that was tried last
	err    error       // the errand's error there
	pieces *tier.Space // the first that has the bytes, but not in one piece; nil if there is none
	need   int64       // the bytes that were reserved there
}

// next reserves in one of the spaces that are left, and does the errand there. It returns an error
// if it could not reserve; the errand's own error is t.err.
func (t *try) next(ctx context.Context, wait bool) error {
	to := t.left.Strategy
	if len(t.left.spaces) > 0 {
		to = t.left
	}
	r, err := t.m.reserve(ctx, t.errand, to, wait)
	if err != nil {
		return err
	}
	need := r.Bytes()
	t.last = r.Space()
	seen := t.last.CopyChanges()
	t.err = t.doIn(r)
	// A file system may turn out to be full only at the write. Then drop clean images and try
	// again.
	for n := max(1, need); t.refused() && n/2 < t.last.Capacity() && t.last.DropOldest(n, seen); n *= 2 {
		seen = t.last.CopyChanges()
		r, err := t.m.reserve(ctx, t.errand, reservation.Specific(t.last.ID()), false)
		if err != nil {
			break
		}
		t.err = t.doIn(r)
	}
	t.left.spaces = append(t.left.spaces, t.last)
	if t.pieces == nil && fragmented(t.err) {
		t.pieces, t.need = t.last, need
	}
	return nil
}

// doIn does the errand and releases r, also after a panic. If a converter has already released r, a
// successful errand stays successful, because its batch has arrived and a handle may be open.
func (t *try) doIn(r reservation.Reservation) (err error) {
	space := r.Space().ID()
	defer func() {
		again := r.Release()
		if err != nil || again == nil {
			err = errors.Join(err, again)
			return
		}
		guard.Logger(t.m.cfg.Logger).Warn("spillway: a converter released the reservation that it was given", "space", space.String(), "error", again)
	}()
	return t.do(r)
}

// refused reports whether the space that was tried last has refused the memory that it promised.
func (t *try) refused() bool { return refuses(t.last, t.err) }

// clear makes contiguous room in t.pieces, and does the errand there.
func (t *try) clear(ctx context.Context) error {
	clearing := t.m.clearing[t.pieces.ID()]
	if t.until != nil {
		var done func()
		ctx, done = t.until(ctx)
		defer done()
	}
	select {
	case clearing <- struct{}{}:
		defer func() { <-clearing }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return t.m.clear(ctx, t.pieces, t.need, func() error {
		r, err := t.m.reserve(ctx, t.errand, reservation.Specific(t.pieces.ID()), false)
		if errors.Is(err, tier.ErrNoSpace) {
			return errRefused
		}
		if err != nil {
			return err
		}
		return t.doIn(r)
	})
}

// errRefused means that another request took the room first.
var errRefused = errors.New("convert: another request took the room")

// clear runs f until it does not fail for lack of contiguous room. Before each try it waits until
// twice the room is free, then four times and so on. This wait is demand, for which the monitor
// evicts batches, and each eviction may join two free pieces. Despite its name it moves nothing
// itself. For allocations of programs, Monitor.Clear evicts in place of this.
func (m *Mover) clear(ctx context.Context, space *tier.Space, need int64, f func() error) error {
	released := make(chan struct{}, 1)
	defer space.Subscribe(func(pressed bool) {
		if !pressed {
			select {
			case released <- struct{}{}:
			default:
			}
		}
	})()
	for {
		most := space.Room() / tier.Page * tier.Page // a charge is a multiple of that
		need = min(2*need, most)
		got, err := m.demand(ctx, space, need, released)
		if errors.Is(err, reservation.ErrExceeded) && need > space.Room() {
			continue // the limit fell meanwhile
		}
		if err != nil {
			return err
		}
		for freed := true; freed; {
			before := space.Used()
			err = f()
			again := errors.Is(err, errRefused) || fragmented(err) && !(got && need == most)
			if !again { // also a disk that is really full
				return err
			}
			select {
			case <-released: // usually of f's own reservation
				freed = space.Used() < before
			default:
				freed = false
			}
		}
	}
}

// demand waits until n bytes are free, which it does not keep, and returns true. It returns false
// earlier if something was released, which may be enough.
func (m *Mover) demand(ctx context.Context, space *tier.Space, n int64, released <-chan struct{}) (bool, error) {
	waiting, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	enough := errors.New("convert: something was released")
	over := make(chan struct{})
	go func() {
		labels.Watch.Set()
		defer close(over)
		select {
		case <-released:
			cancel(enough)
		case <-waiting.Done():
		}
	}()
	r, err := m.cfg.Reservations.Reserve(waiting, reservation.Specific(space.ID()), n)
	cancel(nil)
	<-over
	if errors.Is(err, enough) {
		return false, context.Cause(ctx)
	}
	return err == nil, errors.Join(err, r.Release())
}

// without is a strategy except for some of its spaces.
type without struct {
	reservation.Strategy
	spaces []*tier.Space
}

func (w without) Candidates(all *reservation.Spaces, dst []*tier.Space) []*tier.Space {
	n := len(dst)
	dst = w.Strategy.Candidates(all, dst)
	kept := slices.DeleteFunc(dst[n:], func(s *tier.Space) bool { return slices.Contains(w.spaces, s) })
	return dst[:n+len(kept)]
}

// copiesFirst is a strategy for one tier that lists the spaces with a clean image first.
type copiesFirst struct {
	reservation.Strategy
	in []tier.ID
}

func (c copiesFirst) Candidates(all *reservation.Spaces, dst []*tier.Space) []*tier.Space {
	n := len(dst)
	dst = c.Strategy.Candidates(all, dst)
	slices.SortStableFunc(dst[n:], func(a, b *tier.Space) int {
		return cmp.Compare(slices.Index(c.in, b.ID()), slices.Index(c.in, a.ID())) // -1 where there is none
	})
	return dst
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

// fragmented reports whether the bytes are free, but not in one piece.
func fragmented(err error) bool {
	full, ok := errors.AsType[*tier.NoSpaceError](err)
	return ok && full.Largest > 0
}
