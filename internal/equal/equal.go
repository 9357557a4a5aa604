// Package equal compares records, schemas and types by value. It reads values only through
// arrow-go's arrays, so it finds mistakes in the code that lays out and opens records.
//
// array.Equal of arrow-go does not serve: to it 0 equals -0, no NaN equals another, dictionaries
// must have the same indices, and rows that take no bytes are compared one by one.
package equal

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/internal/guard"
)

// DifferenceError describes the first difference of two records.
type DifferenceError struct {
	Path string // the column and the item or field in it, "a[3].b"; empty for the whole record
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
// The time depends on the bytes of the records and not on their rows: null columns and runs of any
// length take one step.
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
	if x, y := a.NumCols(), b.NumCols(); x != y {
		return &DifferenceError{Row: -1, A: fmt.Sprintf("%d columns", x), B: fmt.Sprintf("%d columns", y)}
	}
	for c := range int(a.NumCols()) {
		x, y := a.Column(c), b.Column(c)
		if sameBuffers(x.Data(), y.Data()) {
			continue
		}
		if d, row := compare(x, y, 0, 0, int(a.NumRows())); d != nil {
			return &DifferenceError{Path: a.Schema().Field(c).Name + d.path, Row: int64(row), A: d.a, B: d.b}
		}
	}
	return nil
}

// Metadata returns the metadata of the record itself, not that of its schema.
func Metadata(r arrow.RecordBatch) arrow.Metadata {
	if m, ok := r.(arrow.RecordBatchWithMetadata); ok {
		return m.Metadata()
	}
	return arrow.Metadata{}
}

// sameBuffers reports whether two arrays of one type have equal buffers, as an unchanged copy has.
// One comparison of each buffer then replaces one of each row. If sameBuffers returns false, the
// arrays may still be equal.
func sameBuffers(a, b arrow.ArrayData) bool {
	x, y := a.Buffers(), b.Buffers()
	if a.Len() != b.Len() || a.Offset() != b.Offset() || len(x) != len(y) {
		return false
	}
	if len(x) > 0 && a.NullN() == 0 && b.NullN() == 0 {
		x, y = x[1:], y[1:] // a bitmap without nulls equals none
	}
	dictA, _ := a.Dictionary().(*array.Data)
	dictB, _ := b.Dictionary().(*array.Data)
	return slices.EqualFunc(x, y, func(x, y *memory.Buffer) bool {
		return x == y || x != nil && y != nil && bytes.Equal(x.Bytes(), y.Bytes())
	}) && slices.EqualFunc(a.Children(), b.Children(), sameBuffers) &&
		(dictA == dictB || dictA != nil && dictB != nil && sameBuffers(dictA, dictB))
}

// Schemas compares two schemas and returns nil, or a *DifferenceError with the first difference.
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

// difference is a difference of two values or fields, and where in them it is.
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

// Types reports whether two types are the same, including all that Records compares of them.
func Types(a, b arrow.DataType) bool { return typeDifference(a, b) == nil }

// typeDifference also compares what arrow.TypeEqual ignores, such as the nested metadata of some
// types and the storage of extensions.
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
		if !slices.Equal(x.TypeCodes(), b.(arrow.UnionType).TypeCodes()) {
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
