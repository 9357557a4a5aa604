package columns

import (
	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
)

// column is one column of an image: its arrays and buffers, depth first, and its rows that are read.
//
// Of some columns a run of rows can be cut out by bytes: those whose every array has
// scale values for each row of the column (1, or the size of the fixed-size lists around
// it), except for dictionaries, which do not depend on the rows.
type column struct {
	nodes      []node
	parts      []part
	byRows     bool  // rows can be cut out
	granule    int64 // at its multiples of rows all buffers begin at multiples of image.AlignSmall
	begin, end int64 // the rows that are read
	cut        bool  // not all rows are read
}

// node is one array.
type node struct {
	payload.Node
	scale    int64 // values for each row of the column; dependent if that is not a number
	onlyNull bool  // the type has nothing but nulls
}

// part is one buffer.
type part struct {
	shape.Buffer
	span        payload.Span // in the image
	node        int          // of the column: the array that has it
	inDict      bool         // that is in a dictionary
	scale       int64        // that of the array; dependent if the buffer cannot be cut
	first, last int64        // of a shape.Data: the bytes that the rows have
}

// base is from where on text is read: a multiple of image.AlignSmall.
func (p *part) base() int64 { return p.first / image.AlignSmall * image.AlignSmall }

// dependent is the scale of an array whose length is not a multiple of the rows.
const dependent = -1

// columnsOf finds the columns of c in an image, in the order of c.
func columnsOf(d *batch.Descriptor, c *Columns) ([]column, error) {
	place := make([]int, d.Schema.NumFields()) // in c, from 1 on
	for i, f := range c.Fields {
		place[f] = i + 1
	}
	columns := make([]column, len(c.Fields))
	cursor := image.NewCursor(d)
	var passed column // one for all that are not wanted
	for i, at := range place {
		passed.nodes, passed.parts = passed.nodes[:0], passed.parts[:0]
		to := &passed
		if at > 0 {
			to = &columns[at-1]
		}
		to.byRows, to.granule = true, 1
		f := d.Schema.Field(i)
		if err := to.array(&cursor, f.Name, f.Type, 1, d.Rows); err != nil {
			return nil, err
		}
	}
	return columns, nil
}

// array takes what an array of type dt has, which has scale values for each of the column's rows. It
// reads no bytes.
func (c *column) array(cursor *image.Cursor, name string, dt arrow.DataType, scale, rows int64) error {
	cursor.Path = append(cursor.Path, name)
	a, err := cursor.Next(dt)
	if err != nil {
		return err
	}
	at := len(c.nodes)
	c.nodes = append(c.nodes, node{a.Node, scale, a.Null})
	if scale > 0 && rows > image.MaxRows/scale || scale >= 0 && a.Length != scale*rows {
		c.byRows, scale = false, dependent
	}
	if a.Rows == shape.Runs && scale >= 0 {
		c.byRows = false
	}
	for i, s := range a.Spans {
		p := part{span: s, node: at, scale: dependent} // as the data buffers of views are
		if i < len(a.Buffers) {
			p.Buffer = a.Buffers[i]
			granule := int64(0) // rows at whose multiples it can be cut; 0 for none
			switch p.Role {
			case shape.Validity, shape.Bits:
				granule = 8 * image.AlignSmall
			case shape.Values:
				if p.Width < 0 {
					return cursor.Path.Invalid("values of %d bytes", p.Width)
				}
				for granule = image.AlignSmall; granule > 1 && (granule/2*p.Width)%image.AlignSmall == 0; granule /= 2 {
				}
			case shape.Offsets:
				if a.Rows != shape.Between {
					granule = image.AlignSmall / p.Width
				}
			case shape.Data:
				granule = 1
			}
			if granule == 0 {
				c.byRows = c.byRows && scale < 0
			} else if p.scale = scale; scale >= 0 && s.Length > 0 {
				c.granule = max(c.granule, granule) // powers of two
			}
		}
		c.parts = append(c.parts, p)
	}
	if a.Views {
		data := payload.Node{Length: int64(len(a.Spans) - len(a.Buffers))}
		c.nodes = append(c.nodes, node{Node: data, scale: dependent})
	}
	switch {
	case a.Rows == shape.Same:
	case a.Rows != shape.Times:
		scale, rows = dependent, 0 // they do not depend on the rows
	case scale >= 0 && (a.Size < 0 || a.Size > 0 && scale > image.MaxRows/a.Size):
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
			first := len(c.parts)
			if err := c.array(cursor, "dictionary", a.Values, dependent, 0); err != nil {
				return err
			}
			for i := range c.parts[first:] {
				c.parts[first+i].inDict = true
			}
		}
	}
	cursor.Path = cursor.Path[:len(cursor.Path)-1]
	return nil
}
