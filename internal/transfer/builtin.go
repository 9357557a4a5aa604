package transfer

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/codec"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
)

// Builtin holds what the built-in converters of one engine work with. The engine sets the exported
// fields before Open; they do not change afterwards. Its methods are safe for concurrent use.
type Builtin struct {
	// Streams returns the pool of streams of a GPU space's device.
	Streams func(tier.ID) (*devpool.Streams, error)
	// Staging returns the pinned chunks nearest to a NUMA node, for transfers
	// between device and disk. Its memory is charged to a host space once.
	Staging func(node int) (Staging, error)
	// Permits grants a permit to every transfer with a disk. It must have a budget permit.Host.
	Permits *permit.Pool
	// Codec is how batches are compressed on disk. Shared dictionaries are never compressed.
	Codec codec.Codec

	// Choose chooses the codec of each disk if Codec is codec.Auto. Scratch lends blocks to lanes.
	// turns lets pre-cleaning give way to other transfers.
	Dicts   Dictionaries
	Choose  codec.Chooser
	coders  codec.Coders
	Scratch scratch
	turns   turns
	reserve chan struct{} // has an element while a move of the monitor writes without a slot of Permits
	Outside bool          // tests have no dictionary in a batch's body, however small
}

// Open prepares b for its first transfer. It returns an error if b.Permits lacks something that
// transfers need.
func (b *Builtin) Open() error {
	b.reserve = make(chan struct{}, 1)
	if b.Permits == nil {
		return errors.New("convert: the disk converters require permits: Builtin.Permits is nil")
	}
	if _, ok := b.Permits.Total(permit.Host); !ok {
		return fmt.Errorf("convert: the pool of permits needs a budget %q for the transfers with disks: %w",
			permit.Host, permit.ErrNoBudget)
	}
	return nil
}

// TypeIn returns the type of image that a move makes of a payload in a space. On disk it is
// compressed if the payload is already compressed or compressing should pay. Elsewhere it is plain:
// an image is opened in place, which a compressed one cannot be. Payloads of a program's own types
// are none of its concern, and it returns plain for them.
func (b *Builtin) TypeIn(src batch.Payload, to *tier.Space) payload.Type {
	from, ok := src.(*payload.Image)
	switch {
	case !ok || !to.Kind().IsStorage() || from.Parts.Type == payload.PlainImage && from.Space().Kind().IsStorage():
		return payload.PlainImage
	case from.Parts.Type == payload.CompressedImage || b.Choose.Packs(b.Codec, from.Descriptor().Body, to.ID(), false):
		return payload.CompressedImage
	}
	return payload.PlainImage
}

// Convert makes an image of src in the space of r, of type as, in memory drawn from r, and copies
// the dictionaries that the space does not have. The new image shares the descriptor of src, unless
// that has no checksums yet: then they are computed on the way. src is only read. On an error
// everything that was drawn is released, except r itself, which is the caller's.
//
// One permit covers the body and the dictionaries. Convert waits for the permit, for streams,
// blocks and chunks, and for copies of dictionaries that others make, but not for room.
func (b *Builtin) Convert(
	ctx context.Context, src batch.Payload, as payload.Type, r *reservation.Reservation,
) (_ batch.Payload, err error) {
	from, ok := src.(*payload.Image)
	if !ok {
		return nil, fmt.Errorf("convert: %s is not an image", src.Type())
	}
	desc := from.Descriptor()
	parts := payload.Parts{Descriptor: desc, Space: r.Space(), Type: as}
	out := &bytesTo{space: r.Space()}
	// The lengths of the dictionaries that are missing are not known yet, so each counts as much as
	// a transfer can have in progress.
	bytes := desc.Body + int64(len(from.Parts.Shared))*DiskUnderWay
	err = b.Permitted(ctx, r.Space(), from.Space(), bytes, func(ctx context.Context) (err error) {
		if err := out.alloc(&parts, r); err != nil {
			return err
		}
		if len(from.Parts.Shared) > 0 {
			if parts.Shared, err = b.Share(ctx, from.Parts.Shared, from.Space(), r); err != nil {
				return err
			}
		}
		in, err := b.from(ctx, &from.Parts)
		if err != nil {
			return err
		}
		// A scattered image needs no checksums, because nothing reads it from a disk. Without them
		// a device can copy the bytes by itself.
		if as == payload.ScatteredImage && from.Parts.Adjustments == nil {
			in.sums = nil
		}
		if err := b.copy(ctx, out, in); err != nil {
			return err
		}
		if in.sums != nil { // it has checksums now
			summed := *desc
			summed.Sums = in.sums
			parts.Descriptor = &summed
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, parts.Release())
	}
	return payload.New(parts), nil
}

// alloc draws the memory of an image from r, in one buffer, and sets the sink. It also sets the
// parts that describe where the bytes are: Buffers, and Runs or Ranges. If the body is empty there
// is no buffer.
//
// A compressed image gets as much as the body has, the most it can need, and copy gives the rest
// back. The Arrow buffers of a scattered one are at their places in a plain image. Memory that
// nobody opens in place may be split at any page: it is compressed, or is on a disk, where free
// room may be in many pieces.
func (d *bytesTo) alloc(parts *payload.Parts, r *reservation.Reservation) error {
	body := parts.Descriptor.Body
	pages := &batch.Descriptor{Body: body} // has no buffer that a cut must spare
	if parts.Type == payload.ScatteredImage {
		parts.Ranges = make([]payload.DeviceRange, len(parts.Descriptor.Buffers))
	}
	var cuts []int64
	if parts.Type == payload.CompressedImage {
		d.runs, d.frame = make([]payload.Run, (body+payload.RunSize-1)/payload.RunSize), parts.Descriptor.Frame()
		parts.Runs = d.runs
		cuts = pages.Cuts()
	} else {
		cuts = parts.Descriptor.Cuts()
	}
	// First at places that no Arrow buffer crosses, so that reading one column reads one piece. A
	// disk that has enough room only in smaller pieces splits buffers too: a body is never opened
	// in place there.
	buf, err := r.Alloc(body, cuts...)
	var full *tier.NoSpaceError
	if errors.As(err, &full) && full.Largest > 0 && r.Space().Kind().IsStorage() {
		buf, err = r.Alloc(body, pages.Cuts()...)
	}
	if err != nil || buf == nil {
		return err
	}
	d.buf, parts.Buffers = buf, []*tier.Buffer{buf}
	if n := parts.Descriptor.Block; n > 0 { // few bytes at a time are to be read
		if m, ok := buf.Memory().(interface{ SealBy(bytes int64) }); ok {
			m.SealBy(n)
		}
	}
	// An error comes after the buffer is in parts, so the caller releases it with them.
	d.Sink, err = memoryOf(buf)
	m, ok := d.Sink.(*deviceMemory)
	for i := range parts.Ranges {
		if s := parts.Descriptor.Buffers[i]; ok && s.Length > 0 {
			parts.Ranges[i] = payload.DeviceRange{Addr: m.whole.Addr() + tier.Addr(s.Offset), Length: s.Length}
		}
	}
	return err
}

// from returns the source of an image's bytes. Bytes that come from a disk, or are compressed, are
// verified. Plain bytes in host and device memory are not: they were when they came there, and
// memory is trusted.
func (b *Builtin) from(ctx context.Context, p *payload.Parts) (*bytesFrom, error) {
	if p.Type == payload.ScatteredImage {
		return b.fromScattered(ctx, p)
	}
	var buf *tier.Buffer // nil if the body is empty
	if len(p.Buffers) > 0 {
		buf = p.Buffers[0]
	}
	m, err := memoryOf(buf)
	_, file := m.(tier.FileMemory)
	return &bytesFrom{
		Source: m, space: p.Space, desc: p.Descriptor, size: p.Descriptor.Body, runs: p.Runs,
		verify: file || p.Type == payload.CompressedImage,
	}, err
}

// Share returns references, which are the caller's, to the given dictionaries in the space of r.
// They are now in the space src. Those that are not in the target yet are copied, into memory drawn
// from r. all must have each dictionary after those that it needs, as an image has them. Between
// memory and disk Share takes a permit, unless it is called within OnDisk. On an error all
// references are released.
func (b *Builtin) Share(
	ctx context.Context, all []batch.Shared, src *tier.Space, r *reservation.Reservation,
) (shared []batch.Shared, err error) {
	if len(all) == 0 {
		return nil, nil
	}
	err = b.Permitted(ctx, r.Space(), src, DiskUnderWay, func(ctx context.Context) error {
		for _, s := range all {
			from, ok := s.(*DictCopy)
			if !ok {
				return fmt.Errorf("convert: sharing %T: %w", s, tier.ErrNotSupported)
			}
			c, err := from.Dict.Store.Acquire(ctx, from.Dict, r.Space(), func(parts *payload.Parts) error {
				parts.Descriptor = from.Dict.desc
				out := &bytesTo{space: r.Space()}
				if err := out.alloc(parts, r); err != nil {
					return err
				}
				in, err := b.from(ctx, partsOf(from, src))
				if err != nil {
					return err
				}
				return b.copy(ctx, out, in)
			})
			if err != nil {
				return err
			}
			shared = append(shared, c)
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, ReleaseAll(shared))
	}
	return shared, nil
}

// LayDictionaries returns references to dictionaries in the space of r, for a record that is laid
// out there. It lays out those that are missing. layouts has for each the layouts that Resolve
// returned, of which any has the bytes. Afterwards all of these layouts return the descriptor that
// all batches share. On an error all references are released.
func (b *Builtin) LayDictionaries(
	ctx context.Context, dicts []*Dictionary, layouts [][]*image.Layout, r *reservation.Reservation,
) (shared []batch.Shared, err error) {
	for i, d := range dicts {
		l := layouts[i][0]
		c, err := b.Dicts.Acquire(ctx, d, r.Space(), func(parts *payload.Parts) (err error) {
			if err = b.Lay(ctx, l, parts, r); err == nil {
				parts.Descriptor, err = l.Descriptor()
			}
			return err
		})
		if err != nil {
			return nil, errors.Join(err, ReleaseAll(shared))
		}
		for _, l := range layouts[i] {
			l.Is(c.Descriptor())
		}
		shared = append(shared, c)
	}
	return shared, nil
}

// Lay lays a record out in the space of parts, as their type and in memory drawn from r. It sets
// the memory of parts, also after an error, so the caller must release them. It must be called
// within Permitted. If it does not compress, it does not measure the disk's speed for the choice of
// a codec, unlike other transfers to a disk: the disk also waits for the layout.
func (b *Builtin) Lay(ctx context.Context, l *image.Layout, parts *payload.Parts, r *reservation.Reservation) error {
	parts.Descriptor = &l.Desc
	out := &bytesTo{space: r.Space()}
	if err := out.alloc(parts, r); err != nil || len(parts.Buffers) == 0 {
		return err
	}
	return b.copy(ctx, out, &bytesFrom{layout: l, size: l.Desc.Body})
}

// Together writes the bodies of images, which are all on one device or in one host space, one after
// the other to a buffer on a disk. It passes them through pinned chunks, so that one request writes
// many small bodies. The bodies are plain, and each begins at a page, because their lengths are
// multiples of one.
func (b *Builtin) Together(ctx context.Context, buf *tier.Buffer, images []*batch.Image) error {
	src := &bytesFrom{space: images[0].Space()}
	var host hostMemory
	device := &deviceMemory{space: src.space}
	for _, img := range images {
		// All are of the same kind: the caller groups them.
		switch m := img.Buffer().Memory().(type) {
		case tier.DeviceMemory:
			device.parts = append(device.parts, image.Part{Off: src.size, N: m.Size(), Addr: m.Addr()})
		case tier.HostMemory:
			host = append(host, m.Extents()...)
		}
		src.size += img.Descriptor().Body
	}
	if src.Source = device; host != nil {
		src.Source = gathered{host}
	}
	sink, err := memoryOf(buf)
	if err != nil {
		return err
	}
	return b.Permitted(ctx, buf.Space(), src.space, src.size, func(ctx context.Context) error {
		return b.copy(ctx, &bytesTo{Sink: sink, space: buf.Space()}, src)
	})
}

// gathered is host memory in many pieces. It is a type of its own so that copy does not write each
// piece by itself, as it does with hostMemory: copy passes the pieces through a chunk, which is
// written at once.
type gathered struct{ hostMemory }

// Digest computes the fingerprint of an image: of its body, and of its dictionaries as if they
// followed it and extended no others. So it is the same in every tier, form and division into
// extensions. Dictionaries are read to the Go heap, as a whole. It takes a permit if the image is
// on a disk.
func (b *Builtin) Digest(ctx context.Context, img *batch.Image) (d tier.Digest, err error) {
	src, err := b.from(ctx, &img.Parts)
	if err != nil {
		return d, err
	}
	// A scattered image without checksums would get them computed here, for nothing.
	src.sums = nil
	bodies := make(map[*batch.Descriptor][][]byte) // of the dictionaries
	bytes := src.size + int64(len(img.Parts.Shared))*DiskUnderWay
	err = b.Permitted(ctx, nil, img.Space(), bytes, func(ctx context.Context) error {
		var mu sync.Mutex
		src.see = func(p []byte, off int64) {
			// The digest is a sum over numbered words, so pieces count in any order. It is computed
			// outside of the lock, because that is the work.
			part := tier.DigestBytes(p, off/8)
			mu.Lock()
			defer mu.Unlock()
			d = d.Add(part)
		}
		if err := b.copy(ctx, new(bytesTo), src); err != nil {
			return err
		}
		for _, s := range img.Parts.Shared {
			dict, err := b.from(ctx, partsOf(s, img.Space()))
			if err != nil {
				return err
			}
			body := make([]byte, dict.size)
			dict.see = func(p []byte, off int64) { copy(body[off:], p) }
			if err := b.copy(ctx, new(bytesTo), dict); err != nil {
				return err
			}
			bodies[s.Descriptor()] = [][]byte{body}
		}
		return nil
	})
	if err != nil {
		return d, err
	}
	// Then the dictionaries, in the order in which a walk of the descriptors meets them. Extensions
	// count as whole arrays, so their bases do not count again.
	at, counted := src.size, make(map[*batch.Descriptor]bool)
	var add func(of *batch.Descriptor) error // the dictionaries of an image that do not count yet
	add = func(of *batch.Descriptor) error {
		for _, desc := range of.Dictionaries {
			if counted[desc] {
				continue
			}
			counted[desc] = true
			if desc.From == nil {
				if err := add(desc); err != nil {
					return err
				}
			}
			_, whole, err := image.InOnePiece(desc, bodies)
			if err != nil {
				return err
			}
			d = d.Add(tier.DigestBytes(whole[0], at/8))
			at += int64(len(whole[0]))
		}
		return nil
	}
	return d, add(img.Descriptor())
}

// Verify reads all bytes of an image on disk, compressed or not, and compares them with their
// checksums; the first that differ are an *image.CorruptError. Its dictionaries are not read. It
// takes a permit.
func (b *Builtin) Verify(ctx context.Context, p batch.Payload) error {
	img, ok := p.(*batch.Image)
	if !ok || !img.Space().Kind().IsStorage() {
		return fmt.Errorf("convert: verifying %s: %w", p.Type(), tier.ErrNotSupported)
	}
	return b.OnDisk(ctx, DiskUnderWay, false, func(ctx context.Context) error {
		src, err := b.from(ctx, &img.Parts)
		if err != nil {
			return err
		}
		return b.copy(ctx, new(bytesTo), src)
	})
}
