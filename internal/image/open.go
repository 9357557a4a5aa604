package image

import (
	"errors"
	"math"
	"slices"
	"sort"
	"sync/atomic"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lookup"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
)

// Open returns the record whose image lies in extents, in place: its Arrow
// buffers are the extents' memory, which must stay as it is until release is
// called. That is once, when the last buffer of the last array is released, on the
// goroutine that does it; at once if no array has a byte, and also on an error.
// The caller releases the record.
//
// dictionaries are the extents of the images that d.AllDictionaries names, in
// that order; they must stay for as long. Columns that use the same dictionary share
// one array of it.
//
// The extents' lengths add up to d.Body, and no buffer lies in two of them. The descriptor is
// checked against the schema and the extents, as far as needed to build the arrays without reading
// out of range. A mismatch is an *InvalidError. Values are not looked at: Verify checks that the
// bytes are those that were laid out, and array.ValidateFull that those make sense.
func Open(d *batch.Descriptor, extents [][]byte, release func(), dictionaries ...[][]byte) (arrow.RecordBatch, error) {
	l := NewLease(release)
	if d == nil {
		l.End()
		return nil, errors.New("convert: opening an image: the descriptor is nil")
	}
	all := d.AllDictionaries()
	if len(all) != len(dictionaries) {
		l.End()
		return nil, Path(nil).Invalid("%d dictionaries, want %d", len(dictionaries), len(all))
	}
	if len(all) == 0 {
		return OpenRecord(d, extents, l, nil)
	}
	opened := make([]openDict, len(all))
	defer func() {
		for _, e := range opened {
			if e.data != nil {
				e.data.Release() // the record has references of its own
			}
		}
	}()
	var at lookup.Table[*batch.Descriptor]
	var find Finder
	find = func(dict *batch.Descriptor, dt arrow.DataType) (*array.Data, error) {
		i := at.Of(all, dict)
		e := &opened[i]
		if e.data != nil && equal.Types(e.dt, dt) {
			e.data.Retain()
			return e.data, nil
		}
		desc, extents, err := InOnePiece(dict, func(d *batch.Descriptor) [][]byte { return dictionaries[at.Of(all, d)] })
		if err != nil {
			return nil, err
		}
		data, err := OpenDictionary(desc, dt, extents, l, find)
		if err == nil && e.data == nil {
			data.Retain()
			e.dt, e.data = dt, data
		}
		return data, err
	}
	return OpenRecord(d, extents, l, find)
}

// Finder returns the opened array of a dictionary that is an image of its own, as the type that its
// user has, and a reference to it.
type Finder func(d *batch.Descriptor, dt arrow.DataType) (*array.Data, error)

// OpenRecord opens d with a new lease, which it ends on an error.
func OpenRecord(d *batch.Descriptor, extents [][]byte, l *Lease, find Finder) (arrow.RecordBatch, error) {
	return OpenRows(d, nil, extents, l, find)
}

// OpenRows is OpenRecord for columns that may have more rows than the record: each is
// sliced, from the row on that skip has for it. Without skip they have d.Rows.
func OpenRows(d *batch.Descriptor, skip []int64, extents [][]byte, l *Lease, find Finder) (_ arrow.RecordBatch, err error) {
	o := opener{desc: d, lease: l, find: find}
	var cols []arrow.Array
	defer func() {
		if err != nil {
			// The arrays made so far have no owner. But dictionaries that others use, too, and the
			// memory must be given back.
			o.abandon()
			for _, c := range cols {
				c.Release()
			}
			l.End()
		}
	}()
	defer guard.Error(&err, "convert: opening an image")
	if err := o.begin(extents); err != nil {
		return nil, err
	}
	cols = make([]arrow.Array, 0, d.Schema.NumFields())
	for i := range d.Schema.NumFields() {
		f := d.Schema.Field(i)
		o.path.Push(f.Name)
		data, err := o.array(f.Type)
		if err != nil {
			return nil, err
		}
		col, err := o.column(data, skip, i)
		if err != nil {
			return nil, err
		}
		o.holders = o.holders[:0] // the column has them
		cols = append(cols, col)
		o.path.Pop()
	}
	if err := o.end(); err != nil {
		return nil, err
	}
	var meta arrow.Metadata
	if d.Metadata != nil {
		meta = *d.Metadata
	}
	rec := array.NewRecordBatchWithMetadata(d.Schema, cols, d.Rows, meta)
	for _, c := range cols {
		c.Release()
	}
	cols = nil
	l.Free(nil)
	return rec, nil
}

// column makes the i-th column out of its data, which it takes over unless it fails.
func (o *opener) column(data *array.Data, skip []int64, i int) (arrow.Array, error) {
	n, from := int64(data.Len()), int64(0)
	if skip != nil {
		from = skip[i]
	}
	if skip == nil && n != o.desc.Rows || from < 0 || from > n || n-from < o.desc.Rows {
		return nil, o.path.Invalid("%d rows in a record of %d", n-from, o.desc.Rows)
	}
	col := array.MakeFromData(data)
	data.Release()
	if n == o.desc.Rows {
		return col, nil
	}
	defer col.Release()
	return array.NewSlice(col, from, from+o.desc.Rows), nil
}

// OpenDictionary opens the array of a dictionary's image. The lease stays the
// caller's.
func OpenDictionary(d *batch.Descriptor, dt arrow.DataType, extents [][]byte, l *Lease, find Finder) (_ *array.Data, err error) {
	o := opener{desc: d, lease: l, find: find}
	defer func() {
		if err != nil {
			o.abandon()
		}
	}()
	o.path.Push("dictionary")
	if err := o.begin(extents); err != nil {
		return nil, err
	}
	data, err := o.array(dt)
	if err != nil {
		return nil, err
	}
	if err := o.end(); err != nil {
		return nil, err
	}
	return data, nil
}

// Lease gives the extents back when no buffer needs them. It is the allocator
// of the buffers, whose Free arrow-go calls when the last reference to one ends.
type Lease struct {
	buffers atomic.Int64
	ended   atomic.Bool
	release func()
	Hold    books.Hold // of the memory, if one was begun
}

// NewLease returns a lease with one buffer counted, which is the opener's own.
func NewLease(release func()) *Lease {
	l := &Lease{release: release}
	l.buffers.Store(1)
	return l
}

// Free counts a buffer as released.
func (l *Lease) Free([]byte) {
	if l.buffers.Add(-1) == 0 {
		l.End()
	}
}

func (l *Lease) End() {
	if !l.ended.CompareAndSwap(false, true) {
		return
	}
	l.Hold.End() // first, so that no more is held than is used
	if l.release != nil {
		l.release()
	}
}

// Allocate panics: the buffers are parts of an image and cannot grow.
func (l *Lease) Allocate(int) []byte { panic("convert: a buffer of an image is read-only") }

// Reallocate panics: the buffers are parts of an image and cannot grow.
func (l *Lease) Reallocate(int, []byte) []byte { panic("convert: a buffer of an image is read-only") }

// opener walks a schema beside a descriptor's nodes and spans.
type opener struct {
	desc    *batch.Descriptor
	path    Path
	nodes   []payload.Node // not yet taken
	spans   []payload.Span
	extents [][]byte
	begins  []int64 // of the extents; nil for one
	lease   *Lease
	find    Finder
	dicts   []openDict // inside, with bytes
	at      lookup.Table[firstByte]
	filled  int           // of desc.Buffers: the first not yet taken that has a byte is not before it
	holders []*array.Data // those of the column under way that have references of dictionaries outside
}

// openDict is a dictionary that was opened. One that lies in the body has the nodes and
// spans that it was opened from.
type openDict struct {
	dt    arrow.DataType
	nodes []payload.Node
	spans []payload.Span
	data  *array.Data
}

// firstByte is which of a dictionary's spans is the first that has a byte. Two dictionaries
// of one body have different ones, unless the descriptor says that they are the same.
type firstByte struct {
	span payload.Span
	i    int // among the dictionary's spans
}

// firstByteOf looks for it. Without a byte, i is behind the last.
func firstByteOf(spans []payload.Span) firstByte {
	for i, s := range spans {
		if s.Offset >= 0 && s.Length > 0 {
			return firstByte{s, i}
		}
	}
	return firstByte{i: len(spans)}
}

// begin checks the descriptor and takes the extents.
func (o *opener) begin(extents [][]byte) error {
	d := o.desc
	if d.Schema == nil {
		return errors.New("convert: a descriptor without a schema")
	}
	if err := CheckEndian(d.Schema); err != nil {
		return err
	}
	if d.Rows < 0 {
		return o.path.Invalid("%d rows", d.Rows)
	}
	o.nodes, o.spans = d.Nodes, d.Buffers
	return o.memory(extents)
}

// End checks that everything was taken.
func (o *opener) end() error {
	if len(o.nodes) > 0 || len(o.spans) > 0 {
		return o.path.Invalid("%d nodes and %d buffers more than the schema has", len(o.nodes), len(o.spans))
	}
	return nil
}

// abandon releases the references to outside dictionaries of arrays that will not be used. Each of
// the holders has one reference that counts: its parent's, or the one that is not handed out yet.
func (o *opener) abandon() {
	for _, d := range o.holders {
		d.Release()
	}
	o.holders = nil
}

// memory takes the extents, whose lengths must add up to the body's.
func (o *opener) memory(extents [][]byte) error {
	o.extents = extents
	if len(extents) > 1 {
		o.begins = make([]int64, len(extents))
	}
	total := int64(0)
	for i, e := range extents {
		if o.begins != nil {
			o.begins[i] = total
		}
		total += int64(len(e))
	}
	if total != o.desc.Body {
		return o.path.Invalid("extents of %d bytes for a body of %d", total, o.desc.Body)
	}
	return nil
}

// node takes the next node.
func (o *opener) node() (payload.Node, error) {
	if len(o.nodes) == 0 {
		return payload.Node{}, o.path.Invalid("the descriptor has no node for it")
	}
	n := o.nodes[0]
	o.nodes = o.nodes[1:]
	if n.Length < 0 || n.Nulls < 0 || n.Nulls > n.Length || n.Length > MaxRows {
		return n, o.path.Invalid("a node of %d rows, %d nulls", n.Length, n.Nulls)
	}
	return n, nil
}

// MaxRows keeps the products of rows and widths within 64 bits: no value is
// wider than 32 bytes but in fixed-size binaries and lists, which are checked by
// themselves.
const MaxRows = 1 << 48

// noBytes is the buffer without bytes. It needs no memory and is not counted.
var noBytes = []byte{}

// buffer takes the next span, which must have need bytes; nil if it is absent.
func (o *opener) buffer(need int64) (*memory.Buffer, error) {
	if len(o.spans) == 0 {
		return nil, o.path.Invalid("the descriptor has no buffer for it")
	}
	s := o.spans[0]
	o.spans = o.spans[1:]
	switch {
	case s == payload.Absent:
		return nil, nil
	case s.Offset < 0 || s.Length < 0 || s.Offset%AlignSmall != 0 || s.Offset > o.desc.Body || s.Length > o.desc.Body-s.Offset:
		return nil, o.path.Invalid("a buffer of %d bytes at %d in a body of %d", s.Length, s.Offset, o.desc.Body)
	case s.Length < need:
		return nil, o.path.Invalid("a buffer of %d bytes where %d are needed", s.Length, need)
	case s.Length == 0:
		return memory.NewBufferBytes(noBytes), nil
	}
	var e []byte
	begin := int64(0)
	if o.begins == nil {
		e = o.extents[0]
	} else {
		i := sort.Search(len(o.begins), func(i int) bool { return o.begins[i] > s.Offset }) - 1
		e, begin = o.extents[i], o.begins[i]
	}
	at := s.Offset - begin
	if at+s.Length > int64(len(e)) {
		return nil, o.path.Invalid("a buffer of %d bytes at %d lies in two extents", s.Length, s.Offset)
	}
	o.lease.buffers.Add(1)
	return memory.NewBufferWithAllocator(e[at:at+s.Length:at+s.Length], o.lease), nil
}

// must is buffer for one that may only be absent if no row has a value.
func (o *opener) must(n payload.Node, need int64) (*memory.Buffer, error) {
	b, err := o.buffer(need)
	if err == nil && b == nil && n.Nulls < n.Length {
		err = o.path.Invalid("a buffer of %d bytes is missing", need)
	}
	return b, err
}

// validity takes the bitmap of n.
func (o *opener) validity(n payload.Node) (*memory.Buffer, error) {
	b, err := o.buffer((n.Length + 7) / 8)
	if err == nil && b == nil && n.Nulls > 0 {
		err = o.path.Invalid("%d nulls and no validity", n.Nulls)
	}
	return b, err
}

// array opens the next array, of type dt. The caller releases the data.
func (o *opener) array(dt arrow.DataType) (*array.Data, error) {
	n, err := o.node()
	if err != nil {
		return nil, err
	}
	sh, ok := shape.Of(dt)
	switch {
	case !ok:
		return nil, o.path.Invalid("no image of the type %s", dt)
	case sh.Null && n.Nulls != n.Length:
		return nil, o.path.Invalid("%d of %d nulls", n.Nulls, n.Length)
	case !sh.Null && !sh.HasValidity() && n.Nulls != 0:
		return nil, o.path.Invalid("%d nulls of a %s, which has none of its own", n.Nulls, sh.Type.Name())
	}
	bufs, last, err := o.buffers(&sh, n)
	if err != nil {
		return nil, err
	}
	children, err := o.children(&sh, n, last)
	if err != nil {
		return nil, err
	}
	var d *array.Data
	if sh.Values == nil {
		d = array.NewData(dt, int(n.Length), bufs, children, int(n.Nulls), 0)
	} else {
		dict, outside, err := o.dictionary(sh.Values)
		if err != nil {
			return nil, err
		}
		d = array.NewDataWithDictionary(dt, int(n.Length), bufs, int(n.Nulls), 0, dict)
		dict.Release()
		if outside {
			o.holders = append(o.holders, d)
		}
	}
	for _, b := range bufs {
		if b != nil {
			b.Release()
		}
	}
	for _, c := range children {
		c.Release()
	}
	return d, nil
}

// buffers takes the buffers of an array, and returns the last of its offsets. arrow-go wants room
// for a validity where there is none.
func (o *opener) buffers(sh *shape.Shape, n payload.Node) (bufs []*memory.Buffer, last int64, err error) {
	bufs = make([]*memory.Buffer, 0, 3)
	if !sh.HasValidity() {
		bufs = append(bufs, nil)
	}
	for _, b := range sh.Buffers {
		var buf *memory.Buffer
		switch b.Role {
		case shape.Validity:
			buf, err = o.validity(n)
		case shape.Bits:
			buf, err = o.must(n, (n.Length+7)/8)
		case shape.Offsets:
			buf, last, err = o.offsets(n, b.Width)
		case shape.Data:
			if buf, err = o.buffer(last); err == nil && buf == nil && last > 0 {
				err = o.path.Invalid("the values are missing")
			}
		default:
			if b.Width < 0 || b.Width > 0 && n.Length > (1<<62)/b.Width {
				return nil, 0, o.path.Invalid("%d values of %d bytes", n.Length, b.Width)
			}
			buf, err = o.must(n, n.Length*b.Width)
		}
		if err != nil {
			return nil, 0, err
		}
		bufs = append(bufs, buf)
	}
	if sh.Views {
		bufs, err = o.viewed(bufs)
	}
	return bufs, last, err
}

// viewed takes as many data buffers as the node behind the views says.
func (o *opener) viewed(bufs []*memory.Buffer) ([]*memory.Buffer, error) {
	data, err := o.node()
	if err != nil {
		return nil, err
	}
	if data.Nulls != 0 || data.Length > int64(len(o.spans)) {
		return nil, o.path.Invalid("%d data buffers of which the descriptor has %d", data.Length, len(o.spans))
	}
	for range data.Length {
		b, err := o.buffer(0)
		if err != nil {
			return nil, err
		}
		if b == nil {
			return nil, o.path.Invalid("a data buffer is missing")
		}
		bufs = append(bufs, b)
	}
	return bufs, nil
}

// children opens the children, each of which must have the rows that the array shows of it. last
// is the last offset.
func (o *opener) children(sh *shape.Shape, n payload.Node, last int64) ([]arrow.ArrayData, error) {
	if sh.NumChildren() == 0 {
		return nil, nil
	}
	rows := n.Length
	switch sh.Rows {
	case shape.Times:
		if sh.Size < 0 || sh.Size > 0 && n.Length > math.MaxInt64/sh.Size {
			return nil, o.path.Invalid("%d lists of %d", n.Length, sh.Size)
		}
		rows *= sh.Size
	case shape.Between:
		rows = last
	case shape.Shown:
		rows = 0
	case shape.Runs:
		rows = min(n.Length, 1)
	}
	children := make([]arrow.ArrayData, sh.NumChildren())
	for i := range children {
		name, dt := sh.Child(i)
		c, err := o.child(name, dt, rows)
		if err != nil {
			return nil, err
		}
		children[i] = c
		if sh.Rows == shape.Runs && i == 0 {
			if err := o.runEnds(sh.Type.(*arrow.RunEndEncodedType), c, n.Length); err != nil {
				return nil, err
			}
			rows = int64(c.Len())
		}
	}
	return children, nil
}

// offsets takes the offsets of n lists and returns the last. Without lists
// there may be none.
func (o *opener) offsets(n payload.Node, width int64) (b *memory.Buffer, last int64, err error) {
	need := (n.Length + 1) * width
	if n.Length == 0 {
		need = 0
	}
	if b, err = o.must(n, need); err != nil || b == nil || n.Length == 0 {
		return b, 0, err
	}
	first := OffsetAt(b.Bytes(), width, 0)
	last = OffsetAt(b.Bytes(), width, n.Length)
	if first < 0 || last < first {
		err = o.path.Invalid("offsets from %d to %d", first, last)
	}
	return b, last, err
}

// child opens a child under its name. It must have at least n rows.
func (o *opener) child(name string, dt arrow.DataType, n int64) (*array.Data, error) {
	o.path.Push(name)
	d, err := o.array(dt)
	if err == nil && int64(d.Len()) < n {
		err = o.path.Invalid("%d values where %d are needed", d.Len(), n)
	}
	o.path.Pop()
	return d, err
}

// runEnds checks that the run ends reach to the last row.
func (o *opener) runEnds(t *arrow.RunEndEncodedType, ends *array.Data, rows int64) error {
	if !t.ValidRunEndsType(t.RunEnds()) {
		return o.path.Invalid("run ends of type %s", t.RunEnds())
	}
	if rows == 0 {
		return nil
	}
	b := ends.Buffers()[1]
	width := int64(t.RunEnds().(arrow.FixedWidthDataType).Bytes())
	if b == nil || ends.NullN() != 0 || signed(b.Bytes(), width, int64(ends.Len())-1) < rows {
		return o.path.Invalid("the runs end before row %d", rows)
	}
	return nil
}

// dictionary takes a dictionary, and reports whether it is an image of its own. One that lies where
// one before it does becomes the same array, as it was when it was laid out.
func (o *opener) dictionary(dt arrow.DataType) (_ *array.Data, outside bool, err error) {
	if len(o.nodes) == 0 || o.nodes[0].Nulls != payload.Outside {
		d, err := o.sharedDict(dt)
		return d, false, err
	}
	i := o.nodes[0].Length
	o.nodes = o.nodes[1:]
	if i < 0 || i >= int64(len(o.desc.Dictionaries)) || o.find == nil {
		return nil, false, o.path.Invalid("dictionary %d of %d", i, len(o.desc.Dictionaries))
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

// isNext reports whether the next dictionary is e, of type dt.
func (o *opener) isNext(e *openDict, dt arrow.DataType) bool {
	return len(e.nodes) <= len(o.nodes) && len(e.spans) <= len(o.spans) &&
		slices.Equal(e.nodes, o.nodes[:len(e.nodes)]) && slices.Equal(e.spans, o.spans[:len(e.spans)]) &&
		equal.Types(e.dt, dt)
}
