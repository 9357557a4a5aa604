package transfer

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/codec"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// source is where the bytes of a body come from. Exactly one of host, device, file, layout and
// packed is set. The table shows how each kind is read; "-" means that no transfer needs that way:
//
//	         to host memory      to chunks (fetch)   to lanes (frames)
//	host     memmove             -                   where it is
//	device   copies of a stream  copies of a stream  by chunks
//	file     reads               reads               reads
//	layout   laid out            laid out            -
//	packed   by lanes            -                   as it is stored
type source struct {
	space  *tier.Space // nil for a layout
	size   int64
	host   tier.HostMemory
	device image.Parts // of the space's device
	file   tier.FileMemory
	layout *image.Layout
	packed *payload.Packed

	desc *batch.Descriptor
	// check, which may be nil, is called with all bytes, in host memory, before they go to the
	// sink, and may change them. If ordered is set, it must get the parts of a checksum's chunk in
	// order.
	check   func(p []byte, off int64) error
	ordered bool
	table   *tableReader // nil if src is no table
	streamed
}

// sink is where the bytes of a body go. One of host, device and file is set.
type sink struct {
	space  *tier.Space
	host   tier.HostMemory
	device image.Parts
	whole  tier.DeviceMemory // of an image on a device: what device is parts of
	file   tier.FileMemory
	streamed
}

// streamed is the borrowed stream of a source or sink on a device, while a transfer runs. Its lock
// lets one lane at a time put copies on it.
type streamed struct {
	dev tier.Device
	*stream
}

type stream struct {
	tier.Stream
	mu      sync.Mutex
	regions []tier.Region // room for those of one copy
}

// from returns a payload as a source.
func (b *Builtin) from(ctx context.Context, p Imaged) (*source, error) {
	switch p := p.(type) {
	case *batch.Image:
		return b.fromBuffer(p.Descriptor(), p.Buffer(), p.Space())
	case *payload.Packed:
		return &source{space: p.Space(), size: p.Descriptor().Body, packed: p, desc: p.Descriptor()}, nil
	case *payload.Table:
		return b.fromTable(ctx, p)
	}
	return nil, fmt.Errorf("convert: copying %T: %w", p, tier.ErrNotSupported)
}

// fromBuffer returns an image as a source. Bytes from a disk are verified against the descriptor's
// checksums.
func (b *Builtin) fromBuffer(desc *batch.Descriptor, buf *tier.Buffer, space *tier.Space) (*source, error) {
	s := &source{space: space, size: desc.Body, desc: desc}
	if buf == nil {
		return s, nil
	}
	switch m := buf.Memory().(type) {
	case tier.HostMemory:
		s.host = m
	case tier.DeviceMemory:
		s.device = image.WholeOf(m.Addr(), m.Size())
	case tier.FileMemory:
		s.file = b.metered(space, m)
		s.check, s.ordered = image.NewVerifier(desc, s.file).Check, true
	default:
		return nil, fmt.Errorf("convert: reading %T: %w", m, tier.ErrNotSupported)
	}
	return s, nil
}

// into returns a buffer for a body as a sink.
func (b *Builtin) into(buf *tier.Buffer) (*sink, error) {
	s := &sink{space: buf.Space()}
	switch m := buf.Memory().(type) {
	case tier.HostMemory:
		s.host = m
	case tier.DeviceMemory:
		s.device, s.whole = image.WholeOf(m.Addr(), m.Size()), m
	case tier.FileMemory:
		s.file = b.metered(s.space, m)
	default:
		return nil, fmt.Errorf("convert: writing %T: %w", m, tier.ErrNotSupported)
	}
	return s, nil
}

// fill puts the bytes of src into a buffer of the same size.
func (b *Builtin) fill(ctx context.Context, buf *tier.Buffer, src *source) error {
	if buf == nil {
		return nil
	}
	dst, err := b.into(buf)
	if err != nil {
		return err
	}
	return b.transfer(ctx, dst, src)
}

// transfer copies the bytes of src to dst by the shortest way; every copy of a body goes through
// it. If dst is nil, transfer only calls src.check. The ways without a function of their own, such
// as GPU to disk, go through pinned chunks (staged).
func (b *Builtin) transfer(ctx context.Context, dst *sink, src *source) error {
	if src.size == 0 {
		return nil
	}
	if dst == nil {
		dst = new(sink)
	}
	return b.onStreams(ctx, dst, src, func() error {
		switch {
		case src.packed != nil:
			return b.unpack(ctx, dst.space, src.packed, dst.target(src.check))
		case src.layout != nil && dst.host != nil:
			return src.layout.WriteTo(dst.host.Extents())
		case src.host != nil && dst.host != nil:
			return hostToHost(ctx, dst.host, src.host)
		case src.host != nil && dst.device != nil:
			return dst.copyIn(ctx, src.host)
		case src.host != nil && dst.space == nil:
			return src.show(ctx)
		case src.device != nil && dst.host != nil:
			return src.copyOut(ctx, dst.host)
		case src.file != nil && dst.host != nil:
			return DiskToHost(ctx, src.desc, dst.host, src.file)
		case src.device != nil && dst.device != nil && src.check == nil:
			if err := b.copyOnDevices(ctx, dst, src); !errors.Is(err, tier.ErrNotSupported) {
				return err
			}
		}
		if dst.file != nil && src.check == nil && src.layout == nil {
			if err := b.sample(ctx, dst.space, src.size, nodeOf(src.space), src.frames()); err != nil {
				return err
			}
		}
		if src.host != nil {
			return hostToDisk(ctx, dst.file, src.host)
		}
		return b.staged(ctx, dst, src)
	})
}

// onStreams borrows a stream for each of the two that is on a device, and runs f. It borrows them
// in the order of the spaces; otherwise two moves in opposite directions could each hold the stream
// that the other needs. Within a device both use the same stream, because a second one may never be
// free.
func (b *Builtin) onStreams(ctx context.Context, dst *sink, src *source, f func() error) error {
	borrow := func(space *tier.Space, of *streamed, f func() error) error {
		return b.onStream(ctx, space, func(dev tier.Device, s tier.Stream) error {
			*of = streamed{dev, &stream{Stream: s}}
			return f()
		})
	}
	switch {
	case src.device == nil && dst.device == nil:
		return f()
	case src.device == nil:
		return borrow(dst.space, &dst.streamed, f)
	case dst.device == nil:
		return borrow(src.space, &src.streamed, f)
	case src.space == dst.space:
		return borrow(dst.space, &dst.streamed, func() error { src.streamed = dst.streamed; return f() })
	case src.space.ID().Ordinal < dst.space.ID().Ordinal:
		return borrow(src.space, &src.streamed, func() error { return borrow(dst.space, &dst.streamed, f) })
	}
	return borrow(dst.space, &dst.streamed, func() error { return borrow(src.space, &src.streamed, f) })
}

// copy puts the regions that f appends on the stream, as one piece of work. The event is nil if
// there are none.
func (s *streamed) copy(f func([]tier.Region) []tier.Region) (tier.Event, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.regions = f(s.regions[:0])
	return copyRegions(s.dev, s.Stream, s.regions)
}

// fetch starts to bring bytes to p from off on, and returns what waits for that.
func (s *source) fetch(ctx context.Context, p []byte, off int64) (wait func() error, err error) {
	switch {
	case s.device != nil:
		return waitFor(s.copy(func(to []tier.Region) []tier.Region { return s.device.Gather(to, p, off) }))
	case s.file != nil:
		return func() error { return s.file.ReadAt(ctx, p, off) }, nil
	}
	n, err := s.layout.Next(p) // on the calling goroutine: fetches are started in order
	if err == nil && n != len(p) {
		err = fmt.Errorf("convert: a layout ended after %d of %d bytes", n, len(p))
	}
	return nil, err
}

// drain copies p to the sink at off.
func (s *sink) drain(ctx context.Context, p []byte, off int64) error {
	if s.file != nil {
		return s.file.WriteAt(ctx, p, off)
	}
	return await(s.copy(func(to []tier.Region) []tier.Region { return s.device.Scatter(to, p, off) }))
}

// copyIn copies host memory to the device.
func (s *sink) copyIn(ctx context.Context, h tier.HostMemory) error {
	pieces := piecesOf(h, MaxPiece)
	return copies(ctx, len(pieces), func(i int) (tier.Event, error) {
		return s.copy(func(to []tier.Region) []tier.Region { return s.device.Scatter(to, pieces[i].p, pieces[i].off) })
	}, nil)
}

// copyOut copies from the device straight to host memory.
func (s *source) copyOut(ctx context.Context, h tier.HostMemory) error {
	pieces := piecesOf(h, MaxPiece)
	start := func(i int) (tier.Event, error) {
		return s.copy(func(to []tier.Region) []tier.Region { return s.device.Gather(to, pieces[i].p, pieces[i].off) })
	}
	if s.check == nil {
		return copies(ctx, len(pieces), start, nil)
	}
	return copies(ctx, len(pieces), start, func(i int) error { return s.check(pieces[i].p, pieces[i].off) })
}

// show calls check with all bytes of a source in host memory.
func (s *source) show(ctx context.Context) error {
	for _, piece := range piecesOf(s.host, MaxPiece) {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		if err := s.check(piece.p, piece.off); err != nil {
			return err
		}
	}
	return nil
}

// copyRegions puts copies on a stream as one piece of work; the event is nil if there are none.
func copyRegions(dev tier.Device, s tier.Stream, regions []tier.Region) (tier.Event, error) {
	var err error
	switch {
	case len(regions) == 0:
		return nil, nil
	case len(regions) == 1 && regions[0].HostDst != nil:
		err = dev.CopyToHost(s, regions[0].HostDst, regions[0].Src)
	case len(regions) == 1 && regions[0].HostSrc != nil:
		err = dev.CopyToDevice(s, regions[0].Dst, regions[0].HostSrc)
	default:
		err = dev.CopyRegions(s, regions)
	}
	return recorded(dev, s, err)
}

// copyOnDevices copies within a device, in batches, or to its peer. Devices that cannot reach
// each other are tier.ErrNotSupported.
func (b *Builtin) copyOnDevices(ctx context.Context, dst *sink, src *source) error {
	rest, size := image.Between(dst.device, src.device)
	if dst.whole != nil && size < dst.whole.Size() { // what an image has between its buffers is zero
		if err := await(recorded(dst.dev, dst.Stream, dst.dev.Fill(dst.Stream, dst.whole.Addr(), 0, dst.whole.Size()))); err != nil {
			return err
		}
	}
	var piece []tier.Region
	return copies(ctx, int((size+MaxPiece-1)/MaxPiece), func(int) (tier.Event, error) {
		piece, rest = onePiece(piece[:0], rest)
		if dst.space == src.space {
			return copyRegions(src.dev, src.Stream, piece)
		}
		for i, r := range piece {
			if err := src.dev.CopyPeer(src.Stream, r.Dst, dst.dev, r.Src, r.Size); err != nil {
				if i > 0 { // what is on the stream already must not go on without us
					err = errors.Join(err, src.Sync())
				}
				return nil, err
			}
		}
		return record(src.dev, src.Stream)
	}, nil)
}

// onePiece takes MaxPiece bytes of the copies.
func onePiece(to, copies []tier.Region) (piece, rest []tier.Region) {
	for room := int64(MaxPiece); room > 0 && len(copies) > 0; {
		c := &copies[0]
		n := min(c.Size, room)
		to = append(to, tier.Region{Dst: c.Dst, Src: c.Src, Size: n})
		room -= n
		if n == c.Size {
			copies = copies[1:]
			continue
		}
		*c = tier.Region{Dst: c.Dst + tier.Addr(n), Src: c.Src + tier.Addr(n), Size: c.Size - n}
	}
	return to, copies
}

// Lay writes the image that l plans into a buffer of any tier. Unlike other transfers to a disk, it
// does not measure the disk's speed for the choice of a codec, because the disk also waits for the
// layout.
func (b *Builtin) Lay(ctx context.Context, l *image.Layout, buf *tier.Buffer) error {
	dst, err := b.into(buf)
	if err != nil {
		return err
	}
	if m, ok := buf.Memory().(tier.FileMemory); ok {
		dst.file = Checked(m)
	}
	return b.Permitted(ctx, buf.Space(), nil, l.Size(), func(ctx context.Context) error {
		return b.transfer(ctx, dst, &source{size: l.Size(), layout: l})
	})
}

// Checked returns the memory of a volume for reading or writing a body. It turns the AlteredError
// of an encrypted volume into a CorruptError, like that of a wrong checksum. Converters use disks
// only through it.
func Checked(m tier.FileMemory) tier.FileMemory { return checkedFile{m} }

type checkedFile struct{ tier.FileMemory }

func (f checkedFile) ReadAt(ctx context.Context, p []byte, off int64) error {
	return corruptFile(f.FileMemory.ReadAt(ctx, p, off))
}

// WriteAt reads, too, where it writes a part of what is sealed as a whole.
func (f checkedFile) WriteAt(ctx context.Context, p []byte, off int64) error {
	return corruptFile(f.FileMemory.WriteAt(ctx, p, off))
}

func corruptFile(err error) error {
	var a *tier.AlteredError
	if !errors.As(err, &a) {
		return err
	}
	return &image.CorruptError{Volume: a.Volume + " " + a.File, Offset: a.Offset, Cause: err}
}

// metered is Checked, and measures the speed of reads and writes if the codec is chosen by speed.
func (b *Builtin) metered(space *tier.Space, m tier.FileMemory) tier.FileMemory {
	m = Checked(m)
	if b.Codec != codec.Auto {
		return m
	}
	return b.Choose.Metered(space.ID(), m)
}
