// Package gen makes the table that spillbench runs on when it is given no file:
// shaped like the lineitem table of TPC-H, with keys, numbers, decimals, dates,
// dictionaries, short and long text, and nulls.
//
// Each value is a function of the seed, the column and the row alone: a counter that goes through
// splitmix64's finalizer. So the same seed gives the same rows on every machine, however they are
// cut into batches.
//
// A Table belongs to one goroutine and takes no locks. Its batches belong to
// the caller. Several goroutines can each make a part of the same table.
package gen

import (
	"context"
	"fmt"
	"io"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// RowBytes is about how many bytes a row takes as Arrow. It is the measured
// mean, from which callers work out how many rows make a table of a size; a test
// holds it to a tenth.
const RowBytes = 169

// Config describes a table. RowsPerBatch must be above 0.
type Config struct {
	Seed         uint64
	Rows         int64
	RowsPerBatch int64
}

// Table is the generated table, read from front to back.
type Table struct {
	cfg  Config
	next int64
	step int64 // from the first row of a batch to that of the next

	pool         []byte            // the text that comments are pieces of
	dictionaries []arrow.ArrayData // by column; all batches share them
}

// New returns the table at its first row.
func New(cfg Config) (*Table, error) {
	if cfg.Rows < 0 || cfg.RowsPerBatch <= 0 {
		return nil, fmt.Errorf("gen: %d rows in batches of %d", cfg.Rows, cfg.RowsPerBatch)
	}
	t := &Table{cfg: cfg, step: cfg.RowsPerBatch, pool: commentPool(cfg.Seed)}
	t.dictionaries = make([]arrow.ArrayData, len(columns))
	for i, c := range columns {
		if c.words == nil {
			continue
		}
		b := array.NewStringBuilder(memory.DefaultAllocator)
		b.AppendValues(c.words, nil)
		t.dictionaries[i] = b.NewArray().Data()
		b.Release()
	}
	return t, nil
}

// Again returns the same table at its first row, which may be read at the same time. It takes no
// time, as New does for the text.
func (t *Table) Again() *Table { return t.Part(0, 1) }

// Part is Again for every of-th batch from number on, which is 0 for the first.
func (t *Table) Part(number, of int64) *Table {
	part := *t
	part.next, part.step = number*t.cfg.RowsPerBatch, of*t.cfg.RowsPerBatch
	return &part
}

// BatchBytes returns about how many bytes a batch takes as Arrow.
func (t *Table) BatchBytes() int64 { return min(t.cfg.Rows, t.cfg.RowsPerBatch) * RowBytes }

// Schema returns the schema of all batches.
func (t *Table) Schema() *arrow.Schema { return schema }

// Next returns the next batch, which the caller must Release, or io.EOF.
func (t *Table) Next(ctx context.Context) (arrow.RecordBatch, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	if t.next >= t.cfg.Rows {
		return nil, io.EOF
	}
	n := min(t.cfg.RowsPerBatch, t.cfg.Rows-t.next)
	cols := make([]arrow.Array, len(columns))
	for i, c := range columns {
		cols[i] = c.make(&builder{column: c, table: t, number: uint64(i), first: uint64(t.next), n: int(n)})
		defer cols[i].Release()
	}
	t.next += t.step
	return array.NewRecordBatch(schema, cols, n), nil
}

// Close does nothing; it makes a Table a source like a file.
func (t *Table) Close() error { return nil }
