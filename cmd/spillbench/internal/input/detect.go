package input

import (
	"bytes"
	"regexp"
	"strings"
)

// sniffSize is the length of the start of a file that detect looks at. Header lines of CSV and the
// first headers of binary formats are shorter.
const sniffSize = 4096

// streamMarker begins an Arrow stream since format 0.15.
const streamMarker = "\xff\xff\xff\xff"

// signature is the start of a format.
type signature struct {
	magic  string
	format Format
	what   string // for a format that is not read: its name,
	fix    string // and what to do about it

	// textual marks a magic number that a CSV file can begin with too: a column may be named PAR1
	// or ORCID. See begins.
	textual bool
	matches func(head []byte) bool // what else the start must be; may be nil
}

// The signatures, in order of trial. Sources: parquet.thrift and Arrow's Columnar.rst ("PAR1",
// "PARE", "ARROW1", the continuation marker 0xFFFFFFFF), the Feather V1 sources ("FEA1"), RFC 1952
// (gzip), RFC 8878 (zstd), the bzip2, xz, ORC and Avro specifications and PKWARE's APPNOTE (zip,
// the container of spreadsheets).
var signatures = []signature{
	{magic: "PAR1", textual: true, format: Parquet},
	{magic: "ARROW1", textual: true, format: ArrowFile},
	{matches: stream, format: ArrowStream},
	{magic: "PARE", textual: true, what: "an encrypted Parquet file", fix: "decrypt it first"},
	{magic: "FEA1", textual: true, what: "a Feather V1 file", fix: "write it again as Feather V2, an Arrow file"},
	{magic: "\x1f\x8b\x08", what: "compressed with gzip", fix: "unpack it with gunzip first"},
	{magic: "\x28\xb5\x2f\xfd", what: "compressed with zstd", fix: "unpack it with unzstd first"},
	{magic: "BZh", matches: bzip2.Match, what: "compressed with bzip2", fix: "unpack it with bunzip2 first"},
	{magic: "\xfd7zXZ\x00", what: "compressed with xz", fix: "unpack it with unxz first"},
	{magic: "PK\x03\x04", what: "a zip archive or spreadsheet", fix: "unpack it, or save it as CSV, first"},
	{magic: "ORC", textual: true, what: "an ORC file", fix: "convert it to Parquet first"},
	{magic: "Obj\x01", what: "an Avro file", fix: "convert it to Parquet first"},
	{magic: "\xff\xfe", what: "UTF-16 text", fix: "convert it to UTF-8 first"},
	{magic: "\xfe\xff", what: "UTF-16 text", fix: "convert it to UTF-8 first"},
}

// bzip2 matches the start of a bzip2 file: its level, and the magic number of the first block or of
// the end of an empty file. As regexp reads UTF-8, it stops before the last byte of that.
var bzip2 = regexp.MustCompile(`^BZh[1-9](1AY&SY|\x17rE8P)`)

// document matches a line that begins a JSON object, or a tag, comment or declaration of XML or HTML.
// Names of columns may begin with the same characters: <5ms, {id}.
var document = regexp.MustCompile(`^(\{\s*("|\}|$)|<([!?/]|[A-Za-z][\w:.-]*([\s/>]|$)))`)

// headerLine matches a line that can name the columns of a table: nothing, names with a separator, or
// one name, which is a word or in quotes.
var headerLine = regexp.MustCompile(`^$|[,\t;|]|^"|^[\pL\p{Nd}_\x{FFFD}][^ /]*$`)

// textLine matches a line with text in it.
var textLine = regexp.MustCompile(`[^\r\n]+`)

// control matches a character that text doesn't have: the control characters but those that separate
// words, lines and pages. The encoding of text is checked when it is read.
var control = regexp.MustCompile(`[\x00-\x08\x0b\x0e-\x1f]`)

// detect returns the format of a file that begins with head.
func detect(head []byte) (Format, error) {
	if len(head) == 0 {
		return "", wrongf("write Parquet, Arrow or CSV data into it", "is empty")
	}
	for _, s := range signatures {
		switch {
		case !s.begins(head):
		case s.format == "":
			return "", wrongf(s.fix, "is %s, which is not read", s.what)
		default:
			return s.format, nil
		}
	}
	if control.Match(head) {
		return "", wrongf("convert it to one of these first", "is not Parquet, Arrow or CSV")
	}
	// Most text can be CSV of one column, and so the first line must look like a header.
	first := textLine.FindString(strings.TrimPrefix(string(head), byteOrderMark))
	if headerLine.MatchString(first) && !document.MatchString(first) {
		return CSV, nil
	}
	return "", wrongf(
		"name a Parquet, Arrow or CSV file; put the name of a single column in quotes if it is more than a word",
		"is text, and no CSV table: its first line, %.40q, does not name columns", first)
}

// begins reports whether head is the start of a file of the format.
//
// After a textual magic number each of the formats has lengths, padding or Thrift and protobuf
// headers, which contain control characters that text does not have. So a file is of such a format
// if one of the next 16 bytes is a control character, or if it ends there. This needs only the
// start of a file. A truncated Parquet file is still a Parquet file, and its decoder reports the
// missing end; a CSV file never becomes one by the name of its first column.
func (s *signature) begins(head []byte) bool {
	const near = 16
	rest, ok := bytes.CutPrefix(head, []byte(s.magic))
	return ok && (s.matches == nil || s.matches(head)) &&
		(!s.textual || len(rest) == 0 || control.Match(rest[:min(near, len(rest))]))
}

// stream recognizes the start of an Arrow stream: the length of the schema message and the offset
// of the root table in it. Before the length stands a marker since format 0.15. An older stream has
// a length that is a multiple of 8 less the 4 bytes of the length itself, and a root table near the
// start. Where the file ends too early to tell, the marker alone counts.
func stream(head []byte) bool {
	rest, marked := bytes.CutPrefix(head, []byte(streamMarker))
	if len(rest) < 8 {
		return marked
	}
	n, root := le.Uint32(rest), le.Uint32(rest[4:])
	if root < 4 || root >= n || n >= 1<<31 {
		return false
	}
	return marked || n >= 32 && n < 1<<24 && (n+4)%8 == 0 && root < 64 && root%2 == 0
}
