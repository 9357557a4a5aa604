package convert

import (
	"context"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Columns opens some columns and rows of the batch that h holds as an Arrow record. The
// batch stays what and where it is. The record has the schema's metadata, that of the
// fields, and the batch's own; columns that share a dictionary share it still. The
// caller releases it; it outlives the handle, which must be open until Columns returns.
// If the batch does not have what is wanted, the error is a *SelectionError. It is safe for
// concurrent use.
//
// From disk only what is needed is read: the chunks of 64 KiB (4 KiB of a batch that was made to be
// read by rows), and of a compressed batch the frames, that contain the wanted
// buffers, each checked against its checksum (a *CorruptError names the place). Requests are up to
// 2 MiB, and several run at once. The chunks are put into one piece of memory of a host space, for
// which Columns waits as Record does; the record leases all of it until the last of its buffers is
// released. Dictionaries that are images of their own come along whole if a wanted column uses them
// and they are not in that space yet.
//
// A row range reads less of columns whose values have a fixed width, of strings and binaries and of
// dictionary codes, and of structs and fixed-size lists of such columns. The place of strings is
// looked up first, in up to two chunks a column. Columns with anything else in them (lists, maps,
// views, unions, runs) are read whole, and then sliced.
//
// From host memory the record is opened in place, as Record does it, and leases the
// whole batch. From a GPU, and from a program's own form, a whole image is first made in
// host memory, as for Record.
func (m *Mover) Columns(ctx context.Context, h *batch.Handle, want image.Selection) (arrow.RecordBatch, error) {
	return m.opened(ctx, h, "opening columns", &want)
}

// readColumns reads the chosen part of an image on disk, or of a compressed one, into host memory,
// and waits for room in one piece there.
func (m *Mover) readColumns(
	ctx context.Context, by opener, img *batch.Image, c *image.Columns,
) (rec arrow.RecordBatch, err error) {
	b := m.cfg.Builtin
	read := func(pieces []image.Piece) error { return b.ReadPieces(ctx, img, nil, false, pieces) }
	p, err := c.Plan(img.Descriptor(), read)
	if err != nil {
		return nil, err
	}
	if p.Memory.Body == 0 && len(p.Memory.Dictionaries) == 0 {
		return p.Open(read, nil, image.NewLease(nil), nil)
	}
	q := &request{
		m: m, to: reservation.AnyInTier(tier.Host), what: m.footprint(p.Memory, 0),
		room: reservation.Options{Purpose: reservation.Consuming}, waits: true,
	}
	err = q.inRoom(ctx, func(r *reservation.Reservation) (err error) {
		rec, err = b.ReadColumns(ctx, p, img, r, by.enter)
		return err
	})
	return transfer.Released(rec, err)
}
