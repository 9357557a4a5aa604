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

// Rows reads a batch from a given row to its end, a window of rows at a time, into memory of a
// fixed length. So many batches can be read side by side in little memory, as a merge of sorted
// partitions does. Each window has as many rows as fit.
//
//	memory  │ whole buffers │ blocks │ window       │
//
// Columns that cannot be cut by rows (see chosen) are read whole with the first window and stay in
// the memory. So do dictionaries in the body, which are short. Those are read to the Go heap:
// arrays that consumers copy out of a window share their dictionary, and must not lose it with the
// window. Of each other buffer the window has the bytes of its rows, without gaps.
//
// An image is read by the blocks of its checksums, and most windows begin in the block in which the
// one before has ended. The memory keeps that block of each buffer as it is in the image, so each
// block is read about once. If these blocks would take more than three quarters of the memory that
// the whole buffers leave, they are not kept, and a window reads its first blocks again.
//
// The caller provides the memory and a read function, as for a ColumnsPlan, which uses FromHeld,
// Cut and Hold of each Piece. A Rows is not safe for concurrent use.
type Rows struct {
	// Memory is size bytes of host memory. The caller sets it before the first window, and keeps it
	// until the last record is released.
	Memory []byte
	// Shared is the image's dictionaries, for the read function and the Finder; Rows does not use
	// it.
	Shared []batch.Shared

	*chosen
	space    tier.ID // of the memory
	size     int64   // of the memory
	window   int64   // offset in Memory of the windows: whole buffers and blocks are before it
	dicts    []byte  // the dictionaries in the body; the spans of a record count from here on
	hasWhole bool    // the whole buffers and dicts have been read
}

// held is memory for one block of a buffer: the one in which the bytes of the last window have
// ended. It is empty at first and after an error, and Piece.Hold fills it.
type held struct {
	// room is whether there is memory for a block, and at where, as an offset in Rows.Memory.
	room bool
	at   int64
	// bytes is the block, which is at from in the image; empty if no window has been read since an
	// error.
	bytes []byte
	from  int64
}

// Piece is bytes of one buffer of an image that a read function must provide. The function calls
// FromHeld first, which may provide a part without reading. It then reads the blocks that have the
// rest, with Cut where one request to the disk ends and another begins, and gives the last block to
// Hold.
type Piece struct {
	Off int64 // in the image
	To  []byte
	of  *columnBuffer // nil for an offset that is only looked up
}

// FromHeld copies the beginning of the piece from the kept block, as far as that has it, and
// shortens the piece. It reports whether nothing is left to read.
func (p *Piece) FromHeld() bool {
	if p.of != nil {
		if h := &p.of.held; p.Off >= h.from && p.Off < h.from+int64(len(h.bytes)) {
			n := copy(p.To, h.bytes[p.Off-h.from:])
			p.Off, p.To = p.Off+int64(n), p.To[n:]
		}
	}
	return len(p.To) == 0
}

// Cut returns the part of the piece that is before offset off of the image, and shortens p to the
// rest. more reports whether there is a rest. The part with more does not end in its buffer's last
// block, so Hold does nothing for it.
func (p *Piece) Cut(off int64) (part Piece, more bool) {
	part = *p
	if n := off - p.Off; n < int64(len(p.To)) {
		part.To, part.of, more = p.To[:n], nil, true
		p.Off, p.To = off, p.To[n:]
	}
	return part, more
}

// Hold keeps a copy of the block at off of the image, in which the piece has ended, for the next
// window. It does nothing if the buffer has no memory for a block.
func (p *Piece) Hold(off int64, block []byte) {
	if p.of != nil && p.of.held.room {
		p.of.held.from, p.of.held.bytes = off, append(p.of.held.bytes[:0], block...)
	}
}

// NewRows plans the reading of an image from row from on, in size bytes of memory in a space. The
// memory must have room for the whole batch, or at least for the whole buffers and a page for each
// other one; otherwise the error is a *reservation.ExceededError with the bytes that are needed.
// NewRows reads nothing.
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
	// Place the whole buffers from the beginning of the memory on, and count what the others have.
	// window grows to where the windows begin.
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
	// At the worst each cut buffer takes a page in a window, if the batch as a whole does not fit.
	if need := r.window + min(cut, blocks*tier.Page); need > size {
		return nil, r.tooSmall(need)
	}
	// A batch that fits as a whole is one window, for which no block needs to be kept.
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

// Row returns the number of the first row of the next window. It is Image.Rows when all have been
// read.
func (r *Rows) Row() int64 { return r.next }

// Next fills the next window, by two calls of read, and opens it as a record. The record's memory
// is reused by the next call, so the caller must be done with it; l ends when its last buffer is
// released.
//
// On an error the lease ends and Row stays the same, so the call can be repeated. If the memory is
// too small for a single row, the error is a *reservation.ExceededError. Next must not be called
// when all rows have been read.
func (r *Rows) Next(read func([]Piece) error, l *Lease, find Finder) (_ arrow.RecordBatch, err error) {
	defer func() {
		if err != nil {
			l.End()
			for i := range r.buffers {
				// A read that failed may have changed the kept blocks.
				r.buffers[i].held.bytes = nil
			}
		}
	}()
	// The number of rows that fit is known only when their offsets have been read, and those take
	// memory too. So guess the number first, read the offsets of as many, and then take as many as
	// really fit.
	n := r.estimate()
	var pieces []Piece
	for i := range r.buffers {
		switch b := &r.buffers[i]; {
		case b.span.Length <= 0:
		// These are read once, with the first window.
		case b.whole && r.hasWhole:
		case b.inDict:
			pieces = append(pieces, Piece{b.span.Offset, r.dicts[b.at:][:b.span.Length], b})
		case b.whole:
			pieces = append(pieces, Piece{b.span.Offset, r.Memory[b.at:][:b.span.Length], b})
		case b.held.room && b.held.bytes == nil:
			b.held.bytes = r.Memory[b.held.at : b.held.at : b.held.at+r.Image.SumBlock()]
		}
	}
	// The offsets come first, because they are the bounds of strings. In the first window the whole
	// buffers are read with them, in one call.
	offsets, end, err := r.place(r.window, n, true)
	if err != nil {
		return nil, err
	}
	if err := read(append(pieces, offsets...)); err != nil {
		return nil, err
	}
	// With sound offsets, place fails exactly if the rows do not fit, so a binary search finds the
	// number. It is at least 1: if one row does not fit, the call of place below reports why.
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
	// In the record's body the dictionaries on the heap come first, and then the memory.
	l.Unleased = int64(len(r.dicts))
	rec, err := OpenRows(d, skip, [][]byte{r.dicts, r.Memory[:end]}, l, find)
	if err != nil {
		return nil, err
	}
	// Only now is the window read: after an error the same rows are read again.
	r.next += n
	r.hasWhole = true
	return rec, nil
}

// estimate returns how many rows are likely to fit into a window, at least 1. It takes strings to
// be as long as they are on average from here to the end.
func (r *Rows) estimate() int64 {
	left := r.Image.Rows - r.next
	room, perRow := float64(r.size-r.window), 0.0
	for i := range r.buffers {
		b := &r.buffers[i]
		if b.whole || b.span.Length <= 0 {
			continue
		}
		// Each buffer may need padding, and one offset more than it has rows.
		room -= AlignSmall + 8
		if b.Role == shape.Data {
			perRow += float64(max(0, b.span.Length-b.last)) / float64(left)
		} else {
			// 1024 rows are whole bytes of a bitmap.
			_, bytes := b.Bytes(0, 1024*b.scale)
			perRow += float64(bytes) / 1024
		}
	}
	// The rest of the batch fits.
	if perRow*float64(left) <= room {
		return left
	}
	return int64(max(1, room/perRow))
}

// place gives either the offsets or all other cut buffers of the next n rows their places in the
// window, from at to end, and returns the pieces to read. It fails with a
// *reservation.ExceededError if they do not fit. The strings' bounds come from the offsets, which
// must have been read for at least n rows. A later call for fewer rows replaces the places.
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
	// The memory is handed out only when it is certain that all buffers fit.
	for i := range pieces {
		b := pieces[i].of
		b.to = r.Memory[b.at:][:b.size:b.size]
		pieces[i].To = b.to
	}
	return pieces, at, nil
}
