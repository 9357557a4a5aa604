package arrowgen

import (
	"strconv"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

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
