// Package equal compares records, schemas and types by value. Records is convert.Equal for
// programs, which compare what comes back from an engine with what was put. Package persist
// compares a schema with what IPC makes of it, and packages image and transfer compare the types of
// dictionaries.
//
// It reads values only through arrow-go's arrays and shares no code with the packages that lay out
// and open records, so it finds mistakes in them.
//
//	Records ──▶ Schemas ──▶ fieldDifference ⇄ typeDifference    the types, recursively
//	   └─────▶ sameBuffers                                      the usual case, at the speed of memory
//	   └─────▶ compare ⇄ compareValid                           values, row by row, recursively
//
// array.Equal of arrow-go does not serve: to it 0 equals -0, no NaN equals another, dictionaries
// must have the same indices, and rows that take no bytes are compared one by one.
//
// Nothing is retained or changed, except for what arrow-go's accessors cache. The package takes no
// locks.
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

// DifferenceError describes the first difference of two records or schemas. A and B are texts for
// people: values are shown as arrow-go formats them, and differences of types and numbers of rows
// in words.
type DifferenceError struct {
	// Path is the column and the item or field in it, as "a[3].b"; empty if the difference is in
	// the record or the schema as a whole. Row is -1 if it is not in a row.
	Path string
	Row  int64
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
// that differ. A panic of arrow-go, as for arrays whose offsets are wrong, is another error.
//
// It compares the metadata of the records, the schemas and all fields, but not the names of list
// items and map entries, which the Arrow format leaves to the writer. It compares logical values:
// bytes under a null don't count, and neither does the encoding. A dictionary index or a run equals
// another of the same value, a null index equals the index of a null, and an extension array equals
// one of the same storage. Floating-point numbers are compared by their bits: a NaN equals the same
// NaN, and 0 is not -0.
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
	// arrow-go allows a record without rows and columns to have any schema. The schemas are equal
	// here.
	if a.NumRows() == 0 {
		return nil
	}
	if x, y := a.NumCols(), b.NumCols(); x != y {
		return &DifferenceError{Row: -1, A: fmt.Sprintf("%d columns", x), B: fmt.Sprintf("%d columns", y)}
	}
	for c := range int(a.NumCols()) {
		// Comparing buffers is much faster than comparing rows, and settles almost all columns. If
		// it does not, the rows decide, and find the place.
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

// Metadata returns the metadata of the record itself, not that of its schema. Records of other
// implementations may have none.
func Metadata(r arrow.RecordBatch) arrow.Metadata {
	if m, ok := r.(arrow.RecordBatchWithMetadata); ok {
		return m.Metadata()
	}
	return arrow.Metadata{}
}

// sameBuffers reports whether two arrays of one type have equal buffers, as an unchanged copy has.
// If it returns false, the arrays may still be equal: bytes under nulls, padding and offsets do not
// count.
func sameBuffers(a, b arrow.ArrayData) bool {
	x, y := a.Buffers(), b.Buffers()
	if a.Len() != b.Len() || a.Offset() != b.Offset() || len(x) != len(y) {
		return false
	}
	// One array may have a bitmap of ones and the other none.
	if len(x) > 0 && a.NullN() == 0 && b.NullN() == 0 {
		x, y = x[1:], y[1:]
	}
	// Without a dictionary, arrow-go returns an interface that is not nil and has a nil pointer in
	// it.
	dictA, _ := a.Dictionary().(*array.Data)
	dictB, _ := b.Dictionary().(*array.Data)
	return slices.EqualFunc(x, y, func(x, y *memory.Buffer) bool {
		return x == y || x != nil && y != nil && bytes.Equal(x.Bytes(), y.Bytes())
	}) && slices.EqualFunc(a.Children(), b.Children(), sameBuffers) &&
		(dictA == dictB || dictA != nil && dictB != nil && sameBuffers(dictA, dictB))
}

// Schemas compares two schemas and returns nil, or a *DifferenceError with the first difference.
// Byte order, order of fields, and metadata count.
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

// difference is a difference of two values or fields, and where in them it is. Each caller puts its
// own part of the path in front, so the path is complete at the column.
type difference struct{ path, a, b string }

// fieldDifference returns the first difference of two fields, or nil. named is whether their names
// count.
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

// Types reports whether two types are the same, with all that Records compares of them: the fields
// of nested types with their metadata, and the parameters of extensions.
func Types(a, b arrow.DataType) bool { return typeDifference(a, b) == nil }

// typeDifference returns the first difference of two types, or nil. It also compares what
// arrow.TypeEqual ignores, such as the nested metadata of some types and the storage of extensions.
// It is called for each record and each dictionary, almost always with the same pointer.
func typeDifference(a, b arrow.DataType) *difference {
	if a == b {
		return nil
	}
	diff := &difference{a: "the type " + a.String(), b: b.String()}
	if a.ID() != b.ID() {
		return diff
	}
	// First what is not in the fields of nested types.
	switch x := a.(type) {
	case arrow.ExtensionType:
		// An extension's ExtensionEquals may ignore its parameters, so their serialized form counts
		// too.
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
	// Then the fields. TypeEqual suffices for types without any.
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
	// Names of list items differ between implementations ("item", "element"), and mean nothing.
	_, list := a.(arrow.ListLikeType)
	for i := range fx {
		if d := fieldDifference(fx[i], fy[i], !list); d != nil {
			d.path = "." + fx[i].Name + d.path
			return d
		}
	}
	return nil
}
