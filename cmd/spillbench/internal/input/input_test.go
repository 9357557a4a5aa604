package input

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/apache/arrow-go/v18/parquet"
	"github.com/apache/arrow-go/v18/parquet/compress"
	"github.com/apache/arrow-go/v18/parquet/pqarrow"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/headroom"
	"github.com/spillway-db/spillway/internal/testseed"
)

// Each of thousands of readers leaves large buffers.
func TestMain(m *testing.M) { testseed.Main(m) }

var (
	coded      = &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int8, ValueType: arrow.BinaryTypes.String}
	testSchema = arrow.NewSchema([]arrow.Field{
		{Name: "id", Type: arrow.PrimitiveTypes.Int64},
		{Name: "name", Type: arrow.BinaryTypes.String, Nullable: true},
		{Name: "kind", Type: coded, Nullable: true},
		{Name: "pair", Type: arrow.StructOf(
			arrow.Field{Name: "x", Type: arrow.PrimitiveTypes.Float64, Nullable: true},
			arrow.Field{Name: "tags", Type: arrow.ListOf(arrow.BinaryTypes.String), Nullable: true}), Nullable: true},
	}, nil)
)

// rows returns rows first to first+n-1 of the test table.
func rows(first, n int) arrow.RecordBatch {
	b := array.NewRecordBuilder(memory.DefaultAllocator, testSchema)
	defer b.Release()
	kinds := array.NewStringBuilder(memory.DefaultAllocator)
	kinds.AppendValues([]string{"a", "b", "c"}, nil) // one dictionary for all batches, which a file asks for
	if err := b.Field(2).(*array.BinaryDictionaryBuilder).InsertStringDictValues(kinds.NewStringArray()); err != nil {
		panic(err)
	}
	for i := first; i < first+n; i++ {
		b.Field(0).(*array.Int64Builder).Append(int64(i))
		if i%5 == 0 {
			b.Field(1).AppendNull()
		} else {
			b.Field(1).(*array.StringBuilder).Append(fmt.Sprintf("name of %d", i))
		}
		if err := b.Field(2).(*array.BinaryDictionaryBuilder).AppendString([]string{"a", "b", "c"}[i%3]); err != nil {
			panic(err)
		}
		pair := b.Field(3).(*array.StructBuilder)
		pair.Append(true)
		pair.FieldBuilder(0).(*array.Float64Builder).Append(float64(i) / 2)
		tags := pair.FieldBuilder(1).(*array.ListBuilder)
		tags.Append(true)
		for j := range i % 3 {
			tags.ValueBuilder().(*array.StringBuilder).Append(fmt.Sprint(j))
		}
	}
	return b.NewRecordBatch()
}

type recordWriter interface {
	Write(arrow.RecordBatch) error
	Close() error
}

// encode writes the test table in batches of the given sizes.
func encode(t testing.TB, open func(io.Writer) (recordWriter, error), sizes ...int) []byte {
	t.Helper()
	var buf bytes.Buffer
	w, err := open(&buf)
	if err != nil {
		t.Fatal(err)
	}
	first := 0
	for _, n := range sizes {
		rec := rows(first, n)
		if err := w.Write(rec); err != nil {
			t.Fatal(err)
		}
		rec.Release()
		first += n
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func asFile(opts ...ipc.Option) func(io.Writer) (recordWriter, error) {
	return func(w io.Writer) (recordWriter, error) {
		return ipc.NewFileWriter(w, append(opts, ipc.WithSchema(testSchema))...)
	}
}

func asStream(opts ...ipc.Option) func(io.Writer) (recordWriter, error) {
	return func(w io.Writer) (recordWriter, error) {
		return ipc.NewWriter(w, append(opts, ipc.WithSchema(testSchema))...), nil
	}
}

func asParquet(w io.Writer) (recordWriter, error) {
	return pqarrow.NewFileWriter(testSchema, struct{ io.Writer }{w},
		parquet.NewWriterProperties(parquet.WithCompression(compress.Codecs.Snappy)),
		pqarrow.NewArrowWriterProperties(pqarrow.WithStoreSchema()))
}

func write(t testing.TB, name string, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// readAll reads a file to its end.
func readAll(t testing.TB, path string, opt Options) ([]arrow.RecordBatch, *Source, error) {
	t.Helper()
	s, err := Open(context.Background(), path, opt)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err := s.Close(); err != nil {
			t.Errorf("closing %s: %v", path, err)
		}
	}()
	var out []arrow.RecordBatch
	for {
		rec, err := s.Next(context.Background())
		if err == io.EOF {
			return out, s, nil
		}
		if err != nil {
			return out, s, err
		}
		out = append(out, rec)
	}
}

func lengths(recs []arrow.RecordBatch) []int64 {
	var out []int64
	for _, r := range recs {
		out = append(out, r.NumRows())
	}
	return out
}

// TestFormats: each format is known by its content whatever the name says, and
// gives the rows that were written, in its own batches and in others.
func TestFormats(t *testing.T) {
	for _, c := range []struct {
		name    string
		content []byte
		format  Format
	}{
		{"file", encode(t, asFile(), 40, 60, 5), ArrowFile},
		{"file-zstd", encode(t, asFile(ipc.WithZstd()), 40, 60, 5), ArrowFile},
		{"file-lz4", encode(t, asFile(ipc.WithLZ4()), 40, 60, 5), ArrowFile},
		{"stream", encode(t, asStream(), 40, 60, 5), ArrowStream},
		{"stream-zstd", encode(t, asStream(ipc.WithZstd()), 40, 60, 5), ArrowStream},
		{"parquet", encode(t, asParquet, 40, 60, 5), Parquet},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := write(t, "data.csv", c.content) // a name that lies
			for _, size := range []int64{0, 1, 33, 105, 1000} {
				recs, s, err := readAll(t, path, Options{RowsPerBatch: size})
				if err != nil {
					t.Fatal(err)
				}
				if s.format != c.format {
					t.Fatalf("taken for %s, want %s", s.format, c.format)
				}
				var want []int64
				switch size {
				case 0:
					want = []int64{40, 60, 5}
				default:
					for left := int64(105); left > 0; left -= size {
						want = append(want, min(left, size))
					}
				}
				if got := lengths(recs); fmt.Sprint(got) != fmt.Sprint(want) {
					t.Errorf("%d rows a batch gave %v, want %v", size, got, want)
				}
				first := 0
				for i, rec := range recs {
					want := rows(first, int(rec.NumRows()))
					if !sameValues(want, rec) {
						t.Fatalf("%d rows a batch: batch %d differs:\n%v\nwant\n%v", size, i, rec, want)
					}
					first += int(rec.NumRows())
					rec.Release()
				}
			}
		})
	}
}

// sameValues compares what the rows say; dictionaries may be other ones.
func sameValues(a, b arrow.RecordBatch) bool {
	if a.NumRows() != b.NumRows() || a.NumCols() != b.NumCols() {
		return false
	}
	for i := range a.Columns() {
		for j := range int(a.NumRows()) {
			if a.Column(i).ValueStr(j) != b.Column(i).ValueStr(j) {
				return false
			}
		}
	}
	return true
}

// TestJoinFallsBack: batches of a type that cannot be joined stay apart, and no
// row is lost.
func TestJoinFallsBack(t *testing.T) {
	union := arrow.DenseUnionOf([]arrow.Field{{Name: "i", Type: arrow.PrimitiveTypes.Int64}}, []arrow.UnionTypeCode{0})
	schema := arrow.NewSchema([]arrow.Field{{Name: "u", Type: union}}, nil)
	var buf bytes.Buffer
	w := ipc.NewWriter(&buf, ipc.WithSchema(schema))
	for range 3 {
		b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
		u := b.Field(0).(*array.DenseUnionBuilder)
		for i := range 10 {
			u.Append(0)
			u.Child(0).(*array.Int64Builder).Append(int64(i))
		}
		if err := w.Write(b.NewRecordBatch()); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	recs, _, err := readAll(t, write(t, "u", buf.Bytes()), Options{RowsPerBatch: 15})
	if err != nil {
		t.Fatal(err)
	}
	total := int64(0)
	for _, n := range lengths(recs) {
		if n > 15 {
			t.Errorf("a batch of %d rows", n)
		}
		total += n
	}
	if total != 30 {
		t.Errorf("%d rows of 30", total)
	}
}

// TestBadPaths: the error of a path that is not a file of data is one line that names it.
func TestBadPaths(t *testing.T) {
	for _, c := range []struct {
		name string
		path string
		want string
	}{
		{"missing", filepath.Join(t.TempDir(), "absent.parquet"), "no such file"},
		{"directory", t.TempDir(), "is a directory"},
		{"empty", write(t, "empty.parquet", nil), "is empty"},
		{"gzip", write(t, "a.csv.gz", []byte("\x1f\x8b\x08\x00more")), "gzip"},
		{"zip", write(t, "a.xlsx", []byte("PK\x03\x04more")), "zip"},
		{"utf-16", write(t, "a.csv", []byte("\xff\xfea\x00,\x00")), "UTF-16"},
		{"feather 1", write(t, "a.feather", []byte("FEA1\x00\x00\x00\x00....FEA1")), "Feather V1"},
		{"binary", write(t, "a.bin", []byte{1, 2, 3, 0, 5}), "is not Parquet, Arrow or CSV"},
		{"device", os.DevNull, "is not a regular file"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Open(context.Background(), c.path, Options{})
			checkError(t, err, c.path, c.want)
		})
	}
}

func checkError(t *testing.T, err error, path, want string) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("%v is no *Error", err)
	}
	if e.Path != path || e.Fix == "" {
		t.Errorf("path %q, fix %q", e.Path, e.Fix)
	}
	if msg := err.Error(); !strings.Contains(msg, path) || !strings.Contains(msg, want) || strings.Contains(msg, "\n") {
		t.Errorf("%q does not name %q and %q in one line", msg, path, want)
	}
}

// TestDamaged reads files that are cut short, and files with one byte changed,
// at many places: never a panic, and cut files are never taken for whole ones.
func TestDamaged(t *testing.T) {
	for _, c := range []struct {
		name    string
		content []byte
	}{
		{"file", encode(t, asFile(), 40, 60)},
		{"file-zstd", encode(t, asFile(ipc.WithZstd()), 40, 60)},
		{"stream", encode(t, asStream(), 40, 60)},
		{"stream-lz4", encode(t, asStream(ipc.WithLZ4()), 40, 60)},
		{"parquet", encode(t, asParquet, 40, 60)},
	} {
		t.Run(c.name, func(t *testing.T) {
			whole, _, err := readAll(t, write(t, "whole", c.content), Options{})
			if err != nil || len(whole) != 2 {
				t.Fatalf("%d batches, %v", len(whole), err)
			}
			path := write(t, "damaged", nil)
			read := func(content []byte) (batches int, err error) {
				if err := os.WriteFile(path, content, 0o600); err != nil {
					t.Fatal(err)
				}
				recs, _, err := readAll(t, path, Options{MaxAlloc: 1 << 30})
				release(recs)
				if err != nil {
					checkError(t, err, path, "")
				}
				return len(recs), err
			}
			for cut := 1; cut < len(c.content); cut += 1 + len(c.content)/53 {
				// A stream may end after any message; then what came before is whole.
				if n, err := read(c.content[:cut]); err == nil && n == len(whole) && !strings.HasPrefix(c.name, "stream") {
					t.Errorf("cut at %d of %d bytes: no error", cut, len(c.content))
				}
			}
			broken := bytes.Clone(c.content)
			for at := 0; at < len(broken); at += 1 + len(broken)/127 {
				for _, bit := range []byte{0x01, 0x80} {
					broken[at] ^= bit
					read(broken) // an error or other values; the test is that it returns
					broken[at] ^= bit
				}
			}
		})
	}
}

// TestOversizedAllocation: a length that no machine could hold is an error.
func TestOversizedAllocation(t *testing.T) {
	path := write(t, "a", encode(t, asFile(ipc.WithZstd()), 1000))
	_, _, err := readAll(t, path, Options{MaxAlloc: 100})
	checkError(t, err, path, "at most 100 are allowed")
}

// TestNoRoom: in every format, and where batches are joined, memory that is refused ends the
// reading with the reason, and the file is not said to be broken.
func TestNoRoom(t *testing.T) {
	full := errors.New("the heap is full")
	table := ""
	for i := range 2000 {
		table += fmt.Sprintf("%d,%d\n", i, 2*i)
	}
	for name, c := range map[string]struct {
		content []byte
		opt     Options
	}{
		"file":    {encode(t, asFile(ipc.WithZstd()), 1000, 1000), Options{}},
		"stream":  {encode(t, asStream(), 1000, 1000), Options{}},
		"parquet": {encode(t, asParquet, 1000, 1000), Options{}},
		"csv":     {[]byte("a,b\n" + table), Options{}},
		"joined":  {encode(t, asFile(), 100, 100, 100, 100, 100, 100, 100, 100, 100, 100), Options{RowsPerBatch: 1000}},
	} {
		t.Run(name, func(t *testing.T) {
			path := write(t, name, c.content)
			asked, most := int64(0), int64(0)
			c.opt.Room = func(n int64) error {
				asked += n
				most = max(most, n)
				return nil
			}
			whole, _, err := readAll(t, path, c.opt)
			release(whole)
			if err != nil || asked == 0 {
				t.Fatalf("%d bytes were asked for, %v", asked, err)
			}
			c.opt.Room = func(n int64) error {
				if n == most {
					return full
				}
				return nil
			}
			recs, _, err := readAll(t, path, c.opt)
			release(recs)
			var e *Error
			if !errors.Is(err, full) || !errors.As(err, &e) || e.Path != path || e.Fix != "" ||
				strings.Contains(err.Error(), "panic") {
				t.Errorf("got %v", err)
			}
		})
	}
}

// TestSeveralParquetFilesInOne refuses Parquet files that were put into one, and says where the
// second begins.
func TestSeveralParquetFilesInOne(t *testing.T) {
	small, large := parquetOf(t, "x", 5), parquetOf(t, "x", 200000)
	contents := [][]byte{
		slices.Concat(small, small), slices.Concat(small, small, small), slices.Concat(large, small),
		slices.Concat(small, parquetOf(t, "x", 0)),
	}
	for more := 64<<10 - len(small); more < 64<<10; more += 5 { // one seam lies across two reads
		contents = append(contents, slices.Concat(small[:len(small)-4], make([]byte, more), []byte(seam), small[4:]))
	}
	for i, content := range contents {
		path := write(t, "f", content)
		recs, _, err := readAll(t, path, Options{})
		second := bytes.Index(content, []byte(seam)) + 4
		checkError(t, err, path, fmt.Sprintf("is several Parquet files in one: another begins at byte %d", second))
		if len(recs) > 0 {
			t.Errorf("%d: %d batches", i, len(recs))
		}
		release(recs)
	}
}

// TestParquetTakesWhatItNeeds: the reader takes memory for the rows of a row group, and not
// for as many as a batch may have.
func TestParquetTakesWhatItNeeds(t *testing.T) {
	most := int64(0)
	recs, _, err := readAll(t, write(t, "p", encode(t, asParquet, 100, 100)), Options{Room: func(n int64) error {
		most = max(most, n)
		return nil
	}})
	release(recs)
	if err != nil || most > 64<<10 {
		t.Errorf("for 100 rows %d bytes were taken at once, %v", most, err)
	}
}

// TestCancelled: a cancelled read says so, and is not the file's fault.
func TestCancelled(t *testing.T) {
	s, err := Open(context.Background(), write(t, "a", encode(t, asFile(), 10, 10)), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	var e *Error
	if _, err := s.Next(ctx); !errors.Is(err, context.Canceled) || errors.As(err, &e) {
		t.Errorf("got %v", err)
	}
	if rec, err := s.Next(context.Background()); err != nil || rec.NumRows() != 10 {
		t.Errorf("after a cancelled read: %v, %v", rec, err)
	}
}

// TestClosingFails: that a file could not be closed is told.
func TestClosingFails(t *testing.T) {
	s, err := Open(t.Context(), write(t, "a", encode(t, asFile(), 10, 10)), Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := s.Close(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("closing what is closed: %v", err)
	}
}

// TestErrorHasAStatus: a wrong file is wrong use, unless the machine has no memory to read it.
func TestErrorHasAStatus(t *testing.T) {
	for _, c := range []struct {
		err    error
		status int
		want   string
	}{
		{&Error{Path: "a.csv", Err: errors.New("is empty"), Fix: "fill it"}, fail.Usage, "a.csv: is empty (fill it)"},
		{&Error{Path: "a.csv", Err: &headroom.FullError{Requested: 1 << 20}}, fail.Environment, "--rows-per-batch"},
	} {
		for _, err := range []error{c.err, fmt.Errorf("running: %w", c.err)} {
			if status, line := fail.Status(err), fail.Line(err); status != c.status || !strings.Contains(line, c.want) {
				t.Errorf("status %d, want %d: %q, want %q", status, c.status, line, c.want)
			}
		}
	}
}

// rewrite replaces the content of a file.
func rewrite(t testing.TB, path string, content []byte) {
	t.Helper()
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
}

func release(recs []arrow.RecordBatch) {
	for _, r := range recs {
		r.Release()
	}
}
