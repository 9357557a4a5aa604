package convert

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Ingest lays rec out as an image and returns it; the caller owns it. The image goes to the first
// space of the strategy that stays below its trigger, or else to the first that has room, for which
// Ingest waits. If it is too large for every space of the strategy, it goes to the first slower
// tier where it fits, and Ingest emits events.Oversized. Ingest skips a space that is lost
// meanwhile, and only reads the record.
//
// On disk the image may be compressed.
//
// A dictionary of more than 4 KiB that is already in the space is not copied again. Ingest
// recognises it if it is the same arrow-go array as before, or that of a record which Record
// returned. It must not have changed since, as Arrow demands. Of a dictionary that begins with the
// values of an earlier one, as after a delta of an Arrow stream, only the others are copied: see
// batch.Descriptor.From.
func (m *Mover) Ingest(ctx context.Context, rec arrow.RecordBatch, to reservation.Strategy) (batch.Payload, error) {
	return m.IngestAs(ctx, rec, to, true, false)
}

// TryIngest is Ingest without waiting for room: if there is none, the error is a tier.NoSpaceError.
func (m *Mover) TryIngest(ctx context.Context, rec arrow.RecordBatch, to reservation.Strategy) (batch.Payload, error) {
	return m.IngestAs(ctx, rec, to, false, false)
}

// IngestAs is Ingest, or without waits TryIngest. With byRows it is for a batch that is to be read
// some rows at a time, and makes a checksum for each 4 KiB.
//
// It plans the image of rec, reserves room, and lays the image out there, compressed if that
// should pay. It writes while the reservation is open, because a volume's file system may turn out to
// be full only at the write, and because the compressed size is known only then.
//
// There are these reasons for another round: those of request.end; the record is too large for the
// strategy; a GPU was lost, and the other spaces may be too small; a dictionary has other values than
// before.
func (m *Mover) IngestAs(
	ctx context.Context, rec arrow.RecordBatch, to reservation.Strategy, waits, byRows bool,
) (_ batch.Payload, err error) {
	ctx, end, err := m.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	b := m.cfg.Builtin
	inline := int64(image.MaxInline)
	if b.Outside {
		inline = 0
	}
	l, err := image.NewLayout(rec, inline)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	if byRows {
		l.ByRows()
	}
	q := &request{
		m: m, to: to, what: footprint{body: l.Desc.Body}, waits: waits,
		room: reservation.Options{Purpose: reservation.Incoming},
	}
	var layouts [][]*image.Layout // of q.what.dicts
	letGo := func() {}
	defer func() { letGo() }()
	if all := l.Dictionaries; len(all) > 0 {
		q.what.dicts, layouts, letGo = b.Dicts.Resolve(all, false)
	}
	defer q.end(nil) // after a panic
	var lost, changed bool
	slowest, oversized := tier.Kind(0), false // of the tiers that were tried
	for {
		r, err := q.reserve(ctx)
		if errors.Is(err, reservation.ErrExceeded) {
			all := m.cfg.Reservations.Spaces() // the faster tiers first
			for _, s := range q.to.Candidates(all, nil) {
				slowest = max(slowest, s.Kind())
			}
			next := slices.IndexFunc(all.All(), func(s *tier.Space) bool { return s.Kind() > slowest })
			if slowest.Valid() && next >= 0 {
				q.to, oversized = reservation.AnyInTier(all.All()[next].Kind()), true
				continue
			}
		}
		parts := payload.Parts{Space: r.Space()}
		bytes := r.Bytes()
		if err == nil {
			if b.Choose.Packs(b.Codec, l.Desc.Body, r.Space().ID(), true) {
				parts.Type = payload.CompressedImage
			}
			largest := l.Desc.Body
			for _, d := range q.what.dicts {
				largest = max(largest, d.Body)
			}
			// The permit comes first. From the moment a dictionary is being copied, others wait for the
			// copy, the monitor among them, and the monitor must not wait for a program's permit.
			err = b.Permitted(ctx, r.Space(), nil, largest, func(ctx context.Context) (err error) {
				if len(layouts) > 0 {
					parts.Shared, err = b.LayDictionaries(ctx, q.what.dicts, layouts, r)
				}
				if err == nil {
					err = b.Lay(ctx, l, &parts, r)
				}
				return err
			})
			if err == nil {
				parts.Descriptor, err = l.Descriptor()
			}
			if err != nil {
				err = errors.Join(err, parts.Release())
			}
		}
		again, err := q.end(err)
		switch {
		case err == nil:
			if oversized {
				got := parts.Space.ID()
				guard.Logger(m.cfg.Logger).Warn(
					"spillway: a batch is larger than the space it was meant for; it went to a slower one",
					"bytes", bytes, "wanted", to.String(), "got", got.String())
				m.emit(events.Event{
					Kind: events.Oversized, Context: ctx, Origin: events.From(ctx), To: got, Bytes: bytes,
					Text: fmt.Sprintf("it was to go to %s", to),
				})
			}
			return payload.New(parts), nil
		case again:
		case errors.Is(err, tier.ErrLost) && !lost:
			lost = true
		case errors.Is(err, transfer.ErrChanged) && !changed:
			changed = true // in place: lay its present values out
			letGo()
			q.what.dicts, layouts, letGo = b.Dicts.Resolve(l.Dictionaries, true)
		default:
			return nil, err
		}
	}
}
