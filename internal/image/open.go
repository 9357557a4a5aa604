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

// Open returns the record whose image is in extents. Its Arrow buffers are the extents' memory:
// nothing is copied, and the memory must not change or go until release is called. The caller must
// release the record. release is called exactly once: when the last buffer of the last array is
// released, on the goroutine that does it; before Open returns if no array has a byte, or on an
// error.
//
// dictionaries are the extents of the images that d.AllDictionaries lists, in that order; they must
// stay as long. Columns that use the same dictionary share one array of it. A dictionary that
// extends another is assembled in one piece on the Go heap, because an Arrow array cannot have a
// buffer in two parts.
//
// The extents' lengths must add up to d.Body, and no buffer may be in two of them. Open checks the
// descriptor against the schema and the extents, as far as needed to build the arrays without
// reading out of range. A mismatch is an *InvalidError. It does not look at values: Verify checks
// that the bytes are those that were laid out, and array.ValidateFull that they make sense.
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
	// A dictionary is opened when the walk meets its first user. Others get the same array, unless
	// they use it as another type (of an extension, for example).
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
		// opened has a reference of its own, so that the array outlives the first user's.
		if err == nil && opened[dict] == nil {
			data.Retain()
			opened[dict] = data
		}
		return data, err
	}
	return OpenRows(d, nil, extents, l, find)
}

// Finder returns the opened array of a dictionary that is an image of its own, with the type that
// its user has, and a reference that the caller must release. The implementations are those of Open
// and of the cache of shared dictionaries in package internal/transfer.
type Finder func(d *batch.Descriptor, dt arrow.DataType) (*array.Data, error)

// OpenRows opens the record that d describes. Columns that could not be cut by rows have more rows
// than the record: column i is sliced to d.Rows rows from row skip[i] on. If skip is nil, all
// columns have d.Rows. OpenRows takes over the lease's first count: the lease ends with the last
// buffer of the record, or on an error.
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
		// Columns that were cut begin at their first row; others are skipped to it.
		n, from := int64(a.Len()), int64(0)
		if skip != nil {
			from = skip[i]
		}
		if skip == nil && n != d.Rows || from < 0 || from > n || n-from < d.Rows {
			return nil, Path{d.Schema.Field(i).Name}.Invalid("%d rows in a record of %d", n-from, d.Rows)
		}
		// A column that was read whole is sliced to the rows that are wanted.
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
	// The opener's own count, which kept the lease from ending while arrays were built and
	// released.
	l.Free(nil)
	return rec, nil
}

// OpenDictionary opens the array of a dictionary's image as type dt. Its buffers are counted in the
// lease, but the opener's own count stays the caller's. The caller must release the array.
func OpenDictionary(
	d *batch.Descriptor, dt arrow.DataType, extents [][]byte, l *Lease, find Finder,
) (*array.Data, error) {
	arrays, err := open(d, []arrow.Field{{Name: "dictionary", Type: dt}}, extents, l, find)
	if err != nil {
		return nil, err
	}
	return arrays[0], nil
}

// Lease gives memory back when no Arrow buffer needs it any more. It counts the open buffers, and
// is their allocator: arrow-go calls an allocator's Free when the last reference to a buffer ends.
// It counts one more for the opener, until all arrays are made. Buffers may be released on any
// goroutine.
type Lease struct {
	// ended is apart from the count because End may come first: an error ends the lease while
	// arrays that were made before are still to be released.
	buffers atomic.Int64
	ended   atomic.Bool
	release func()
	// Hold records in the space's books who keeps the memory; its zero value is none.
	Hold books.Hold
	// Unleased is how many bytes at the beginning of the body need no lease, because they are on
	// the Go heap; see Rows.
	Unleased int64
}

// NewLease returns a lease with one count, the opener's. release may be nil.
func NewLease(release func()) *Lease {
	l := &Lease{release: release}
	l.buffers.Store(1)
	return l
}

// Free counts a buffer as released, and ends the lease after the last one. It implements
// memory.Allocator.
func (l *Lease) Free([]byte) {
	if l.buffers.Add(-1) == 0 {
		l.End()
	}
}

// End gives the memory back; it does so once, and further calls do nothing.
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

// opener opens the arrays of one body. It walks the schema with a Cursor.
type opener struct {
	Cursor
	extents [][]byte
	lease   *Lease
	find    Finder
	// found has the arrays that find returned. The arrays opened so far own the references; after
	// an error nobody releases those arrays, and open releases the dictionaries itself.
	found []*array.Data
	// dicts has the dictionaries in the body that were opened, so that columns that shared one in
	// the record share it again.
	dicts  map[firstByte]openDict
	filled int // all spans before this index of Descriptor.Buffers have been taken or have no bytes
}

// openDict is a dictionary in the body that was opened, and what it was opened from.
type openDict struct {
	laidOut
	data *array.Data
}

// firstByte identifies a dictionary in the body by its first span that has bytes, and that span's
// place among the dictionary's spans. Two dictionaries of one body differ in it, because no two
// buffers are at the same place, unless they are the same in the descriptor.
type firstByte struct {
	span payload.Span
	i    int // among the dictionary's spans
}

// open opens the arrays of fields, which must be all that d has. On an error no array and no
// reference to a dictionary remains; the lease may still have counts of buffers, so the caller must
// end it.
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
	// The walk takes everything that the descriptor has, in the order of the schema.
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

// noBytes is what an empty buffer has. It needs no memory and is not counted in the lease.
var noBytes = []byte{}

// buffer returns the buffer at s, or nil if it is absent. It must have at least need bytes, be in
// one extent, and begin at a multiple of 64, as consumers of Arrow buffers may assume.
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
	// Memory of Go's is kept by the slice itself.
	if s.Offset < o.lease.Unleased {
		return memory.NewBufferBytes(b), nil
	}
	o.lease.buffers.Add(1)
	return memory.NewBufferWithAllocator(b, o.lease), nil
}

// array opens the next array, of type dt, which must have at least rows rows: those that its parent
// refers to. The caller must release the data.
//
// For each type it checks the lengths of the buffers, and those values by which other lengths are
// determined: the first and last offset, and the end of the last run. So arrow-go's accessors stay
// in range as long as the values in between are sound.
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
	// First the buffers. Offsets come before the Data that they bound.
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
			// If all rows are null, no buffer but the validity has to be there.
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
		// The bounds of what follows are values, so they are read here.
		if b.Role == shape.Offsets && n > 0 && buf != nil {
			first := OffsetAt(buf.Bytes(), b.Width, 0)
			if last = OffsetAt(buf.Bytes(), b.Width, n); first < 0 || last < first {
				return nil, o.Path.Invalid("offsets from %d to %d", first, last)
			}
		}
		bufs = append(bufs, buf)
	}
	// Then the children, with the number of values that the array needs of each. List views and
	// dense unions would have to be read in full to know it, so their children may have any length.
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
		// The ends are checked below, when their array is open: there must be a run if there is a row.
		shown = min(n, 1)
	}
	for i := range a.NumChildren {
		name, dt := a.Child(i)
		c, err := o.array(name, dt, shown)
		if err != nil {
			return nil, err
		}
		// The runs are child 0. The values, child 1, must be as many.
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
	// Last the dictionary. NewData retains what it gets, so the references made here are released
	// below.
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
	// The dictionary is in the body. Its first span with bytes identifies it. filled only grows, so
	// looking for it takes a linear time for the whole descriptor, also if many dictionaries have
	// no bytes.
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
	// It is new: open it, and remember what it was opened from.
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
