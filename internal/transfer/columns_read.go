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

// ReadColumns reads the planned parts of an image on disk into memory drawn from r, with one
// permit, and opens them there. enter lists the record in the space as a holder of that memory.
func (b *Builtin) ReadColumns(
	ctx context.Context, p *columns.Plan, img *batch.Image, r *reservation.Reservation,
	enter func(l *image.Lease, s *tier.Space, memory any, bytes int64),
) (rec arrow.RecordBatch, err error) {
	// An image of those dictionaries alone. It is never released: its references are img's.
	dicts := batch.NewImage(&batch.Descriptor{Dictionaries: p.Memory.Dictionaries}, nil, img.Space(), p.Shared...)
	err = b.Permitted(ctx, r.Space(), img.Space(), underWay(p.Memory, p.Shared), func(ctx context.Context) (err error) {
		buf, err := r.Alloc(p.Memory.Body, p.Memory.Cuts()...)
		if err != nil {
			return err
		}
		// The record has a lease, and arrays of dictionaries have theirs.
		defer func() { err = errors.Join(err, buf.Release()) }()
		shared, err := b.Share(ctx, dicts, r)
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
		if err = b.Fill(ctx, p, img, extents); err != nil {
			l.End()
			return err
		}
		rec, err = p.Open(extents, l, FinderOf(shared))
		return err
	})
	return Released(rec, err)
}

// Released releases rec if there is an error, and returns both.
func Released(rec arrow.RecordBatch, err error) (arrow.RecordBatch, error) {
	if err != nil && rec != nil {
		rec.Release()
		rec = nil
	}
	return rec, err
}

// Fill reads and verifies all blocks that were planned. Nothing is under way when it returns.
func (b *Builtin) Fill(ctx context.Context, p *columns.Plan, img *batch.Image, extents [][]byte) error {
	src, err := b.from(ctx, img)
	if err != nil {
		return err
	}
	requests := Requests(p.Runs, src.runs != nil)
	return b.readRanges(ctx, src, len(requests), false, func(ctx context.Context, r *ranges, i int) error {
		last := requests[i][len(requests[i])-1]
		r.until = last.Off + last.N
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

// Requests divides the wanted blocks into requests. Of a compressed image, the blocks of one run
// are one request, for the frames from the first to the last that they are in.
func Requests(runs []columns.Run, compressed bool) (all [][]columns.Run) {
	last := int64(-1)
	for _, r := range runs {
		for done := int64(0); done < r.N; {
			off, most := r.Off+done, int64(ColumnRequest)
			if compressed {
				most = payload.RunSize - off%payload.RunSize
			}
			piece := columns.Run{Off: off, N: min(r.N-done, most), At: r.At + done}
			done += piece.N
			if run := off / payload.RunSize; compressed && run == last {
				all[len(all)-1] = append(all[len(all)-1], piece)
			} else {
				last, all = run, append(all, []columns.Run{piece})
			}
		}
	}
	return all
}

// ReadPieces fills pieces of a body, in whole blocks of its checksums, which it compares. It keeps the
// last block of each piece. Nothing is under way when it returns. The space of the pieces is to; nil
// if they are on the Go heap.
func (b *Builtin) ReadPieces(ctx context.Context, img *batch.Image, to *tier.Space, all []columns.Piece) error {
	src, err := b.from(ctx, img)
	if err != nil {
		return err
	}
	block := int64(tier.Page)
	if src.verify {
		block = src.desc.SumBlock()
	}
	slices.SortFunc(all, func(a, b columns.Piece) int { return cmp.Compare(a.Off, b.Off) })
	var requests [][]columns.Piece // of pieces that have blocks in common
	var size, first, end int64     // of the last request
	for _, p := range all {
		host, ok := src.Source.(hostMemory)
		if ok && src.runs == nil {
			if err := image.Gather(p.To, host, p.Off); err != nil {
				return err
			}
			continue
		}
		if p.FromHeld() {
			continue
		}
		begin := p.Off / block * block
		if len(requests) == 0 || begin >= end || begin-first >= ColumnRequest {
			requests, first, end = append(requests, nil), begin, begin
		}
		last := len(requests) - 1
		requests[last] = append(requests[last], p)
		size, end = size+int64(len(p.To)), max(end, image.RoundUp(p.Off+int64(len(p.To)), block))
	}
	if len(requests) == 0 { // an image without bytes also has no memory
		return nil
	}
	var devices []*deviceMemory
	if m, ok := src.Source.(*deviceMemory); ok {
		devices = append(devices, m)
	}
	return b.Permitted(ctx, to, src.space, size, func(ctx context.Context) error {
		return b.onStreams(ctx, devices, func() error {
			return b.readRanges(ctx, src, len(requests), true, func(ctx context.Context, r *ranges, i int) error {
				return r.fill(ctx, requests[i], block)
			})
		})
	})
}

// fill reads the blocks of pieces that follow each other, through the chunk.
func (r *ranges) fill(ctx context.Context, pieces []columns.Piece, block int64) error {
	end := int64(0)
	for _, p := range pieces {
		end = max(end, image.RoundUp(p.Off+int64(len(p.To)), block))
	}
	end = min(end, r.src.size)
	room := int64(len(r.chunk)) / block * block
	for at := pieces[0].Off / block * block; at < end; {
		raw := r.chunk[:min(end-at, room)]
		next := at + int64(len(raw))
		err := r.read(ctx, raw, at)
		if err == nil && r.src.verify {
			err = image.NewVerifier(r.src.desc, r.src.locate).Add(raw, at)
		}
		if err != nil {
			return err
		}
		for i := range pieces {
			p := &pieces[i]
			if p.Off >= next || len(p.To) == 0 {
				continue
			}
			n := copy(p.To, raw[p.Off-at:])
			if p.Off, p.To = p.Off+int64(n), p.To[n:]; len(p.To) == 0 {
				last := (p.Off - 1) / block * block
				p.Hold(last, raw[last-at:min(last+block, next)-at])
			}
		}
		at = next
	}
	return nil
}

// ranges reads parts of a body for one goroutine. Of a compressed one it reads and uncompresses only
// the frames that are wanted, and keeps the last ones for the next part.
type ranges struct {
	b     *Builtin
	src   *bytesFrom
	chunk []byte // for the caller: whole pages, and at least one block if there are checksums
	until int64  // parts up to here follow, so that frames of the same run are read together

	// Of a compressed body: the frames from first to before end as they are stored, all of one run,
	// and one of them.
	first, end   int64
	room, stored []byte
	skipped      int64 // bytes of the run before stored
	frame        int64 // the number of that in raw; -1 for none
	raw          []byte
}

// readRanges calls f for each of several requests, in several lanes. They have a block each if the
// source is compressed, or f needs a chunk; of a device, a pinned chunk.
func (b *Builtin) readRanges(
	ctx context.Context, src *bytesFrom, n int, chunks bool, f func(ctx context.Context, r *ranges, i int) error,
) error {
	w := &lanes{b: b, node: src.space.Node()}
	if chunks || src.runs != nil {
		if w.blocks = !src.space.Kind().IsDevice(); !w.blocks {
			var err error
			if w.chunks, err = b.Staging(w.node); err != nil {
				return err
			}
		}
	}
	return w.each(ctx, 0, n, columnsUnderWay, nil, func(ctx context.Context, l *lane, i int) error {
		r := &ranges{b: b, src: src, frame: -1, chunk: l.chunk}
		if w.blocks {
			r.room, r.raw, r.chunk = l.stored, l.raw[:payload.FrameSize], l.raw[payload.FrameSize:]
		}
		return f(ctx, r, i)
	})
}

// read fills p from off on.
func (r *ranges) read(ctx context.Context, p []byte, off int64) error {
	if r.src.runs == nil {
		return r.src.Fetch(ctx, p, off)
	}
	size := r.src.desc.Frame()
	for len(p) > 0 {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		frame := off / size
		if frame < r.first || frame >= r.end {
			if err := r.readFrames(ctx, frame, max(off+int64(len(p)), r.until)); err != nil {
				return err
			}
		}
		n := min(size, r.src.size-frame*size)
		if r.frame != frame {
			run, k, at := &r.src.runs[off/payload.RunSize], off%payload.RunSize/size, int64(0)
			for _, stored := range run.Frames[:k] {
				at += int64(stored)
			}
			r.frame = -1
			err := r.b.coders.Decode(codec.Codec(run.Codec), r.raw[:n], r.stored[at-r.skipped:][:run.Frames[k]])
			if err != nil {
				return r.src.corrupt(&image.CorruptError{Cause: err}, run, at)
			}
			r.frame = frame
		}
		copied := copy(p, r.raw[off-frame*size:n])
		p, off = p[copied:], off+int64(copied)
	}
	return nil
}

// readFrames reads the frames from first on that have bytes before end and are of the same run, with
// the rest of their first and last page. Only the checksums of the body are compared.
func (r *ranges) readFrames(ctx context.Context, first, end int64) error {
	size := r.src.desc.Frame()
	const run = payload.RunSize
	i, of := first*size/run, run/size // the run, and frames in one
	r.first, r.end, r.frame, r.skipped = first, min((end-1)/size+1, (i+1)*of), -1, 0
	n := int64(0)
	for k, stored := range r.src.runs[i].Frames[:r.end-i*of] {
		if int64(k) < first-i*of {
			r.skipped += int64(stored)
		} else {
			n += int64(stored)
		}
	}
	at := r.src.runs[i].Offset + r.skipped
	if r.stored = r.src.View(at, n); int64(len(r.stored)) == n {
		return nil
	}
	begin := at / tier.Page * tier.Page
	p := r.room[:image.RoundUp(at+n, tier.Page)-begin]
	r.stored = p[at-begin:][:n]
	err := r.src.Fetch(ctx, p, begin)
	if err != nil {
		r.end = r.first
	}
	return err
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
