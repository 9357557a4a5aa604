package convert

import (
	"context"
	"errors"
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Record opens the batch that h holds as an Arrow record. A plain image in host memory is
// opened in place: the record's buffers are the arena's, and its memory stays leased
// until the record and all that was taken from it are released, also after h is
// closed. Of every other payload, a program's own included, a converter first makes such an
// image, for which Record waits for room; the payload stays. Without a converter to the image
// the error is a *NoConverterError.
func (m *Mover) Record(ctx context.Context, h *batch.Handle) (arrow.RecordBatch, error) {
	return m.opened(ctx, h, "opening a record", nil)
}

// payloadOf returns the payload of a handle that must be open, for an operation that errors name.
func payloadOf(h *batch.Handle, operation string) (batch.Payload, error) {
	if h == nil {
		return nil, fmt.Errorf("convert: %s: the handle is nil", operation)
	}
	p := h.Payload()
	if p == nil {
		return nil, fmt.Errorf("convert: %s: the handle is closed: %w", operation, tier.ErrReleased)
	}
	return p, nil
}

// opened opens the wanted part of the batch that h holds, or all of it if want is nil.
func (m *Mover) opened(
	ctx context.Context, h *batch.Handle, operation string, want *image.Selection,
) (arrow.RecordBatch, error) {
	ctx, end, err := m.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	p, err := payloadOf(h, operation)
	if err != nil {
		return nil, err
	}
	by := opener{h, reservation.OwnerOf(ctx)}
	if by.owner == nil {
		by.owner = h.Owner()
	}
	rec, err := m.open(ctx, by, p, want)
	return rec, m.ofBatch(ctx, err, h.Batch())
}

// open opens the wanted part of a payload in any tier. Of an image on disk, or of a compressed one, it
// reads only that part. All others become a plain image in host memory first, which is opened in place.
func (m *Mover) open(
	ctx context.Context, by opener, p batch.Payload, want *image.Selection,
) (rec arrow.RecordBatch, err error) {
	defer guard.Error(&err, "convert: opening a batch")
	img, ok := p.(*batch.Image)
	inPlace := ok && img.Parts.Type == payload.PlainImage && img.Space().Kind().IsMemory()
	inPart := ok && !inPlace && want != nil &&
		img.Parts.Type != payload.ScatteredImage && !img.Space().Kind().IsDevice()
	if !inPlace && !inPart {
		if img, err = m.hostImage(ctx, p); err != nil {
			return nil, err
		}
		defer func() { rec, err = transfer.Released(rec, errors.Join(err, img.Release())) }()
	}
	desc, skip := img.Descriptor(), []int64(nil)
	if want != nil {
		c, err := want.Of(desc.Schema, desc.Rows)
		switch {
		case err != nil:
			return nil, err
		case c.From == c.To:
			return c.NoRows(desc)
		case inPart:
			return m.readColumns(ctx, by, img, c)
		}
		if desc, skip, err = c.Within(desc); err != nil {
			return nil, err
		}
	}
	extents, release, err := transfer.InPlace(img.Buffer())
	if err != nil {
		return nil, err
	}
	l := image.NewLease(release)
	by.enter(l, img.Space(), img, img.Bytes())
	return image.OpenRows(desc, skip, extents, l, transfer.FinderOf(img.Parts.Shared))
}

// hostImage makes a plain image of src in host memory, and waits for room in one piece. src does
// not change.
func (m *Mover) hostImage(ctx context.Context, src batch.Payload) (*batch.Image, error) {
	if err := src.Space().Lost(); err != nil {
		return nil, err
	}
	convert, err := m.cfg.Registry.Lookup(Form{src.Type(), src.Space().Kind()}, ImageIn(tier.Host))
	if err != nil {
		return nil, err
	}
	q := &request{
		m: m, to: reservation.AnyInTier(tier.Host), what: m.footprint(descriptorOf(src), src.Bytes()),
		room: reservation.Options{Purpose: reservation.Consuming}, waits: true, source: src.Space(),
	}
	var out batch.Payload
	err = q.inRoom(ctx, func(r *reservation.Reservation) (err error) {
		out, err = convert(ctx, src, r)
		return err
	})
	if errors.Is(err, errStale) {
		return nil, src.Space().Lost()
	}
	if err != nil {
		return nil, ofLost(err, src.Space())
	}
	img, ok := out.(*batch.Image)
	if !ok || img.Parts.Type != payload.PlainImage {
		err := fmt.Errorf("convert: the converter from %s in %s to %s made a %T",
			src.Type(), src.Space().ID(), ImageIn(tier.Host), out)
		return nil, errors.Join(err, release(out))
	}
	return img, nil
}

// opener is the handle that a record is opened from, and the owner of the record: that of the
// context, or else the handle's.
type opener struct {
	handle *batch.Handle
	owner  *reservation.Owner
}

// enter lists the record in a space as a holder of memory there, an image or a buffer.
func (by opener) enter(l *image.Lease, s *tier.Space, memory any, bytes int64) {
	if by.handle == nil { // an image that is no batch's
		return
	}
	v := books.HoldView{Kind: books.Record, Memory: memory, Bytes: bytes, About: by.handle.Batch()}
	if by.owner != nil {
		v.Owner = by.owner
	}
	l.Hold.Begin(s.Books, v)
}
