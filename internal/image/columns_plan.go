package image

import (
	"cmp"
	"slices"
	"sort"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/payload"
)

// ColumnsPlan is a plan to read some columns and rows of an image on disk, at once and into as
// little memory as possible: which parts are read, and where they go in memory. Whole blocks are
// read, because a block is what a checksum covers.
//
//	image   │block│block│block│block│block│block│block│block│
//	           a a a a a             b b b           c
//	memory  │block│block│      │block│block│      │block│      in one piece
//	           a a a a a             b b b           c
//
// Its use has three steps. Plan reads the few offsets that it needs, and determines how long the
// memory must be. The caller allocates Memory.Body bytes, divided at Memory.Cuts at most. Open
// reads the blocks and makes a record in that memory. The caller's read functions read from the
// disk, verify the blocks, and uncompress them.
type ColumnsPlan struct {
	// Memory describes the memory, not the record: its length, the places of the buffers, for Cuts,
	// and the dictionaries that the record needs.
	Memory *batch.Descriptor

	chosen *chosen
	runs   []run // ascending, with gaps between them
}

// run is a sequence of adjacent blocks, in the image and in memory.
type run struct {
	off int64 // in the image
	n   int64 // bytes
	at  int64 // in memory
}

// FewText is the length, in bytes, up to which strings are read whole. Looking up which of them the
// rows need means reading a block of offsets at each end, in a request of its own, before anything
// else.
const FewText = 2 * payload.SumChunk

// Plan plans the reading of the columns and rows from the image that of describes. It calls read
// once, with the offsets that bound the strings of the rows, because only these determine which
// text is needed. read must fill the pieces, and may change the slice.
func (c *Columns) Plan(of *batch.Descriptor, read func([]Piece) error) (*ColumnsPlan, error) {
	rows := c.To - c.From
	parts, err := choose(of, c, rows != of.Rows)
	if err != nil {
		return nil, err
	}
	// First find the bounds of the strings, for each Data that is cut by rows.
	var bounds []*int64
	var pieces []Piece
	for i := range parts.buffers {
		b := &parts.buffers[i]
		if b.offsets == nil {
			continue
		}
		if b.span.Length <= FewText {
			b.whole, b.offsets = true, nil
			continue
		}
		// At row 0 and at the end no offset has to be read: the text begins at 0 and ends with its
		// buffer.
		b.last = b.span.Length
		// The offset before row From is the first byte, and that of row To is the end.
		for to, row := range map[*int64]int64{&b.first: c.From, &b.last: c.To} {
			o := b.offsets
			at := row * o.scale * o.Width
			// The offsets were not read yet, so the descriptor may claim fewer than the rows need.
			if at > o.span.Length-o.Width {
				return nil, Path{}.Invalid("offsets of %d bytes end before row %d", o.span.Length, row)
			}
			if row > 0 && row < of.Rows {
				bounds = append(bounds, to)
				pieces = append(pieces, Piece{Off: o.span.Offset + at, To: make([]byte, o.Width)})
			}
		}
	}
	// read may shorten the pieces, but it fills the memory that these point to.
	if err := read(slices.Clone(pieces)); err != nil {
		return nil, err
	}
	for i, to := range bounds {
		*to = OffsetAt(pieces[i].To, int64(len(pieces[i].To)), 0)
	}

	// Then list the blocks that have something of the buffers. Buffers share blocks, and rows of
	// two columns may be in the same one: overlapping and adjacent runs become one, so each block
	// is read once.
	var runs []run
	block := of.SumBlock()
	for i := range parts.buffers {
		b := &parts.buffers[i]
		if b.span.Length <= 0 {
			continue
		}
		// From here on at is where the wanted bytes of the buffer are in the image.
		if !b.whole {
			off, size, err := parts.part(b, rows)
			if err != nil {
				return nil, err
			}
			b.at, b.size = b.at+off, size
		}
		if b.size > 0 {
			// A run begins and ends at blocks, except that the body may end within the last one.
			first := b.at / block * block
			runs = append(runs, run{off: first, n: min(extent.RoundUp(b.at+b.size, block), of.Body) - first})
		}
	}
	slices.SortFunc(runs, func(a, b run) int { return cmp.Compare(a.off, b.off) })
	p := &ColumnsPlan{chosen: parts, Memory: &batch.Descriptor{Rows: rows, Dictionaries: parts.desc.Dictionaries}}
	for _, r := range runs {
		if last := len(p.runs) - 1; last >= 0 && r.off <= p.runs[last].off+p.runs[last].n {
			p.runs[last].n = max(p.runs[last].n, r.off+r.n-p.runs[last].off)
			continue
		}
		p.runs = append(p.runs, r)
	}
	// Then give the runs their places in memory, one after the other. Blocks are whole pages, so a
	// page in memory is a page in the image, and buffers keep their alignment.
	for i := range p.runs {
		p.runs[i].at = p.Memory.Body
		p.Memory.Body += p.runs[i].n
	}
	for i := range parts.buffers {
		// And from here on it is where they are in memory. The spans in Memory are where the memory
		// must not be divided.
		if b := &parts.buffers[i]; b.size > 0 {
			r := p.runs[sort.Search(len(p.runs), func(i int) bool { return p.runs[i].off > b.at })-1]
			b.at += r.at - r.off
			p.Memory.Buffers = append(p.Memory.Buffers, payload.Span{Offset: b.at, Length: b.size})
		}
	}
	return p, nil
}

// Open reads the blocks into extents, the memory, by one call of read, and opens the rows there.
// The lease ends with the record's last buffer, or on an error. Open may be called once, because it
// moves the bytes of the rows within the memory.
func (p *ColumnsPlan) Open(
	read func([]Piece) error, extents [][]byte, l *Lease, find Finder,
) (_ arrow.RecordBatch, err error) {
	defer func() {
		if err != nil {
			l.End()
		}
	}()
	defer guard.Error(&err, "convert: opening columns")
	var blocks []Piece
	for _, r := range p.runs {
		off := r.off
		// A run may cross from one piece of the memory to the next; each part is a piece to read.
		err := Across(extents, r.at, r.n, func(to []byte) error {
			blocks = append(blocks, Piece{Off: off, To: to})
			off += int64(len(to))
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	if err := read(blocks); err != nil {
		return nil, err
	}
	c := p.chosen
	for i := range c.buffers {
		b := &c.buffers[i]
		if b.whole || b.size <= 0 {
			continue
		}
		// The rows of a buffer may begin anywhere in it, but Arrow buffers should be aligned to 64
		// bytes. Move them down to the multiple before. The bytes that this overwrites are the same
		// buffer's, of earlier rows, because buffers begin at multiples of 64.
		before := b.at % AlignSmall
		all := Stretch(extents, b.at-before, before+b.size)
		if all == nil {
			return nil, Path{}.Invalid("a buffer of %d bytes at %d lies in several extents", b.size, b.at)
		}
		// copy handles the overlap.
		b.at, b.to = b.at-before, all[:b.size]
		copy(b.to, all[before:])
	}
	// describe changes offsets and bitmaps of buffers that were cut, and counts nulls.
	d, skip := c.describe(p.Memory.Rows, 0)
	d.Body = p.Memory.Body
	return OpenRows(d, skip, extents, l, find)
}

// NoRows makes a record of the chosen columns without rows. It reads nothing and needs no memory.
func (c *Columns) NoRows(of *batch.Descriptor) (arrow.RecordBatch, error) {
	d, err := Empty(c.Schema, of.Metadata)
	if err != nil {
		return nil, err
	}
	return OpenRows(d, nil, nil, NewLease(nil), nil)
}

// Within describes the chosen columns in an image that is in memory as a whole. Nothing is cut:
// skip is how many rows each column has before those that were chosen, for OpenRows.
func (c *Columns) Within(of *batch.Descriptor) (d *batch.Descriptor, skip []int64, err error) {
	parts, err := choose(of, c, false)
	if err != nil {
		return nil, nil, err
	}
	d, skip = parts.describe(c.To-c.From, 0)
	d.Body = of.Body
	return d, skip, nil
}
