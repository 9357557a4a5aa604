package convert

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/bitutil"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/image/imagetest"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/faultdev"
)

// foreigner puts a record's arrays on the device as foreign code would: each buffer in an
// allocation that the books do not know.
type foreigner struct {
	t        testing.TB
	dev      tier.Device
	stream   tier.Stream
	addrs    []tier.Addr
	released int
	lengths  bool // are given
	nulls    bool // are given
}

func newForeign(t testing.TB, m *machine) *foreigner {
	pool, err := m.mover.cfg.Builtin.Streams(tier.ID{Kind: tier.GPU})
	if err != nil {
		t.Fatal(err)
	}
	dev := pool.Device
	for { // faults are not the foreigner's
		w, ok := dev.(interface{ Unwrap() tier.Device })
		if !ok {
			break
		}
		dev = w.Unwrap()
	}
	s, err := dev.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	return &foreigner{t: t, dev: dev, stream: s}
}

func (f *foreigner) buffer(b []byte, lengths bool) payload.DeviceRange {
	a, err := f.dev.Alloc(f.stream, max(1, int64(len(b))))
	if err == nil {
		err = f.dev.CopyRegions(f.stream, []tier.Region{{Dst: a, HostSrc: b}})
	}
	if err == nil {
		err = f.stream.Sync()
	}
	if err != nil {
		f.t.Fatal(err)
	}
	f.addrs = append(f.addrs, a)
	if !lengths {
		return payload.DeviceRange{Addr: a, Length: image.Unknown}
	}
	return payload.DeviceRange{Addr: a, Length: int64(len(b))}
}

func (f *foreigner) array(d arrow.ArrayData) *image.DeviceArray {
	out := &image.DeviceArray{Length: int64(d.Len()), Offset: int64(d.Offset()), Nulls: image.Unknown}
	if f.nulls {
		out.Nulls = int64(d.NullN())
	}
	bufs := d.Buffers()
	dt := shape.Storage(d.DataType())
	switch dt.ID() {
	case arrow.NULL, arrow.RUN_END_ENCODED:
		bufs, out.Nulls = nil, 0
	case arrow.SPARSE_UNION, arrow.DENSE_UNION:
		bufs, out.Nulls = bufs[1:], 0
	}
	_, views := dt.(arrow.BinaryViewDataType)
	for i, b := range bufs {
		if b == nil || i == 0 && b.Len() == 0 {
			out.Buffers = append(out.Buffers, payload.DeviceRange{})
			continue
		}
		out.Buffers = append(out.Buffers, f.buffer(b.Bytes(), f.lengths || views))
	}
	if out.Nulls > 0 && out.Buffers[0].Addr == 0 {
		out.Nulls = 0
	}
	for _, c := range d.Children() {
		out.Children = append(out.Children, f.array(c))
	}
	if dict := d.Dictionary(); dict != nil && dt.ID() == arrow.DICTIONARY {
		out.Dictionary = f.array(dict)
	}
	return out
}

func (f *foreigner) table(rec arrow.RecordBatch, space *tier.Space) image.DeviceTable {
	t := image.DeviceTable{Space: space, Schema: rec.Schema(), Rows: rec.NumRows(), Release: f.release}
	for _, c := range rec.Columns() {
		t.Columns = append(t.Columns, f.array(c.Data()))
	}
	return t
}

func (f *foreigner) release() {
	f.released++
	for _, a := range f.addrs {
		if err := f.dev.Free(f.stream, a); err != nil {
			f.t.Error(err)
		}
	}
	if err := f.stream.Close(); err != nil {
		f.t.Error(err)
	}
}

// Foreign tables, of every type and sliced at every level, become what the record says in every
// form; their owner gets the memory back once, when they have left.
func TestForeignTablesOfEveryType(t *testing.T) {
	t.Parallel()
	onEachGPU(t, 1, foreignTablesOfEveryType)
}

func foreignTablesOfEveryType(t *testing.T, g gpus) {
	m := newMachine(t, machineConfig{gpus: g, buffered: true})
	for i, dt := range arrowgen.Types() {
		if g.skips(i) {
			continue
		}
		for _, rows := range g.rowsOf(i) {
			for _, told := range []bool{false, true} {
				if (rows != 70 || testseed.Hurried()) && told == (i/4%2 == 0) {
					continue
				}
				t.Run(fmt.Sprintf("%d %s/%d/%v", i, dt.Name(), rows, told), func(t *testing.T) {
					g := arrowgen.New(uint64(i + rows))
					rec := g.Record(arrowgen.Schema(dt), rows+9)
					defer rec.Release()
					if rows > 0 {
						whole := rec
						defer whole.Release()
						rec = rec.NewSlice(5, int64(5+rows))
					}
					for _, by := range []Form{ImageIn(tier.Host), ImageIn(tier.Disk), ImageIn(tier.GPU), {batch.ScatteredImage, tier.GPU}} {
						f := newForeign(t, m)
						f.lengths, f.nulls = told, told
						b := m.adoptForeign(t, f, rec)
						m.says(t, b, rec, tier.GPU)
						switch by.Type {
						case batch.ScatteredImage: // as it is, with offsets and all
							c, err := m.mover.Clone(t.Context(), b, nil)
							if err != nil {
								t.Fatal(err)
							}
							m.drop(t, b)
							b = c
						default:
							if err := m.mover.MoveAs(t.Context(), b, reservation.AnyInTier(by.Kind), by.Type); err != nil {
								t.Fatal(err)
							}
						}
						if f.released != 1 {
							t.Fatalf("released %d times", f.released)
						}
						m.says(t, b, rec, b.Info().Space.Kind)
						if err := m.mover.Move(t.Context(), b, toDisk); err != nil {
							t.Fatal(err)
						}
						m.says(t, b, rec, tier.Disk)
						m.rests(t, b, tier.Disk)
						m.drop(t, b)
					}
				})
			}
		}
	}
}

// A table that was an image is canonical: what a foreign one becomes has the checksums and
// the zeros of an image that was laid out.
func TestForeignTableBecomesTheSameImage(t *testing.T) {
	onEachGPU(t, 1, foreignTableBecomesTheSameImage)
}

func foreignTableBecomesTheSameImage(t *testing.T, gpu gpus) {
	m := newMachine(t, machineConfig{gpus: gpu})
	g := arrowgen.New(3)
	g.Plain = true
	rec := g.Record(arrowgen.Schema(arrow.PrimitiveTypes.Int32, arrow.BinaryTypes.String, arrow.FixedWidthTypes.Boolean,
		arrow.ListOf(arrow.PrimitiveTypes.Int64)), 203)
	defer rec.Release()
	part := rec.NewSlice(11, 200)
	defer part.Release()
	b := m.adoptForeign(t, newForeign(t, m), part)
	m.as(t, b, toHost, batch.PlainImage, tier.Host)
	defer m.drop(t, b)
	laid, _ := imagetest.LaidOut(t, part)
	if got := b.Info().Descriptor; fmt.Sprint(got.Nodes, got.Buffers, got.Sums) != fmt.Sprint(laid.Nodes, laid.Buffers, laid.Sums) {
		t.Errorf("the image is %v, laid out %v", got, laid)
	}
}

func TestAdoptTableRefusesNonsense(t *testing.T) { onEachGPU(t, 1, adoptTableRefusesNonsense) }

func adoptTableRefusesNonsense(t *testing.T, g gpus) {
	m := newMachine(t, machineConfig{gpus: g})
	gpu := m.spaces[tier.GPU]
	str := arrowgen.Schema(arrow.BinaryTypes.String)
	f := newForeign(t, m)
	defer f.release()
	down := f.buffer([]byte{9, 0, 0, 0, 1, 0, 0, 0}, false)
	data := f.buffer([]byte("data"), true)
	short := f.buffer([]byte{0, 0, 0, 0, 4, 0, 0, 0}, true)
	for name, c := range map[string]struct {
		a    image.DeviceArray
		want error
	}{
		"negative length":       {image.DeviceArray{Length: -1, Buffers: make([]payload.DeviceRange, 3)}, image.ErrInvalid},
		"no buffers":            {image.DeviceArray{Length: 1}, image.ErrInvalid},
		"no offsets":            {image.DeviceArray{Length: 1, Buffers: make([]payload.DeviceRange, 3)}, image.ErrInvalid},
		"too short":             {image.DeviceArray{Length: 1, Offset: 5, Buffers: []payload.DeviceRange{{}, short, data}}, image.ErrInvalid},
		"falling offsets":       {image.DeviceArray{Length: 1, Buffers: []payload.DeviceRange{{}, down, data}}, image.ErrInvalid},
		"huge":                  {image.DeviceArray{Length: 1 << 62, Buffers: []payload.DeviceRange{{}, short, data}}, image.ErrInvalid},
		"nulls and no validity": {image.DeviceArray{Length: 1, Nulls: 1, Buffers: []payload.DeviceRange{{}, short, data}}, image.ErrInvalid},
		"a child":               {image.DeviceArray{Length: 1, Buffers: []payload.DeviceRange{{}, short, data}, Children: []*image.DeviceArray{nil}}, image.ErrInvalid},
		"elsewhere":             {image.DeviceArray{Length: 1, Buffers: []payload.DeviceRange{{}, {Addr: 1, Length: image.Unknown}, data}}, nil},
	} {
		p, err := m.mover.AdoptTable(t.Context(), image.DeviceTable{Space: gpu, Schema: str, Rows: max(0, min(c.a.Length, 1)), Columns: []*image.DeviceArray{&c.a},
			Release: func() { t.Errorf("%s: released", name) }})
		if err == nil {
			t.Errorf("%s: adopted as %v", name, p)
		} else if c.want != nil && !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := m.mover.AdoptTable(t.Context(), image.DeviceTable{Space: gpu, Schema: arrowgen.Schema(arrow.PrimitiveTypes.Int64), Rows: 1 << 40,
		Columns: []*image.DeviceArray{{Length: 1 << 40, Buffers: []payload.DeviceRange{{}, {Addr: 1 << 50, Length: image.Unknown}}}}}); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("more than the device has: %v", err)
	}
	// Sums of lengths that begin again at 0 would be little.
	wide := &arrow.FixedSizeBinaryType{ByteWidth: 1 << 30}
	for _, n := range []int{2, 4} {
		columns := slices.Repeat([]*image.DeviceArray{{Length: 1 << 32, Buffers: []payload.DeviceRange{{}, {Addr: 1, Length: image.Unknown}}}}, n)
		p, err := m.mover.AdoptTable(t.Context(), image.DeviceTable{
			Space: gpu, Schema: arrowgen.Schema(slices.Repeat([]arrow.DataType{wide}, n)...), Rows: 1 << 32, Columns: columns})
		if !errors.Is(err, image.ErrInvalid) {
			t.Errorf("%d columns of 2^62 bytes: adopted as %v, %v", n, p, err)
		}
	}
	if u := gpu.State().Usage; u.Live != 0 || u.Reserved != 0 {
		t.Errorf("the books hold %+v", u)
	}
}

// An array may lack what has no bytes. One that says it has nothing but nulls must have its values
// nevertheless: it may be wrong.
func TestForeignTableLacks(t *testing.T) { onEachGPU(t, 1, foreignTableLacks) }

func foreignTableLacks(t *testing.T, gpu gpus) {
	m := newMachine(t, machineConfig{gpus: gpu})
	for _, dt := range []arrow.DataType{arrow.PrimitiveTypes.Int64, arrow.BinaryTypes.String, arrow.FixedWidthTypes.Boolean,
		&arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int8, ValueType: arrow.BinaryTypes.String}} {
		for _, rows := range []int64{0, 11} {
			for _, nulls := range []int64{image.Unknown, rows} {
				f := newForeign(t, m)
				a := &image.DeviceArray{Length: rows, Nulls: nulls, Buffers: []payload.DeviceRange{f.buffer(make([]byte, 2), true), {}}}
				if dt.ID() == arrow.STRING {
					a.Buffers = append(a.Buffers, payload.DeviceRange{})
				}
				p, err := m.mover.AdoptTable(t.Context(), image.DeviceTable{
					Space: m.spaces[tier.GPU], Schema: arrowgen.Schema(dt), Rows: rows, Columns: []*image.DeviceArray{a}, Release: f.release})
				if rows > 0 {
					if !errors.Is(err, image.ErrInvalid) {
						t.Errorf("%d rows of %s, %d nulls, without values: %v", rows, dt, nulls, err)
					}
					f.release()
					continue
				}
				if err != nil {
					t.Fatalf("%s without rows: %v", dt, err)
				}
				if err := p.Release(); err != nil || f.released != 1 {
					t.Errorf("%s: released %d times, %v", dt, f.released, err)
				}
			}
		}
	}
}

// Memory that several columns have, or that is charged already, is charged once.
func TestSharedMemoryIsChargedOnce(t *testing.T) { onEachGPU(t, 1, sharedMemory) }

func sharedMemory(t *testing.T, g gpus) {
	m := newMachine(t, machineConfig{gpus: g})
	gpu := m.spaces[tier.GPU]
	const rows = 1000
	for _, charged := range []int64{0, 3000, 8 * rows} {
		f := newForeign(t, m)
		values := f.buffer(make([]byte, 8*rows), true)
		column := func(from, n int64) *image.DeviceArray {
			return &image.DeviceArray{Length: n, Offset: from, Buffers: []payload.DeviceRange{{}, {Addr: values.Addr, Length: image.Unknown}}}
		}
		// Twice the same, and parts that lie in each other and in a row.
		columns := []*image.DeviceArray{column(0, rows/2), column(0, rows/2), column(10, rows/2), column(rows/2, rows/2)}
		before := gpu.State().Used()
		p, err := m.mover.AdoptTable(t.Context(), image.DeviceTable{
			Space: gpu, Schema: arrowgen.Schema(slices.Repeat([]arrow.DataType{arrow.PrimitiveTypes.Int64}, 4)...), Rows: rows / 2, Columns: columns,
			Charged: []payload.DeviceRange{{Addr: values.Addr - 100, Length: 100 + charged}, {Addr: values.Addr, Length: min(charged, 16)}}, Release: f.release})
		if err != nil {
			t.Fatal(err)
		}
		if got, want := gpu.State().Used()-before, gpu.Charge(8*rows-charged); got != want {
			t.Errorf("%d bytes are charged beside %d, want %d", got, charged, want)
		}
		if n := p.Bytes(); n != gpu.Charge(8*rows-charged)+charged {
			t.Errorf("the table has %d bytes, of which %d are charged elsewhere", n, charged)
		}
		if err := p.Release(); err != nil || gpu.State().Used() != before {
			t.Errorf("%d bytes are used, %d before: %v", gpu.State().Used(), before, err)
		}
	}
}

// How much host memory it takes to read the shape of a table has nothing to do with how long its
// arrays are, or say that they are; and what is read in many pieces is counted right.
func TestShapeOfLongArrays(t *testing.T) { onEachGPU(t, 1, shapeOfLongArrays) }

func shapeOfLongArrays(t *testing.T, g gpus) {
	m := newMachine(t, machineConfig{gpus: g})
	const bytes, columns = 512 << 10, 8
	f := newForeign(t, m)
	bitmap, ends := make([]byte, bytes), make([]byte, bytes)
	for i := range bitmap {
		bitmap[i] = 0b1101_1011
	}
	for i := range bytes / 8 { // the run i ends before row 3·(i+1)
		binary.LittleEndian.PutUint64(ends[8*i:], uint64(3*(i+1)))
	}
	valid, runs := f.buffer(bitmap, true), f.buffer(ends, true)
	const rows = 3*bytes/8 - 100
	var cols []*image.DeviceArray
	var types []arrow.DataType
	for i := range int64(columns) { // each begins elsewhere, so that nothing that was read for one is known of others
		cols = append(cols, &image.DeviceArray{Length: rows, Offset: 9 * i, Nulls: image.Unknown, Buffers: []payload.DeviceRange{valid, valid}},
			&image.DeviceArray{Length: rows, Offset: 7 + i, Children: []*image.DeviceArray{
				{Length: bytes/8 - i, Offset: i, Buffers: []payload.DeviceRange{{}, runs}}, {Length: bytes / 8, Buffers: []payload.DeviceRange{{}, valid}}}})
		types = append(types, arrow.FixedWidthTypes.Boolean, arrow.RunEndEncodedOf(arrow.PrimitiveTypes.Int64, arrow.PrimitiveTypes.Int8))
	}
	table := image.DeviceTable{Space: m.spaces[tier.GPU], Schema: arrowgen.Schema(types...), Rows: rows, Columns: cols, Release: f.release}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	p, err := m.mover.AdoptTable(t.Context(), table)
	runtime.ReadMemStats(&after)
	if err != nil {
		t.Fatal(err)
	}
	if n := after.TotalAlloc - before.TotalAlloc; !testseed.Raced && !invariants.Enabled && n > bytes { // which allocate, too
		t.Errorf("%d bytes were allocated to look at %d columns of %d", n, columns, bytes)
	}
	nodes := descriptorOf(p).Nodes
	for i := range int64(columns) {
		if got, want := nodes[4*i].Nulls, rows-int64(bitutil.CountSetBits(bitmap, int(9*i), rows)); got != want {
			t.Errorf("column %d has %d nulls, want %d", 2*i, got, want)
		}
		at := 7 + i
		if got, want := nodes[4*i+2].Length, (at+rows-1)/3-i+1-max(0, at/3-i); got != want {
			t.Errorf("column %d has %d runs, want %d", 2*i+1, got, want)
		}
	}
	if err := p.Release(); err != nil {
		t.Error(err)
	}
}

// A fault while a table is adopted leaves its memory its owner's, and nothing in the books.
func TestAdoptTableFaults(t *testing.T) { onEachGPU(t, 1, adoptTableFaults) }

func adoptTableFaults(t *testing.T, g gpus) {
	injected := errors.New("injected")
	for _, effect := range []faultdev.Effect{faultdev.Fail(injected), faultdev.FailWork(injected)} {
		var dev *faultdev.Device
		m := newMachine(t, machineConfig{gpus: g, wrap: func(d tier.Device) tier.Device { dev = faultdev.New(d, 1); return dev }})
		rec := arrowgen.New(5).Record(arrowgen.Schema(arrow.ListOf(arrow.ListOf(arrow.BinaryTypes.String))), 300)
		defer rec.Release()
		hits := 0
		for skip := 0; ; skip++ {
			f := newForeign(t, m)
			table := f.table(rec, m.spaces[tier.GPU])
			remove := dev.Add(faultdev.Rule{Skip: skip, Times: 1, Effect: effect})
			p, err := m.mover.AdoptTable(t.Context(), table)
			hit := dev.Hits() > 0
			remove()
			if !hit {
				if err != nil {
					t.Fatal(err)
				}
				b := m.own(t, rec, p)
				m.says(t, b, rec, tier.GPU)
				m.drop(t, b)
				if f.released != 1 {
					t.Errorf("released %d times", f.released)
				}
				break
			}
			hits++
			if !errors.Is(err, injected) {
				t.Fatalf("the fault at %d: %v", skip, err)
			}
			if u := m.spaces[tier.GPU].State().Usage; f.released != 0 || u.Live != 0 || u.Reserved != 0 {
				t.Fatalf("the fault at %d: released %d times, the books hold %+v", skip, f.released, u)
			}
			f.release()
		}
		if hits < 3 {
			t.Errorf("%d faults hit", hits)
		}
	}
}
