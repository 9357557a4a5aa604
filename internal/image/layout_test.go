package image

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/bitutil"
	"github.com/apache/arrow-go/v18/arrow/endian"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

func TestMain(m *testing.M) { testseed.Main(m) }

// LaidOut lays rec out in memory that was full of other bytes, in one extent, and
// each of its dictionaries that are images of their own.
func LaidOut(t testing.TB, rec arrow.RecordBatch) (d *batch.Descriptor, body []byte, dicts [][]byte) {
	t.Helper()
	return LaidOutInline(t, rec, MaxInline)
}

func LaidOutInline(
	t testing.TB,
	rec arrow.RecordBatch,
	inline int64,
) (d *batch.Descriptor, body []byte, dicts [][]byte) {
	t.Helper()
	l, err := NewLayout(rec, inline)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	lay := func(l *Layout) []byte {
		b := bytes.Repeat([]byte{0xaa}, int(l.Desc.Body))
		if err := l.WriteTo([][]byte{b}); err != nil {
			t.Fatal(err)
		}
		return b
	}
	body = lay(l)
	for _, dict := range l.Dictionaries {
		dicts = append(dicts, lay(dict))
	}
	if d, err = l.Descriptor(); err != nil {
		t.Fatal(err)
	}
	return d, body, dicts
}

// checkImage holds an image to the rules of its form.
func checkImage(t *testing.T, d *batch.Descriptor, body []byte) {
	t.Helper()
	if d.Body != int64(len(body)) || d.Body%tier.Page != 0 {
		t.Errorf("a body of %d bytes, %d said", len(body), d.Body)
	}
	used := make([]bool, len(body))
	for _, s := range d.Buffers {
		if s == payload.Absent {
			continue
		}
		if s.Offset%64 != 0 || s.Length >= 64<<10 && s.Offset%4096 != 0 {
			t.Errorf("a buffer of %d bytes at %d", s.Length, s.Offset)
		}
		for i := s.Offset; i < s.Offset+s.Length; i++ {
			used[i] = true
		}
	}
	for i, u := range used {
		if !u && body[i] != 0 {
			t.Errorf("byte %d is in no buffer and is %#x", i, body[i])
			break
		}
	}
	if want := (len(body) + payload.SumChunk - 1) / payload.SumChunk; len(d.Sums) != want {
		t.Errorf("%d sums, want %d", len(d.Sums), want)
	}
	for i := range d.Sums {
		if err := Verify(d, i, body[i*payload.SumChunk:min(len(body), (i+1)*payload.SumChunk)]); err != nil {
			t.Error(err)
		}
	}
}

// opened opens an image in pieces, cut at random.
func opened(
	t testing.TB,
	rng *rand.Rand,
	d *batch.Descriptor,
	body []byte,
	dicts ...[]byte,
) (rec arrow.RecordBatch, released func() int) {
	t.Helper()
	n := 0
	extents := make([][][]byte, len(dicts))
	for i, dict := range d.AllDictionaries() {
		extents[i] = arrowgen.Split(rng, dict.Cuts(), dicts[i])
	}
	rec, err := Open(d, arrowgen.Split(rng, d.Cuts(), body), func() { n++ }, extents...)
	if err != nil {
		t.Fatalf("%v: %v", d.Schema, err)
	}
	return rec, func() int { return n }
}

// checkRoundTrip lays rec out, opens it, compares, and lays out what was opened:
// that must be the same image. It does so with small dictionaries in the body and
// with all of them outside.
func checkRoundTrip(t *testing.T, rng *rand.Rand, rec arrow.RecordBatch) {
	t.Helper()
	checkRoundTripInline(t, rng, rec, MaxInline)
	if slices.ContainsFunc(rec.Schema().Fields(), func(f arrow.Field) bool { return arrowgen.HasDictionary(f.Type) }) {
		checkRoundTripInline(t, rng, rec, 0)
	}
}

func checkRoundTripInline(t *testing.T, rng *rand.Rand, rec arrow.RecordBatch, inline int64) {
	t.Helper()
	d, body, dicts := LaidOutInline(t, rec, inline)
	checkImage(t, d, body)
	for i, dict := range d.AllDictionaries() {
		checkImage(t, dict, dicts[i])
	}
	back, released := opened(t, rng, d, body, dicts...)
	if err := equal.Records(rec, back); err != nil {
		t.Errorf("%v: %v", rec.Schema(), err)
	}
	if back.Schema() != rec.Schema() {
		t.Error("another schema")
	}
	for i, c := range back.Columns() {
		checkNulls(t, c.Data())
		if err := validate(c); err != nil {
			t.Errorf("%v: %v", rec.Schema().Field(i), err)
		}
	}
	again, bodyAgain, dictsAgain := LaidOutInline(t, back, inline)
	if !bytes.Equal(body, bodyAgain) || !slices.EqualFunc(dicts, dictsAgain, bytes.Equal) {
		t.Errorf("%v: laid out again, the bytes differ", rec.Schema())
	}
	if !sameImage(d, again) {
		t.Errorf("%v: laid out again, the descriptor differs:\n%v\n%v", rec.Schema(), d, again)
	}
	if counted := d.Body > 0; counted && released() != 0 {
		t.Error("released while the record is open")
	}
	back.Release()
	if released() != 1 {
		t.Errorf("released %d times", released())
	}
}

func sameImage(a, b *batch.Descriptor) bool {
	return slices.Equal(a.Nodes, b.Nodes) && slices.Equal(a.Buffers, b.Buffers) && slices.Equal(a.Sums, b.Sums) &&
		slices.EqualFunc(a.Dictionaries, b.Dictionaries, sameImage)
}

// validate has arrow-go look at all values, where it can: it refuses extensions
// over dictionaries, unions and nulls, and dense unions whose offsets do not rise.
func validate(a arrow.Array) error {
	switch {
	case arrowgen.Within(a.DataType(), func(dt arrow.DataType) bool {
		e, ok := dt.(arrow.ExtensionType)
		if !ok {
			return false
		}
		id := e.StorageType().ID()
		return id == arrow.DICTIONARY || id == arrow.NULL || arrow.IsUnion(id)
	}):
		return nil
	case arrowgen.Within(a.DataType(), func(dt arrow.DataType) bool { return dt.ID() == arrow.DENSE_UNION }):
		return array.Validate(a)
	}
	return array.ValidateFull(a)
}

// checkNulls says that the null counts are exact all the way down, and every
// array begins at 0.
func checkNulls(t *testing.T, d arrow.ArrayData) {
	t.Helper()
	if d.Offset() != 0 {
		t.Errorf("an offset of %d", d.Offset())
	}
	nulls := 0
	switch b := d.Buffers(); {
	case shape.Storage(d.DataType()).ID() == arrow.NULL:
		nulls = d.Len()
	case b[0] != nil:
		for i := range d.Len() {
			nulls += 1 - int(b[0].Bytes()[i/8]>>(i%8)&1)
		}
		if nulls == 0 {
			t.Error("a validity without nulls")
		}
	}
	if d.NullN() != nulls {
		t.Errorf("%s: %d nulls said, %d counted", d.DataType(), d.NullN(), nulls)
	}
	for _, c := range d.Children() {
		checkNulls(t, c)
	}
	if dict, ok := d.Dictionary().(*array.Data); ok && dict != nil {
		checkNulls(t, dict)
	}
}

// sliced returns rows of rec from an odd row on.
func sliced(rec arrow.RecordBatch, from, to int64) arrow.RecordBatch { return rec.NewSlice(from, to) }

// TestRoundTrip takes every type there and back: whole and sliced, without rows,
// without nulls, with some and with nothing else, as builders make arrays and as awkward
// as they can be. Memory is counted.
func TestRoundTrip(t *testing.T) {
	first, step := testseed.Half(t, 3)
	for i, dt := range arrowgen.Types() {
		t.Run(fmt.Sprintf("%d-%s", i, dt), func(t *testing.T) {
			t.Parallel()
			mem := memory.NewCheckedAllocator(memory.NewGoAllocator())
			rng := rand.New(rand.NewPCG(uint64(i), 1))
			schema := arrowgen.Schema(dt, arrow.PrimitiveTypes.Int8)
			for n, nulls := range []float64{0, 0.3, 1} {
				for k, plain := range []bool{true, false} {
					if (i+n+k)%step != first {
						continue
					}
					g := arrowgen.New(uint64(i))
					g.Mem, g.Nulls, g.Plain = mem, nulls, plain
					whole := g.Record(schema, 101)
					checkRoundTrip(t, rng, whole)
					for _, s := range [][2]int64{{0, 0}, {101, 101}, {0, 1}, {1, 101}, {0, 64}, {7, 8}, {13, 90}, {64, 101}} {
						rec := sliced(whole, s[0], s[1])
						checkRoundTrip(t, rng, rec)
						rec.Release()
					}
					whole.Release()
					none := g.Record(schema, 0)
					checkRoundTrip(t, rng, none)
					none.Release()
				}
			}
			mem.AssertSize(t, 0)
		})
	}
}

// TestRandomRecords goes through random schemas, nested up to four levels.
func TestRandomRecords(t *testing.T) {
	for seed := range testseed.Each(t, testseed.Rounds(300, 60)) {
		mem := memory.NewCheckedAllocator(memory.NewGoAllocator())
		g := arrowgen.New(seed)
		g.Mem = mem
		rec := g.RandomRecord(6, 200, 4)
		checkRoundTrip(t, g.Rng, rec)
		rec.Release()
		mem.AssertSize(t, 0)
	}
}

// TestPartsAreShort: no part of a body that must be in one extent is longer than the largest
// buffer and 256 KiB of small ones, however many columns there are and however long they are.
func TestPartsAreShort(t *testing.T) {
	for seed := range testseed.Each(t, testseed.Rounds(20, 6)) {
		rng := rand.New(rand.NewPCG(seed, 1))
		most := 1 << rng.IntN(18)
		var fields []arrow.Field
		var cols []arrow.Array
		rows := 1 + rng.IntN(most)
		for i := range 1 + rng.IntN(300) {
			widths := []arrow.FixedWidthDataType{
				arrow.FixedWidthTypes.Boolean,
				arrow.PrimitiveTypes.Int8.(arrow.FixedWidthDataType),
				arrow.PrimitiveTypes.Int32.(arrow.FixedWidthDataType),
				arrow.PrimitiveTypes.Int64.(arrow.FixedWidthDataType),
			}
			dt := widths[rng.IntN(len(widths))]
			data := make([]byte, (rows*dt.BitWidth()+7)/8)
			d := array.NewData(dt, rows, []*memory.Buffer{nil, memory.NewBufferBytes(data)}, nil, 0, 0)
			fields = append(fields, arrow.Field{Name: fmt.Sprint(i), Type: dt})
			cols = append(cols, array.MakeFromData(d))
			if int64(rows)*int64(i) > 8<<20 {
				break
			}
		}
		rec := array.NewRecordBatch(arrow.NewSchema(fields, nil), cols, int64(rows))
		l, err := NewLayout(rec, MaxInline)
		if err != nil {
			t.Fatal(err)
		}
		largest, bytes := int64(0), int64(0)
		for _, s := range l.Desc.Buffers {
			largest, bytes = max(largest, s.Length), bytes+extent.RoundUp(s.Length, 64)
		}
		last := int64(0)
		for _, cut := range append(l.Desc.Cuts(), l.Desc.Body) {
			if n := cut - last; n > largest+256<<10+tier.Page {
				t.Errorf("%d bytes that must be in one extent, with buffers of at most %d", n, largest)
			}
			last = cut
		}
		if l.Desc.Body > bytes*17/16+2*tier.Page {
			t.Errorf("%d bytes have an image of %d", bytes, l.Desc.Body)
		}
		l.Close()
	}
}

// TestBitmapsTakeNoPage: a validity bitmap is in the rest of the last page of the values before it.
func TestBitmapsTakeNoPage(t *testing.T) {
	const columns, rows = 10, 10_000
	fields, cols := make([]arrow.Field, columns), make([]arrow.Array, columns)
	for i := range fields {
		b := array.NewInt64Builder(memory.DefaultAllocator)
		b.AppendNulls(rows)
		fields[i] = arrow.Field{Name: fmt.Sprint(i), Type: arrow.PrimitiveTypes.Int64, Nullable: true}
		cols[i] = b.NewArray()
	}
	l, err := NewLayout(array.NewRecordBatch(arrow.NewSchema(fields, nil), cols, rows), MaxInline)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if want := tier.Page + columns*extent.RoundUp(8*rows, tier.Page); l.Desc.Body > want {
		t.Errorf("an image of %d bytes, want %d", l.Desc.Body, want)
	}
}

// TestNoColumns: rows are kept where there is nothing else.
func TestNoColumns(t *testing.T) {
	rec := array.NewRecordBatch(arrow.NewSchema(nil, nil), nil, 1234)
	d, body, _ := LaidOut(t, rec)
	if d.Rows != 1234 || d.Body != 0 || len(body) != 0 {
		t.Errorf("%+v", d)
	}
	released := 0
	back, err := Open(d, nil, func() { released++ })
	if err != nil {
		t.Fatal(err)
	}
	if released != 1 {
		t.Errorf("released %d times, but there is nothing to hold", released)
	}
	if back.NumRows() != 1234 || back.NumCols() != 0 {
		t.Errorf("%d rows, %d columns", back.NumRows(), back.NumCols())
	}
	back.Release()
	if released != 1 {
		t.Errorf("released %d times", released)
	}
}

// TestColumnlessWithSchema: arrow-go has records without rows that have a
// schema and no columns. They get columns without rows.
func TestColumnlessWithSchema(t *testing.T) {
	for _, dt := range arrowgen.Types() {
		rec := array.NewRecordBatch(arrowgen.Schema(dt), nil, 0)
		d, body, _ := LaidOut(t, rec)
		back, err := Open(d, [][]byte{body}, nil)
		if err != nil {
			t.Fatalf("%s: %v", dt, err)
		}
		if back.NumCols() != 1 || back.Column(0).Len() != 0 {
			t.Errorf("%s: %v", dt, back)
		}
		if err := equal.Records(rec, back); err != nil {
			t.Error(err)
		}
		back.Release()
	}
}

// TestLongColumn: arrow-go lets a column have more rows than the record.
func TestLongColumn(t *testing.T) {
	g := arrowgen.New(5)
	schema := arrowgen.Schema(arrow.BinaryTypes.String)
	col := g.Array(arrow.BinaryTypes.String, 50)
	defer col.Release()
	rec := array.NewRecordBatch(schema, []arrow.Array{col}, 20)
	defer rec.Release()
	checkRoundTrip(t, g.Rng, rec)
}

// TestLongSlices: slices whose bodies have several chunks come back, for every type. Short ones are
// written in another way.
func TestLongSlices(t *testing.T) {
	for i, dt := range append(arrowgen.Flat(), arrowgen.Nested(arrow.PrimitiveTypes.Int16)...) {
		g := arrowgen.New(uint64(i))
		schema := arrowgen.Schema(dt, arrow.PrimitiveTypes.Int64)
		whole := g.Record(schema, 9000)
		rec := whole.NewSlice(3, 8995)
		checkRoundTrip(t, g.Rng, rec)
		rec.Release()
		whole.Release()
	}
}

// TestBitsAfterTheEnd: the bits after the end of a bitmap are zero, whatever the source has there.
func TestBitsAfterTheEnd(t *testing.T) {
	for _, offset := range []int{0, 8, 3} {
		for _, n := range []int{1, 8, 13, 600} {
			bits := memory.NewBufferBytes(bytes.Repeat([]byte{0xff}, 100))
			data := array.NewData(arrow.FixedWidthTypes.Boolean, n, []*memory.Buffer{nil, bits}, nil, 0, offset)
			rec := array.NewRecordBatch(arrowgen.Schema(arrow.FixedWidthTypes.Boolean), []arrow.Array{array.MakeFromData(data)}, int64(n))
			_, body, _ := LaidOut(t, rec)
			if got := bitutil.CountSetBits(body, 0, 8*len(body)); got != n {
				t.Errorf("%d bits from %d on: %d are set in the image", n, offset, got)
			}
		}
	}
}

// TestRunEndsOfSlices: the run ends of a slice count its rows, and the last is their number.
func TestRunEndsOfSlices(t *testing.T) {
	for _, ends := range []arrow.DataType{arrow.PrimitiveTypes.Int16, arrow.PrimitiveTypes.Int32, arrow.PrimitiveTypes.Int64} {
		dt := arrow.RunEndEncodedOf(ends, arrow.PrimitiveTypes.Int32)
		b := array.NewRunEndEncodedBuilder(memory.DefaultAllocator, ends, arrow.PrimitiveTypes.Int32)
		for i, n := range []uint64{4, 6, 10} {
			b.Append(n)
			b.ValueBuilder().(*array.Int32Builder).Append(int32(i))
		}
		whole := array.NewRecordBatch(arrowgen.Schema(dt), []arrow.Array{b.NewArray()}, 20)
		for _, c := range []struct {
			from, to int64
			want     string
		}{{0, 20, "[4 10 20]"}, {0, 7, "[4 7]"}, {2, 20, "[2 8 18]"}, {2, 7, "[2 5]"}, {4, 10, "[6]"}, {5, 6, "[1]"}, {9, 11, "[1 2]"}} {
			d, body, _ := LaidOut(t, whole.NewSlice(c.from, c.to))
			back, err := Open(d, [][]byte{body}, nil)
			if err != nil {
				t.Fatal(err)
			}
			if got := back.Column(0).(*array.RunEndEncoded).RunEndsArr().String(); got != c.want {
				t.Errorf("%s: rows %d to %d have the run ends %s, want %s", ends, c.from, c.to, got, c.want)
			}
			back.Release()
		}
	}
}

// TestOnlyWhatIsShown: a slice of ten rows of a hundred thousand has the bytes of
// ten rows, for every type.
func TestOnlyWhatIsShown(t *testing.T) {
	for _, dt := range append(arrowgen.Flat(), arrowgen.Nested(arrow.BinaryTypes.StringView)...) {
		if dt.ID() == arrow.DICTIONARY {
			continue // the dictionary stays whole
		}
		g := arrowgen.New(3)
		g.Plain = true
		whole := g.Record(arrowgen.Schema(dt), 5000)
		part := whole.NewSlice(2501, 2511)
		if all, some := LogicalBytes(whole), LogicalBytes(part); some > max(all/100, 2000) {
			t.Errorf("%s: %d bytes of %d", dt, some, all)
		}
		part.Release()
		whole.Release()
	}
}

// TestSharedDictionary: a dictionary that two columns share is there once, and
// is one array again when it is opened, also when it has dictionaries within.
func TestSharedDictionary(t *testing.T) {
	inner := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int16, ValueType: arrow.BinaryTypes.String}
	for _, values := range []arrow.DataType{arrow.BinaryTypes.String, inner} {
		dt := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: values}
		g := arrowgen.New(8)
		one := g.Array(dt, 60)
		two := array.NewSlice(one, 10, 50)
		three := array.NewSlice(one, 5, 45)
		other := g.Array(dt, 40)
		rec := array.NewRecordBatch(arrowgen.Schema(dt, dt, dt), []arrow.Array{two, other, three}, 40)
		d, body, dicts := LaidOut(t, rec)
		checkImage(t, d, body)
		back, released := opened(t, g.Rng, d, body, dicts...)
		dict := func(r arrow.RecordBatch, i int) arrow.ArrayData { return r.Column(i).Data().Dictionary() }
		if dict(back, 0) != dict(back, 2) || dict(back, 0) == dict(back, 1) {
			t.Error("the dictionaries are not shared as they were")
		}
		if err := equal.Records(rec, back); err != nil {
			t.Error(err)
		}
		size := func(cols ...arrow.Array) int64 {
			types := make([]arrow.DataType, len(cols))
			for i, c := range cols {
				types[i] = c.DataType()
			}
			r := array.NewRecordBatch(arrowgen.Schema(types...), cols, int64(cols[0].Len()))
			defer r.Release()
			return LogicalBytes(r)
		}
		entries := size(one.(*array.Dictionary).Dictionary())
		if got, want := size(two, three), size(two)+size(three)-entries; got != want || entries == 0 {
			t.Errorf("%d bytes, want %d: the dictionary's %d bytes are there once", got, want, entries)
		}
		checkRoundTrip(t, g.Rng, rec)
		back.Release()
		if released() != 1 {
			t.Errorf("released %d times", released())
		}
		for _, r := range []interface{ Release() }{rec, other, three, two, one} {
			r.Release()
		}
	}
}

// TestNextIsWriteTo: pieces of any size give the bytes and the sums of WriteTo,
// in one extent and in several, for small bodies and for those of several chunks.
func TestNextIsWriteTo(t *testing.T) {
	tables := map[string]arrow.RecordBatch{
		"small":   arrowgen.Flights(1, 500),
		"flights": arrowgen.Flights(1, 46_000),
		"strings": arrowgen.Strings(1, 20_000, 10),
		"mixed":   mixedTable(22_000),
	}
	for name, whole := range tables {
		rng := rand.New(rand.NewPCG(4, 4))
		for _, rec := range []arrow.RecordBatch{whole, whole.NewSlice(3, whole.NumRows()-2)} {
			d, body, _ := LaidOut(t, rec)
			checkImage(t, d, body)
			if name != "small" && len(d.Sums) < 2 {
				t.Fatalf("%s has only %d chunks", name, len(d.Sums))
			}
			l, err := NewLayout(rec, MaxInline)
			if err != nil {
				t.Fatal(err)
			}
			for round := range testseed.Rounds(4, 1) {
				extents := arrowgen.Split(rng, d.Cuts(), bytes.Repeat([]byte{0x55}, len(body)))
				if err := l.WriteTo(extents); err != nil {
					t.Fatal(err)
				}
				checkSame(t, fmt.Sprintf("%s, %d extents", name, len(extents)), d, body, l, slices.Concat(extents...))

				var got []byte
				for int64(len(got)) < l.Desc.Body {
					most := 4096 * (1 + rng.IntN(1+[]int{0, 2, 70, 700}[round]))
					piece := bytes.Repeat([]byte{0x55}, min(most, int(l.Desc.Body)-len(got)))
					if err := l.Write(piece, int64(len(got))); err != nil {
						t.Fatal(err)
					}
					got = append(got, piece...)
				}
				checkSame(t, name+", by pieces", d, body, l, got)
			}
			l.Close()
			rec.Release()
		}
	}
}

// TestWritingAgainKeepsWhatWasMade: a descriptor that was made before keeps its sums when other bytes are laid out.
func TestWritingAgainKeepsWhatWasMade(t *testing.T) {
	rec := arrowgen.Flights(1, 10)
	defer rec.Release()
	l, err := NewLayout(rec, MaxInline)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	lay := func() *batch.Descriptor {
		if err := l.WriteTo([][]byte{make([]byte, l.Desc.Body)}); err != nil {
			t.Fatal(err)
		}
		d, err := l.Descriptor()
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	d := lay()
	sums := slices.Clone(d.Sums)
	l.pieces[0].raw = bytes.Repeat([]byte{1}, len(l.pieces[0].raw))
	if again := lay(); !slices.Equal(d.Sums, sums) || slices.Equal(again.Sums, sums) {
		t.Errorf("the sums were %x, are %x, and of other bytes %x", sums, d.Sums, again.Sums)
	}
}

func checkSame(t *testing.T, what string, d *batch.Descriptor, body []byte, l *Layout, got []byte) {
	t.Helper()
	if !bytes.Equal(got, body) {
		t.Errorf("%s: the bytes differ", what)
	}
	d2, err := l.Descriptor()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(d2.Sums, d.Sums) {
		t.Errorf("%s: the sums differ", what)
	}
}

// mixedTable has every kind of buffer that is not copied as it is, long enough
// to go over chunks and pieces.
func mixedTable(rows int) arrow.RecordBatch {
	g := arrowgen.New(6)
	return g.Record(arrowgen.Schema(
		arrow.FixedWidthTypes.Boolean,
		arrow.BinaryTypes.StringView,
		arrow.ListViewOf(arrow.PrimitiveTypes.Int32),
		arrow.LargeListViewOf(arrow.FixedWidthTypes.Boolean),
		arrow.DenseUnionOf(
			[]arrow.Field{
				{Name: "x", Type: arrow.PrimitiveTypes.Int64, Nullable: true},
				{Name: "y", Type: arrow.BinaryTypes.LargeString, Nullable: true},
			},
			[]arrow.UnionTypeCode{3, 8},
		),
		arrow.RunEndEncodedOf(arrow.PrimitiveTypes.Int32, arrow.BinaryTypes.Binary),
		arrow.ListOf(arrow.BinaryTypes.BinaryView),
		arrow.FixedWidthTypes.MonthDayNanoInterval,
	), rows)
}

// TestManyViewBuffers: gathered views go to several buffers when one would be too long
// for their offsets. The limit is 2 GiB; here it is low.
func TestManyViewBuffers(t *testing.T) {
	for _, most := range []int64{160, 200, 512, 1 << 20} {
		g := arrowgen.New(uint64(most))
		whole := g.Record(arrowgen.Schema(arrow.BinaryTypes.StringView), 3000)
		rec := whole.NewSlice(5, 2990)
		p := planner{maxVar: most}
		if err := p.array("views", arrow.BinaryTypes.StringView, input{host: rec.Column(0).Data()}, 0, rec.NumRows()); err != nil {
			t.Fatal(err)
		}
		l := p.layout(rec.Schema(), rec.NumRows())
		body := bytes.Repeat([]byte{0xaa}, int(l.Desc.Body))
		for at := 0; at < len(body); at += 4096 { // each by itself: every read begins anew
			i := slices.IndexFunc(l.pieces, func(p piece) bool { return p.off+p.n > int64(at) })
			fill(body[at:at+4096], int64(at), l.pieces[max(0, i):])
		}
		if n := p.nodes[1].Length; most < 1<<20 && n < 10 {
			t.Errorf("%d buffers of at most %d bytes", n, most)
		}
		for _, s := range p.spans[2:] {
			if s.Length > most {
				t.Errorf("a buffer of %d bytes, at most %d are allowed", s.Length, most)
			}
		}
		back, err := Open(&l.Desc, [][]byte{body}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := equal.Records(rec, back); err != nil {
			t.Error(err)
		}
		back.Release()
		rec.Release()
		whole.Release()
	}
}

func TestBigEndian(t *testing.T) {
	g := arrowgen.New(1)
	col := g.Array(arrow.PrimitiveTypes.Int32, 3)
	defer col.Release()
	schema := arrowgen.Schema(arrow.PrimitiveTypes.Int32).WithEndianness(endian.BigEndian)
	rec := array.NewRecordBatch(schema, []arrow.Array{col}, 3)
	defer rec.Release()
	_, err := NewLayout(rec, MaxInline)
	if !errors.Is(err, tier.ErrNotSupported) || !strings.Contains(err.Error(), "big-endian") {
		t.Errorf("%v", err)
	}
	if _, err := Open(&batch.Descriptor{Schema: schema}, nil, nil); !errors.Is(err, tier.ErrNotSupported) {
		t.Errorf("%v", err)
	}
}

func TestLayoutMisuse(t *testing.T) {
	if _, err := NewLayout(nil, MaxInline); err == nil {
		t.Error("a layout of nothing")
	}
	rec := arrowgen.Flights(1, 300)
	defer rec.Release()
	l, err := NewLayout(rec, MaxInline)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Descriptor(); err == nil {
		t.Error("a descriptor before the body")
	}
	if err := l.Write(make([]byte, 100), 0); err == nil {
		t.Error("a part of a page")
	}
	if err := l.Write(make([]byte, 4096), 4096); err == nil {
		t.Error("not in order")
	}
	if err := l.WriteTo([][]byte{make([]byte, l.Desc.Body-4096)}); err == nil {
		t.Error("too short extents")
	}
	if err := l.WriteTo([][]byte{make([]byte, 100), make([]byte, l.Desc.Body-100)}); err == nil {
		t.Error("an odd extent")
	}
	if err := l.Write(make([]byte, l.Desc.Body), 0); err != nil {
		t.Error(err)
	}
	if err := l.Write(make([]byte, 4096), l.Desc.Body); err == nil {
		t.Error("behind the end")
	}
	l.Close()
	l.Close()
	if _, err := l.Descriptor(); err != nil {
		t.Error("no descriptor after the end:", err)
	}
	if err := l.WriteTo([][]byte{make([]byte, l.Desc.Body)}); !errors.Is(err, tier.ErrClosed) {
		t.Error(err)
	}
}

// TestVerify: every flipped bit is found, and told with its place.
func TestVerify(t *testing.T) {
	rec := arrowgen.Flights(2, 50_000)
	defer rec.Release()
	d, body, _ := LaidOut(t, rec)
	body[payload.SumChunk+77] ^= 4
	err := Verify(d, 1, body[payload.SumChunk:2*payload.SumChunk])
	var c *CorruptError
	if !errors.As(err, &c) || !errors.Is(err, ErrCorrupt) || c.Offset != payload.SumChunk || c.Want != d.Sums[1] ||
		c.Got == c.Want {
		t.Errorf("%v", err)
	}
	for _, bad := range []error{Verify(d, -1, nil), Verify(d, len(d.Sums), nil), Verify(d, 0, body[:4096])} {
		if bad == nil || errors.Is(bad, ErrCorrupt) {
			t.Errorf("%v", bad)
		}
	}
	want := `convert: corrupt data of batch 7 on /spill/x at offset 4096: checksum 00000000000000aa, want 00000000000000bb`
	if got := (&CorruptError{Batch: 7, Volume: "/spill/x", Offset: 4096, Want: 0xbb, Got: 0xaa}).Error(); got != want {
		t.Error(got)
	}
}

// TestSliceOfViewsKeepsItsBuffers: the slice of an array of views with many data buffers has only
// those that its views use, each no longer than what is used of it.
func TestSliceOfViewsKeepsItsBuffers(t *testing.T) {
	const buffers, rows = 20000, 20
	bld := array.NewStringViewBuilder(memory.DefaultAllocator)
	defer bld.Release()
	for i := range buffers {
		bld.Append(fmt.Sprintf("value %d, which is too long for a view", i))
	}
	one := bld.NewStringViewArray()
	defer one.Release()
	// The builder puts many values into one buffer. Here each has a buffer of its own.
	views := slices.Clone(one.Data().Buffers()[1].Bytes())
	bufs := []*memory.Buffer{nil, memory.NewBufferBytes(views)}
	for i := range buffers {
		v := views[i*viewWidth:]
		n, at := binary.LittleEndian.Uint32(v), binary.LittleEndian.Uint32(v[12:])
		text := one.Data().Buffers()[2+binary.LittleEndian.Uint32(v[8:])].Bytes()
		bufs = append(bufs, memory.NewBufferBytes(text[at:at+n]))
		binary.LittleEndian.PutUint32(v[8:], uint32(i))
		binary.LittleEndian.PutUint32(v[12:], 0)
	}
	data := array.NewData(arrow.BinaryTypes.StringView, buffers, bufs, nil, 0, 0)
	schema := arrow.NewSchema([]arrow.Field{{Name: "v", Type: arrow.BinaryTypes.StringView}}, nil)
	rec := array.NewRecordBatch(schema, []arrow.Array{array.MakeFromData(data)}, buffers)
	rng := rand.New(rand.NewPCG(1, 1))
	for _, at := range []int64{0, 77, buffers - rows} {
		s := sliced(rec, at, at+rows)
		d, body, _ := LaidOut(t, s)
		if n := len(d.Buffers); n != 2+rows {
			t.Errorf("rows from %d: %d buffers, want %d", at, n, 2+rows)
		}
		checkImage(t, d, body)
		checkRoundTrip(t, rng, s)
	}
}

// TestLayoutByRows: a body that is read by rows is the same as any other, and has a checksum for each
// 4 KiB, however it is written.
func TestLayoutByRows(t *testing.T) {
	for _, rows := range []int{0, 1, 700, 9000, 70_000} {
		rec := arrowgen.Flights(7, rows)
		var bodies [][]byte
		for step := range 3 {
			l, err := NewLayout(rec, MaxInline)
			if err != nil {
				t.Fatal(err)
			}
			if step > 0 {
				l.ByRows()
			}
			body := make([]byte, l.Desc.Body)
			for at := 0; step == 2 && at < len(body); { // in pieces
				end := min(len(body), at+20<<10)
				if err := l.Write(body[at:end], int64(at)); err != nil {
					t.Fatal(err)
				}
				at = end
			}
			if step < 2 {
				if err := l.WriteTo([][]byte{body}); err != nil {
					t.Fatal(err)
				}
			}
			d, err := l.Descriptor()
			if err != nil {
				t.Fatal(err)
			}
			want := (l.Desc.Body + d.SumBlock() - 1) / d.SumBlock()
			if int64(len(d.Sums)) != want || step > 0 && d.SumBlock() != tier.Page {
				t.Errorf("%d checksums of %d bytes each for %d bytes", len(d.Sums), d.SumBlock(), l.Desc.Body)
			}
			for i := range d.Sums {
				at := int64(i) * d.SumBlock()
				if err := Verify(d, i, body[at:min(at+d.SumBlock(), d.Body)]); err != nil {
					t.Errorf("%d rows, way %d: %v", rows, step, err)
				}
			}
			bodies = append(bodies, body)
			l.Close()
		}
		if !bytes.Equal(bodies[0], bodies[1]) || !bytes.Equal(bodies[0], bodies[2]) {
			t.Errorf("%d rows have other bytes by rows", rows)
		}
		rec.Release()
	}
}
