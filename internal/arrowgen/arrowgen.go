// Package arrowgen makes test data: random arrays and record batches of every
// Arrow type, the same for the same seed.
//
// The arrays are valid and, unless Plain, as awkward as the format allows: sliced at every level,
// lists that begin in the middle of their values, list views that overlap and go backwards, views
// over several buffers with unused bytes, union children and dictionaries with unused values,
// random bytes under nulls and behind the end of bitmaps, unknown null counts.
//
// Types and RandomType say which types there are; Gen.Array, Gen.Record and
// Gen.RandomRecord fill them; Flights and Strings make the tables that
// benchmarks use.
package arrowgen

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// Gen makes arrays. The fields may be changed between calls. A Gen is not safe
// for concurrent use.
type Gen struct {
	Rng   *rand.Rand
	Mem   memory.Allocator // nil: Go's heap
	Nulls float64          // share of nulls; 0 none, 1 all
	Plain bool             // arrays as a builder would make them
}

// New returns a generator whose arrays depend on the seed alone: a fifth of the
// values are null.
func New(seed uint64) *Gen {
	return &Gen{Rng: rand.New(rand.NewPCG(seed, 0x5111)), Nulls: 0.2}
}

// Schema returns a schema with a nullable field of each type and some metadata.
func Schema(types ...arrow.DataType) *arrow.Schema {
	fields := make([]arrow.Field, len(types))
	for i, dt := range types {
		fields[i] = arrow.Field{
			Name: fmt.Sprintf("c%d", i), Type: dt, Nullable: true,
			Metadata: arrow.NewMetadata([]string{"column"}, []string{fmt.Sprint(i)}),
		}
	}
	meta := arrow.NewMetadata([]string{"made-by"}, []string{"arrowgen"})
	return arrow.NewSchema(fields, &meta)
}

// Record returns a batch of a schema. The caller releases it.
func (g *Gen) Record(schema *arrow.Schema, rows int) arrow.RecordBatch {
	cols := make([]arrow.Array, schema.NumFields())
	for i := range cols {
		cols[i] = g.Array(schema.Field(i).Type, rows)
		defer cols[i].Release()
	}
	return array.NewRecordBatch(schema, cols, int64(rows))
}

// RandomRecord returns a batch of up to maxCols columns of random types, nested
// up to depth, and up to maxRows rows, sliced or not. The caller releases it.
func (g *Gen) RandomRecord(maxCols, maxRows, depth int) arrow.RecordBatch {
	types := make([]arrow.DataType, g.Rng.IntN(maxCols+1))
	for i := range types {
		types[i] = g.RandomType(depth)
	}
	rows := g.Rng.IntN(maxRows + 1)
	rec := g.Record(Schema(types...), rows)
	if rows == 0 || g.Rng.IntN(2) == 0 {
		return rec
	}
	defer rec.Release()
	from := g.Rng.Int64N(int64(rows))
	return rec.NewSlice(from, from+g.Rng.Int64N(int64(rows)-from+1))
}

// Array returns an array of n rows. The caller releases it.
func (g *Gen) Array(dt arrow.DataType, n int) arrow.Array {
	d := g.data(dt, n)
	defer d.Release()
	return array.MakeFromData(d)
}

// data makes n rows, by itself or as the middle of more.
func (g *Gen) data(dt arrow.DataType, n int) *array.Data {
	if g.Plain || g.Rng.IntN(3) > 0 {
		return g.whole(dt, n)
	}
	before, after := g.Rng.IntN(12), g.Rng.IntN(6)
	d := g.whole(dt, before+n+after)
	defer d.Release()
	return array.NewSliceData(d, int64(before), int64(before+n)).(*array.Data)
}

// bytes returns a buffer that holds b.
func (g *Gen) bytes(b []byte) *memory.Buffer {
	buf := g.buffer(len(b))
	copy(buf.Bytes(), b)
	return buf
}

// buffer returns n bytes to be written.
func (g *Gen) buffer(n int) *memory.Buffer {
	mem := g.Mem
	if mem == nil {
		mem = memory.DefaultAllocator
	}
	buf := memory.NewResizableBuffer(mem)
	buf.Resize(n)
	return buf
}

// random returns n random bytes.
func (g *Gen) random(n int) []byte {
	b := make([]byte, (n+7)/8*8)
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], g.Rng.Uint64())
	}
	return b[:n]
}

// validity returns a bitmap, nil if there is none, and the number of nulls.
func (g *Gen) validity(n int) (*memory.Buffer, int) {
	if g.Nulls == 0 && (g.Plain || g.Rng.IntN(2) == 0) {
		return nil, 0
	}
	bits := g.random((n + 7) / 8)
	if g.Plain && n%8 != 0 {
		bits[len(bits)-1] = 0
	}
	nulls := 0
	for i := range n {
		bits[i/8] |= 1 << (i % 8)
		if g.null() {
			bits[i/8] &^= 1 << (i % 8)
			nulls++
		}
	}
	return g.bytes(bits), nulls
}

func (g *Gen) null() bool { return g.Nulls >= 1 || g.Rng.Float64() < g.Nulls }

// finish makes the data and gives up what went into it.
func finish(dt arrow.DataType, n, nulls int, bufs []*memory.Buffer, children ...arrow.ArrayData) *array.Data {
	d := array.NewData(dt, n, bufs, children, nulls, 0)
	for _, b := range bufs {
		if b != nil {
			b.Release()
		}
	}
	for _, c := range children {
		c.Release()
	}
	return d
}

// whole makes n rows at offset 0.
func (g *Gen) whole(dt arrow.DataType, n int) *array.Data {
	switch t := dt.(type) {
	case *arrow.NullType:
		return finish(dt, n, n, []*memory.Buffer{nil})
	case *arrow.BooleanType:
		valid, nulls := g.validity(n)
		return finish(dt, n, nulls, []*memory.Buffer{valid, g.bytes(g.random((n + 7) / 8))})
	case arrow.BinaryViewDataType:
		return g.views(dt, n)
	case arrow.BinaryDataType:
		return g.binary(dt, n)
	case *arrow.ListType, *arrow.LargeListType, *arrow.MapType:
		return g.list(dt.(arrow.ListLikeType), n)
	case *arrow.ListViewType, *arrow.LargeListViewType:
		return g.listView(dt.(arrow.ListLikeType), n)
	case *arrow.FixedSizeListType:
		valid, nulls := g.validity(n)
		return finish(dt, n, nulls, []*memory.Buffer{valid}, g.data(t.Elem(), n*int(t.Len())+g.slack()))
	case *arrow.StructType:
		valid, nulls := g.validity(n)
		return finish(dt, n, nulls, []*memory.Buffer{valid}, g.fields(t, n)...)
	case *arrow.SparseUnionType:
		children := g.fields(t, n)
		return finish(dt, n, 0, []*memory.Buffer{nil, g.bytes(g.codes(t, n))}, children...)
	case *arrow.DenseUnionType:
		return g.denseUnion(t, n)
	case *arrow.DictionaryType:
		return g.dictionary(t, n)
	case *arrow.RunEndEncodedType:
		return g.runs(t, n)
	case arrow.ExtensionType:
		return g.extension(t, n)
	case arrow.FixedWidthDataType:
		valid, nulls := g.validity(n)
		return finish(dt, n, nulls, []*memory.Buffer{valid, g.bytes(g.fixed(t, n))})
	}
	panic(fmt.Sprintf("arrowgen: no values for %s", dt))
}

// fields makes the children of a struct or a sparse union of n rows.
func (g *Gen) fields(t arrow.NestedType, n int) (children []arrow.ArrayData) {
	for _, f := range t.Fields() {
		children = append(children, g.data(f.Type, n+g.slack()))
	}
	return children
}

// slack is how many values a child has beyond those that are shown.
func (g *Gen) slack() int {
	if g.Plain {
		return 0
	}
	return max(0, g.Rng.IntN(8)-4)
}

// fixed returns n values of random bits; floats are infinities, zeros and NaNs more often
// than chance would have it.
func (g *Gen) fixed(t arrow.FixedWidthDataType, n int) []byte {
	b := g.random(n * t.Bytes())
	for i := range n {
		if g.Rng.IntN(4) > 0 {
			continue
		}
		switch k := g.Rng.IntN(6); t.ID() {
		case arrow.FLOAT16:
			binary.LittleEndian.PutUint16(b[2*i:], [...]uint16{0, 0x8000, 0x7c00, 0xfc00, 0x7e00, 0x3c00}[k])
		case arrow.FLOAT32:
			binary.LittleEndian.PutUint32(b[4*i:], math.Float32bits(float32(specials[k])))
		case arrow.FLOAT64:
			binary.LittleEndian.PutUint64(b[8*i:], math.Float64bits(specials[k]))
		}
	}
	return b
}

var specials = [...]float64{0, math.Copysign(0, -1), math.Inf(1), math.Inf(-1), math.NaN(), 1.5}

// runes are what texts consist of.
var runes = strings.Split("abcdefghij ÄöКЖ中文😀\x00'\"\\", "")

// text returns up to 40 characters of UTF-8, mostly few.
func (g *Gen) text() []byte {
	n := g.Rng.IntN(14)
	if g.Rng.IntN(8) == 0 {
		n = g.Rng.IntN(40)
	}
	s := make([]byte, 0, 4*n)
	for range n {
		s = append(s, runes[g.Rng.IntN(len(runes))]...)
	}
	return s
}

func putOffset(b []byte, wide bool, v int64) []byte {
	if wide {
		return binary.LittleEndian.AppendUint64(b, uint64(v))
	}
	return binary.LittleEndian.AppendUint32(b, uint32(v))
}

// Values prints every row of a column by arrow-go's means. ok is false for types that cannot be
// printed.
func Values(a arrow.Array) (out []string, ok bool) {
	defer func() {
		if recover() != nil {
			ok = false
		}
	}()
	for i := range a.Len() {
		out = append(out, a.ValueStr(i))
	}
	return out, true
}

// Within reports whether is holds for dt or a type within it.
func Within(dt arrow.DataType, is func(arrow.DataType) bool) bool {
	if is(dt) {
		return true
	}
	switch t := dt.(type) {
	case arrow.ExtensionType:
		return Within(t.StorageType(), is)
	case *arrow.DictionaryType:
		return Within(t.ValueType, is)
	case arrow.NestedType:
		return slices.ContainsFunc(t.Fields(), func(f arrow.Field) bool { return Within(f.Type, is) })
	}
	return false
}

// HasDictionary reports whether there is a dictionary in a type.
func HasDictionary(dt arrow.DataType) bool {
	return Within(dt, func(dt arrow.DataType) bool { return dt.ID() == arrow.DICTIONARY })
}

// Split copies body into pieces that end at some of the places where it may be cut.
func Split(rng *rand.Rand, cuts []int64, body []byte) (pieces [][]byte) {
	at := int64(0)
	for _, cut := range cuts {
		if rng.IntN(2) == 0 {
			pieces = append(pieces, slices.Clone(body[at:cut]))
			at = cut
		}
	}
	return append(pieces, slices.Clone(body[at:]))
}
