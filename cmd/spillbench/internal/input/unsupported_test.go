package input

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/apache/arrow-go/v18/parquet"
	"github.com/apache/arrow-go/v18/parquet/compress"
	"github.com/apache/arrow-go/v18/parquet/file"
	"github.com/apache/arrow-go/v18/parquet/pqarrow"
	"github.com/apache/arrow-go/v18/parquet/schema"
)

// parquetOf is a Parquet file of one text column.
func parquetOf(t *testing.T, value string, rows int, opts ...parquet.WriterProperty) []byte {
	t.Helper()
	sc := arrow.NewSchema([]arrow.Field{{Name: "text", Type: arrow.BinaryTypes.String}}, nil)
	b := array.NewRecordBuilder(memory.DefaultAllocator, sc)
	defer b.Release()
	for range rows {
		b.Field(0).(*array.StringBuilder).Append(value)
	}
	rec := b.NewRecordBatch()
	defer rec.Release()
	var buf bytes.Buffer
	w, err := pqarrow.NewFileWriter(sc, &buf, parquet.NewWriterProperties(opts...), pqarrow.DefaultWriterProps())
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(w.Write(rec), w.Close()); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// withCodec changes what a file of parquetOf, compressed with Snappy, says that it is
// compressed with: behind the column's path its metadata has the codec, as a Thrift compact
// integer.
func withCodec(t *testing.T, content []byte, c compress.Compression) []byte {
	t.Helper()
	path := []byte("\x18\x04text\x15")
	if n := bytes.Count(content, append(bytes.Clone(path), byte(2*compress.Codecs.Snappy))); n != 1 {
		t.Fatalf("the codec is %d times in the file", n)
	}
	out := bytes.Clone(content)
	out[bytes.LastIndex(out, path)+len(path)] = byte(2 * c)
	return out
}

// int96s is a Parquet file of one column of INT96 timestamps, in the year 4713 before Christ
// or in 1970.
func int96s(t *testing.T, old bool) []byte {
	t.Helper()
	node, err := schema.NewPrimitiveNode("at", parquet.Repetitions.Required, parquet.Types.Int96, -1, -1)
	if err != nil {
		t.Fatal(err)
	}
	root, err := schema.NewGroupNode("schema", parquet.Repetitions.Required, schema.FieldList{node}, -1)
	if err != nil {
		t.Fatal(err)
	}
	var buf bytes.Buffer
	w := file.NewParquetWriter(&buf, root)
	group, err := w.AppendRowGroupChecked()
	if err != nil {
		t.Fatal(err)
	}
	col, err := group.NextColumn()
	if err != nil {
		t.Fatal(err)
	}
	values := make([]parquet.Int96, 10)
	const julianDayOf1970 = 2440588
	if !old {
		for i := range values {
			values[i][8], values[i][9], values[i][10] = julianDayOf1970&0xff, julianDayOf1970>>8&0xff, julianDayOf1970>>16
		}
	}
	_, err = col.(*file.Int96ColumnChunkWriter).WriteBatch(values, nil, nil)
	if err := errors.Join(err, col.Close(), group.Close(), w.Close()); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// TestUnsupported: what is not read though nothing is wrong with it is named, and nobody is
// told that it is truncated or broken.
func TestUnsupported(t *testing.T) {
	key := "a key of 16 bytes"[:16]
	encrypted := func(opts ...parquet.EncryptOption) []byte {
		return parquetOf(t, "a", 10, parquet.WithEncryptionProperties(parquet.NewFileEncryptionProperties(key, opts...)))
	}
	withKey := parquet.NewColumnEncryptionProperties("text", parquet.WithKey(key))
	columns := parquet.WithEncryptedColumns(parquet.ColumnPathToEncryptionPropsMap{"text": withKey})
	plain := parquet.WithPlaintextFooter()
	encryption := []string{"is an encrypted Parquet file, which is not read", "decrypt it first"}
	snappy := parquetOf(t, "a", 10, parquet.WithCompression(compress.Codecs.Snappy))
	noDictionary, noStats := parquet.WithDictionaryDefault(false), parquet.WithStats(false)
	longStats := parquet.WithMaxStatsSize(1 << 30)
	for name, c := range map[string]struct {
		content []byte
		want    []string // none: it is read
	}{
		"encrypted":                  {encrypted(), encryption},
		"encrypted, footer in plain": {encrypted(plain), encryption},
		"encrypted column":           {encrypted(plain, columns), encryption},
		"LZ4 of Hadoop": {
			withCodec(t, snappy, compress.Codecs.Lz4),
			[]string{`the column "text" compressed with LZ4, which is not read`, "LZ4_RAW"},
		},
		"LZO": {
			withCodec(t, snappy, compress.Codecs.Lzo),
			[]string{"compressed with LZO, which is not read", "ZSTD"},
		},
		"Snappy":            {snappy, nil},
		"LZ4":               {parquetOf(t, "a", 10, parquet.WithCompression(compress.Codecs.Lz4Raw)), nil},
		"INT96":             {int96s(t, false), nil},
		"INT96 of long ago": {int96s(t, true), []string{"INT96", "1677 to 2262", "TIMESTAMP"}},
		"a page of 65 MiB":  {parquetOf(t, strings.Repeat("a", 65<<20), 1, noDictionary, noStats), nil},
		"a page header of many bytes": {
			parquetOf(t, strings.Repeat("a", 5<<20), 2, noDictionary, longStats),
			[]string{"statistics in page headers", "4 MiB"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := write(t, "f", c.content)
			recs, _, err := readAll(t, path, Options{})
			release(recs)
			if c.want == nil {
				if err != nil || len(recs) != 1 {
					t.Errorf("%d batches, %v", len(recs), err)
				}
				return
			}
			for _, want := range c.want {
				checkError(t, err, path, want)
			}
			if err != nil && strings.Contains(err.Error(), "truncated") {
				t.Errorf("%v: it is not", err)
			}
		})
	}
}

// TestPanicsAreNotTheFilesFault: of a decoder that panics nobody knows whose fault it is.
func TestPanicsAreNotTheFilesFault(t *testing.T) {
	path := write(t, "f", parquetOf(t, "a", 1000))
	for _, with := range []any{"boom", errors.New("boom")} {
		_, _, err := readAll(t, path, Options{Room: func(int64) error { panic(with) }})
		checkError(t, err, path, "the decoder panicked: boom (the file holds what the decoder does not support, or is broken")
	}
}

// TestTextThatIsNoTable: prose, keys, programs and documents are not read as CSV. Tables of one
// column are, and tables with names that begin as documents do.
func TestTextThatIsNoTable(t *testing.T) {
	for text, table := range map[string]bool{
		"# Spillway\n\nSpillway is an engine.\n":                           false,
		"Spillway is an engine.\n":                                         false,
		"-----BEGIN PRIVATE KEY-----\nMIIEvQ\n-----END PRIVATE KEY-----\n": false,
		"                    Apache License\n":                             false,
		"module example.com/m\n\ngo 1.26\n":                                false,
		"#!/bin/sh\nexit 0\n":                                              false,
		"{\"a\": 1, \"b\": 2}\n":                                           false,
		"<html><body>a,b</body></html>\n":                                  false,
		"http://example.com/a\n":                                           false,
		"name\nAda\nGrace\n":                                               true,
		"\"first name\"\r\nAda\r\n":                                        true,
		"_id\n1\n":                                                         true,
		"1\n2\n":                                                           true,
		"größe\n1\n":                                                       true,
		byteOrderMark + "name\nAda\n":                                      true,
		"first name,last name\nAda,Lovelace\n":                             true,
		"-a;-b\n1;2\n":                                                     true,
		"\n\nname\nAda\n":                                                  true,
		"\n\n# Spillway is an engine.\n":                                   false,
		"# Spillway\r\rSpillway, an engine.\r":                             false,
		"name\rAda\r":                                                      true,
		"<5ms,5-10ms,>10ms\n1,2,3\n":                                       true,
		"<low,high\n1,2\n":                                                 true,
		"{id},{name}\n1,2\n":                                               true,
		"{\n  \"a\": 1, \"b\": 2\n}\n":                                     false,
		"{}\n":                                                             false,
		"<svg\n width=\"1\">\n":                                            false,
		"<!-- a, b -->\n":                                                  false,
		"<?xml version=\"1.0\", a?>\n":                                     false,
	} {
		path := write(t, "f", []byte(text))
		s, err := Open(context.Background(), path, Options{})
		if table {
			if err != nil {
				t.Errorf("%q: %v", text, err)
				continue
			}
			if rec, err := s.Next(context.Background()); err != nil && err != io.EOF {
				t.Errorf("%q: %v", text, err)
			} else if err == nil {
				rec.Release()
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			continue
		}
		checkError(t, err, path, "is text, and no CSV table")
		if err := Check(path, true); err == nil {
			t.Errorf("%q passes the first look", text)
		}
	}
}
