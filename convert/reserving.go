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

// takes is what a batch, or a part of one, takes in a space: its body, and those of its
// dictionaries that are not there.
type takes struct {
	body  int64
	table *batch.Descriptor      // of a batch that becomes a table, whose buffers are rounded one by one; else nil
	dicts []*transfer.Dictionary // each once
}

// takes returns what a batch takes elsewhere in a form; "" is an image's.
func (m *Mover) takes(now batch.Info, form batch.PayloadType) takes {
	desc := now.Descriptor
	if desc == nil { // a payload of a program's own: as much as it takes where it is
		return takes{body: now.Bytes}
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

// of returns a strategy that asks each space of another for what is taken there.
func (t *takes) of(to reservation.Strategy) reservation.Strategy {
	if t.table == nil && len(t.dicts) == 0 {
		return to // the same everywhere, and the manager has a shorter way for it
	}
	return sized{to, t}
}

// sized is a strategy for what takes more in some spaces than in others.
type sized struct {
	reservation.Strategy
	what *takes
}

func (s sized) BytesIn(space *tier.Space, _ int64) int64 { return s.what.in(space) }

// errGone: a dictionary that was in the target when room was reserved has left it
// since, so that the room is too little.
var errGone = errors.New("convert: a dictionary left the space")

// pinned runs f, which allocates a body and its dictionaries from r, while those dictionaries stay
// that are in r's space. If r is too small for the others, the error is errGone, and everything
// must begin again. They are not kept any longer: otherwise a waiter for room would block itself.
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

// errand is work that needs room in a space of a strategy.
type errand struct {
	to     reservation.Strategy
	what   *takes
	origin reservation.Option // where the bytes come from
	waits  bool               // for room
	slower bool               // what can never fit there is done in a slower tier
	// until returns a context that ends when waiting for room has become vain; done must be called.
	// It may be nil.
	until func(context.Context) (_ context.Context, done func())
	do    func(reservation.Reservation) error // draws from the reservation, which is released then
}

// reserve reserves what is taken in a space of the strategy, and waits for it if it should. Where
// it lies in pieces inRoom knows what to do: the monitor's moves are made so, too, and must not
// make others.
func (m *Mover) reserve(ctx context.Context, e *errand, to reservation.Strategy, wait bool) (reservation.Reservation, error) {
	if wait && ctx.Err() != nil {
		return reservation.Reservation{}, context.Cause(ctx)
	}
	asked, piecemeal := e.what.of(to), m.cfg.Reservations.Inside().Moving()
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

// dropSharing frees copies that keep dictionaries in use, until the first space of a strategy has
// room for what is taken there. Of who waits, the monitor knows. It reports whether it freed any.
func (m *Mover) dropSharing(asked reservation.Strategy, what *takes) (freed bool) {
	for _, s := range asked.Candidates(m.cfg.Reservations.Spaces(), nil) {
		before, need := s.Used(), what.in(s)
		s.Inside().DropSharing(need - s.Available())
		freed = freed || s.Used() < before
		if s.Available() >= need {
			break
		}
	}
	return freed
}

// inRoom reserves and does the errand; the reservation is released then. A space that refuses then
// what it has promised (see refuses) is left out, and the strategy's other spaces are tried. If
// none of them has room now and the errand may wait, there are two ways: where a space has the
// bytes but not in one piece, that space is cleared; otherwise the others are waited for. If the
// device of the last that was tried is lost meanwhile all begins again, without that space.
//
// What the errand takes (a transit, a handle, the reservation) is given back before more is waited
// for, and only one mover clears a space at a time. So waiters for one piece do not hold what the
// others wait for.
func (m *Mover) inRoom(ctx context.Context, e *errand) error {
	for {
		last, err := m.inRoomOnce(ctx, e)
		if err == nil || last == nil || last.Lost() == nil {
			return err
		}
	}
}

// inRoomOnce is inRoom, except for spaces that are lost. It returns the space that was tried last,
// nil if there was no room.
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

// try is what inRoomOnce has tried so far.
type try struct {
	m *Mover
	*errand
	left without // the spaces that are left

	last   *tier.Space // that was tried
	err    error       // and what became of it
	pieces *tier.Space // the first that has the bytes, but not in one piece; nil if there is none
	need   int64       // what was reserved there
}

// next tries the first of the spaces that are left. The error is that there was no room.
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
	seen := t.last.Inside().CopyChanges()
	t.err = t.doIn(r)
	// A full disk may be noticed when it is written. Copies are given back until it is not full.
	for n := max(1, need); t.refused() && n/2 < t.last.Capacity() && t.last.Inside().DropOldest(n, seen); n *= 2 {
		seen = t.last.Inside().CopyChanges()
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

// doIn does the errand, and releases r also if it panics. That a converter has released r before is
// no error of an errand that is done: its batch has arrived, and a handle may be open.
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

// refused reports whether the space that was tried last refuses what it has promised.
func (t *try) refused() bool { return refuses(t.last, t.err) }

// clear makes room in one piece for what was tried in t.pieces, and tries it there again.
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

// errRefused: there was room a moment ago, and another request was faster.
var errRefused = errors.New("convert: another request took the room")

// clear runs f until it does not fail for want of room in one piece. Between the
// tries it waits for twice the room, then four times and so on: waiting demand makes
// the monitor move batches out, and each that has left may have made the piece.
func (m *Mover) clear(ctx context.Context, space *tier.Space, need int64, f func() error) error {
	released := make(chan struct{}, 1)
	space.Inside().Attend()
	defer space.Inside().EndAttend()
	defer space.Inside().Subscribe(func(_ *tier.Space, pressed bool) {
		if !pressed {
			select {
			case released <- struct{}{}:
			default:
			}
		}
	})()
	most := space.Room() / tier.Page * tier.Page // a charge is a multiple of that
	for {
		need = min(2*need, most)
		got, err := m.demand(ctx, space, need, released)
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
			case <-released: // f's own, as a rule
				freed = space.Used() < before
			default:
				freed = false
			}
		}
	}
}

// demand waits until there is room for n bytes, without taking it, and says so; or
// until something was released, which may be enough.
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

// without is a strategy less some spaces.
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

// copiesFirst is a strategy for one tier that lists those spaces first in which a copy lies.
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

// refuses reports whether err means that a space does not give what it has promised. Its room is in
// pieces, others hold the device's memory or a budget that the space does not know of, or the file
// system is full. It shows when memory is allocated or, on a disk, when it is written.
func refuses(s *tier.Space, err error) bool {
	var full *tier.NoSpaceError
	return errors.Is(err, tier.ErrOutOfBudget) ||
		errors.As(err, &full) && (full.Space == s.ID() || !full.Space.Valid()) // a pool need not know its space
}

func fragmented(err error) bool {
	var full *tier.NoSpaceError
	return errors.As(err, &full) && full.Largest > 0
}
