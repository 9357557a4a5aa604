package transfer

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/codec"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/image"
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

// ReadColumns reads the planned parts of an image into memory drawn from r, with one permit, and
// opens them there. The record keeps the memory and the dictionaries that it needs; r stays the
// caller's. enter lists the record in the space as a holder of that memory, so that a leak or a
// full space can name it.
func (b *Builtin) ReadColumns(
	ctx context.Context, p *image.ColumnsPlan, img *batch.Image, r *reservation.Reservation,
	enter func(l *image.Lease, s *tier.Space, memory any, bytes int64),
) (rec arrow.RecordBatch, err error) {
	// Only the dictionaries of the chosen columns are brought to the target.
	needed := make(map[*batch.Descriptor]bool)
	for _, d := range p.Memory.AllDictionaries() {
		needed[d] = true
	}
	all := slices.Clone(img.Parts.Shared)
	all = slices.DeleteFunc(all, func(s batch.Shared) bool { return !needed[s.Descriptor()] })
	bytes := p.Memory.Body + int64(len(all))*DiskUnderWay
	err = b.Permitted(ctx, r.Space(), img.Space(), bytes, func(ctx context.Context) (err error) {
		buf, err := r.Alloc(p.Memory.Body, p.Memory.Cuts()...)
		if err != nil {
			return err
		}
		// The record has a lease on the memory, and arrays of dictionaries have theirs, so what was
		// drawn here is given up in any case.
		defer func() { err = errors.Join(err, buf.Release()) }()
		shared, err := b.Share(ctx, all, img.Space(), r)
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
		read := func(blocks []image.Piece) error { return b.ReadPieces(ctx, img, r.Space(), true, blocks) }
		rec, err = p.Open(read, extents, l, FinderOf(shared))
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

// ReadPieces fills pieces of a body. It reads whole blocks of the checksums, which it compares, and
// of a compressed body whole frames, in requests of up to ColumnRequest bytes. It keeps the last
// block of each piece (Piece.Hold). If whole is set, the pieces that follow each other are whole
// blocks, which are read straight to where they belong; otherwise pieces may overlap, and their
// blocks pass through the memory of a lane. It may change all. Nothing is in progress when it
// returns. The space of the pieces is to; nil if they are on the Go heap.
func (b *Builtin) ReadPieces(
	ctx context.Context, img *batch.Image, to *tier.Space, whole bool, all []image.Piece,
) error {
	src, err := b.from(ctx, &img.Parts)
	if err != nil {
		return err
	}
	block := int64(tier.Page)
	switch {
	case src.runs != nil:
		block = src.desc.Frame()
	case src.verify:
		block = src.desc.SumBlock()
	}
	slices.SortFunc(all, func(a, b image.Piece) int { return cmp.Compare(a.Off, b.Off) })
	// Divide the pieces, in the order of the image, into requests. A piece joins the last request
	// if its first block is in it or follows it, up to ColumnRequest bytes. A piece that would go
	// beyond is cut.
	var requests [][]image.Piece
	var size, first, end int64 // of the last request
	for _, p := range all {
		host, ok := src.Source.(hostMemory)
		// In host memory nothing has to be requested or verified.
		if ok && src.runs == nil {
			if err := image.Gather(p.To, host, p.Off); err != nil {
				return err
			}
			continue
		}
		for more := !p.FromHeld(); more; {
			begin := p.Off / block * block
			if len(requests) == 0 || begin < first || begin > end || begin-first >= ColumnRequest {
				requests, first, end = append(requests, nil), begin, begin
			}
			var part image.Piece
			part, more = p.Cut(first + ColumnRequest)
			last := len(requests) - 1
			requests[last] = append(requests[last], part)
			n := int64(len(part.To))
			size, end = size+n, max(end, extent.RoundUp(part.Off+n, block))
		}
	}
	// All was in memory, or in blocks that the cursor has kept.
	if len(requests) == 0 {
		return nil
	}
	// A device needs pinned chunks. From a disk, whole blocks need no memory; others pass through a
	// block.
	w := &lanes{b: b, node: src.space.Node}
	var devices []*deviceMemory
	if m, ok := src.Source.(*deviceMemory); !ok {
		w.blocks = !whole || src.runs != nil
	} else if w.chunks, err = b.Staging(w.node); err != nil {
		return err
	} else {
		devices = append(devices, m)
	}
	return b.Permitted(ctx, to, src.space, size, func(ctx context.Context) error {
		return b.onStreams(ctx, devices, func() error {
			return w.each(ctx, 0, len(requests), columnsUnderWay, nil, func(ctx context.Context, l *lane, i int) error {
				// Each request has a reader of its own: frames are kept within a request only.
				r := &ranges{b: b, src: src, frame: -1, chunk: l.chunk}
				if w.blocks {
					r.room, r.raw, r.chunk = l.stored, l.raw[:payload.FrameSize], l.raw[payload.FrameSize:]
				}
				return r.fill(ctx, requests[i], block, whole)
			})
		})
	})
}

// fill reads the blocks of one request's pieces, which follow each other: straight to the pieces if
// they are whole, or else as many blocks at a time as the chunk has room for, from which the pieces
// are copied.
func (r *ranges) fill(ctx context.Context, pieces []image.Piece, block int64, whole bool) error {
	for _, p := range pieces {
		r.until = max(r.until, extent.RoundUp(p.Off+int64(len(p.To)), block))
	}
	// The last block of a body may be shorter.
	r.until = min(r.until, r.src.size)
	if whole {
		// The pieces follow each other, so one checker sees whole blocks, even if a piece ends
		// within one.
		check := r.src.checker()
		for _, p := range pieces {
			err := r.read(ctx, p.To, p.Off)
			if err == nil {
				err = check(p.To, p.Off)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	room, kept := int64(len(r.chunk))/block*block, min(block, r.src.desc.SumBlock())
	for at := pieces[0].Off / block * block; at < r.until; {
		raw := r.chunk[:min(r.until-at, room)]
		next := at + int64(len(raw))
		err := r.read(ctx, raw, at)
		if err == nil {
			err = r.src.checker()(raw, at)
		}
		if err != nil {
			return err
		}
		// Each piece takes what it has of these blocks, and is shortened. When it is complete, the
		// block in which it ends is kept for the next window. A frame may have several blocks; kept
		// is the shorter one.
		for i := range pieces {
			p := &pieces[i]
			if p.Off >= next || len(p.To) == 0 {
				continue
			}
			n := copy(p.To, raw[p.Off-at:])
			if p.Off, p.To = p.Off+int64(n), p.To[n:]; len(p.To) == 0 {
				last := (p.Off - 1) / kept * kept
				p.Hold(last, raw[last-at:min(last+kept, next)-at])
			}
		}
		at = next
	}
	return nil
}

// ranges reads parts of a body for one goroutine. Of a compressed one it reads and uncompresses
// only the frames that are wanted, and keeps the last ones for the next part: pieces of one request
// are often in the same frame.
type ranges struct {
	b     *Builtin
	src   *bytesFrom
	chunk []byte // what blocks are read into; holds at least one
	until int64  // where the request ends, so that frames of the same run are read together

	// Of a compressed body: the frames from first to before end as they are stored, all of one run,
	// and one of them.
	first, end   int64
	room, stored []byte
	skipped      int64 // bytes of the run before stored
	frame        int64 // the number of that in raw; -1 for none
	raw          []byte
}

// read fills p from off on.
func (r *ranges) read(ctx context.Context, p []byte, off int64) error {
	if r.src.runs == nil {
		return r.src.ReadAt(ctx, p, off)
	}
	size := r.src.desc.Frame()
	for len(p) > 0 {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		frame := off / size
		// Read the frames of the rest of the request at once, as far as they are of this run.
		if frame < r.first || frame >= r.end {
			if err := r.readFrames(ctx, frame, r.until); err != nil {
				return err
			}
		}
		n := min(size, r.src.size-frame*size)
		// Uncompress the frame, unless it is the one that was used last.
		if r.frame != frame {
			run, k, at := &r.src.runs[off/payload.RunSize], off%payload.RunSize/size, int64(0)
			for _, stored := range run.Frames[:k] {
				at += int64(stored)
			}
			// If decoding fails, raw has a part of another frame.
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

// readFrames reads the stored frames from number first on that have bytes before end and are of the
// same run, with the rest of their first and last page. The checksum of a run covers all of its
// frames, so it cannot be compared here. Those of the body are, when the frames are uncompressed.
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
	host, _ := r.src.Source.(hostMemory)
	if r.stored = image.View(host, at, n); int64(len(r.stored)) == n {
		return nil
	}
	// A file may be read with direct I/O, which needs whole pages.
	begin := at / tier.Page * tier.Page
	p := r.room[:extent.RoundUp(at+n, tier.Page)-begin]
	r.stored = p[at-begin:][:n]
	return r.src.ReadAt(ctx, p, begin)
}

// columnsRead is the memory of a record of columns, as the space's books list holders: it has the
// methods of an image that list buffers.
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
