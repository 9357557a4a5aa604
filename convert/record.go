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
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Record opens the batch that h holds as an Arrow record. A host image is
// opened in place: the record's buffers are the arena's, and its memory stays leased
// until the record and all that was taken from it are released, also after h is
// closed. Every other payload is first made into a host image besides it, by the converter
// that is registered for its type and batch.HostImage; Record waits for room for that.
// So a program's own form opens like the built-in ones. Without a converter it is a
// *NoConverterError.
func (m *Mover) Record(ctx context.Context, h *batch.Handle) (arrow.RecordBatch, error) {
	ctx, end, err := m.operations.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	payload, err := payloadOf(h, "opening a record")
	if err != nil {
		return nil, err
	}
	if img, ok := payload.(*batch.Image); ok && img.Type() == batch.HostImage {
		return openImage(openedBy(ctx, h), img, nil)
	}
	img, err := m.hostImage(ctx, payload)
	if err != nil {
		return nil, m.ofBatch(ctx, err, h.Batch())
	}
	return openImage(openedBy(ctx, h), img, img)
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

// hostImage makes a host image of src, which stays, and waits for room in one piece.
func (m *Mover) hostImage(ctx context.Context, src batch.Payload) (*batch.Image, error) {
	p, err := m.inHost(ctx, src)
	if err != nil {
		return nil, err
	}
	img, ok := p.(*batch.Image)
	if !ok || img.Type() != batch.HostImage {
		return nil, errors.Join(mistaken(src, p), release(p))
	}
	return img, nil
}

// mistaken is the error of a converter to a host image that has made p.
func mistaken(src, p batch.Payload) (err error) {
	defer guard.Error(&err, "Payload.Type")
	return fmt.Errorf("convert: the converter from %s to %s made a %s", src.Type(), batch.HostImage, p.Type())
}

func (m *Mover) inHost(ctx context.Context, src batch.Payload) (out batch.Payload, err error) {
	if err := src.Space().Lost(); err != nil {
		return nil, err
	}
	q := &request{
		Strategy: reservation.AnyInTier(tier.Host), m: m, what: m.takes(descriptorOf(src), src.Bytes()),
		origin: reservation.Consuming(), waits: true, source: src.Space(),
	}
	err = q.inRoom(ctx, func(r reservation.Reservation) error {
		return m.pinned(r, &q.what, func() (err error) {
			out, err = m.cfg.Registry.convert(ctx, src, batch.HostImage, r)
			return err
		})
	})
	if errors.Is(err, errStale) {
		return nil, src.Space().Lost()
	}
	return out, ofLost(err, src.Space())
}

// by is the handle that a record is opened from, and whose the record is: the owner of the
// context, or else that of the handle.
type by struct {
	handle *batch.Handle
	owner  *reservation.Owner
}

func openedBy(ctx context.Context, h *batch.Handle) by {
	o := reservation.OwnerOf(ctx)
	if o == nil {
		o = h.Owner()
	}
	return by{h, o}
}

// enter enters the record into the account of the space in which its memory lies: an
// image or a buffer.
func (who by) enter(l *image.Lease, s *tier.Space, memory any, bytes int64) {
	if who.handle == nil { // an image that is no batch's
		return
	}
	v := books.HoldView{Kind: books.Record, Memory: memory, Bytes: bytes, About: who.handle.Batch().Inside()}
	if who.owner != nil {
		v.Owner = who.owner
	}
	l.Hold.Begin(s.Books(), v)
}

// openImage opens a host image. owned, if not nil, is released as soon as the
// record's lease is taken.
func openImage(who by, img, owned *batch.Image) (arrow.RecordBatch, error) {
	rec, err := func() (arrow.RecordBatch, error) {
		extents, release, err := transfer.InPlace(img.Buffer())
		if err != nil {
			return nil, err
		}
		l := image.NewLease(release)
		who.enter(l, img.Space(), img, img.Bytes())
		return image.OpenRows(img.Descriptor(), nil, extents, l, transfer.FinderOf(img.Shared()))
	}()
	if owned != nil {
		err = errors.Join(err, owned.Release())
	}
	return rec, err
}

// Verify reads all bytes of an image on disk, compressed or not, and compares them with
// their checksums. Other bytes are a *CorruptError. Its dictionaries are not read.
func (m *Mover) Verify(ctx context.Context, p batch.Payload) error {
	if p == nil {
		return errors.New("convert: verifying an image: the payload is nil")
	}
	return m.verify(ctx, func(ctx context.Context) error { return m.cfg.Builtin.Verify(ctx, p) })
}

// verify runs f with a permit to read from a disk.
func (m *Mover) verify(ctx context.Context, f func(context.Context) error) error {
	ctx, end, err := m.operations.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	return m.cfg.Builtin.OnDisk(ctx, transfer.DiskUnderWay, false, f)
}
