package cdevice

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/internal/image"
)

// formats are the strings that stand for types without parameters.
var formats = map[string]arrow.DataType{
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

// nested are the strings that stand for types over others, without parameters.
var nested = map[arrow.Type]string{
	arrow.LIST: "+l", arrow.LARGE_LIST: "+L", arrow.LIST_VIEW: "+vl", arrow.LARGE_LIST_VIEW: "+vL",
	arrow.STRUCT: "+s", arrow.MAP: "+m", arrow.RUN_END_ENCODED: "+r",
}

// units are the letters of time units.
const units = "smun"

// format returns the string of a type that is no extension, and false if there is none.
func format(dt arrow.DataType) (string, bool) {
	switch t := dt.(type) {
	case *arrow.DictionaryType:
		return format(t.IndexType)
	case *arrow.FixedSizeBinaryType:
		return fmt.Sprintf("w:%d", t.ByteWidth), true
	case arrow.DecimalType:
		if bits := t.(arrow.FixedWidthDataType).BitWidth(); bits != 128 {
			return fmt.Sprintf("d:%d,%d,%d", t.GetPrecision(), t.GetScale(), bits), true
		}
		return fmt.Sprintf("d:%d,%d", t.GetPrecision(), t.GetScale()), true
	case *arrow.TimestampType:
		return fmt.Sprintf("ts%c:%s", units[t.Unit], t.TimeZone), true
	case *arrow.FixedSizeListType:
		return fmt.Sprintf("+w:%d", t.Len()), true
	case arrow.UnionType:
		codes := make([]string, t.NumFields())
		for i, c := range t.TypeCodes() {
			codes[i] = strconv.Itoa(int(c))
		}
		mode := "+us:"
		if t.Mode() == arrow.DenseMode {
			mode = "+ud:"
		}
		return mode + strings.Join(codes, ","), true
	}
	if f, ok := nested[dt.ID()]; ok {
		return f, true
	}
	for f, t := range formats {
		if arrow.TypeEqual(t, dt) {
			return f, true
		}
	}
	return "", false
}

// decimals are the types of decimals by their bits.
var decimals = map[int64]arrow.Type{
	32: arrow.DECIMAL32, 64: arrow.DECIMAL64, 128: arrow.DECIMAL128, 256: arrow.DECIMAL256,
}

// typeOf makes the type of a format over its children's fields. Parameters that make no
// type are a convert.InvalidError, and a format that is not known is tier.ErrNotSupported.
func typeOf(p image.Path, f string, flags int64, children []arrow.Field) (arrow.DataType, error) {
	key, param, _ := strings.Cut(f, ":")
	plain, unit := formats[f], -1
	if len(key) == 3 && key[:2] == "ts" {
		unit = strings.IndexByte(units, key[2])
	}
	want := 0 // children
	switch key {
	case "+s", "+us", "+ud":
		want = len(children)
	case "+l", "+L", "+vl", "+vL", "+w", "+m":
		want = 1
	case "+r":
		want = 2
	case "w", "d":
	default:
		if plain == nil && unit < 0 {
			return nil, unsupported(p, "the format %q", f)
		}
	}
	if len(children) != want {
		return nil, p.Invalid("the format %q with %d children", f, len(children))
	}
	switch {
	case plain != nil:
		return plain, nil
	case unit >= 0:
		return &arrow.TimestampType{Unit: arrow.TimeUnit(unit), TimeZone: param}, nil
	}
	var n []int64 // the parameters, which are all numbers
	if param != "" {
		for s := range strings.SplitSeq(param, ",") {
			v, err := strconv.ParseInt(s, 10, 32)
			if err != nil {
				return nil, p.Invalid("the format %q", f)
			}
			n = append(n, v)
		}
	}
	switch key {
	case "+s":
		return arrow.StructOf(children...), nil
	case "+l":
		return arrow.ListOfField(children[0]), nil
	case "+L":
		return arrow.LargeListOfField(children[0]), nil
	case "+vl":
		return arrow.ListViewOfField(children[0]), nil
	case "+vL":
		return arrow.LargeListViewOfField(children[0]), nil
	case "+r":
		t := arrow.RunEndEncodedOf(children[0].Type, children[1].Type)
		if !t.ValidRunEndsType(children[0].Type) {
			return nil, p.Invalid("run ends of type %s", children[0].Type)
		}
		t.ValueNullable = children[1].Nullable
		return t, nil
	case "+m":
		entries, ok := children[0].Type.(*arrow.StructType)
		if !ok || entries.NumFields() != 2 {
			return nil, p.Invalid("a map of %s", children[0].Type)
		}
		t := arrow.MapOfFields(entries.Field(0), entries.Field(1))
		t.KeysSorted = flags&flagKeysSorted != 0
		return t, nil
	case "w":
		if len(n) == 1 && n[0] >= 0 {
			return &arrow.FixedSizeBinaryType{ByteWidth: int(n[0])}, nil
		}
	case "+w":
		if len(n) == 1 && n[0] > 0 { // arrow-go has no such lists of none
			return arrow.FixedSizeListOfField(int32(n[0]), children[0]), nil
		}
	case "d":
		if len(n) == 2 {
			n = append(n, 128)
		}
		if len(n) == 3 {
			id, ok := decimals[n[2]]
			if !ok {
				return nil, unsupported(p, "the format %q", f)
			}
			if t, err := arrow.NewDecimalType(id, int32(n[0]), int32(n[1])); err == nil {
				return t, nil
			}
		}
	default: // a union
		codes := make([]arrow.UnionTypeCode, len(n))
		for i, c := range n {
			if codes[i] = arrow.UnionTypeCode(c); c < 0 || c > 127 || slices.Contains(codes[:i], codes[i]) {
				return nil, p.Invalid("the format %q", f)
			}
		}
		if len(codes) != want {
			return nil, p.Invalid("the format %q with %d children", f, want)
		}
		if key == "+us" {
			return arrow.SparseUnionOf(children, codes), nil
		}
		return arrow.DenseUnionOf(children, codes), nil
	}
	return nil, p.Invalid("the format %q", f)
}

// encoded returns metadata as the C data interface has it: the number of pairs, and each key
// and value behind its length, in 32 bits.
func encoded(m arrow.Metadata) []byte {
	if m.Len() == 0 {
		return nil
	}
	b := binary.NativeEndian.AppendUint32(nil, uint32(m.Len()))
	for i, k := range m.Keys() {
		for _, s := range []string{k, m.Values()[i]} {
			b = append(binary.NativeEndian.AppendUint32(b, uint32(len(s))), s...)
		}
	}
	return b
}

// metadataMost is how many bytes of metadata a field may have.
const metadataMost = 64 << 20

// metadata reads what encoded writes.
func metadata(p image.Path, at uintptr) (m arrow.Metadata, err error) {
	if at == 0 {
		return m, nil
	}
	total := int64(0)
	number := func() int64 {
		n := int64(int32(binary.NativeEndian.Uint32(several[byte](at, 4))))
		at, total = at+4, total+4
		return n
	}
	pairs := number()
	var texts []string
	for range 2 * max(0, pairs) {
		n := number()
		if n < 0 || n > metadataMost-total {
			return m, p.Invalid("metadata of %d bytes and more", total)
		}
		texts = append(texts, string(bytes.Clone(several[byte](at, n))))
		at, total = at+uintptr(n), total+n
		if total > metadataMost {
			return m, p.Invalid("metadata of %d bytes and more", total)
		}
	}
	if pairs < 0 {
		return m, p.Invalid("metadata of %d pairs", pairs)
	}
	var keys, values []string
	for i := 0; i < len(texts); i += 2 {
		keys, values = append(keys, texts[i]), append(values, texts[i+1])
	}
	return arrow.NewMetadata(keys, values), nil
}
