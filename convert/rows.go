package convert

import (
	"context"
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// ReadRows reads the next window of a batch of which rows are the Rows, into their memory, which is in
// space. release ends the use of the memory: it is called when the record and all that was taken from
// it are released, and also after an error. A scattered image, or a program's own form, is
// tier.ErrNotSupported.
//
// With the first window it brings the batch's dictionaries into space, for which it waits for room. They
// are rows.Shared from then on, and the caller releases them.
func (m *Mover) ReadRows(
	ctx context.Context, h *batch.Handle, rows *image.Rows, space *tier.Space, release func(),
) (_ arrow.RecordBatch, err error) {
	l := image.NewLease(release)
	defer func() {
		if err != nil {
			l.End()
		}
	}()
	ctx, end, err := m.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	defer guard.Error(&err, "convert: reading rows")
	p, err := payloadOf(h, "reading rows")
	if err != nil {
		return nil, err
	}
	img, ok := p.(*batch.Image)
	if !ok || img.Parts.Type == payload.ScatteredImage {
		return nil, fmt.Errorf("convert: reading rows of %s: %w", p.Type(), tier.ErrNotSupported)
	}
	if len(rows.Shared) == 0 && len(img.Parts.Shared) > 0 {
		err = m.shareIn(ctx, img, rows, space)
	}
	var rec arrow.RecordBatch
	if err == nil {
		read := func(pieces []image.Piece) error {
			return m.cfg.Builtin.ReadPieces(ctx, img, space, false, pieces)
		}
		rec, err = rows.Next(read, l, transfer.FinderOf(rows.Shared))
	}
	return rec, m.ofBatch(ctx, ofLost(err, img.Space()), h.Batch())
}

// shareIn sets rows.Shared to the dictionaries of img in space.
func (m *Mover) shareIn(ctx context.Context, img *batch.Image, rows *image.Rows, space *tier.Space) error {
	q := &request{
		m: m, to: reservation.Specific(space.ID()), waits: true,
		room: reservation.Options{Purpose: reservation.Consuming},
		what: footprint{dicts: m.cfg.Builtin.Dicts.Of(img.Descriptor().AllDictionaries())},
	}
	return q.inRoom(ctx, func(r *reservation.Reservation) (err error) {
		rows.Shared, err = m.cfg.Builtin.Share(ctx, img.Parts.Shared, img.Space(), r)
		return err
	})
}
