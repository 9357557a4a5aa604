package convert_test

import (
	"fmt"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/convert"
)

// A record is laid out in memory, which may be any that Go can write to, and
// opened in place.
func ExampleNewLayout() {
	schema := arrow.NewSchema([]arrow.Field{
		{Name: "city", Type: arrow.BinaryTypes.String, Nullable: true},
		{Name: "people", Type: arrow.PrimitiveTypes.Int64},
	}, nil)
	whole, _, err := array.RecordFromJSON(memory.DefaultAllocator, schema, strings.NewReader(
		`[{"city":"Ulm","people":128928},{"city":null,"people":0},{"city":"Bonn","people":335789}]`))
	if err != nil {
		panic(err)
	}
	defer whole.Release()
	rec := whole.NewSlice(1, 3)
	defer rec.Release()

	layout, err := convert.NewLayout(rec)
	if err != nil {
		panic(err)
	}
	defer layout.Close()
	body := make([]byte, layout.Desc.Body)
	if err := layout.WriteTo([][]byte{body}); err != nil {
		panic(err)
	}
	desc, err := layout.Descriptor()
	if err != nil {
		panic(err)
	}
	fmt.Println("rows:", desc.Rows, "body:", desc.Body)
	fmt.Println("nodes:", desc.Nodes)
	for _, s := range desc.Buffers {
		if s.Offset < 0 {
			fmt.Println("absent")
			continue
		}
		fmt.Printf("%d bytes at %d: %q\n", s.Length, s.Offset, body[s.Offset:s.Offset+s.Length])
	}
	fmt.Println("intact:", convert.Verify(desc, 0, body) == nil)

	back, err := convert.Open(desc, [][]byte{body}, func() { fmt.Println("the memory is free") })
	if err != nil {
		panic(err)
	}
	fmt.Println(back.Column(0))
	fmt.Println("difference:", convert.Equal(rec, back))
	back.Release()
	// Output:
	// rows: 2 body: 4096
	// nodes: [{2 1} {2 0}]
	// 1 bytes at 0: "\x02"
	// 12 bytes at 64: "\x00\x00\x00\x00\x00\x00\x00\x00\x04\x00\x00\x00"
	// 4 bytes at 128: "Bonn"
	// absent
	// 16 bytes at 192: "\x00\x00\x00\x00\x00\x00\x00\x00\xad\x1f\x05\x00\x00\x00\x00\x00"
	// intact: true
	// [(null) "Bonn"]
	// difference: <nil>
	// the memory is free
}
