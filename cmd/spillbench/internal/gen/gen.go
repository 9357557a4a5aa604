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
	text text
	dict dictionaries
}

// New returns the table at its first row.
func New(cfg Config) (*Table, error) {
	if cfg.Rows < 0 || cfg.RowsPerBatch <= 0 {
		return nil, fmt.Errorf("gen: %d rows in batches of %d", cfg.Rows, cfg.RowsPerBatch)
	}
	return &Table{cfg: cfg, step: cfg.RowsPerBatch, text: newText(cfg.Seed), dict: newDictionaries()}, nil
}

// Again returns the same table at its first row, which may be read at the same time. It takes no
// time, as New does for the text.
func (t *Table) Again() *Table { return t.Part(0, 1) }

// Part is Again for every of-th batch from number on, which is 0 for the first.
func (t *Table) Part(number, of int64) *Table {
	return &Table{cfg: t.cfg, next: number * t.cfg.RowsPerBatch, step: of * t.cfg.RowsPerBatch, text: t.text, dict: t.dict}
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
	rec := t.batch(t.next, int(n))
	t.next += t.step
	return rec, nil
}

// Close does nothing; it makes a Table a source like a file.
func (t *Table) Close() error { return nil }

// batch makes n rows from row first on.
func (t *Table) batch(first int64, n int) arrow.RecordBatch {
	b := builder{seed: t.cfg.Seed, first: uint64(first), n: n}
	cols := []arrow.Array{
		b.int64s(orderKey),
		b.int64s(partKey),
		b.int64s(supplierKey),
		b.int32s(lineNumber),
		b.decimals(quantity),
		b.decimals(extendedPrice),
		b.decimals(discount),
		b.decimals(tax),
		b.dictionary(returnFlag, t.dict.flags),
		b.words(lineStatus, statuses),
		b.dates(shipDate),
		b.dates(commitDate),
		b.dates(receiptDate),
		b.words(shipInstruct, instructions),
		b.dictionary(shipMode, t.dict.modes),
		b.doubles(weight),
		b.comments(comment, &t.text),
	}
	defer func() {
		for _, c := range cols {
			c.Release()
		}
	}()
	return array.NewRecordBatch(schema, cols, int64(n))
}

// column numbers the columns, and with the seed makes each a sequence of its own.
type column uint64

const (
	orderKey column = iota
	partKey
	supplierKey
	lineNumber
	quantity
	extendedPrice
	discount
	tax
	returnFlag
	lineStatus
	shipDate
	commitDate
	receiptDate
	shipInstruct
	shipMode
	weight
	comment
	commentText // where in the text pool a comment starts
	nulls       // added to a column's number for the sequence that says which rows are null
)

var (
	price   = &arrow.Decimal128Type{Precision: 15, Scale: 2}
	coded   = &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int8, ValueType: arrow.BinaryTypes.String}
	columns = []arrow.Field{
		orderKey:      {Name: "l_orderkey", Type: arrow.PrimitiveTypes.Int64},
		partKey:       {Name: "l_partkey", Type: arrow.PrimitiveTypes.Int64},
		supplierKey:   {Name: "l_suppkey", Type: arrow.PrimitiveTypes.Int64, Nullable: true},
		lineNumber:    {Name: "l_linenumber", Type: arrow.PrimitiveTypes.Int32},
		quantity:      {Name: "l_quantity", Type: price},
		extendedPrice: {Name: "l_extendedprice", Type: price},
		discount:      {Name: "l_discount", Type: price},
		tax:           {Name: "l_tax", Type: price, Nullable: true},
		returnFlag:    {Name: "l_returnflag", Type: coded},
		lineStatus:    {Name: "l_linestatus", Type: arrow.BinaryTypes.String},
		shipDate:      {Name: "l_shipdate", Type: arrow.FixedWidthTypes.Date32},
		commitDate:    {Name: "l_commitdate", Type: arrow.FixedWidthTypes.Date32},
		receiptDate:   {Name: "l_receiptdate", Type: arrow.FixedWidthTypes.Date32, Nullable: true},
		shipInstruct:  {Name: "l_shipinstruct", Type: arrow.BinaryTypes.String},
		shipMode:      {Name: "l_shipmode", Type: coded, Nullable: true},
		weight:        {Name: "l_weight", Type: arrow.PrimitiveTypes.Float64, Nullable: true},
		comment:       {Name: "l_comment", Type: arrow.BinaryTypes.String, Nullable: true},
	}
	schema = arrow.NewSchema(columns, nil)
)

// The words of TPC-H's clause 4.2.2.13.
var (
	flags        = []string{"A", "N", "R"}
	statuses     = []string{"F", "O"}
	modes        = []string{"AIR", "FOB", "MAIL", "RAIL", "REG AIR", "SHIP", "TRUCK"}
	instructions = []string{"COLLECT COD", "DELIVER IN PERSON", "NONE", "TAKE BACK RETURN"}
)

// poolSize is the length of the text that comments are cut from, as TPC-H's
// dbgen does it; 1 MiB stays in the cache, and no row repeats another's by plan.
const poolSize = 1 << 20

var vocabulary = []string{
	"accounts", "across", "according", "after", "against", "along", "asymptotes", "beans", "blithely", "bold",
	"carefully", "courts", "daringly", "deposits", "detect", "dependencies", "ducks", "escapades", "even", "excuses",
	"express", "final", "fluffily", "foxes", "furiously", "grouches", "haggle", "ideas", "instructions", "ironic",
	"nag", "packages", "pending", "pinto", "platelets", "quickly", "quietly", "regular", "requests", "ruthlessly",
	"silent", "sleep", "slyly", "special", "theodolites", "unusual", "warhorses", "warthogs", "waters", "wake",
}

// text is the pool that comments are cut from.
type text struct{ pool []byte }

func newText(seed uint64) text {
	pool := make([]byte, 0, poolSize+64)
	x := mix(seed ^ step)
	for len(pool) < poolSize {
		w := mix(x)
		pool = append(pool, vocabulary[below(w, uint64(len(vocabulary)))]...)
		if w&15 == 0 {
			pool = append(pool, '.')
		}
		pool = append(pool, ' ')
		x += step
	}
	return text{pool}
}

// dictionaries are what the coded columns share over all batches.
type dictionaries struct{ flags, modes arrow.Array }

func newDictionaries() dictionaries {
	return dictionaries{flags: stringArray(flags), modes: stringArray(modes)}
}

func stringArray(values []string) arrow.Array {
	b := array.NewStringBuilder(memory.DefaultAllocator)
	defer b.Release()
	b.AppendValues(values, nil)
	return b.NewArray()
}
