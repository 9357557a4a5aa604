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
	"slices"
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

// newCSV reads a CSV file with a header line. It reads the file twice: once to learn the type of
// each column from all of its values, once to build batches. arrow-go's own inference reads the
// first row only, and then fails on the first 1.5 of a column that began with 1.
func newCSV(ctx context.Context, f *os.File, mem memory.Allocator, rowsPerBatch int64) (*arrow.Schema, nextFunc, error) {
	if rowsPerBatch <= 0 {
		rowsPerBatch = defaultCSVRows
	}
	head, start := make([]byte, sniffSize), int64(0)
	n, err := f.ReadAt(head, 0)
	if err != nil && err != io.EOF {
		return nil, nil, err
	}
	head, marked := bytes.CutPrefix(head[:n], []byte(byteOrderMark))
	if marked {
		start = int64(len(byteOrderMark))
	}
	comma, single := separator(head)
	open := func() io.Reader {
		text := bufio.NewReader(io.NewSectionReader(f, start, math.MaxInt64-start))
		return &lineReader{r: text, single: single, blank: true}
	}
	schema, err := infer(ctx, open(), comma)
	if err != nil {
		return nil, nil, err
	}
	r := csv.NewReader(open(), schema, csv.WithHeader(true), csv.WithComma(comma), csv.WithNullReader(true),
		csv.WithChunk(int(min(rowsPerBatch, math.MaxInt32))), csv.WithAllocator(mem))
	rows := int64(0) // in the batches so far
	return schema, func(context.Context) (arrow.RecordBatch, error) {
		more := r.Next()
		// If a value does not parse, the reader returns the batch with a null in its place. Only
		// Err has the error.
		if err := r.Err(); err != nil {
			return nil, fmt.Errorf("after row %d: %w", rows, err)
		}
		if !more {
			return nil, io.EOF
		}
		rec := r.RecordBatch()
		rec.Retain()
		rows += rec.NumRows()
		return rec, nil
	}, nil
}

// separator returns the separator that the header line has most of, outside quotes, and whether it
// has none at all. Ties, and a line without separators, go to the comma.
func separator(head []byte) (comma rune, none bool) {
	var counts [len(separators)]int
	best, quoted := 0, false
	for _, c := range bytes.TrimLeft(head, "\r\n") {
		if !quoted && (c == '\r' || c == '\n') {
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
	return rune(separators[best]), counts[best] == 0
}

// lineReader ends each line of CSV text with a line feed in the place of a carriage return or of
// both. Text in quotes stays as it is.
//
// encoding/csv, which the readers of this package use, ends lines at line feeds only and skips
// blank lines. In a table of one column a blank line behind the header is a row without a value, so
// lineReader puts an empty value in quotes there. In wider tables each row has separators, and a
// blank line is none.
type lineReader struct {
	r      *bufio.Reader
	single bool // the table has one column

	quoted bool   // the next byte is in quotes
	cr     bool   // the byte before was a carriage return, which ended a line
	blank  bool   // the line has no bytes yet
	header bool   // a line that is not blank was read
	end    string // the rest of a line's end, which Read returns next
}

func (l *lineReader) Read(p []byte) (n int, err error) {
	for n < len(p) {
		if l.end != "" {
			i := copy(p[n:], l.end)
			n, l.end = n+i, l.end[i:]
			continue
		}
		c, err := l.r.ReadByte()
		if err != nil {
			return n, err
		}
		second := l.cr && c == '\n' // of the two characters of one line end
		l.cr = false
		switch {
		case second:
		case l.quoted || c != '\r' && c != '\n':
			l.quoted = l.quoted != (c == '"')
			l.blank, l.header = false, true
			p[n] = c
			n++
		default:
			l.end = "\n"
			if l.blank && l.single && l.header {
				l.end = "\"\"\n"
			}
			l.blank, l.cr = true, c == '\r'
		}
	}
	return n, nil
}

// infer reads the whole text and returns the narrowest type that holds all values of each column.
func infer(ctx context.Context, text io.Reader, comma rune) (*arrow.Schema, error) {
	rows := gocsv.NewReader(text)
	rows.Comma, rows.ReuseRecord = comma, true
	header, err := rows.Read()
	switch {
	case err == io.EOF:
		return nil, errors.New("it has no header line")
	case err != nil:
		return nil, err
	}
	header = slices.Clone(header)
	columns := make([]column, len(header))
	for n := 1; ; n++ {
		if n%cancelEvery == 0 && ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		values, err := rows.Read()
		if err == io.EOF {
			break
		} else if err != nil {
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
