package cdevice

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/bitutil"
	arrowmemory "github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/shape"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// letters is a foreign library. It makes C's structs of arrays as they are, each buffer in an
// allocation of its own, and reads structs by nothing but the interface's text.
type letters struct {
	t      *testing.T
	dev    mappedDevice
	stream tier.Stream
	addrs  []tier.Addr
	mem    *memory
	out    *exported
	rng    *rand.Rand
}

type mappedDevice interface {
	tier.Device
	mapped
}

// produce makes the array of rows from on, of a struct with the record's columns.
func (r *rig) produce(t *testing.T, rec arrow.RecordBatch, rng *rand.Rand, from, rows int64) (*DeviceArray, *Schema) {
	t.Helper()
	out := new(exported)
	l := &letters{t: t, dev: r.dev.(mappedDevice), mem: &out.memory, out: out, rng: rng}
	out.done = l.release
	callbacks().add(out)
	var err error
	if l.stream, err = l.dev.NewStream(); err != nil {
		t.Fatal(err)
	}
	a := &DeviceArray{DeviceType: CPU, DeviceID: -1}
	l.header(&a.Array, rows, from, 0)
	a.Array.NBuffers, a.Array.Buffers = 1, l.pointers([]uintptr{0})
	var columns []arrow.ArrayData
	for _, c := range rec.Columns() {
		columns = append(columns, c.Data())
	}
	l.children(&a.Array, columns)
	names := new(exported)
	callbacks().add(names)
	s, w := new(Schema), &schemaWriter{exported: names}
	if err := w.field(s, arrow.Field{Type: arrow.StructOf(rec.Schema().Fields()...), Metadata: rec.Schema().Metadata()}); err != nil {
		t.Fatal(err)
	}
	return a, s
}

func (l *letters) header(out *Array, length, offset, nulls int64) {
	l.out.left.Add(1)
	*out = Array{Length: length, Offset: offset, NullCount: nulls, Release: callbacks().array, PrivateData: l.out.id}
}

func (l *letters) pointers(p []uintptr) uintptr {
	at, to := place[uintptr](l.mem, len(p))
	copy(to, p)
	return at
}

func (l *letters) children(out *Array, of []arrow.ArrayData) {
	at, structs := placeAll[Array](l.mem, len(of))
	out.Children, out.NChildren = at, int64(len(of))
	for i, d := range of {
		l.array(&structs[i], d)
	}
}

func (l *letters) array(out *Array, d arrow.ArrayData) {
	nulls := int64(d.NullN())
	if l.rng.IntN(2) == 0 {
		nulls = convert.Unknown
	}
	bufs := d.Buffers()
	switch d.DataType().ID() {
	case arrow.NULL:
		bufs, nulls = nil, int64(d.Len())
	case arrow.RUN_END_ENCODED:
		bufs, nulls = nil, 0
	case arrow.SPARSE_UNION, arrow.DENSE_UNION:
		bufs, nulls = bufs[1:], 0
	}
	if len(bufs) > 0 && bufs[0] == nil && d.DataType().ID() != arrow.SPARSE_UNION && d.DataType().ID() != arrow.DENSE_UNION {
		nulls = min(nulls, 0)
	}
	l.header(out, int64(d.Len()), int64(d.Offset()), nulls)
	var at []uintptr
	var sizes []int64
	for i, b := range bufs {
		if b == nil {
			at = append(at, 0)
		} else {
			at = append(at, l.buffer(b.Bytes()))
		}
		if i >= 2 {
			sizes = append(sizes, int64(b.Len()))
		}
	}
	if _, views := d.DataType().(arrow.BinaryViewDataType); views {
		where, to := place[int64](l.mem, max(1, len(sizes)))
		copy(to, sizes)
		at = append(at, where)
	}
	out.NBuffers, out.Buffers = int64(len(at)), l.pointers(at)
	l.children(out, d.Children())
	if dict := d.Dictionary(); dict != nil && d.DataType().ID() == arrow.DICTIONARY {
		at, structs := place[Array](l.mem, 1)
		out.Dictionary = at
		l.array(&structs[0], dict)
	}
}

func (l *letters) buffer(b []byte) uintptr {
	a, err := l.dev.Alloc(l.stream, max(1, int64(len(b))))
	if err == nil {
		err = errors.Join(l.dev.CopyRegions(l.stream, []tier.Region{{Dst: a, HostSrc: b}}), l.stream.Sync())
	}
	if err != nil {
		l.t.Fatal(err)
	}
	l.addrs = append(l.addrs, a)
	p, err := l.dev.Pointer(a, max(1, int64(len(b))))
	if err != nil {
		l.t.Fatal(err)
	}
	return p
}

func (l *letters) release() {
	for _, a := range l.addrs {
		if err := l.dev.Free(l.stream, a); err != nil {
			l.t.Error(err)
		}
	}
	if err := l.stream.Close(); err != nil {
		l.t.Error(err)
	}
}

// letter reads arrays: which buffers there are, and how long, follows from the type and the struct.
type letter struct{ problems []string }

func (l *letter) bad(format string, args ...any) {
	l.problems = append(l.problems, fmt.Sprintf(format, args...))
}

func (l *letter) bytes(p uintptr, n int64) *arrowmemory.Buffer {
	if p == 0 {
		if n != 0 {
			l.bad("no buffer for %d bytes", n)
		}
		return arrowmemory.NewBufferBytes(nil)
	}
	return arrowmemory.NewBufferBytes(unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&p))), n))
}

// read returns a column, which lies where it lay.
func (l *letter) read(a *Array, dt arrow.DataType) *array.Data {
	if a.Release == 0 || a.Length < 0 || a.Offset < 0 {
		l.bad("%s: %+v", dt, *a)
	}
	sh, _ := shape.Of(dt)
	kinds, views := sh.Buffers, sh.Views
	rows := a.Offset + a.Length
	p := several[uintptr](a.Buffers, a.NBuffers)
	var bufs []*arrowmemory.Buffer
	nulls := 0
	if !sh.HasValidity { // for which arrow-go's arrays have room
		bufs = append(bufs, nil)
	}
	if sh.Null {
		nulls = int(a.Length)
	}
	if want := len(kinds); !views && len(p) != want || views && len(p) < want+1 {
		l.bad("%s: %d buffers, want %d", dt, len(p), want)
		return nil
	}
	for i, k := range kinds {
		switch k.Role {
		case shape.Validity:
			if p[i] == 0 {
				if a.NullCount > 0 {
					l.bad("%s: %d nulls and no validity", dt, a.NullCount)
				}
				bufs = append(bufs, nil)
				continue
			}
			b := l.bytes(p[i], (rows+7)/8)
			if nulls = int(a.Length) - bitutil.CountSetBits(b.Bytes(), int(a.Offset), int(a.Length)); a.NullCount >= 0 && a.NullCount != int64(nulls) {
				l.bad("%s: %d nulls are told, %d are there", dt, a.NullCount, nulls)
			}
			bufs = append(bufs, b)
		case shape.Bits:
			bufs = append(bufs, l.bytes(p[i], (rows+7)/8))
		case shape.Offsets:
			bufs = append(bufs, l.bytes(p[i], (rows+1)*k.Width))
		case shape.Data:
			b := bufs[1].Bytes()
			last := int64(0)
			if len(b) > 0 {
				last = offsetOf(b, kinds[i-1].Width)
			}
			bufs = append(bufs, l.bytes(p[i], last))
		default:
			bufs = append(bufs, l.bytes(p[i], rows*k.Width))
		}
	}
	if views {
		data := p[2 : len(p)-1]
		if p[len(p)-1] == 0 {
			l.bad("%s: no lengths of the data buffers", dt)
			return nil
		}
		for i, n := range several[int64](p[len(p)-1], int64(len(data))) {
			bufs = append(bufs, l.bytes(data[i], n))
		}
	}
	var children []arrow.ArrayData
	if n, ok := dt.(arrow.NestedType); ok {
		if int(a.NChildren) != len(n.Fields()) {
			l.bad("%s: %d children", dt, a.NChildren)
			return nil
		}
		for i, c := range several[uintptr](a.Children, a.NChildren) {
			child := l.read(at[Array](c), n.Fields()[i].Type)
			if child == nil {
				return nil
			}
			children = append(children, child)
		}
	}
	if d, ok := dt.(*arrow.DictionaryType); ok {
		if a.Dictionary == 0 {
			l.bad("%s: no dictionary", dt)
			return nil
		}
		dict := l.read(at[Array](a.Dictionary), d.ValueType)
		if dict == nil {
			return nil
		}
		return array.NewDataWithDictionary(dt, int(a.Length), bufs, nulls, int(a.Offset), dict)
	}
	return array.NewData(dt, int(a.Length), bufs, children, nulls, int(a.Offset))
}

func offsetOf(b []byte, width int64) (v int64) {
	for i := range width {
		v |= int64(b[int64(len(b))-width+i]) << (8 * i)
	}
	return v
}

// randomColumn returns a short record with one column of a random nested type; nil if that has an
// extension, which the interface has only the storage of.
func randomColumn(seed uint64, rng *rand.Rand) arrow.RecordBatch {
	g := arrowgen.New(seed)
	dt := g.RandomType(3)
	if hasExtension(dt) {
		return nil
	}
	return g.Record(arrowgen.Schema(dt), rng.IntN(40))
}

// Arrays as others make them, with offsets at every level, counted nulls or not, of random nested
// types: imported, exported in place, read by the letter of the interface, they say what they said.
func TestToTheLetter(t *testing.T) {
	r := newRig(t, nil)
	runs, tried := 0, 0
	all := testseed.Rounds(800, 200)
	for seed := range testseed.Each(t, all) {
		runs++
		rng := rand.New(rand.NewPCG(seed, 5))
		rec := randomColumn(seed, rng)
		if rec == nil {
			continue
		}
		dt := rec.Schema().Field(0).Type
		from := rng.Int64N(rec.NumRows() + 1)
		n := rng.Int64N(rec.NumRows() - from + 1)
		tried++
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			a, s := r.produce(t, rec, rng, from, n)
			table, err := Import(t.Context(), r.mover, r.gpu, a, s, Config{})
			if err != nil {
				a.Release()
				s.Close()
				t.Fatalf("%s: %v", dt, err)
			}
			b := r.batch(t, table)
			defer r.drop(t, b)
			want := rec.NewSlice(from, from+n)
			defer want.Release()
			r.says(t, b, want)
			a, s = r.export(t, b, Config{Failed: func(err error) { t.Error(err) }})
			defer s.Close()
			defer a.Release()
			var l letter
			got := l.read(at[Array](several[uintptr](a.Array.Children, 1)[0]), dt)
			for _, p := range l.problems {
				t.Error(p)
			}
			if got == nil || a.Array.Length != n || a.Array.Offset != 0 {
				t.Fatalf("%s of %d rows is exported as %+v", dt, n, a.Array)
			}
			col := array.MakeFromData(got)
			defer col.Release()
			back := array.NewRecordBatch(rec.Schema(), []arrow.Array{col}, n)
			defer back.Release()
			if err := convert.Equal(want, back); err != nil {
				t.Errorf("%s: %v", dt, err)
			}
		})
		rec.Release()
	}
	if runs > 1 && tried < all/3 {
		t.Errorf("%d types were tried", tried)
	}
}
