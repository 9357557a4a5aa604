package image

import (
	"errors"
	"slices"
	"sync/atomic"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
)

// Open returns the record whose image is in extents, in place: its Arrow
// buffers are the extents' memory, which must stay as it is until release is
// called. That is once, when the last buffer of the last array is released, on the
// goroutine that does it; at once if no array has a byte, and also on an error.
// The caller releases the record.
//
// dictionaries are the extents of the images that d.AllDictionaries names, in
// that order; they must stay for as long. Columns that use the same dictionary share
// one array of it.
//
// The extents' lengths add up to d.Body, and no buffer is in two of them. The descriptor is
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
	bodies := make(map[*batch.Descriptor][][]byte)
	for i, dict := range all {
		bodies[dict] = dictionaries[i]
	}
	opened := make(map[*batch.Descriptor]*array.Data)
	defer func() {
		for _, data := range opened {
			data.Release() // the record has references of its own
		}
	}()
	var find Finder
	find = func(dict *batch.Descriptor, dt arrow.DataType) (*array.Data, error) {
		if data := opened[dict]; data != nil && equal.Types(data.DataType(), dt) {
			data.Retain()
			return data, nil
		}
		desc, extents, err := InOnePiece(dict, bodies)
		if err != nil {
			return nil, err
		}
		data, err := OpenDictionary(desc, dt, extents, l, find)
		if err == nil && opened[dict] == nil {
			data.Retain()
			opened[dict] = data
		}
		return data, err
	}
	return OpenRows(d, nil, extents, l, find)
}

// Finder returns the opened array of a dictionary that is an image of its own, as the type that its
// user has, and a reference to it.
type Finder func(d *batch.Descriptor, dt arrow.DataType) (*array.Data, error)

// OpenRows opens the record that d describes, and ends the lease on an error. Its columns may have
// more rows than the record: each is sliced, from the row on that skip has for it. If skip is nil,
// they have d.Rows.
func OpenRows(
	d *batch.Descriptor, skip []int64, extents [][]byte, l *Lease, find Finder,
) (_ arrow.RecordBatch, err error) {
	var arrays []*array.Data
	var cols []arrow.Array
	defer func() {
		for _, c := range cols {
			c.Release()
		}
		for _, a := range arrays {
			a.Release()
		}
		if err != nil {
			l.End()
		}
	}()
	defer guard.Error(&err, "convert: opening an image")
	if d.Schema == nil {
		return nil, errors.New("convert: a descriptor without a schema")
	}
	if arrays, err = open(d, d.Schema.Fields(), extents, l, find); err != nil {
		return nil, err
	}
	cols = make([]arrow.Array, 0, len(arrays))
	for i, a := range arrays {
		n, from := int64(a.Len()), int64(0)
		if skip != nil {
			from = skip[i]
		}
		if skip == nil && n != d.Rows || from < 0 || from > n || n-from < d.Rows {
			return nil, Path{d.Schema.Field(i).Name}.Invalid("%d rows in a record of %d", n-from, d.Rows)
		}
		col := array.MakeFromData(a)
		if n != d.Rows {
			whole := col
			col = array.NewSlice(whole, from, from+d.Rows)
			whole.Release()
		}
		cols = append(cols, col)
	}
	var meta arrow.Metadata
	if d.Metadata != nil {
		meta = *d.Metadata
	}
	rec := array.NewRecordBatchWithMetadata(d.Schema, cols, d.Rows, meta)
	l.Free(nil)
	return rec, nil
}

// OpenDictionary opens the array of a dictionary's image. The lease stays the
// caller's.
func OpenDictionary(
	d *batch.Descriptor, dt arrow.DataType, extents [][]byte, l *Lease, find Finder,
) (*array.Data, error) {
	arrays, err := open(d, []arrow.Field{{Name: "dictionary", Type: dt}}, extents, l, find)
	if err != nil {
		return nil, err
	}
	return arrays[0], nil
}

// Lease gives the extents back when no buffer needs them. It is the allocator
// of the buffers, whose Free arrow-go calls when the last reference to one ends.
type Lease struct {
	buffers atomic.Int64
	ended   atomic.Bool
	release func()
	Hold    books.Hold // of the memory, if one was begun
	// Unleased is how many bytes at the beginning of the body need no lease, because they are Go's.
	Unleased int64
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

// opener opens the arrays of one body.
type opener struct {
	Cursor
	extents [][]byte
	lease   *Lease
	find    Finder
	found   []*array.Data // by find: references that the arrays opened so far have
	dicts   map[firstByte]openDict
	filled  int // in Descriptor.Buffers: no span before it that is not yet taken has bytes
}

// openDict is a dictionary in the body that was opened, and what it was opened from.
type openDict struct {
	laidOut
	data *array.Data
}

// firstByte is the first span of a dictionary that has bytes. Two dictionaries of one body have
// different ones, unless they are the same in the descriptor.
type firstByte struct {
	span payload.Span
	i    int // among the dictionary's spans
}

// open opens the arrays of fields, which are all that d has.
func open(
	d *batch.Descriptor, fields []arrow.Field, extents [][]byte, l *Lease, find Finder,
) (_ []*array.Data, err error) {
	o := opener{Cursor: NewCursor(d), extents: extents, lease: l, find: find}
	defer func() {
		if err != nil { // the arrays have no owner yet, but other batches use the dictionaries, too
			for _, dict := range o.found {
				dict.Release()
			}
		}
	}()
	defer guard.Error(&err, "convert: opening an image")
	if d.Schema == nil {
		return nil, errors.New("convert: a descriptor without a schema")
	}
	if err := CheckEndian(d.Schema); err != nil {
		return nil, err
	}
	total := int64(0)
	for _, e := range extents {
		total += int64(len(e))
	}
	if d.Rows < 0 || total != d.Body {
		return nil, o.Path.Invalid("%d rows, in extents of %d bytes for a body of %d", d.Rows, total, d.Body)
	}
	arrays := make([]*array.Data, len(fields))
	for i, f := range fields {
		if arrays[i], err = o.array(f.Name, f.Type, 0); err != nil {
			return nil, err
		}
	}
	if err := o.End(); err != nil {
		return nil, err
	}
	return arrays, nil
}

// noBytes is the buffer without bytes. It needs no memory and is not counted.
var noBytes = []byte{}

// buffer returns the buffer at s, which must have need bytes; nil if it is absent.
func (o *opener) buffer(s payload.Span, need int64) (*memory.Buffer, error) {
	body := o.desc.Body
	switch {
	case s == payload.Absent:
		return nil, nil
	case s.Offset < 0 || s.Length < 0 || s.Offset%AlignSmall != 0 || s.Offset > body || s.Length > body-s.Offset:
		return nil, o.Path.Invalid("a buffer of %d bytes at %d in a body of %d", s.Length, s.Offset, body)
	case s.Length < need:
		return nil, o.Path.Invalid("a buffer of %d bytes where %d are needed", s.Length, need)
	case s.Length == 0:
		return memory.NewBufferBytes(noBytes), nil
	}
	b := Stretch(o.extents, s.Offset, s.Length)
	if b == nil {
		return nil, o.Path.Invalid("a buffer of %d bytes at %d lies in two extents", s.Length, s.Offset)
	}
	if s.Offset < o.lease.Unleased {
		return memory.NewBufferBytes(b), nil
	}
	o.lease.buffers.Add(1)
	return memory.NewBufferWithAllocator(b, o.lease), nil
}

// array opens the next array, of type dt, which must have at least rows rows. The caller releases
// the data.
func (o *opener) array(name string, dt arrow.DataType, rows int64) (*array.Data, error) {
	o.Path = append(o.Path, name)
	a, err := o.Next(dt)
	n := a.Length
	switch {
	case err != nil:
		return nil, err
	case n < rows:
		return nil, o.Path.Invalid("%d values where %d are needed", n, rows)
	case a.Null && a.Nulls != n:
		return nil, o.Path.Invalid("%d of %d nulls", a.Nulls, n)
	case !a.Null && !a.HasValidity && a.Nulls != 0:
		return nil, o.Path.Invalid("%d nulls of a %s, which has none of its own", a.Nulls, a.Type.Name())
	}
	bufs := make([]*memory.Buffer, 0, max(3, 1+len(a.Spans)))
	if !a.HasValidity {
		bufs = append(bufs, nil) // arrow-go wants room for a validity
	}
	last := int64(0) // of the offsets
	for i, s := range a.Spans {
		need, must := int64(0), true // bytes; whether the buffer may not be absent
		var b shape.Buffer
		if i < len(a.Buffers) {
			if b = a.Buffers[i]; b.Width < 0 || b.Width > 0 && n >= maxBody/b.Width {
				return nil, o.Path.Invalid("%d values of %d bytes", n, b.Width)
			}
			if n > 0 {
				_, need = b.Bytes(0, n)
			}
			switch must = a.Nulls < n; b.Role {
			case shape.Validity:
				must = a.Nulls > 0
			case shape.Data:
				need, must = last, last > 0
			}
		}
		buf, err := o.buffer(s, need)
		if err != nil {
			return nil, err
		}
		if buf == nil && must {
			return nil, o.Path.Invalid("buffer %d is missing, of %d rows, %d nulls", i, n, a.Nulls)
		}
		if b.Role == shape.Offsets && n > 0 && buf != nil {
			first := OffsetAt(buf.Bytes(), b.Width, 0)
			if last = OffsetAt(buf.Bytes(), b.Width, n); first < 0 || last < first {
				return nil, o.Path.Invalid("offsets from %d to %d", first, last)
			}
		}
		bufs = append(bufs, buf)
	}
	var children []arrow.ArrayData
	shown := n // of each child
	switch a.Rows {
	case shape.Times:
		if a.Size < 0 || a.Size > 0 && n > MaxRows/a.Size {
			return nil, o.Path.Invalid("%d lists of %d", n, a.Size)
		}
		shown *= a.Size
	case shape.Between:
		shown = last
	case shape.Shown:
		shown = 0
	case shape.Runs:
		shown = min(n, 1)
	}
	for i := range a.NumChildren {
		name, dt := a.Child(i)
		c, err := o.array(name, dt, shown)
		if err != nil {
			return nil, err
		}
		if a.Rows == shape.Runs && i == 0 {
			shown = int64(c.Len())
			t := a.Type.(*arrow.RunEndEncodedType)
			if !t.ValidRunEndsType(dt) {
				return nil, o.Path.Invalid("run ends of type %s", dt)
			}
			ends := c.Buffers()[1]
			if n > 0 && (ends == nil || c.NullN() != 0 ||
				signed(ends.Bytes(), int64(dt.(arrow.FixedWidthDataType).Bytes()), shown-1) < n) {
				return nil, o.Path.Invalid("the runs end before row %d", n)
			}
		}
		children = append(children, c)
	}
	var d *array.Data
	if a.Values == nil {
		d = array.NewData(dt, int(n), bufs, children, int(a.Nulls), 0)
	} else {
		dict, err := o.dictionary(a.Values)
		if err != nil {
			return nil, err
		}
		d = array.NewDataWithDictionary(dt, int(n), bufs, int(a.Nulls), 0, dict)
		dict.Release()
	}
	for _, b := range bufs {
		if b != nil {
			b.Release()
		}
	}
	for _, c := range children {
		c.Release()
	}
	o.Path = o.Path[:len(o.Path)-1]
	return d, nil
}

// dictionary opens the next dictionary. If an earlier one is at the same place, both are
// the same array, as they were in the record that was laid out.
func (o *opener) dictionary(dt arrow.DataType) (*array.Data, error) {
	if i, outside, err := o.Outside(); outside {
		if err == nil && o.find == nil {
			err = o.Path.Invalid("no dictionary %d", i)
		}
		if err != nil {
			return nil, err
		}
		d, err := o.find(o.desc.Dictionaries[i], dt)
		if err == nil {
			o.found = append(o.found, d)
		}
		return d, err
	}
	all, begin := o.desc.Buffers, len(o.desc.Buffers)-len(o.spans)
	for o.filled = max(o.filled, begin); o.filled < len(all) && all[o.filled].Length <= 0; o.filled++ {
	}
	first := firstByte{i: o.filled - begin}
	if o.filled < len(all) {
		first.span = all[o.filled]
	}
	e, ok := o.dicts[first]
	if ok && len(e.nodes) <= len(o.nodes) && len(e.spans) <= len(o.spans) &&
		slices.Equal(e.nodes, o.nodes[:len(e.nodes)]) && slices.Equal(e.spans, o.spans[:len(e.spans)]) &&
		equal.Types(e.dt, dt) {
		o.nodes, o.spans = o.nodes[len(e.nodes):], o.spans[len(e.spans):]
		e.data.Retain()
		return e.data, nil
	}
	nodes, spans := o.nodes, o.spans
	d, err := o.array("dictionary", dt, 0)
	if err != nil {
		return nil, err
	}
	nodes, spans = nodes[:len(nodes)-len(o.nodes)], spans[:len(spans)-len(o.spans)]
	if !ok && first.i < len(spans) { // else no span identifies it
		if o.dicts == nil {
			o.dicts = make(map[firstByte]openDict)
		}
		o.dicts[first] = openDict{laidOut{dt, nodes, spans}, d}
	}
	return d, nil
}
