// Package gen generates the table on which spillbench runs without input files. It has the shape of
// TPC-H's lineitem table: keys, numbers, decimals, dates, dictionaries, short and long text, and nulls.
//
// A value depends only on the seed, the column and the row: splitmix64's finalizer hashes a counter.
// So a seed gives the same rows on every machine and in batches of any size.
//
// A Table belongs to one goroutine and takes no locks. Its batches belong to the caller. Several
// goroutines can each generate a part of the same table.
package gen

import (
	"context"
	"fmt"
	"io"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// RowBytes is the mean size of a row in bytes as Arrow, as measured: a test fails if it is wrong by
// more than 10 %. Callers compute from it how many rows a table of some size has.
const RowBytes = 169

// Config describes a table. RowsPerBatch must be above 0.
type Config struct {
	Seed         uint64
	Rows         int64
	RowsPerBatch int64
}

// Table is a generated table, or a part of it. Callers read it once, from front to back.
type Table struct {
	cfg  Config
	next int64
	step int64 // from the first row of a batch to that of the next

	pool         string        // comments are substrings of it
	dictionaries []arrow.Array // by column; all batches share them
}

// New returns the table at its first row.
func New(cfg Config) (*Table, error) {
	if cfg.Rows < 0 || cfg.RowsPerBatch <= 0 {
		return nil, fmt.Errorf("gen: %d rows in batches of %d", cfg.Rows, cfg.RowsPerBatch)
	}
	t := &Table{cfg: cfg, step: cfg.RowsPerBatch, pool: commentPool(cfg.Seed)}
	t.dictionaries = make([]arrow.Array, len(columns))
	for i, c := range columns {
		if c.words == nil {
			continue
		}
		b := array.NewStringBuilder(memory.DefaultAllocator)
		b.AppendValues(c.words, nil)
		t.dictionaries[i] = b.NewArray()
		b.Release()
	}
	return t, nil
}

// Again returns the same table at its first row, for another reader.
func (t *Table) Again() *Table { return t.Part(0, 1) }

// Part returns every of-th batch of the table, beginning with batch number, which counts from 0. It is
// fast: all parts share the text that New generates.
func (t *Table) Part(number, of int64) *Table {
	part := *t
	part.next, part.step = number*t.cfg.RowsPerBatch, of*t.cfg.RowsPerBatch
	return &part
}

// BatchBytes returns the approximate size of a batch in bytes as Arrow.
func (t *Table) BatchBytes() int64 { return min(t.cfg.Rows, t.cfg.RowsPerBatch) * RowBytes }

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

// Close does nothing. With it a Table is a source like a file.
func (t *Table) Close() error { return nil }
