package input

import (
	"bytes"
	"regexp"
	"strings"
	"unicode/utf8"
)

// sniffSize is the length of the start of a file that detect looks at. Header lines of CSV and the
// first headers of binary formats are shorter.
const sniffSize = 4096

// streamMarker begins an Arrow stream since format 0.15.
const streamMarker = "\xff\xff\xff\xff"

// signature is the start of a format. A CSV file can begin with a magic number of letters too: a column
// may be named PAR1 or ORCID. See begins.
type signature struct {
	magic     string
	format    Format
	what, fix string // for a format that is not read: its name, and what to do about it
}

// The signatures, in order of trial. Sources: parquet.thrift and Arrow's Columnar.rst ("PAR1",
// "PARE", "ARROW1"), the Feather V1 sources ("FEA1"), RFC 1952 (gzip), RFC 8878 (zstd), the bzip2,
// xz, ORC and Avro specifications and PKWARE's APPNOTE (zip, the container of spreadsheets).
var signatures = []signature{
	{"PAR1", Parquet, "", ""},
	{"ARROW1", ArrowFile, "", ""},
	{"PARE", "", "an encrypted Parquet file", "decrypt it first"},
	{"FEA1", "", "a Feather V1 file", "write it again as Feather V2, an Arrow file"},
	{"\x1f\x8b\x08", "", "compressed with gzip", "unpack it with gunzip first"},
	{"\x28\xb5\x2f\xfd", "", "compressed with zstd", "unpack it with unzstd first"},
	{"BZh", "", "compressed with bzip2", "unpack it with bunzip2 first"},
	{"\xfd7zXZ\x00", "", "compressed with xz", "unpack it with unxz first"},
	{"PK\x03\x04", "", "a zip archive or spreadsheet", "unpack it, or save it as CSV, first"},
	{"ORC", "", "an ORC file", "convert it to Parquet first"},
	{"Obj\x01", "", "an Avro file", "convert it to Parquet first"},
	{"\xff\xfe", "", "UTF-16 text", "convert it to UTF-8 first"},
	{"\xfe\xff", "", "UTF-16 text", "convert it to UTF-8 first"},
}

// document matches a line that begins a JSON object, or a tag, comment or declaration of XML or HTML.
// Names of columns may begin with the same characters: <5ms, {id}.
var document = regexp.MustCompile(`^(\{\s*("|\}|$)|<([!?/]|[A-Za-z][\w:.-]*([\s/>]|$)))`)

// headerLine matches a line that can name the columns of a table: nothing, names with a separator, or
// one name, which is a word or in quotes.
var headerLine = regexp.MustCompile(`^$|[,\t;|]|^"|^[\pL\p{Nd}_\x{FFFD}][^ /]*$`)

// textLine matches a line with text in it.
var textLine = regexp.MustCompile(`[^\r\n]+`)

// control matches a control character other than those that separate words, lines and pages. Text has
// none of them. The readers check the encoding of text.
var control = regexp.MustCompile(`[\x00-\x08\x0b\x0e-\x1f]`)

// detect returns the format of a file that begins with head.
func detect(head []byte) (Format, error) {
	if len(head) == 0 {
		return "", wrongf("write Parquet, Arrow or CSV data into it", "is empty")
	}
	if isStream(head) {
		return ArrowStream, nil
	}
	for _, s := range signatures {
		if !s.begins(head) {
			continue
		}
		if s.format == "" {
			return "", wrongf(s.fix, "is %s, which is not read", s.what)
		}
		return s.format, nil
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
// Behind a magic number that is text, each of the formats has lengths, padding, or headers of Thrift,
// protobuf or bzip2 within 16 bytes, which contain control characters that text does not have. So a
// file is of such a format if there is a control character, or if the file ends at the magic number. A
// truncated Parquet file is still a Parquet file, and its decoder reports the missing end; a CSV file
// never becomes one by the name of its first column.
func (s *signature) begins(head []byte) bool {
	const near = 16
	n := len(s.magic)
	return strings.HasPrefix(string(head), s.magic) &&
		(len(head) == n || !utf8.ValidString(s.magic) || control.Match(head[:min(len(head), n+near)]))
}

// isStream reports whether head is the start of an Arrow stream: the length of the schema message and
// the offset of the root table in it. Since format 0.15 a marker precedes the length. An older stream
// has a length that is a multiple of 8 less the 4 bytes of the length itself, and a root table near the
// start. Where the file ends too early to tell, the marker alone counts.
func isStream(head []byte) bool {
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
