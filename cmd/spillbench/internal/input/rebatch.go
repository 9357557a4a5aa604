package input

import (
	"context"
	"io"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
)

// rebatcher cuts and joins the checked batches of a Source into batches of perBatch rows. The last one may be
// smaller.
type rebatcher struct {
	*Source
	perBatch int64

	rest  arrow.RecordBatch   // of the last checked batch; nil if nothing is left of it
	apart []arrow.RecordBatch // parts of a batch that could not be joined
}

func (r *rebatcher) next(ctx context.Context) (arrow.RecordBatch, error) {
	if len(r.apart) > 0 {
		part := r.apart[0]
		r.apart = r.apart[1:]
		return part, nil
	}
	var parts []arrow.RecordBatch
	have := int64(0)
	for have < r.perBatch {
		if r.rest == nil {
			var err error
			if r.rest, err = r.checked(ctx); err == io.EOF {
				break
			} else if err != nil {
				return nil, err
			}
		}
		part, n := r.rest, r.rest.NumRows()
		r.rest = nil
		if room := r.perBatch - have; n > room {
			part, r.rest, n = part.NewSlice(0, room), part.NewSlice(room, n), room
		}
		if n > 0 {
			parts = append(parts, part)
		}
		have += n
	}
	switch len(parts) {
	case 0:
		return nil, io.EOF
	case 1:
		return parts[0], nil
	}
	table := array.NewTableFromRecords(parts[0].Schema(), parts)
	columns := make([]arrow.Array, table.NumCols())
	for i := range columns {
		var err error
		columns[i], err = array.Concatenate(table.Column(i).Data().Chunks(), &r.mem)
		if r.mem.refused != nil {
			return nil, err
		} else if err != nil {
			// A type that arrow-go cannot join, such as a union: the parts stay batches of their own.
			r.apart = parts[1:]
			return parts[0], nil
		}
	}
	return array.NewRecordBatch(parts[0].Schema(), columns, have), nil
}
