package input

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode"
	"unicode/utf8"
)

// sniffSize is how much of a file decides whether it is text. A header line is
// shorter than that, and so is what makes a binary file known as one.
const sniffSize = 4096

// signature is how a format begins.
type signature struct {
	magic  string
	format Format
	what   string // for a format that is not read: what it is,
	fix    string // and what to do
}

// The magic numbers, in order of trial. Sources: parquet.thrift and Arrow's Columnar.rst ("PAR1",
// "PARE", "ARROW1", the continuation marker 0xFFFFFFFF), the Feather V1 sources ("FEA1"), RFC 1952
// (gzip), RFC 8878 (zstd), the bzip2, xz, ORC and Avro specifications and PKWARE's APPNOTE (zip,
// which spreadsheets are too).
var signatures = []signature{
	{magic: "PAR1", format: Parquet},
	{magic: "ARROW1", format: ArrowFile},
	{magic: "\xff\xff\xff\xff", format: ArrowStream},
	{magic: "PARE", what: "an encrypted Parquet file", fix: "decrypt it first"},
	{magic: "FEA1", what: "a Feather V1 file", fix: "write it again as Feather V2, which is an Arrow file"},
	{magic: "\x1f\x8b", what: "compressed with gzip", fix: "unpack it with gunzip first"},
	{magic: "\x28\xb5\x2f\xfd", what: "compressed with zstd", fix: "unpack it with unzstd first"},
	{magic: "BZh", what: "compressed with bzip2", fix: "unpack it with bunzip2 first"},
	{magic: "\xfd7zXZ", what: "compressed with xz", fix: "unpack it with unxz first"},
	{magic: "PK\x03\x04", what: "a zip archive or spreadsheet", fix: "unpack it, or save it as CSV, first"},
	{magic: "ORC", what: "an ORC file", fix: "convert it to Parquet first"},
	{magic: "Obj\x01", what: "an Avro file", fix: "convert it to Parquet first"},
	{magic: "\xff\xfe", what: "UTF-16 text", fix: "convert it to UTF-8 first"},
	{magic: "\xfe\xff", what: "UTF-16 text", fix: "convert it to UTF-8 first"},
}

// detect says what an open file of so many bytes holds.
func detect(f *os.File, size int64) (Format, error) {
	head := make([]byte, min(size, sniffSize))
	if _, err := f.ReadAt(head, 0); err != nil && err != io.EOF {
		return "", err
	}
	for _, s := range signatures {
		if !bytes.HasPrefix(head, []byte(s.magic)) {
			continue
		}
		if s.format == "" {
			return "", &Error{Err: errors.New("is " + s.what + ", which is not read"), Fix: s.fix}
		}
		return s.format, nil
	}
	if legacyStream(head) {
		return ArrowStream, nil
	}
	if !text(head) {
		return "", &Error{Err: errors.New("is not Parquet, Arrow or CSV"), Fix: "convert it to one of these first"}
	}
	if err := table(head); err != nil {
		return "", err
	}
	return CSV, nil
}

// table says what is wrong with text that cannot be CSV. Most text can, of one column. So
// a first line without a separator must look like the name of one: a word.
func table(head []byte) error {
	head = bytes.TrimPrefix(head, []byte(byteOrderMark))
	line, _, _ := bytes.Cut(head, []byte("\n"))
	line = bytes.TrimRight(line, "\r")
	quoted := len(line) > 0 && line[0] == '"'
	first, _ := utf8.DecodeRune(line)
	separated := bytes.ContainsAny(line, separators)
	switch {
	case first == '{' || first == '<': // JSON, XML, HTML
	case separated, quoted, len(line) == 0:
		return nil
	case first == '_' || first == utf8.RuneError || unicode.IsLetter(first) || unicode.IsDigit(first):
		if !bytes.ContainsAny(line, " /") {
			return nil
		}
	}
	const most = 40
	if len(line) > most {
		line = append(line[:most:most], "…"...)
	}
	return &Error{
		Err: fmt.Errorf("is text, and no CSV table: its first line, %q, does not name columns", strings.ToValidUTF8(string(line), "?")),
		Fix: "name a Parquet, Arrow or CSV file; put the name of a single column in quotes if it is more than a word",
	}
}

// legacyStream recognizes the start of an Arrow stream from before format 0.15. It has no
// continuation marker, only the length of the schema message, a multiple of 8 less the 4 bytes of
// the length itself. Then comes the offset of a flatbuffer's root table, which is small.
func legacyStream(head []byte) bool {
	if len(head) < 8 {
		return false
	}
	n := uint32(head[0]) | uint32(head[1])<<8 | uint32(head[2])<<16 | uint32(head[3])<<24
	root := uint32(head[4]) | uint32(head[5])<<8 | uint32(head[6])<<16 | uint32(head[7])<<24
	return n >= 32 && n < 1<<24 && (n+4)%8 == 0 && root >= 4 && root < 64 && root%2 == 0
}

// text reports whether head could be the start of a text file. Text of one byte a
// character in another encoding than UTF-8 passes; control characters do not.
func text(head []byte) bool {
	head = bytes.TrimPrefix(head, []byte(byteOrderMark))
	for _, c := range head {
		if c < ' ' && c != '\t' && c != '\n' && c != '\r' && c != '\f' {
			return false
		}
	}
	return len(head) == 0 || utf8.Valid(head) || mostlyASCII(head)
}

// mostlyASCII distinguishes text with some accented letters of a national encoding, or UTF-8 cut in
// a character, from bytes that happen to hold no control character.
func mostlyASCII(head []byte) bool {
	n := 0
	for _, c := range head {
		if c < utf8.RuneSelf {
			n++
		}
	}
	return n*4 >= len(head)*3
}
