package image

import (
	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
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
	granule int64 // rows from whose multiples on all buffers begin at multiples of alignSmall
}

// columnNode is one array.
type columnNode struct {
	batch.Node
	scale    int64 // values for each row of the column; dependent if that is not a number
	onlyNull bool  // the type has nothing but nulls
}

// columnPart is one buffer.
type columnPart struct {
	span  batch.Span // in the image
	node  int        // of the column: the array that has it
	role  role
	width int64 // of a value or an offset, bytes
	scale int64
}

// role is what a buffer has for each value.
type role int

const (
	wholePart   role = iota // whatever it has, it cannot be cut
	nullBits                // a bit that says whether it is null
	bitValues               // a bit
	fixedValues             // width bytes
	offsetsPart             // an offset of width bytes, and one more at the end
	textPart                // the bytes between two offsets of the part before
)

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
		w.path.push(f.Name)
		if err := w.array(f.Type, 1, d.Rows); err != nil {
			return nil, err
		}
		w.path.pop()
	}
	return columns, nil
}

// columnWalk walks a schema beside a descriptor's nodes and spans, as opener does,
// and looks at neither bytes nor lengths more than it must: opener checks them.
type columnWalk struct {
	path   path
	nodes  []batch.Node // not yet taken
	spans  []batch.Span
	column *imageColumn
}

func (w *columnWalk) child(name string, dt arrow.DataType, scale, rows int64) error {
	w.path.push(name)
	err := w.array(dt, scale, rows)
	w.path.pop()
	return err
}

// inside walks children of which the rows say nothing.
func (w *columnWalk) inside(name string, dt arrow.DataType) error {
	return w.child(name, dt, dependent, 0)
}

// node takes the next node.
func (w *columnWalk) node(n columnNode) (batch.Node, error) {
	if len(w.nodes) == 0 {
		return batch.Node{}, w.path.invalid("the descriptor has no node for it")
	}
	n.Node = w.nodes[0]
	w.nodes = w.nodes[1:]
	w.column.nodes = append(w.column.nodes, n)
	return n.Node, nil
}

// parts takes the next spans, which have one role.
func (w *columnWalk) parts(n int64, p columnPart) error {
	if n > int64(len(w.spans)) || n < 0 {
		return w.path.invalid("the descriptor has no buffer for it")
	}
	for _, s := range w.spans[:n] {
		p.span = s
		w.column.parts = append(w.column.parts, p)
	}
	w.spans = w.spans[n:]
	return nil
}

// array takes what an array of type dt has. It has scale values for each of the
// column's rows.
func (w *columnWalk) array(dt arrow.DataType, scale, rows int64) error {
	dt = Storage(dt)
	at := len(w.column.nodes)
	n, err := w.node(columnNode{scale: scale, onlyNull: dt.ID() == arrow.NULL})
	if err != nil {
		return err
	}
	if scale >= 0 && !hasRows(n, scale, rows) {
		w.column.byRows, scale = false, dependent
	}
	part := columnPart{node: at, scale: scale}
	switch t := dt.(type) {
	case *arrow.NullType:
		return nil
	case *arrow.RunEndEncodedType:
		w.column.byRows = w.column.byRows && scale < 0
		if err := w.inside("run_ends", t.RunEnds()); err != nil {
			return err
		}
		return w.inside("values", t.Encoded())
	case arrow.UnionType:
		return w.union(t, part)
	}
	if err := w.aligned(1, part, nullBits, 0, 8*alignSmall); err != nil {
		return err
	}
	switch t := dt.(type) {
	case *arrow.BooleanType:
		return w.aligned(1, part, bitValues, 0, 8*alignSmall)
	case arrow.BinaryViewDataType:
		return w.views(part)
	case arrow.BinaryDataType:
		width := offsetWidth(dt.ID())
		if err := w.aligned(1, part, offsetsPart, width, alignSmall/width); err != nil {
			return err
		}
		return w.aligned(1, part, textPart, 0, 1)
	case *arrow.ListType, *arrow.LargeListType, *arrow.MapType:
		return w.lists(1, part, t.(arrow.ListLikeType).Elem())
	case *arrow.ListViewType, *arrow.LargeListViewType:
		return w.lists(2, part, t.(arrow.ListLikeType).Elem())
	case *arrow.FixedSizeListType:
		return w.child("[]", t.Elem(), w.times(scale, int64(t.Len())), rows)
	case *arrow.StructType:
		for i := range t.NumFields() {
			if err := w.child(t.Field(i).Name, t.Field(i).Type, scale, rows); err != nil {
				return err
			}
		}
		return nil
	case *arrow.DictionaryType:
		index, ok := t.IndexType.(arrow.FixedWidthDataType)
		if !ok {
			return w.path.invalid("indices of type %s", t.IndexType)
		}
		if err := w.fixed(part, int64(index.Bytes())); err != nil {
			return err
		}
		if len(w.nodes) > 0 && w.nodes[0].Nulls == batch.Outside {
			_, err := w.node(columnNode{scale: dependent})
			return err
		}
		return w.inside("dictionary", t.ValueType)
	case arrow.FixedWidthDataType:
		return w.fixed(part, int64(t.Bytes()))
	}
	return w.path.invalid("no image of the type %s", dt)
}

// hasRows says whether an array has scale values for each row.
func hasRows(n batch.Node, scale, rows int64) bool {
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
	if size < 0 || scale > 0 && size > maxRows/scale {
		w.column.byRows = false
		return dependent
	}
	return scale * size
}

// aligned takes n spans that are cut at multiples of granule values only.
func (w *columnWalk) aligned(n int64, p columnPart, r role, width, granule int64) error {
	p.role, p.width = r, width
	first := len(w.column.parts)
	if err := w.parts(n, p); err != nil {
		return err
	}
	for _, p := range w.column.parts[first:] {
		if p.scale >= 0 && p.span.Length > 0 {
			w.column.granule = max(w.column.granule, granule) // powers of two
		}
	}
	return nil
}

func (w *columnWalk) fixed(p columnPart, width int64) error {
	if width < 0 {
		return w.path.invalid("values of %d bytes", width)
	}
	granule := int64(alignSmall)
	for ; granule > 1 && (granule/2*width)%alignSmall == 0; granule /= 2 {
	}
	return w.aligned(1, p, fixedValues, width, granule)
}

// uncut takes n spans of an array that cannot be cut by rows.
func (w *columnWalk) uncut(n int64, p columnPart) error {
	w.column.byRows = w.column.byRows && p.scale < 0
	p.role, p.scale = wholePart, dependent
	return w.parts(n, p)
}

func (w *columnWalk) lists(n int64, p columnPart, elem arrow.DataType) error {
	if err := w.uncut(n, p); err != nil {
		return err
	}
	return w.inside("[]", elem)
}

// views takes the views and as many data buffers as the node behind them says.
func (w *columnWalk) views(p columnPart) error {
	if err := w.uncut(1, p); err != nil {
		return err
	}
	data, err := w.node(columnNode{scale: dependent})
	if err != nil {
		return err
	}
	return w.uncut(data.Length, p)
}

func (w *columnWalk) union(t arrow.UnionType, p columnPart) error {
	n := int64(1)
	if t.Mode() == arrow.DenseMode {
		n = 2
	}
	if err := w.uncut(n, p); err != nil {
		return err
	}
	for _, f := range t.Fields() {
		if err := w.inside(f.Name, f.Type); err != nil {
			return err
		}
	}
	return nil
}
