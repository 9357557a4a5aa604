package image

import (
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/payload"
)

// TestLease: the memory is held by whatever was taken from the record, until
// the last of it is released.
func TestLease(t *testing.T) {
	g := arrowgen.New(4)
	g.Plain = true
	schema := arrowgen.Schema(arrow.BinaryTypes.String,
		arrow.StructOf(arrow.Field{Name: "x", Type: arrow.ListOf(arrow.PrimitiveTypes.Int32), Nullable: true}),
		&arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int8, ValueType: arrow.BinaryTypes.String})
	rec := g.Record(schema, 40)
	defer rec.Release()
	for name, take := range map[string]func(arrow.RecordBatch) interface{ Release() }{
		"nothing": func(arrow.RecordBatch) interface{ Release() } { return nil },
		"a slice": func(r arrow.RecordBatch) interface{ Release() } { return r.NewSlice(3, 5) },
		"a column": func(r arrow.RecordBatch) interface{ Release() } {
			r.Column(0).Retain()
			return r.Column(0)
		},
		"a child": func(r arrow.RecordBatch) interface{ Release() } {
			c := r.Column(1).(*array.Struct).Field(0)
			c.Retain()
			return c
		},
		"the dictionary": func(r arrow.RecordBatch) interface{ Release() } {
			c := r.Column(2).Data().Dictionary()
			c.Retain()
			return c
		},
		"a buffer": func(r arrow.RecordBatch) interface{ Release() } {
			b := r.Column(0).Data().Buffers()[2]
			b.Retain()
			return b
		},
	} {
		d, body, _ := LaidOut(t, rec)
		back, released := opened(t, g.Rng, d, body)
		taken := take(back)
		back.Release()
		if taken != nil {
			if released() != 0 {
				t.Errorf("%s: released although it is held", name)
			}
			taken.Release()
		}
		if released() != 1 {
			t.Errorf("%s: released %d times", name, released())
		}
	}
}

// TestInPlace: what is read is the extents' memory, not a copy.
func TestInPlace(t *testing.T) {
	rec := arrowgen.Ints(1, 10, 1)
	defer rec.Release()
	d, body, _ := LaidOut(t, rec)
	back, err := Open(d, [][]byte{body}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer back.Release()
	binary.LittleEndian.PutUint64(body[d.Buffers[1].Offset+8:], 4711)
	if got := back.Column(0).(*array.Int64).Value(1); got != 4711 {
		t.Errorf("%d", got)
	}
	b := back.Column(0).Data().Buffers()[1]
	if cap(b.Bytes()) != b.Len() {
		t.Error("a buffer reaches into the next")
	}
	defer func() {
		if recover() == nil {
			t.Error("a buffer of an image grew")
		}
	}()
	b.Reserve(1 << 20)
}

// TestOpenRefuses goes through the ways in which a descriptor can be wrong.
func TestOpenRefuses(t *testing.T) {
	g := arrowgen.New(2)
	g.Plain = true
	i32, str := arrow.PrimitiveTypes.Int32, arrow.BinaryTypes.String
	type desc = *batch.Descriptor
	for _, c := range []struct {
		name  string
		dt    arrow.DataType
		nulls float64
		spoil func(d desc, body []byte)
		want  string
	}{
		{"no nodes", i32, 0, func(d desc, _ []byte) { d.Nodes = nil }, "no node"},
		{"no buffers", i32, 0, func(d desc, _ []byte) { d.Buffers = d.Buffers[:1] }, "no buffer"},
		{"more nodes", i32, 0, func(d desc, _ []byte) { d.Nodes = append(d.Nodes, payload.Node{}) }, "1 nodes and 0 buffers more"},
		{"more buffers", i32, 0, func(d desc, _ []byte) { d.Buffers = append(d.Buffers, payload.Absent) }, "0 nodes and 1 buffers more"},
		{"negative rows", i32, 0, func(d desc, _ []byte) { d.Rows = -1 }, "-1 rows"},
		{"other rows", i32, 0, func(d desc, _ []byte) { d.Rows = 7 }, "100 rows in a record of 7"},
		{"negative length", i32, 0, func(d desc, _ []byte) { d.Nodes[0].Length = -5 }, "a node of -5 rows"},
		{"huge length", i32, 0, func(d desc, _ []byte) { d.Nodes[0].Length = math.MaxInt64 }, "a node of 9223372036854775807 rows"},
		{"more nulls than rows", i32, 0.5, func(d desc, _ []byte) { d.Nodes[0].Nulls = 101 }, "101 nulls"},
		{"nulls without validity", i32, 0, func(d desc, _ []byte) { d.Nodes[0].Nulls = 1 }, "buffer 0 is missing, of 100 rows, 1 nulls"},
		{"short validity", i32, 0.5, func(d desc, _ []byte) { d.Buffers[0].Length = 12 }, "a buffer of 12 bytes where 13 are needed"},
		{"absent values", i32, 0.5, func(d desc, _ []byte) { d.Buffers[1] = payload.Absent }, "missing"},
		{"short values", i32, 0, func(d desc, _ []byte) { d.Buffers[1].Length-- }, "a buffer of 399 bytes where 400"},
		{"odd offset", i32, 0, func(d desc, _ []byte) { d.Buffers[1].Offset = 8 }, "at 8"},
		{"negative offset", i32, 0, func(d desc, _ []byte) { d.Buffers[1].Offset = -64 }, "at -64"},
		{"beyond the body", i32, 0, func(d desc, _ []byte) { d.Buffers[1].Offset = 4096 }, "at 4096 in a body of 4096"},
		{"overflow", i32, 0, func(d desc, _ []byte) { d.Buffers[1].Length = math.MaxInt64 }, "in a body of 4096"},
		{"other body", i32, 0, func(d desc, _ []byte) { d.Body = 8192 }, "extents of 4096 bytes for a body of 8192"},
		{"short offsets", str, 0, func(d desc, _ []byte) { d.Buffers[1].Length = 400 }, "404 are needed"},
		{"negative first offset", str, 0, func(d desc, b []byte) { b[d.Buffers[1].Offset+3] = 0x80 }, "offsets from -"},
		{"falling offsets", str, 0, func(d desc, b []byte) { copy(b[d.Buffers[1].Offset:], "\xff\xff\xff\x00") }, "offsets from 16777215"},
		{"short strings", str, 0, func(d desc, _ []byte) { d.Buffers[2].Length-- }, "are needed"},
		{"no strings", str, 0, func(d desc, _ []byte) { d.Buffers[2] = payload.Absent }, "buffer 2 is missing"},
		{"view buffers", arrow.BinaryTypes.StringView, 0, func(d desc, _ []byte) { d.Nodes[1].Length = 99 }, "99 data buffers"},
		{"one view buffer more", arrow.BinaryTypes.StringView, 0, func(d desc, _ []byte) { d.Nodes[1].Length++ }, "data buffers of which"},
		{"absent view buffer", arrow.BinaryTypes.StringView, 0, func(d desc, _ []byte) { d.Buffers[2] = payload.Absent }, "buffer 2 is missing"},
		{"short list", arrow.ListOf(i32), 0, func(d desc, _ []byte) { d.Nodes[1].Length-- }, "c0.[]"},
		{"short fixed-size list", arrow.FixedSizeListOf(3, i32), 0, func(d desc, _ []byte) { d.Nodes[1].Length-- }, "c0.[]: 299 values where 300"},
		{"huge fixed-size list", arrow.FixedSizeListOf(1<<30, i32), -1, func(d desc, _ []byte) { d.Rows, d.Nodes[0].Length = 1<<40, 1<<40 }, "1099511627776 lists of 1073741824"},
		{"short field", arrow.StructOf(arrow.Field{Name: "x", Type: i32}), 0, func(d desc, _ []byte) { d.Nodes[1].Length-- }, "c0.x: 99 values where 100"},
		{"short union", arrow.SparseUnionOf([]arrow.Field{{Name: "x", Type: i32}}, []int8{0}), 0, func(d desc, _ []byte) { d.Nodes[1].Length-- }, "c0.x: 99"},
		{"a union's nulls", arrow.SparseUnionOf([]arrow.Field{{Name: "x", Type: i32}}, []int8{0}), 0, func(d desc, _ []byte) { d.Nodes[0].Nulls = 1 }, "1 nulls of a sparse_union"},
		{"no dense offsets", arrow.DenseUnionOf([]arrow.Field{{Name: "x", Type: i32}}, []int8{0}), 0, func(d desc, _ []byte) { d.Buffers[1] = payload.Absent }, "missing"},
		{"early end", arrow.RunEndEncodedOf(i32, i32), 0, func(d desc, _ []byte) { d.Nodes[1].Length--; d.Nodes[2].Length-- }, "the runs end before row 100"},
		{"no runs", arrow.RunEndEncodedOf(i32, i32), 0, func(d desc, _ []byte) { d.Nodes[1].Length = 0 }, "0 values where 1"},
		{"short run values", arrow.RunEndEncodedOf(i32, i32), 0, func(d desc, _ []byte) { d.Nodes[2].Length-- }, "c0.values"},
		{"short indices", &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int16, ValueType: i32}, 0, func(d desc, _ []byte) { d.Buffers[1].Length = 100 }, "200 are needed"},
		{"short views of lists", arrow.ListViewOf(i32), 0, func(d desc, _ []byte) { d.Buffers[2].Length-- }, "400 are needed"},
		{"values in null", arrow.Null, 0, func(d desc, _ []byte) { d.Nodes[0].Nulls = 3 }, "3 of 100 nulls"},
		{"null keys", arrow.MapOf(str, i32), 0, func(d desc, b []byte) {
			d.Buffers[3], d.Nodes[2].Nulls = payload.Span{Offset: 0, Length: 400}, 2
		}, "panicked"},
	} {
		rows := 100
		if g.Nulls = c.nulls; c.nulls < 0 {
			rows = 0
		}
		rec := g.Record(arrowgen.Schema(c.dt), rows)
		d, body, _ := LaidOut(t, rec)
		c.spoil(d, body)
		released := 0
		back, err := Open(d, [][]byte{body}, func() { released++ })
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
		if err == nil {
			back.Release()
		} else if !errors.Is(err, ErrInvalid) && !strings.Contains(err.Error(), "panicked") {
			t.Errorf("%s: %T", c.name, err)
		}
		if released != 1 {
			t.Errorf("%s: released %d times", c.name, released)
		}
		rec.Release()
	}
	if _, err := Open(nil, nil, nil); err == nil {
		t.Error("opened nothing")
	}
}

// TestStraddle: a buffer in two extents is refused, and one at their edge is not.
func TestStraddle(t *testing.T) {
	rec := arrowgen.Ints(1, 1024, 2) // two buffers of 8 KiB
	defer rec.Release()
	d, body, _ := LaidOut(t, rec)
	if !slices.Equal(d.Cuts(), []int64{8192}) {
		t.Fatalf("cuts at %v", d.Cuts())
	}
	n := 0
	_, err := Open(d, [][]byte{body[:4096], body[4096:]}, func() { n++ })
	if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "two extents") || n != 1 {
		t.Errorf("%v, released %d times", err, n)
	}
	back, err := Open(d, [][]byte{body[:8192], {}, body[8192:]}, nil)
	if err != nil {
		t.Fatal(err)
	}
	back.Release()
}

// foreign is a record that did not go through arrow-go's checks.
type foreign struct {
	arrow.RecordBatch
	schema *arrow.Schema
	data   arrow.ArrayData
}

type foreignArray struct {
	arrow.Array
	data arrow.ArrayData
}

func (r *foreign) Schema() *arrow.Schema     { return r.schema }
func (r *foreign) NumRows() int64            { return int64(r.data.Len()) }
func (r *foreign) NumCols() int64            { return 1 }
func (r *foreign) Column(int) arrow.Array    { return foreignArray{data: r.data} }
func (r *foreign) Retain()                   {}
func (r *foreign) Release()                  {}
func (a foreignArray) Data() arrow.ArrayData { return a.data }

func bufs(bs ...any) []*memory.Buffer {
	out := make([]*memory.Buffer, len(bs))
	for i, b := range bs {
		switch b := b.(type) {
		case string:
			out[i] = memory.NewBufferBytes([]byte(b))
		case []int32:
			out[i] = memory.NewBufferBytes(arrow.Int32Traits.CastToBytes(b))
		case []int64:
			out[i] = memory.NewBufferBytes(arrow.Int64Traits.CastToBytes(b))
		}
	}
	return out
}

// TestLayoutRefuses goes through arrays whose parts do not fit together.
func TestLayoutRefuses(t *testing.T) {
	i32, str := arrow.PrimitiveTypes.Int32, arrow.BinaryTypes.String
	data := func(dt arrow.DataType, n, off int, b []*memory.Buffer, children ...arrow.ArrayData) arrow.ArrayData {
		return array.NewData(dt, n, b, children, 0, off)
	}
	ints := func(n int) arrow.ArrayData { return data(i32, n, 0, bufs(nil, make([]int32, n))) }
	sparse := arrow.SparseUnionOf([]arrow.Field{{Name: "x", Type: i32}}, []int8{5})
	dense := arrow.DenseUnionOf([]arrow.Field{{Name: "x", Type: i32}}, []int8{5})
	ree := arrow.RunEndEncodedOf(i32, i32)
	dict := &arrow.DictionaryType{IndexType: i32, ValueType: i32}
	view := func(size, buffer, at int32) arrow.ArrayData {
		return data(arrow.BinaryTypes.StringView, 1, 0, bufs(nil, []int32{size, 0, buffer, at}, "0123456789abcdef"))
	}
	for _, c := range []struct {
		name string
		data arrow.ArrayData
		want string
	}{
		{"negative offset", data(i32, 1, -1, bufs(nil, "abcd")), "offset -1, length 1"},
		{"overflow", data(i32, 2, math.MaxInt-1, bufs(nil, "abcd")), "offset 9223372036854775806"},
		{"far offset", data(i32, 2, math.MaxInt-2, bufs(nil, "abcd")), "offset 9223372036854775805, length 2"},
		{"no buffers", data(i32, 1, 0, nil), "buffer 1 of int32 is missing"},
		{"short values", data(i32, 2, 0, bufs(nil, "abcdefg")), "too short for 2 rows from 0 on"},
		{"short values behind an offset", data(i32, 1, 1, bufs(nil, "abcd")), "too short for 1 rows from 1 on"},
		{"short validity", data(i32, 9, 0, bufs("x", make([]int32, 9))), "buffer 0 of int32 has 1 bytes: too short for 9 rows"},
		{"short bits", data(arrow.FixedWidthTypes.Boolean, 5, 4, bufs(nil, "x")), "1 bytes: too short for 5 rows from 4 on"},
		{"no offsets", data(str, 1, 0, bufs(nil, nil, "abc")), "buffer 1 of utf8 is missing"},
		{"short offsets", data(str, 2, 0, bufs(nil, []int32{0, 1}, "abc")), "too short"},
		{"negative first offset", data(str, 1, 0, bufs(nil, []int32{-1, 1}, "abc")), "offsets from -1 to 1"},
		{"falling offsets", data(str, 1, 0, bufs(nil, []int32{2, 1}, "abc")), "offsets from 2 to 1"},
		{"offsets beyond", data(str, 1, 0, bufs(nil, []int32{0, 4}, "abc")), "byte 4 of 3"},
		{"offsets and no bytes", data(str, 1, 0, bufs(nil, []int32{0, 4}, nil)), "byte 4 of 0"},
		{"huge offsets", data(arrow.BinaryTypes.LargeBinary, 1, 0, bufs(nil, []int64{0, math.MaxInt64}, "abc")), "of 3"},
		{"list beyond", data(arrow.ListOf(i32), 1, 0, bufs(nil, []int32{0, 4}), ints(3)), "c0.[]: 4 rows from 0 on of an array of 3"},
		{"list without values", data(arrow.ListOf(i32), 1, 0, bufs(nil, []int32{0, 4})), "0 children, want 1"},
		{"list of nil", data(arrow.ListOf(i32), 1, 0, bufs(nil, []int32{0, 4}), nil), "no data"},
		{"fixed-size list beyond", data(arrow.FixedSizeListOf(3, i32), 1, 1, bufs(nil), ints(5)), "3 rows from 3 on of an array of 5"},
		{"fixed-size list overflow", data(arrow.FixedSizeListOf(3, i32), 1, MaxRows, bufs(nil), ints(5)), "1 lists of 3"},
		{"field too short", data(arrow.StructOf(arrow.Field{Name: "f", Type: i32}), 2, 2, bufs(nil), ints(3)), "c0.f: 2 rows from 2 on of an array of 3"},
		{"field missing", data(arrow.StructOf(arrow.Field{Name: "f", Type: i32}), 2, 2, bufs(nil)), "0 children, want 1"},
		{"field of another type", data(arrow.StructOf(arrow.Field{Name: "f", Type: str}), 2, 0, bufs(nil), ints(3)), "the data is of type int32"},
		{"union child too short", data(sparse, 3, 0, bufs(nil, "\x05\x05\x05"), ints(2)), "c0.x: 3 rows"},
		{"union without codes", data(sparse, 3, 0, bufs(nil, nil), ints(3)), "missing"},
		{"unknown code", data(dense, 1, 0, bufs(nil, "\x06", []int32{0}), ints(1)), "the type code 6"},
		{"negative code", data(dense, 1, 0, bufs(nil, "\xff", []int32{0}), ints(1)), "the type code -1"},
		{"negative dense offset", data(dense, 1, 0, bufs(nil, "\x05", []int32{-3}), ints(1)), "the offset -3"},
		{"dense offset beyond", data(dense, 1, 0, bufs(nil, "\x05", []int32{7}), ints(1)), "c0.x: 1 rows from 7 on"},
		{"runs that end", data(ree, 5, 0, bufs(nil), data(i32, 2, 0, bufs(nil, []int32{2, 4})), ints(2)), "the runs end before row 5"},
		{"no runs", data(ree, 5, 0, bufs(nil), ints(0), ints(0)), "end before row 5"},
		{"too few run values", data(ree, 5, 0, bufs(nil), data(i32, 2, 0, bufs(nil, []int32{2, 5})), ints(1)), "c0.values: 2 rows"},
		{"run ends of another type", data(ree, 5, 0, bufs(nil), data(str, 0, 0, bufs(nil, nil, nil)), ints(1)), "not of type int32"},
		{"no dictionary", data(dict, 1, 0, bufs(nil, []int32{0})), "no dictionary"},
		{"negative view", view(-1, 0, 0), "a view of -1 bytes"},
		{"view of no buffer", view(13, 1, 0), "buffer 1 of 1"},
		{"view of a negative buffer", view(13, -1, 0), "buffer -1 of 1"},
		{"view beyond", view(13, 0, 4), "13 bytes at 4"},
		{"view before", view(13, 0, -1), "13 bytes at -1"},
		{"list view beyond", data(arrow.ListViewOf(i32), 1, 0, bufs(nil, []int32{2}, []int32{2}), ints(3)), "c0.[]: 2 rows from 2 on of an array of 3"},
		{"list view before", data(arrow.ListViewOf(i32), 1, 0, bufs(nil, []int32{-1}, []int32{2}), ints(3)), "2 values from -1 on"},
		{"list view of less", data(arrow.ListViewOf(i32), 1, 0, bufs(nil, []int32{1}, []int32{-2}), ints(3)), "-2 values"},
		{"huge list view", data(arrow.LargeListViewOf(i32), 1, 0, bufs(nil, []int64{math.MaxInt64}, []int64{2}), ints(3)), "2 values from 9223372036854775807"},
	} {
		dt := c.data.DataType()
		_, err := NewLayout(&foreign{schema: arrowgen.Schema(dt), data: c.data}, MaxInline)
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
		if LogicalBytes(&foreign{schema: arrowgen.Schema(dt), data: c.data}) != 0 {
			t.Errorf("%s: has bytes", c.name)
		}
	}
	// A panic is an error too.
	_, err := NewLayout(&foreign{schema: arrowgen.Schema(i32), data: panicking{ints(1)}}, MaxInline)
	if err == nil || !strings.Contains(err.Error(), "panicked") {
		t.Errorf("%v", err)
	}
}

type panicking struct{ arrow.ArrayData }

func (panicking) Buffers() []*memory.Buffer { panic("no buffers here") }

// damage copies d with something wrong, somewhere.
func damage(rng *rand.Rand, d *array.Data) *array.Data {
	bs := make([]*memory.Buffer, len(d.Buffers()))
	for i, b := range d.Buffers() {
		if b != nil {
			bs[i] = memory.NewBufferBytes(slices.Clone(b.Bytes()))
		}
	}
	children := slices.Clone(d.Children())
	dict, _ := d.Dictionary().(*array.Data)
	n, off := d.Len(), d.Offset()
	switch k := rng.IntN(8); {
	case k < 3 && len(children) > 0:
		i := rng.IntN(len(children))
		children[i] = damage(rng, children[i].(*array.Data))
	case k == 3 && dict != nil:
		dict = damage(rng, dict)
	case k == 4:
		n += rng.IntN(20)
	case k == 5:
		off += rng.IntN(20) - 5
	case len(bs) > 0:
		i := rng.IntN(len(bs))
		switch b := bs[i]; {
		case b == nil:
			bs[i] = memory.NewBufferBytes(make([]byte, rng.IntN(9)))
		case rng.IntN(6) == 0:
			bs[i] = nil
		case rng.IntN(2) == 0:
			bs[i] = memory.NewBufferBytes(b.Bytes()[:rng.IntN(b.Len()+1)])
		case b.Len() > 0:
			for range 1 + rng.IntN(4) {
				b.Bytes()[rng.IntN(b.Len())] ^= byte(1 << rng.IntN(8))
			}
		}
	}
	if dict != nil {
		return array.NewDataWithDictionary(d.DataType(), n, bs, d.NullN(), off, dict)
	}
	return array.NewData(d.DataType(), n, bs, children, d.NullN(), off)
}

// layDamaged lays out a damaged array: that is an error when it is planned, or
// works; it never panics, nor when its image is opened.
func layDamaged(t *testing.T, seed uint64) {
	g := arrowgen.New(seed)
	dt := g.RandomType(3)
	a := g.Array(dt, g.Rng.IntN(60))
	defer a.Release()
	d := damage(g.Rng, a.Data().(*array.Data))
	if g.Rng.IntN(3) == 0 {
		d = damage(g.Rng, d)
	}
	l, err := NewLayout(&foreign{schema: arrowgen.Schema(dt), data: d}, int64(seed%2)*MaxInline)
	if err != nil {
		var invalid *InvalidError
		if !errors.As(err, &invalid) {
			t.Errorf("seed %d, %s: %v", seed, dt, err)
		}
		return
	}
	body := make([]byte, l.Desc.Body)
	if err := l.WriteTo([][]byte{body}); err != nil {
		t.Errorf("seed %d, %s: planned, and then: %v", seed, dt, err)
		return
	}
	var dicts [][][]byte
	for _, dict := range l.Dictionaries {
		b := make([]byte, dict.Desc.Body)
		if err := dict.WriteTo([][]byte{b}); err != nil {
			t.Errorf("seed %d, %s: planned, and then: %v", seed, dt, err)
			return
		}
		dicts = append(dicts, [][]byte{b})
	}
	desc, err := l.Descriptor()
	if err != nil {
		t.Fatal(err)
	}
	released := 0
	back, err := Open(desc, [][]byte{body}, func() { released++ }, dicts...)
	if err == nil {
		back.Release()
	}
	if released != 1 {
		t.Errorf("seed %d, %s: released %d times", seed, dt, released)
	}
}

func TestDamagedArrays(t *testing.T) {
	for seed := range uint64(4000) {
		layDamaged(t, seed)
	}
}

func FuzzDamagedArrays(f *testing.F) {
	for seed := range uint64(20) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) { layDamaged(t, seed) })
}

// spoil changes a descriptor and a body at random.
func spoil(rng *rand.Rand, d *batch.Descriptor, body []byte) []byte {
	number := func(v int64) int64 {
		switch rng.IntN(6) {
		case 0:
			return v + rng.Int64N(9) - 4
		case 1:
			return v ^ 1<<rng.IntN(64)
		case 2:
			return []int64{0, -1, 64, 4096, math.MaxInt64, math.MinInt64}[rng.IntN(6)]
		case 3:
			return v * 2
		}
		return v + 64*(rng.Int64N(65)-32)
	}
	for range 1 + rng.IntN(3) {
		switch k := rng.IntN(12); {
		case k == 0:
			d.Rows = number(d.Rows)
		case k == 1 && rng.IntN(4) == 0:
			d.Body = number(d.Body)
		case k < 5 && len(d.Nodes) > 0:
			n := &d.Nodes[rng.IntN(len(d.Nodes))]
			if rng.IntN(2) == 0 {
				n.Length = number(n.Length)
			} else {
				n.Nulls = number(n.Nulls)
			}
		case k < 9 && len(d.Buffers) > 0:
			s := &d.Buffers[rng.IntN(len(d.Buffers))]
			switch rng.IntN(4) {
			case 0:
				s.Offset = number(s.Offset)
			case 1:
				s.Length = number(s.Length)
			case 2:
				*s = d.Buffers[rng.IntN(len(d.Buffers))]
			default:
				*s = payload.Absent
			}
		case k == 9 && len(d.Nodes) > 0:
			d.Nodes = slices.Delete(d.Nodes, 0, 1)
		case k == 10 && len(d.Buffers) > 0:
			i := rng.IntN(len(d.Buffers))
			d.Buffers = slices.Insert(slices.Delete(d.Buffers, i, i+1), 0, payload.Span{Length: 64})
		case len(body) > 0:
			body[rng.IntN(len(body))] ^= byte(1 << rng.IntN(8))
		}
	}
	return body
}

// openSpoiled opens an image whose descriptor is wrong: that is an error, or a
// record whose memory is all within the extents; it never panics, and the memory is
// given back once, as is every reference to a dictionary that others share.
func openSpoiled(t *testing.T, seed uint64) {
	g := arrowgen.New(seed)
	rec := g.RandomRecord(3, 80, 3)
	defer rec.Release()
	d, body, bodies := LaidOutInline(t, rec, int64(seed%2)*MaxInline)
	dicts := make(map[*batch.Descriptor]*array.Data)
	ended := 0
	var find Finder = func(d *batch.Descriptor, dt arrow.DataType) (*array.Data, error) {
		if dicts[d] == nil || seed%7 == 0 {
			return nil, errors.New("no such dictionary")
		}
		dicts[d].Retain()
		return dicts[d], nil
	}
	for i, dict := range d.AllDictionaries() {
		l := NewLease(func() { ended++ })
		data, err := OpenDictionary(dict, dict.Schema.Field(0).Type, [][]byte{bodies[i]}, l,
			func(d *batch.Descriptor, _ arrow.DataType) (*array.Data, error) {
				dicts[d].Retain()
				return dicts[d], nil
			})
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		l.Free(nil)
		dicts[dict] = data
	}
	spoiled := *d
	spoiled.Nodes, spoiled.Buffers = slices.Clone(d.Nodes), slices.Clone(d.Buffers)
	body = spoil(g.Rng, &spoiled, body)
	released := 0
	back, err := OpenRows(&spoiled, nil, [][]byte{body}, NewLease(func() { released++ }), find)
	if err == nil {
		for _, c := range back.Columns() {
			arrowgen.Values(c) // may fail on the values, and is caught
		}
		back.Release()
	}
	if released != 1 {
		t.Errorf("seed %d: released %d times, %v", seed, released, err)
	}
	for _, data := range dicts {
		data.Release()
	}
	if ended != len(dicts) {
		t.Errorf("seed %d: %d of %d dictionaries came back, %v", seed, ended, len(dicts), err)
	}
	for chunk := range spoiled.Sums {
		_ = Verify(&spoiled, chunk, body)
	}
}

func TestSpoiledDescriptors(t *testing.T) {
	for seed := range uint64(3000) {
		openSpoiled(t, seed)
	}
}

func FuzzOpen(f *testing.F) {
	for seed := range uint64(20) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) { openSpoiled(t, seed) })
}

func FuzzRoundTrip(f *testing.F) {
	for seed := range uint64(20) {
		f.Add(seed, uint16(50), uint8(3))
	}
	f.Fuzz(func(t *testing.T, seed uint64, rows uint16, depth uint8) {
		g := arrowgen.New(seed)
		rec := g.RandomRecord(4, int(rows%2000), int(depth%5))
		defer rec.Release()
		checkRoundTrip(t, g.Rng, rec)
	})
}
