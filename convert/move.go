package convert

import (
	"context"
	"errors"
	"fmt"
	exec "runtime/trace"
	"slices"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// move is one call of a Mover that brings a batch to a space of a strategy. One goroutine uses a move.
type move struct {
	b      *batch.Batch
	to     reservation.Strategy
	as     batch.PayloadType // the type to make; "" means the best one for the space, see Mover.route
	reason string            // for events and Stats

	evicts       bool                     // for the monitor: waits neither for room nor for the batch
	prefetches   bool                     // waits for nothing, and takes no room that others need
	given        *reservation.Reservation // the caller's, to draw from, in place of a strategy
	opens        bool                     // opens a handle on arrival
	last         bool                     // drops the batch in the same step
	keepsPending bool                     // leaves pending tasks to their callers

	spaces []*tier.Space // the candidates of the strategy, as run has found them
}

// run moves a batch until it is in a space of the strategy, and opens a handle there if the move
// does. Each round of its loop looks at the batch, reserves room, and makes one attempt. There are
// these reasons for another round:
//
//   - A space refused the memory that it had promised, or was lost: see request.end.
//   - Another caller has brought the batch, moved or dropped it, or the space that it was in was
//     lost: see errStale.
//   - The batch left the space between the look and the opening of the handle.
//   - The batch has open handles elsewhere. A move that opens one waits until they are closed.
//   - A program's payload had to become an image in host memory first: see errViaHost.
func (m *Mover) run(ctx context.Context, mv *move) (h *batch.Handle, err error) {
	if mv.b == nil {
		return nil, errors.New("convert: moving a batch: the batch is nil")
	}
	ctx, end, err := m.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	if mv.evicts {
		ctx = transfer.ForMonitor(ctx)
	}
	if mv.given != nil {
		mv.to = reservation.Specific(mv.given.Space().ID())
		if o := mv.given.Owner(); o != nil && reservation.OwnerOf(ctx) == nil {
			ctx = o.Context(ctx)
		}
	}
	b, all := mv.b, m.cfg.Reservations.Spaces()
	q := &request{m: m, b: b, waits: !mv.evicts && !mv.prefetches}
	if q.waits {
		q.useless = mv.arrived
	}
	defer q.end(nil) // after a panic
	defer guard.Error(&err, "a strategy or a payload")
	for {
		now := b.Info()
		if err := present(now, "move"); err != nil {
			return nil, err
		}
		var used *batch.StateError
		mv.spaces = mv.to.Candidates(all, mv.spaces[:0])
		if mv.arrived(now) {
			switch {
			case !mv.opens:
				return nil, nil
			case mv.keepsPending:
				h, err = b.Read(ctx, now.Space)
			default:
				h, err = b.Open(ctx, now.Space, mv.last)
			}
			if errors.As(err, &used) && used.Status == batch.SpaceMismatch {
				continue
			}
			return h, err
		}
		if mv.prefetches && len(mv.spaces) > 0 && now.Space.Kind < mv.spaces[0].Kind() {
			return nil, nil // another caller has brought it to a faster tier
		}

		ctx := ctx
		if m.cfg.Events != nil {
			ctx = events.With(ctx, originOf(ctx, now.Place))
		}
		q.what, q.source = m.footprint(now.Descriptor, now.Bytes), now.Payload.Space()
		q.room = reservation.Options{From: now.Space.Kind}
		if mv.opens {
			q.room = reservation.Options{Purpose: reservation.Consuming}
		}
		if mv.prefetches {
			if err := q.ahead(mv.to, now); err != nil {
				return nil, err
			}
		}
		q.to = mv.to
		for _, in := range b.Copies() { // a move there copies no bytes
			if mv.to == reservation.AnyInTier(in.Kind) {
				q.to = reservation.AnyInTierPreferring(in.Kind, in.Ordinal)
			}
		}

		r, err := mv.given, error(nil)
		if r == nil {
			r, err = q.reserve(ctx)
		}
		if err == nil {
			h, err = m.attempt(ctx, mv, q, now, r)
		}
		again, err := q.end(err)
		switch {
		case !errors.Is(err, errViaHost):
		case mv.prefetches && now.Space.Kind.IsDevice():
			return nil, fmt.Errorf("moving batch %d ahead from %s by way of host memory, which is slower: %w",
				now.ID, now.Space, tier.ErrNotSupported)
		default:
			there := move{
				b: b, to: reservation.AnyInTier(tier.Host), as: batch.PlainImage,
				reason: mv.reason, evicts: mv.evicts, prefetches: mv.prefetches,
			}
			if _, err = m.run(ctx, &there); err == nil {
				err = errStale
			}
		}
		switch {
		case err == nil:
			return h, nil
		case again:
			continue
		case errors.Is(err, errStale):
		case mv.opens && errors.As(err, &used) && used.State == batch.Processing && !errors.Is(err, batch.ErrUnmovable):
			// The batch itself is in use: a converter's StateError, of another batch, is unmovable.
			if changed := b.Changed(); b.Info().State == batch.Processing {
				done := reservation.Waits(ctx)
				select {
				case <-changed:
				case <-ctx.Done():
				}
				done()
			}
		default:
			return nil, err
		}
		if ctx.Err() != nil { // also if this move makes room for another one, whose wait is useless now
			return nil, context.Cause(ctx)
		}
		q.attempts = attempts{}
	}
}

// arrived reports whether a batch is in a space of the strategy, and of the type that was asked for.
func (mv *move) arrived(now batch.Info) bool {
	return (mv.as == "" || now.Form == mv.as) &&
		slices.ContainsFunc(mv.spaces, func(s *tier.Space) bool { return s.ID() == now.Space })
}

// attempt moves the batch once, into r. It takes the batch in transit, makes the new payload, and
// commits it. The new payload is a clean image in r's space or, if there is none, what a converter
// makes. After an error the batch is whole where it was. attempt emits MoveBegun and MoveEnded while
// the batch is in transit.
func (m *Mover) attempt(
	ctx context.Context, mv *move, q *request, now batch.Info, r *reservation.Reservation,
) (h *batch.Handle, err error) {
	b, to, body := mv.b, r.Space(), q.what.body
	var transit *batch.Transit
	if q.waits {
		transit, err = mv.b.Transit(ctx)
	} else {
		transit, err = mv.b.TryTransit()
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = transit.Abort() }() // changes nothing after a Commit
	src := transit.Payload()
	from := src.Space()
	if mv.arrived(b.Snapshot()) || mv.prefetches && from.Kind() < to.Kind() {
		return nil, errStale // another caller brought it while this one waited
	}
	form, e, viaHost := m.route(src, to, mv.as)
	switch {
	case viaHost && to.Kind().IsMemory():
		mv.as = form.Type // the image there is not the end of the way
		return nil, errViaHost
	case viaHost && !slices.Contains(mv.b.Copies(), to.ID()):
		return nil, errViaHost
	}
	if exec.IsEnabled() {
		defer exec.StartRegion(ctx, "spillway "+from.ID().String()+" to "+to.ID().String()).End()
	}

	// Each MoveBegun needs one MoveEnded before the transit ends, so that the events of a batch alternate.
	moved := events.Event{
		Kind: events.MoveBegun, Context: ctx, Origin: events.From(ctx), Batch: uint64(now.ID),
		From: from.ID(), To: to.ID(), Bytes: body, Reason: mv.reason,
	}
	m.emit(moved)
	start := time.Now()
	clean := form.Type
	if mv.as == "" && to.Kind().IsStorage() {
		clean = "" // any type will do, because none is opened in place there
	}
	out := b.Promote(clean, r)
	switch moved.Copy = out != nil; {
	case moved.Copy:
		moved.Bytes = 0
	case viaHost: // the clean image is gone
		err = errViaHost
	case e == nil:
		err = missing(Form{src.Type(), from.Kind()}, form)
	default:
		out, err = e.convert(ctx, src, r)
	}
	if err != nil {
		err = ofLost(err, from, to)
		invalidate(ctx, err, from, to)
		err = fmt.Errorf("moving batch %d from %s to %s: %w", now.ID, from.ID(), to.ID(), m.ofBatch(ctx, err, mv.b))
	} else if err = b.Fits(transit, out); err != nil {
		err = unfit(mv.b, out, err)
	}
	if moved.Kind, moved.Took, moved.Err = events.MoveEnded, time.Since(start), err; err != nil {
		moved.Bytes = 0
	}
	m.emit(moved)
	if err != nil {
		return nil, err
	}

	commit := batch.CommitOptions{
		Open: mv.opens, Last: mv.last, KeepPending: mv.keepsPending,
		Reason: mv.reason, Slower: to.Kind() > from.Kind(),
	}
	if !mv.last && to.Kind() < from.Kind() {
		commit.Retained = m.residentEvents(ctx, now, to.ID(), from.ID(), body, false)
	}
	if mv.prefetches && !moved.Copy {
		commit.Ahead = m.residentEvents(ctx, now, from.ID(), to.ID(), body, true)
	}
	if h, err = b.Commit(ctx, transit, out, commit); err != nil { // Commit did not take out over
		return nil, unfit(mv.b, out, err)
	}
	m.stats.add(&moved, body, now.Place)
	return h, nil
}

// unfit releases a payload that b cannot have, and returns the error.
func unfit(b *batch.Batch, out batch.Payload, why error) error {
	return errors.Join(&batch.UnmovableError{Batch: b.ID(), Err: why}, release(out))
}

// invalidate drops all clean images in both spaces of a move that found corrupt bytes, and those on a
// disk that returned an I/O error, because they may be damaged too. Other failures, such as a
// GPU's, are no reason to drop them.
func invalidate(ctx context.Context, err error, between ...*tier.Space) {
	var failed *disk.IOError
	corrupt := errors.Is(err, image.ErrCorrupt)
	broken := errors.As(err, &failed) && !errors.Is(err, tier.ErrNoSpace) && ctx.Err() == nil
	for _, s := range between {
		if corrupt || broken && failed.Space == s.ID() {
			s.DropAllClean()
		}
	}
}

// errViaHost means that a batch must become an image in host memory before it can get another form: a
// program needs converters to and from such images only.
var errViaHost = errors.New("convert: the batch moves by way of an image in host memory")

// route returns the form that src gets in a space, its converter, nil if there is none, and whether src
// must become an image in host memory first. as is the type; "" means the best one: that of the
// program's payload which src is, or was made of, if there is a converter to it, or else an image: of
// the type that Builtin.TypeIn chooses, if there is a converter to that.
func (m *Mover) route(
	src batch.Payload, to *tier.Space, as batch.PayloadType,
) (form Form, e *entry, viaHost bool) {
	has := func(from, to Form) bool { return m.cfg.Registry.lookup(from, to) != nil }
	host := Form{batch.PlainImage, tier.Host}
	from, own := Form{src.Type(), src.Space().Kind()}, Form{src.Type(), to.Kind()}
	img, isImage := src.(*batch.Image)
	if isImage {
		own.Type = img.Parts.Program
	}
	if as == "" && own.Type != "" && (has(from, own) || isImage && has(host, own)) {
		as = own.Type
	}
	if as == "" {
		as = m.cfg.Builtin.TypeIn(src, to)
		if !has(from, Form{as, to.Kind()}) { // the program may have unregistered it
			as = batch.PlainImage
		}
	}
	form = Form{as, to.Kind()}
	e = m.cfg.Registry.lookup(from, form)
	viaHost = form != host && e == nil && has(from, host) && (!isImage || form == own && has(host, own))
	return form, e, viaHost
}

// quiet is for how long nothing is prefetched to a space after the monitor has evicted a batch from
// it.
const quiet = 100 * time.Millisecond

// errNeeded is the cause of a prefetch that fails because others need the room.
var errNeeded = errors.New("convert: nothing is brought ahead where the room is needed")

// ahead makes q a request for a prefetch to a strategy: only for room that nobody needs, and not for
// a batch in a space where it persists.
func (q *request) ahead(to reservation.Strategy, now batch.Info) error {
	if persists := q.m.cfg.Persists; persists != nil && persists(now.Space) {
		return fmt.Errorf(
			"moving batch %d ahead from %s, where it persists: %w", now.ID, now.Space, tier.ErrNotSupported)
	}
	q.room = reservation.Options{Purpose: reservation.Early} // it is not the next to consume
	if needed := q.m.needed(to, &q.what); len(needed) > 0 {
		s := needed[0]
		q.without = append(q.without, needed...)
		q.refusal = &tier.NoSpaceError{
			Space: s.ID(), Requested: q.what.in(s), Available: s.State().Available, Cause: errNeeded,
		}
	}
	return nil
}

// needed returns the spaces of a strategy whose room others need, or may need soon.
func (m *Mover) needed(to reservation.Strategy, what *footprint) (spaces []*tier.Space) {
	demand := m.cfg.Reservations.Demand(nil)
	for _, s := range to.Candidates(m.cfg.Reservations.Spaces(), nil) {
		waits := slices.ContainsFunc(demand, func(d reservation.Demand) bool { return d.Space == s.ID() })
		m.stats.mu.Lock()
		evicted := m.stats.evictedAt[s.ID()]
		m.stats.mu.Unlock()
		if now := s.State(); waits || now.Pressure+what.in(s) > now.Stop || time.Since(evicted) < quiet {
			spaces = append(spaces, s)
		}
	}
	return spaces
}
