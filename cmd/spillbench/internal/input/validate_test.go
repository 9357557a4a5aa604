package input

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/apache/arrow-go/v18/parquet"
	"github.com/apache/arrow-go/v18/parquet/pqarrow"
)

// encodings write batches in the binary formats.
var encodings = map[string]func(io.Writer, *arrow.Schema) (recordWriter, error){
	"Arrow file": func(w io.Writer, s *arrow.Schema) (recordWriter, error) {
		return ipc.NewFileWriter(w, ipc.WithSchema(s))
	},
	"Arrow stream": func(w io.Writer, s *arrow.Schema) (recordWriter, error) {
		return ipc.NewWriter(w, ipc.WithSchema(s)), nil
	},
	"Parquet": func(w io.Writer, s *arrow.Schema) (recordWriter, error) {
		return pqarrow.NewFileWriter(s, struct{ io.Writer }{w}, parquet.NewWriterProperties(),
			pqarrow.DefaultWriterProps())
	},
	"Parquet with an Arrow schema": func(w io.Writer, s *arrow.Schema) (recordWriter, error) {
		return pqarrow.NewFileWriter(s, struct{ io.Writer }{w}, parquet.NewWriterProperties(),
			pqarrow.NewArrowWriterProperties(pqarrow.WithStoreSchema()))
	},
}

// fileOf returns a file in a format of encodings with the given batches.
func fileOf(t *testing.T, format string, schema *arrow.Schema, recs ...arrow.RecordBatch) []byte {
	t.Helper()
	var buf bytes.Buffer
	w, err := encodings[format](&buf, schema)
	if err != nil {
		t.Fatal(err)
	}
	for _, rec := range recs {
		if err := w.Write(rec); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// ofJSON returns a batch of the column "größe" with the values of a JSON array.
func ofJSON(t *testing.T, dt arrow.DataType, values string) arrow.RecordBatch {
	t.Helper()
	col, _, err := array.FromJSON(memory.DefaultAllocator, dt, strings.NewReader(values))
	if err != nil {
		t.Fatal(err)
	}
	schema := arrow.NewSchema([]arrow.Field{{Name: "größe", Type: dt, Nullable: true}}, nil)
	return array.NewRecordBatch(schema, []arrow.Array{col}, int64(col.Len()))
}

// spoil replaces the word "wrong" in content by text that is not UTF-8.
func spoil(t *testing.T, content []byte) []byte {
	t.Helper()
	if n := bytes.Count(content, []byte("wrong")); n == 0 {
		t.Fatal("the word is not in the file")
	}
	return bytes.ReplaceAll(content, []byte("wrong"), []byte("wr\xf6ng"))
}

// TestTextIsUTF8: text that is not UTF-8 is refused in all formats, with the same error that gives
// the row, counted from 1 over all batches, and the column.
func TestTextIsUTF8(t *testing.T) {
	const want = `has text that is not UTF-8 in row 5 of column "größe" (convert its text to UTF-8 first`
	content := "größe,n\nä,1\nÄ,2\n,3\n漢字,4\nwrong,5\nö,6\n"
	for _, size := range []int64{0, 1, 2, 4} {
		for _, c := range []string{content, strings.ReplaceAll(content, "\n", "\r")} {
			path := write(t, "f.csv", []byte(c))
			recs, _, err := readAll(t, path, Options{RowsPerBatch: size})
			if release(recs); err != nil {
				t.Fatal(err)
			}
			path = write(t, "f.csv", spoil(t, []byte(c)))
			recs, _, err = readAll(t, path, Options{RowsPerBatch: size})
			release(recs)
			checkError(t, err, path, want)
		}
	}
	text := arrow.BinaryTypes.String
	for name, c := range map[string]struct {
		dt            arrow.DataType
		first, second string // the values of two batches
	}{
		"text":       {text, `["ä", null]`, `["漢字", "Ä", "wrong", "ö"]`},
		"large text": {arrow.BinaryTypes.LargeString, `["ä", null]`, `["漢字", "Ä", "wrong", "ö"]`},
		"views": {arrow.BinaryTypes.StringView, `["ä", null]`,
			`["漢字", "Ä", "wrong", "a text of more than 12 bytes"]`},
		"lists": {arrow.ListOf(text), `[["ä"], null]`, `[["漢字", "Ä"], [], ["a", null, "wrong"], ["ö"]]`},
		"structs": {arrow.StructOf(arrow.Field{Name: "a", Type: text, Nullable: true}), `[{"a": "ä"}, null]`,
			`[{"a": "漢字"}, {"a": null}, {"a": "wrong"}, {"a": "ö"}]`},
		"maps": {arrow.MapOf(text, text), `[null, [{"key": "ä", "value": "b"}]]`,
			`[[], [{"key": "c", "value": null}], [{"key": "d", "value": "wrong"}], null]`},
	} {
		for format := range encodings {
			if strings.HasPrefix(format, "Parquet") && name == "views" {
				continue // pqarrow does not write them
			}
			first, second := ofJSON(t, c.dt, c.first), ofJSON(t, c.dt, c.second)
			whole := fileOf(t, format, first.Schema(), first, second)
			recs, _, err := readAll(t, write(t, "f", whole), Options{})
			if release(recs); err != nil {
				t.Fatalf("%s in %s: %v", name, format, err)
			}
			path := write(t, "f", spoil(t, whole))
			recs, _, err = readAll(t, path, Options{})
			release(recs)
			t.Logf("%s in %s", name, format)
			checkError(t, err, path, want)
		}
	}
}

// TestDictionaryIsUTF8: text in a dictionary is refused, with the first row that has it, if any
// has.
func TestDictionaryIsUTF8(t *testing.T) {
	for indices, want := range map[string]string{
		"[0, 2, 1, 1]": `has text that is not UTF-8 in row 3 of column "größe"`,
		"[0, 2, 2]":    `has text that is not UTF-8 in column "größe"`,
	} {
		values := ofJSON(t, arrow.BinaryTypes.String, `["a", "wrong", "b"]`).Column(0)
		at := ofJSON(t, arrow.PrimitiveTypes.Int8, indices)
		col := array.NewDictionaryArray(coded, at.Column(0), values)
		schema := arrow.NewSchema([]arrow.Field{{Name: "größe", Type: coded}}, nil)
		rec := array.NewRecordBatch(schema, []arrow.Array{col}, at.NumRows())
		for _, format := range []string{"Arrow file", "Arrow stream"} {
			path := write(t, "f", spoil(t, fileOf(t, format, schema, rec)))
			recs, _, err := readAll(t, path, Options{})
			release(recs)
			checkError(t, err, path, want)
		}
	}
}

// TestNamesAreUTF8: so are the names of columns and fields.
func TestNamesAreUTF8(t *testing.T) {
	const want = `has a column with a name that is not UTF-8: "wr\xf6ng" (convert its text`
	path := write(t, "f.csv", spoil(t, []byte("a,wrong\n1,2\n")))
	_, err := Open(t.Context(), path, Options{})
	checkError(t, err, path, want)
	number := arrow.PrimitiveTypes.Int64
	for _, field := range []arrow.Field{
		{Name: "wrong", Type: number},
		{Name: "a", Type: arrow.ListOf(arrow.StructOf(arrow.Field{Name: "wrong", Type: number}))},
	} {
		for format := range encodings {
			if format == "Parquet with an Arrow schema" {
				continue // that has the name in base64
			}
			schema := arrow.NewSchema([]arrow.Field{field}, nil)
			path := write(t, "f", spoil(t, fileOf(t, format, schema)))
			_, err := Open(t.Context(), path, Options{})
			checkError(t, err, path, want)
		}
	}
}

// TestNesting: columns may be nested 64 levels deep in all formats, and 10 maps deep. The error of
// a deeper one is the same in all of them, and is not that the file is broken.
func TestNesting(t *testing.T) {
	const want = "has a column that is nested too deep: at most 64 levels are read, and 10 maps in one another " +
		"(write it again with fewer levels"
	inStruct := func(dt arrow.DataType) arrow.DataType {
		return arrow.StructOf(arrow.Field{Name: "s", Type: dt, Nullable: true})
	}
	inList := func(dt arrow.DataType) arrow.DataType { return arrow.ListOf(dt) }
	inLargeList := func(dt arrow.DataType) arrow.DataType { return arrow.LargeListOf(dt) }
	inMap := func(dt arrow.DataType) arrow.DataType { return arrow.MapOf(arrow.PrimitiveTypes.Int8, dt) }
	for _, c := range []struct {
		kind  string
		wrap  func(arrow.DataType) arrow.DataType
		times int
		fits  bool
	}{
		{"structs", inStruct, 62, true}, {"structs", inStruct, 63, true}, {"structs", inStruct, 64, false},
		{"structs", inStruct, 70, false}, {"structs", inStruct, 1000, false},
		{"lists", inList, 63, true}, {"lists", inList, 64, false}, {"lists", inList, 1000, false},
		{"large lists", inLargeList, 63, true}, {"large lists", inLargeList, 64, false},
		{"maps", inMap, 10, true}, {"maps", inMap, 11, false}, {"maps", inMap, 13, false},
	} {
		var dt arrow.DataType = arrow.PrimitiveTypes.Int64
		for range c.times {
			dt = c.wrap(dt)
		}
		rec := ofJSON(t, dt, "[null, null]")
		for format := range encodings {
			var recs []arrow.RecordBatch
			if c.times < 64 || strings.HasPrefix(format, "Parquet") { // arrow-go writes no deeper batches as IPC
				recs = append(recs, rec)
			}
			path := write(t, "f", fileOf(t, format, rec.Schema(), recs...))
			read, _, err := readAll(t, path, Options{})
			release(read)
			t.Logf("%d %s in %s", c.times, c.kind, format)
			if !c.fits {
				checkError(t, err, path, path+": "+want)
			} else if err != nil || len(read) != 1 || read[0].NumRows() != 2 {
				t.Errorf("%d batches, %v", len(read), err)
			}
		}
	}
}
