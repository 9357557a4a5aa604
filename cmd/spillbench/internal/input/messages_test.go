package input

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/testseed"
)

// encodeRecords writes records of one schema as a stream or a file.
func encodeRecords(t testing.TB, file bool, recs []arrow.RecordBatch, opts ...ipc.Option) []byte {
	t.Helper()
	var buf bytes.Buffer
	opts = append(opts, ipc.WithSchema(recs[0].Schema()))
	var w recordWriter
	var err error
	if file {
		w, err = ipc.NewFileWriter(&buf, opts...)
	} else {
		w = ipc.NewWriter(&buf, opts...)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range recs {
		if err := w.Write(r); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// columnOf returns a record of one column, built from JSON.
func columnOf(t testing.TB, dt arrow.DataType, json string) arrow.RecordBatch {
	t.Helper()
	a, _, err := array.FromJSON(memory.DefaultAllocator, dt, strings.NewReader(json))
	if err != nil {
		t.Fatal(err)
	}
	return recordOf(a)
}

func recordOf(a arrow.Array) arrow.RecordBatch {
	schema := arrow.NewSchema([]arrow.Field{{Name: "c", Type: a.DataType(), Nullable: true}}, nil)
	return array.NewRecordBatch(schema, []arrow.Array{a}, int64(a.Len()))
}

// measured reads a file to its end, and returns the largest allocation of the decoder and what was
// allocated in all.
func measured(t testing.TB, path string) (recs []arrow.RecordBatch, largest int64, all uint64, err error) {
	t.Helper()
	opt := Options{Room: func(n int64) error {
		largest = max(largest, n)
		return nil
	}}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	recs, _, err = readAll(t, path, opt)
	runtime.ReadMemStats(&after)
	return recs, largest, after.TotalAlloc - before.TotalAlloc, err
}

// readersAlloc is more than the readers of a small file allocate for themselves: buffers, and the
// history of a decoder.
const readersAlloc = 16 << 20

// TestLengthsAllocateNothing changes numbers in small streams and files to large ones. Whatever it
// is, reading allocates no more than the bytes that there are account for.
func TestLengthsAllocateNothing(t *testing.T) {
	g := arrowgen.New(5)
	g.Plain = true
	schema := arrowgen.Schema(
		arrow.PrimitiveTypes.Int64, arrow.FixedWidthTypes.Boolean, arrow.BinaryTypes.String, arrow.BinaryTypes.StringView,
		arrow.ListOf(arrow.FixedWidthTypes.Boolean), arrow.StructOf(arrow.Field{Name: "a", Type: arrow.Null}),
		coded, arrow.RunEndEncodedOf(arrow.PrimitiveTypes.Int32, arrow.BinaryTypes.String),
	)
	recs := []arrow.RecordBatch{g.Record(schema, 20)}
	var contents [][]byte
	for _, file := range []bool{false, true} {
		contents = append(contents, encodeRecords(t, file, recs),
			encodeRecords(t, file, recs, ipc.WithZstd()), encodeRecords(t, file, recs, ipc.WithLZ4()))
	}
	path := write(t, "f", nil)
	for seed := range testseed.Each(t, 1) {
		rng := rand.New(rand.NewPCG(seed, 1))
		for range testseed.Rounds(1000, 200) {
			bad := bytes.Clone(contents[rng.IntN(len(contents))])
			at := rng.IntN(len(bad)/4-1) * 4
			n := []uint64{1<<31 - 1, 1 << 33, 1<<62 + 8, 1<<64 - 2}[rng.IntN(4)]
			binary.LittleEndian.PutUint64(bad[at:], n)
			rewrite(t, path, bad)
			recs, largest, all, err := measured(t, path)
			release(recs)
			if largest > int64(len(bad))*maxExpansion+bufferSize || all > readersAlloc {
				t.Fatalf("%d at byte %d of %d: %d bytes were allocated, %d at once (%v)", n, at, len(bad), all, largest, err)
			}
		}
	}
}

// TestDeclaredLengths declares 1 TiB for the metadata, the body and a buffer of a batch, in a stream and
// in a file. Each is refused for what it is, with the offset of the message.
func TestDeclaredLengths(t *testing.T) {
	rec := columnOf(t, arrow.PrimitiveTypes.Int32, "["+strings.Repeat("7,", 998)+"7]")
	stream := encodeRecords(t, false, []arrow.RecordBatch{rec})
	const values, body = 4 * 999, 4 * 1000 // in bytes; a body is padded
	for _, file := range []bool{false, true} {
		content := encodeRecords(t, file, []arrow.RecordBatch{rec})
		batch := messageEnds(t, stream)[0]
		if file {
			batch += 8 // the magic
		}
		for what, c := range map[string]struct {
			at   int
			want string
		}{
			"metadata": {batch + 4, "it declares 2147483647 bytes of metadata, and "},
			"body":     {batch + indexOf(t, content[batch:], body), "it declares a body of 1099511627776 bytes, and "},
			"buffer": {batch + indexOf(t, content[batch:], values),
				"it has a buffer of 1099511627776 bytes at byte 0 of a body of 4000"},
		} {
			bad := bytes.Clone(content)
			if what == "metadata" {
				binary.LittleEndian.PutUint32(bad[c.at:], 1<<31-1)
			} else {
				binary.LittleEndian.PutUint64(bad[c.at:], 1<<40)
			}
			path := write(t, "f", bad)
			_, _, all, err := measured(t, path)
			checkError(t, err, path, fmt.Sprintf("the message at byte %d: %s", batch, c.want))
			if all > readersAlloc {
				t.Errorf("%s, file %v: %d bytes were allocated", what, file, all)
			}
		}
	}
}

// indexOf returns where a number is in bytes.
func indexOf(t *testing.T, in []byte, n uint64) int {
	t.Helper()
	at := bytes.Index(in, binary.LittleEndian.AppendUint64(nil, n))
	if at < 0 {
		t.Fatalf("%d is not there", n)
	}
	return at
}

// TestCompressedBufferOfAnyLength declares 4 GiB for each compressed buffer of a small stream and
// of a file, in which a few bytes are.
func TestCompressedBufferOfAnyLength(t *testing.T) {
	for _, file := range []bool{false, true} {
		for name, codec := range map[string]ipc.Option{"zstd": ipc.WithZstd(), "lz4": ipc.WithLZ4()} {
			rec := columnOf(t, arrow.PrimitiveTypes.Int64, "["+strings.Repeat("7,", 1000)+"7]")
			content := encodeRecords(t, file, []arrow.RecordBatch{rec}, codec)
			length := binary.LittleEndian.AppendUint64(nil, 8*1001)
			at := bytes.LastIndex(content, length)
			if at < 0 {
				t.Fatal("the length is not there")
			}
			binary.LittleEndian.PutUint64(content[at:], 1<<32)
			path := write(t, "f", content)
			_, largest, all, err := measured(t, path)
			checkError(t, err, path, "not the 4294967296 bytes that it declares")
			if all > readersAlloc {
				t.Errorf("%s, file %v: %d bytes were allocated, %d at once", name, file, all, largest)
			}
		}
	}
}

// TestZstdWindowOfAnyLength declares a window of 512 MiB, which decoders allocate, for a small buffer.
func TestZstdWindowOfAnyLength(t *testing.T) {
	b := array.NewInt64Builder(memory.DefaultAllocator)
	defer b.Release()
	for i := range int64(200_000) {
		b.Append(i * i)
	}
	content := encodeRecords(t, false, []arrow.RecordBatch{recordOf(b.NewArray())}, ipc.WithZstd())
	frame := content[bytes.Index(content, []byte("\x28\xb5\x2f\xfd")):]
	const singleSegment = 1 << 5
	if frame[4]&singleSegment != 0 {
		t.Fatal("the frame has no window of its own")
	}
	frame[5] = (29 - 10) << 3 // the exponent
	path := write(t, "f", content)
	_, _, all, err := measured(t, path)
	checkError(t, err, path, "window size exceeded (the file holds what the decoder does not support")
	if all > readersAlloc {
		t.Errorf("%d bytes were allocated", all)
	}
}

// TestHighlyCompressed reads a column whose bytes are thousands of times as many as in the file.
func TestHighlyCompressed(t *testing.T) {
	b := array.NewInt64Builder(memory.DefaultAllocator)
	defer b.Release()
	b.AppendValues(make([]int64, 4<<20), nil)
	rec := recordOf(b.NewArray())
	for name, codec := range map[string]ipc.Option{"zstd": ipc.WithZstd(), "lz4": ipc.WithLZ4()} {
		content := encodeRecords(t, false, []arrow.RecordBatch{rec, rec}, codec)
		if len(content) > 1<<20 {
			t.Fatalf("%s: %d bytes", name, len(content))
		}
		recs, _, err := readAll(t, write(t, "f", content), Options{})
		if err != nil || len(recs) != 2 || !array.RecordEqual(recs[0], rec) || !array.RecordEqual(recs[1], rec) {
			t.Errorf("%s: %d batches, %v", name, len(recs), err)
		}
		release(recs)
	}
}

// TestRowsThatBuffersDoNotHold declares more rows than there are bytes for, in batches and in a
// dictionary that is joined with another one.
func TestRowsThatBuffersDoNotHold(t *testing.T) {
	const rows = 23
	list := func(value string) string { return "[" + strings.Repeat(value+",", rows-1) + value + "]" }
	contents := map[string][]byte{}
	for dt, json := range map[arrow.DataType]string{
		arrow.FixedWidthTypes.Boolean:                 list("true"),
		arrow.PrimitiveTypes.Int16:                    list("1"),
		&arrow.FixedSizeBinaryType{ByteWidth: 5}:      list(`"YWJjZGU="`),
		arrow.BinaryTypes.String:                      list(`"a"`),
		arrow.BinaryTypes.StringView:                  list(`"a"`),
		arrow.ListOf(arrow.FixedWidthTypes.Boolean):   list("[true]"),
		arrow.StructOf(arrow.Field{Type: arrow.Null}): "[" + strings.Repeat("null,", rows-1) + "{}]",
	} {
		contents[dt.String()] = encodeRecords(t, false, []arrow.RecordBatch{columnOf(t, dt, json)})
	}
	flags := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int8, ValueType: arrow.FixedWidthTypes.Boolean}
	some := columnOf(t, flags.ValueType, list("true")).Column(0)
	more, err := array.Concatenate([]arrow.Array{some, some}, memory.DefaultAllocator)
	if err != nil {
		t.Fatal(err)
	}
	index := columnOf(t, flags.IndexType, "[0,22]").Column(0)
	delta := encodeRecords(t, false, []arrow.RecordBatch{
		recordOf(array.NewDictionaryArray(flags, index, some)), recordOf(array.NewDictionaryArray(flags, index, more)),
	}, ipc.WithDictionaryDeltas(true))
	ends := messageEnds(t, delta) // schema, dictionary, batch, delta, batch
	if len(ends) != 5 {
		t.Fatalf("%d messages", len(ends))
	}
	// Without the first batch nothing looks at the dictionary before arrow-go joins it with the delta.
	contents["delta of a dictionary"] = slices.Concat(delta[:ends[1]], delta[ends[2]:])
	for name, content := range contents {
		for _, n := range []uint64{rows * 1000, 1 << 36, 1 << 62} {
			old, large := binary.LittleEndian.AppendUint64(nil, rows), binary.LittleEndian.AppendUint64(nil, n)
			bad := bytes.ReplaceAll(content, old, large)
			if bytes.Equal(bad, content) {
				t.Fatalf("%s: the number of rows is not in it", name)
			}
			path := write(t, "f", bad)
			recs, largest, all, err := measured(t, path)
			if err == nil || all > readersAlloc {
				t.Errorf("%s of %d rows: %d batches, %d bytes were allocated, %d at once, %v",
					name, n, len(recs), all, largest, err)
			}
			release(recs)
		}
	}
}

// TestSchemaOfFewerColumns puts the schema of one column before batches of two. A batch has more
// nodes than the schema, and no column may be lost.
func TestSchemaOfFewerColumns(t *testing.T) {
	one := columnOf(t, arrow.PrimitiveTypes.Int16, "[1,2,3]")
	fields := []arrow.Field{one.Schema().Field(0), {Name: "d", Type: arrow.PrimitiveTypes.Int16}}
	two := array.NewRecordBatch(arrow.NewSchema(fields, nil), []arrow.Array{one.Column(0), one.Column(0)}, 3)
	few, many := encodeRecords(t, false, []arrow.RecordBatch{one}), encodeRecords(t, false, []arrow.RecordBatch{two})
	path := write(t, "f", slices.Concat(few[:messageEnds(t, few)[0]], many[messageEnds(t, many)[0]:]))
	recs, _, err := readAll(t, path, Options{})
	checkError(t, err, path, "it has 2 nodes and 4 buffers where its type has 1 and 2")
	release(recs)
}

// TestDictionaryOfDictionaries reads what arrow-go writes of such a type: it loses one of the two.
// The stream and the file are refused for the same reason.
func TestDictionaryOfDictionaries(t *testing.T) {
	outer := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int8, ValueType: coded}
	index := columnOf(t, arrow.PrimitiveTypes.Int8, "[0,1,2]").Column(0)
	inner := array.NewDictionaryArray(coded, index, columnOf(t, coded.ValueType, `["a","b","c"]`).Column(0))
	rec := recordOf(array.NewDictionaryArray(outer, index, inner))
	for _, file := range []bool{false, true} {
		path := write(t, "f", encodeRecords(t, file, []arrow.RecordBatch{rec}))
		_, _, err := readAll(t, path, Options{})
		checkError(t, err, path, "dictionary 0 has 1 nodes and 2 buffers where its type has 1 and 3: "+
			"dictionaries of dictionaries, unions or run-end encoded values are not supported (the file holds what")
		if err != nil && strings.Contains(err.Error(), "truncated") {
			t.Errorf("file %v: %v: it is not", file, err)
		}
	}
}
