package transfer

import (
	"context"
	"errors"
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/codec"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/pump"
	"github.com/spillway-db/spillway/internal/sumcopy"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
)

const (
	// MaxPiece is the most that one asynchronous copy carries: a cancelled move
	// ends within one piece.
	MaxPiece = 8 << 20
	// copiesUnderWay is how many device copies a move keeps queued at most; see
	// copies. Measured from the simulated GPU to host memory, 64 MiB: two are a tenth
	// slower than four, eight are a hundredth faster.
	copiesUnderWay = 8
	// StagedUnderWay is how many staged chunks a transfer between device and disk keeps
	// under way: the number of requests at which the disks that were measured reach their speed.
	StagedUnderWay = 8
	// ReadsAhead is how many pieces of MaxPiece a transfer from disk to host memory has under
	// way, in requests of hostRead, as volumes have them by default.
	ReadsAhead = 2
	hostRead   = 2 << 20
)

// Builtin holds what the built-in converters work with.
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

	Dicts   Dictionaries
	Choose  codec.Chooser
	coders  codec.Coders
	Scratch scratch
	turns   turns
	reserve chan struct{} // the monitor's move that writes to a disk without a slot of Permits
	Outside bool          // tests have no dictionary in a batch's body, however small
}

// Layout plans the image of a record.
func (b *Builtin) Layout(rec arrow.RecordBatch) (*image.Layout, error) {
	inline := int64(image.MaxInline)
	if b.Outside {
		inline = 0
	}
	return image.NewLayoutInline(rec, inline)
}

// Adder registers a converter.
type Adder func(from, to batch.PayloadType, f func(context.Context, batch.Payload, reservation.Reservation) (batch.Payload, error)) error

// Form returns the form that a move gives a payload in a space. On disk it is a packed image if the
// payload is already packed or compressing should pay, and else a plain image. has reports whether
// there is a converter between two forms.
func (b *Builtin) Form(src batch.Payload, to *tier.Space, has func(from, to batch.PayloadType) bool) batch.PayloadType {
	plain := batch.ImageType(to.Kind())
	from, ok := src.(Imaged)
	if !ok || to.Kind() != tier.Disk {
		return plain
	}
	packed := false
	switch {
	case src.Type() == batch.HostPacked || src.Type() == batch.DiskPacked:
		packed = true // it is compressed already, so the move only copies it
	case src.Type() == batch.DiskImage:
	default:
		packed = b.Choose.Packs(b.Codec, from.Descriptor().Body, to.ID())
	}
	if !packed || !has(src.Type(), batch.DiskPacked) {
		return plain
	}
	return batch.DiskPacked
}

// Register adds all built-in converters: every pair of images, compressed or not, and those
// between images and tables.
func (b *Builtin) Register(add Adder) error {
	if err := b.NeedsPermits(); err != nil {
		return err
	}
	b.reserve = make(chan struct{}, 1)
	images := [...]batch.PayloadType{batch.GPUImage, batch.HostImage, batch.DiskImage}
	packed := [...]batch.PayloadType{batch.HostPacked, batch.DiskPacked}
	for _, from := range append(images[:], packed[:]...) {
		for _, to := range images {
			if err := add(from, to, b.image); err != nil {
				return err
			}
		}
		for _, to := range packed {
			if err := add(from, to, b.pack); err != nil {
				return err
			}
		}
	}
	return b.registerTables(add)
}

// image is the converter to images. It copies the body of an image or a table byte for byte to the
// space of r, uncompresses a packed one, and copies the dictionaries that the space does not have.
// The new image shares the descriptor of src. A table that has no checksums yet gets a new
// descriptor when all bytes have been read. One permit covers the body and the dictionaries.
func (b *Builtin) image(ctx context.Context, src batch.Payload, r reservation.Reservation) (out batch.Payload, err error) {
	from, ok := src.(Imaged)
	if !ok {
		return nil, fmt.Errorf("convert: %s is not an image", src.Type())
	}
	largest := max(from.Descriptor().Body, largestShared(from))
	err = b.Permitted(ctx, r.Space(), from.Space(), largest, func(ctx context.Context) (err error) {
		out, err = b.copyImage(ctx, from, r)
		return err
	})
	return out, err
}

func (b *Builtin) copyImage(ctx context.Context, from Imaged, r reservation.Reservation) (batch.Payload, error) {
	desc := from.Descriptor()
	buf, err := AllocBody(r, desc.Body, desc.Cuts())
	if err != nil {
		return nil, err
	}
	shared, err := b.share(ctx, from, r)
	if err != nil {
		return nil, errors.Join(err, buf.Release())
	}
	err = safely(func() error {
		src, err := b.from(ctx, from)
		if err != nil {
			return err
		}
		if err := b.fill(ctx, buf, src); err != nil {
			return err
		}
		desc = src.descriptor()
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, ReleaseAll(shared), buf.Release())
	}
	return batch.NewImage(desc, buf, r.Space(), shared...), nil
}

// AllocBody draws memory for a body from r, which may be split at cuts. On a disk, where free room
// may be in many pieces, the memory may be split at any page if it must, because nobody opens a
// file in place.
func AllocBody(r reservation.Reservation, size int64, cuts []int64) (*tier.Buffer, error) {
	buf, err := r.AllocCuts(size, cuts)
	var full *tier.NoSpaceError
	if errors.As(err, &full) && full.Largest > 0 && r.Space().Kind() == tier.Disk {
		return r.AllocCuts(size, pages(size))
	}
	return buf, err
}

// Share returns the dictionaries of src in the space of r, for an image of the
// same descriptor there: a reference to each, which is the caller's. Those that are not
// there yet are copied, into memory drawn from r. It is what a converter
// between images, other than the built-in ones, needs for dictionaries. Between memory
// and disk it takes a permit, unless it is called within OnDisk.
func (b *Builtin) Share(ctx context.Context, src *batch.Image, r reservation.Reservation) (shared []batch.Shared, err error) {
	err = b.Permitted(ctx, r.Space(), src.Space(), largestShared(src), func(ctx context.Context) (err error) {
		shared, err = b.share(ctx, src, r)
		return err
	})
	return shared, err
}

func largestShared(src Imaged) (largest int64) {
	for _, s := range src.Shared() {
		largest = max(largest, s.Descriptor().Body)
	}
	return largest
}

func (b *Builtin) share(ctx context.Context, src Imaged, r reservation.Reservation) (shared []batch.Shared, err error) {
	for _, s := range src.Shared() {
		from, ok := s.(*DictCopy)
		if !ok {
			return nil, errors.Join(fmt.Errorf("convert: sharing %T: %w", s, tier.ErrNotSupported), ReleaseAll(shared))
		}
		c, err := from.Dict.Store.Acquire(ctx, from.Dict, r.Space(), func() (*tier.Buffer, *batch.Descriptor, error) {
			desc := from.Dict.desc
			buf, err := AllocBody(r, desc.Body, desc.Cuts())
			if err != nil {
				return nil, nil, err
			}
			if err := safely(func() error { return b.copyBody(ctx, buf, desc, from.buf) }); err != nil {
				return nil, nil, errors.Join(err, buf.Release())
			}
			return buf, desc, nil
		})
		if err != nil {
			return nil, errors.Join(err, ReleaseAll(shared))
		}
		shared = append(shared, c)
	}
	return shared, nil
}

// copyBody copies the image of a dictionary.
func (b *Builtin) copyBody(ctx context.Context, dst *tier.Buffer, desc *batch.Descriptor, src *tier.Buffer) error {
	from, err := b.fromBuffer(desc, src, src.Space())
	if err != nil {
		return err
	}
	return b.fill(ctx, dst, from)
}

// hostToDisk writes straight from the arena. The volume splits each extent into
// requests and keeps several under way.
func hostToDisk(ctx context.Context, d tier.FileMemory, s tier.HostMemory) error {
	off := int64(0)
	for _, extent := range s.Extents() {
		if err := d.WriteAt(ctx, extent, off); err != nil {
			return err
		}
		off += int64(len(extent))
	}
	return nil
}

// DiskToHost reads straight into the arena, in pieces of one request, several at the same time, and
// verifies each piece. If the bytes of one checksum are in two pieces, it verifies them at the end.
func DiskToHost(ctx context.Context, desc *batch.Descriptor, d tier.HostMemory, s tier.FileMemory) error {
	pieces := piecesOf(d, hostRead)
	var split []int64 // where chunks begin that lie in several pieces
	for _, p := range pieces {
		if end := p.off + int64(len(p.p)); end%payload.SumChunk != 0 && end < desc.Body {
			if at := end - end%payload.SumChunk; len(split) == 0 || split[len(split)-1] != at {
				split = append(split, at)
			}
		}
	}
	err := run(ctx, pump.Job[struct{}]{
		Pieces: len(pieces),
		Lanes:  ReadsAhead * MaxPiece / hostRead,
		End:    func(ctx context.Context, _ struct{}, i int) error { return pieces[i].read(ctx, desc, s) },
	})
	if err != nil {
		return err
	}
	for _, at := range split {
		if err := image.NewVerifier(desc, s).CheckIn(d.Extents(), at, min(desc.Body-at, payload.SumChunk), at); err != nil {
			return err
		}
	}
	return nil
}

// read fills the piece, and verifies the chunks that are completely in it.
func (h hostPiece) read(ctx context.Context, desc *batch.Descriptor, s tier.FileMemory) error {
	if err := s.ReadAt(ctx, h.p, h.off); err != nil {
		return err
	}
	begin, end := image.RoundUp(h.off, payload.SumChunk), h.off+int64(len(h.p))
	if end < desc.Body {
		end -= end % payload.SumChunk
	}
	if begin >= end {
		return nil
	}
	return image.NewVerifier(desc, s).Check(h.p[begin-h.off:end-h.off], begin)
}

// hostToHost copies extent by extent, in pieces so that it can be cancelled.
func hostToHost(ctx context.Context, d, s tier.HostMemory) error {
	src := s.Extents()
	var from []byte
	for _, to := range d.Extents() {
		for len(to) > 0 {
			if err := context.Cause(ctx); err != nil {
				return err
			}
			for len(from) == 0 {
				if len(src) == 0 {
					return fmt.Errorf("convert: %d bytes to copy into %d", s.Size(), d.Size())
				}
				from, src = src[0], src[1:]
			}
			n := sumcopy.Spread(to[:min(len(to), MaxPiece)], from)
			to, from = to[n:], from[n:]
		}
	}
	return nil
}

// onStream runs f with a stream of the space's device, borrowed exclusively; f
// leaves no work on it.
func (b *Builtin) onStream(ctx context.Context, gpu *tier.Space, f func(tier.Device, tier.Stream) error) error {
	pool, err := b.Streams(gpu.ID())
	if err != nil {
		return err
	}
	s, err := pool.Borrow(ctx)
	if err != nil {
		return err
	}
	defer pool.Return(s)
	return f(pool.Device(), s)
}
