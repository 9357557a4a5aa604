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

// ColumnsPlan is the parts of an image that are read at once, and their places in memory. These are whole
// blocks of its checksums.
//
//	image   │block│block│block│block│block│block│block│block│
//	           a a a a a             b b b           c
//	memory  │block│block│      │block│block│      │block│      in one piece
//	           a a a a a             b b b           c
type ColumnsPlan struct {
	Memory *batch.Descriptor // the length of the memory, the places of buffers, and the dictionaries

	chosen *chosen
	runs   []run // what is read
}

// run is blocks that follow each other in the image and in memory.
type run struct {
	off int64 // in the image
	n   int64 // bytes
	at  int64 // in memory
}

// FewText is up to how many bytes of text are read whole: as many as it takes to look up which of
// them are needed.
const FewText = 2 * payload.SumChunk

// Plan plans the reading of the columns and rows from an image. It calls read for the offsets that
// bound the strings of the rows.
func (c *Columns) Plan(of *batch.Descriptor, read func([]Piece) error) (*ColumnsPlan, error) {
	rows := c.To - c.From
	parts, err := choose(of, c, rows != of.Rows)
	if err != nil {
		return nil, err
	}
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
		b.last = b.span.Length
		for to, row := range map[*int64]int64{&b.first: c.From, &b.last: c.To} {
			o := b.offsets
			at := row * o.scale * o.Width
			if at > o.span.Length-o.Width {
				return nil, Path{}.Invalid("offsets of %d bytes end before row %d", o.span.Length, row)
			}
			if row > 0 && row < of.Rows {
				bounds = append(bounds, to)
				pieces = append(pieces, Piece{Off: o.span.Offset + at, To: make([]byte, o.Width)})
			}
		}
	}
	if err := read(slices.Clone(pieces)); err != nil {
		return nil, err
	}
	for i, to := range bounds {
		*to = OffsetAt(pieces[i].To, int64(len(pieces[i].To)), 0)
	}

	// All blocks that have something of the buffers are read, each once.
	var runs []run
	block := of.SumBlock()
	for i := range parts.buffers {
		b := &parts.buffers[i]
		if b.span.Length <= 0 {
			continue
		}
		if !b.whole {
			off, size, err := parts.part(b, rows)
			if err != nil {
				return nil, err
			}
			b.at, b.size = b.at+off, size
		}
		if b.size > 0 {
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
	for i := range p.runs {
		p.runs[i].at = p.Memory.Body
		p.Memory.Body += p.runs[i].n
	}
	for i := range parts.buffers {
		if b := &parts.buffers[i]; b.size > 0 {
			r := p.runs[sort.Search(len(p.runs), func(i int) bool { return p.runs[i].off > b.at })-1]
			b.at += r.at - r.off
			p.Memory.Buffers = append(p.Memory.Buffers, payload.Span{Offset: b.at, Length: b.size})
		}
	}
	return p, nil
}

// Open reads the blocks into the memory, by a call of read, and opens the rows there. On an error it
// ends the lease.
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
		// The bytes before, which are those of other rows, make room for a buffer that is aligned.
		before := b.at % AlignSmall
		all := Stretch(extents, b.at-before, before+b.size)
		if all == nil {
			return nil, Path{}.Invalid("a buffer of %d bytes at %d lies in several extents", b.size, b.at)
		}
		b.at, b.to = b.at-before, all[:b.size]
		copy(b.to, all[before:])
	}
	d, skip := c.describe(p.Memory.Rows, 0)
	d.Body = p.Memory.Body
	return OpenRows(d, skip, extents, l, find)
}

// NoRows makes a record without rows, for which no memory is needed.
func (c *Columns) NoRows(of *batch.Descriptor) (arrow.RecordBatch, error) {
	d, err := Empty(c.Schema, of.Metadata)
	if err != nil {
		return nil, err
	}
	return OpenRows(d, nil, nil, NewLease(nil), nil)
}

// Within describes the columns where they are, in an image that has all of its bytes. skip is how
// many rows each has before those that were chosen.
func (c *Columns) Within(of *batch.Descriptor) (d *batch.Descriptor, skip []int64, err error) {
	parts, err := choose(of, c, false)
	if err != nil {
		return nil, nil, err
	}
	d, skip = parts.describe(c.To-c.From, 0)
	d.Body = of.Body
	return d, skip, nil
}
