package convert

import (
	"context"
	"errors"
	"slices"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// takes is what a batch, or a part of one, takes in a space: its body, and those of its
// dictionaries that are not there.
type takes struct {
	body  int64
	table *batch.Descriptor // of a batch that becomes a table, whose buffers are rounded one by one; else nil
	dicts []*dictionary
}

// takesAs returns what a batch takes in a form, if as an image it takes body.
func takesAs(form batch.PayloadType, d *batch.Descriptor, body int64, dicts []*dictionary) takes {
	t := takes{body: body, dicts: dicts}
	if form == batch.GPUTable {
		t.table = d
	}
	return t
}

// bodyIn returns how many bytes to reserve for the body alone.
func (t *takes) bodyIn(s *tier.Space) int64 {
	if t.table == nil {
		return t.body
	}
	return max(t.body, tableBytes(t.table, s))
}

// in returns how many bytes to reserve in a space.
func (t *takes) in(s *tier.Space) int64 {
	n := t.bodyIn(s)
	if len(t.dicts) == 0 {
		return n
	}
	return s.Charge(n) + t.dicts[0].store.missing(s, t.dicts)
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

// pinned runs f, which allocates a body and its dictionaries from r, while those
// dictionaries stay that are in r's space. If r is too small for the others, it is
// errGone, and everything must begin again. They are not kept any longer, so that
// who waits for room does not stand in its own way.
func (m *Mover) pinned(r reservation.Reservation, what *takes, f func() error) (err error) {
	if len(what.dicts) == 0 {
		return f()
	}
	pins, missing := m.cfg.Builtin.dicts.pin(r.Space(), what.dicts)
	defer func() { err = errors.Join(err, releaseAll(pins)) }()
	if r.Unused() < r.Space().Charge(what.bodyIn(r.Space()))+missing {
		return errGone
	}
	return f()
}

// reserver returns what inRoom reserves with.
func (m *Mover) reserver(ctx context.Context, what *takes) func(reservation.Strategy, bool) (reservation.Reservation, error) {
	return func(to reservation.Strategy, wait bool) (reservation.Reservation, error) {
		if !wait {
			return m.cfg.Reservations.TryReserve(what.of(to), what.body)
		}
		return m.cfg.Reservations.Reserve(ctx, what.of(to), what.body)
	}
}

// inRoom reserves and runs f, which allocates from the reservation; it is released
// when f returns. If the space has the bytes but not in one piece, or its device
// refuses them for a budget that the space does not know of, or it is a volume whose file
// system is full, the strategy's other spaces are tried, and then, for one piece and if the caller may wait, the first one
// is cleared. If the device of the last that was tried is lost meanwhile all begins again, without that space.
//
// What f takes (a transit, a handle, the reservation) is given back before more is
// waited for, and only one mover clears a space at a time. So those who wait for one
// piece do not hold what the others wait for.
func (m *Mover) inRoom(ctx context.Context, waits bool, to reservation.Strategy,
	reserve func(to reservation.Strategy, wait bool) (reservation.Reservation, error), f func(reservation.Reservation) error) error {

	for {
		last, err := m.inRoomOnce(ctx, waits, to, reserve, f)
		if err == nil || last == nil || last.Lost() == nil {
			return err
		}
	}
}

// inRoomOnce is inRoom, but for spaces that are lost. It returns the space that was tried last, nil if there was no room.
func (m *Mover) inRoomOnce(ctx context.Context, waits bool, to reservation.Strategy,
	reserve func(to reservation.Strategy, wait bool) (reservation.Reservation, error), f func(reservation.Reservation) error) (last *tier.Space, err error) {

	r, err := reserve(to, waits)
	if err != nil {
		return nil, err
	}
	first, need := r.Space(), r.Bytes()
	last, err = first, errors.Join(f(r), r.Release())
	for tried := (without{to, nil}); fragmented(err) || errors.Is(err, tier.ErrOutOfBudget) || fullVolume(err); {
		tried.spaces = append(tried.spaces, last)
		var e error
		if r, e = reserve(tried, false); e != nil {
			break
		}
		last, err = r.Space(), errors.Join(f(r), r.Release())
	}
	if !waits || !fragmented(err) {
		return last, err
	}
	clearing := m.clearing[first.ID()]
	select {
	case clearing <- struct{}{}:
		defer func() { <-clearing }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	return first, m.clear(ctx, first, need, func() error {
		r, err := reserve(reservation.Specific(first.ID()), false)
		if errors.Is(err, tier.ErrNoSpace) {
			return errRefused
		}
		if err != nil {
			return err
		}
		return errors.Join(f(r), r.Release())
	})
}

// errRefused: there was room a moment ago, and somebody was faster.
var errRefused = errors.New("convert: room was taken by somebody else")

// clear runs f until it does not fail for want of room in one piece. Between the
// tries it waits for twice the room, then four times and so on: waiting demand makes
// the monitor move batches out, and each that has left may have made the piece.
func (m *Mover) clear(ctx context.Context, space *tier.Space, need int64, f func() error) error {
	released := make(chan struct{}, 1)
	space.Attend()
	defer space.EndAttend()
	defer space.Subscribe(func(_ *tier.Space, c tier.Change) {
		if c == tier.Released {
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

// fullVolume says whether a volume had no room although the books of its space said so.
func fullVolume(err error) bool {
	var full *tier.NoSpaceError
	return errors.As(err, &full) && full.Space.Kind == tier.Disk
}

func fragmented(err error) bool {
	var full *tier.NoSpaceError
	return errors.As(err, &full) && full.Largest > 0
}
