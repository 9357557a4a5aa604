package equal_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/internal/equal"
)

// rowsWithoutBytes is more rows than a comparison could visit one by one.
const rowsWithoutBytes = 1 << 50

func nulls(n int) arrow.ArrayData { return array.NewNull(n).Data() }

// nullsRead are nulls without a list of buffers, as arrow-go reads them. They differ from nulls in
// their buffers, and so the comparison has to look at rows.
func nullsRead(n int) arrow.ArrayData { return array.NewData(arrow.Null, n, nil, nil, n, 0) }

// runs returns n rows: of the first value until the last split rows, and then of the second one.
func runs(n, split int, values arrow.ArrayData) arrow.ArrayData {
	ends := array.NewInt64Builder(memory.DefaultAllocator)
	defer ends.Release()
	ends.AppendValues([]int64{int64(n - split), int64(n)}, nil)
	e := ends.NewArray()
	return array.NewRunEndEncodedArray(e, array.MakeFromData(values), n, 0).Data()
}

func strings2(a, b string) arrow.ArrayData {
	s := array.NewStringBuilder(memory.DefaultAllocator)
	defer s.Release()
	s.AppendValues([]string{a, b}, nil)
	return s.NewArray().Data()
}

func structOf(n int, child arrow.ArrayData) arrow.ArrayData {
	t := arrow.StructOf(arrow.Field{Name: "f", Type: child.DataType(), Nullable: true})
	return array.NewData(t, n, []*memory.Buffer{nil}, []arrow.ArrayData{child}, 0, 0)
}

func fixedLists(n, size int, child arrow.ArrayData) arrow.ArrayData {
	t := arrow.FixedSizeListOf(int32(size), child.DataType())
	return array.NewData(t, n, []*memory.Buffer{nil}, []arrow.ArrayData{child}, 0, 0)
}

// oneList returns a list of all rows of child.
func oneList(child arrow.ArrayData) arrow.ArrayData {
	offsets := memory.NewBufferBytes(arrow.Int64Traits.CastToBytes([]int64{0, int64(child.Len())}))
	buffers := []*memory.Buffer{nil, offsets}
	return array.NewData(arrow.LargeListOf(child.DataType()), 1, buffers, []arrow.ArrayData{child}, 0, 0)
}

// coded returns a row for each index into the dictionary.
func coded(dictionary arrow.ArrayData, indices ...int64) arrow.ArrayData {
	t := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int64, ValueType: dictionary.DataType()}
	buffers := []*memory.Buffer{nil, memory.NewBufferBytes(arrow.Int64Traits.CastToBytes(indices))}
	return array.NewDataWithDictionary(t, len(indices), buffers, 0, 0, dictionary.(*array.Data))
}

// oneOfUnion returns a row that is the first of child.
func oneOfUnion(child arrow.ArrayData) arrow.ArrayData {
	fields := []arrow.Field{{Name: "f", Type: child.DataType(), Nullable: true}}
	t := arrow.DenseUnionOf(fields, []arrow.UnionTypeCode{5})
	buffers := []*memory.Buffer{nil, memory.NewBufferBytes([]byte{5}), memory.NewBufferBytes(make([]byte, 4))}
	return array.NewData(t, 1, buffers, []arrow.ArrayData{child}, 0, 0)
}

func recordOf(data arrow.ArrayData) arrow.RecordBatch {
	return oneColumn("c", array.MakeFromData(data))
}

// TestEqualOfManyRowsWithoutBytes compares more rows than could be visited: null columns and runs,
// alone and within other types. A difference is in the last row.
func TestEqualOfManyRowsWithoutBytes(t *testing.T) {
	const n = rowsWithoutBytes
	same, other := runs(n, 1, strings2("x", "y")), runs(n, 1, strings2("x", "z"))
	twoRuns := runs(n, 7, strings2("x", "x")) // the same rows as runs(n, 1, strings2("x", "x"))
	twoRows := runs(2, 1, strings2("x", "x"))
	lastItem := fmt.Sprintf("[%d]", n-1)
	for _, c := range []struct {
		name       string
		a, b       arrow.ArrayData
		row        int64 // of the difference; -1: there is none
		path       string
		valA, valB string
	}{
		{"nulls", nulls(n), nullsRead(n), -1, "", "", ""},
		{"runs", twoRuns, runs(n, 1, strings2("x", "x")), -1, "", "", ""},
		{"other runs", same, other, n - 1, "c", "y", "z"},
		{"runs of nulls", runs(n, 1, nulls(2)), runs(n, 3, nullsRead(2)), -1, "", "", ""},
		{"runs of structs of runs", runs(n, 1, structOf(2, twoRows)), runs(n, 5, structOf(2, twoRows)), -1, "", "", ""},
		{"struct of nulls", structOf(n, nulls(n)), structOf(n, nullsRead(n)), -1, "", "", ""},
		{"struct of runs", structOf(n, same), structOf(n, other), n - 1, "c.f", "y", "z"},
		{"fixed-size lists of nulls", fixedLists(n/4, 4, nulls(n)), fixedLists(n/4, 4, nullsRead(n)), -1, "", "", ""},
		{"fixed-size lists of runs", fixedLists(n/4, 4, same), fixedLists(n/4, 4, other), n/4 - 1, "c[3]", "y", "z"},
		{"list of nulls", oneList(nulls(n)), oneList(nullsRead(n)), -1, "", "", ""},
		{"list of runs", oneList(same), oneList(other), 0, "c" + lastItem, "y", "z"},
		{"list of structs of nulls", oneList(structOf(n, nulls(n))), oneList(structOf(n, nullsRead(n))),
			-1, "", "", ""},
		{"dictionary of nulls", coded(nulls(n), 0, n-1), coded(nullsRead(n), n-1, 0), -1, "", "", ""},
		{"dictionary of runs", coded(same, 0, n-1), coded(other, 0, n-1), 1, "c", "y", "z"},
		{"dictionary of lists of runs", coded(oneList(same), 0), coded(oneList(other), 0), 0, "c" + lastItem, "y", "z"},
		{"union of lists of nulls", oneOfUnion(oneList(nulls(n))), oneOfUnion(oneList(nullsRead(n))), -1, "", "", ""},
		{"union of lists of runs", oneOfUnion(oneList(same)), oneOfUnion(oneList(other)),
			0, "c.f" + lastItem, "y", "z"},
		{"no bytes", bytesOfWidth0(n, nil), bytesOfWidth0(n, memory.NewBufferBytes(nil)), -1, "", "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, b := recordOf(c.a), recordOf(c.b)
			defer a.Release()
			defer b.Release()
			err := equal.Records(a, b)
			if c.row < 0 {
				if err != nil {
					t.Error(err)
				}
				return
			}
			var d *equal.DifferenceError
			if !errors.As(err, &d) || d.Row != c.row || d.Path != c.path || d.A != c.valA || d.B != c.valB {
				t.Errorf("%v; want row %d of %s: %s and %s", err, c.row, c.path, c.valA, c.valB)
			}
		})
	}
}

func bytesOfWidth0(n int, b *memory.Buffer) arrow.ArrayData {
	t := &arrow.FixedSizeBinaryType{ByteWidth: 0}
	return array.NewData(t, n, []*memory.Buffer{nil, b}, nil, 0, 0)
}

// TestEqualOfSlicesOfRuns compares parts of run-end encoded columns that begin within a run.
func TestEqualOfSlicesOfRuns(t *testing.T) {
	const n = rowsWithoutBytes
	a := recordOf(runs(n, 10, strings2("x", "y"))).NewSlice(n-15, n-2)   // 5 of x, 8 of y
	b := recordOf(runs(1000, 10, strings2("x", "y"))).NewSlice(985, 998) // the same
	c := recordOf(runs(1000, 9, strings2("x", "y"))).NewSlice(985, 998)  // 6 of x, 7 of y
	if err := equal.Records(a, b); err != nil {
		t.Error(err)
	}
	var d *equal.DifferenceError
	if err := equal.Records(a, c); !errors.As(err, &d) || d.Row != 5 || d.A != "y" || d.B != "x" {
		t.Errorf("%v; want row 5: y and x", err)
	}
}
