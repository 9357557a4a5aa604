package convert

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// errChanged: a batch that is copied is being moved, or was dropped.
var errChanged = errors.New("convert: the batch is being moved")

// WriteAhead copies b to a disk while it stays where it is, so that a later move there moves no
// bytes. The batch may be used, moved and dropped meanwhile: what is copied is only leased. It
// returns the bytes that were written, in vain if the batch was moved or dropped; with an error
// those that may have been. It returns 0 without an error if b has a copy, is in use, cannot be
// copied, or finds no room. That is room which nobody needs: the disk must stay below its stop
// mark, without waiters for room, and no other copy goes for it. If the disk is full nevertheless,
// the error is a *tier.NoSpaceError. The copy is written while no other transfer with a disk is
// under way, nor was within the time quiet. The error matches context.Canceled if there is one, or
// if one begins: then the pieces under way are the last.
func (m inside) WriteAhead(ctx context.Context, b *batch.Batch, quiet time.Duration) (bytes int64, err error) {
	ctx, end, err := m.operations.begin(ctx)
	if err != nil {
		return 0, err
	}
	defer end()
	now := b.Info()
	if (now.State != batch.Idle && now.State != batch.TaskCreated) || now.Leased || now.Space.Kind == tier.Disk || lostWith(now) != nil ||
		slices.ContainsFunc(b.Copies(), func(in tier.ID) bool { return in.Kind == tier.Disk }) {
		return 0, nil
	}
	unlease, ok := m.lease(now.Payload)
	if !ok {
		return 0, nil
	}
	defer unlease()
	ctx, done, err := m.cfg.Builtin.Spare(ctx, quiet)
	if err != nil {
		return 0, err
	}
	defer done()
	is := func(then batch.Info) bool { return then.State == batch.InTransit || then.Payload != now.Payload }
	ctx, watched := m.untilVain(ctx, b, now.Payload.Space(), is, errChanged)
	defer watched()
	bytes, err = m.writeAhead(ctx, b, now)
	switch {
	case err == nil || errors.Is(err, errNeeded):
		return bytes, err
	case errors.Is(context.Cause(ctx), errChanged):
		return bytes, nil
	case errors.Is(err, errGone) || errors.Is(err, batch.ErrUnmovable):
		return 0, nil
	case ctx.Err() != nil:
		err = fmt.Errorf("%w: %w", context.Canceled, err)
	}
	return bytes, err
}

// lease keeps the memory of a built-in image, and of its dictionaries, until end is called. ok is
// false for other payloads, and where memory is gone.
func (m *Mover) lease(p batch.Payload) (end func(), ok bool) {
	var ends []func()
	end = func() {
		for _, end := range slices.Backward(ends) {
			end()
		}
	}
	add := func(b *tier.Buffer) {
		if !ok {
			return
		}
		var one func()
		if one, ok = b.TryLease(); ok {
			ends = append(ends, one)
		}
	}
	img, ok := p.(*payload.Image)
	if !ok || img.Encoding() == payload.Scattered {
		return end, false
	}
	for _, b := range img.Buffers() {
		add(b)
	}
	if !m.panics.Do("a batch's Shared", func() { img.EachShared(add) }) {
		ok = false
	}
	if !ok {
		end()
	}
	return end, ok
}

// writeAhead copies the payload that the batch was seen with.
func (m *Mover) writeAhead(ctx context.Context, b *batch.Batch, now batch.Info) (bytes int64, err error) {
	what := m.takes(now, "")
	to, ok := m.toSpare(&what)
	if !ok {
		return 0, nil
	}
	r, err := m.cfg.Reservations.TryReserve(what.of(to), what.body, reservation.Moving(), reservation.Incoming())
	if errors.Is(err, tier.ErrNoSpace) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	disk := r.Space()
	before := disk.Evicted()
	out, err := m.convert(ctx, now.Payload, "", &what, r)
	released := r.Release() // now, because an open reservation would have the bytes of a clean image back
	defer func() { err = errors.Join(err, released) }()
	var corrupt *image.CorruptError
	if errors.As(err, &corrupt) { // who uses the batch will notice; the disk has done nothing
		return 0, nil
	}
	if err != nil {
		distrust(ctx, err, disk)
		if errors.Is(err, tier.ErrOutOfBudget) { // others use the disks: nothing was begun
			what.body = 0
		}
		return what.body, fmt.Errorf("copying batch %d from %s to %s: %w", now.ID, now.Space, disk.ID(), m.ofBatch(ctx, err, b))
	}
	full := disk.Evicted() > before // before the space is
	copied, counted := m.copies(ctx, now, now.Space, disk.ID(), what.body, true), m.ahead(ctx, now, now.Space, disk.ID(), what.body)
	copied.made() // before somebody can use or drop it
	b.Inside().AddCopy(out, now.Descriptor, func(used bool) {
		counted(used)
		copied.ended(used)
	})
	if full {
		return what.body, &tier.NoSpaceError{Space: disk.ID(), Requested: what.body, Cause: errNeeded}
	}
	return what.body, nil
}

// toSpare is the strategy for disks that have room for a copy beside all others, if there are any.
func (m *Mover) toSpare(what *takes) (_ reservation.Strategy, ok bool) {
	to := reservation.AnyInTier(tier.Disk)
	taken := m.needed(to, what)
	all := to.Candidates(m.cfg.Reservations.Spaces(), nil)
	for _, s := range all {
		persists := !m.cfg.PersistAhead && m.cfg.Persists != nil && m.cfg.Persists(s.ID())
		if u := s.Usage(); persists || u.Used()+u.Cached+what.in(s) > s.Limit() {
			taken = append(taken, s)
		}
	}
	left := without{to, taken}
	return left, len(left.Candidates(m.cfg.Reservations.Spaces(), nil)) > 0
}
