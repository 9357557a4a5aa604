package input

import (
	"bufio"
	"cmp"
	"context"
	gocsv "encoding/csv"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/csv"
)

// byteOrderMark is U+FEFF in UTF-8, with which some spreadsheets begin a file.
const byteOrderMark = "\xef\xbb\xbf"

// separators are the characters that may separate values.
const separators = ",\t;|"

// defaultCSVRows makes batches of a few MiB of a typical table.
const defaultCSVRows = 1 << 16

// readCSV reads the file as CSV with a header line, in batches of so many rows. It reads the file
// twice: once to learn the type of each column from all of its values, once to build batches.
// arrow-go's own inference reads the first row only, and then fails on the first 1.5 of a column that
// began with 1.
func (s *Source) readCSV(ctx context.Context, rowsPerBatch int64) error {
	lines := func(single bool) io.Reader {
		text := bufio.NewReader(io.NewSectionReader(s.file, 0, s.size))
		if mark, _ := text.Peek(len(byteOrderMark)); string(mark) == byteOrderMark {
			text.Discard(len(mark))
		}
		return &lineReader{r: text, single: single, blank: true}
	}
	open := func(comma rune, single bool) *gocsv.Reader {
		rows := gocsv.NewReader(lines(single))
		rows.Comma, rows.ReuseRecord = comma, true
		return rows
	}

	// The separator is the one that makes most columns of the header line, or the comma.
	comma, width := ',', 0
	for _, c := range separators {
		if header, _ := open(c, false).Read(); len(header) > width {
			comma, width = c, len(header)
		}
	}
	rows := open(comma, width == 1)
	header, err := rows.Read()
	if err == io.EOF {
		return errors.New("it has no header line")
	} else if err != nil {
		return err
	}
	header = slices.Clone(header)
	columns := make([]column, width)
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		values, err := rows.Read()
		if err == io.EOF {
			break
		} else if err != nil {
			return err
		}
		for i, v := range values {
			columns[i].add(v)
		}
	}
	var fields []arrow.Field
	for i, name := range header {
		fields = append(fields, arrow.Field{Name: name, Type: columns[i].dataType(), Nullable: true})
	}
	s.schema = arrow.NewSchema(fields, nil)

	r := csv.NewReader(lines(width == 1), s.schema, csv.WithHeader(true), csv.WithComma(comma),
		csv.WithNullReader(true), csv.WithChunk(int(cmp.Or(rowsPerBatch, defaultCSVRows))), csv.WithAllocator(&s.mem))
	s.read = func(context.Context) (arrow.RecordBatch, error) {
		more := r.Next()
		// If a value does not parse, the reader returns the batch with a null in its place. Only
		// Err has the error.
		if err := r.Err(); err != nil {
			return nil, fmt.Errorf("after row %d: %w", s.rows, err)
		}
		if !more {
			return nil, io.EOF
		}
		rec := r.RecordBatch()
		rec.Retain()
		return rec, nil
	}
	return nil
}

// lineReader ends each line of CSV text with a line feed in the place of a carriage return or of
// both. Text in quotes stays as it is.
//
// encoding/csv, which the readers of this package use, ends lines at line feeds only and skips
// blank lines. In a table of one column a blank line after the header is a row without a value, so
// lineReader replaces it by an empty value in quotes. In wider tables each row has separators, and
// blank lines are not rows.
type lineReader struct {
	r      *bufio.Reader
	single bool // the table has one column

	quoted bool   // the next byte is in quotes
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
		switch {
		case err != nil:
			return n, err
		case l.quoted || c != '\r' && c != '\n':
			l.quoted = l.quoted != (c == '"')
			l.blank, l.header = false, true
			p[n] = c
			n++
			continue
		case c == '\r':
			if next, _ := l.r.Peek(1); string(next) == "\n" {
				l.r.Discard(1)
			}
		}
		l.end = "\n"
		if l.blank && l.single && l.header {
			l.end = "\"\"\n"
		}
		l.blank = true
	}
	return n, nil
}
