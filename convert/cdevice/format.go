package cdevice

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
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
	"tiM": arrow.FixedWidthTypes.MonthInterval, "tiD": arrow.FixedWidthTypes.DayTimeInterval, "tin": arrow.FixedWidthTypes.MonthDayNanoInterval,
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
	case *arrow.ListType:
		return "+l", true
	case *arrow.LargeListType:
		return "+L", true
	case *arrow.ListViewType:
		return "+vl", true
	case *arrow.LargeListViewType:
		return "+vL", true
	case *arrow.FixedSizeListType:
		return fmt.Sprintf("+w:%d", t.Len()), true
	case *arrow.StructType:
		return "+s", true
	case *arrow.MapType:
		return "+m", true
	case *arrow.RunEndEncodedType:
		return "+r", true
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
	for f, t := range formats {
		if arrow.TypeEqual(t, dt) {
			return f, true
		}
	}
	return "", false
}

// typeOf makes the type of a format over its children's fields. Parameters that make no
// type are a convert.InvalidError, and a format that is not known is tier.ErrNotSupported.
func (p path) typeOf(f string, flags int64, children []arrow.Field) (arrow.DataType, error) {
	if dt, ok := formats[f]; ok {
		return dt, p.childless(f, children)
	}
	key, param, _ := strings.Cut(f, ":")
	switch {
	case key == "w":
		n, err := strconv.ParseInt(param, 10, 32)
		if err != nil || n < 0 {
			return nil, p.invalid("the format %q", f)
		}
		return &arrow.FixedSizeBinaryType{ByteWidth: int(n)}, p.childless(f, children)
	case key == "d":
		dt, err := p.decimal(f, param)
		if err != nil {
			return nil, err
		}
		return dt, p.childless(f, children)
	case len(key) == 3 && key[:2] == "ts" && strings.IndexByte(units, key[2]) >= 0:
		return &arrow.TimestampType{Unit: arrow.TimeUnit(strings.IndexByte(units, key[2])), TimeZone: param}, p.childless(f, children)
	}
	return p.nested(f, key, param, flags, children)
}

func (p path) childless(f string, children []arrow.Field) error {
	if len(children) > 0 {
		return p.invalid("the format %q with %d children", f, len(children))
	}
	return nil
}

func (p path) decimal(f, param string) (arrow.DataType, error) {
	var n [3]int64
	n[2] = 128
	parts := strings.Split(param, ",")
	if len(parts) < 2 || len(parts) > 3 {
		return nil, p.invalid("the format %q", f)
	}
	for i, s := range parts {
		var err error
		if n[i], err = strconv.ParseInt(s, 10, 32); err != nil {
			return nil, p.invalid("the format %q", f)
		}
	}
	precision, scale := int32(n[0]), int32(n[1])
	switch n[2] {
	case 32:
		return &arrow.Decimal32Type{Precision: precision, Scale: scale}, nil
	case 64:
		return &arrow.Decimal64Type{Precision: precision, Scale: scale}, nil
	case 128:
		return &arrow.Decimal128Type{Precision: precision, Scale: scale}, nil
	case 256:
		return &arrow.Decimal256Type{Precision: precision, Scale: scale}, nil
	}
	return nil, p.unsupported("the format %q", f)
}

func (p path) nested(f, key, param string, flags int64, children []arrow.Field) (arrow.DataType, error) {
	want := 1
	switch key {
	case "+s":
		return arrow.StructOf(children...), nil
	case "+us", "+ud":
		return p.union(f, key, param, children)
	case "+r":
		want = 2
	case "+l", "+L", "+vl", "+vL", "+w", "+m":
	default:
		return nil, p.unsupported("the format %q", f)
	}
	if len(children) != want {
		return nil, p.invalid("the format %q with %d children", f, len(children))
	}
	switch key {
	case "+l":
		return arrow.ListOfField(children[0]), nil
	case "+L":
		return arrow.LargeListOfField(children[0]), nil
	case "+vl":
		return arrow.ListViewOfField(children[0]), nil
	case "+vL":
		return arrow.LargeListViewOfField(children[0]), nil
	case "+w":
		n, err := strconv.ParseInt(param, 10, 32)
		if err != nil || n <= 0 { // arrow-go has no such lists of none
			return nil, p.invalid("the format %q", f)
		}
		return arrow.FixedSizeListOfField(int32(n), children[0]), nil
	case "+r":
		t := arrow.RunEndEncodedOf(children[0].Type, children[1].Type)
		if !t.ValidRunEndsType(children[0].Type) {
			return nil, p.invalid("run ends of type %s", children[0].Type)
		}
		t.ValueNullable = children[1].Nullable
		return t, nil
	}
	entries, ok := children[0].Type.(*arrow.StructType)
	if !ok || entries.NumFields() != 2 {
		return nil, p.invalid("a map of %s", children[0].Type)
	}
	t := arrow.MapOfFields(entries.Field(0), entries.Field(1))
	t.KeysSorted = flags&flagKeysSorted != 0
	return t, nil
}

func (p path) union(f, key, param string, children []arrow.Field) (arrow.DataType, error) {
	var codes []arrow.UnionTypeCode
	if param != "" {
		for s := range strings.SplitSeq(param, ",") {
			n, err := strconv.ParseInt(s, 10, 8)
			if err != nil || n < 0 || slices.Contains(codes, arrow.UnionTypeCode(n)) {
				return nil, p.invalid("the format %q", f)
			}
			codes = append(codes, arrow.UnionTypeCode(n))
		}
	}
	if len(codes) != len(children) {
		return nil, p.invalid("the format %q with %d children", f, len(children))
	}
	if key == "+us" {
		return arrow.SparseUnionOf(children, codes), nil
	}
	return arrow.DenseUnionOf(children, codes), nil
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
func (p path) metadata(at uintptr) (m arrow.Metadata, err error) {
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
			return m, p.invalid("metadata of %d bytes and more", total)
		}
		texts = append(texts, string(bytes.Clone(several[byte](at, n))))
		at, total = at+uintptr(n), total+n
		if total > metadataMost {
			return m, p.invalid("metadata of %d bytes and more", total)
		}
	}
	if pairs < 0 {
		return m, p.invalid("metadata of %d pairs", pairs)
	}
	var keys, values []string
	for i := 0; i < len(texts); i += 2 {
		keys, values = append(keys, texts[i]), append(values, texts[i+1])
	}
	return arrow.NewMetadata(keys, values), nil
}
