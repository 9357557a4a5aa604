// Package arrowgen makes test data: random arrays and record batches of every Arrow type. The same
// seed results in the same data.
//
// The arrays are valid and, unless Plain, as awkward as the format allows: sliced at every level,
// lists that begin in the middle of their values, list views that overlap and go backwards, views
// over several buffers with unused bytes, union children and dictionaries with unused values,
// random bytes under nulls and after the end of bitmaps, unknown null counts.
//
// Types and RandomType return types. Gen.Array, Gen.Record and Gen.RandomRecord fill them. Flights,
// Strings and Ints make the tables that benchmarks use.
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

// Gen makes arrays. Its fields may change between calls. A Gen is not safe for concurrent use.
type Gen struct {
	Rng   *rand.Rand
	Mem   memory.Allocator // nil: Go's heap
	Nulls float64          // share of nulls; 0: none, 1: all
	Plain bool             // arrays as a builder would make them
}

// New returns a generator whose arrays depend only on the seed. A fifth of the values are null.
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
	data := make([]*array.Data, schema.NumFields())
	for i := range data {
		data[i] = g.data(schema.Field(i).Type, rows)
	}
	return recordOf(schema, rows, data...)
}

// recordOf returns a batch of columns, which it releases.
func recordOf(schema *arrow.Schema, rows int, data ...*array.Data) arrow.RecordBatch {
	cols := make([]arrow.Array, len(data))
	for i, d := range data {
		cols[i] = array.MakeFromData(d)
		d.Release()
		defer cols[i].Release()
	}
	return array.NewRecordBatch(schema, cols, int64(rows))
}

// RandomRecord returns a batch of up to maxCols columns of random types, nested up to depth, and up
// to maxRows rows, sliced or not. The caller releases it.
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

// data makes n rows, as an array of their own or as a slice of a larger one.
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
	mem := g.Mem
	if mem == nil {
		mem = memory.DefaultAllocator
	}
	buf := memory.NewResizableBuffer(mem)
	buf.Resize(len(b))
	copy(buf.Bytes(), b)
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

// rows describes the rows of an array.
type rows struct {
	n, nulls int
	valid    *memory.Buffer // a bitmap with the nulls; nil: there is none
}

// rows returns n rows, some of which are null.
func (g *Gen) rows(n int) rows {
	if g.Nulls == 0 && (g.Plain || g.Rng.IntN(2) == 0) {
		return rows{n: n}
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
	return rows{n, nulls, g.bytes(bits)}
}

func (g *Gen) null() bool { return g.Nulls >= 1 || g.Rng.Float64() < g.Nulls }

// finish makes an array of values, a buffer for each, and children, which it releases.
func (g *Gen) finish(dt arrow.DataType, r rows, values [][]byte, children ...arrow.ArrayData) *array.Data {
	bufs := []*memory.Buffer{r.valid}
	for _, b := range values {
		bufs = append(bufs, g.bytes(b))
	}
	d := array.NewData(dt, r.n, bufs, children, r.nulls, 0)
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
		return g.finish(dt, rows{n: n, nulls: n}, nil)
	case *arrow.BooleanType:
		return g.finish(dt, g.rows(n), [][]byte{g.random((n + 7) / 8)})
	case arrow.BinaryViewDataType:
		return g.views(dt, n)
	case arrow.BinaryDataType:
		return g.binary(dt, n)
	case *arrow.ListType, *arrow.LargeListType, *arrow.MapType:
		return g.list(dt.(arrow.ListLikeType), n)
	case *arrow.ListViewType, *arrow.LargeListViewType:
		return g.listView(dt.(arrow.ListLikeType), n)
	case *arrow.FixedSizeListType:
		return g.finish(dt, g.rows(n), nil, g.data(t.Elem(), n*int(t.Len())+g.slack()))
	case *arrow.StructType:
		return g.finish(dt, g.rows(n), nil, g.fields(t, n)...)
	case *arrow.SparseUnionType:
		children := g.fields(t, n)
		return g.finish(dt, rows{n: n}, [][]byte{g.codes(t, n)}, children...)
	case *arrow.DenseUnionType:
		return g.denseUnion(t, n)
	case *arrow.DictionaryType:
		return g.dictionary(t, n)
	case *arrow.RunEndEncodedType:
		return g.runs(t, n)
	case arrow.ExtensionType:
		return g.extension(t, n)
	case arrow.FixedWidthDataType:
		return g.finish(dt, g.rows(n), [][]byte{g.fixed(t, n)})
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

// slack returns how many values a child has besides those in use.
func (g *Gen) slack() int {
	if g.Plain {
		return 0
	}
	return max(0, g.Rng.IntN(8)-4)
}

// fixed returns n values of random bits. Among floats, infinities, zeros and NaNs are more frequent
// than random bits would make them.
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

// runes are the characters of texts.
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

// Values formats every row of a column as arrow-go does. ok is false for types that arrow-go cannot
// format.
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

// Within reports whether is returns true for dt or for a type within it.
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

// HasDictionary reports whether dt is or contains a dictionary type.
func HasDictionary(dt arrow.DataType) bool {
	return Within(dt, func(dt arrow.DataType) bool { return dt.ID() == arrow.DICTIONARY })
}

// Split copies body into pieces that end at some of the cuts.
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
