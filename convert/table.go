package convert

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

var _ imaged = (*batch.Table)(nil)

// registerTables adds the converters between tables and images, compressed or not.
func (b *Builtin) registerTables(g *Registry) error {
	for _, t := range []batch.PayloadType{batch.GPUImage, batch.HostImage, batch.DiskImage} {
		if err := errors.Join(g.registerBuiltin(batch.GPUTable, t, b.fromTable), g.registerBuiltin(t, batch.GPUTable, b.toTable)); err != nil {
			return err
		}
	}
	for _, t := range []batch.PayloadType{batch.HostPacked, batch.DiskPacked, batch.GPUTable} {
		if err := g.registerBuiltin(t, batch.GPUTable, b.toTable); err != nil {
			return err
		}
	}
	return errors.Join(g.registerBuiltin(batch.GPUTable, batch.HostPacked, b.pack), g.registerBuiltin(batch.GPUTable, batch.DiskPacked, b.pack))
}

// fromTable makes the image of a table. To host memory the device does one batched copy of
// all buffers straight to their places, or one for each maxPiece of large tables; no device
// memory is needed. To disk, and where bytes must be looked at on their way to a device, it
// is the same a pinned chunk at a time. The checksums of a table that was an image before are
// known, others are made as the bytes come by.
func (b *Builtin) fromTable(ctx context.Context, src batch.Payload, r reservation.Reservation) (out batch.Payload, err error) {
	from, ok := src.(*batch.Table)
	if !ok {
		return nil, fmt.Errorf("convert: %s is not a table", src.Type())
	}
	largest := max(from.Descriptor().Body, largestShared(from))
	err = b.permitted(ctx, r.Space(), from.Space(), largest, func(ctx context.Context) (err error) {
		out, err = b.imageOfTable(ctx, from, r)
		return err
	})
	return out, err
}

func (b *Builtin) imageOfTable(ctx context.Context, from *batch.Table, r reservation.Reservation) (batch.Payload, error) {
	desc := from.Descriptor()
	buf, err := r.AllocCuts(desc.Body, desc.Cuts())
	if err != nil {
		return nil, err
	}
	shared, err := b.share(ctx, from, r)
	if err != nil {
		return nil, errors.Join(err, buf.Release())
	}
	err = safely(func() (err error) { desc, err = b.copyTable(ctx, buf, from); return err })
	if err != nil {
		return nil, errors.Join(err, releaseAll(shared), buf.Release())
	}
	return batch.NewImage(desc, buf, r.Space(), shared...), nil
}

// tableReader makes a table's bytes those of its image, wherever they go.
type tableReader struct {
	table    *batch.Table
	parts    image.Parts
	adjusted image.Parts
	sums     *image.Summer // nil if the sums are known
}

// reader prepares the reading of a table: bits that do not begin with a byte are moved
// here, because no copy of the device's can.
func (b *Builtin) reader(ctx context.Context, t *batch.Table) (*tableReader, error) {
	d := t.Descriptor()
	r := &tableReader{table: t, parts: image.PartsOf(d, t.Ranges(), t.Adjustments())}
	if d.Sums == nil {
		r.sums = image.NewSummer(d.Body)
	}
	var reads []image.Peek
	var crooked []*image.Part
	var bytes [][]byte
	for i := range r.parts {
		if p := &r.parts[i]; p.Adj != nil && p.Adj.How == batch.Bits && p.Adj.Base != 0 {
			buf := make([]byte, (p.Adj.Base+p.Adj.Count+7)/8)
			reads = append(reads, image.PeekInto(p.Addr, buf))
			bytes, crooked = append(bytes, buf), append(crooked, p)
		}
	}
	if err := b.peek(ctx, t.Space(), reads); err != nil {
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

// straight says whether the device's own copies are all that is needed.
func (r *tableReader) straight() bool { return r.sums == nil && len(r.table.Adjustments()) == 0 }

// descriptor returns the image's, when all bytes have come by.
func (r *tableReader) descriptor() *batch.Descriptor {
	if r.sums == nil {
		return r.table.Descriptor()
	}
	d := *r.table.Descriptor()
	d.Sums = r.sums.Sums
	return &d
}

// fetch gathers a chunk from the device.
func (r *tableReader) fetch(dev tier.Device, s tier.Stream) fetch {
	var regions []tier.Region // fetches are started one at a time
	return func(p []byte, off int64) (func() error, error) {
		regions = r.parts.Gather(regions[:0], p, off)
		return wait(copyRegions(dev, s, regions))
	}
}

// copyRegions puts copies on a stream as one piece of work; nil if there are none.
func copyRegions(dev tier.Device, s tier.Stream, regions []tier.Region) (tier.Event, error) {
	if len(regions) == 0 {
		return nil, nil
	}
	if err := dev.CopyRegions(s, regions); err != nil {
		return nil, err
	}
	return record(dev, s)
}

// copyTable puts the image of a table into a buffer and returns the image's descriptor.
func (b *Builtin) copyTable(ctx context.Context, dst *tier.Buffer, from *batch.Table) (*batch.Descriptor, error) {
	r, err := b.reader(ctx, from)
	if err != nil {
		return nil, err
	}
	if dst == nil {
		return r.descriptor(), nil
	}
	src := from.Space()
	switch m := dst.Memory().(type) {
	case tier.HostMemory:
		err = b.onStream(ctx, src, func(dev tier.Device, s tier.Stream) error { return r.toHost(ctx, dev, s, m) })
	case tier.DeviceMemory:
		err = b.tableToDevice(ctx, r, dst, m)
	case tier.FileMemory:
		err = b.tableThrough(ctx, r, src.Node(), drainFile(ctx, b.metered(dst.Space(), m)))
	default:
		err = fmt.Errorf("convert: a table to %T: %w", dst.Memory(), tier.ErrNotSupported)
	}
	if err != nil {
		return nil, err
	}
	return r.descriptor(), nil
}

// tableThrough passes a table's image through pinned chunks.
func (b *Builtin) tableThrough(ctx context.Context, r *tableReader, node int, drain drain) error {
	pool, err := b.Staging(node)
	if err != nil {
		return err
	}
	return b.onStream(ctx, r.table.Space(), func(dev tier.Device, s tier.Stream) error {
		return b.staged(ctx, node, r.table.Descriptor().Body, r.fetch(dev, s), drain, r.finish,
			r.sums != nil && pool.Chunk()%batch.SumChunk != 0)
	})
}

// toHost copies straight to the places of the image.
func (r *tableReader) toHost(ctx context.Context, dev tier.Device, s tier.Stream, h tier.HostMemory) error {
	pieces := piecesOf(h, maxPiece)
	var regions []tier.Region
	return copies(ctx, len(pieces), func(i int) (tier.Event, error) {
		regions = r.parts.Gather(regions[:0], pieces[i].p, pieces[i].off)
		return copyRegions(dev, s, regions)
	}, func(i int) error { return r.finish(pieces[i].p, pieces[i].off) })
}

// deviceCopy is a copy from device memory to device memory.
type deviceCopy struct {
	dst, src tier.Addr
	n        int64
}

// tableToDevice makes an image on a device. Bytes that must be looked at go through pinned
// chunks, also if it is the same device.
func (b *Builtin) tableToDevice(ctx context.Context, r *tableReader, dst *tier.Buffer, m tier.DeviceMemory) error {
	err := tier.ErrNotSupported
	if r.straight() {
		copies := make([]deviceCopy, len(r.parts))
		for i, p := range r.parts {
			copies[i] = deviceCopy{m.Addr() + tier.Addr(p.Off), p.Addr, p.N}
		}
		if err = b.zero(ctx, dst.Space(), m); err == nil {
			err = b.copyOnDevices(ctx, dst.Space(), r.table.Space(), copies)
		}
	}
	if !errors.Is(err, tier.ErrNotSupported) {
		return err
	}
	return b.onStreams(ctx, dst.Space(), r.table.Space(), func(dev tier.Device, s tier.Stream, from tier.Device, out tier.Stream) error {
		node := r.table.Space().Node()
		pool, err := b.Staging(node)
		if err != nil {
			return err
		}
		return b.staged(ctx, node, r.table.Descriptor().Body, r.fetch(from, out), drainDevice(dev, s, m), r.finish,
			r.sums != nil && pool.Chunk()%batch.SumChunk != 0)
	})
}

// zero clears device memory: what an image has between its buffers.
func (b *Builtin) zero(ctx context.Context, space *tier.Space, m tier.DeviceMemory) error {
	return b.onStream(ctx, space, func(dev tier.Device, s tier.Stream) error {
		return await(recorded(dev, s, dev.Fill(s, m.Addr(), 0, m.Size())))
	})
}

// onStreams is onStream for two spaces. Streams are borrowed in the order of the spaces: two
// moves in opposite directions would else each hold what the other needs.
func (b *Builtin) onStreams(ctx context.Context, one, other *tier.Space, f func(tier.Device, tier.Stream, tier.Device, tier.Stream) error) error {
	if other.ID().Ordinal < one.ID().Ordinal {
		return b.onStreams(ctx, other, one, func(d1 tier.Device, s1 tier.Stream, d2 tier.Device, s2 tier.Stream) error {
			return f(d2, s2, d1, s1)
		})
	}
	return b.onStream(ctx, one, func(d1 tier.Device, s1 tier.Stream) error {
		if one == other { // a second stream could be one too many
			return f(d1, s1, d1, s1)
		}
		return b.onStream(ctx, other, func(d2 tier.Device, s2 tier.Stream) error { return f(d1, s1, d2, s2) })
	})
}

// copyOnDevices copies within a device, in batches, or to its peer. Devices that cannot reach
// each other are tier.ErrNotSupported.
func (b *Builtin) copyOnDevices(ctx context.Context, dst, src *tier.Space, rest []deviceCopy) error {
	size := int64(0)
	for _, c := range rest {
		size += c.n
	}
	var peer tier.Device
	if dst != src {
		pool, err := b.Streams(dst.ID())
		if err != nil {
			return err
		}
		peer = pool.Device()
	}
	return b.onStream(ctx, src, func(dev tier.Device, s tier.Stream) error {
		var regions []tier.Region
		return copies(ctx, int((size+maxPiece-1)/maxPiece), func(int) (tier.Event, error) {
			regions, rest = onePiece(regions[:0], rest)
			return copyPiece(dev, s, peer, regions)
		}, nil)
	})
}

// onePiece takes maxPiece bytes of the copies.
func onePiece(to []tier.Region, copies []deviceCopy) ([]tier.Region, []deviceCopy) {
	for room := int64(maxPiece); room > 0 && len(copies) > 0; {
		c := &copies[0]
		n := min(c.n, room)
		to = append(to, tier.Region{Dst: c.dst, Src: c.src, Size: n})
		room -= n
		if n == c.n {
			copies = copies[1:]
			continue
		}
		*c = deviceCopy{c.dst + tier.Addr(n), c.src + tier.Addr(n), c.n - n}
	}
	return to, copies
}

// copyPiece copies regions within dev, or to a peer if that is not nil.
func copyPiece(dev tier.Device, s tier.Stream, peer tier.Device, regions []tier.Region) (tier.Event, error) {
	if peer == nil {
		return copyRegions(dev, s, regions)
	}
	for i, r := range regions {
		if err := dev.CopyPeer(s, r.Dst, peer, r.Src, r.Size); err != nil {
			if i > 0 { // what is on the stream already must not go on without us
				err = errors.Join(err, s.Sync())
			}
			return nil, err
		}
	}
	return record(dev, s)
}

// toTable makes a table, whose buffers lie side by side in a few allocations.
func (b *Builtin) toTable(ctx context.Context, src batch.Payload, r reservation.Reservation) (out batch.Payload, err error) {
	from, ok := src.(imaged)
	if !ok {
		return nil, fmt.Errorf("convert: %s is not an image", src.Type())
	}
	if r.Space().Kind() != tier.GPU {
		return nil, fmt.Errorf("convert: a table in %s: %w", r.Space().ID(), tier.ErrNotSupported)
	}
	largest := max(from.Descriptor().Body, largestShared(from))
	err = b.permitted(ctx, r.Space(), from.Space(), largest, func(ctx context.Context) (err error) {
		out, err = b.tableOf(ctx, from, r)
		return err
	})
	return out, err
}

func (b *Builtin) tableOf(ctx context.Context, from imaged, r reservation.Reservation) (_ batch.Payload, err error) {
	t := batch.TableParts{Descriptor: from.Descriptor(), Space: r.Space()}
	defer func() {
		if err != nil {
			for _, buf := range t.Buffers {
				err = errors.Join(err, buf.Release())
			}
			err = errors.Join(err, releaseAll(t.Shared))
		}
	}()
	defer noPanic(&err)
	old, _ := from.(*batch.Table)
	if err := scattered(&t, old, r); err != nil {
		return nil, err
	}
	if t.Shared, err = b.share(ctx, from, r); err != nil {
		return nil, err
	}
	if err := b.fillTable(ctx, &t, from, old); err != nil {
		return nil, err
	}
	return batch.NewTable(t), nil
}

// fillTable copies the bytes of a table's buffers.
func (b *Builtin) fillTable(ctx context.Context, t *batch.TableParts, from imaged, old *batch.Table) error {
	if len(t.Buffers) == 0 {
		return nil
	}
	if old != nil {
		return b.tableToTable(ctx, t, old)
	}
	parts := image.PartsOf(t.Descriptor, t.Ranges, nil)
	if packed, ok := from.(*batch.Packed); ok {
		return b.onStream(ctx, t.Space, func(dev tier.Device, s tier.Stream) error {
			return b.unpack(ctx, t.Space, packed, drainTarget(drainTable(dev, s, parts)))
		})
	}
	img, ok := from.(*batch.Image)
	if !ok {
		return fmt.Errorf("convert: a table of %T: %w", from, tier.ErrNotSupported)
	}
	switch m := img.Buffer().Memory().(type) {
	case tier.HostMemory:
		return b.onStream(ctx, t.Space, func(dev tier.Device, s tier.Stream) error { return hostToTable(ctx, dev, s, parts, m) })
	case tier.DeviceMemory:
		return b.deviceToTable(ctx, t.Space, parts, img.Space(), m)
	case tier.FileMemory:
		return b.onStream(ctx, t.Space, func(dev tier.Device, s tier.Stream) error {
			return b.verified(ctx, t.Space.Node(), t.Descriptor, b.metered(img.Space(), m), drainTable(dev, s, parts))
		})
	}
	return fmt.Errorf("convert: a table of %T: %w", img.Buffer().Memory(), tier.ErrNotSupported)
}

// hostToTable is the way back of toHost.
func hostToTable(ctx context.Context, dev tier.Device, s tier.Stream, parts image.Parts, h tier.HostMemory) error {
	pieces := piecesOf(h, maxPiece)
	var regions []tier.Region
	return copies(ctx, len(pieces), func(i int) (tier.Event, error) {
		regions = parts.Scatter(regions[:0], pieces[i].p, pieces[i].off)
		return copyRegions(dev, s, regions)
	}, nil)
}

// deviceToTable takes an image on a device apart.
func (b *Builtin) deviceToTable(ctx context.Context, dst *tier.Space, parts image.Parts, src *tier.Space, m tier.DeviceMemory) error {
	copies := make([]deviceCopy, len(parts))
	for i, p := range parts {
		copies[i] = deviceCopy{p.Addr, m.Addr() + tier.Addr(p.Off), p.N}
	}
	err := b.copyOnDevices(ctx, dst, src, copies)
	if !errors.Is(err, tier.ErrNotSupported) {
		return err
	}
	return b.onStreams(ctx, dst, src, func(dev tier.Device, s tier.Stream, from tier.Device, out tier.Stream) error {
		return b.staged(ctx, src.Node(), m.Size(), fetchDevice(from, out, m), drainTable(dev, s, parts), nil, false)
	})
}

// tableToTable copies buffer by buffer, as they are.
func (b *Builtin) tableToTable(ctx context.Context, t *batch.TableParts, old *batch.Table) error {
	var copies []deviceCopy
	var in, out image.Parts // the buffers one after the other, in place of a body
	size := int64(0)
	known := make(map[tier.Addr]bool)
	for i, to := range t.Ranges {
		if to.Length == 0 || known[to.Addr] {
			continue
		}
		known[to.Addr] = true
		from := old.Ranges()[i]
		copies = append(copies, deviceCopy{to.Addr, from.Addr, from.Length})
		in = append(in, image.Part{Off: size, N: from.Length, Addr: from.Addr})
		out = append(out, image.Part{Off: size, N: from.Length, Addr: to.Addr})
		size += from.Length
	}
	err := b.copyOnDevices(ctx, t.Space, old.Space(), copies)
	if !errors.Is(err, tier.ErrNotSupported) {
		return err
	}
	r := &tableReader{table: old, parts: in}
	return b.onStreams(ctx, t.Space, old.Space(), func(dev tier.Device, s tier.Stream, from tier.Device, read tier.Stream) error {
		return b.staged(ctx, old.Space().Node(), size, r.fetch(from, read), drainTable(dev, s, out), nil, false)
	})
}

// drainTable scatters chunks. Lanes share the stream and use it one at a time.
func drainTable(dev tier.Device, s tier.Stream, parts image.Parts) drain {
	var mu sync.Mutex
	var regions []tier.Region
	start := func(p []byte, off int64) (tier.Event, error) {
		mu.Lock()
		defer mu.Unlock()
		regions = parts.Scatter(regions[:0], p, off)
		return copyRegions(dev, s, regions)
	}
	return func(p []byte, off int64) error {
		return await(start(p, off))
	}
}

// drainTarget passes what lanes unpack through their pinned chunks.
func drainTarget(drain drain) target {
	return laneTarget(func(ctx context.Context, l *lane, p []byte, off int64) error {
		chunk, err := l.pinned(ctx)
		if err != nil {
			return err
		}
		for part := range slices.Chunk(p, len(chunk)) {
			if err := drain(chunk[:copy(chunk, part)], off); err != nil {
				return err
			}
			off += int64(len(part))
		}
		return nil
	})
}

// tableBytes returns what a table of d is charged in a space at most, while it is made of
// an image or of another table.
func tableBytes(d *batch.Descriptor, space *tier.Space) (n int64) {
	for _, s := range d.Buffers {
		if s.Length > 0 {
			n += space.Charge(s.Length + 1) // bits that do not begin with a byte take one more
		}
	}
	return n
}

// digestTable gathers the image's bytes and drops them when it has looked at them.
func (m *Mover) digestTable(ctx context.Context, t *batch.Table) (d tier.Digest, err error) {
	b := m.cfg.Builtin
	r, err := b.reader(ctx, t)
	if err != nil {
		return d, err
	}
	r.sums = nil
	node := t.Space().Node()
	err = b.onStream(ctx, t.Space(), func(dev tier.Device, s tier.Stream) error {
		return b.staged(ctx, node, t.Descriptor().Body, r.fetch(dev, s), nil,
			func(p []byte, off int64) error {
				r.adjusted.Apply(p, off)
				d = d.Add(tier.DigestBytes(p, off/8))
				return nil
			}, true)
	})
	return d, err
}
