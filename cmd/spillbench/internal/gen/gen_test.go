package gen

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"
	"unicode/utf8"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// read returns all batches of a table.
func read(t testing.TB, cfg Config) []arrow.RecordBatch {
	t.Helper()
	table, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return rest(t, table)
}

// rest returns the batches of a table from where it stands.
func rest(t testing.TB, table *Table) (out []arrow.RecordBatch) {
	t.Helper()
	for {
		rec, err := table.Next(context.Background())
		if err == io.EOF {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, rec)
	}
}

// TestPart: the parts of a table do not depend on how far it has been read.
func TestPart(t *testing.T) {
	cfg := Config{Seed: 3, Rows: 250, RowsPerBatch: 100}
	table, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := table.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	want, again := read(t, cfg), rest(t, table.Again())
	parts := slices.Concat(rest(t, table.Part(0, 2)), rest(t, table.Part(1, 2)), rest(t, table.Part(3, 4)))
	equal := func(a, b arrow.RecordBatch) bool { return array.RecordEqual(a, b) }
	if want := []arrow.RecordBatch{want[0], want[2], want[1]}; !slices.EqualFunc(parts, want, equal) {
		t.Errorf("the parts have %d batches, want %d, or others", len(parts), len(want))
	}
	if len(again) != 3 || !slices.EqualFunc(again, want, equal) {
		t.Errorf("%d batches, want %d", len(again), len(want))
	}
	if left := rest(t, table); len(left) != 2 {
		t.Errorf("%d batches are left of the first, want 2", len(left))
	}
}

// whole returns a table's rows as one batch.
func whole(t testing.TB, cfg Config) arrow.RecordBatch {
	t.Helper()
	parts := read(t, cfg)
	cols := make([]arrow.Array, schema.NumFields())
	rows := int64(0)
	for _, p := range parts {
		rows += p.NumRows()
	}
	for i := range cols {
		arrays := make([]arrow.Array, len(parts))
		for j, p := range parts {
			arrays[j] = p.Column(i)
		}
		col, err := array.Concatenate(arrays, memory.DefaultAllocator)
		if err != nil {
			t.Fatal(err)
		}
		cols[i] = col
	}
	return array.NewRecordBatch(schema, cols, rows)
}

// TestRowsDoNotDependOnBatches: a row is the same however the table is cut.
func TestRowsDoNotDependOnBatches(t *testing.T) {
	const rows = 3001
	want := whole(t, Config{Seed: 7, Rows: rows, RowsPerBatch: rows})
	for _, size := range []int64{1, 7, 8, 1000, 3000} {
		got := whole(t, Config{Seed: 7, Rows: rows, RowsPerBatch: size})
		if !array.RecordEqual(want, got) {
			t.Errorf("batches of %d rows give other rows than one batch", size)
		}
	}
	if other := whole(t, Config{Seed: 8, Rows: rows, RowsPerBatch: rows}); array.RecordEqual(want, other) {
		t.Error("another seed gives the same rows")
	}
}

// TestBatchSizes: whole batches and a smaller last one; none of a table without
// rows.
func TestBatchSizes(t *testing.T) {
	var sizes []int64
	for _, rec := range read(t, Config{Rows: 250, RowsPerBatch: 100}) {
		sizes = append(sizes, rec.NumRows())
	}
	if len(sizes) != 3 || sizes[0] != 100 || sizes[1] != 100 || sizes[2] != 50 {
		t.Errorf("250 rows in batches of 100 came as %v", sizes)
	}
	if n := len(read(t, Config{RowsPerBatch: 100})); n != 0 {
		t.Errorf("no rows came as %d batches", n)
	}
	if _, err := New(Config{Rows: 1}); err == nil {
		t.Error("batches of no rows were accepted")
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	table, _ := New(Config{Rows: 1, RowsPerBatch: 1})
	if _, err := table.Next(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled read returned %v", err)
	}
}

// TestContent: every column is valid Arrow, nullable columns have nulls, and
// text is UTF-8, short and long.
func TestContent(t *testing.T) {
	rec := read(t, Config{Seed: 1, Rows: 20_000, RowsPerBatch: 20_000})[0]
	for i, col := range rec.Columns() {
		f := rec.Schema().Field(i)
		if f.Nullable != (col.NullN() > 0) {
			t.Errorf("%s: nullable %v, and %d nulls", f.Name, f.Nullable, col.NullN())
		}
		if got := array.NewSlice(col, 0, int64(col.Len())); got.NullN() != col.NullN() {
			t.Errorf("%s: %d nulls by its bitmap, %d declared", f.Name, got.NullN(), col.NullN())
		}
		if v, ok := col.(interface{ ValidateFull() error }); ok {
			if err := v.ValidateFull(); err != nil {
				t.Errorf("%s: %v", f.Name, err)
			}
		}
	}
	text := rec.Column(int(comment)).(*array.String)
	short, long := 0, 0
	for i := range text.Len() {
		if text.IsNull(i) {
			continue
		}
		s := text.Value(i)
		if !utf8.ValidString(s) {
			t.Fatalf("row %d: %q is not UTF-8", i, s)
		}
		if len(s) > 255 {
			long++
		} else {
			short++
		}
	}
	if short < 100*long || long == 0 {
		t.Errorf("%d short and %d long comments", short, long)
	}
}

// TestRowBytes holds the constant to what rows really take.
func TestRowBytes(t *testing.T) {
	const rows = 50_000
	rec := read(t, Config{Seed: 3, Rows: rows, RowsPerBatch: rows})[0]
	bytes := 0
	for _, col := range rec.Columns() {
		for _, b := range col.Data().Buffers() {
			if b != nil {
				bytes += b.Len()
			}
		}
	}
	if got := float64(bytes) / rows; got < 0.9*RowBytes || got > 1.1*RowBytes {
		t.Errorf("a row takes %.1f bytes; RowBytes is %d", got, RowBytes)
	}
}

func BenchmarkNext(b *testing.B) {
	const rows = 1 << 15
	table, err := New(Config{Seed: 1, Rows: 1 << 62, RowsPerBatch: rows})
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(rows * RowBytes)
	b.ReportAllocs()
	for b.Loop() {
		rec, err := table.Next(context.Background())
		if err != nil {
			b.Fatal(err)
		}
		rec.Release()
	}
}

// TestSameRowsAsEver holds the values of a seed to those of earlier versions: figures of two versions
// can be compared only if their tables are the same.
func TestSameRowsAsEver(t *testing.T) {
	sum := sha256.New()
	for _, col := range whole(t, Config{Seed: 9, Rows: 5000, RowsPerBatch: 1900}).Columns() {
		for i := range col.Len() {
			fmt.Fprintln(sum, col.ValueStr(i))
		}
	}
	const want = "3ce528fd38b784d00e29deec667ccc510b185f2a2a01858bce959254b1a202ed"
	if got := fmt.Sprintf("%x", sum.Sum(nil)); got != want {
		t.Errorf("the values have the digest %s, want %s", got, want)
	}
}
