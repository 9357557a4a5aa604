package bandwidth

import (
	"context"
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/gen"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/tier"
)

// record returns rows of the generated table whose image is so many bytes long, to the byte: the
// sizes in a report are those that were asked for. A column of filler, which is longer than a page
// and so begins at one, makes up for the rest. The caller must Release the record.
func record(ctx context.Context, seed uint64, bytes int64) (arrow.RecordBatch, error) {
	rows := bytes / gen.RowBytes * 3 / 4
	table, err := gen.New(gen.Config{Seed: seed, Rows: rows, RowsPerBatch: rows})
	if err != nil {
		return nil, err
	}
	whole, err := table.Next(ctx)
	if err != nil {
		return nil, err
	}
	defer whole.Release()
	filler := int64(tier.Page)
	for range 2 {
		rec := filled(whole, filler)
		layout, err := convert.NewLayout(rec)
		if err != nil {
			rec.Release()
			return nil, err
		}
		missing := bytes - layout.Desc.Body
		layout.Close()
		if missing == 0 {
			return rec, nil
		}
		rec.Release()
		filler += missing
	}
	return nil, fmt.Errorf("bandwidth: no rows of the table make an image of %d bytes", bytes)
}

// filled returns whole with one more column, whose first value is filler bytes long and whose others
// are empty.
func filled(whole arrow.RecordBatch, filler int64) arrow.RecordBatch {
	offsets := make([]int64, whole.NumRows()+1)
	for i := range offsets[1:] {
		offsets[i+1] = filler
	}
	data := array.NewData(arrow.BinaryTypes.LargeBinary, int(whole.NumRows()), []*memory.Buffer{
		nil, memory.NewBufferBytes(arrow.Int64Traits.CastToBytes(offsets)), memory.NewBufferBytes(make([]byte, filler)),
	}, nil, 0, 0)
	defer data.Release()
	column := array.NewLargeBinaryData(data)
	defer column.Release()
	fields := append(whole.Schema().Fields(), arrow.Field{Name: "filler", Type: column.DataType()})
	return array.NewRecordBatch(arrow.NewSchema(fields, nil), append(whole.Columns(), column), whole.NumRows())
}
