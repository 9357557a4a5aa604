package input

import (
	"encoding/binary"
	"strings"
	"testing"
)

// TestNamesThatAreMagic: a CSV file whose first column has the name of another format's magic
// number is CSV, whatever its line ends and however short it is.
func TestNamesThatAreMagic(t *testing.T) {
	for _, first := range []string{
		"PARENT", "PAR1", "PARE", "ORC", "ORCID", "ARROW1", "ARROW10", "FEA1", "FEATURE", "BZh", "BZh9", "BZh91",
		"Obj", "Object", "PK", "7zXZ", "PAR1é",
	} {
		for _, text := range []string{
			first + ",x\n1,2\n", first + "\n1\n", first + "\t" + first + "\r\n1\t2\r\n", first + ",x\r1,2\r",
			first + ",x\n1," + strings.Repeat("2", 3*sniffSize) + "\n",
			first + ",x\n1," + first, // the magic number is at both ends
		} {
			path := write(t, "f", []byte(text))
			recs, s, err := readAll(t, path, Options{})
			if err != nil {
				t.Errorf("%.40q: %v", text, err)
				continue
			}
			name := s.schema.Field(0).Name
			if s.format != CSV || name != first || len(recs) != 1 || recs[0].NumRows() != 1 {
				t.Errorf("%.40q is %s with %d batches and the column %q", text, s.format, len(recs), name)
			}
			release(recs)
			if err := Check(path, false); err != nil {
				t.Errorf("%.40q: %v", text, err)
			}
		}
	}
}

// TestTruncatedFiles: a file of a binary format that ends too early is of that format, and broken.
// This holds from the end of its magic number on.
func TestTruncatedFiles(t *testing.T) {
	for _, c := range []struct {
		format  string
		content []byte
		magic   int
	}{
		{"Parquet", encode(t, asParquet, 40, 60), 4},
		{"Arrow file", encode(t, asFile(), 40, 60), 6},
		{"Arrow stream", encode(t, asStream(), 40, 60), 4},
	} {
		cuts := []int{c.magic, c.magic + 1, c.magic + 2, c.magic + 5, c.magic + 8, 100, len(c.content) / 2}
		if c.format != "Arrow stream" { // which may end behind each message
			cuts = append(cuts, len(c.content)-10, len(c.content)-1)
		}
		for _, cut := range cuts {
			path := write(t, "f", c.content[:cut])
			recs, _, err := readAll(t, path, Options{})
			release(recs)
			checkError(t, err, path, "cannot be read as "+c.format)
			checkError(t, err, path, "truncated")
		}
	}
}

// TestOtherFormats: the error of a file in a format that is not read names the format, if the file
// has the structure of it and not only the magic number.
func TestOtherFormats(t *testing.T) {
	for name, c := range map[string]struct {
		content string
		want    string
	}{
		"encrypted Parquet": {"PARE\x2c\x00\x00\x00rest", "encrypted Parquet"},
		"ORC":               {"ORC\x1a\x00\x00\x0a\x06...\x08\x03\x10ORC\x18", "an ORC file"},
		"empty ORC":         {"ORC\x08\x03\x10\x03\x1a\x00...\x03ORC\x18", "an ORC file"},
		"Feather":           {"FEA1\x00\x00\x00\x00...FEA1", "Feather V1"},
		"bzip2":             {"BZh91AY&SYabcd\x00\x01efgh", "bzip2"},
		"empty bzip2":       {"BZh9\x17rE8P\x90\x00\x00\x00\x00", "bzip2"},
		"Avro":              {"Obj\x01\x04\x16avro.schema", "Avro"},
		"gzip":              {"\x1f\x8b\x08\x00....", "gzip"},
		"zstd":              {"\x28\xb5\x2f\xfd\x04\x00...", "zstd"},
		"xz":                {"\xfd7zXZ\x00\x00\x04", "xz"},
		"UTF-16":            {"\xff\xfe\x2c\x67\x87\x65\x2c\x67\x87\x65", "UTF-16 text"}, // no byte is a control character
		"no stream":         {"\xff\xff\xff\xff\xff\xff\xff\xff\x10\x00\x00\x00", "is not Parquet, Arrow or CSV"},
		"no stream, zeros":  {"\xff\xff\xff\xff\x00\x00\x00\x00\x00\x00\x00\x00", "is not Parquet, Arrow or CSV"},
		"no gzip":           {"\x1f\x8b\x00\x00....", "is not Parquet, Arrow or CSV"},
		"a name with NUL":   {"PARENT,identifier\n1,\x00\n", "is not Parquet, Arrow or CSV"},
		"NUL far behind":    {"PAR1,x\n1," + strings.Repeat("2", 100) + "\x00", "is not Parquet, Arrow or CSV"},
	} {
		t.Run(name, func(t *testing.T) {
			path := write(t, "f", []byte(c.content))
			_, err := Open(t.Context(), path, Options{})
			checkError(t, err, path, c.want)
		})
	}
}

// TestOldStreams: a stream from before format 0.15 is read. It has no marker before the length of a
// message, which is a multiple of 8 less the 4 bytes of the length itself.
func TestOldStreams(t *testing.T) {
	whole := encode(t, asStream()) // a schema and the end
	meta := whole[8 : 8+binary.LittleEndian.Uint32(whole[4:])]
	old := binary.LittleEndian.AppendUint32(nil, uint32(len(meta)+4))
	old = append(old, meta...)
	old = append(old, 0, 0, 0, 0) // padding
	old = append(old, 0, 0, 0, 0) // the end
	recs, s, err := readAll(t, write(t, "f", old), Options{})
	if err != nil || s.format != ArrowStream || len(recs) != 0 || !s.schema.Equal(testSchema) {
		t.Errorf("%d batches of %v, %v", len(recs), s, err)
	}
}
