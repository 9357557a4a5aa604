package bandwidth

import (
	"context"
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/gen"
	"github.com/spillway-db/spillway/convert"
)

// record returns rows of the generated table whose image is so many bytes long, to the
// byte: the sizes in a report are those that were asked for. The caller must Release it.
func record(ctx context.Context, seed uint64, bytes int64) (arrow.RecordBatch, error) {
	rows := bytes / gen.RowBytes
	table, err := gen.New(gen.Config{Seed: seed, Rows: rows, RowsPerBatch: rows})
	if err != nil {
		return nil, err
	}
	whole, err := table.Next(ctx)
	if err != nil {
		return nil, err
	}
	defer whole.Release()
	for n := rows * 15 / 16; n > 0; n-- {
		if rec, err := exactly(whole, n, bytes); rec != nil || err != nil {
			return rec, err
		}
	}
	return nil, fmt.Errorf("bandwidth: no rows of the table make an image of %d bytes", bytes)
}

// exactly returns n rows with as much filler as makes the image so long. It returns nil if there is
// no such amount: a filler that is long enough to begin at a page is too long, and any shorter one
// too short.
func exactly(whole arrow.RecordBatch, n, bytes int64) (arrow.RecordBatch, error) {
	for filler, try := int64(1), 0; filler > 0 && try < 4; try++ {
		rec := filled(whole, n, filler)
		layout, err := convert.NewLayout(rec)
		if err != nil {
			rec.Release()
			return nil, err
		}
		missing := bytes - layout.Size()
		layout.Close()
		if missing == 0 {
			return rec, nil
		}
		rec.Release()
		filler += missing
	}
	return nil, nil
}

// filled returns the first n rows of whole with one more column, whose first value is
// filler bytes long and whose others are empty.
func filled(whole arrow.RecordBatch, n, filler int64) arrow.RecordBatch {
	offsets := make([]int32, n+1)
	for i := range offsets[1:] {
		offsets[i+1] = int32(filler)
	}
	data := array.NewData(arrow.BinaryTypes.Binary, int(n), []*memory.Buffer{
		nil, memory.NewBufferBytes(arrow.Int32Traits.CastToBytes(offsets)), memory.NewBufferBytes(make([]byte, filler)),
	}, nil, 0, 0)
	defer data.Release()
	column := array.NewBinaryData(data)
	defer column.Release()
	rows := whole.NewSlice(0, n)
	defer rows.Release()
	fields := append(whole.Schema().Fields(), arrow.Field{Name: "filler", Type: arrow.BinaryTypes.Binary})
	return array.NewRecordBatch(arrow.NewSchema(fields, nil), append(rows.Columns(), column), n)
}
