package repository

import (
	"context"
	"math"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/bitutil"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/shape"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/arrowmem"
	"github.com/spillway-db/spillway/tier"
)

// maxRanges is how many ranges of rows a Writer keeps before it copies them.
const maxRanges = 1024

// Writer gathers rows of records into batches of about the same size, for example for a merge or a
// partitioning, and puts them into a partition. It is not safe for concurrent use, and must be
// closed.
//
// Rows are first ranges of the caller's records, which the Writer retains. When it has many of
// them, or the bytes of a batch, it copies them into host memory that it has reserved. After an
// error of a copy or a put the Writer can only be closed; the batches that it has put stay.
type Writer struct {
	r         *Repository
	partition int
	schema    *arrow.Schema
	bytes     int64 // of a batch
	opts      []PutOption
	work      *arrowmem.Work
	err       error // the first one

	gathered []arrow.RecordBatch // copies in work, then ranges of the caller's records
	copies   int                 // so many of them are copies
	size     int64               // bytes of all of them, about
}

// Writer returns a Writer of batches of about so many bytes each, which it puts with the options.
// It waits until twice these bytes are reserved in host memory: for the rows, and for the batch
// that is made of them. If one row is larger, it reserves more. Appending rows of a type that
// arrow-go cannot concatenate, such as a union, is an error. The errors are those of Put and of
// arrowmem.NewWork.
func (r *Repository) Writer(
	ctx context.Context, partition int, schema *arrow.Schema, bytes int64, opts ...PutOption,
) (*Writer, error) {
	if schema == nil || bytes < 1 {
		return nil, r.errorf(": a writer needs a schema and at least 1 byte a batch, got %d", bytes)
	}
	if r.m.cfg.Reservations == nil {
		return nil, r.errorf(": a writer needs reservations: %w", tier.ErrNotSupported)
	}
	r.mu.Lock()
	_, err := r.admitLocked(partition, schema)
	r.mu.Unlock()
	if err != nil {
		return nil, err
	}
	inner, done := within(ctx, r.life)
	defer done()
	work, err := arrowmem.NewWork(inner, r.m.cfg.Reservations, r.m.cfg.Heap, arrowmem.WorkOptions{
		Operator: r.key.String() + " writer", In: reservation.AnyInTier(tier.Host), Min: 2 * bytes,
	})
	if err != nil {
		return nil, r.errorf(": %w", err)
	}
	return &Writer{r: r, partition: partition, schema: schema, bytes: bytes, opts: opts, work: work}, nil
}

// Append appends the rows from (inclusive) to to (exclusive) of rec, and puts the batches that are
// complete, for which it waits as Put does. All rows of rec count as equally large. rec stays the
// caller's. The Writer retains it until it has copied the rows.
func (w *Writer) Append(ctx context.Context, rec arrow.RecordBatch, from, to int64) error {
	switch {
	case w.err != nil:
		return w.err
	case rec == nil:
		return w.r.errorf(": appending rows: the record is nil")
	case !w.schema.Equal(rec.Schema()):
		return &SchemaError{Key: w.r.key, Want: w.schema, Got: rec.Schema()}
	case from < 0 || to < from || to > rec.NumRows():
		return w.r.errorf(": appending rows %d to %d of %d", from, to, rec.NumRows())
	}
	row := float64(max(1, bytesOf(rec.Columns()))) / float64(max(1, rec.NumRows()))
	for from < to && w.err == nil {
		end := from + min(to-from, 1+int64(float64(w.bytes-w.size)/row))
		w.gathered = append(w.gathered, rec.NewSlice(from, end))
		w.size += int64(math.Ceil(float64(end-from) * row))
		from = end
		if w.size >= w.bytes {
			_ = w.Flush(ctx)
		} else if len(w.gathered)-w.copies == maxRanges {
			w.copy(ctx, w.copies)
		}
	}
	return w.err
}

// Copy copies the rows that were appended into the Writer's memory, so that it retains no record of the
// caller's: it is called before a Cursor whose rows were appended reads on.
func (w *Writer) Copy(ctx context.Context) error {
	if w.err == nil && len(w.gathered) > w.copies {
		w.copy(ctx, w.copies)
	}
	return w.err
}

// Flush puts the rows that have not been put, if there are any, as a smaller batch.
func (w *Writer) Flush(ctx context.Context) error {
	if w.err != nil || len(w.gathered) == 0 {
		return w.err
	}
	if w.copy(ctx, 0); w.err == nil {
		w.err = w.r.Put(ctx, w.partition, w.gathered[0], w.opts...)
		w.drop()
	}
	return w.err
}

// copy copies the records from the given one on into one in the Writer's memory, which takes their
// place.
func (w *Writer) copy(ctx context.Context, first int) {
	records := w.gathered[first:]
	rows := int64(0)
	for _, rec := range records {
		rows += rec.NumRows()
	}
	var columns []arrow.Array
	defer func() {
		for _, c := range columns {
			c.Release()
		}
	}()
	for i := range w.schema.NumFields() {
		pieces := make([]arrow.Array, len(records))
		for j, rec := range records {
			pieces[j] = rec.Column(i)
		}
		column, err := concatenate(pieces, w.work.Allocator())
		if err != nil {
			w.err = w.r.errorf(": gathering column %d: %w", i, err)
			return
		}
		columns = append(columns, column)
	}
	if w.work.Err() != nil { // the rows are larger than the batches that were asked for
		if w.err = w.work.Grow(ctx, bytesOf(columns)); w.err != nil {
			return
		}
	}
	for _, rec := range records {
		rec.Release()
	}
	w.gathered = append(w.gathered[:first], array.NewRecordBatch(w.schema, columns, rows))
	w.copies = first + 1
}

// concatenate is array.Concatenate, whose array has the bytes of its views in common with the pieces. It
// copies those, too. Only dictionaries are shared.
func concatenate(pieces []arrow.Array, mem memory.Allocator) (_ arrow.Array, err error) {
	defer guard.Error(&err, "concatenating") // views may be wrong
	whole, err := array.Concatenate(pieces, mem)
	if err != nil {
		return nil, err
	}
	defer whole.Release()
	ownViews(whole.Data(), mem)
	return array.MakeFromData(whole.Data()), nil
}

// ownViews gives the views of d, which array.Concatenate has made, buffers of their own, with no more
// than they need.
func ownViews(d arrow.ArrayData, mem memory.Allocator) {
	for _, child := range d.Children() {
		ownViews(child, mem)
	}
	old := d.Buffers()
	if _, ok := shape.Storage(d.DataType()).(arrow.BinaryViewDataType); !ok || len(old) == 2 {
		return
	}
	var long []*arrow.ViewHeader // those that have their bytes in a buffer
	var sizes []int              // of the buffers, as far as offsets reach
	views := arrow.ViewHeaderTraits.CastFromBytes(old[1].Bytes())[d.Offset():][:d.Len()]
	for i := range views {
		v := &views[i]
		switch n := v.Len(); {
		case old[0] != nil && bitutil.BitIsNotSet(old[0].Bytes(), d.Offset()+i):
			*v = arrow.ViewHeader{} // a null
		case v.IsInline():
		case len(sizes) == 0 || sizes[len(sizes)-1] > math.MaxInt32-n:
			long, sizes = append(long, v), append(sizes, n)
		default:
			long = append(long, v)
			sizes[len(sizes)-1] += n
		}
	}
	buffers := old[:2:2]
	for _, n := range sizes {
		b := memory.NewResizableBuffer(mem)
		defer b.Release() // d has a reference of its own
		b.Resize(n)
		buffers = append(buffers, b)
	}
	k, at := 0, 0
	for _, v := range long {
		if at == sizes[k] {
			k, at = k+1, 0
		}
		from, n := old[2+v.BufferIndex()].Bytes()[v.BufferOffset():], v.Len()
		copy(buffers[2+k].Bytes()[at:], from[:n])
		v.SetIndexOffset(int32(k), int32(at))
		at += n
	}
	d.(*array.Data).Reset(d.DataType(), d.Len(), buffers, nil, d.NullN(), d.Offset())
}

// bytesOf returns about how many bytes the rows of arrays have, without dictionaries, which are
// shared. The rows of a slice count as large as the other rows in its buffers.
func bytesOf(columns []arrow.Array) (n int64) {
	for _, c := range columns {
		n += bytesIn(c.Data())
	}
	return n
}

func bytesIn(d arrow.ArrayData) int64 {
	s, _ := shape.Of(d.DataType())
	bytes, rows := 0, math.MaxInt // what the buffers and the children have
	for i, b := range d.Buffers() {
		if b == nil {
			continue
		}
		bytes += b.Len()
		if !s.HasValidity {
			i-- // arrow-go leaves room for a validity
		}
		if i < 0 || i >= len(s.Buffers) {
			continue
		}
		switch w := int(s.Buffers[i].Width); s.Buffers[i].Role {
		case shape.Validity, shape.Bits:
			rows = min(rows, 8*b.Len())
		case shape.Data:
		case shape.Offsets:
			rows = min(rows, b.Len()/w-1)
		default:
			rows = min(rows, b.Len()/max(1, w))
		}
	}
	for _, child := range d.Children() {
		bytes += int(bytesIn(child))
		switch s.Rows {
		case shape.Same:
			rows = min(rows, child.Len())
		case shape.Times:
			rows = min(rows, child.Len()/max(1, int(s.Size)))
		}
	}
	if rows <= d.Len() || rows == math.MaxInt {
		return int64(bytes)
	}
	return int64(float64(bytes) * float64(d.Len()) / float64(rows))
}

// drop releases what the Writer has gathered.
func (w *Writer) drop() {
	for _, rec := range w.gathered {
		rec.Release()
	}
	w.gathered, w.copies, w.size = nil, 0, 0
}

// Close releases the Writer's memory, and drops the rows that Flush has not put. A second Close is
// tier.ErrReleased.
func (w *Writer) Close() error {
	w.drop()
	w.err = w.r.errorf(": the writer is closed: %w", tier.ErrReleased)
	return w.work.Close()
}
