package columns

import (
	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
)

// imageColumn is one column of an image: its arrays and buffers, depth first.
//
// Of some columns a run of rows can be cut out by bytes: those whose every array has
// scale values for each row of the column (1, or the size of the fixed-size lists around
// it), except for dictionaries, of which the rows say nothing.
type imageColumn struct {
	nodes   []columnNode
	parts   []columnPart
	byRows  bool  // rows can be cut out
	granule int64 // rows from whose multiples on all buffers begin at multiples of image.AlignSmall
}

// columnNode is one array.
type columnNode struct {
	payload.Node
	scale    int64 // values for each row of the column; dependent if that is not a number
	onlyNull bool  // the type has nothing but nulls
}

// columnPart is one buffer.
type columnPart struct {
	shape.Buffer
	span  payload.Span // in the image
	node  int          // of the column: the array that has it
	scale int64        // that of the array; dependent if the buffer cannot be cut
}

// dependent is the scale of an array whose length is not a multiple of the rows.
const dependent = -1

// columnsOf finds the columns of c in an image, in the order of c.
func columnsOf(d *batch.Descriptor, c *Columns) ([]imageColumn, error) {
	place := make([]int, d.Schema.NumFields()) // in c, from 1 on
	for i, f := range c.Fields {
		place[f] = i + 1
	}
	columns := make([]imageColumn, len(c.Fields))
	w := columnWalk{nodes: d.Nodes, spans: d.Buffers}
	var passed imageColumn // one for all that are not wanted
	for i, at := range place {
		passed.nodes, passed.parts = passed.nodes[:0], passed.parts[:0]
		w.column = &passed
		if at > 0 {
			w.column = &columns[at-1]
		}
		f := d.Schema.Field(i)
		w.column.byRows, w.column.granule = true, 1
		w.path.Push(f.Name)
		if err := w.array(f.Type, 1, d.Rows); err != nil {
			return nil, err
		}
		w.path.Pop()
	}
	return columns, nil
}

// columnWalk walks a schema beside a descriptor's nodes and spans, as opener does,
// and looks at neither bytes nor lengths more than it must: opener checks them.
type columnWalk struct {
	path   image.Path
	nodes  []payload.Node // not yet taken
	spans  []payload.Span
	column *imageColumn
}

func (w *columnWalk) child(name string, dt arrow.DataType, scale, rows int64) error {
	w.path.Push(name)
	err := w.array(dt, scale, rows)
	w.path.Pop()
	return err
}

// node takes the next node.
func (w *columnWalk) node(n columnNode) (payload.Node, error) {
	if len(w.nodes) == 0 {
		return payload.Node{}, w.path.Invalid("the descriptor has no node for it")
	}
	n.Node = w.nodes[0]
	w.nodes = w.nodes[1:]
	w.column.nodes = append(w.column.nodes, n)
	return n.Node, nil
}

// array takes what an array of type dt has. It has scale values for each of the
// column's rows.
func (w *columnWalk) array(dt arrow.DataType, scale, rows int64) error {
	sh, ok := shape.Of(dt)
	if !ok {
		return w.path.Invalid("no image of the type %s", dt)
	}
	at := len(w.column.nodes)
	n, err := w.node(columnNode{scale: scale, onlyNull: sh.Null})
	if err != nil {
		return err
	}
	if scale >= 0 && !hasRows(n, scale, rows) {
		w.column.byRows, scale = false, dependent
	}
	if sh.Rows == shape.Runs {
		w.column.byRows = w.column.byRows && scale < 0
	}
	for _, b := range sh.Buffers {
		if err := w.part(&sh, columnPart{Buffer: b, node: at, scale: scale}); err != nil {
			return err
		}
	}
	if sh.Views {
		if err := w.viewed(columnPart{node: at}); err != nil {
			return err
		}
	}
	switch sh.Rows {
	case shape.Times:
		scale = w.times(scale, sh.Size)
	case shape.Between, shape.Shown, shape.Runs:
		scale, rows = dependent, 0 // of which the rows say nothing
	}
	for i := range sh.NumChildren() {
		name, dt := sh.Child(i)
		if err := w.child(name, dt, scale, rows); err != nil {
			return err
		}
	}
	if sh.Values != nil {
		return w.dictionary(sh.Values)
	}
	return nil
}

// part takes the next span, and says at which rows it can be cut.
func (w *columnWalk) part(sh *shape.Shape, p columnPart) error {
	if len(w.spans) == 0 {
		return w.path.Invalid("the descriptor has no buffer for it")
	}
	if p.Width < 0 {
		return w.path.Invalid("values of %d bytes", p.Width)
	}
	p.span, w.spans = w.spans[0], w.spans[1:]
	granule := int64(1) // rows at whose multiples it can be cut; 0 for none
	switch p.Role {
	case shape.Validity, shape.Bits:
		granule = 8 * image.AlignSmall
	case shape.Values:
		for granule = image.AlignSmall; granule > 1 && (granule/2*p.Width)%image.AlignSmall == 0; granule /= 2 {
		}
	case shape.Offsets:
		granule = image.AlignSmall / p.Width
		if sh.Rows == shape.Between {
			granule = 0
		}
	case shape.Data:
	default:
		granule = 0
	}
	if granule == 0 {
		w.column.byRows = w.column.byRows && p.scale < 0
		p.scale = dependent
	} else if p.scale >= 0 && p.span.Length > 0 {
		w.column.granule = max(w.column.granule, granule) // powers of two
	}
	w.column.parts = append(w.column.parts, p)
	return nil
}

// viewed takes as many data buffers as the node behind the views says.
func (w *columnWalk) viewed(p columnPart) error {
	data, err := w.node(columnNode{scale: dependent})
	if err != nil {
		return err
	}
	if data.Length < 0 || data.Length > int64(len(w.spans)) {
		return w.path.Invalid("the descriptor has no buffer for it")
	}
	p.scale = dependent
	for _, p.span = range w.spans[:data.Length] {
		w.column.parts = append(w.column.parts, p)
	}
	w.spans = w.spans[data.Length:]
	return nil
}

// dictionary takes a dictionary, of which the rows say nothing.
func (w *columnWalk) dictionary(dt arrow.DataType) error {
	if len(w.nodes) > 0 && w.nodes[0].Nulls == payload.Outside {
		_, err := w.node(columnNode{scale: dependent})
		return err
	}
	return w.child("dictionary", dt, dependent, 0)
}

// hasRows reports whether an array has scale values for each row.
func hasRows(n payload.Node, scale, rows int64) bool {
	if scale == 0 || rows == 0 {
		return n.Length == 0
	}
	return n.Length%scale == 0 && n.Length/scale == rows
}

// times returns the scale of the values of fixed-size lists.
func (w *columnWalk) times(scale, size int64) int64 {
	if scale < 0 {
		return dependent
	}
	if size < 0 || scale > 0 && size > image.MaxRows/scale {
		w.column.byRows = false
		return dependent
	}
	return scale * size
}
