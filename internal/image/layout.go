package image

import (
	"errors"
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/sumcopy"
	"github.com/spillway-db/spillway/tier"
)

// Alignment of the Arrow buffers of an image, in bytes.
//
// A body may be divided between several pieces of memory, at pages that no buffer crosses (see
// payload.Descriptor.Cuts). Each large buffer begins at a page, so there is such a place before it.
// Small buffers share pages, and only after each smallTogether bytes of them one begins at a page.
// So the longest part that must be in one piece exceeds the largest buffer by about smallTogether.
// The padding for that is less than 2 %.
//
// 64 bytes is the alignment that the Arrow columnar format recommends.
const (
	AlignSmall    = 64
	alignLarge    = tier.Page
	large         = 64 << 10 // buffers from here on are large
	smallTogether = 256 << 10
)

// A Layout is the plan of one record batch's image, and the writer of its
// bytes. The image has one layout in all tiers:
//
// The body consists of the record's Arrow buffers in schema order, depth first, each at a multiple
// of 64 bytes, those of 64 KiB and more at a multiple of 4096, and so is the next one after 256 KiB
// of smaller ones. Its length is a multiple of 4096. All bytes between buffers are zero, as are the
// bits behind the end of a bitmap. So equal records laid out alike have equal images, and no old
// memory gets into a file.
//
// Every array begins at offset 0 and has what its parent shows of it: slices are
// compacted at every level, and the ends of runs and the offsets of lists, list
// views, strings and dense unions are moved accordingly. Values that nothing shows
// are kept where taking them out would be work for each of them: between the first
// and the last value that list views or a dense union show, and, of the bytes
// behind string and binary views, up to an eighth.
//
// Dictionaries stay whole, except for extensions (see extend.go). They are images of their own, so
// that batches can share them: see Dictionaries. The array that uses one has, after the indices, a
// node with payload.Outside and its number. Only a dictionary of up to 4 KiB is in the body, after
// the indices. Its own image would take at least a page, and a request of its own for each move:
// copying it with the rows is cheaper than keeping it once. Several columns may share a dictionary
// within a body, too, as the same arrow.ArrayData. It is there once, and its spans are the same in
// all of them.
//
// Nulls are counted; the array's own number is not used. A validity bitmap is kept if there
// is a null, and otherwise dropped. Another buffer that the source does not have
// stays absent, a buffer without bytes stays without.
//
// In the descriptor each array has a node, a span for its validity, and the spans of its format in
// the format's order. Null, run-end encoded and union types have no validity span. The node of a
// binary or string view is followed by one more, whose Length is the number of data buffers, and
// the view's spans by as many. Run-end encoded arrays have the run ends and the values as children.
// Extensions are laid out as their storage. The descriptor has a record's own metadata, besides that
// of its schema.
//
// NewLayout checks what is needed to find the buffers, and that no array has more than MaxRows rows;
// it returns an *InvalidError otherwise. Values are not looked at: wrong offsets between the first and the
// last of a list come out as wrong as they went in.
//
// A Layout reads the record's memory until Close. It is not safe for concurrent
// use.
type Layout struct {
	// Desc describes the body, whose length is Desc.Body. Its Sums are set as the bytes are written, and
	// its Dictionaries by Descriptor.
	Desc batch.Descriptor
	// Dictionaries are the layouts of the dictionaries that are images of their own, each once and after
	// those that it uses itself: what batch.Descriptor's AllDictionaries returns for the descriptor. Each
	// is laid out by itself, into memory of its own; they are closed with the Layout.
	Dictionaries []*Layout

	// Uses are those of the record's Dictionaries that the nodes outside refer to, by their numbers there.
	Uses []*Layout
	// Of a dictionary's layout: the array that it is made of and its type there, and its place among the
	// record's Dictionaries.
	Source    *array.Data
	ValueType arrow.DataType
	Number    int

	// rec is retained while the layout is open; nil after Close. pieces are slices of its buffers.
	rec    arrow.RecordBatch
	pieces []piece // the buffers, ascending by offset
	bytes  int64   // in buffers
	pos    int64   // the next call of Write continues here; Desc.Body when all is laid out
	next   int     // of pieces: all before it end before pos, so Write need not look at them again

	// made is what Descriptor returns, once it is known. It must be the same pointer each time,
	// because the pointer is the identity of a dictionary.
	made  *batch.Descriptor
	whole *Layout // of an extension: the layout of the whole dictionary, which has the same made

	sum     sumcopy.Sum // of the block at pos, which an earlier Write may have begun
	scratch []byte
}

// piece is a buffer of the image: n bytes at off of the body. There are three kinds.
//
// raw alone: the bytes are copied as the record has them. raw may be longer than n.
//
// from alone: the bytes are made by from.
//
// Both: each value of raw is lowered by a number while it is copied, which the copying loop of
// package sumcopy does itself. from is an *adjusted that does the same, for short parts.
type piece struct {
	off, n int64
	raw    []byte
	from   source
}

// NewLayout plans the image of rec, with dictionaries of up to inline bytes in the body, and retains
// rec until Close. A schema that is not little-endian is tier.ErrNotSupported, an array whose parts
// do not fit together an *InvalidError.
func NewLayout(rec arrow.RecordBatch, inline int64) (_ *Layout, err error) {
	if rec == nil {
		return nil, errors.New("convert: planning a layout: the record is nil")
	}
	defer guard.Error(&err, "convert: planning a layout")
	schema := rec.Schema()
	if schema == nil {
		return nil, errors.New("convert: planning a layout: the record has no schema")
	}
	if err := CheckEndian(schema); err != nil {
		return nil, err
	}
	// The capacities are for flat columns: an array with two or three buffers for each field.
	rows, fields := rec.NumRows(), schema.NumFields()
	p := planner{
		inline: inline, nodes: make([]payload.Node, 0, 2*fields), spans: make([]payload.Span, 0, 3*fields),
		pieces: make([]piece, 0, 3*fields),
	}
	cols := int(rec.NumCols())
	empty := rows == 0 && cols == 0 // arrow-go lets such a record have any schema
	if rows < 0 || cols != fields && !empty {
		return nil, p.path.Invalid("%d rows, %d columns for %d fields", rows, cols, fields)
	}
	for i := range fields {
		f := schema.Field(i)
		var in input
		if !empty {
			in.host = rec.Column(i).Data()
		}
		if err := p.array(f.Name, f.Type, in, 0, rows); err != nil {
			return nil, err
		}
	}
	l := p.layout(schema, rows)
	if meta := equal.Metadata(rec); meta.Len() > 0 {
		l.Desc.Metadata = &meta
	}
	l.rec = rec
	rec.Retain()
	if p.outside != nil {
		l.Dictionaries = p.outside.order
	}
	// Each dictionary's layout has its own reference, because it may be written later than the
	// record's, and closed separately.
	for _, d := range l.Dictionaries {
		d.rec = rec
		rec.Retain()
	}
	return l, nil
}

// layout makes the layout of what p has planned, except for its record.
func (p *planner) layout(schema *arrow.Schema, rows int64) *Layout {
	// The end is padded to a page so that a body can be written with direct I/O, and its file
	// extent ends where the next may begin.
	body := extent.RoundUp(p.at, tier.Page)
	return &Layout{
		pieces: p.pieces, bytes: p.bytes, Uses: p.uses,
		Desc: batch.Descriptor{
			Schema: schema, Rows: rows, Nodes: p.nodes, Buffers: p.spans, Body: body,
			Sums: make([]uint64, (body+payload.SumChunk-1)/payload.SumChunk),
		},
	}
}

// ByRows makes the batch one that is read some rows at a time: its blocks have payload.RowBlock
// bytes instead of payload.SumChunk. A window of rows reads whole blocks of each buffer, so shorter
// blocks read less that is not needed. It must be called before anything is laid out.
func (l *Layout) ByRows() {
	l.Desc.Block = payload.RowBlock
	l.Desc.Sums = make([]uint64, l.Desc.Body/payload.RowBlock)
}

// Is sets what Descriptor returns, for a dictionary that was laid out before by another Layout:
// then nothing has to be written, and all batches have the same descriptor.
func (l *Layout) Is(d *batch.Descriptor) {
	l.made = d
	if l.whole != nil {
		l.whole.made = d
	}
}

// Close releases the record, and closes the layouts of the dictionaries. Write fails afterwards,
// but Descriptor still works. A second call does nothing.
func (l *Layout) Close() {
	for _, d := range l.Dictionaries {
		d.Close()
	}
	if l.rec != nil {
		l.rec.Release()
	}
	l.rec, l.pieces, l.scratch, l.Source = nil, nil, nil, nil
}

// Descriptor returns the description of the body. All bytes must have been laid out, also those of
// the dictionaries, because the descriptor has their checksums; otherwise it returns an error. It
// returns the same pointer each time. The descriptor is valid after Close.
func (l *Layout) Descriptor() (*batch.Descriptor, error) {
	if l.made != nil {
		return l.made, nil
	}
	if l.pos != l.Desc.Body {
		return nil, fmt.Errorf("convert: the descriptor of a layout: %d of %d bytes are laid out", l.pos, l.Desc.Body)
	}
	d := l.Desc
	// The dictionaries' own descriptors come first: they are part of this one.
	for _, u := range l.Uses {
		dict, err := u.Descriptor()
		if err != nil {
			return nil, fmt.Errorf("convert: a dictionary: %w", err)
		}
		d.Dictionaries = append(d.Dictionaries, dict)
	}
	l.made = &d
	return l.made, nil
}

// WriteTo lays the whole body out in extents, whose lengths add up to Desc.Body. Each but the last
// must be a multiple of 4096 long, as those of a tier.HostMemory are. WriteTo starts from the
// beginning, also after calls of Write.
func (l *Layout) WriteTo(extents [][]byte) error {
	total := int64(0)
	for _, e := range extents {
		total += int64(len(e))
	}
	if total != l.Desc.Body {
		return fmt.Errorf("convert: extents of %d bytes for a body of %d", total, l.Desc.Body)
	}
	off := int64(0)
	for _, e := range extents {
		if err := l.Write(e, off); err != nil {
			return err
		}
		off += int64(len(e))
	}
	return nil
}

// scratchSize is how many bytes that cannot be copied straight from the source are made at once, to
// be copied from there. It should fit in the first-level cache, which has 32 KiB or more on current
// processors.
const scratchSize = 16 << 10

// Write lays out the bytes of the body from off on in dst, whose length must be a multiple of 4096,
// and computes the checksums of the blocks that it completes. off must be where the previous call
// ended, or 0, which begins again; a descriptor that was made before is not changed by that. Pieces
// of a multiple of 1 MiB at addresses that are multiples of 32 are fastest, because sumcopy then
// writes past the cache.
//
// Write may read the record's buffers a second time if it begins again, so the record must not
// change.
func (l *Layout) Write(dst []byte, off int64) (err error) {
	n := int64(len(dst))
	switch {
	case l.rec == nil:
		return fmt.Errorf("convert: a layout that is %w", tier.ErrClosed)
	case n%tier.Page != 0:
		return fmt.Errorf("convert: laying out %d bytes, not a multiple of %d", n, tier.Page)
	case off != 0 && off != l.pos || n > l.Desc.Body-off:
		return fmt.Errorf("convert: laying out %d bytes at %d after the first %d of %d", n, off, l.pos, l.Desc.Body)
	case n == 0:
		return nil
	case off == 0:
		// New sums, because the descriptor that was made from the old ones may be in use.
		l.pos, l.next, l.made = 0, 0, nil
		l.Desc.Sums = make([]uint64, len(l.Desc.Sums))
	}
	defer guard.Error(&err, "convert: laying out")
	body, block := l.Desc.Body, l.Desc.SumBlock()
	// A short body stays in the cache, so it is written first and hashed where it is. The loop
	// below, which does both at once, has more work for each piece.
	if n == body && n < payload.SumChunk {
		fill(dst, 0, l.pieces)
		for i := range l.Desc.Sums {
			l.Desc.Sums[i] = xxh3.Hash(dst[int64(i)*block : min(n, int64(i+1)*block)])
		}
		l.pos = body
		return nil
	}
	// Each turn of the loop writes bytes of one block only, so that the block's checksum is
	// complete when its last byte is written. It takes the longest way that is possible at pos:
	// straight from the source if a raw buffer has at least sumcopy.Block bytes here, or else
	// through the scratch memory.
	for len(dst) > 0 {
		chunk := l.pos / block
		end := min((chunk+1)*block, body)
		if l.pos%block == 0 {
			l.sum.Reset(end - l.pos)
		}
		// Skip the pieces that are complete. next only grows, so all calls together pass over each
		// piece once.
		rest := l.pieces[l.next:]
		for len(rest) > 0 && rest[0].off+rest[0].n <= l.pos {
			rest = rest[1:]
		}
		l.next = len(l.pieces) - len(rest)
		n := min(int64(len(dst)), end-l.pos)
		var sum uint64
		straight := int64(0) // bytes in whole blocks that need no scratch
		if len(rest) > 0 && rest[0].off <= l.pos && rest[0].raw != nil {
			straight = (rest[0].off + rest[0].n - l.pos) &^ (sumcopy.Block - 1)
		}
		// An *adjusted with raw bytes only lowers each value (see piece), which Copy does on the
		// way.
		if straight > 0 {
			n = min(n, straight)
			p := &rest[0]
			src := p.raw[l.pos-p.off:][:n]
			var by sumcopy.Lower
			if a, ok := p.from.(*adjusted); ok {
				by = sumcopy.Lower{Width: a.adj.Width, Base: uint64(a.adj.Base)}
			}
			sum = l.sum.Copy(dst[:n], src, by)
		} else { // up to the next long buffer that needs none
			n = min(n, scratchSize)
			// The scratch memory ends where a long raw buffer begins, or up to a sumcopy.Block
			// later, so that the next turn can copy that buffer straight.
			for _, p := range rest {
				if p.off >= l.pos+n {
					break
				}
				if p.off > l.pos && p.n >= scratchSize && p.raw != nil {
					n = extent.RoundUp(p.off-l.pos, sumcopy.Block)
				}
			}
			if l.scratch == nil {
				l.scratch = make([]byte, scratchSize)
			}
			fill(l.scratch[:n], l.pos, rest)
			sum = l.sum.Copy(dst[:n], l.scratch[:n], sumcopy.Lower{})
		}
		l.pos += n
		dst = dst[n:]
		if l.pos == end {
			l.Desc.Sums[chunk] = sum
		}
	}
	// The copying loop may write past the cache with non-temporal stores. Other processors see
	// those in order only after a fence.
	sumcopy.Fence()
	return nil
}

// fill writes the bytes of a body from pos on, a multiple of 64, to dst. pieces are in ascending
// order, and all end after pos. Gaps between pieces become zero: reused memory has old bytes, which
// must not get into an image, because equal records should have equal images and files should not leak
// data.
func fill(dst []byte, pos int64, pieces []piece) {
	for i := range pieces {
		p := &pieces[i]
		if p.off >= pos+int64(len(dst)) {
			break
		}
		if gap := p.off - pos; gap > 0 {
			clear(dst[:gap])
			dst, pos = dst[gap:], p.off
		}
		n := min(p.off+p.n-pos, int64(len(dst)))
		if p.from != nil {
			p.from.read(dst[:n], pos-p.off)
		} else {
			copy(dst[:n], p.raw[pos-p.off:])
		}
		dst, pos = dst[n:], pos+n
	}
	clear(dst)
}

// LogicalBytes returns the total length, in bytes, of the buffers that rec has in an image, without
// the alignment between them. Slices count only the rows that they show, and a dictionary that
// columns share counts once. It plans a whole layout, so it takes time in proportion to the number
// of arrays, and to that of the values where those must be looked at. It returns 0 for a record
// that cannot be laid out.
func LogicalBytes(rec arrow.RecordBatch) int64 {
	l, err := NewLayout(rec, MaxInline)
	if err != nil {
		return 0
	}
	defer l.Close()
	n := l.bytes
	for _, d := range l.Dictionaries {
		n += d.bytes
	}
	return n
}
