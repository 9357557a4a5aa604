package convert

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// errChanged: a batch that is copied is being moved, or was dropped.
var errChanged = errors.New("convert: the batch is being moved")

// WriteAhead copies b to a disk while it stays where it is, so that a later move there moves no
// bytes. The batch may be used, moved and dropped meanwhile: what is copied is only leased. It
// returns the bytes of the copy, and 0 without an error if b has one, is in use, or cannot be
// copied.
//
// The copy takes room that nobody needs: the disk must stay below its stop mark, without waiters
// for room, and no other copy goes for it. Otherwise the error is a *tier.NoSpaceError. It is
// written while no other transfer with a disk is under way, nor was within the time quiet. The
// error matches context.Canceled if there is one, or if one begins: then the pieces under way are
// the last.
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
	if err != nil && errors.Is(context.Cause(ctx), errChanged) || errors.Is(err, errGone) || errors.Is(err, batch.ErrUnmovable) {
		return 0, nil
	}
	if err != nil && ctx.Err() != nil {
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
	var img interface {
		Buffers() []*tier.Buffer
		EachShared(func(*tier.Buffer))
	}
	switch p := p.(type) {
	case *payload.Image:
		img = p
	case *payload.Packed:
		img = p
	default:
		return end, false
	}
	ok = true
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
	to, err := m.toSpare(&what)
	if err != nil {
		return 0, err
	}
	r, err := m.cfg.Reservations.TryReserve(what.of(to), what.body, reservation.WithoutClearing(), reservation.Incoming())
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, r.Release()) }()
	disk := r.Space().Inside()
	before := disk.Evicted()
	out, err := m.convert(ctx, now.Payload, "", &what, r)
	if err != nil {
		distrust(ctx, err, r.Space())
		return 0, fmt.Errorf("copying batch %d from %s to %s: %w", now.ID, now.Space, disk.ID(), ofBatch(err, now.ID))
	}
	full := disk.Evicted() > before // before the space is
	b.Inside().AddCopy(out, now.Descriptor, m.stats.ahead(now.Space, disk.ID(), what.body))
	if full {
		return what.body, &tier.NoSpaceError{Space: disk.ID(), Requested: what.body, Cause: errNeeded}
	}
	return what.body, nil
}

// toSpare is the strategy for disks that have room for a copy beside all others.
func (m *Mover) toSpare(what *takes) (reservation.Strategy, error) {
	to := reservation.AnyInTier(tier.Disk)
	taken := m.needed(to, what)
	all := to.Candidates(m.cfg.Reservations.Spaces(), nil)
	for _, s := range all {
		if s.Used()+s.Inside().Cached()+what.in(s) > s.Limit() {
			taken = append(taken, s)
		}
	}
	left := without{to, taken}
	if len(left.Candidates(m.cfg.Reservations.Spaces(), nil)) == 0 {
		return nil, &tier.NoSpaceError{Space: tier.ID{Kind: tier.Disk}, Requested: what.body, Cause: errNeeded}
	}
	return left, nil
}
