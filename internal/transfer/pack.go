package transfer

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/address"
	"github.com/spillway-db/spillway/internal/codec"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// An image is packed, and unpacked, by lanes of which each takes a run of the body at a
// time: compressing, which needs processors, overlaps with the disk's and the device's work,
// of which several requests are under way.

// Imaged is what images, packed images and tables have in common.
type Imaged interface {
	batch.Payload
	Descriptor() *batch.Descriptor
	Shared() []batch.Shared
}

var (
	_ Imaged = (*batch.Image)(nil)
	_ Imaged = (*payload.Packed)(nil)
)

// frames is where a body is read from to pack it. read returns n bytes at off, at most a frame,
// which stay as they are until the lane asks for the next ones. there, which may be nil, returns
// any number of them where they lie, if they lie together; else nil.
type frames struct {
	read  func(ctx context.Context, l *lane, off, n int64) ([]byte, error)
	there func(off, n int64) []byte
}

// hostFrames reads host memory, where it is as a rule.
func hostFrames(m tier.HostMemory) frames {
	extents := m.Extents()
	there := func(off, n int64) []byte { return image.Stretch(extents, off, n) }
	return frames{there: there, read: func(_ context.Context, l *lane, off, n int64) ([]byte, error) {
		if p := there(off, n); p != nil {
			return p, nil
		}
		_, frame := l.memory()
		return frame[:n], image.Gather(frame[:n], extents, off)
	}}
}

// chunkFrames reads a device through pinned chunks. The source's check sees each frame as a whole
// when it is there.
func chunkFrames(s *source) frames {
	read := func(ctx context.Context, p []byte, off int64) error {
		wait, err := s.fetch(ctx, p, off)
		if err != nil || wait == nil {
			return err
		}
		return wait()
	}
	finish := s.check
	if finish == nil {
		finish = func([]byte, int64) error { return nil }
	}
	return frames{read: func(ctx context.Context, l *lane, off, n int64) ([]byte, error) {
		chunk, err := l.pinned(ctx)
		if err != nil {
			return nil, err
		}
		if int64(len(chunk)) >= n {
			if err := read(ctx, chunk[:n], off); err != nil {
				return nil, err
			}
			return chunk[:n], finish(chunk[:n], off)
		}
		_, frame := l.memory() // a small host tier has small chunks
		for at := int64(0); at < n; {
			p := chunk[:min(int64(len(chunk)), n-at)]
			if err := read(ctx, p, off+at); err != nil {
				return nil, err
			}
			copy(frame[at:], p)
			at += int64(len(p))
		}
		return frame[:n], finish(frame[:n], off)
	}}
}

// fileFrames reads a disk, and verifies what it gives.
func fileFrames(desc *batch.Descriptor, m tier.FileMemory) frames {
	return frames{read: func(ctx context.Context, l *lane, off, n int64) ([]byte, error) {
		_, frame := l.memory()
		if err := m.ReadAt(ctx, frame[:n], off); err != nil {
			return nil, err
		}
		return frame[:n], image.NewVerifier(desc, m).Check(frame[:n], off)
	}}
}

// frames returns how lanes read the source.
func (s *source) frames() frames {
	switch {
	case s.host != nil:
		return hostFrames(s.host)
	case s.file != nil:
		return fileFrames(s.desc, s.file)
	}
	return chunkFrames(s)
}

// pack makes the compressed form of an image, or of a table's, in the space of r; or a copy of
// one that is compressed already.
func (b *Builtin) pack(ctx context.Context, src batch.Payload, r reservation.Reservation) (out batch.Payload, err error) {
	from, ok := src.(Imaged)
	if !ok {
		return nil, fmt.Errorf("convert: %s is not an image", src.Type())
	}
	largest := max(from.Descriptor().Body, largestShared(from))
	err = b.Permitted(ctx, r.Space(), from.Space(), largest, func(ctx context.Context) error {
		src, err := b.from(ctx, from)
		if err != nil {
			return err
		}
		shared, err := b.share(ctx, from, r)
		if err != nil {
			return err
		}
		runs, err := b.runs(ctx, src, r)
		if err != nil {
			return errors.Join(err, ReleaseAll(shared))
		}
		out = payload.NewPacked(src.descriptor(), runs, r.Space(), shared...)
		return nil
	})
	return out, err
}

// runs makes the runs of a packed image.
func (b *Builtin) runs(ctx context.Context, src *source, r reservation.Reservation) (runs []payload.Run, err error) {
	runs = make([]payload.Run, (src.size+payload.RunSize-1)/payload.RunSize)
	defer func() {
		if err != nil {
			for i := range runs {
				err = errors.Join(err, runs[i].Buffer.Release())
			}
		}
	}()
	defer noPanic(&err)
	if len(runs) == 0 {
		return nil, nil
	}
	if src.packed != nil {
		return runs, b.inLanes(ctx, nodeOf(r.Space(), src.space), len(runs), func(ctx context.Context, l *lane, i int) error {
			return b.copyRun(ctx, l, &runs[i], &src.packed.Runs()[i], r)
		})
	}
	return runs, b.onStreams(ctx, new(sink), src, func() error {
		return b.packRuns(ctx, runs, src.size, nodeOf(src.space, r.Space()), src.frames(), r)
	})
}

// nodeOf returns the NUMA node whose chunks a transfer passes through: that of the first
// space that has one.
func nodeOf(spaces ...*tier.Space) int {
	for _, s := range spaces {
		if s != nil && s.Node() >= 0 {
			return s.Node()
		}
	}
	return -1
}

// packRuns fills runs. Where nothing is known to choose the codec by, one run goes first, to
// show what the disk is like.
func (b *Builtin) packRuns(ctx context.Context, runs []payload.Run, body int64, node int, from frames, r reservation.Reservation) error {
	t := b.Choose.Begin(b.Codec, r.Space().ID())
	lanes := func(at, n int) error {
		return b.inLanes(ctx, node, n, func(ctx context.Context, l *lane, i int) error {
			with, off := t.Codec(), int64(at+i)*payload.RunSize
			return b.Choose.Timed(b.Codec, r.Space().ID(), with, true, min(payload.RunSize, body-off), func() error {
				return b.packRun(ctx, l, &runs[at+i], with, body, off, from, r)
			})
		})
	}
	first := 0
	if t.Blind() {
		first = 1
		if err := lanes(0, 1); err != nil {
			return err
		}
	}
	if err := b.sample(ctx, r.Space(), body, node, from); err != nil {
		return err
	}
	return lanes(first, len(runs)-first)
}

// sample takes a sample of a body that comes to a space, if one is due.
func (b *Builtin) sample(ctx context.Context, to *tier.Space, body int64, node int, from frames) error {
	if b.Codec != codec.Auto || to.Kind() != tier.Disk || body < payload.FrameSize {
		return nil
	}
	g := b.Choose.Disk(to.ID())
	if !b.Choose.Due(g) {
		return nil
	}
	return b.inLanes(ctx, node, 1, func(ctx context.Context, l *lane, _ int) error {
		return b.Choose.Sample(&b.coders, g, body, l.spare(), func(off, n int64) ([]byte, error) { return from.read(ctx, l, off, n) })
	})
}

// LayRuns lays a body out as the runs of a packed image. The layout is made in order, by one lane
// at a time; while one lays out others compress and write.
func (b *Builtin) LayRuns(ctx context.Context, l *image.Layout, r reservation.Reservation) (runs []payload.Run, err error) {
	body := l.Size()
	runs = make([]payload.Run, (body+payload.RunSize-1)/payload.RunSize)
	defer func() {
		if err != nil {
			for i := range runs {
				err = errors.Join(err, runs[i].Buffer.Release())
			}
		}
	}()
	t := b.Choose.Begin(b.Codec, r.Space().ID())
	raw := func(w *lane, i int) []byte { return w.run()[:min(payload.RunSize, body-int64(i)*payload.RunSize)] }
	l.Rewind()
	lanes := func(ctx context.Context, at, n int) error {
		return b.inLanesOf(ctx, layingSize, r.Space().Node(), n, func(w *lane, i int) error {
			p := raw(w, at+i)
			if n, err := l.Next(p); err != nil || n != len(p) {
				return errors.Join(err, fmt.Errorf("convert: a layout gave %d of %d bytes", n, len(p)))
			}
			return nil
		}, func(ctx context.Context, w *lane, i int) error {
			p, begin, with := raw(w, at+i), int64(at+i)*payload.RunSize, t.Codec()
			there := func(off, n int64) []byte { return p[off-begin:][:n:n] }
			read := func(_ context.Context, _ *lane, off, n int64) ([]byte, error) { return there(off, n), nil }
			from := frames{there: there, read: read}
			err := b.Choose.Timed(b.Codec, r.Space().ID(), with, true, int64(len(p)), func() error {
				return b.packRun(ctx, w, &runs[at+i], with, body, begin, from, r)
			})
			if err != nil || t.Fixed != codec.Auto {
				return err
			}
			sample := func(off, n int64) ([]byte, error) { return p[off:][:n], nil }
			return b.Choose.Sample(&b.coders, t.Disk, int64(len(p)), w.spare(), sample)
		})
	}
	err = b.Permitted(ctx, r.Space(), nil, body, func(ctx context.Context) error {
		first := 0
		if t.Blind() {
			first = 1
			if err := lanes(ctx, 0, 1); err != nil {
				return err
			}
		}
		return lanes(ctx, first, len(runs)-first)
	})
	return runs, err
}

// packRun compresses and stores one run.
func (b *Builtin) packRun(ctx context.Context, l *lane, run *payload.Run, with codec.Codec, body, off int64, from frames, r reservation.Reservation) error {
	run.Codec = uint8(with)
	if n := min(payload.RunSize, body-off); with == codec.None && from.there != nil {
		if raw := from.there(off, n); raw != nil {
			for i, part := 0, raw; len(part) > 0; i++ {
				run.Frames[i] = uint32(min(payload.FrameSize, len(part)))
				part = part[run.Frames[i]:]
			}
			run.Sum = xxh3.Hash(raw)
			return b.store(ctx, run, raw, r)
		}
	}
	block, _ := l.memory()
	stored, begin, raws := block[:0], off, int64(0)
	for i := 0; i < len(run.Frames) && off < body; i++ {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		n := min(payload.FrameSize, body-off)
		raw, err := from.read(ctx, l, off, n)
		if err != nil {
			return err
		}
		before := len(stored)
		if stored, err = b.coders.Encode(with, stored, raw); err != nil {
			return err
		}
		run.Frames[i] = uint32(len(stored) - before)
		if off += n; run.Frames[i] == uint32(n) {
			raws += n
		}
	}
	if from.there != nil && raws == off-begin { // nothing was gained: it is written from where it lies
		if raw := from.there(begin, raws); raw != nil {
			stored = raw
		}
	}
	run.Sum = xxh3.Hash(stored)
	return b.store(ctx, run, stored, r)
}

// store puts a run's bytes, which begin on a page and have room for the last page behind
// them, into a buffer drawn from r.
func (b *Builtin) store(ctx context.Context, run *payload.Run, stored []byte, r reservation.Reservation) (err error) {
	n := len(stored)
	stored = stored[:image.RoundUp(int64(n), tier.Page)]
	clear(stored[n:])
	if run.Buffer, err = r.AllocCuts(int64(len(stored)), pages(int64(len(stored)))); err != nil {
		return err
	}
	switch m := run.Buffer.Memory().(type) {
	case tier.HostMemory:
		return image.Scatter(m.Extents(), 0, stored)
	case tier.FileMemory:
		return Checked(m).WriteAt(ctx, stored, 0)
	}
	return fmt.Errorf("convert: a packed image in %s: %w", r.Space().ID(), tier.ErrNotSupported)
}

// pages lists where memory of so many bytes may be split, if any page will do.
func pages(size int64) (cuts []int64) {
	for at := int64(tier.Page); at < size; at += tier.Page {
		cuts = append(cuts, at)
	}
	return cuts
}

// copyRun copies a run as it is stored.
func (b *Builtin) copyRun(ctx context.Context, l *lane, run, from *payload.Run, r reservation.Reservation) error {
	stored, err := b.stored(ctx, l, from)
	if err != nil {
		return err
	}
	run.Sum, run.Codec, run.Frames = from.Sum, from.Codec, from.Frames
	block, _ := l.memory()
	return b.store(ctx, run, block[:copy(block, stored)], r)
}

// stored returns a run's bytes, verified: where they are, or in the lane's memory.
func (b *Builtin) stored(ctx context.Context, l *lane, run *payload.Run) ([]byte, error) {
	n := run.Stored()
	var p []byte
	switch m := run.Buffer.Memory().(type) {
	case tier.HostMemory:
		if p = image.Stretch(m.Extents(), 0, n); p == nil {
			block, _ := l.memory()
			p = block[:n]
			if err := image.Gather(p, m.Extents(), 0); err != nil {
				return nil, err
			}
		}
	case tier.FileMemory:
		block, _ := l.memory()
		p = block[:n]
		if err := Checked(m).ReadAt(ctx, block[:image.RoundUp(n, tier.Page)], 0); err != nil {
			return nil, err
		}
	default:
		return nil, fmt.Errorf("convert: a packed image in %s: %w", run.Buffer.Space().ID(), tier.ErrNotSupported)
	}
	if got := xxh3.Hash(p); got != run.Sum {
		return nil, corruptRun(run, 0, &image.CorruptError{Want: run.Sum, Got: got})
	}
	return p, nil
}

// corruptRun adds where the corrupt bytes lie, at off of a run.
func corruptRun(run *payload.Run, off int64, c *image.CorruptError) *image.CorruptError {
	c.Offset = off
	if m, ok := run.Buffer.Memory().(tier.FileMemory); ok {
		volume, file, at := m.Locate(off)
		c.Volume, c.Offset = volume+" "+file, at
	}
	return c
}

// target is where an unpacked body goes: room returns where the n bytes at off are wanted,
// or memory of the lane's, and put brings them to their place from there.
type target struct {
	// there, which may be nil, returns the place of the n bytes at off, if that is one.
	there func(off, n int64) []byte
	room  func(ctx context.Context, l *lane, off, n int64) ([]byte, error)
	put   func(ctx context.Context, l *lane, p []byte, off int64) error
}

func hostTarget(m tier.HostMemory) target {
	extents := m.Extents()
	return target{
		there: func(off, n int64) []byte { return image.Stretch(extents, off, n) },
		room: func(_ context.Context, l *lane, off, n int64) ([]byte, error) {
			if p := image.Stretch(extents, off, n); p != nil {
				return p, nil
			}
			_, frame := l.memory()
			return frame[:n], nil
		},
		put: func(_ context.Context, _ *lane, p []byte, off int64) error {
			if q := image.Stretch(extents, off, int64(len(p))); q != nil && address.Of(q) == address.Of(p) {
				return nil
			}
			return image.Scatter(extents, off, p)
		},
	}
}

// laneTarget gives memory of the lane's, and put brings it where it belongs.
func laneTarget(put func(ctx context.Context, p []byte, off int64) error) target {
	return target{
		room: func(_ context.Context, l *lane, _, n int64) ([]byte, error) {
			_, frame := l.memory()
			return frame[:n], nil
		},
		put: func(ctx context.Context, _ *lane, p []byte, off int64) error { return put(ctx, p, off) },
	}
}

// chunkTarget passes pinned chunks to drain.
func chunkTarget(drain func(ctx context.Context, p []byte, off int64) error) target {
	return target{
		room: func(ctx context.Context, l *lane, _, n int64) ([]byte, error) {
			chunk, err := l.pinned(ctx)
			if err != nil {
				return nil, err
			}
			if int64(len(chunk)) >= n {
				return chunk[:n], nil
			}
			_, frame := l.memory() // a small host tier has small chunks
			return frame[:n], nil
		},
		put: func(ctx context.Context, l *lane, p []byte, off int64) error {
			if len(p) <= len(l.chunk) {
				return drain(ctx, p, off)
			}
			for part := range slices.Chunk(p, len(l.chunk)) {
				if err := drain(ctx, l.chunk[:copy(l.chunk, part)], off); err != nil {
					return err
				}
				off += int64(len(part))
			}
			return nil
		},
	}
}

// target returns how lanes write to the sink; check sees what has none.
func (s *sink) target(check func(p []byte, off int64) error) target {
	switch {
	case s.host != nil:
		return hostTarget(s.host)
	case s.device != nil:
		return chunkTarget(s.drain)
	case s.file != nil:
		return laneTarget(s.drain)
	}
	return laneTarget(func(_ context.Context, p []byte, off int64) error { return check(p, off) })
}

// unpack brings a packed body to a target, each frame verified.
func (b *Builtin) unpack(ctx context.Context, to *tier.Space, from *payload.Packed, t target) error {
	runs, body := from.Runs(), from.Descriptor().Body
	return b.inLanes(ctx, nodeOf(to, from.Space()), len(runs), func(ctx context.Context, l *lane, i int) error {
		off := int64(i) * payload.RunSize
		return b.Choose.Timed(b.Codec, from.Space().ID(), codec.Codec(runs[i].Codec), false, min(payload.RunSize, body-off), func() error {
			return b.unpackRun(ctx, l, from, i, t)
		})
	})
}

// unpackRun brings a run to a target.
func (b *Builtin) unpackRun(ctx context.Context, l *lane, from *payload.Packed, i int, t target) error {
	run, body := &from.Runs()[i], from.Descriptor().Body
	if done, err := b.readRaw(ctx, from, i, t); done || err != nil {
		return err
	}
	stored, err := b.stored(ctx, l, run)
	if err != nil {
		return err
	}
	at := int64(0)
	for f, off := 0, int64(i)*payload.RunSize; f < len(run.Frames) && off < body; f, off = f+1, off+payload.FrameSize {
		n := min(payload.FrameSize, body-off)
		p, err := t.room(ctx, l, off, n)
		if err != nil {
			return err
		}
		if err := b.coders.Decode(codec.Codec(run.Codec), p, stored[at:at+int64(run.Frames[f])]); err != nil {
			return corruptRun(run, at, &image.CorruptError{Cause: err})
		}
		if err := verifyFrame(from.Descriptor(), run, p, off, at); err != nil {
			return err
		}
		if err := t.put(ctx, l, p, off); err != nil {
			return err
		}
		at += int64(run.Frames[f])
	}
	return nil
}

// readRaw brings a run on disk that nothing was gained by compressing straight to its place,
// if that is one; else it says false.
func (b *Builtin) readRaw(ctx context.Context, from *payload.Packed, i int, t target) (bool, error) {
	run, off := &from.Runs()[i], int64(i)*payload.RunSize
	file, ok := run.Buffer.Memory().(tier.FileMemory)
	n := min(payload.RunSize, from.Descriptor().Body-off)
	if !ok || t.there == nil || run.Stored() != n || n%tier.Page != 0 {
		return false, nil
	}
	p := t.there(off, n)
	if p == nil {
		return false, nil
	}
	if err := Checked(file).ReadAt(ctx, p, 0); err != nil {
		return false, err
	}
	for at := int64(0); at < n; at += payload.FrameSize {
		if err := verifyFrame(from.Descriptor(), run, p[at:min(at+payload.FrameSize, n)], off+at, at); err != nil {
			return false, err
		}
	}
	return true, nil
}

// verifyFrame compares the body's bytes at off with their checksums; at is where they are
// stored in the run.
func verifyFrame(desc *batch.Descriptor, run *payload.Run, p []byte, off, at int64) error {
	for part := range slices.Chunk(p, payload.SumChunk) {
		err := image.Verify(desc, int(off/payload.SumChunk), part)
		var c *image.CorruptError
		if errors.As(err, &c) {
			return corruptRun(run, at, c)
		}
		if err != nil {
			return err
		}
		off += int64(len(part))
	}
	return nil
}
