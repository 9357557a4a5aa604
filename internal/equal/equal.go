// Package equal compares records, schemas and types by value. It reads values through arrow-go's
// arrays only, and so finds mistakes in the code that lays out and opens records.
package equal

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/bitutil"

	"github.com/spillway-db/spillway/internal/guard"
)

// DifferenceError is where two records differ first.
type DifferenceError struct {
	Path string // the column and what is in it, "a[3].b"; empty for the whole record
	Row  int64  // -1 if the difference is not in a row
	A, B string // the first and the second record's value
}

func (e *DifferenceError) Error() string {
	s := "convert: the records differ"
	if e.Path != "" {
		s += " in " + e.Path
	}
	if e.Row >= 0 {
		s += fmt.Sprintf(", row %d", e.Row)
	}
	return fmt.Sprintf("%s: %s and %s", s, e.A, e.B)
}

// Records compares two records and returns nil, or a *DifferenceError with the first column and row
// that differ.
//
// It compares the metadata of the records, the schemas and all fields, but not the names of list
// items and map entries. It compares logical values: bytes under a null don't count, and neither
// does the encoding. A dictionary index or a run equals another of the same value, a null index
// equals the index of a null, and an extension array equals one of the same storage. Floating-point
// numbers are compared by their bits: a NaN equals the same NaN, and 0 is not -0.
//
// The time depends on the bytes of the records, and not on their rows: null columns and runs of any
// length are compared in one step.
//
// The first call of Dictionary on an arrow-go array writes to the array. It must have happened
// before several goroutines compare one record.
func Records(a, b arrow.RecordBatch) (err error) {
	if a == nil || b == nil {
		return errors.New("convert: comparing records: a record is nil")
	}
	defer guard.Error(&err, "convert: comparing records")
	if d := Schemas(a.Schema(), b.Schema()); d != nil {
		return d
	}
	if x, y := Metadata(a), Metadata(b); !x.Equal(y) {
		return &DifferenceError{Row: -1, A: fmt.Sprintf("metadata %v", x), B: fmt.Sprint(y)}
	}
	if a.NumRows() != b.NumRows() {
		return &DifferenceError{Row: -1, A: fmt.Sprintf("%d rows", a.NumRows()), B: fmt.Sprintf("%d rows", b.NumRows())}
	}
	if a.NumRows() == 0 {
		return nil // even if one has no columns, which arrow-go allows without rows
	}
	if a.NumCols() != b.NumCols() {
		return &DifferenceError{Row: -1, A: fmt.Sprintf("%d columns", a.NumCols()), B: fmt.Sprintf("%d columns", b.NumCols())}
	}
	for c := range int(a.NumCols()) {
		if err := equalColumns(a.Schema().Field(c).Name, a.Column(c), b.Column(c), int(a.NumRows())); err != nil {
			return err
		}
	}
	return nil
}

// Metadata returns the metadata of the record itself, without its schema's.
func Metadata(r arrow.RecordBatch) arrow.Metadata {
	if m, ok := r.(arrow.RecordBatchWithMetadata); ok {
		return m.Metadata()
	}
	return arrow.Metadata{}
}

func equalColumns(name string, a, b arrow.Array, rows int) error {
	if sameBytes(a, b, rows) || sameBuffers(a.Data(), b.Data()) {
		return nil
	}
	if d, row := rowPairOf(a, b).compareRange(0, 0, rows); d != nil {
		return &DifferenceError{Path: name + d.path, Row: int64(row), A: d.a, B: d.b}
	}
	return nil
}

// sameBytes reports whether two columns are of one fixed width, have no nulls and are equal.
func sameBytes(a, b arrow.Array, rows int) bool {
	x, okx := fixedBytes(a)
	y, oky := fixedBytes(b)
	if !okx || !oky || a.NullN() != 0 || b.NullN() != 0 {
		return false
	}
	w := a.DataType().(arrow.FixedWidthDataType).Bytes()
	return bytes.Equal(x[a.Data().Offset()*w:][:rows*w], y[b.Data().Offset()*w:][:rows*w])
}

// sameBuffers reports whether two arrays of one type have the same bytes. An unchanged copy has, and
// then one comparison of each buffer replaces one of each row.
func sameBuffers(a, b arrow.ArrayData) bool {
	if a == nil || b == nil {
		return a == b
	}
	x, y := a.Buffers(), b.Buffers()
	if a.Len() != b.Len() || a.Offset() != b.Offset() || len(x) != len(y) || len(x) > 0 && !sameNulls(a, b) {
		return false
	}
	for i := 1; i < len(x); i++ {
		if x[i] == nil || y[i] == nil {
			if x[i] != y[i] {
				return false
			}
		} else if !bytes.Equal(x[i].Bytes(), y[i].Bytes()) {
			return false
		}
	}
	return slices.EqualFunc(a.Children(), b.Children(), sameBuffers) && sameBuffers(dictionaryData(a), dictionaryData(b))
}

// sameNulls reports whether the same rows are null, by the first buffer, if there is one.
func sameNulls(a, b arrow.ArrayData) bool {
	x, y := a.Buffers()[0], b.Buffers()[0]
	switch {
	case a.NullN() == 0 && b.NullN() == 0:
		return true
	case x == nil || y == nil:
		return x == y
	}
	return bitutil.BitmapEquals(x.Bytes(), y.Bytes(), int64(a.Offset()), int64(b.Offset()), int64(a.Len()))
}

func dictionaryData(d arrow.ArrayData) arrow.ArrayData {
	if x, ok := d.Dictionary().(*array.Data); !ok || x != nil {
		return d.Dictionary()
	}
	return nil // and not a nil *array.Data
}

// fixedBytes returns the bytes of an array of a type whose values are equal if their bytes are.
func fixedBytes(a arrow.Array) ([]byte, bool) {
	switch t := a.DataType().(type) {
	case *arrow.BooleanType, *arrow.DictionaryType, *arrow.NullType, arrow.ExtensionType:
		return nil, false
	case arrow.FixedWidthDataType:
		if bufs := a.Data().Buffers(); t.Bytes() > 0 && len(bufs) > 1 && bufs[1] != nil {
			return bufs[1].Bytes(), true
		}
		return nil, t.Bytes() > 0
	}
	return nil, false
}

func Schemas(a, b *arrow.Schema) error {
	if a == b {
		return nil
	}
	whole := func(x, y any) error {
		return &DifferenceError{Row: -1, A: fmt.Sprintf("a schema with %v", x), B: fmt.Sprintf("one with %v", y)}
	}
	switch {
	case a.Endianness() != b.Endianness():
		return whole(a.Endianness(), b.Endianness())
	case a.NumFields() != b.NumFields():
		return whole(fmt.Sprintf("%d fields", a.NumFields()), fmt.Sprintf("%d", b.NumFields()))
	case !a.Metadata().Equal(b.Metadata()):
		return whole(a.Metadata(), b.Metadata())
	}
	for i := range a.NumFields() {
		if d := fieldDifference(a.Field(i), b.Field(i), true); d != nil {
			return &DifferenceError{Path: a.Field(i).Name + d.path, Row: -1, A: d.a, B: d.b}
		}
	}
	return nil
}

// difference is what compare finds, and where in the value.
type difference struct{ path, a, b string }

func fieldDifference(a, b arrow.Field, named bool) *difference {
	switch {
	case named && a.Name != b.Name:
		return &difference{a: fmt.Sprintf("a field named %q", a.Name), b: fmt.Sprintf("one named %q", b.Name)}
	case a.Nullable != b.Nullable:
		return &difference{a: fmt.Sprintf("nullable %v", a.Nullable), b: fmt.Sprint(b.Nullable)}
	case !a.Metadata.Equal(b.Metadata):
		return &difference{a: fmt.Sprintf("metadata %v", a.Metadata), b: fmt.Sprint(b.Metadata)}
	}
	return typeDifference(a.Type, b.Type)
}

// Types reports whether two types are the same, with all that Records compares of them.
func Types(a, b arrow.DataType) bool { return typeDifference(a, b) == nil }

// typeDifference compares also what arrow.TypeEqual passes over: nested
// metadata of some types, the storage of extensions.
func typeDifference(a, b arrow.DataType) *difference {
	if a == b {
		return nil
	}
	diff := &difference{a: "the type " + a.String(), b: b.String()}
	if a.ID() != b.ID() {
		return diff
	}
	switch x := a.(type) {
	case arrow.ExtensionType:
		y := b.(arrow.ExtensionType)
		if x.ExtensionName() != y.ExtensionName() || x.Serialize() != y.Serialize() || !x.ExtensionEquals(y) {
			return diff
		}
		return typeDifference(x.StorageType(), y.StorageType())
	case *arrow.DictionaryType:
		y := b.(*arrow.DictionaryType)
		if x.Ordered != y.Ordered || x.IndexType.ID() != y.IndexType.ID() {
			return diff
		}
		return typeDifference(x.ValueType, y.ValueType)
	case *arrow.MapType:
		if x.KeysSorted != b.(*arrow.MapType).KeysSorted {
			return diff
		}
	case *arrow.FixedSizeListType:
		if x.Len() != b.(*arrow.FixedSizeListType).Len() {
			return diff
		}
	case arrow.UnionType:
		y := b.(arrow.UnionType)
		if len(x.TypeCodes()) != len(y.TypeCodes()) || fmt.Sprint(x.TypeCodes()) != fmt.Sprint(y.TypeCodes()) {
			return diff
		}
	}
	x, ok := a.(arrow.NestedType)
	if !ok {
		if !arrow.TypeEqual(a, b, arrow.CheckMetadata()) {
			return diff
		}
		return nil
	}
	fx, fy := x.Fields(), b.(arrow.NestedType).Fields()
	if len(fx) != len(fy) {
		return diff
	}
	_, list := a.(arrow.ListLikeType)
	for i := range fx {
		if d := fieldDifference(fx[i], fy[i], !list); d != nil {
			d.path = "." + fx[i].Name + d.path
			return d
		}
	}
	return nil
}
