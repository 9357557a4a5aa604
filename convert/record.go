package convert

import (
	"context"
	"errors"
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Record opens the batch that h holds as an Arrow record. A host image is
// opened in place: the record's buffers are the arena's, and its memory stays leased
// until the record and all that was taken from it are released, also after h is
// closed. From another tier the image is first copied to host memory, for
// which Record waits.
func (m *Mover) Record(ctx context.Context, h *batch.Handle) (arrow.RecordBatch, error) {
	ctx, leave, err := m.gate.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	payload := h.Payload()
	if payload == nil {
		return nil, fmt.Errorf("convert: opening the record of a closed handle: %w", tier.ErrReleased)
	}
	if img, ok := payload.(*batch.Image); ok && img.Space().Kind() == tier.Host {
		return openImage(img, nil)
	}
	src, ok := payload.(imaged)
	if !ok {
		return nil, fmt.Errorf("convert: %s cannot be opened as a record", payload.Type())
	}
	p, err := m.inHost(ctx, src)
	for errors.Is(err, errGone) {
		p, err = m.inHost(ctx, src)
	}
	if err != nil {
		return nil, ofBatch(err, h.Batch().ID())
	}
	img, ok := p.(*batch.Image)
	if !ok {
		return nil, errors.Join(fmt.Errorf("convert: %s cannot be opened as a record", p.Type()), p.Release())
	}
	return openImage(img, img)
}

// inHost makes a host image beside src, and waits for room in one piece.
func (m *Mover) inHost(ctx context.Context, src imaged) (out batch.Payload, err error) {
	if err := src.Space().Lost(); err != nil {
		return nil, err
	}
	to := reservation.AnyInTier(tier.Host)
	what := takes{body: src.Descriptor().Body, dicts: m.cfg.Builtin.dicts.of(src.Descriptor().AllDictionaries())}
	waiting, done := untilLost(ctx, src.Space())
	defer done()
	err = m.inRoom(waiting, true, to, m.reserver(waiting, &what), func(r reservation.Reservation) error {
		return m.pinned(r, &what, func() (err error) {
			out, err = m.cfg.Registry.convert(ctx, src, batch.HostImage, r)
			return err
		})
	})
	if errors.Is(err, errLost) {
		return nil, src.Space().Lost()
	}
	return out, ofLost(err, src.Space())
}

// openImage opens a host image. owned, if not nil, is released as soon as the
// record's lease is taken.
func openImage(img, owned *batch.Image) (arrow.RecordBatch, error) {
	rec, err := func() (arrow.RecordBatch, error) {
		extents, release, err := inPlace(img.Buffer())
		if err != nil {
			return nil, err
		}
		return openRecord(img.Descriptor(), extents, newLease(release), finderOf(img.Shared()))
	}()
	if owned != nil {
		err = errors.Join(err, owned.Release())
	}
	return rec, err
}

// errNotInPlace says that memory cannot be read where it is.
func errNotInPlace(m tier.Memory) error {
	return fmt.Errorf("convert: %T cannot be opened in place", m)
}
