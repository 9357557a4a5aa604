package arrowgen

import (
	"fmt"
	"reflect"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
)

// The types of arrow-go without parameters, by shorter names.
var numbers, fixed, texts = arrow.PrimitiveTypes, arrow.FixedWidthTypes, arrow.BinaryTypes

// Flat returns every type without children, parametric types with several parameters.
func Flat() []arrow.DataType {
	types := []arrow.DataType{
		arrow.Null,
		fixed.Boolean,
		numbers.Int8, numbers.Int16, numbers.Int32, numbers.Int64,
		numbers.Uint8, numbers.Uint16, numbers.Uint32, numbers.Uint64,
		fixed.Float16, numbers.Float32, numbers.Float64,
		&arrow.Decimal32Type{Precision: 9, Scale: 2}, &arrow.Decimal64Type{Precision: 18, Scale: 4},
		&arrow.Decimal128Type{Precision: 38, Scale: 10}, &arrow.Decimal256Type{Precision: 76, Scale: -3},
		fixed.Date32, fixed.Date64,
		fixed.MonthInterval, fixed.DayTimeInterval,
		fixed.MonthDayNanoInterval,
		texts.Binary, texts.String, texts.LargeBinary, texts.LargeString,
		texts.BinaryView, texts.StringView,
		&arrow.FixedSizeBinaryType{ByteWidth: 1}, &arrow.FixedSizeBinaryType{ByteWidth: 5},
		&arrow.FixedSizeBinaryType{ByteWidth: 70},
		fixed.Time32s, fixed.Time32ms,
		fixed.Time64us, fixed.Time64ns,
	}
	for _, unit := range []arrow.TimeUnit{arrow.Second, arrow.Millisecond, arrow.Microsecond, arrow.Nanosecond} {
		types = append(types,
			&arrow.TimestampType{Unit: unit}, &arrow.TimestampType{Unit: unit, TimeZone: "Europe/Berlin"},
			&arrow.DurationType{Unit: unit})
	}
	return types
}

// Nested returns every type with children of type elem, including dictionaries, run-end encoded
// types and an extension that is not registered.
func Nested(elem arrow.DataType) []arrow.DataType {
	meta := arrow.NewMetadata([]string{"k"}, []string{"v"})
	types := []arrow.DataType{
		arrow.ListOf(elem), arrow.LargeListOf(elem),
		arrow.ListViewOf(elem), arrow.LargeListViewOf(elem),
		arrow.FixedSizeListOf(3, elem),
		arrow.StructOf(
			arrow.Field{Name: "a", Type: elem, Nullable: true},
			arrow.Field{Name: "b", Type: numbers.Int16, Nullable: true, Metadata: meta},
		),
		arrow.MapOf(texts.String, elem),
		arrow.SparseUnionOf(unionFields(elem)),
		arrow.DenseUnionOf(unionFields(elem)),
		NewExtension("spillway.test", elem),
	}
	for _, index := range []arrow.DataType{
		numbers.Int8, numbers.Uint8, numbers.Int16, numbers.Uint16,
		numbers.Int32, numbers.Uint32, numbers.Int64, numbers.Uint64,
	} {
		ordered := index == numbers.Int8
		types = append(types, &arrow.DictionaryType{IndexType: index, ValueType: elem, Ordered: ordered})
	}
	for _, ends := range []arrow.DataType{numbers.Int16, numbers.Int32, numbers.Int64} {
		types = append(types, arrow.RunEndEncodedOf(ends, elem))
	}
	return types
}

func unionFields(elem arrow.DataType) ([]arrow.Field, []arrow.UnionTypeCode) {
	return []arrow.Field{
		{Name: "text", Type: texts.String, Nullable: true},
		{Name: "elem", Type: elem, Nullable: true},
		{Name: "flag", Type: fixed.Boolean, Nullable: true},
	}, []arrow.UnionTypeCode{9, 0, 126}
}

// Types returns the types that tests should try one by one: all flat types; all nested types over
// int32 and over strings; each nested type within a struct, a list, a fixed-size list, a
// dictionary, a dense union and an extension; a struct without fields; a union with the last type
// code; and a list of lists of structs.
func Types() []arrow.DataType {
	types := append(Flat(), Nested(numbers.Int32)...)
	inner := Nested(texts.String)
	types = append(types, inner...)
	for _, t := range inner {
		types = append(types,
			arrow.StructOf(arrow.Field{Name: "s", Type: t, Nullable: true}),
			arrow.ListOf(t), arrow.FixedSizeListOf(2, t), arrow.ListViewOf(t),
			&arrow.DictionaryType{IndexType: numbers.Int16, ValueType: t},
			arrow.DenseUnionOf(unionFields(t)),
			NewExtension("spillway.outer", t))
	}
	last := []arrow.Field{{Name: "last", Type: texts.String, Nullable: true}}
	return append(types, arrow.StructOf(),
		arrow.DenseUnionOf(last, []arrow.UnionTypeCode{127}),
		arrow.ListOf(arrow.LargeListOf(arrow.StructOf(
			arrow.Field{Name: "x", Type: arrow.ListOf(fixed.Boolean), Nullable: true},
			arrow.Field{Name: "y", Type: texts.StringView, Nullable: true}))))
}

// RandomType returns a type that is nested up to depth levels.
func (g *Gen) RandomType(depth int) arrow.DataType {
	if depth <= 0 || g.Rng.IntN(3) == 0 {
		flat := Flat()
		return flat[g.Rng.IntN(len(flat))]
	}
	elem := g.RandomType(depth - 1)
	for elem.ID() == arrow.RUN_END_ENCODED { // runs of runs are not used in practice
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

// ValueStr formats the storage's value.
func (a *ExtensionArray) ValueStr(i int) string { return a.Storage().ValueStr(i) }

// ArrayType implements arrow.ExtensionType.
func (*Extension) ArrayType() reflect.Type { return reflect.TypeFor[ExtensionArray]() }

// ExtensionName implements arrow.ExtensionType.
func (e *Extension) ExtensionName() string { return e.name }

// String includes the name and the storage, which distinguish extensions.
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
