package repository

import (
	"context"
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/arrowmem"
	"github.com/spillway-db/spillway/tier"
)

// A Writer keeps at most maxSlices ranges of rows before it copies them. It copies the first
// firstRows of a batch to see how large rows are.
const (
	maxSlices = 1024
	firstRows = 1024
)

// Writer gathers rows of records into batches of about the same size, for example for a merge or a
// partitioning, and puts them into a partition. It is not safe for concurrent use, and must be
// closed.
//
// Rows are first ranges of the caller's records, which the Writer retains. They are copied into
// host memory that the Writer has reserved when there are enough of them. When these bytes are
// those of a batch, the Writer puts it. After an error the Writer can only be closed; the batches
// that it has put stay.
type Writer struct {
	r         *Repository
	partition int
	schema    *arrow.Schema
	bytes     int64 // of a batch
	opts      []PutOption
	work      *arrowmem.Work
	err       error // the first one

	slices []arrow.RecordBatch // ranges of the caller's records
	room   int64               // rows, until it is looked again how large they are
	parts  []arrow.RecordBatch // copies in work
	size   int64               // bytes of the parts
	rows   int64               // in the parts
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
		return nil, fmt.Errorf("repository %s: a writer needs a schema and at least 1 byte a batch, got %d", r.key, bytes)
	}
	if r.m.cfg.Reservations == nil {
		return nil, fmt.Errorf("repository %s: a writer needs reservations: %w", r.key, tier.ErrNotSupported)
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
		return nil, fmt.Errorf("repository %s: %w", r.key, err)
	}
	return &Writer{
		r: r, partition: partition, schema: schema, bytes: bytes, opts: opts, work: work, room: firstRows,
	}, nil
}

// Append appends the rows from (inclusive) to to (exclusive) of rec, and puts the batches that are
// complete, for which it waits as Put does. rec stays the caller's. The Writer retains it until it
// has copied the rows.
func (w *Writer) Append(ctx context.Context, rec arrow.RecordBatch, from, to int64) error {
	switch {
	case w.err != nil:
		return w.err
	case rec == nil || !w.schema.Equal(rec.Schema()):
		err := &SchemaError{Key: w.r.key, Want: w.schema}
		if rec != nil {
			err.Got = rec.Schema()
		}
		return err
	case from < 0 || to < from || to > rec.NumRows():
		return fmt.Errorf("repository %s: appending rows %d to %d of %d", w.r.key, from, to, rec.NumRows())
	}
	for from < to && w.err == nil {
		end := from + min(to-from, w.room)
		w.slices = append(w.slices, rec.NewSlice(from, end))
		w.room -= end - from
		from = end
		if w.room == 0 || len(w.slices) == maxSlices {
			w.gather(ctx, w.bytes)
		}
	}
	return w.err
}

// Flush puts the rows that have not been put, if there are any, as a smaller batch.
func (w *Writer) Flush(ctx context.Context) error {
	if w.err == nil {
		w.gather(ctx, 0)
	}
	return w.err
}

// gather copies the slices into the Writer's memory, and puts a batch of what is there if it has at
// least so many bytes.
func (w *Writer) gather(ctx context.Context, least int64) {
	if len(w.slices) > 0 {
		part := w.concatenate(ctx, w.slices)
		release(w.slices)
		w.slices = nil
		if part == nil {
			return
		}
		w.parts = append(w.parts, part)
		w.rows += part.NumRows()
		for _, c := range part.Columns() {
			w.size += bytesOf(c.Data())
		}
	}
	if w.size < least || len(w.parts) == 0 {
		w.room = max(1, (w.bytes-w.size)/max(1, w.size/max(1, w.rows)))
		return
	}
	if rec := w.concatenate(ctx, w.parts); rec != nil {
		w.err = w.r.Put(ctx, w.partition, rec, w.opts...)
		rec.Release()
	}
	release(w.parts)
	w.parts, w.size, w.rows, w.room = nil, 0, 0, firstRows
}

// concatenate copies the rows of records into one in the Writer's memory. It returns nil, and sets
// err, if that fails.
func (w *Writer) concatenate(ctx context.Context, records []arrow.RecordBatch) arrow.RecordBatch {
	var columns []arrow.Array
	defer func() {
		for _, c := range columns {
			c.Release()
		}
	}()
	rows, size := int64(0), int64(0)
	for _, rec := range records {
		rows += rec.NumRows()
	}
	for i := range w.schema.NumFields() {
		pieces := make([]arrow.Array, len(records))
		for j, rec := range records {
			pieces[j] = rec.Column(i)
		}
		column, err := array.Concatenate(pieces, w.work.Allocator())
		if err != nil {
			w.err = fmt.Errorf("repository %s: gathering column %d: %w", w.r.key, i, err)
			return nil
		}
		columns = append(columns, column)
		size += bytesOf(column.Data())
	}
	if w.work.Err() != nil { // the rows are larger than the batches that were asked for
		if w.err = w.work.Grow(ctx, size); w.err != nil {
			return nil
		}
	}
	return array.NewRecordBatch(w.schema, columns, rows)
}

// bytesOf returns the bytes of an array's own buffers. Dictionaries are shared.
func bytesOf(d arrow.ArrayData) (n int64) {
	for _, b := range d.Buffers() {
		if b != nil {
			n += int64(b.Len())
		}
	}
	for _, c := range d.Children() {
		n += bytesOf(c)
	}
	return n
}

func release(records []arrow.RecordBatch) {
	for _, rec := range records {
		rec.Release()
	}
}

// Close releases the Writer's memory, and drops the rows that Flush has not put. A second Close is
// tier.ErrReleased.
func (w *Writer) Close() error {
	release(w.slices)
	release(w.parts)
	w.slices, w.parts = nil, nil
	w.err = fmt.Errorf("repository %s: the writer is closed: %w", w.r.key, tier.ErrReleased)
	return w.work.Close()
}
