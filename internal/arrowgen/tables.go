package arrowgen

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// Flights returns a table like the usual flights data: a timestamp, delay and
// distance as int64, origin and destination as large strings of three letters,
// all nullable, with 2 % nulls. About 47 bytes a row.
func Flights(seed uint64, rows int) arrow.RecordBatch {
	g := New(seed)
	g.Plain, g.Nulls = true, 0.02
	schema := arrow.NewSchema([]arrow.Field{
		{Name: "date", Type: &arrow.TimestampType{Unit: arrow.Microsecond}, Nullable: true},
		{Name: "delay", Type: arrow.PrimitiveTypes.Int64, Nullable: true},
		{Name: "distance", Type: arrow.PrimitiveTypes.Int64, Nullable: true},
		{Name: "origin", Type: arrow.BinaryTypes.LargeString, Nullable: true},
		{Name: "destination", Type: arrow.BinaryTypes.LargeString, Nullable: true},
	}, nil)
	const start = 978307200e6 // 2001, as vega's flights
	return g.table(schema, rows,
		g.int64s(rows, start, 90*86400e6), g.int64s(rows, -60, 1500), g.int64s(rows, 31, 4931),
		g.letters(arrow.BinaryTypes.LargeString, rows, 3, 3), g.letters(arrow.BinaryTypes.LargeString, rows, 3, 3))
}

// Strings returns a table of cols columns of short strings, up to 15 bytes,
// nullable, with 2 % nulls.
func Strings(seed uint64, rows, cols int) arrow.RecordBatch {
	return columns(seed, 0.02, rows, cols, func(g *Gen) *array.Data { return g.letters(arrow.BinaryTypes.String, rows, 0, 15) })
}

// Ints returns a table of cols columns of int64 without nulls.
func Ints(seed uint64, rows, cols int) arrow.RecordBatch {
	return columns(seed, 0, rows, cols, func(g *Gen) *array.Data { return g.int64s(rows, -1<<40, 1<<41) })
}

// columns returns a table of cols columns of one type.
func columns(seed uint64, nulls float64, rows, cols int, column func(*Gen) *array.Data) arrow.RecordBatch {
	g := New(seed)
	g.Plain, g.Nulls = true, nulls
	types, data := make([]arrow.DataType, cols), make([]*array.Data, cols)
	for i := range types {
		data[i] = column(g)
		types[i] = data[i].DataType()
	}
	return g.table(Schema(types...), rows, data...)
}

func (g *Gen) table(schema *arrow.Schema, rows int, data ...*array.Data) arrow.RecordBatch {
	cols := make([]arrow.Array, len(data))
	for i, d := range data {
		d.Reset(schema.Field(i).Type, rows, d.Buffers(), nil, d.NullN(), 0)
		cols[i] = array.MakeFromData(d)
		d.Release()
		defer cols[i].Release()
	}
	return array.NewRecordBatch(schema, cols, int64(rows))
}

func (g *Gen) int64s(n int, from, span int64) *array.Data {
	values := g.buffer(8 * n)
	b := values.Bytes()
	for i := range n {
		binary.LittleEndian.PutUint64(b[8*i:], uint64(from+g.Rng.Int64N(span)))
	}
	valid, nulls := g.validity(n)
	return finish(arrow.PrimitiveTypes.Int64, n, nulls, []*memory.Buffer{valid, values})
}

func (g *Gen) letters(dt arrow.DataType, n, shortest, longest int) *array.Data {
	wide, width := dt.ID() == arrow.LARGE_STRING, 4
	if wide {
		width = 8
	}
	values := make([]byte, 0, n*longest)
	ends := g.buffer((n + 1) * width)
	offsets := putOffset(ends.Bytes()[:0], wide, 0)
	for range n {
		word := g.Rng.Uint64()
		var text [16]byte // of the stack, where the race detector does not look at each byte
		m := shortest + g.Rng.IntN(longest-shortest+1)
		for i := range m {
			text[i] = 'A' + byte(word%26)
			word = word>>4 | word<<60
		}
		values = append(values, text[:m]...)
		offsets = putOffset(offsets, wide, int64(len(values)))
	}
	valid, nulls := g.validity(n)
	return finish(dt, n, nulls, []*memory.Buffer{valid, ends, g.bytes(values)})
}

// Coded returns a record of four rows with n columns, each with a dictionary of its own of
// more than 4 KiB.
func Coded(n int) arrow.RecordBatch {
	dt := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.BinaryTypes.String}
	fields, cols := make([]arrow.Field, n), make([]arrow.Array, n)
	for i := range n {
		words := fmt.Sprintf(`["%s", "b", "%d"]`, strings.Repeat("a", 4100), i)
		col, err := array.DictArrayFromJSON(memory.DefaultAllocator, dt, "[0, 2, 1, 2]", words)
		if err != nil {
			panic(err)
		}
		defer col.Release()
		fields[i], cols[i] = arrow.Field{Name: fmt.Sprint("c", i), Type: dt}, col
	}
	return array.NewRecordBatch(arrow.NewSchema(fields, nil), cols, 4)
}
