package input

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	flatbuffers "github.com/google/flatbuffers/go"
)

// streams are pieces of streams that tests put together.
type streams struct {
	one, two, empty []byte // whole streams: of rows 0 to 1, of rows 2 to 4, of none
	other           []byte // of another schema
}

var endMark = []byte("\xff\xff\xff\xff\x00\x00\x00\x00")

func someStreams(t *testing.T) (s streams) {
	t.Helper()
	s.one = encode(t, asStream(), 2)
	s.two = encodeRecords(t, false, []arrow.RecordBatch{rows(2, 3)}, ipc.WithZstd())
	s.empty = encode(t, asStream())
	s.other = encodeRecords(t, false, []arrow.RecordBatch{columnOf(t, arrow.PrimitiveTypes.Int64, "[1]")})
	for _, b := range [][]byte{s.one, s.two, s.empty, s.other} {
		if !bytes.HasSuffix(b, endMark) {
			t.Fatal("a stream does not end with the mark")
		}
	}
	return s
}

// withoutEnd cuts off the mark of a stream's end, which writers may leave out.
func withoutEnd(stream []byte) []byte { return bytes.TrimSuffix(stream, endMark) }

// TestConcatenatedStreams reads all rows of files that hold several streams of one schema.
func TestConcatenatedStreams(t *testing.T) {
	s := someStreams(t)
	noted := arrow.NewMetadata([]string{"pandas"}, []string{`{"stop": 3}`})
	withMetadata := testSchemaWith(t, &noted, rows(2, 3))
	for name, c := range map[string]struct {
		content []byte
		want    []int64
	}{
		"two":                      {slices.Concat(s.one, s.two), []int64{2, 3}},
		"empty ones":               {slices.Concat(s.empty, s.one, s.empty, s.empty, s.two, s.empty), []int64{2, 3}},
		"without a mark":           {slices.Concat(withoutEnd(s.one), s.two), []int64{2, 3}},
		"without any mark":         {slices.Concat(withoutEnd(s.empty), withoutEnd(s.one), withoutEnd(s.two)), []int64{2, 3}},
		"other metadata":           {slices.Concat(s.one, withMetadata), []int64{2, 3}},
		"an old mark of the end":   {slices.Concat(withoutEnd(s.one), make([]byte, 4), s.two), []int64{2, 3}},
		"an old mark at the end":   {slices.Concat(s.one, withoutEnd(s.two), make([]byte, 4)), []int64{2, 3}},
		"one without a mark":       {withoutEnd(s.one), []int64{2}},
		"none but empty ones":      {slices.Concat(s.empty, s.empty), nil},
		"an empty one and nothing": {withoutEnd(s.empty), nil},
	} {
		t.Run(name, func(t *testing.T) {
			path := write(t, "f", c.content)
			for _, rowsPerBatch := range []int64{0, 5} {
				want := c.want
				if rowsPerBatch == 5 && len(want) == 2 {
					want = []int64{5}
				}
				recs, _, err := readAll(t, path, Options{RowsPerBatch: rowsPerBatch})
				if err != nil || fmt.Sprint(lengths(recs)) != fmt.Sprint(want) {
					t.Fatalf("batches of %v rows, want %v: %v", lengths(recs), want, err)
				}
				first := 0
				for _, rec := range recs {
					if md := rec.Schema().Metadata(); md.Len() > 0 {
						t.Errorf("the schema has the metadata %v, and that of the first stream has none", md)
					}
					if n := int(rec.NumRows()); !sameValues(rows(first, n), rec) {
						t.Errorf("rows from %d on differ:\n%v", first, rec)
					}
					first += int(rec.NumRows())
				}
				release(recs)
			}
		})
	}
}

// testSchemaWith returns a stream of rec with metadata of the schema.
func testSchemaWith(t *testing.T, m *arrow.Metadata, rec arrow.RecordBatch) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := ipc.NewWriter(&buf, ipc.WithSchema(arrow.NewSchema(testSchema.Fields(), m)))
	if err := w.Write(rec); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// TestBytesBehindAStream refuses what follows a stream and is no stream of the same schema. The
// rows before it are read, and the error gives the offset.
func TestBytesBehindAStream(t *testing.T) {
	s := someStreams(t)
	for name, c := range map[string]struct {
		behind []byte
		want   string
	}{
		"another schema":       {s.other, "another schema at byte %d: they differ: a schema with 4 fields and one with 1"},
		"text":                 {[]byte("a,b\n1,2\n"), "from byte %d on, are no other stream"},
		"one byte":             {[]byte{7}, "from byte %d on, are no other stream"},
		"zeros":                {make([]byte, 64), "from byte %d on, are no other stream"},
		"another mark":         {endMark, "from byte %d on, are no other stream"},
		"a file":               {encode(t, asFile(), 3), "from byte %d on, are no other stream"},
		"a batch":              {s.two[8+binary.LittleEndian.Uint32(s.two[4:]):], "from byte %d on, are no other stream"},
		"empty, then a schema": {slices.Concat(s.empty, s.other), "has a stream of another schema"},
	} {
		t.Run(name, func(t *testing.T) {
			path := write(t, "f", slices.Concat(s.one, c.behind))
			recs, _, err := readAll(t, path, Options{})
			want := c.want
			if strings.Contains(want, "%d") {
				want = fmt.Sprintf(want, len(s.one))
			}
			checkError(t, err, path, want)
			if fmt.Sprint(lengths(recs)) != "[2]" {
				t.Errorf("batches of %v rows, want one of 2", lengths(recs))
			}
			release(recs)
		})
	}
}

// TestSecondStreamCut cuts the second of two streams at each byte. Without an error all messages
// before the cut are whole, for a stream may end behind any of them.
func TestSecondStreamCut(t *testing.T) {
	s := someStreams(t)
	path := write(t, "f", nil)
	whole := messageEnds(t, s.two)
	for cut := 1; cut < len(s.two); cut++ {
		rewrite(t, path, slices.Concat(s.one, s.two[:cut]))
		recs, _, err := readAll(t, path, Options{})
		release(recs)
		if err == nil != slices.Contains(whole, cut) {
			t.Errorf("cut at byte %d of %d, messages end at %v: %d batches, %v", cut, len(s.two), whole, len(recs), err)
		}
		if err != nil {
			checkError(t, err, path, "at byte ")
		}
	}
}

// messageEnds returns where the messages of a stream end.
func messageEnds(t *testing.T, stream []byte) (ends []int) {
	t.Helper()
	r := bytes.NewReader(stream)
	messages := ipc.NewMessageReader(r)
	defer messages.Release()
	for {
		if _, err := messages.Message(); err != nil {
			return ends
		}
		ends = append(ends, len(stream)-r.Len())
	}
}

// TestSeveralFilesInOne refuses Arrow files that were put into one: the footer of the last names
// places in the first.
func TestSeveralFilesInOne(t *testing.T) {
	for name, content := range map[string][]byte{
		"alike":             slices.Concat(encode(t, asFile(), 5), encode(t, asFile(), 5)),
		"without batches":   slices.Concat(encode(t, asFile(), 5), encode(t, asFile())),
		"bytes before them": slices.Concat(encode(t, asStream(), 5), encode(t, asFile(), 5)),
		"bytes behind them": slices.Concat(encode(t, asFile(), 5), []byte("more")),
	} {
		path := write(t, "f", content)
		recs, _, err := readAll(t, path, Options{})
		checkError(t, err, path, "")
		if len(recs) > 1 {
			t.Errorf("%s: %d batches", name, len(recs))
		}
		if name == "alike" || name == "without batches" {
			checkError(t, err, path, "may be several files in one")
		}
		release(recs)
	}
}

// TestReplacedDictionary reads a stream in which a dictionary replaces another, and refuses a file
// in which one does, as Arrow demands: all of its batches would get the last one.
func TestReplacedDictionary(t *testing.T) {
	var recs []arrow.RecordBatch
	var encoded [][]byte
	for _, values := range []string{`["a","b"]`, `["c","d"]`} {
		index := columnOf(t, coded.IndexType, "[0,1]").Column(0)
		rec := recordOf(array.NewDictionaryArray(coded, index, columnOf(t, coded.ValueType, values).Column(0)))
		recs, encoded = append(recs, rec), append(encoded, encodeRecords(t, false, []arrow.RecordBatch{rec}))
	}
	behindSchema := messageEnds(t, encoded[1])[0]
	path := write(t, "f", slices.Concat(withoutEnd(encoded[0]), encoded[1][behindSchema:]))
	got, _, err := readAll(t, path, Options{})
	if err != nil || len(got) != 2 || !sameValues(got[0], recs[0]) || !sameValues(got[1], recs[1]) {
		t.Errorf("%d batches, %v", len(got), err)
	}
	release(got)

	// In a file of two dictionaries, make the second one the first again.
	two := array.NewRecordBatch(arrow.NewSchema([]arrow.Field{{Name: "a", Type: coded}, {Name: "b", Type: coded}}, nil),
		[]arrow.Array{recs[0].Column(0), recs[1].Column(0)}, 2)
	file, found := encodeRecords(t, true, []arrow.RecordBatch{two}), 0
	for at := 0; at+8 <= len(file); at += 4 {
		id := file[at : at+8]
		if binary.LittleEndian.Uint64(id) != 1 {
			continue
		}
		id[0] = 0
		rewrite(t, path, file)
		id[0] = 1
		got, _, err := readAll(t, path, Options{})
		release(got)
		if err != nil && strings.Contains(err.Error(), "dictionary 0 is replaced by another one, which is not supported") {
			found++
		}
	}
	if found != 1 {
		t.Errorf("%d numbers of the file make the second dictionary replace the first", found)
	}
}

// TestPlacesOfMessages reads files whose messages are where the writers of other languages put them, and
// refuses files whose footer names other places.
func TestPlacesOfMessages(t *testing.T) {
	index := columnOf(t, coded.IndexType, "[0,1,0]").Column(0)
	rec := recordOf(array.NewDictionaryArray(coded, index, columnOf(t, coded.ValueType, `["a","b"]`).Column(0)))
	file := encodeRecords(t, true, []arrow.RecordBatch{rec})
	places, footer, tail := placesIn(file)
	ends := messageEnds(t, file[8:footer])
	schema, dictionary, batch := file[8:8+ends[0]], file[*places[0]:*places[1]], file[*places[1]:8+ends[2]]
	gap := make([]byte, 64)

	start, middle, end := int64(8+ends[0]), int64(8+ends[1]), int64(8+ends[2]) // of the messages in file
	whole := [][]byte{schema, dictionary, batch, endMark}
	for name, c := range map[string]struct {
		parts     [][]byte // before the footer
		at        [2]int64 // of the dictionary and the batch
		wantError bool
	}{
		"as written":     {whole, [2]int64{start, middle}, false},
		"without a mark": {whole[:3], [2]int64{start, middle}, false},
		"without the schema, as in JavaScript": {
			whole[1:], [2]int64{8, int64(8 + len(dictionary))}, false},
		"behind 64 bytes, as in Rust": {
			slices.Concat([][]byte{gap[8:]}, whole), [2]int64{start + 56, middle + 56}, false},
		"the dictionary last": {
			[][]byte{schema, batch, dictionary, endMark}, [2]int64{start + int64(len(batch)), start}, false},
		"with gaps": {
			[][]byte{schema, gap, dictionary, gap, batch, endMark}, [2]int64{start + 64, middle + 128}, false},
		"batch at the mark":          {whole, [2]int64{start, end}, true},
		"batch at the schema":        {whole, [2]int64{start, 8}, true},
		"batch behind the messages":  {whole, [2]int64{start, 1 << 40}, true},
		"dictionary before the file": {whole, [2]int64{-8, middle}, true},
	} {
		*places[0], *places[1] = c.at[0], c.at[1]
		path := write(t, "f", slices.Concat(file[:8], slices.Concat(c.parts...), tail))
		recs, _, err := readAll(t, path, Options{})
		if c.wantError {
			checkError(t, err, path, "")
		} else if err != nil || len(recs) != 1 || !sameValues(recs[0], rec) {
			t.Errorf("%s: %d batches, %v", name, len(recs), err)
		}
		release(recs)
	}

	// Files without batches.
	empty := encode(t, asFile())
	_, footer, _ = placesIn(empty)
	for name, start := range map[string][]byte{
		"as written":    empty[:footer],
		"in JavaScript": slices.Concat(empty[:8], endMark),
		"in Rust":       slices.Concat(empty[:8], gap[8:], empty[8:footer-8], gap, endMark),
	} {
		recs, _, err := readAll(t, write(t, "f", slices.Concat(start, empty[footer:])), Options{})
		if err != nil || len(recs) > 0 {
			t.Errorf("no batches, %s: %d batches, %v", name, len(recs), err)
		}
	}
}

// placesIn returns the offsets in a file's footer, which the caller may change, the offset of the footer,
// and the bytes from there to the end of the file.
func placesIn(file []byte) (places []*int64, footer int, tail []byte) {
	n := len(file) - 4 - len(ipc.Magic)
	footer = n - int(le.Uint32(file[n:]))
	left := len(file)
	root := table{flatbuffers.Table{Bytes: file[footer:]}, &left}.follow(0)
	for _, slot := range []flatbuffers.VOffsetT{8, 10} {
		for block := range slices.Chunk(root.numbers(slot, 3), 3) {
			places = append(places, &block[0])
		}
	}
	return places, footer, file[footer:]
}
