package image

import (
	"math"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/equal"
)

// child opens a child under its name. It must have at least n rows.
func (o *opener) child(name string, dt arrow.DataType, n int64) (*array.Data, error) {
	o.path.push(name)
	d, err := o.array(dt)
	if err == nil && int64(d.Len()) < n {
		err = o.path.invalid("%d values where %d are needed", d.Len(), n)
	}
	o.path.pop()
	return d, err
}

func (o *opener) list(dt arrow.DataType, t arrow.ListLikeType, n batch.Node, valid *memory.Buffer) (*array.Data, error) {
	offsets, last, err := o.offsets(n, offsetWidth(t.ID()))
	if err != nil {
		return nil, err
	}
	values, err := o.child("[]", t.Elem(), last)
	if err != nil {
		return nil, err
	}
	return newData(dt, n, []*memory.Buffer{valid, offsets}, values), nil
}

func (o *opener) listView(dt arrow.DataType, t arrow.ListLikeType, n batch.Node, valid *memory.Buffer) (*array.Data, error) {
	width := offsetWidth(t.ID())
	offsets, err := o.must(n, n.Length*width)
	if err != nil {
		return nil, err
	}
	sizes, err := o.must(n, n.Length*width)
	if err != nil {
		return nil, err
	}
	values, err := o.child("[]", t.Elem(), 0)
	if err != nil {
		return nil, err
	}
	return newData(dt, n, []*memory.Buffer{valid, offsets, sizes}, values), nil
}

func (o *opener) fixedSizeList(dt arrow.DataType, t *arrow.FixedSizeListType, n batch.Node, valid *memory.Buffer) (*array.Data, error) {
	size := int64(t.Len())
	if size < 0 || size > 0 && n.Length > math.MaxInt64/size {
		return nil, o.path.invalid("%d lists of %d", n.Length, size)
	}
	values, err := o.child("[]", t.Elem(), n.Length*size)
	if err != nil {
		return nil, err
	}
	return newData(dt, n, []*memory.Buffer{valid}, values), nil
}

func (o *opener) fields(dt arrow.DataType, t *arrow.StructType, n batch.Node, valid *memory.Buffer) (*array.Data, error) {
	children := make([]arrow.ArrayData, t.NumFields())
	for i := range children {
		f := t.Field(i)
		c, err := o.child(f.Name, f.Type, n.Length)
		if err != nil {
			return nil, err
		}
		children[i] = c
	}
	return newData(dt, n, []*memory.Buffer{valid}, children...), nil
}

// union takes the type codes, the offsets of a dense union, and the children. A
// union has no validity, but arrow-go wants room for one.
func (o *opener) union(dt arrow.DataType, t arrow.UnionType, n batch.Node) (*array.Data, error) {
	if n.Nulls != 0 {
		return nil, o.path.invalid("a union with %d nulls", n.Nulls)
	}
	codes, err := o.must(n, n.Length)
	if err != nil {
		return nil, err
	}
	bufs := []*memory.Buffer{nil, codes}
	rows := n.Length
	if t.Mode() == arrow.DenseMode {
		offsets, err := o.must(n, 4*n.Length)
		if err != nil {
			return nil, err
		}
		bufs = append(bufs, offsets)
		rows = 0
	}
	fields := t.Fields()
	children := make([]arrow.ArrayData, len(fields))
	for i, f := range fields {
		c, err := o.child(f.Name, f.Type, rows)
		if err != nil {
			return nil, err
		}
		children[i] = c
	}
	return newData(dt, n, bufs, children...), nil
}

func (o *opener) runs(dt arrow.DataType, t *arrow.RunEndEncodedType, n batch.Node) (*array.Data, error) {
	switch {
	case n.Nulls != 0:
		return nil, o.path.invalid("run-end encoded with %d nulls of its own", n.Nulls)
	case !t.ValidRunEndsType(t.RunEnds()):
		return nil, o.path.invalid("run ends of type %s", t.RunEnds())
	}
	ends, err := o.child("run_ends", t.RunEnds(), min(n.Length, 1))
	if err != nil {
		return nil, err
	}
	if n.Length > 0 {
		runs := int64(ends.Len())
		b := ends.Buffers()[1]
		width := int64(t.RunEnds().(arrow.FixedWidthDataType).Bytes())
		if b == nil || ends.NullN() != 0 || signed(b.Bytes(), width, runs-1) < n.Length {
			return nil, o.path.invalid("the runs end before row %d", n.Length)
		}
	}
	values, err := o.child("values", t.Encoded(), int64(ends.Len()))
	if err != nil {
		return nil, err
	}
	return newData(dt, n, []*memory.Buffer{nil}, ends, values), nil
}

// dictionary opens the indices and the dictionary. A dictionary that lies where
// one before it does becomes the same array, as it was when it was laid out.
func (o *opener) dictionary(dt arrow.DataType, t *arrow.DictionaryType, n batch.Node, valid *memory.Buffer) (*array.Data, error) {
	index, ok := t.IndexType.(arrow.FixedWidthDataType)
	if !ok {
		return nil, o.path.invalid("indices of type %s", t.IndexType)
	}
	indices, err := o.must(n, n.Length*int64(index.Bytes()))
	if err != nil {
		return nil, err
	}
	dict, outside, err := o.dictionaryOf(t.ValueType)
	if err != nil {
		return nil, err
	}
	d := array.NewDataWithDictionary(dt, int(n.Length), []*memory.Buffer{valid, indices}, int(n.Nulls), 0, dict)
	dict.Release()
	for _, b := range d.Buffers() {
		if b != nil {
			b.Release()
		}
	}
	if outside {
		o.holders = append(o.holders, d)
	}
	return d, nil
}

// dictionaryOf takes a dictionary, and says whether it is an image of its own.
func (o *opener) dictionaryOf(dt arrow.DataType) (_ *array.Data, outside bool, err error) {
	if len(o.nodes) == 0 || o.nodes[0].Nulls != batch.Outside {
		d, err := o.sharedDict(dt)
		return d, false, err
	}
	i := o.nodes[0].Length
	o.nodes = o.nodes[1:]
	if i < 0 || i >= int64(len(o.desc.Dictionaries)) || o.find == nil {
		return nil, false, o.path.invalid("dictionary %d of %d", i, len(o.desc.Dictionaries))
	}
	d, err := o.find(o.desc.Dictionaries[i], dt)
	return d, true, err
}

func (o *opener) sharedDict(dt arrow.DataType) (*array.Data, error) {
	all, begin := o.desc.Buffers, len(o.desc.Buffers)-len(o.spans)
	o.filled = max(o.filled, begin)
	first := firstByteOf(all[o.filled:])
	o.filled += first.i
	first.i = o.filled - begin
	if i := o.at.Find(len(o.dicts), func(i int) firstByte { return firstByteOf(o.dicts[i].spans) }, first); i >= 0 && o.isNext(&o.dicts[i], dt) {
		e := &o.dicts[i]
		o.nodes, o.spans = o.nodes[len(e.nodes):], o.spans[len(e.spans):]
		e.data.Retain()
		o.holders = append(o.holders, e.data) // it may have a dictionary outside
		return e.data, nil
	}
	e := openDict{dt: dt, nodes: o.nodes, spans: o.spans}
	d, err := o.child("dictionary", dt, 0)
	if err != nil {
		return nil, err
	}
	e.data = d
	e.nodes = e.nodes[:len(e.nodes)-len(o.nodes)]
	e.spans = e.spans[:len(e.spans)-len(o.spans)]
	if first.i < len(e.spans) { // else nothing says that another is the same
		o.dicts = append(o.dicts, e)
	}
	return d, nil
}

// isNext says whether the next dictionary is e, of type dt.
func (o *opener) isNext(e *openDict, dt arrow.DataType) bool {
	return len(e.nodes) <= len(o.nodes) && len(e.spans) <= len(o.spans) &&
		slices.Equal(e.nodes, o.nodes[:len(e.nodes)]) && slices.Equal(e.spans, o.spans[:len(e.spans)]) &&
		equal.Types(e.dt, dt)
}
