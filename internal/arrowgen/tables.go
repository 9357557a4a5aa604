package arrowgen

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// Flights returns a table like the well-known flights data: a timestamp, delay and distance as
// int64, origin and destination as large strings of three letters, all nullable, with 2 % nulls. It
// takes about 47 bytes a row.
func Flights(seed uint64, rows int) arrow.RecordBatch {
	g := New(seed)
	g.Plain, g.Nulls = true, 0.02
	date, number := &arrow.TimestampType{Unit: arrow.Microsecond}, arrow.PrimitiveTypes.Int64
	airport := arrow.BinaryTypes.LargeString
	schema := arrow.NewSchema([]arrow.Field{
		{Name: "date", Type: date, Nullable: true},
		{Name: "delay", Type: number, Nullable: true},
		{Name: "distance", Type: number, Nullable: true},
		{Name: "origin", Type: airport, Nullable: true},
		{Name: "destination", Type: airport, Nullable: true},
	}, nil)
	const start = 978307200e6 // 2001, as in vega's flights
	return recordOf(schema, rows,
		g.int64s(date, rows, start, 90*86400e6), g.int64s(number, rows, -60, 1500), g.int64s(number, rows, 31, 4931),
		g.letters(airport, rows, 3, 3), g.letters(airport, rows, 3, 3))
}

// Strings returns a table of cols nullable columns of strings of up to 15 bytes, with 2 % nulls.
func Strings(seed uint64, rows, cols int) arrow.RecordBatch {
	return columns(seed, 0.02, rows, cols, func(g *Gen) *array.Data {
		return g.letters(arrow.BinaryTypes.String, rows, 0, 15)
	})
}

// Ints returns a table of cols columns of int64 without nulls.
func Ints(seed uint64, rows, cols int) arrow.RecordBatch {
	return columns(seed, 0, rows, cols, func(g *Gen) *array.Data {
		return g.int64s(arrow.PrimitiveTypes.Int64, rows, -1<<40, 1<<41)
	})
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
	return recordOf(Schema(types...), rows, data...)
}

// int64s returns n numbers of at least from and less than from+span.
func (g *Gen) int64s(dt arrow.DataType, n int, from, span int64) *array.Data {
	b := make([]byte, 8*n)
	for i := range n {
		binary.LittleEndian.PutUint64(b[8*i:], uint64(from+g.Rng.Int64N(span)))
	}
	return g.finish(dt, g.rows(n), [][]byte{b})
}

// letters returns n strings of shortest to longest capital letters, at most 16.
func (g *Gen) letters(dt arrow.DataType, n, shortest, longest int) *array.Data {
	wide := dt.ID() == arrow.LARGE_STRING
	values := make([]byte, 0, n*longest)
	offsets := putOffset(make([]byte, 0, 8*(n+1)), wide, 0)
	for range n {
		word := g.Rng.Uint64()
		var text [16]byte // on the stack, where the race detector does not instrument each byte
		m := shortest + g.Rng.IntN(longest-shortest+1)
		for i := range m {
			text[i] = 'A' + byte(word%26)
			word = word>>4 | word<<60
		}
		values = append(values, text[:m]...)
		offsets = putOffset(offsets, wide, int64(len(values)))
	}
	return g.finish(dt, g.rows(n), [][]byte{offsets, values})
}

// Coded returns a record of four rows and n columns, each with its own dictionary of more than 4
// KiB.
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
