package image

import (
	"fmt"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// TestOneArrayUnderManyTypes: a dictionary's array that stands under many value types is a
// dictionary of each, once.
func TestOneArrayUnderManyTypes(t *testing.T) {
	const n = 100
	numbers := array.NewTimestampBuilder(memory.DefaultAllocator, &arrow.TimestampType{})
	numbers.AppendEmptyValues(1000)
	data := numbers.NewArray().Data().(*array.Data)
	codes := array.NewInt32Builder(memory.DefaultAllocator)
	codes.AppendEmptyValues(2)
	index := codes.NewArray()
	p := planner{inline: 0}
	for range 2 {
		for i := range n {
			dt := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: &arrow.TimestampType{TimeZone: fmt.Sprintf("+00:%02d", i)}}
			d := array.NewDataWithDictionary(dt, 2, index.Data().Buffers(), 0, 0, data)
			if err := p.array("a column", dt, input{host: d}, 0, 2); err != nil {
				t.Fatal(err)
			}
		}
	}
	if len(p.outside.order) != n {
		t.Errorf("%d dictionaries, want %d", len(p.outside.order), n)
	}
}
