package image

import (
	"sort"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/shape"
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
	Memory []byte         // where to; the caller sets it before the first window
	Shared []batch.Shared // the dictionaries, which the caller holds in host memory

	*chosen
	space    tier.ID // of the memory
	size     int64   // of the memory
	window   int64   // where it begins in the memory
	dicts    []byte  // the dictionaries in the body; the spans of a record count from here on
	hasWhole bool    // the whole buffers and dicts have been read
}

// held is the block in which the bytes of a buffer have ended in the last window.
type held struct {
	room  bool   // there is memory for it
	at    int64  // in the memory
	bytes []byte // empty if it is not known
	from  int64  // in the image
}

// Piece is bytes of one buffer of an image that are wanted.
type Piece struct {
	Off int64 // in the image
	To  []byte
	of  *columnBuffer // nil for an offset that is only looked up
}

// FromHeld copies the part of the piece that is in the kept block. It reports whether that was all.
func (p *Piece) FromHeld() bool {
	if p.of != nil {
		if h := &p.of.held; p.Off >= h.from && p.Off < h.from+int64(len(h.bytes)) {
			n := copy(p.To, h.bytes[p.Off-h.from:])
			p.Off, p.To = p.Off+int64(n), p.To[n:]
		}
	}
	return len(p.To) == 0
}

// Cut returns the part of the piece that is before off of the image. more is whether there are other
// bytes, which p is then.
func (p *Piece) Cut(off int64) (part Piece, more bool) {
	part = *p
	if n := off - p.Off; n < int64(len(p.To)) {
		part.To, part.of, more = p.To[:n], nil, true
		p.Off, p.To = off, p.To[n:]
	}
	return part, more
}

// Hold keeps the block at off of the image, in which the piece has ended.
func (p *Piece) Hold(off int64, block []byte) {
	if p.of != nil && p.of.held.room {
		p.of.held.from, p.of.held.bytes = off, append(p.of.held.bytes[:0], block...)
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
	c.From = from
	all, err := choose(d, c, true)
	if err != nil {
		return nil, err
	}
	r := &Rows{chosen: all, space: space, size: size}
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
				b.held = held{room: true, at: r.window}
				r.window += d.SumBlock()
			}
		}
	}
	return r, nil
}

func aligned(n int64) int64 { return extent.RoundUp(max(n, 0), AlignSmall) }

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
func (r *Rows) Next(read func([]Piece) error, l *Lease, find Finder) (_ arrow.RecordBatch, err error) {
	defer func() {
		if err != nil {
			l.End()
			for i := range r.buffers {
				r.buffers[i].held.bytes = nil
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
		case b.held.room && b.held.bytes == nil:
			b.held.bytes = r.Memory[b.held.at : b.held.at : b.held.at+r.Image.SumBlock()]
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
	d, skip := r.describe(n, int64(len(r.dicts)))
	d.Body = int64(len(r.dicts)) + end
	l.Unleased = int64(len(r.dicts))
	rec, err := OpenRows(d, skip, [][]byte{r.dicts, r.Memory[:end]}, l, find)
	if err != nil {
		return nil, err
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
		room -= AlignSmall + 8
		if b.Role == shape.Data {
			perRow += float64(max(0, b.span.Length-b.last)) / float64(left)
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

// place gives the offsets, or the other buffers, of n rows their places in the window, from at to end.
func (r *Rows) place(at, n int64, offsets bool) (pieces []Piece, end int64, err error) {
	for i := range r.buffers {
		b := &r.buffers[i]
		if b.whole || b.span.Length <= 0 || (b.Role == shape.Offsets) != offsets {
			continue
		}
		if o := b.offsets; o != nil {
			b.first, b.last = OffsetAt(o.to, o.Width, 0), OffsetAt(o.to, o.Width, n*o.scale)
		}
		off, size, err := r.part(b, n)
		if err != nil {
			return nil, 0, err
		}
		b.at, b.size = at, size
		pieces = append(pieces, Piece{Off: b.span.Offset + off, of: b})
		at += aligned(size)
	}
	if at > r.size {
		return nil, 0, r.tooSmall(at)
	}
	for i := range pieces {
		b := pieces[i].of
		b.to = r.Memory[b.at:][:b.size:b.size]
		pieces[i].To = b.to
	}
	return pieces, at, nil
}
