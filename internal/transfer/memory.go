package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/sumcopy"
	"github.com/spillway-db/spillway/tier"
)

// Source is memory to read: of a host space, a device, or a file. Lanes read parts of it at the
// same time.
type Source interface {
	// ReadAt copies the bytes at off to p, and returns when they are there.
	ReadAt(ctx context.Context, p []byte, off int64) error
}

// Sink is memory to write. Lanes write parts of it at the same time.
type Sink interface {
	// WriteAt copies p to off, and returns when it is there and p may be used again.
	WriteAt(ctx context.Context, p []byte, off int64) error
}

// sourceAndSink is implemented for the memory of each tier.
type sourceAndSink interface {
	Source
	Sink
}

// memoryOf returns the memory of a buffer; memory without bytes for a nil buffer. Memory of a
// program's own pool that is none of the three kinds is tier.ErrNotSupported.
func memoryOf(buf *tier.Buffer) (sourceAndSink, error) {
	switch m := buf.Memory().(type) {
	case nil:
		return hostMemory(nil), nil
	case tier.HostMemory:
		return hostMemory(m.Extents()), nil
	case tier.DeviceMemory:
		return &deviceMemory{space: buf.Space(), parts: image.Parts{{N: m.Size(), Addr: m.Addr()}}, whole: m}, nil
	case tier.FileMemory:
		return m, nil
	default:
		return nil, fmt.Errorf("convert: copying %T: %w", m, tier.ErrNotSupported)
	}
}

// hostMemory is the extents of memory of a host space.
type hostMemory [][]byte

func (m hostMemory) ReadAt(_ context.Context, p []byte, off int64) error {
	return image.Gather(p, m, off)
}

func (m hostMemory) WriteAt(_ context.Context, p []byte, off int64) error {
	return image.Across(m, off, int64(len(p)), func(to []byte) error { p = p[sumcopy.Spread(to, p):]; return nil })
}

// deviceMemory is parts of a device's memory, which stand for a body: one part for an image, one
// for each Arrow buffer for a table. A transfer borrows a stream for it; see onStreams. Bytes of p
// that a copy reads or writes should be pinned, or the driver copies them once more.
type deviceMemory struct {
	space  *tier.Space
	parts  image.Parts
	whole  tier.DeviceMemory // what parts are of; nil if they are at separate places, to be read only
	stream *stream
}

// stream is a stream of a device while a transfer has it. mu lets one lane at a time put copies on
// it, and is not held while a lane waits for its copy. So copies of several lanes are queued, and
// the device goes from one to the next without a pause.
type stream struct {
	tier.Stream
	dev     tier.Device
	mu      sync.Mutex
	regions []tier.Region // room for those of one copy
}

func (m *deviceMemory) ReadAt(ctx context.Context, p []byte, off int64) error {
	s := m.stream
	return s.run(ctx, func() error {
		// Gather writes what is between the parts at once; only what the device has is left to
		// copy.
		s.regions = m.parts.Gather(s.regions[:0], p, off)
		if len(s.regions) == 0 {
			return nil
		}
		return s.dev.CopyRegions(s.Stream, s.regions)
	})
}

func (m *deviceMemory) WriteAt(ctx context.Context, p []byte, off int64) error {
	s := m.stream
	return s.run(ctx, func() error {
		s.regions = append(s.regions[:0], tier.Region{Dst: m.whole.Addr() + tier.Addr(off), HostSrc: p})
		return s.dev.CopyRegions(s.Stream, s.regions)
	})
}

// run puts the work of f on the stream, unless ctx has ended, and waits for its end. The wait does
// not end with ctx, because the device reads or writes memory that the caller takes back. After a
// failure or a panic of f it waits for all that is on the stream, for the same reason: f may have
// put a part of its work there.
func (s *stream) run(ctx context.Context, f func() error) error {
	put := func() (e tier.Event, err error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		// Nothing new is put on the stream, but what is on it already goes on.
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		done := false
		defer func() {
			if !done {
				err = errors.Join(err, s.Sync())
			}
		}()
		if err = f(); err == nil {
			e, err = s.dev.Record(s.Stream)
		}
		done = err == nil
		return e, err
	}
	// The event is after this work, so later copies of other lanes are not waited for.
	e, err := put()
	if err != nil {
		return err
	}
	return tier.Wait(context.Background(), e)
}

// onStreams borrows a stream for each of the devices, and runs f, which must leave no work on them.
// It borrows them in the order of the spaces; otherwise two moves in opposite directions could each
// hold the stream that the other needs. Memory of one device uses one stream, because a second one
// may never be free. Waiting for a stream ends with ctx.
func (b *Builtin) onStreams(ctx context.Context, devices []*deviceMemory, f func() error) error {
	slices.SortFunc(devices, func(m, o *deviceMemory) int {
		return cmp.Compare(m.space.ID().Ordinal, o.space.ID().Ordinal)
	})
	for i, m := range devices {
		if i > 0 && m.space == devices[i-1].space {
			m.stream = devices[i-1].stream
			continue
		}
		pool, err := b.Streams(m.space.ID())
		if err != nil {
			return err
		}
		s, err := pool.Borrow(ctx)
		if err != nil {
			return err
		}
		defer pool.Return(s)
		m.stream = &stream{Stream: s, dev: pool.Device}
	}
	return f()
}

// copyOnDevices copies within a device, in batches, or to its peer. Devices that cannot reach each
// other are tier.ErrNotSupported, and the caller copies through host memory. No copy is in progress
// when it returns.
func (b *Builtin) copyOnDevices(ctx context.Context, dst, src *deviceMemory) error {
	// The bytes between buffers are zero in every image, and the memory has old bytes.
	to, from, size := dst.stream, src.stream, dst.whole.Size()
	if _, n := image.Between(dst.parts, src.parts, 0, size); n < size {
		err := to.run(ctx, func() error { return to.dev.Fill(to.Stream, dst.whole.Addr(), 0, size) })
		if err != nil {
			return err
		}
	}
	w, pieces := &lanes{b: b}, int((size+MaxPiece-1)/MaxPiece)
	return w.each(ctx, 0, pieces, deviceLanes, nil, func(ctx context.Context, _ *lane, i int) error {
		regions, n := image.Between(dst.parts, src.parts, int64(i)*MaxPiece, MaxPiece)
		if n == 0 {
			return nil
		}
		return from.run(ctx, func() error {
			if to == from {
				return from.dev.CopyRegions(from.Stream, regions)
			}
			for _, r := range regions {
				if err := from.dev.CopyPeer(from.Stream, r.Dst, to.dev, r.Src, r.Size); err != nil {
					return err
				}
			}
			return nil
		})
	})
}
