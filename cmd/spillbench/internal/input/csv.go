package input

import (
	"bufio"
	"bytes"
	"context"
	gocsv "encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/csv"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// byteOrderMark is U+FEFF in UTF-8, with which some spreadsheets begin a file.
const byteOrderMark = "\xef\xbb\xbf"

// separators are the characters that may separate values.
const separators = ",\t;|"

// defaultCSVRows makes batches of a few MiB of a typical table.
const defaultCSVRows = 1 << 16

// cancelEvery is how many rows the inference reads between two looks at its context.
const cancelEvery = 4096

// csvFile reads a CSV file with a header line. It reads the file twice: once to learn the type of
// each column from all of its values, once to build batches. arrow-go's own inference reads the
// first row only, and then fails on the first 1.5 of a column that began with 1.
type csvFile struct {
	r    *csv.Reader
	line int64 // rows returned so far
}

func newCSV(ctx context.Context, f *os.File, mem memory.Allocator, rows int64) (decoder, error) {
	if rows <= 0 {
		rows = defaultCSVRows
	}
	text, err := rewound(f, false)
	if err != nil {
		return nil, err
	}
	head, err := text.Peek(sniffSize)
	if err != nil && err != io.EOF {
		return nil, err
	}
	comma := delimiter(head)
	_, header, err := newRows(text, comma)
	if err != nil {
		return nil, err
	}
	single := len(header) == 1
	if text, err = rewound(f, single); err != nil {
		return nil, err
	}
	schema, err := infer(ctx, text, comma)
	if err != nil {
		return nil, err
	}
	if text, err = rewound(f, single); err != nil {
		return nil, err
	}
	return &csvFile{r: csv.NewReader(text, schema,
		csv.WithHeader(true), csv.WithComma(comma), csv.WithNullReader(true),
		csv.WithChunk(int(min(rows, math.MaxInt32))), csv.WithAllocator(mem))}, nil
}

func (c *csvFile) schema() *arrow.Schema { return c.r.Schema() }

func (c *csvFile) next(context.Context) (arrow.RecordBatch, error) {
	more := c.r.Next()
	// If a value does not parse, the reader returns the batch with a null in its place. Only
	// Err has the error.
	if err := c.r.Err(); err != nil {
		return nil, fmt.Errorf("after row %d: %w", c.line, err)
	}
	if !more {
		return nil, io.EOF
	}
	rec := c.r.RecordBatch()
	rec.Retain()
	c.line += rec.NumRows()
	return rec, nil
}

func (c *csvFile) close() error {
	c.r.Release()
	return nil
}

// rewound returns the file's text from the start, without a byte order mark, and its lines as
// lineReader returns them.
func rewound(f *os.File, single bool) (*bufio.Reader, error) {
	head := make([]byte, len(byteOrderMark))
	if _, err := f.ReadAt(head, 0); err != nil && err != io.EOF {
		return nil, err
	}
	start := int64(0)
	if string(head) == byteOrderMark {
		start = int64(len(head))
	}
	if _, err := f.Seek(start, io.SeekStart); err != nil {
		return nil, err
	}
	return bufio.NewReaderSize(&lineReader{r: f, single: single, blank: true}, 1<<16), nil
}

// lineReader ends each line of CSV text with a line feed in the place of a carriage return or of
// both. Text in quotes stays as it is.
//
// encoding/csv, which the readers of this package use, ends lines at line feeds only and skips
// blank lines. In a table of one column a blank line behind the header is a row without a value, so
// lineReader puts an empty value in quotes there. In wider tables each row has separators, and a
// blank line is none.
type lineReader struct {
	r      io.Reader
	single bool // the table has one column

	in     [1 << 16]byte
	buffer []byte
	out    []byte // the end of buffer, which Read has not returned yet
	err    error  // of r; Read returns it behind out
	quoted bool   // the next byte is in quotes
	cr     bool   // the byte before was a carriage return, which ended a line
	blank  bool   // the line has no bytes yet
	header bool   // a line that is not blank was read
}

func (l *lineReader) Read(p []byte) (int, error) {
	for len(l.out) == 0 {
		if l.err != nil {
			return 0, l.err
		}
		var n int
		n, l.err = l.r.Read(l.in[:])
		l.buffer = l.convert(l.buffer[:0], l.in[:n])
		l.out = l.buffer
	}
	n := copy(p, l.out)
	l.out = l.out[n:]
	return n, nil
}

// convert appends text to out as Read returns it.
func (l *lineReader) convert(out, text []byte) []byte {
	for len(text) > 0 {
		second := l.cr && text[0] == '\n' // of the two characters of one line end
		l.cr = false
		if second {
			text = text[1:]
			continue
		}
		n := bytes.IndexAny(text, "\"\r\n")
		if n < 0 {
			n = len(text)
		}
		if n > 0 {
			l.blank, l.header = false, true
			out, text = append(out, text[:n]...), text[n:]
			continue
		}
		c := text[0]
		text = text[1:]
		if c == '"' || l.quoted {
			l.quoted = l.quoted != (c == '"')
			l.blank, l.header = false, true
			out = append(out, c)
			continue
		}
		if l.blank && l.single && l.header {
			out = append(out, `""`...)
		}
		out = append(out, '\n')
		l.blank, l.cr = true, c == '\r'
	}
	return out
}

// delimiter returns the separator that the header line has most of, outside quotes. Ties, and a
// line without separators, go to the comma.
func delimiter(head []byte) rune {
	var counts [len(separators)]int
	best, quoted := 0, false
	for _, c := range bytes.TrimLeft(head, "\n") {
		if c == '\n' && !quoted {
			break
		}
		quoted = quoted != (c == '"')
		if i := strings.IndexByte(separators, c); i >= 0 && !quoted {
			counts[i]++
		}
	}
	for i, n := range counts {
		if n > counts[best] {
			best = i
		}
	}
	return rune(separators[best])
}

// newRows reads the header line of a table, and returns a reader of the rows behind it.
func newRows(text io.Reader, comma rune) (rows *gocsv.Reader, header []string, err error) {
	rows = gocsv.NewReader(text)
	rows.Comma = comma
	header, err = rows.Read()
	if err == io.EOF {
		return nil, nil, errors.New("it has no header line")
	}
	return rows, header, err
}

// infer reads the whole text and returns the narrowest type that holds all values of each column.
func infer(ctx context.Context, text io.Reader, comma rune) (*arrow.Schema, error) {
	rows, header, err := newRows(text, comma)
	if err != nil {
		return nil, err
	}
	rows.ReuseRecord = true
	columns := make([]column, len(header))
	for n := 1; ; n++ {
		if n%cancelEvery == 0 && ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		values, err := rows.Read()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		for i, v := range values {
			columns[i].add(v)
		}
	}
	fields := make([]arrow.Field, len(header))
	for i, name := range header {
		fields[i] = arrow.Field{Name: name, Type: columns[i].dataType(), Nullable: true}
	}
	return arrow.NewSchema(fields, nil), nil
}
