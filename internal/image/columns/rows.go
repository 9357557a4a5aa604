package columns

import (
	"slices"
	"sort"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/bitutil"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
	"github.com/spillway-db/spillway/internal/sumcopy"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Rows reads a batch from one row on, a window of rows at a time, into memory of a fixed length. Each
// window has as many rows as fit.
//
//	memory  │ whole buffers │ blocks │ window       │
//
// Columns that cannot be cut by rows are read whole with the first window, and stay in the memory.
// So are dictionaries in the body, which are short: they are read to the Go heap, because arrays
// that are copied share them. Of each other buffer the window has the bytes of its rows, without
// gaps.
//
// An image is read by the blocks of its checksums, and most windows begin in the block in which the
// one before has ended. The memory keeps that block of each buffer as it is in the image, so each
// block is read about once. If the blocks would take more than three quarters of the memory, they
// are not kept, and a window reads its first blocks again.
//
// A Rows is not safe for concurrent use.
type Rows struct {
	Image  *batch.Descriptor // what is read
	Memory []byte            // where to; the caller sets it before the first window
	Shared []batch.Shared    // the dictionaries, which the caller holds in host memory

	space    tier.ID  // of the memory
	size     int64    // of the memory
	columns  []bool   // whether each is cut by rows
	nodes    []node   // those of Image; the scale is dependent in columns that are not cut
	buffers  []buffer // those of Image
	window   int64    // where it begins in the memory
	dicts    []byte   // the dictionaries in the body; the spans of a record count from here on
	hasWhole bool     // the whole buffers and dicts have been read
	next     int64    // the first row of the next window
}

// buffer is a buffer of the image, and the part of it in the memory.
type buffer struct {
	part
	whole   bool    // it is not cut by rows
	holds   bool    // there is room for its block
	at      int64   // of the whole buffer or the block in the memory, or of a dictionary's in dicts
	offsets *buffer // those of a shape.Data that is cut
	done    int64   // of such Data, the bytes before the window

	begin int64  // in the memory, of its bytes in the window
	size  int64  // how many these are
	to    []byte // these bytes
	block []byte // in which to has ended; empty if that is not known
	from  int64  // of block in the image
}

// Piece is bytes of one buffer of an image that are wanted.
type Piece struct {
	Off int64 // in the image
	To  []byte
	of  *buffer
}

// FromHeld copies the part of the piece that is in the kept block. It reports whether that was all.
func (p *Piece) FromHeld() bool {
	if b := p.of; p.Off >= b.from && p.Off < b.from+int64(len(b.block)) {
		n := copy(p.To, b.block[p.Off-b.from:])
		p.Off, p.To = p.Off+int64(n), p.To[n:]
	}
	return len(p.To) == 0
}

// Hold keeps the block at off of the image, in which the piece has ended.
func (p *Piece) Hold(off int64, block []byte) {
	if b := p.of; b.holds {
		b.from, b.block = off, append(b.block[:0], block...)
	}
}

// NewRows returns the Rows of an image from a row on, for size bytes of memory in a space. They must
// hold the whole batch, or the whole buffers and a page for each other one, or else the error is a
// *reservation.ExceededError.
func NewRows(d *batch.Descriptor, from, size int64, space tier.ID) (*Rows, error) {
	c, err := Selection{}.Of(d.Schema, d.Rows)
	if err != nil {
		return nil, err
	}
	all, err := columnsOf(d, c)
	if err != nil {
		return nil, err
	}
	r := &Rows{Image: d, space: space, size: size, next: from}
	r.buffers = make([]buffer, 0, len(d.Buffers))
	for _, c := range all {
		r.columns = append(r.columns, c.byRows)
		for i, p := range c.parts {
			s := p.span
			if s.Length > 0 && (s.Offset < 0 || s.Offset > d.Body || s.Length > d.Body-s.Offset) {
				const text = "a buffer of %d bytes at %d in a body of %d"
				return nil, image.Path{}.Invalid(text, s.Length, s.Offset, d.Body)
			}
			b := buffer{part: p, whole: !c.byRows || p.scale < 0}
			b.node += len(r.nodes)
			if !b.whole && p.Role == shape.Data {
				b.offsets = &r.buffers[len(r.buffers)-1]
				b.whole = c.parts[i-1].span.Length <= 0
			}
			r.buffers = append(r.buffers, b)
		}
		for _, n := range c.nodes {
			if !c.byRows {
				n.scale = dependent
			}
			r.nodes = append(r.nodes, n)
		}
	}
	var cut, blocks, dicts int64
	for i := range r.buffers {
		b := &r.buffers[i]
		n := aligned(b.span.Length)
		switch {
		case n == 0:
		case b.inDict:
			b.at = dicts
			dicts += n
		case b.whole:
			b.at = r.window
			r.window += n
		default:
			cut += n
			blocks++
		}
	}
	r.dicts = make([]byte, dicts)
	if need := r.window + min(cut, blocks*tier.Page); need > size {
		return nil, r.tooSmall(need)
	}
	if r.window+cut > size && blocks*d.SumBlock() <= (size-r.window)/4*3 {
		for i := range r.buffers {
			if b := &r.buffers[i]; !b.whole && b.span.Length > 0 {
				b.holds, b.at = true, r.window
				r.window += d.SumBlock()
			}
		}
	}
	return r, nil
}

func aligned(n int64) int64 { return image.RoundUp(max(n, 0), image.AlignSmall) }

func (r *Rows) tooSmall(need int64) error {
	return &reservation.ExceededError{
		Space: r.space, Requested: need, Available: r.size, Limit: r.size,
		Hint: "a cursor needs more memory: raise the bytes of Cursors, or read fewer partitions at a time",
	}
}

// Row returns the first row of the next window: Image.Rows when all have been read.
func (r *Rows) Row() int64 { return r.next }

// Next fills the next window, by calls of read, and opens it as a record, which is valid until the call
// of Next after that. On an error it ends the lease, and the same rows can be read again. If the memory
// is too small for a row, the error is a *reservation.ExceededError.
func (r *Rows) Next(read func([]Piece) error, l *image.Lease, find image.Finder) (_ arrow.RecordBatch, err error) {
	defer func() {
		if err != nil {
			l.End()
			for i := range r.buffers {
				r.buffers[i].block = nil
			}
		}
	}()
	n := r.estimate()
	var pieces []Piece
	for i := range r.buffers {
		switch b := &r.buffers[i]; {
		case b.span.Length <= 0:
		case b.whole && r.hasWhole:
		case b.inDict:
			pieces = append(pieces, Piece{b.span.Offset, r.dicts[b.at:][:b.span.Length], b})
		case b.whole:
			pieces = append(pieces, Piece{b.span.Offset, r.Memory[b.at:][:b.span.Length], b})
		case b.holds && b.block == nil:
			b.block = r.Memory[b.at : b.at : b.at+r.Image.SumBlock()]
		}
	}
	// The offsets come first, because they are the bounds of strings.
	offsets, end, err := r.place(r.window, n, true)
	if err != nil {
		return nil, err
	}
	if err := read(append(pieces, offsets...)); err != nil {
		return nil, err
	}
	n = max(1, int64(sort.Search(int(n), func(i int) bool {
		_, _, err := r.place(end, int64(i)+1, false)
		return err != nil
	})))
	if pieces, end, err = r.place(end, n, false); err != nil {
		return nil, err
	}
	if err := read(pieces); err != nil {
		return nil, err
	}
	d, skip := r.describe(n, end)
	l.Unleased = int64(len(r.dicts))
	rec, err := image.OpenRows(d, skip, [][]byte{r.dicts, r.Memory[:end]}, l, find)
	if err != nil {
		return nil, err
	}
	for i := range r.buffers {
		if b := &r.buffers[i]; b.offsets != nil {
			b.done += b.size
		}
	}
	r.next += n
	r.hasWhole = true
	return rec, nil
}

// estimate returns how many rows are likely to fit into a window.
func (r *Rows) estimate() int64 {
	left := r.Image.Rows - r.next
	room, perRow := float64(r.size-r.window), 0.0
	for i := range r.buffers {
		b := &r.buffers[i]
		if b.whole || b.span.Length <= 0 {
			continue
		}
		room -= image.AlignSmall + 8
		if b.Role == shape.Data {
			perRow += float64(b.span.Length-b.done) / float64(left)
		} else {
			_, bytes := b.Bytes(0, 1024*b.scale)
			perRow += float64(bytes) / 1024
		}
	}
	if perRow*float64(left) <= room {
		return left
	}
	return int64(max(1, room/perRow))
}

// span returns which bytes of a buffer n rows of the window have.
func (r *Rows) span(b *buffer, n int64) (off, size int64, err error) {
	off, size = b.Bytes(r.next*b.scale, n*b.scale)
	if o := b.offsets; o != nil {
		off = image.OffsetAt(o.to, o.Width, 0)
		size = image.OffsetAt(o.to, o.Width, n*b.scale) - off
	}
	if off < 0 || size < 0 || off > b.span.Length || size > b.span.Length-off {
		return 0, 0, image.Path{}.Invalid("a buffer of %d bytes where %d at %d are needed", b.span.Length, size, off)
	}
	return off, size, nil
}

// place gives the offsets, or the other buffers, of n rows their places in the window, from at to end.
func (r *Rows) place(at, n int64, offsets bool) (pieces []Piece, end int64, err error) {
	for i := range r.buffers {
		b := &r.buffers[i]
		if b.whole || b.span.Length <= 0 || (b.Role == shape.Offsets) != offsets {
			continue
		}
		off, size, err := r.span(b, n)
		if err != nil {
			return nil, 0, err
		}
		b.begin, b.size = at, size
		pieces = append(pieces, Piece{Off: b.span.Offset + off, of: b})
		at += aligned(size)
	}
	if at > r.size {
		return nil, 0, r.tooSmall(at)
	}
	for i := range pieces {
		b := pieces[i].of
		b.to = r.Memory[b.begin:][:b.size:b.size]
		pieces[i].To = b.to
	}
	return pieces, at, nil
}

// describe returns the descriptor of a window of n rows that ends at the given place, and makes its
// buffers those of arrays of their own. skip is how many rows each column has before the window.
func (r *Rows) describe(n, end int64) (d *batch.Descriptor, skip []int64) {
	of, before := r.Image, int64(len(r.dicts))
	d = &batch.Descriptor{
		Schema: of.Schema, Rows: n, Body: before + end, Dictionaries: of.Dictionaries, Metadata: of.Metadata,
		Nodes: slices.Clone(of.Nodes), Buffers: slices.Clone(of.Buffers),
	}
	for _, cut := range r.columns {
		if cut {
			skip = append(skip, 0)
		} else {
			skip = append(skip, r.next)
		}
	}
	for i, own := range r.nodes {
		if own.scale < 0 {
			continue
		}
		if d.Nodes[i] = (payload.Node{Length: n * own.scale}); own.onlyNull {
			d.Nodes[i].Nulls = n * own.scale
		}
	}
	for i := range r.buffers {
		b := &r.buffers[i]
		switch {
		case b.span.Length <= 0:
			continue
		case b.inDict:
			d.Buffers[i].Offset = b.at
			continue
		case b.whole:
			d.Buffers[i].Offset = before + b.at
			continue
		}
		d.Buffers[i] = payload.Span{Offset: before + b.begin, Length: b.size}
		switch b.Role {
		case shape.Validity, shape.Bits:
			shift := r.next * b.scale % 8
			for i := range b.to {
				b.to[i] >>= shift
				if i+1 < len(b.to) {
					b.to[i] |= b.to[i+1] << (8 - shift)
				}
			}
			if b.Role == shape.Validity {
				values := n * b.scale
				d.Nodes[b.node].Nulls = values - int64(bitutil.CountSetBits(b.to, 0, int(values)))
			}
		case shape.Offsets:
			base := image.OffsetAt(b.to, b.Width, 0)
			sumcopy.Lower{Width: b.Width, Base: uint64(base)}.Copy(b.to, b.to)
		}
	}
	return d, skip
}
