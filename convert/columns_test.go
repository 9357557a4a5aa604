package convert

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// columns reads from b where it is.
func (m *machine) columns(t testing.TB, b *batch.Batch, want image.Selection) (arrow.RecordBatch, error) {
	t.Helper()
	h, err := m.mover.Acquire(t.Context(), b, reservation.Specific(b.Info().Space))
	if err != nil {
		t.Fatal(err)
	}
	rec, err := m.mover.Columns(t.Context(), h, want)
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	return rec, err
}

// pick is what Columns should make of rec, made by arrow-go.
func pick(rec arrow.RecordBatch, fields []int, from, to int64) arrow.RecordBatch {
	var of []arrow.Field
	var cols []arrow.Array
	for _, i := range fields {
		of = append(of, rec.Schema().Field(i))
		cols = append(cols, array.NewSlice(rec.Column(i), from, to))
	}
	meta := rec.Schema().Metadata()
	return array.NewRecordBatchWithMetadata(arrow.NewSchema(of, &meta), cols, to-from, equal.Metadata(rec))
}

// equalParts is Equal of records of which one is a slice. Of many rows it compares copies that
// begin at their first row, and so buffers.
func equalParts(a, b arrow.RecordBatch) error {
	const many = 256
	if a.NumRows() < many || a.NumRows() != b.NumRows() {
		return equal.Records(a, b)
	}
	x, y := compact(a), compact(b)
	defer x.Release()
	defer y.Release()
	return equal.Records(x, y)
}

// compact copies a record's columns, but for types whose slices arrow-go's Concatenate does not
// copy, or copies wrong.
func compact(rec arrow.RecordBatch) arrow.RecordBatch {
	cols := make([]arrow.Array, rec.NumCols())
	for i, c := range rec.Columns() {
		var err error
		crooked := arrowgen.Within(c.DataType(), func(dt arrow.DataType) bool {
			switch dt.ID() {
			case arrow.RUN_END_ENCODED, arrow.SPARSE_UNION, arrow.DENSE_UNION, arrow.LIST_VIEW, arrow.LARGE_LIST_VIEW:
				return true
			}
			return false
		})
		if !crooked {
			cols[i], err = array.Concatenate([]arrow.Array{c}, memory.DefaultAllocator)
		}
		if crooked || err != nil {
			c.Retain()
			cols[i] = c
		}
		defer cols[i].Release()
	}
	return array.NewRecordBatchWithMetadata(rec.Schema(), cols, rec.NumRows(), equal.Metadata(rec))
}

// picked reads some columns and compares them.
func (m *machine) picked(t testing.TB, b *batch.Batch, fields []int, from, to int64) {
	t.Helper()
	got, err := m.columns(t, b, image.Selection{Fields: fields, From: from, To: to})
	if err != nil {
		t.Fatal(err)
	}
	defer got.Release()
	want := pick(m.records[b.ID()], fields, from, to)
	defer want.Release()
	if err := equalParts(want, got); err != nil {
		t.Fatal(err)
	}
	for i, c := range got.Columns() { // Equal may do without
		if w := want.Column(i); w.NullN() != c.NullN() {
			t.Fatalf("column %d has %d nulls, want %d", i, c.NullN(), w.NullN())
		}
	}
}

func (m *machine) volume() *volumes.Volume { return m.spaces[tier.Disk].Pool.(*volumes.Volume) }

// reading says how many bytes f reads from the volume.
func (m *machine) reading(f func()) int64 {
	before := m.volume().Stats().Read
	f()
	return m.volume().Stats().Read - before
}

// pieces reads pieces of an image.
func (m *machine) pieces(t *testing.T, img *batch.Image, whole bool) func([]image.Piece) error {
	return func(pieces []image.Piece) error {
		return m.mover.cfg.Builtin.ReadPieces(t.Context(), img, nil, whole, pieces)
	}
}

// TestColumnsOfEveryType takes columns and rows of each type out of each tier, and
// compares them with what arrow-go makes of the source.
func TestColumnsOfEveryType(t *testing.T) {
	t.Parallel()
	onEachGPU(t, 1, func(t *testing.T, g gpus) {
		t.Run("small dictionaries inside", func(t *testing.T) { columnsOfEveryType(t, g, false) })
		t.Run("all dictionaries outside", func(t *testing.T) { columnsOfEveryType(t, g, true) })
	})
}

func columnsOfEveryType(t *testing.T, g gpus, outside bool) {
	m := newMachine(t, machineConfig{gpus: g, codec: CodecS2, buffered: true, outside: outside, gpu: 32 << 20, host: 32 << 20, disk: 32 << 20})
	gen := arrowgen.New(3)
	rowMeta := arrow.NewMetadata([]string{"of the batch"}, []string{"yes"})
	tried := testseed.One(t) % 4 // in each run a type is tried in another way
	for i, typ := range arrowgen.Types() {
		if outside && !arrowgen.HasDictionary(typ) || g.skips(i) {
			continue
		}
		gen.Plain = tried%2 == 0
		const rows = 1400
		cut := [][2]int64{{0, rows}, {77, rows - 3}}[tried/2%2]
		tried++
		whole := gen.Record(arrowgen.Schema(arrow.PrimitiveTypes.Int32, typ, arrow.BinaryTypes.String, typ), rows)
		slice := whole.NewSlice(cut[0], cut[1])
		rec := array.NewRecordBatchWithMetadata(slice.Schema(), slice.Columns(), slice.NumRows(), rowMeta)
		b := m.make(t, rec, tier.Disk)
		for _, f := range forms {
			k := f.kind
			if err := m.mover.MoveAs(t.Context(), b, reservation.AnyInTier(k), f.form); err != nil {
				t.Fatal(err)
			}
			for n, s := range []struct {
				fields   []int
				from, to int64
			}{
				{[]int{1}, 0, rec.NumRows()}, {[]int{3, 0}, 0, rec.NumRows()}, {[]int{2, 1, 3}, 600, 1290},
				{[]int{1, 2}, 0, 100}, {[]int{3}, 513, 514}, {[]int{3, 2, 1, 0}, rec.NumRows() - 1, rec.NumRows()},
				{[]int{1}, 700, 700}, {[]int{}, 5, 9},
			} {
				if n%3 > 0 && f.form == batch.CompressedImage || n > 1 && (n+i+int(k))%2 > 0 {
					continue // packed, it is the same way, but for uncompressing; types and tiers take turns
				}
				m.picked(t, b, s.fields, s.from, s.to)
				if t.Failed() {
					t.Fatalf("%s, %d:%d in %s: columns %v, rows %d to %d", typ, cut[0], cut[1], f.form, s.fields, s.from, s.to)
				}
			}
		}
		m.move(t, b, tier.GPU)
		m.holds(t, tier.Disk, 0)
		m.holds(t, tier.Host, 0)
		drop(t, b)
		rec.Release()
		slice.Release()
		whole.Release()
	}
}

// TestColumnsOfRandomRecords takes random columns and rows out of random batches that
// have many chunks.
func TestColumnsOfRandomRecords(t *testing.T) {
	m := newMachine(t, machineConfig{codec: CodecZstd, gpu: 32 << 20, host: 32 << 20, disk: 32 << 20})
	gen := arrowgen.New(11)
	for i := range testseed.Rounds(60, 12) {
		rec := gen.RandomRecord(6, 20_000, 2)
		if rec.NumCols() == 0 {
			rec.Release()
			continue
		}
		b := m.make(t, rec, tier.Disk)
		if b.Info().Descriptor.Body > 12<<20 {
			drop(t, b)
			rec.Release()
			continue
		}
		if i%2 == 0 { // of many runs as well
			if err := m.mover.MoveAs(t.Context(), b, reservation.AnyInTier(tier.Disk), batch.CompressedImage); err != nil {
				t.Fatal(err)
			}
		}
		for range 5 {
			fields := gen.Rng.Perm(int(rec.NumCols()))[:1+gen.Rng.IntN(int(rec.NumCols()))]
			to := gen.Rng.Int64N(rec.NumRows()+1) + 1
			if to > rec.NumRows() {
				continue
			}
			m.picked(t, b, fields, gen.Rng.Int64N(to), to)
		}
		drop(t, b)
		rec.Release()
	}
}

// Strings of a row range are looked up and moved, on whatever level of structs and
// fixed-size lists they are, and no more is read than they take.
func TestColumnsReadTheStringsOfARange(t *testing.T) {
	const rows = 60_000 // a body of many times fewText
	first, step := testseed.Share(t, 3)
	for i, typ := range []arrow.DataType{
		arrow.BinaryTypes.String, arrow.BinaryTypes.LargeString, arrow.BinaryTypes.Binary,
		arrow.StructOf(arrow.Field{Name: "s", Type: arrow.BinaryTypes.LargeBinary, Nullable: true},
			arrow.Field{Name: "b", Type: arrow.FixedWidthTypes.Boolean, Nullable: true}),
		arrow.FixedSizeListOf(3, arrow.BinaryTypes.String),
		arrowgen.NewExtension("spillway.test", arrow.FixedSizeListOf(2, arrow.StructOf(
			arrow.Field{Name: "s", Type: arrow.BinaryTypes.String, Nullable: true}))),
	} {
		t.Run(typ.String(), func(t *testing.T) {
			m := newMachine(t, machineConfig{host: 16 << 20, disk: 64 << 20})
			rng := rand.New(rand.NewPCG(1, 2))
			for n, nulls := range []float64{0, 0.3} {
				if (2*i+n)%step != first {
					continue
				}
				gen := arrowgen.New(4)
				gen.Nulls = nulls
				b := m.put(t, gen.Record(arrowgen.Schema(typ, typ), rows), tier.Disk)
				body := b.Info().Descriptor.Body
				if body < 2*4*image.FewText {
					t.Fatalf("a body of %d bytes is too short", body)
				}
				for _, r := range [][2]int64{{0, 1}, {rows - 1, rows}, {0, rows}, {1, rows - 1}, {rows / 2, rows/2 + 600}} {
					m.picked(t, b, []int{1}, r[0], r[1])
				}
				for range testseed.Rounds(20, 3) {
					n := 1 + rng.Int64N(rows/10)
					from := rng.Int64N(rows - n)
					read := m.reading(func() { m.picked(t, b, []int{1}, from, from+n) })
					// Its share, and for each buffer of the column the ends, and their look-up.
					buffers := int64(len(b.Info().Descriptor.Buffers)) / 2
					if most := body*(n+511)/rows + buffers*4*payload.SumChunk; read > most {
						t.Fatalf("%d bytes of %d were read for %d of %d rows, want %d at most", read, body, n, rows, most)
					}
				}
			}
		})
	}
}

// Bounds of strings that are in one chunk are looked up by one read of it.
func TestColumnsLookUpTheBoundsOfAChunkTogether(t *testing.T) {
	const rows = 4000 // offsets and the first strings are in the first chunk
	b := array.NewStringBuilder(memory.DefaultAllocator)
	defer b.Release()
	for i := range rows {
		b.Append(fmt.Sprintf("%064d", i))
	}
	a := b.NewArray()
	defer a.Release()
	m := newMachine(t, machineConfig{})
	on := m.put(t, array.NewRecordBatch(arrowgen.Schema(arrow.BinaryTypes.String), []arrow.Array{a}, rows), tier.Disk)
	if body := on.Info().Descriptor.Body; body < 2*image.FewText {
		t.Fatalf("a body of %d bytes is too short", body)
	}
	if read := m.reading(func() { m.picked(t, on, []int{0}, 100, 200) }); read != 2*payload.SumChunk {
		t.Errorf("%d bytes were read, want the first chunk twice: for the bounds, and for the rows", read)
	}
}

// Two of five columns cost two fifths of the bytes, in few requests, and need no
// more room than that. In a bubble the disk takes no time, so no request is cut for a slow one.
func TestColumnsReadOnlyTheirShare(t *testing.T) { synctest.Test(t, columnsReadOnlyTheirShare) }

func columnsReadOnlyTheirShare(t *testing.T) {
	const rows = 16 << 20 / (5 * 8) // three chunks at the ends of each column are less than the twentieth that is allowed
	m := newMachine(t, machineConfig{host: 15 << 19, disk: 20 << 20})
	b := m.put(t, arrowgen.Ints(1, rows, 5), tier.Disk)
	body := b.Info().Descriptor.Body
	for _, fields := range [][]int{{1, 3}, {4, 0}, {2, 3}} {
		before := m.files.Count("read")
		read := m.reading(func() { m.picked(t, b, fields, 0, rows) })
		requests := m.files.Count("read") - before
		t.Logf("columns %v: %d of %d bytes (%.4f) in %d requests", fields, read, body, float64(read)/float64(body), requests)
		if most := body * 2 / 5 * 105 / 100; read > most {
			t.Errorf("columns %v: %d bytes of %d were read, want %d at most", fields, read, body, most)
		}
		if most := int(read>>20) + 4; requests > most {
			t.Errorf("columns %v: %d requests for %d bytes, want %d at most", fields, requests, read, most)
		}
	}
	m.rests(t, b, tier.Disk)
}

// Of a compressed batch each run that has something of the columns is read once at most, however
// many columns lie in it and wherever they begin.
func TestColumnsReadTheRunsOfAPackedBatchOnce(t *testing.T) {
	for _, c := range []struct {
		columns, rows int
		fields        []int
	}{
		{5, 16 << 20 / (5 * 8), []int{1, 3}}, // they begin and end within runs
		{64, payload.SumChunk / 8, []int{0, 2, 4, 6, 8, 10, 12, 14}},
		{64, payload.SumChunk / 8, []int{62, 33, 31, 1, 3, 48, 49}},
	} {
		m := newMachine(t, machineConfig{codec: CodecS2, host: 30 << 20, disk: 40 << 20})
		b := m.put(t, arrowgen.Ints(1, c.rows, c.columns), tier.Disk)
		if err := m.mover.MoveAs(t.Context(), b, reservation.AnyInTier(tier.Disk), batch.CompressedImage); err != nil {
			t.Fatal(err)
		}
		h, err := b.Open(t.Context(), tier.ID{}, false)
		if err != nil {
			t.Fatal(err)
		}
		runs, want := h.Payload().(*batch.Image).Parts.Runs, int64(0)
		for i := range runs {
			for _, f := range c.fields {
				// No column has nulls: each is one buffer beside an empty one.
				if s := b.Info().Descriptor.Buffers[2*f+1]; s.Offset < int64(i+1)*payload.RunSize && s.Offset+s.Length > int64(i)*payload.RunSize {
					want += extent.RoundUp(runs[i].Stored(), tier.Page)
					break
				}
			}
		}
		if err := h.Close(); err != nil {
			t.Fatal(err)
		}
		if read := m.reading(func() { m.picked(t, b, c.fields, 0, int64(c.rows)) }); read > want || read < want/4 {
			t.Errorf("%d columns, of which %v: %d bytes were read, want %d at most", c.columns, c.fields, read, want)
		}
	}
}

// One twenty-fifth of the rows of a column costs one twenty-fifth of its bytes, and the
// ends of the chunks that they lie in.
func TestColumnsReadOnlyTheRows(t *testing.T) {
	const rows, part = 16 << 20 / (5 * 8), 16 << 20 / (5 * 8) / 25 // two chunks and more
	m := newMachine(t, machineConfig{disk: 20 << 20})
	b := m.put(t, arrowgen.Ints(1, rows, 5), tier.Disk)
	for _, from := range []int64{0, 1, 12345, rows / 2, rows - part} {
		read := m.reading(func() { m.picked(t, b, []int{2}, from, from+part) })
		t.Logf("from row %d: %d bytes for %d", from, read, part*8)
		if most := int64(part*8 + 2*payload.SumChunk); read > most {
			t.Errorf("%d bytes were read for %d rows, want %d at most", read, part, most)
		}
	}
	if read := m.reading(func() { m.picked(t, b, []int{2}, 77, 77) }); read != 0 {
		t.Errorf("%d bytes were read for no rows", read)
	}
	if read := m.reading(func() { m.picked(t, b, []int{}, 77, 99) }); read != 0 {
		t.Errorf("%d bytes were read for no columns", read)
	}
	m.rests(t, b, tier.Disk)
}

func TestSelection(t *testing.T) {
	schema := arrow.NewSchema([]arrow.Field{
		{Name: "a", Type: arrow.PrimitiveTypes.Int8}, {Name: "b", Type: arrow.PrimitiveTypes.Int8},
		{Name: "a", Type: arrow.PrimitiveTypes.Int16}, {Name: "c", Type: arrow.PrimitiveTypes.Int8},
	}, nil)
	for _, c := range []struct {
		s    image.Selection
		want string // or the error
	}{
		{image.Selection{}, "[0 1 2 3] 0 10"},
		{image.Selection{Columns: []string{}}, "[] 0 10"},
		{image.Selection{Fields: []int{}, From: 10}, "[] 10 10"},
		{image.Selection{Columns: []string{"c", "b"}, From: 3}, "[3 1] 3 10"},
		{image.Selection{Fields: []int{2, 0}, From: 3, To: 3}, "[2 0] 3 3"},
		{image.Selection{Columns: []string{"d"}},
			`selecting the column "d", rows 0 to 0, of 4 columns and 10 rows: there is no column "d"`},
		{image.Selection{Columns: []string{""}}, `there is no column ""`},
		{image.Selection{Columns: []string{"a"}},
			"columns [0 2] have that name: give the place of the one that is wanted"},
		{image.Selection{Columns: []string{"b", "c", "b"}},
			`selecting the column "b", rows 0 to 0, of 4 columns and 10 rows: it is given twice`},
		{image.Selection{Fields: []int{1, 1}},
			"selecting column 1, rows 0 to 0, of 4 columns and 10 rows: it is given twice"},
		{image.Selection{Fields: []int{4}}, "there is no column 4"},
		{image.Selection{Fields: []int{-1}}, "there is no column -1"},
		{image.Selection{Columns: []string{"b"}, Fields: []int{1}}, "both names and places of columns are given"},
		{image.Selection{From: -1}, "a row is negative"},
		{image.Selection{To: -1}, "a row is negative"},
		{image.Selection{To: 11}, "rows 0 to 11, of 4 columns and 10 rows: the rows end before"},
		{image.Selection{From: 11}, "the rows end before"},
		{image.Selection{From: 5, To: 4}, "the first row is behind the last"},
	} {
		got, err := c.s.Of(schema, 10)
		said := fmt.Sprint(err)
		if err == nil {
			said = fmt.Sprint(got.Fields, got.From, got.To)
			if n := got.Schema.NumFields(); n != len(got.Fields) {
				t.Errorf("%+v: a schema of %d fields", c.s, n)
			}
		} else if !errors.Is(err, image.ErrSelection) {
			t.Errorf("%+v: %v is no ErrSelection", c.s, err)
		}
		if len(said) < len(c.want) || said[len(said)-len(c.want):] != c.want {
			t.Errorf("%+v: %s, want %s", c.s, said, c.want)
		}
	}
}

// Columns that lie beside each other in the image come with one request, also where each
// ends with a chunk. In a bubble the disk takes no time, so no request is cut for a slow one.
func TestColumnsBesideEachOtherAreOneRequest(t *testing.T) { synctest.Test(t, columnsBesideEachOther) }

func columnsBesideEachOther(t *testing.T) {
	const rows = payload.SumChunk / 8
	m := newMachine(t, machineConfig{})
	b := m.put(t, arrowgen.Ints(1, rows, 40), tier.Disk)
	m.picked(t, b, []int{0}, 0, rows) // now it is known how fast the disk reads
	fields := make([]int, 32)
	for i := range fields {
		fields[i] = 4 + i
	}
	for _, c := range []struct {
		fields   []int
		requests int
		bytes    int64
	}{{fields, 1, 32 * payload.SumChunk}, {[]int{7, 6, 9, 10, 12}, 3, 5 * payload.SumChunk}} {
		before := m.files.Count("read")
		read := m.reading(func() { m.picked(t, b, c.fields, 0, rows) })
		if n := m.files.Count("read") - before; n != c.requests || read != c.bytes {
			t.Errorf("columns %v: %d requests of %d bytes in all, want %d of %d", c.fields, n, read, c.requests, c.bytes)
		}
	}
}

// BenchmarkColumns reads a batch of five columns from disk: whole, as Record does it, and
// parts of it. The bytes are those that are wanted.
func BenchmarkColumns(b *testing.B) {
	const rows = 64 << 20 / (5 * 8)
	m := newMachine(b, machineConfig{host: 96 << 20, disk: 96 << 20, chunk: 1 << 20, fast: true})
	on := m.put(b, arrowgen.Ints(1, rows, 5), tier.Disk)
	h, err := on.Open(b.Context(), tier.ID{}, false)
	if err != nil {
		b.Fatal(err)
	}
	defer h.Close()
	for _, c := range []struct {
		name string
		want image.Selection
		size int64
		open func(image.Selection) (arrow.RecordBatch, error)
	}{
		{"whole record", image.Selection{}, 5 * 8 * rows,
			func(image.Selection) (arrow.RecordBatch, error) { return m.mover.Record(b.Context(), h) }},
		{"5 of 5", image.Selection{}, 5 * 8 * rows, nil},
		{"2 of 5", image.Selection{Fields: []int{1, 3}}, 2 * 8 * rows, nil},
		{"1 of 5", image.Selection{Fields: []int{2}}, 8 * rows, nil},
		{"1 % of the rows of 1", image.Selection{Fields: []int{2}, From: rows / 2, To: rows/2 + rows/100},
			8 * (rows / 100), nil},
	} {
		b.Run(c.name, func(b *testing.B) {
			open := c.open
			if open == nil {
				open = func(s image.Selection) (arrow.RecordBatch, error) { return m.mover.Columns(b.Context(), h, s) }
			}
			b.SetBytes(c.size)
			b.ReportAllocs()
			before := m.volume().Stats().Read
			for b.Loop() {
				rec, err := open(c.want)
				if err != nil {
					b.Fatal(err)
				}
				rec.Release()
			}
			b.ReportMetric(float64(m.volume().Stats().Read-before)/float64(b.N), "read-B/op")
		})
	}
}

// A record's own metadata comes back, and counts when records are compared.
func TestRecordMetadata(t *testing.T) {
	m := newMachine(t, machineConfig{})
	plain := numbered(1, 20)
	rec := array.NewRecordBatchWithMetadata(plain.Schema(), plain.Columns(), 20,
		arrow.NewMetadata([]string{"part", "of"}, []string{"7", "9"}))
	b := m.put(t, rec, tier.Disk)
	back := m.record(t, b)
	defer back.Release()
	if err := equal.Records(rec, back); err != nil {
		t.Error(err)
	}
	if v, ok := back.(arrow.RecordBatchWithMetadata).Metadata().GetValue("part"); !ok || v != "7" {
		t.Errorf("metadata %v", back.(arrow.RecordBatchWithMetadata).Metadata())
	}
	if err := equal.Records(plain, back); err == nil {
		t.Error("metadata does not count")
	}
	if d := m.put(t, plain, tier.Host).Info().Descriptor; d.Metadata != nil {
		t.Errorf("metadata %v of a record that has none", d.Metadata)
	}
}

// TestPiecesOfTheSameBytes: pieces may overlap, as those of columns with a common dictionary in the body
// do, also where a request ends.
func TestPiecesOfTheSameBytes(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b := m.put(t, arrowgen.Ints(1, 3<<17, 1), tier.Disk)
	h, err := b.Open(t.Context(), tier.ID{}, false)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	read := m.pieces(t, h.Payload().(*batch.Image), false)
	whole := make([]byte, 3<<20)
	if err := read([]image.Piece{{To: whole}}); err != nil {
		t.Fatal(err)
	}
	all := []image.Piece{
		{Off: 0, To: make([]byte, 2<<20+100)}, {Off: 2<<20 - 50, To: make([]byte, 300)},
		{Off: 2<<20 - 50, To: make([]byte, 300)}, {Off: 2<<20 + 70, To: make([]byte, 9000)},
	}
	if err := read(slices.Clone(all)); err != nil {
		t.Fatal(err)
	}
	for i, p := range all {
		if !bytes.Equal(p.To, whole[p.Off:][:len(p.To)]) {
			t.Errorf("piece %d has other bytes", i)
		}
	}
}
