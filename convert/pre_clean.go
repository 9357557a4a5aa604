package convert

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// WriteAhead pre-cleans b: it adds a clean image on a disk, so that a later move there moves no
// bytes. The batch may be used, moved and dropped meanwhile, because its current image is only
// leased. WriteAhead returns the bytes that were written, which were wasted if the batch was moved
// or dropped; with an error those that may have been. It returns 0 without an error if b has a
// clean image on disk, is in use, cannot be copied, or finds no room. That is room which nobody
// needs: the disk must stay below its stop mark, without waiters for room, and no other clean image
// is dropped for it. If the disk is full nevertheless, the error is a *tier.NoSpaceError. The image
// is written only if no other transfer with a disk is in progress, and none was within the time
// quiet. If there is one, or one begins, the error matches context.Canceled, and only the pieces in
// progress are still written.
func (m *Mover) WriteAhead(ctx context.Context, b *batch.Batch, quiet time.Duration) (bytes int64, err error) {
	ctx, end, err := m.begin(ctx)
	if err != nil {
		return 0, err
	}
	defer end()
	now := b.Info()
	onDisk := func(in tier.ID) bool { return in.Kind.IsStorage() }
	img, ok := now.Payload.(*batch.Image) // the memory of others may be a program's
	if !ok || img.Parts.Type == payload.ScatteredImage || now.Leased || img.Space().Lost() != nil ||
		now.State != batch.Idle && now.State != batch.TaskCreated ||
		onDisk(now.Space) || slices.ContainsFunc(b.Copies(), onDisk) {
		return 0, nil
	}
	var unlease func()
	if m.panics.Do("a batch's Shared", func() { unlease, _ = img.Hold() }); unlease == nil {
		return 0, nil
	}
	defer unlease()
	ctx, done, err := m.cfg.Builtin.Spare(ctx, quiet)
	if err != nil {
		return 0, err
	}
	defer done()
	moved := func(then batch.Info) bool { return then.State == batch.InTransit || then.Payload != now.Payload }
	ctx, watched := watch(ctx, img.Space(), b, moved)
	defer watched()

	// Spaces where the image has no room besides all clean images, or where it would persist, do
	// not count.
	what, disks := m.footprint(now.Descriptor, now.Bytes), reservation.AnyInTier(tier.Disk)
	left := without{disks, m.needed(disks, &what)}
	for _, s := range disks.Candidates(m.cfg.Reservations.Spaces(), nil) {
		persists := !m.cfg.PersistAhead && m.cfg.Persists != nil && m.cfg.Persists(s.ID())
		if now := s.State(); persists || now.Used()+now.Cached+what.in(s) > now.Limit {
			left.spaces = append(left.spaces, s)
		}
	}
	r, err := m.cfg.Reservations.TryReserve(left, what.body, &reservation.Options{
		Sized: what.pin, Moving: true, NoClearing: true, Purpose: reservation.Incoming,
	})
	if errors.Is(err, tier.ErrNoSpace) || errors.Is(err, reservation.ErrNoCandidate) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	disk := r.Space()
	before := disk.Evicted()
	_, e, _ := m.route(img, disk, "")
	if e == nil { // the program has unregistered it
		return 0, r.Release()
	}
	out, err := e.convert(ctx, img, r)
	released := r.Release() // now, because an open reservation would have the bytes of a clean image back
	switch {
	case err == nil:
	case errors.Is(err, image.ErrCorrupt): // the next user of the batch will report it; the disk has done nothing
		return 0, released
	case errors.Is(context.Cause(ctx), errStale):
		return what.body, released
	case errors.Is(err, batch.ErrUnmovable):
		return 0, released
	default:
		if bytes = what.body; errors.Is(err, tier.ErrOutOfBudget) { // others use the disks: nothing was begun
			bytes = 0
		}
		invalidate(ctx, err, disk)
		err = fmt.Errorf("copying batch %d from %s to %s: %w", now.ID, now.Space, disk.ID(), m.ofBatch(ctx, err, b))
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", context.Canceled, err)
		}
		return bytes, errors.Join(err, released)
	}
	full := disk.Evicted() > before // clean images were dropped for it before it was written
	emit := m.residentEvents(ctx, now, now.Space, disk.ID(), what.body, true)
	err = released
	if !b.AddClean(out, now.Descriptor, func(kind events.Kind) {
		switch kind {
		case events.CopyUsed:
			emit(events.AheadUsed)
		case events.CopyDropped:
			emit(events.AheadWasted)
		}
		emit(kind)
	}) {
		emit(events.AheadWasted)
		err = errors.Join(err, release(out))
	}
	if full {
		err = errors.Join(err, &tier.NoSpaceError{Space: disk.ID(), Requested: what.body, Cause: errNeeded})
	}
	return what.body, err
}
