package image

import (
	"slices"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/bitutil"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
	"github.com/spillway-db/spillway/internal/sumcopy"
)

// chosen is some columns of an image, and where their bytes are in memory. Columns read whole,
// windows of Rows, and parts of an image in memory all use it: choose finds the buffers in the
// image, the user sets where they are in memory, and describe makes a descriptor of them there.
//
// Of some columns a range of rows can be cut out by bytes: those whose every array has a fixed
// number of values for each row of the column, its scale. That is 1, or the product of the sizes of
// the fixed-size lists around it. Dictionaries are an exception, because they do not depend on the
// rows. All other columns, such as lists, views and runs, are read whole and then sliced.
type chosen struct {
	Image *batch.Descriptor // what is read

	desc    batch.Descriptor // of the chosen columns; its spans are those in Image
	cut     []bool           // of each column: rows are cut out
	nodes   []node           // those of desc
	buffers []columnBuffer   // those of desc
	next    int64            // the first row that is read next
}

// node is one array, or what a second node stands for (data buffers of views, a dictionary
// outside).
type node struct {
	payload.Node
	scale    int64 // values for each row of the column; dependent if that is not a number
	onlyNull bool  // the type has nothing but nulls
}

// columnBuffer is one buffer of an image, and the part of it that is in memory.
type columnBuffer struct {
	shape.Buffer
	span    payload.Span  // in the image
	node    int           // the array that has it
	scale   int64         // that of the array; dependent if the buffer cannot be cut
	inDict  bool          // it is of a dictionary in the body
	whole   bool          // it is not cut by rows
	offsets *columnBuffer // for a shape.Data that is cut: the buffer before it in chosen.buffers

	// first and last are the offsets, within such Data, of the strings of the rows that are read.
	// Rows.place and Columns.Plan set them.
	first, last int64
	// at and size are where the bytes of the rows, or the whole buffer, are: at first in the image,
	// then in memory. to is these bytes, once they have been read, unless the buffer is whole.
	at, size int64
	to       []byte
	held     held
}

// dependent is the scale of an array whose length is not a multiple of the column's rows: it
// depends on values.
const dependent = -1

// choose finds the columns of c in an image, in the order of c. If cut is false, or a column cannot
// be cut by rows, it is read whole. choose walks the whole descriptor, because nodes and spans have
// no index, and reads no bytes of the image.
func choose(d *batch.Descriptor, c *Columns, cut bool) (*chosen, error) {
	place := make([]int, d.Schema.NumFields()) // in c, from 1 on
	for i, f := range c.Fields {
		place[f] = i + 1
	}
	columns := make([]column, len(c.Fields))
	cursor := NewCursor(d)
	// The parts of all columns that are not wanted go here, one after the other, and are thrown
	// away.
	var passed column
	// The descriptor has the columns in the schema's order, whatever order is wanted.
	for i, at := range place {
		passed.nodes, passed.buffers = passed.nodes[:0], passed.buffers[:0]
		to := &passed
		if at > 0 {
			to = &columns[at-1]
		}
		to.byRows = cut
		f := d.Schema.Field(i)
		if err := to.array(&cursor, f.Name, f.Type, 1, d.Rows); err != nil {
			return nil, err
		}
	}
	all := &chosen{Image: d, next: c.From, desc: batch.Descriptor{Schema: c.Schema, Metadata: d.Metadata}}
	// The capacity must suffice from the start: Data buffers have pointers to other elements.
	all.buffers = make([]columnBuffer, 0, len(d.Buffers))
	// numbers are indices in desc.Dictionaries, which has only those that chosen columns use.
	numbers := make(map[*batch.Descriptor]int)
	for _, col := range columns {
		all.cut = append(all.cut, col.byRows)
		for i, b := range col.buffers {
			s := b.span
			if s.Length > 0 &&
				(s.Offset < 0 || s.Offset%AlignSmall != 0 || s.Offset > d.Body || s.Length > d.Body-s.Offset) {
				const text = "a buffer of %d bytes at %d in a body of %d"
				return nil, Path{}.Invalid(text, s.Length, s.Offset, d.Body)
			}
			// Numbers of nodes are counted from the column's first one until here.
			b.node += len(all.nodes)
			b.whole = !col.byRows || b.scale < 0
			// Data follows its offsets. Without offsets there is nothing to cut by, and nothing to
			// read.
			if !b.whole && b.Role == shape.Data {
				b.offsets = &all.buffers[len(all.buffers)-1]
				b.whole = col.buffers[i-1].span.Length <= 0
			}
			b.at, b.size = s.Offset, s.Length
			all.buffers = append(all.buffers, b)
			all.desc.Buffers = append(all.desc.Buffers, s)
		}
		for _, n := range col.nodes {
			// The chosen columns have a list of dictionaries of their own, so the numbers differ.
			if n.Nulls == payload.Outside {
				dict := d.Dictionaries[n.Length]
				at, ok := numbers[dict]
				if !ok {
					at = len(all.desc.Dictionaries)
					numbers[dict] = at
					all.desc.Dictionaries = append(all.desc.Dictionaries, dict)
				}
				n.Length = int64(at)
			}
			if !col.byRows {
				n.scale = dependent
			}
			all.nodes = append(all.nodes, n)
			all.desc.Nodes = append(all.desc.Nodes, n.Node)
		}
	}
	return all, nil
}

// column is the arrays and buffers of one column, depth first, as array collects them.
type column struct {
	nodes   []node
	buffers []columnBuffer
	byRows  bool // rows can be cut out
}

// array takes the parts of the next array, of type dt, and of everything below it. The array should
// have scale values for each of the column's rows; if it does not, or if scale is dependent, rows
// cannot be cut out of it. It reads no bytes of the image.
func (c *column) array(cursor *Cursor, name string, dt arrow.DataType, scale, rows int64) error {
	cursor.Path = append(cursor.Path, name)
	a, err := cursor.Next(dt)
	if err != nil {
		return err
	}
	at := len(c.nodes)
	c.nodes = append(c.nodes, node{a.Node, scale, a.Null})
	// A descriptor that contradicts itself is not an error here: the column is read whole, and
	// opening it reports what is wrong.
	if scale > 0 && rows > MaxRows/scale || scale >= 0 && a.Length != scale*rows {
		c.byRows, scale = false, dependent
	}
	// A run may begin before the rows and end after them.
	if a.Rows == shape.Runs && scale >= 0 {
		c.byRows = false
	}
	for i, s := range a.Spans {
		b := columnBuffer{span: s, node: at, scale: dependent} // as the data buffers of views are
		if i < len(a.Buffers) {
			b.Buffer = a.Buffers[i]
			switch role := b.Role; {
			case role <= shape.Data && (role != shape.Offsets || a.Rows != shape.Between):
				// Validity, Bits, Values, Offsets and Data: the bytes of some rows are known, except
				// for the offsets of lists, whose child would have to be cut by values.
				b.scale = scale
			case scale >= 0: // offsets of lists, views and the like
				c.byRows = false
			}
		}
		c.buffers = append(c.buffers, b)
	}
	if a.Views {
		data := payload.Node{Length: int64(len(a.Spans) - len(a.Buffers))}
		c.nodes = append(c.nodes, node{Node: data, scale: dependent})
	}
	// The scale of the children.
	switch {
	case a.Rows == shape.Same:
	case a.Rows != shape.Times:
		scale, rows = dependent, 0 // they do not depend on the rows
	case scale >= 0 && (a.Size < 0 || a.Size > 0 && scale > MaxRows/a.Size):
		c.byRows, scale = false, dependent
	case scale >= 0:
		scale *= a.Size
	}
	for i := range a.NumChildren {
		name, dt := a.Child(i)
		if err := c.array(cursor, name, dt, scale, rows); err != nil {
			return err
		}
	}
	if a.Values != nil {
		switch i, outside, err := cursor.Outside(); {
		case err != nil:
			return err
		case outside:
			n := payload.Node{Length: int64(i), Nulls: payload.Outside}
			c.nodes = append(c.nodes, node{Node: n, scale: dependent})
		default:
			first := len(c.buffers)
			if err := c.array(cursor, "dictionary", a.Values, dependent, 0); err != nil {
				return err
			}
			for i := range c.buffers[first:] {
				c.buffers[first+i].inDict = true
			}
		}
	}
	cursor.Path = cursor.Path[:len(cursor.Path)-1]
	return nil
}

// part returns which bytes of a buffer in the image the n rows from c.next on have. For Data it
// takes them from b.first and b.last. A part that is not inside the buffer is an *InvalidError.
func (c *chosen) part(b *columnBuffer, n int64) (off, size int64, err error) {
	off, size = b.Bytes(c.next*b.scale, n*b.scale)
	if b.offsets != nil {
		off, size = b.first, b.last-b.first
	}
	if off < 0 || size < 0 || off > b.span.Length || size > b.span.Length-off {
		return 0, 0, Path{}.Invalid("a buffer of %d bytes where %d at %d are needed", b.span.Length, size, off)
	}
	return off, size, nil
}

// describe returns the descriptor of the n rows from c.next on, whose bytes are in memory. It
// changes those bytes, in buffers that were cut, into buffers of arrays that begin at offset 0: it
// shifts bitmaps, lowers offsets, and counts nulls. So it may be called once for what was read.
// before is how many bytes the body has before the memory, for dictionaries. skip is how many rows
// each column has before the n rows, for OpenRows.
func (c *chosen) describe(n, before int64) (_ *batch.Descriptor, skip []int64) {
	d := c.desc
	d.Rows, d.Nodes, d.Buffers = n, slices.Clone(d.Nodes), slices.Clone(d.Buffers)
	for _, cut := range c.cut {
		if cut {
			skip = append(skip, 0)
		} else {
			skip = append(skip, c.next)
		}
	}
	// Nodes of cut arrays get the rows' number of values. Their nulls are counted below, with the
	// validity.
	for i, own := range c.nodes {
		if own.scale < 0 {
			continue
		}
		if d.Nodes[i] = (payload.Node{Length: n * own.scale}); own.onlyNull {
			d.Nodes[i].Nulls = n * own.scale
		}
	}
	for i := range c.buffers {
		b := &c.buffers[i]
		switch {
		case b.span.Length <= 0:
			continue
		case b.size == 0:
			// The rows have nothing of this buffer, such as text of empty strings.
			d.Buffers[i] = payload.Span{}
			continue
		}
		d.Buffers[i] = payload.Span{Offset: before + b.at, Length: b.size}
		if b.inDict {
			d.Buffers[i].Offset = b.at
		}
		if b.whole {
			continue
		}
		switch b.Role {
		case shape.Validity, shape.Bits:
			// The first row's bit is in the middle of the first byte that was read.
			if shift := c.next * b.scale % 8; shift > 0 {
				for i := range b.to {
					b.to[i] >>= shift
					if i+1 < len(b.to) {
						b.to[i] |= b.to[i+1] << (8 - shift)
					}
				}
			}
			if b.Role == shape.Validity {
				values := n * b.scale
				d.Nodes[b.node].Nulls = values - int64(bitutil.CountSetBits(b.to, 0, int(values)))
			}
		case shape.Offsets:
			// Text that was read whole keeps its offsets.
			if !c.buffers[i+1].whole {
				base := OffsetAt(b.to, b.Width, 0)
				sumcopy.Lower{Width: b.Width, Base: uint64(base)}.Copy(b.to, b.to)
			}
		}
	}
	return &d, skip
}
