package arrowgen

import (
	"fmt"
	"reflect"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
)

// Flat returns every type without children, the parametric ones with several
// parameters.
func Flat() []arrow.DataType {
	types := []arrow.DataType{
		arrow.Null,
		arrow.FixedWidthTypes.Boolean,
		arrow.PrimitiveTypes.Int8, arrow.PrimitiveTypes.Int16, arrow.PrimitiveTypes.Int32, arrow.PrimitiveTypes.Int64,
		arrow.PrimitiveTypes.Uint8, arrow.PrimitiveTypes.Uint16, arrow.PrimitiveTypes.Uint32, arrow.PrimitiveTypes.Uint64,
		arrow.FixedWidthTypes.Float16, arrow.PrimitiveTypes.Float32, arrow.PrimitiveTypes.Float64,
		&arrow.Decimal32Type{Precision: 9, Scale: 2}, &arrow.Decimal64Type{Precision: 18, Scale: 4},
		&arrow.Decimal128Type{Precision: 38, Scale: 10}, &arrow.Decimal256Type{Precision: 76, Scale: -3},
		arrow.FixedWidthTypes.Date32, arrow.FixedWidthTypes.Date64,
		arrow.FixedWidthTypes.MonthInterval, arrow.FixedWidthTypes.DayTimeInterval, arrow.FixedWidthTypes.MonthDayNanoInterval,
		arrow.BinaryTypes.Binary, arrow.BinaryTypes.String, arrow.BinaryTypes.LargeBinary, arrow.BinaryTypes.LargeString,
		arrow.BinaryTypes.BinaryView, arrow.BinaryTypes.StringView,
		&arrow.FixedSizeBinaryType{ByteWidth: 1}, &arrow.FixedSizeBinaryType{ByteWidth: 5}, &arrow.FixedSizeBinaryType{ByteWidth: 70},
		arrow.FixedWidthTypes.Time32s, arrow.FixedWidthTypes.Time32ms, arrow.FixedWidthTypes.Time64us, arrow.FixedWidthTypes.Time64ns,
	}
	for _, unit := range []arrow.TimeUnit{arrow.Second, arrow.Millisecond, arrow.Microsecond, arrow.Nanosecond} {
		types = append(types,
			&arrow.TimestampType{Unit: unit}, &arrow.TimestampType{Unit: unit, TimeZone: "Europe/Berlin"},
			&arrow.DurationType{Unit: unit})
	}
	return types
}

// Nested returns every type that has children over elem, among them
// dictionaries, run-end encoded arrays and an extension that is not registered.
func Nested(elem arrow.DataType) []arrow.DataType {
	types := []arrow.DataType{
		arrow.ListOf(elem), arrow.LargeListOf(elem),
		arrow.ListViewOf(elem), arrow.LargeListViewOf(elem),
		arrow.FixedSizeListOf(3, elem),
		arrow.StructOf(
			arrow.Field{Name: "a", Type: elem, Nullable: true},
			arrow.Field{Name: "b", Type: arrow.PrimitiveTypes.Int16, Nullable: true, Metadata: arrow.NewMetadata([]string{"k"}, []string{"v"})},
		),
		arrow.MapOf(arrow.BinaryTypes.String, elem),
		arrow.SparseUnionOf(unionFields(elem)),
		arrow.DenseUnionOf(unionFields(elem)),
		NewExtension("spillway.test", elem),
	}
	for _, index := range []arrow.DataType{
		arrow.PrimitiveTypes.Int8, arrow.PrimitiveTypes.Uint8, arrow.PrimitiveTypes.Int16, arrow.PrimitiveTypes.Uint16,
		arrow.PrimitiveTypes.Int32, arrow.PrimitiveTypes.Uint32, arrow.PrimitiveTypes.Int64, arrow.PrimitiveTypes.Uint64,
	} {
		types = append(types, &arrow.DictionaryType{IndexType: index, ValueType: elem, Ordered: index == arrow.PrimitiveTypes.Int8})
	}
	for _, ends := range []arrow.DataType{arrow.PrimitiveTypes.Int16, arrow.PrimitiveTypes.Int32, arrow.PrimitiveTypes.Int64} {
		types = append(types, arrow.RunEndEncodedOf(ends, elem))
	}
	return types
}

func unionFields(elem arrow.DataType) ([]arrow.Field, []arrow.UnionTypeCode) {
	return []arrow.Field{
		{Name: "text", Type: arrow.BinaryTypes.String, Nullable: true},
		{Name: "elem", Type: elem, Nullable: true},
		{Name: "flag", Type: arrow.FixedWidthTypes.Boolean, Nullable: true},
	}, []arrow.UnionTypeCode{9, 0, 126}
}

// Types returns the types that tests should go through one by one: all flat ones; all nested ones
// over int32 and over strings; each nested one within a struct, a list, a fixed-size list, a
// dictionary, a dense union and an extension; a struct without fields; a union with the last type
// code; and a list of lists of structs.
func Types() []arrow.DataType {
	types := append(Flat(), Nested(arrow.PrimitiveTypes.Int32)...)
	inner := Nested(arrow.BinaryTypes.String)
	types = append(types, inner...)
	for _, t := range inner {
		types = append(types,
			arrow.StructOf(arrow.Field{Name: "s", Type: t, Nullable: true}),
			arrow.ListOf(t), arrow.FixedSizeListOf(2, t), arrow.ListViewOf(t),
			&arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int16, ValueType: t},
			arrow.DenseUnionOf(unionFields(t)),
			NewExtension("spillway.outer", t))
	}
	return append(types, arrow.StructOf(),
		arrow.DenseUnionOf([]arrow.Field{{Name: "last", Type: arrow.BinaryTypes.String, Nullable: true}}, []arrow.UnionTypeCode{127}),
		arrow.ListOf(arrow.LargeListOf(arrow.StructOf(
			arrow.Field{Name: "x", Type: arrow.ListOf(arrow.FixedWidthTypes.Boolean), Nullable: true},
			arrow.Field{Name: "y", Type: arrow.BinaryTypes.StringView, Nullable: true}))))
}

// RandomType returns a type that is nested up to depth levels.
func (g *Gen) RandomType(depth int) arrow.DataType {
	if depth <= 0 || g.Rng.IntN(3) == 0 {
		flat := Flat()
		return flat[g.Rng.IntN(len(flat))]
	}
	elem := g.RandomType(depth - 1)
	for elem.ID() == arrow.RUN_END_ENCODED { // runs of runs are not in use
		elem = g.RandomType(depth - 1)
	}
	nested := Nested(elem)
	return nested[g.Rng.IntN(len(nested))]
}

// Extension is an extension type over any storage. It is never registered.
type Extension struct {
	arrow.ExtensionBase
	name string
}

// NewExtension returns an extension type.
func NewExtension(name string, storage arrow.DataType) *Extension {
	return &Extension{ExtensionBase: arrow.ExtensionBase{Storage: storage}, name: name}
}

// ExtensionArray is an array of an Extension.
type ExtensionArray struct{ array.ExtensionArrayBase }

// ValueStr prints the storage's value.
func (a *ExtensionArray) ValueStr(i int) string { return a.Storage().ValueStr(i) }

// ArrayType implements arrow.ExtensionType.
func (*Extension) ArrayType() reflect.Type { return reflect.TypeFor[ExtensionArray]() }

// ExtensionName implements arrow.ExtensionType.
func (e *Extension) ExtensionName() string { return e.name }

// String distinguishes two extensions.
func (e *Extension) String() string { return fmt.Sprintf("extension<%s, %s>", e.name, e.Storage) }

// ExtensionEquals implements arrow.ExtensionType.
func (e *Extension) ExtensionEquals(other arrow.ExtensionType) bool {
	o, ok := other.(*Extension)
	return ok && o.name == e.name && arrow.TypeEqual(o.Storage, e.Storage)
}

// Serialize implements arrow.ExtensionType.
func (*Extension) Serialize() string { return "" }

// Deserialize implements arrow.ExtensionType.
func (e *Extension) Deserialize(storage arrow.DataType, _ string) (arrow.ExtensionType, error) {
	return NewExtension(e.name, storage), nil
}

var _ array.ExtensionArray = (*ExtensionArray)(nil)
