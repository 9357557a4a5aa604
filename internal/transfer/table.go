package transfer

import (
	"context"
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

var _ Imaged = (*payload.Table)(nil)

// registerTables adds the converters between tables and images, compressed or not.
func (b *Builtin) registerTables(add Adder) error {
	for _, t := range []batch.PayloadType{batch.GPUImage, batch.HostImage, batch.DiskImage} {
		if err := errors.Join(add(batch.GPUTable, t, b.image), add(t, batch.GPUTable, b.toTable)); err != nil {
			return err
		}
	}
	for _, t := range []batch.PayloadType{batch.HostPacked, batch.DiskPacked, batch.GPUTable} {
		if err := add(t, batch.GPUTable, b.toTable); err != nil {
			return err
		}
	}
	return errors.Join(add(batch.GPUTable, batch.HostPacked, b.pack), add(batch.GPUTable, batch.DiskPacked, b.pack))
}

// fromTable returns the bytes of a table's image. To host memory the device does one batched copy
// of all buffers straight to their places, or one for each maxPiece of large tables; no device
// memory is needed. To disk, and where bytes must be looked at on their way to a device, it
// is the same a pinned chunk at a time. The checksums of a table that was an image before are
// known, others are made as the bytes come by.
func (b *Builtin) fromTable(ctx context.Context, t *payload.Table) (*source, error) {
	r, err := b.reader(ctx, t)
	if err != nil {
		return nil, err
	}
	s := &source{space: t.Space(), size: t.Descriptor().Body, desc: t.Descriptor(), device: r.parts, table: r}
	if r.sums != nil || len(t.Adjustments()) > 0 { // else the device's own copies are all that is needed
		s.check, s.ordered = r.finish, r.sums != nil
	}
	return s, nil
}

// descriptor returns the image's, when all bytes have come by.
func (s *source) descriptor() *batch.Descriptor {
	if s.table == nil || s.table.sums == nil {
		return s.desc
	}
	d := *s.desc
	d.Sums = s.table.sums.Sums
	return &d
}

// tableReader makes a table's bytes those of its image, wherever they go.
type tableReader struct {
	parts    image.Parts
	adjusted image.Parts
	sums     *image.Summer // nil if the sums are known
}

// reader prepares the reading of a table: bits that do not begin with a byte are moved
// here, because no copy of the device's can.
func (b *Builtin) reader(ctx context.Context, t *payload.Table) (*tableReader, error) {
	d := t.Descriptor()
	r := &tableReader{parts: image.PartsOf(d, t.Ranges(), t.Adjustments())}
	if d.Sums == nil {
		r.sums = image.NewSummer(d.Body)
	}
	var reads []image.Peek
	var crooked []*image.Part
	var bytes [][]byte
	for i := range r.parts {
		if p := &r.parts[i]; p.Adj != nil && p.Adj.How == payload.Bits && p.Adj.Base != 0 {
			buf := make([]byte, (p.Adj.Base+p.Adj.Count+7)/8)
			reads = append(reads, image.PeekInto(p.Addr, buf))
			bytes, crooked = append(bytes, buf), append(crooked, p)
		}
	}
	if err := b.Peek(ctx, t.Space(), reads); err != nil {
		return nil, err
	}
	for i, p := range crooked {
		p.Made = image.MadeBits(p.Adj, bytes[i])
	}
	r.adjusted = r.parts.Adjusted()
	return r, nil
}

// finish takes bytes that have been copied to the host, as staged's check does.
func (r *tableReader) finish(p []byte, off int64) error {
	r.adjusted.Apply(p, off)
	if r.sums != nil {
		r.sums.Add(p, off)
	}
	return nil
}

// toTable makes a table, whose buffers lie side by side in a few allocations.
func (b *Builtin) toTable(ctx context.Context, src batch.Payload, r reservation.Reservation) (out batch.Payload, err error) {
	from, ok := src.(Imaged)
	if !ok {
		return nil, fmt.Errorf("convert: %s is not an image", src.Type())
	}
	if r.Space().Kind() != tier.GPU {
		return nil, fmt.Errorf("convert: a table in %s: %w", r.Space().ID(), tier.ErrNotSupported)
	}
	largest := max(from.Descriptor().Body, largestShared(from))
	err = b.Permitted(ctx, r.Space(), from.Space(), largest, func(ctx context.Context) (err error) {
		out, err = b.tableOf(ctx, from, r)
		return err
	})
	return out, err
}

func (b *Builtin) tableOf(ctx context.Context, from Imaged, r reservation.Reservation) (_ batch.Payload, err error) {
	t := payload.TableParts{Descriptor: from.Descriptor(), Space: r.Space()}
	defer func() {
		if err != nil {
			for _, buf := range t.Buffers {
				err = errors.Join(err, buf.Release())
			}
			err = errors.Join(err, ReleaseAll(t.Shared))
		}
	}()
	defer noPanic(&err)
	old, _ := from.(*payload.Table)
	if err := scattered(&t, old, r); err != nil {
		return nil, err
	}
	if t.Shared, err = b.share(ctx, from, r); err != nil {
		return nil, err
	}
	if err := b.fillTable(ctx, &t, from, old); err != nil {
		return nil, err
	}
	return payload.NewTable(t), nil
}

// fillTable copies the bytes of a table's buffers.
func (b *Builtin) fillTable(ctx context.Context, t *payload.TableParts, from Imaged, old *payload.Table) error {
	switch {
	case len(t.Buffers) == 0:
		return nil
	case old != nil:
		dst, src := bufferByBuffer(t, old)
		return b.transfer(ctx, dst, src)
	}
	src, err := b.from(ctx, from)
	if err != nil {
		return err
	}
	return b.transfer(ctx, &sink{space: t.Space, device: image.PartsOf(t.Descriptor, t.Ranges, nil)}, src)
}

// bufferByBuffer is for copying a table as it is: the buffers one after the other stand for a body.
func bufferByBuffer(t *payload.TableParts, old *payload.Table) (dst *sink, src *source) {
	dst, src = &sink{space: t.Space}, &source{space: old.Space()}
	known := make(map[tier.Addr]bool)
	for i, to := range t.Ranges {
		if to.Length == 0 || known[to.Addr] {
			continue
		}
		known[to.Addr] = true
		from := old.Ranges()[i]
		src.device = append(src.device, image.Part{Off: src.size, N: from.Length, Addr: from.Addr})
		dst.device = append(dst.device, image.Part{Off: src.size, N: from.Length, Addr: to.Addr})
		src.size += from.Length
	}
	return dst, src
}

// TableBytes returns what a table of d is charged in a space at most, while it is made of
// an image or of another table.
func TableBytes(d *batch.Descriptor, space *tier.Space) (n int64) {
	for _, s := range d.Buffers {
		if s.Length > 0 {
			n += space.Charge(s.Length + 1) // bits that do not begin with a byte take one more
		}
	}
	return n
}
