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
// is written while no other transfer with a disk is under way, nor was within the time quiet. The
// error matches context.Canceled if there is one, or if one begins: then the pieces under way are
// the last.
func (m inside) WriteAhead(ctx context.Context, b *batch.Batch, quiet time.Duration) (bytes int64, err error) {
	ctx, end, err := m.operations.begin(ctx)
	if err != nil {
		return 0, err
	}
	defer end()
	now := b.Info()
	onDisk := func(in tier.ID) bool { return in.Kind == tier.Disk }
	if now.State != batch.Idle && now.State != batch.TaskCreated || now.Leased || present(now, "copy") != nil ||
		onDisk(now.Space) || slices.ContainsFunc(b.Copies(), onDisk) {
		return 0, nil
	}
	var unlease func()
	m.panics.Do("a batch's Shared", func() {
		// A program's payload, or a scattered image, may have other memory.
		if img, ok := now.Payload.(*batch.Image); ok && img.Encoding() != payload.Scattered {
			unlease, _ = img.Hold()
		}
	})
	if unlease == nil {
		return 0, nil
	}
	defer unlease()
	ctx, done, err := m.cfg.Builtin.Spare(ctx, quiet)
	if err != nil {
		return 0, err
	}
	defer done()
	moved := func(then batch.Info) bool { return then.State == batch.InTransit || then.Payload != now.Payload }
	ctx, watched := m.watch(ctx, now.Payload.Space(), b, moved)
	defer watched()
	bytes, err = m.preClean(ctx, b, now)
	switch {
	case err == nil || errors.Is(err, errNeeded):
		return bytes, err
	case errors.Is(context.Cause(ctx), errStale):
		return bytes, nil
	case errors.Is(err, errGone) || errors.Is(err, batch.ErrUnmovable):
		return 0, nil
	case ctx.Err() != nil:
		err = fmt.Errorf("%w: %w", context.Canceled, err)
	}
	return bytes, err
}

// preClean writes the image that the batch was seen with to a disk, and adds it as a clean image.
func (m *Mover) preClean(ctx context.Context, b *batch.Batch, now batch.Info) (bytes int64, err error) {
	what := m.takes(now.Descriptor, now.Bytes)
	// Spaces where the image has no room besides all clean images, or where it would persist, do
	// not count.
	disks := reservation.AnyInTier(tier.Disk)
	left := &request{Strategy: disks, attempts: attempts{without: m.needed(disks, &what)}}
	for _, s := range disks.Candidates(m.cfg.Reservations.Spaces(), nil) {
		persists := !m.cfg.PersistAhead && m.cfg.Persists != nil && m.cfg.Persists(s.ID())
		if u := s.Usage(); persists || u.Used()+u.Cached+what.in(s) > s.Limit() {
			left.without = append(left.without, s)
		}
	}
	if len(left.Candidates(m.cfg.Reservations.Spaces(), nil)) == 0 {
		return 0, nil
	}
	r, err := m.cfg.Reservations.TryReserve(what.of(left), what.body,
		reservation.Moving(), reservation.WithoutClearing(), reservation.Incoming())
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
	if errors.Is(err, image.ErrCorrupt) { // the next user of the batch will report it; the disk has done nothing
		return 0, nil
	}
	if err != nil {
		distrust(ctx, err, disk)
		if errors.Is(err, tier.ErrOutOfBudget) { // others use the disks: nothing was begun
			what.body = 0
		}
		err = m.ofBatch(ctx, err, b)
		return what.body, fmt.Errorf("copying batch %d from %s to %s: %w", now.ID, now.Space, disk.ID(), err)
	}
	full := disk.Evicted() > before // clean images were dropped for it before it was written
	counted := m.countAhead(ctx, now, now.Space, disk.ID(), what.body)
	emit := m.cleanEvents(ctx, now, now.Space, disk.ID(), what.body, true)
	if !b.Inside().AddClean(out, now.Descriptor, func(kind events.Kind) {
		switch kind {
		case events.CopyUsed:
			counted(events.AheadUsed)
		case events.CopyDropped:
			counted(events.AheadWasted)
		}
		emit(kind)
	}) {
		counted(events.AheadWasted)
		err = release(out)
	}
	if full {
		err = errors.Join(err, &tier.NoSpaceError{Space: disk.ID(), Requested: what.body, Cause: errNeeded})
	}
	return what.body, err
}
