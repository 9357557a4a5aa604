package transfer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/pump"
	"github.com/spillway-db/spillway/tier"
)

// Staging is a pool of equal pinned chunks.
type Staging interface {
	Borrow(ctx context.Context) ([]byte, error)
	TryBorrow() ([]byte, bool) // neither waits nor passes waiters
	Return([]byte)
	Chunk() int64
}

// chunks is Staging that a job draws from.
type chunks struct{ Staging }

// Yield implements pump.Pool.
func (c chunks) Yield(p []byte) ([]byte, bool) {
	c.Return(p)
	return c.TryBorrow()
}

// run runs a job. A panic of its functions is an error that concerns the batch alone, as in safely.
// A panic of a file system, which is an error already, may concern others.
func run[R any](ctx context.Context, j pump.Job[R]) error {
	err := j.Run(ctx)
	if p, ok := err.(*guard.PanicError); ok && p.What == pump.Panicked {
		return panicked(p.Value)
	}
	return err
}

// staged copies the bytes of src to dst through pinned chunks near the device: between a device and
// a disk, for example. While one chunk is fetched from the source, another is drained to the sink.
func (b *Builtin) staged(ctx context.Context, dst *sink, src *source) error {
	node := nodeOf(dst.space, src.space)
	if src.device != nil {
		node = src.space.Node()
	}
	pool, err := b.Staging(node)
	if err != nil {
		return err
	}
	n := pool.Chunk()
	job := pump.Job[[]byte]{Pieces: int((src.size + n - 1) / n), Lanes: StagedUnderWay, Pool: chunks{pool}}
	part := func(chunk []byte, i int) ([]byte, int64) { return chunk[:min(n, src.size-int64(i)*n)], int64(i) * n }
	job.Begin = func(ctx context.Context, chunk []byte, i int) (func() error, error) {
		p, off := part(chunk, i)
		return src.fetch(ctx, p, off)
	}
	if src.check != nil {
		job.Ordered = src.ordered && n%payload.SumChunk != 0 // else each chunk has checksums of its own
		job.Check = func(chunk []byte, i int) error { return src.check(part(chunk, i)) }
	}
	if dst.space != nil {
		job.End = func(ctx context.Context, chunk []byte, i int) error {
			p, off := part(chunk, i)
			return dst.drain(ctx, p, off)
		}
	}
	return run(ctx, job)
}

// quickCopy is how long a copy may take on a device that has copiesUnderWay of them. One that is
// fast would be held up by waking the goroutine that feeds it.
const quickCopy = 5 * time.Millisecond

// copies makes n copies of one stream, which need no chunks. start, which is called in order, puts
// a copy on the stream; its event is nil if there is nothing to copy. check, which may be nil, sees
// them in order when they are there.
func copies(ctx context.Context, n int, start func(i int) (tier.Event, error), check func(i int) error) error {
	job := pump.Job[struct{}]{Pieces: n, Lanes: copiesUnderWay, Quick: quickCopy}
	job.Begin = func(_ context.Context, _ struct{}, i int) (func() error, error) { return waitFor(start(i)) }
	if check != nil {
		job.Ordered = true
		job.Check = func(_ struct{}, i int) error { return check(i) }
	}
	return run(ctx, job)
}

// hostPiece is a part of host memory that is filled or read at once.
type hostPiece struct {
	p   []byte
	off int64 // in the body
}

// piecesOf cuts host memory into pieces of at most so many bytes, which end at multiples of that
// or where an extent does.
func piecesOf(h tier.HostMemory, most int64) (pieces []hostPiece) {
	off := int64(0)
	for _, extent := range h.Extents() {
		for len(extent) > 0 {
			p := extent[:min(int64(len(extent)), most-off%most)]
			pieces = append(pieces, hostPiece{p, off})
			extent, off = extent[len(p):], off+int64(len(p))
		}
	}
	return pieces
}

// waitFor returns what waits for a copy; nil if there is none.
func waitFor(e tier.Event, err error) (func() error, error) {
	if e == nil || err != nil {
		return nil, err
	}
	return func() error { return await(e, nil) }, nil
}

// await waits for a copy, if there is one.
func await(e tier.Event, err error) error {
	if e == nil || err != nil {
		return err
	}
	return tier.Wait(context.Background(), e) // the copy uses memory that the caller takes back
}

// recorded returns the event after a copy that is on the stream, unless err says that it is not.
func recorded(dev tier.Device, s tier.Stream, err error) (tier.Event, error) {
	if err != nil {
		return nil, err
	}
	return record(dev, s)
}

// record returns the event after a copy that is already on the stream. Where
// the device cannot give one, it waits for the stream instead, so that no copy is under way in
// memory that the caller takes back.
func record(dev tier.Device, s tier.Stream) (tier.Event, error) {
	e, err := dev.Record(s)
	if err != nil {
		return nil, errors.Join(err, s.Sync())
	}
	return e, nil
}

// safely makes a panic of a device or a layout an error, so that what is under way
// is waited for and what was taken is given back.
func safely(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = panicked(p)
		}
	}()
	return f()
}

// panicked makes a panic an error, except for a broken lock order, which an
// invariants build must not hide.
func panicked(p any) error {
	if v, ok := p.(lockrank.Violation); ok {
		panic(v)
	}
	return &batch.UnmovableError{Err: fmt.Errorf("convert: a transfer panicked: %v", p)}
}

// noPanic is safely for the rest of the function that defers it: behind what gives back
// when *err is set.
func noPanic(err *error) {
	if p := recover(); p != nil {
		*err = panicked(p)
	}
}

// Together writes the bodies of images, which are all on one device or in one host space, side by
// side to a buffer on a disk. It passes them through pinned chunks, so that one request writes
// many.
func (b *Builtin) Together(ctx context.Context, buf *tier.Buffer, images []*batch.Image) error {
	dst, err := b.into(buf)
	if err != nil {
		return err
	}
	src := &source{space: images[0].Space(), streamed: streamed{stream: new(stream)}}
	for _, img := range images {
		switch m := img.Buffer().Memory().(type) {
		case tier.DeviceMemory:
			src.device = append(src.device, image.Part{Off: src.size, N: m.Size(), Addr: m.Addr()})
		case tier.HostMemory:
			off := src.size
			for _, e := range m.Extents() {
				src.device = append(src.device, image.Part{Off: off, N: int64(len(e)), Made: e})
				off += int64(len(e))
			}
		}
		src.size += img.Descriptor().Body
	}
	write := func() error { return b.staged(ctx, dst, src) }
	return b.Permitted(ctx, dst.space, src.space, src.size, func(permitted context.Context) error {
		ctx = permitted
		return safely(func() error {
			if src.space.Kind() == tier.GPU {
				return b.onStreams(ctx, dst, src, write)
			}
			return write()
		})
	})
}
