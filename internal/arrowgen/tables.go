package arrowgen

import (
	"encoding/binary"
	"strconv"
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
	g := New(seed)
	g.Plain, g.Nulls = true, 0.02
	types := make([]arrow.DataType, cols)
	data := make([]*array.Data, cols)
	for i := range types {
		types[i] = arrow.BinaryTypes.String
		data[i] = g.letters(types[i], rows, 0, 15)
	}
	return g.table(Schema(types...), rows, data...)
}

// Ints returns a table of cols columns of int64 without nulls.
func Ints(seed uint64, rows, cols int) arrow.RecordBatch {
	g := New(seed)
	g.Plain, g.Nulls = true, 0
	types := make([]arrow.DataType, cols)
	data := make([]*array.Data, cols)
	for i := range types {
		types[i] = arrow.PrimitiveTypes.Int64
		data[i] = g.int64s(rows, -1<<40, 1<<41)
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
	codes := array.NewInt32Builder(memory.DefaultAllocator)
	defer codes.Release()
	codes.AppendValues([]int32{0, 2, 1, 2}, nil)
	indices := codes.NewArray()
	defer indices.Release()
	long := strings.Repeat("a", 4100)
	fields, cols := make([]arrow.Field, n), make([]arrow.Array, n)
	for i := range n {
		words := array.NewStringBuilder(memory.DefaultAllocator)
		words.AppendValues([]string{long, "b", strconv.Itoa(i)}, nil)
		dict := words.NewArray()
		words.Release()
		fields[i] = arrow.Field{Name: "c" + strconv.Itoa(i), Type: dt}
		cols[i] = array.NewDictionaryArray(dt, indices, dict)
		dict.Release()
	}
	rec := array.NewRecordBatch(arrow.NewSchema(fields, nil), cols, 4)
	for _, c := range cols {
		c.Release()
	}
	return rec
}
