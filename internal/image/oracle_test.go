package image

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"

	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/equal"

	"github.com/spillway-db/spillway/internal/guard"
)

// throughIPC writes rec as an Arrow IPC stream and reads it back.
func throughIPC(rec arrow.RecordBatch) (_ arrow.RecordBatch, err error) {
	defer guard.Error(&err, "convert: IPC")
	var b bytes.Buffer
	w := ipc.NewWriter(&b, ipc.WithSchema(rec.Schema()))
	if err := w.Write(rec); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	r, err := ipc.NewReader(&b)
	if err != nil {
		return nil, err
	}
	defer r.Release()
	if !r.Next() {
		return nil, fmt.Errorf("no record: %w", r.Err())
	}
	back := r.RecordBatch()
	back.Retain()
	return back, nil
}

// lostByIPC says what arrow-go's ipc package cannot do with a type, as of
// 18.8, or with arrays of it that are sliced; "" where it can be asked.
func lostByIPC(dt arrow.DataType, slices bool) string {
	has := func(is func(arrow.DataType) bool) bool { return arrowgen.Within(dt, is) }
	id := func(ids ...arrow.Type) func(arrow.DataType) bool {
		return func(dt arrow.DataType) bool {
			for _, i := range ids {
				if dt.ID() == i {
					return true
				}
			}
			return false
		}
	}
	switch {
	case has(id(arrow.EXTENSION)):
		return "an extension that is not registered comes back as its storage"
	case has(func(dt arrow.DataType) bool {
		d, ok := dt.(*arrow.DictionaryType)
		return ok && arrowgen.Within(d.ValueType, id(arrow.DICTIONARY, arrow.SPARSE_UNION, arrow.DENSE_UNION))
	}):
		return "dictionaries of dictionaries and of unions are not written"
	case has(func(dt arrow.DataType) bool {
		d, ok := dt.(*arrow.DictionaryType)
		return ok && arrowgen.Within(d.ValueType, id(arrow.RUN_END_ENCODED))
	}):
		return "dictionaries of run-end encoded arrays are written and cannot be read"
	case has(func(dt arrow.DataType) bool {
		u, ok := dt.(*arrow.DenseUnionType)
		return ok && u.MaxTypeCode() == arrow.MaxUnionTypeCode
	}):
		return "writing a dense union with the type code 127 panics"
	case slices && has(id(arrow.DENSE_UNION, arrow.LIST_VIEW, arrow.LARGE_LIST_VIEW)):
		return "slices of dense unions and list views are not written"
	}
	return ""
}

// TestOracle compares the opened record with what arrow-go's ipc package makes
// of the source, and with the source by array.RecordEqual: neither shares code
// with Layout, Open or Equal.
func TestOracle(t *testing.T) {
	asked, skipped := 0, map[string]int{}
	for i, dt := range arrowgen.Types() {
		for _, plain := range []bool{true, false} {
			g := arrowgen.New(uint64(i))
			g.Plain = plain
			whole := g.Record(arrowgen.Schema(dt), 70)
			for _, s := range [][2]int64{{0, 70}, {13, 60}, {5, 5}} {
				rec := whole.NewSlice(s[0], s[1])
				d, body, _ := LaidOut(t, rec)
				back, _ := opened(t, g.Rng, d, body)
				// The oracle is asked twice: with the source, and with what was
				// opened, where nothing is sliced any more.
				for name, r := range map[string]arrow.RecordBatch{"source": rec, "opened": back} {
					if why := lostByIPC(dt, name == "source" && (!plain || rec.NumRows() < whole.NumRows())); why != "" {
						skipped[why]++
						continue
					}
					asked++
					want, err := throughIPC(r)
					if err == nil {
						err = errors.Join(equal.Records(rec, want), equal.Records(want, back))
					}
					if err != nil {
						t.Errorf("%s [%d:%d] plain %v, %s: %v", dt, s[0], s[1], plain, name, err)
						continue
					}
					want.Release()
				}
				nan := []array.EqualOption{array.WithNaNsEqual(true), array.WithAbsTolerance(0)}
				if !array.RecordEqual(rec, back) && !array.RecordApproxEqual(rec, back, nan...) {
					t.Errorf("%s [%d:%d] plain %v: array.RecordEqual says no", dt, s[0], s[1], plain)
				}
				back.Release()
				rec.Release()
			}
			whole.Release()
		}
	}
	if asked < 1500 {
		t.Errorf("asked only %d times", asked)
	}
	t.Logf("asked %d times; skipped %v", asked, skipped)
}
