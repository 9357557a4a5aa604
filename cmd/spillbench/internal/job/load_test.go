package job

import (
	"context"
	"io"
	"runtime"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/tier"
)

// counting gives batches of memory that it counts.
type counting struct {
	mem  *memory.CheckedAllocator
	left int
	seen []int // bytes of those that were not released, before each batch
}

func (c *counting) Next(context.Context) (arrow.RecordBatch, error) {
	c.seen = append(c.seen, c.mem.CurrentAlloc())
	if c.left == 0 {
		return nil, io.EOF
	}
	c.left--
	b := array.NewInt64Builder(c.mem)
	defer b.Release()
	b.AppendValues(make([]int64, 1<<15), nil)
	col := b.NewArray()
	defer col.Release()
	schema := arrow.NewSchema([]arrow.Field{{Name: "n", Type: arrow.PrimitiveTypes.Int64, Nullable: true}}, nil)
	return array.NewRecordBatch(schema, []arrow.Array{col}, 1<<15), nil
}

func (*counting) Close() error { return nil }

// TestLoadHoldsLittle: of decoded batches no more wait to be put than may be held, however
// many workers there are; with no bound there are more.
func TestLoadHoldsLittle(t *testing.T) {
	const batches, size = 40, 1 << 18 // what a batch's values take
	run := func(bound int64) (most int) {
		src := &counting{mem: memory.NewCheckedAllocator(memory.NewGoAllocator()), left: batches}
		cfg := config(engine(t, spillway.GPUConfig{}))
		cfg.Inputs = []Input{{Name: "counted", Open: func(context.Context) (Source, error) { return src, nil }}}
		cfg.Workers, cfg.Partitions, cfg.Held = 8, 8, bound
		res, err := Run(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		if res.Batches != int64(batches*cfg.Repeat) || res.Mismatches != 0 || len(src.seen) != batches+1 {
			t.Errorf("%+v after %d batches", res, len(src.seen))
		}
		for _, n := range src.seen {
			most = max(most, n)
		}
		return most
	}
	if most := run(1); most != 0 { // one at a time
		t.Errorf("%d bytes are held when the next is decoded, want 0", most)
	}
	if most := run(3 * size); most > 3*(size+size/8) {
		t.Errorf("%d bytes are held when the next is decoded, want at most three batches", most)
	}
}

// TestDigestTakesLittleMemory: the expectation is that of the whole image, and no image is
// made for it.
func TestDigestTakesLittleMemory(t *testing.T) {
	for name, rec := range map[string]arrow.RecordBatch{
		"flat": arrowgen.Flights(1, 200_000), "dictionaries": dictionaries(100_000),
	} {
		l, err := convert.NewLayout(rec)
		if err != nil {
			t.Fatal(err)
		}
		var want tier.Digest
		size := int64(0)
		for _, part := range append([]*convert.Layout{l}, l.Dictionaries...) {
			image := make([]byte, part.Desc.Body)
			if err := part.WriteTo([][]byte{image}); err != nil {
				t.Fatal(err)
			}
			want = want.Add(tier.DigestBytes(image, size/8))
			size += part.Desc.Body
		}
		l.Close()
		piece := make([]byte, 1<<20)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		got, err := digest(rec, piece)
		runtime.ReadMemStats(&after)
		if err != nil || got != want {
			t.Errorf("%s: digest %+v, %v; want %+v", name, got, err, want)
		}
		if took := int64(after.TotalAlloc - before.TotalAlloc); took > size/4 {
			t.Errorf("%s: %d bytes were allocated for an image of %d", name, took, size)
		}
		rec.Release()
	}
}

// dictionaries is a record with a column that refers to a large dictionary.
func dictionaries(n int) arrow.RecordBatch {
	typ := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.PrimitiveTypes.Int64}
	b := array.NewDictionaryBuilder(memory.DefaultAllocator, typ).(*array.Int64DictionaryBuilder)
	defer b.Release()
	for i := range n {
		if err := b.Append(int64(i)); err != nil {
			panic(err)
		}
	}
	col := b.NewArray()
	defer col.Release()
	return array.NewRecordBatch(
		arrow.NewSchema([]arrow.Field{{Name: "d", Type: typ}}, nil),
		[]arrow.Array{col},
		int64(n),
	)
}
