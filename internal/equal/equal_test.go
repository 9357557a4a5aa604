package equal_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/image/imagetest"
)

// TestEqualFindsMutations flips bits in every buffer of an image. Where a row
// then prints differently, Equal must say that it differs there or before.
func TestEqualFindsMutations(t *testing.T) {
	for _, dt := range append(arrowgen.Flat(), arrowgen.Nested(arrow.BinaryTypes.String)...) {
		g := arrowgen.New(11)
		rec := g.Record(arrowgen.Schema(dt), 9)
		d, body := imagetest.LaidOut(t, rec)
		want, ok := arrowgen.Values(rec.Column(0))
		found := 0
		for _, s := range d.Buffers {
			for at := max(0, s.Offset); at < s.Offset+s.Length; at++ {
				body[at] ^= 1 << (at % 8)
				back, err := image.Open(d, [][]byte{body}, nil)
				if err == nil { // Open does not detect the change
					err = equal.Records(rec, back)
					var diff *equal.DifferenceError
					if errors.As(err, &diff) {
						found++
					}
					if got, printed := arrowgen.Values(back.Column(0)); ok && printed && !slices.Equal(got, want) {
						first := 0
						for want[first] == got[first] {
							first++
						}
						if diff == nil || diff.Row > int64(first) {
							t.Errorf("%s: row %d is %s and was %s; Records returned %v",
								dt, first, got[first], want[first], err)
						}
					}
					back.Release()
				}
				body[at] ^= 1 << (at % 8)
			}
		}
		if found == 0 && dt.ID() != arrow.NULL {
			t.Errorf("%s: no change was found", dt)
		}
		rec.Release()
	}
}

// column returns a record of one column, built from JSON.
func column(t *testing.T, dt arrow.DataType, json string) arrow.RecordBatch {
	t.Helper()
	a, _, err := array.FromJSON(memory.DefaultAllocator, dt, strings.NewReader(json))
	if err != nil {
		t.Fatal(err)
	}
	defer a.Release()
	return oneColumn("v", a)
}

// oneColumn returns a record of one nullable column.
func oneColumn(name string, a arrow.Array) arrow.RecordBatch {
	schema := arrow.NewSchema([]arrow.Field{{Name: name, Type: a.DataType(), Nullable: true}}, nil)
	return array.NewRecordBatch(schema, []arrow.Array{a}, int64(a.Len()))
}

// TestEqualReports checks the message about the first difference of two columns.
func TestEqualReports(t *testing.T) {
	i32, str := arrow.PrimitiveTypes.Int32, arrow.BinaryTypes.String
	st := arrow.StructOf(
		arrow.Field{Name: "a", Type: arrow.ListOf(i32), Nullable: true},
		arrow.Field{Name: "b", Type: str, Nullable: true})
	for _, c := range []struct {
		dt         arrow.DataType
		a, b, want string // want is how the message ends; empty: the columns are equal
	}{
		{i32, `[1,2,null]`, `[1,2,null]`, ""},
		{i32, `[1,2,3]`, `[1,5,3]`, " in v, row 1: 2 and 5"},
		{i32, `[1,null]`, `[1,0]`, " in v, row 1: null and 0"},
		{i32, `[1,2]`, `[1,2,3]`, ": 2 rows and 3 rows"},
		{str, `["a","b"]`, `["a","bb"]`, " in v, row 1: b and bb"},
		{arrow.BinaryTypes.StringView, `["a long one that is elsewhere"]`, `["a long one that is elsewhat?"]`,
			" in v, row 0: a long one that is elsewhere and a long one that is elsewhat?"},
		{arrow.FixedWidthTypes.Boolean, `[true,false]`, `[true,true]`, " in v, row 1: false and true"},
		{st, `[{"a":[1,2],"b":"x"}]`, `[{"a":[1,2],"b":"x"}]`, ""},
		{st, `[{"a":[1,2],"b":"x"}]`, `[{"a":[1,7],"b":"x"}]`, " in v.a[1], row 0: 2 and 7"},
		{st, `[{"a":[1,2],"b":"x"}]`, `[{"a":[1],"b":"x"}]`, " in v.a, row 0: 2 items and 1 items"},
		{st, `[{"a":[1,2],"b":"x"}]`, `[{"a":[1,2],"b":null}]`, " in v.b, row 0: x and null"},
		{st, `[{"a":[1],"b":"x"},{"a":[2],"b":"x"}]`, `[{"a":[1],"b":"y"},{"a":[3],"b":"x"}]`,
			" in v.b, row 0: x and y"},
		{st, `[{"a":[1],"b":"x"},{"a":[2],"b":"x"}]`, `[{"a":[3],"b":"x"},{"a":[2],"b":"y"}]`,
			" in v.a[0], row 0: 1 and 3"},
		{st, `[{"a":[1],"b":"x"}]`, `[null]`, ` in v, row 0: {"a":[1],"b":"x"} and null`},
	} {
		a, b := column(t, c.dt, c.a), column(t, c.dt, c.b)
		got := ""
		if err := equal.Records(a, b); err != nil {
			got = err.Error()
		}
		want := c.want
		if want != "" {
			want = "convert: the records differ" + want
		}
		if got != want {
			t.Errorf("%s and %s: %q, want %q", c.a, c.b, got, want)
		}
		a.Release()
		b.Release()
	}
}

func TestEqualSchemas(t *testing.T) {
	md := func(v string) arrow.Metadata { return arrow.NewMetadata([]string{"k"}, []string{v}) }
	i32 := arrow.PrimitiveTypes.Int32
	field := func(name string, dt arrow.DataType, nullable bool, m arrow.Metadata) *arrow.Schema {
		return arrow.NewSchema([]arrow.Field{{Name: name, Type: dt, Nullable: nullable, Metadata: m}}, nil)
	}
	one := md("1")
	inner := func(m arrow.Metadata) arrow.DataType {
		return arrow.LargeListOf(arrow.StructOf(arrow.Field{Name: "x", Type: i32, Metadata: m}))
	}
	of := func(dt arrow.DataType) *arrow.Schema { return field("a", dt, true, one) }
	base := of(i32)
	sorted := arrow.MapOf(i32, i32)
	sorted.KeysSorted = true
	coded := func(ordered bool) *arrow.Schema {
		return of(&arrow.DictionaryType{IndexType: i32, ValueType: i32, Ordered: ordered})
	}
	union := func(code arrow.UnionTypeCode) *arrow.Schema {
		return of(arrow.SparseUnionOf([]arrow.Field{{Name: "x", Type: i32}}, []arrow.UnionTypeCode{code}))
	}
	zoned := func(zone string) *arrow.Schema { return of(&arrow.TimestampType{TimeZone: zone}) }
	runs := func(ends arrow.DataType) *arrow.Schema { return of(arrow.RunEndEncodedOf(ends, i32)) }
	items := func(name string) *arrow.Schema { return of(arrow.ListOfField(arrow.Field{Name: name, Type: i32})) }
	withMeta := arrow.NewSchema(base.Fields(), &one)
	for name, c := range map[string]struct {
		a, b *arrow.Schema
		want string // in the message; empty for equal
	}{
		"same":            {base, field("a", i32, true, md("1")), ""},
		"name":            {base, field("b", i32, true, one), `a field named "a" and one named "b"`},
		"nullable":        {base, field("a", i32, false, one), "nullable true and false"},
		"type":            {base, of(arrow.PrimitiveTypes.Int64), "the type int32 and int64"},
		"field metadata":  {base, field("a", i32, true, md("2")), `["k": "1"] and ["k": "2"]`},
		"schema metadata": {base, withMeta, `["k": "1"]`},
		"fields":          {base, arrow.NewSchema(nil, nil), "1 fields and one with 0"},
		"nested metadata": {of(inner(md("1"))), of(inner(md("2"))), "in a.item.x: metadata"},
		"item names":      {items("item"), items("element"), ""},
		"time zone":       {zoned("UTC"), zoned("Asia/Tokyo"), "the type"},
		"order":           {coded(false), coded(true), "the type"},
		"list size":       {of(arrow.FixedSizeListOf(2, i32)), of(arrow.FixedSizeListOf(3, i32)), "the type"},
		"extension":       {of(arrowgen.NewExtension("x", i32)), of(arrowgen.NewExtension("y", i32)), "the type"},
		"sorted keys":     {of(arrow.MapOf(i32, i32)), of(sorted), "the type"},
		"type codes":      {union(1), union(2), "the type"},
		"run end type":    {runs(arrow.PrimitiveTypes.Int16), runs(i32), "the type int16 and int32"},
	} {
		a, b := array.NewRecordBatch(c.a, emptyColumns(c.a), 0), array.NewRecordBatch(c.b, emptyColumns(c.b), 0)
		err := equal.Records(a, b)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func emptyColumns(s *arrow.Schema) []arrow.Array {
	cols := make([]arrow.Array, s.NumFields())
	for i := range cols {
		cols[i] = arrowgen.New(1).Array(s.Field(i).Type, 0)
	}
	return cols
}

// TestEqualFindsTheRow compares columns of one width, which are compared many rows at a time: the
// error names the row that differs.
func TestEqualFindsTheRow(t *testing.T) {
	const rows = 1000
	ints := func(shift, changed int) arrow.RecordBatch { // differently shifted ones differ in their buffers
		b := array.NewInt64Builder(memory.DefaultAllocator)
		defer b.Release()
		for i := -shift; i < rows; i++ {
			if i == changed {
				b.Append(-1)
			} else {
				b.Append(int64(i))
			}
		}
		a := b.NewArray()
		return oneColumn("n", array.NewSlice(a, int64(shift), int64(a.Len())))
	}
	if err := equal.Records(ints(0, rows), ints(3, rows)); err != nil {
		t.Error(err)
	}
	for _, changed := range []int{0, 1, 127, 128, 129, 200, 256, 998, 999} {
		var d *equal.DifferenceError
		if err := equal.Records(ints(0, rows), ints(3, changed)); !errors.As(err, &d) || d.Row != int64(changed) {
			t.Errorf("row %d differs: %v", changed, err)
		}
	}
}

// TestEqualBits checks that floating-point numbers are equal if their bits are.
func TestEqualBits(t *testing.T) {
	quiet, other := math.Float64frombits(0x7ff8000000000001), math.Float64frombits(0x7ff8000000000002)
	floats := func(v ...float64) arrow.RecordBatch {
		b := array.NewFloat64Builder(memory.DefaultAllocator)
		defer b.Release()
		b.AppendValues(v, nil)
		a := b.NewArray()
		defer a.Release()
		return oneColumn("f", a)
	}
	minusZero := math.Copysign(0, -1)
	if err := equal.Records(floats(1, quiet, minusZero), floats(1, quiet, minusZero)); err != nil {
		t.Error(err)
	}
	const want = "NaN (010000000000f87f) and NaN (020000000000f87f)"
	if err := equal.Records(floats(quiet), floats(other)); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	if err := equal.Records(floats(0), floats(minusZero)); err == nil {
		t.Error("0 equals -0")
	}
}

// TestEqualByValue checks that different dictionaries and runs of the same values are equal, also
// for each form of a null.
func TestEqualByValue(t *testing.T) {
	str := arrow.BinaryTypes.String
	dt := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int8, ValueType: str}
	dict := func(indices, entries string) arrow.RecordBatch {
		i, d := column(t, dt.IndexType, indices).Column(0), column(t, str, entries).Column(0)
		return oneColumn("d", array.NewDictionaryArray(dt, i, d))
	}
	one := dict(`[0,1,0,null]`, `["x","y"]`)
	for _, same := range []arrow.RecordBatch{
		dict(`[1,0,1,null]`, `["y","x"]`), dict(`[3,1,0,2]`, `["x","y",null,"x"]`),
	} {
		if err := equal.Records(one, same); err != nil {
			t.Error(err)
		}
	}
	err := equal.Records(one, dict(`[0,0,0,null]`, `["x","y"]`))
	if err == nil || err.Error() != "convert: the records differ in d, row 1: y and x" {
		t.Error(err)
	}

	runs := func(n int, ends, values string) arrow.RecordBatch {
		e, v := column(t, arrow.PrimitiveTypes.Int32, ends).Column(0), column(t, str, values).Column(0)
		return oneColumn("r", array.NewRunEndEncodedArray(e, v, n, 0))
	}
	ree := runs(5, `[2,4,5]`, `["x",null,"y"]`)
	err = equal.Records(ree, runs(5, `[1,2,3,9,10]`, `["x","x",null,null,"y"]`))
	if err == nil || !strings.Contains(err.Error(), "row 4: y and null") {
		t.Error(err)
	}
	if err := equal.Records(ree, runs(5, `[1,2,3,4,10]`, `["x","x",null,null,"y"]`)); err != nil {
		t.Error(err)
	}
}

// TestEqualOfTwoPartsOfOneRecord compares different rows of one record, which share all buffers.
func TestEqualOfTwoPartsOfOneRecord(t *testing.T) {
	rec := numbers(20)
	for from := range int64(9) {
		a, b := rec.NewSlice(from, from+5), rec.NewSlice(from+5, from+10) // in both the same rows are null
		if err := equal.Records(a, b); err == nil {
			t.Errorf("rows from %d and from %d are equal", from, from+5)
		}
		names := func(r arrow.RecordBatch) arrow.RecordBatch {
			return array.NewRecordBatch(arrow.NewSchema(r.Schema().Fields()[1:], nil), r.Columns()[1:], r.NumRows())
		}
		if err := equal.Records(names(a), names(b)); err == nil {
			t.Errorf("names from %d and from %d are equal", from, from+5)
		}
	}
}

// numbers is a record of numbers and of names, every fifth of which is null.
func numbers(rows int) arrow.RecordBatch {
	b := array.NewRecordBuilder(memory.DefaultAllocator, arrow.NewSchema([]arrow.Field{
		{Name: "n", Type: arrow.PrimitiveTypes.Int64},
		{Name: "s", Type: arrow.BinaryTypes.String, Nullable: true},
	}, nil))
	defer b.Release()
	for i := range rows {
		b.Field(0).(*array.Int64Builder).Append(int64(i))
		if s := b.Field(1).(*array.StringBuilder); i%5 == 2 {
			s.AppendNull()
		} else {
			s.Append(fmt.Sprint("number ", i))
		}
	}
	return b.NewRecordBatch()
}
