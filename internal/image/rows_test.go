package image_test

import (
	"fmt"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/image/imagetest"
	"github.com/spillway-db/spillway/tier"
)

// TestWholeBuffersAreReadOnce: views and their data, which each window needs, are read with the first.
func TestWholeBuffersAreReadOnce(t *testing.T) {
	schema := arrow.NewSchema([]arrow.Field{
		{Name: "number", Type: arrow.PrimitiveTypes.Int64}, {Name: "view", Type: arrow.BinaryTypes.StringView},
	}, nil)
	b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	defer b.Release()
	for i := range 2000 {
		b.Field(0).(*array.Int64Builder).Append(int64(i))
		b.Field(1).(*array.StringViewBuilder).AppendString(fmt.Sprintf("value %d, which is rather long", i))
	}
	rec := b.NewRecordBatch()
	defer rec.Release()
	d, body := imagetest.LaidOut(t, rec)
	size := int64(len(body)) - 2000*8/4*3 // a quarter of the numbers at a time
	rows, err := image.NewRows(d, 0, size, tier.ID{Kind: tier.Host})
	if err != nil {
		t.Fatal(err)
	}
	rows.Memory = make([]byte, size)
	windows, read := 0, 0
	for ; rows.Row() < d.Rows; windows++ {
		from := rows.Row()
		got, err := rows.Next(func(all []image.Piece) error {
			for _, p := range all {
				if !p.FromHeld() {
					read += copy(p.To, body[p.Off:])
				}
			}
			return nil
		}, image.NewLease(func() {}), nil)
		if err != nil {
			t.Fatal(err)
		}
		want := rec.NewSlice(from, rows.Row())
		if !array.RecordEqual(got, want) {
			t.Errorf("window %d has other rows", windows)
		}
		want.Release()
		got.Release()
	}
	if windows < 3 || read > len(body) {
		t.Errorf("%d bytes were read in %d windows of a body of %d", read, windows, len(body))
	}
}
