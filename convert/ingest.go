package convert

import (
	"context"
	"errors"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/lookup"
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
// On disk the image may be compressed, and is then a batch.DiskPacked.
//
// A dictionary of more than 4 KiB that is already in the space is not copied again. Ingest
// recognises it if it is the same arrow-go array as before, or that of a record which Record
// returned. It must not have changed since, as Arrow demands.
func (m *Mover) Ingest(ctx context.Context, rec arrow.RecordBatch, to reservation.Strategy) (batch.Payload, error) {
	return m.lay(ctx, rec, to, true)
}

// TryIngest is Ingest without waiting for room: if there is none, the error is a tier.NoSpaceError.
func (m *Mover) TryIngest(ctx context.Context, rec arrow.RecordBatch, to reservation.Strategy) (batch.Payload, error) {
	return m.lay(ctx, rec, to, false)
}

// lay plans the image of rec, and repeats ingest until dictionaries have not changed meanwhile.
func (m *Mover) lay(ctx context.Context, rec arrow.RecordBatch, to reservation.Strategy, waits bool) (_ batch.Payload, err error) {
	ctx, end, err := m.operations.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	l, err := m.cfg.Builtin.Layout(rec)
	if err != nil {
		return nil, err
	}
	defer l.Close()
	for renew := false; ; {
		p, err := m.ingest(ctx, l, to, waits, renew)
		switch {
		case errors.Is(err, errGone):
		case errors.Is(err, transfer.ErrChanged) && !renew:
			renew = true // a dictionary was changed in place: lay its present values out
		default:
			return p, err
		}
	}
}

// ingest reserves room for the planned image, allocates it and lays the bytes out. With renew it stores
// each dictionary again, even if the store already has it. errGone asks the caller to try again.
func (m *Mover) ingest(
	ctx context.Context, l *image.Layout, to reservation.Strategy, waits, renew bool,
) (_ batch.Payload, err error) {
	store := &m.cfg.Builtin.Dicts
	dicts := store.Resolve(l.Dictionaries(), renew)
	defer store.LetGo(dicts...)
	what := takes{body: l.Size(), dicts: transfer.Distinct(dicts)}
	var parts payload.Parts
	err = m.inRoom(ctx, &errand{to: to, what: &what, origin: reservation.Incoming(), waits: waits, slower: true, do: func(r reservation.Reservation) error {
		return m.pinned(r, &what, func() (err error) {
			parts, err = m.ingestImage(ctx, l, dicts, r)
			return err
		})
	}})
	if err == nil {
		parts.Descriptor, err = l.Descriptor()
	}
	if err != nil {
		return nil, errors.Join(err, parts.Release())
	}
	return payload.New(parts), nil
}

// ingestImage lays a record out, compressed if that should pay. It writes while the reservation is
// open, because a volume's file system may turn out to be full only at the write, and because the
// compressed size is known only then; inRoom then tries another space. After an error it has taken
// nothing.
func (m *Mover) ingestImage(
	ctx context.Context, l *image.Layout, dicts []*transfer.Dictionary, r reservation.Reservation,
) (parts payload.Parts, err error) {
	b := m.cfg.Builtin
	parts.Space = r.Space()
	if b.Choose.Packs(b.Codec, l.Size(), r.Space().ID(), true) {
		parts.Encoding = payload.Compressed
	}
	if parts.Shared, err = m.ingestDictionaries(ctx, l, dicts, r); err == nil {
		err = b.Lay(ctx, l, &parts, r)
	}
	if err != nil {
		return payload.Parts{}, errors.Join(err, parts.Release())
	}
	return parts, nil
}

// ingestDictionaries lays the dictionaries out that r's space does not have, with one permit for
// all.
func (m *Mover) ingestDictionaries(ctx context.Context, l *image.Layout, dicts []*transfer.Dictionary, r reservation.Reservation) (shared []batch.Shared, err error) {
	largest := int64(0)
	for _, d := range dicts {
		largest = max(largest, d.Body)
	}
	// The permit comes first. From the moment a dictionary is being copied, others wait for the
	// copy, the monitor among them, and the monitor must not wait for a program's permit.
	err = m.cfg.Builtin.Permitted(ctx, r.Space(), nil, largest, func(ctx context.Context) (err error) {
		shared, err = m.layDictionaries(ctx, l, dicts, r)
		return err
	})
	return shared, err
}

// layDictionaries returns a reference to each dictionary of l in the space of r. It lays those out
// that are missing. Afterwards each dictionary's Layout returns the shared descriptor.
func (m *Mover) layDictionaries(ctx context.Context, l *image.Layout, dicts []*transfer.Dictionary, r reservation.Reservation) (shared []batch.Shared, err error) {
	var seen lookup.Table[*transfer.Dictionary]
	for i, sub := range l.Dictionaries() {
		c, err := m.cfg.Builtin.Dicts.Acquire(ctx, dicts[i], r.Space(), func() (*tier.Buffer, *batch.Descriptor, error) {
			parts := payload.Parts{Space: r.Space()}
			err := m.cfg.Builtin.Lay(ctx, sub, &parts, r)
			if err == nil {
				parts.Descriptor, err = sub.Descriptor()
			}
			if err != nil {
				return nil, nil, errors.Join(err, parts.Release())
			}
			return parts.Buffers[0], parts.Descriptor, nil // a dictionary of its own is not empty
		})
		if err != nil {
			return nil, errors.Join(err, transfer.ReleaseAll(shared))
		}
		sub.Is(c.Descriptor())
		if seen.Of(dicts, dicts[i]) < i { // an earlier array is the same dictionary
			if err := c.Release(); err != nil {
				return nil, errors.Join(err, transfer.ReleaseAll(shared))
			}
			continue
		}
		shared = append(shared, c)
	}
	return shared, nil
}

// reserveSlower reserves for an errand whose request in the strategy's spaces failed with err. If
// it can never fit there, it tries the slower tiers, the fastest first, and waits if the errand
// may.
func (m *Mover) reserveSlower(ctx context.Context, e *errand, to reservation.Strategy, err error) (reservation.Reservation, error) {
	reserve := func(to reservation.Strategy) (reservation.Reservation, error) {
		if !e.waits {
			return m.cfg.Reservations.TryReserve(e.what.of(to), e.what.body, reservation.Moving(), e.origin)
		}
		return m.cfg.Reservations.Reserve(ctx, e.what.of(to), e.what.body, reservation.Moving(), e.origin)
	}
	if errors.Is(err, tier.ErrLost) { // the largest space may be lost, and the others too small
		r, again := reserve(to)
		if again == nil {
			return r, nil
		}
		err = again
	}
	if !errors.Is(err, reservation.ErrExceeded) {
		return reservation.Reservation{}, err
	}
	spaces := m.cfg.Reservations.Spaces()
	var room [16]*tier.Space
	slowest := tier.Kind(0)
	for _, s := range to.Candidates(spaces, room[:0]) {
		slowest = max(slowest, s.Kind())
	}
	for k := slowest + 1; slowest.Valid() && k <= tier.Disk; k++ {
		if len(spaces.InTier(k)) == 0 {
			continue
		}
		r, failed := reserve(reservation.AnyInTier(k))
		if errors.Is(failed, reservation.ErrExceeded) {
			err = failed // report the slowest tier's limit
			continue
		}
		if failed == nil {
			m.sayOversized(ctx, r.Bytes(), to, r.Space().ID())
		}
		return r, failed
	}
	return reservation.Reservation{}, err
}
