package cdevice

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/internal/image"
)

// plainTypes are the types whose format has no parameters and no children, by their format. The
// letters are the specification's (https://arrow.apache.org/docs/format/CDataInterface.html, "Data
// type description"). The buffers of all types are in package shape.
var plainTypes = map[string]arrow.DataType{
	"n": arrow.Null, "b": arrow.FixedWidthTypes.Boolean,
	"c": arrow.PrimitiveTypes.Int8, "C": arrow.PrimitiveTypes.Uint8,
	"s": arrow.PrimitiveTypes.Int16, "S": arrow.PrimitiveTypes.Uint16,
	"i": arrow.PrimitiveTypes.Int32, "I": arrow.PrimitiveTypes.Uint32,
	"l": arrow.PrimitiveTypes.Int64, "L": arrow.PrimitiveTypes.Uint64,
	"e": arrow.FixedWidthTypes.Float16, "f": arrow.PrimitiveTypes.Float32, "g": arrow.PrimitiveTypes.Float64,
	"z": arrow.BinaryTypes.Binary, "Z": arrow.BinaryTypes.LargeBinary, "vz": arrow.BinaryTypes.BinaryView,
	"u": arrow.BinaryTypes.String, "U": arrow.BinaryTypes.LargeString, "vu": arrow.BinaryTypes.StringView,
	"tdD": arrow.FixedWidthTypes.Date32, "tdm": arrow.FixedWidthTypes.Date64,
	"tts": arrow.FixedWidthTypes.Time32s, "ttm": arrow.FixedWidthTypes.Time32ms,
	"ttu": arrow.FixedWidthTypes.Time64us, "ttn": arrow.FixedWidthTypes.Time64ns,
	"tDs": arrow.FixedWidthTypes.Duration_s, "tDm": arrow.FixedWidthTypes.Duration_ms,
	"tDu": arrow.FixedWidthTypes.Duration_us, "tDn": arrow.FixedWidthTypes.Duration_ns,
	"tiM": arrow.FixedWidthTypes.MonthInterval, "tiD": arrow.FixedWidthTypes.DayTimeInterval,
	"tin": arrow.FixedWidthTypes.MonthDayNanoInterval,
}

// otherTypes are the other types, by their format up to the colon, with the number of their
// children.
var otherTypes = map[string]struct {
	id       arrow.Type
	children int
}{
	"w": {arrow.FIXED_SIZE_BINARY, 0}, "d": {arrow.DECIMAL128, 0},
	"tss": {arrow.TIMESTAMP, 0}, "tsm": {arrow.TIMESTAMP, 0}, "tsu": {arrow.TIMESTAMP, 0}, "tsn": {arrow.TIMESTAMP, 0},
	"+l": {arrow.LIST, 1}, "+L": {arrow.LARGE_LIST, 1}, "+vl": {arrow.LIST_VIEW, 1}, "+vL": {arrow.LARGE_LIST_VIEW, 1},
	"+w": {arrow.FIXED_SIZE_LIST, 1}, "+m": {arrow.MAP, 1}, "+r": {arrow.RUN_END_ENCODED, 2},
	"+s": {arrow.STRUCT, anyNumber}, "+us": {arrow.SPARSE_UNION, anyNumber}, "+ud": {arrow.DENSE_UNION, anyNumber},
}

const (
	anyNumber = -1     // of children
	units     = "smun" // the letters of arrow.TimeUnit
)

// decimals are the types of decimals by their bits.
var decimals = map[int]arrow.Type{
	32: arrow.DECIMAL32, 64: arrow.DECIMAL64, 128: arrow.DECIMAL128, 256: arrow.DECIMAL256,
}

// format returns the format string of a type that is no extension, and false if there is none. A
// dictionary's is that of its indices: the values are in a struct of their own.
func format(dt arrow.DataType) (text string, ok bool) {
	params := ""
	switch t := dt.(type) {
	case *arrow.DictionaryType:
		// The struct of a dictionary array describes the indices, and its dictionary member the values.
		return format(t.IndexType)
	case arrow.DecimalType:
		// 128 bits are the default, which other libraries leave out too.
		return strings.TrimSuffix(fmt.Sprintf("d:%d,%d,%d", t.GetPrecision(), t.GetScale(), t.BitWidth()), ",128"), true
	case *arrow.TimestampType:
		return fmt.Sprintf("ts%c:%s", units[t.Unit], t.TimeZone), true
	case *arrow.FixedSizeBinaryType:
		params = fmt.Sprintf(":%d", t.ByteWidth)
	case *arrow.FixedSizeListType:
		params = fmt.Sprintf(":%d", t.Len())
	case arrow.UnionType:
		codes := make([]string, t.NumFields())
		for i, c := range t.TypeCodes() {
			codes[i] = strconv.Itoa(int(c))
		}
		params = ":" + strings.Join(codes, ",")
	}
	for f, row := range otherTypes {
		if row.id == dt.ID() {
			return f + params, true
		}
	}
	for f, t := range plainTypes {
		if arrow.TypeEqual(t, dt) {
			return f, true
		}
	}
	return "", false
}

// typeOf returns the type of the format f over its children's fields. Parameters that make no type
// are a *convert.InvalidError or a panic of arrow-go's, which schemaReader.record recovers. A
// format that is not known is tier.ErrNotSupported.
func typeOf(p image.Path, f string, flags int64, children []arrow.Field) (t arrow.DataType, err error) {
	key, param, _ := strings.Cut(f, ":")
	plain := plainTypes[f]
	// Types without parameters are found by the whole text, others by what is before the colon.
	row, known := otherTypes[key]
	switch {
	case plain == nil && !known:
		return nil, unsupported(p, "the format %q", f)
	case row.children != anyNumber && row.children != len(children):
		return nil, p.Invalid("the format %q with %d children", f, len(children))
	case plain != nil:
		return plain, nil
	}
	number, _ := strconv.ParseInt(param, 10, 32)
	switch row.id {
	case arrow.TIMESTAMP:
		// The time zone is taken as it is, and may contain colons: Cut has split at the first one.
		return &arrow.TimestampType{Unit: arrow.TimeUnit(strings.IndexByte(units, key[2])), TimeZone: param}, nil
	case arrow.FIXED_SIZE_BINARY:
		t = &arrow.FixedSizeBinaryType{ByteWidth: int(max(0, number))}
	case arrow.DECIMAL128:
		var precision, scale int32
		bits := 128
		_, _ = fmt.Sscanf(param, "%d,%d,%d", &precision, &scale, &bits)
		id, ok := decimals[bits]
		if !ok {
			return nil, unsupported(p, "the format %q", f)
		}
		if t, err = arrow.NewDecimalType(id, precision, scale); err != nil {
			return nil, p.Invalid("the format %q: %v", f, err)
		}
	case arrow.LIST:
		t = arrow.ListOfField(children[0])
	case arrow.LARGE_LIST:
		t = arrow.LargeListOfField(children[0])
	case arrow.LIST_VIEW:
		t = arrow.ListViewOfField(children[0])
	case arrow.LARGE_LIST_VIEW:
		t = arrow.LargeListViewOfField(children[0])
	case arrow.FIXED_SIZE_LIST: // arrow-go has no such lists of none
		t = arrow.FixedSizeListOfField(int32(number), children[0])
	case arrow.STRUCT:
		t = arrow.StructOf(children...)
	case arrow.MAP:
		// A map has one child, a struct of key and value, whose own names do not matter.
		entries, ok := children[0].Type.(*arrow.StructType)
		if !ok || entries.NumFields() != 2 {
			return nil, p.Invalid("a map of %s", children[0].Type)
		}
		m := arrow.MapOfFields(entries.Field(0), entries.Field(1))
		m.KeysSorted = flags&flagKeysSorted != 0
		t = m
	case arrow.RUN_END_ENCODED:
		// arrow-go's constructor makes the values nullable.
		r := arrow.RunEndEncodedOf(children[0].Type, children[1].Type)
		if !r.ValidRunEndsType(children[0].Type) {
			return nil, p.Invalid("run ends of type %s", children[0].Type)
		}
		r.ValueNullable = children[1].Nullable
		t = r
	default: // a union
		var codes []arrow.UnionTypeCode
		for _, s := range strings.FieldsFunc(param, func(c rune) bool { return c == ',' }) {
			c, _ := strconv.ParseInt(s, 10, 8)
			codes = append(codes, arrow.UnionTypeCode(c))
		}
		mode := arrow.SparseMode
		if row.id == arrow.DENSE_UNION {
			mode = arrow.DenseMode
		}
		t = arrow.UnionOf(mode, children, codes)
	}
	// Numbers were parsed leniently above. Formatting the type again shows whether the text meant
	// just that: a parameter that is no number, or out of its range, was read as another one.
	if back, _ := format(t); back != f && (row.id != arrow.DECIMAL128 || back+",128" != f) {
		return nil, p.Invalid("the format %q", f)
	}
	return t, nil
}
