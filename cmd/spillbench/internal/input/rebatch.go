package input

import (
	"context"
	"io"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// rebatcher cuts and joins what src gives into batches of rows rows, the last
// one smaller.
type rebatcher struct {
	src  decoder
	rows int64
	mem  *limitedAllocator

	pending []arrow.RecordBatch // owned; together fewer than rows rows, except for the one that was just read
	have    int64               // rows in pending
	eof     bool
}

func (r *rebatcher) schema() *arrow.Schema { return r.src.schema() }

func (r *rebatcher) next(ctx context.Context) (arrow.RecordBatch, error) {
	for r.have < r.rows && !r.eof {
		rec, err := r.src.next(ctx)
		switch {
		case err == io.EOF:
			r.eof = true
		case err != nil:
			return nil, err
		case rec.NumRows() == 0:
			rec.Release()
		default:
			r.pending = append(r.pending, rec)
			r.have += rec.NumRows()
		}
	}
	if r.have == 0 {
		return nil, io.EOF
	}
	parts := r.take(min(r.rows, r.have))
	if len(parts) == 1 {
		return parts[0], nil
	}
	joined, err := join(parts, r.mem)
	if err == nil {
		release(parts)
		return joined, nil
	}
	if r.mem.noRoom != nil {
		release(parts)
		return nil, err
	}
	// A type that arrow-go cannot join, such as a union: the parts stay batches of their own.
	r.pending = append(parts[1:], r.pending...)
	for _, p := range parts[1:] {
		r.have += p.NumRows()
	}
	return parts[0], nil
}

// take removes n rows from the front of pending and returns them in pieces,
// which belong to the caller.
func (r *rebatcher) take(n int64) []arrow.RecordBatch {
	var parts []arrow.RecordBatch
	r.have -= n
	for n > 0 {
		first := r.pending[0]
		if first.NumRows() <= n {
			parts = append(parts, first)
			r.pending = r.pending[1:]
			n -= first.NumRows()
			continue
		}
		parts = append(parts, first.NewSlice(0, n))
		r.pending[0] = first.NewSlice(n, first.NumRows())
		first.Release()
		n = 0
	}
	return parts
}

func (r *rebatcher) close() error {
	release(r.pending)
	r.pending, r.have = nil, 0
	return r.src.close()
}

// join concatenates column by column.
func join(parts []arrow.RecordBatch, mem memory.Allocator) (rec arrow.RecordBatch, err error) {
	schema := parts[0].Schema()
	cols := make([]arrow.Array, 0, schema.NumFields())
	defer func() {
		for _, c := range cols {
			c.Release()
		}
	}()
	rows := int64(0)
	for _, p := range parts {
		rows += p.NumRows()
	}
	err = guard(func() error {
		for i := range schema.NumFields() {
			arrays := make([]arrow.Array, len(parts))
			for j, p := range parts {
				arrays[j] = p.Column(i)
			}
			col, err := array.Concatenate(arrays, mem)
			if err != nil {
				return err
			}
			cols = append(cols, col)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return array.NewRecordBatch(schema, cols, rows), nil
}

func release(recs []arrow.RecordBatch) {
	for _, r := range recs {
		r.Release()
	}
}
