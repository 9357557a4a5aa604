package transfer

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/codec"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/image/columns"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

const (
	// ColumnRequest is the most that one read of columns carries: one request, as volumes
	// have them by default, that is verified while others are under way.
	ColumnRequest = 2 << 20
	// columnsUnderWay is how many of those are under way: as many bytes as a transfer has a permit for.
	columnsUnderWay = DiskUnderWay / ColumnRequest
)

// ReadColumns reads what was planned of an image on disk into memory drawn from r, with one permit,
// and opens it there. enter enters the record into the account of the space in which its memory lies.
func (b *Builtin) ReadColumns(
	ctx context.Context, p *columns.Plan, img *batch.Image, r reservation.Reservation,
	enter func(l *image.Lease, s *tier.Space, memory any, bytes int64),
) (rec arrow.RecordBatch, err error) {
	// An image of those dictionaries alone. It is never released: its references are img's.
	dicts := batch.NewImage(&batch.Descriptor{Dictionaries: p.Desc.Dictionaries}, nil, img.Space(), p.Shared...)
	err = b.Permitted(ctx, r.Space(), img.Space(), underWay(p.Desc, p.Shared), func(ctx context.Context) (err error) {
		buf, err := r.AllocCuts(p.Desc.Body, p.Desc.Cuts())
		if err != nil {
			return err
		}
		// The record has a lease, and arrays of dictionaries have theirs.
		defer func() { err = errors.Join(err, buf.Release()) }()
		shared, err := b.share(ctx, dicts, r)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, ReleaseAll(shared)) }()
		extents, release, err := InPlace(buf)
		if err != nil {
			return err
		}
		l := image.NewLease(release)
		if buf != nil {
			enter(l, buf.Space(), &columnsRead{buf, shared}, buf.Charge())
		}
		if err = b.Fill(ctx, p, img, extents); err == nil {
			err = safely(func() error { return p.Mend(extents) })
		}
		if err != nil {
			l.End()
			return err
		}
		rec, err = image.OpenRows(p.Desc, p.Skip, extents, l, FinderOf(shared))
		return err
	})
	return Released(rec, err)
}

// Released gives rec up if there is an error.
func Released(rec arrow.RecordBatch, err error) (arrow.RecordBatch, error) {
	if err != nil && rec != nil {
		rec.Release()
		rec = nil
	}
	return rec, err
}

// Fill reads and verifies all chunks that were planned. Nothing is under way when it returns.
func (b *Builtin) Fill(ctx context.Context, p *columns.Plan, img *batch.Image, extents [][]byte) error {
	src, err := b.from(ctx, img)
	if err != nil {
		return err
	}
	requests := Requests(p.Runs, src.runs != nil)
	return b.readRanges(ctx, src, len(requests), false, func(ctx context.Context, r *ranges, i int) error {
		for _, piece := range requests[i] {
			off, sum := piece.Off, image.NewVerifier(src.desc, src.locate)
			err := image.Across(extents, piece.At, piece.N, func(to []byte) error {
				err := r.read(ctx, to, off)
				if err == nil {
					err = sum.Add(to, off)
				}
				off += int64(len(to))
				return err
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// Requests returns what is read one after the other: a request each, or of a compressed image all that
// is wanted of a run, which is read as a whole.
func Requests(runs []columns.ChunkRun, compressed bool) (all [][]columns.ChunkRun) {
	last := int64(-1)
	for _, r := range runs {
		for done := int64(0); done < r.N; {
			off, most := r.Off+done, int64(ColumnRequest)
			if compressed {
				most = payload.RunSize - off%payload.RunSize
			}
			piece := columns.ChunkRun{Off: off, N: min(r.N-done, most), At: r.At + done}
			done += piece.N
			if run := off / payload.RunSize; compressed && run == last {
				all[len(all)-1] = append(all[len(all)-1], piece)
			} else {
				last, all = run, append(all, []columns.ChunkRun{piece})
			}
		}
	}
	return all
}

// ReadBounds looks offsets up. Each chunk that has some of them passes once through the block of a
// lane, so that no room is needed, and is verified.
func (b *Builtin) ReadBounds(ctx context.Context, img *batch.Image, bounds []columns.Bound) error {
	if len(bounds) == 0 {
		return nil
	}
	slices.SortFunc(bounds, func(a, b columns.Bound) int { return cmp.Compare(a.At, b.At) })
	var chunks [][]columns.Bound
	for i, o := range bounds {
		if i == 0 || o.At/payload.SumChunk != bounds[i-1].At/payload.SumChunk {
			chunks = append(chunks, nil)
		}
		chunks[len(chunks)-1] = append(chunks[len(chunks)-1], o)
	}
	src, err := b.from(ctx, img)
	if err != nil {
		return err
	}
	return b.Permitted(ctx, nil, img.Space(), int64(len(chunks))*payload.SumChunk, func(ctx context.Context) error {
		return b.readRanges(ctx, src, len(chunks), true, func(ctx context.Context, r *ranges, i int) error {
			off := chunks[i][0].At / payload.SumChunk * payload.SumChunk
			p := r.chunk[:min(payload.SumChunk, src.size-off)]
			if err := r.read(ctx, p, off); err != nil {
				return err
			}
			if err := image.NewVerifier(src.desc, src.locate).Add(p, off); err != nil {
				return err
			}
			for _, o := range chunks[i] {
				o.Set(p[o.At-off:])
			}
			return nil
		})
	})
}

// ranges reads parts of a body for one goroutine. Of a compressed one it uncompresses only the frames
// that are wanted, and keeps the last run and the last frame for the next part.
type ranges struct {
	b      *Builtin
	src    *bytesFrom
	room   []byte // for a run as it is stored
	chunk  []byte // for the caller: payload.SumChunk bytes
	raw    []byte // for a frame
	run    int64  // whose bytes stored is; -1 for none
	stored []byte
	frame  int64 // the number of that in raw; -1 for none
}

// readRanges calls f for each of several requests, in several lanes. They have a block each if the
// source is compressed, or f needs a chunk.
func (b *Builtin) readRanges(
	ctx context.Context, src *bytesFrom, n int, chunks bool, f func(ctx context.Context, r *ranges, i int) error,
) error {
	w := lanes{b: b, node: src.space.Node(), blocks: chunks || src.runs != nil}
	return w.each(ctx, 0, n, columnsUnderWay, nil, func(ctx context.Context, l *lane, i int) error {
		r := &ranges{b: b, src: src, run: -1, frame: -1}
		if w.blocks {
			r.room = l.stored
			r.raw, r.chunk = l.raw[:payload.FrameSize], l.raw[payload.FrameSize:][:payload.SumChunk]
		}
		return f(ctx, r, i)
	})
}

// read fills p from off on.
func (r *ranges) read(ctx context.Context, p []byte, off int64) error {
	if r.src.runs == nil {
		return r.src.Fetch(ctx, p, off)
	}
	for len(p) > 0 {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		i, frame := off/payload.RunSize, off/payload.FrameSize
		run := &r.src.runs[i]
		if r.run != i {
			var err error
			r.run, r.frame = -1, -1
			if r.stored, err = stored(ctx, r.src, run, r.room); err != nil {
				return err
			}
			r.run = i
		}
		begin := frame * payload.FrameSize
		size := min(payload.FrameSize, r.src.size-begin)
		if r.frame != frame {
			at, f := int64(0), off%payload.RunSize/payload.FrameSize
			for _, n := range run.Frames[:f] {
				at += int64(n)
			}
			r.frame = -1
			if err := r.b.coders.Decode(codec.Codec(run.Codec), r.raw[:size], r.stored[at:][:run.Frames[f]]); err != nil {
				return r.src.corrupt(&image.CorruptError{Cause: err}, run, at)
			}
			r.frame = frame
		}
		n := copy(p, r.raw[off-begin:size])
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// columnsRead is the memory of a record of columns, for the space's account.
type columnsRead struct {
	buf    *tier.Buffer
	shared []batch.Shared
}

func (c *columnsRead) Buffers() []*tier.Buffer { return []*tier.Buffer{c.buf} }

func (c *columnsRead) EachShared(f func(*tier.Buffer)) {
	for _, s := range c.shared {
		if b := s.Buffer(); b != nil {
			f(b)
		}
	}
}
