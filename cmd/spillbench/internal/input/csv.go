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

// separators are what may stand between values.
const separators = ",\t;|"

// defaultCSVRows makes batches of a few MiB from the usual table.
const defaultCSVRows = 1 << 16

// cancelEvery is how many lines the inference reads between two looks at its context.
const cancelEvery = 4096

// csvFile reads a CSV file with a header line. It goes over the file twice:
// once to learn the type of each column from all of its values, once to read
// them. arrow-go's own inference looks at the first row only, and then fails on the
// first 1.5 of a column that began with 1.
type csvFile struct {
	r    *csv.Reader
	line int64 // rows given so far
}

func newCSV(ctx context.Context, f *os.File, mem memory.Allocator, rows int64) (decoder, error) {
	if rows <= 0 {
		rows = defaultCSVRows
	}
	text, err := rewound(f)
	if err != nil {
		return nil, err
	}
	comma, err := delimiter(text)
	if err != nil {
		return nil, err
	}
	schema, err := infer(ctx, text, comma)
	if err != nil {
		return nil, err
	}
	if text, err = rewound(f); err != nil {
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

// rewound returns the file's text from the start, without a byte order mark.
func rewound(f *os.File) (*bufio.Reader, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	r := bufio.NewReaderSize(f, 1<<20)
	if head, _ := r.Peek(len(byteOrderMark)); bytes.Equal(head, []byte(byteOrderMark)) {
		r.Discard(len(byteOrderMark)) // buffered: cannot fail
	}
	return r, nil
}

// delimiter returns which of the usual separators the first line holds most of,
// outside quotes. Ties, and a line with none, go to the comma.
func delimiter(r *bufio.Reader) (rune, error) {
	head, err := r.Peek(sniffSize)
	if err != nil && err != io.EOF && !errors.Is(err, bufio.ErrBufferFull) {
		return 0, err
	}
	var counts [len(separators)]int
	quoted := false
	for _, c := range head {
		if c == '"' {
			quoted = !quoted
		}
		if quoted {
			continue
		}
		if c == '\n' {
			break
		}
		if i := strings.IndexByte(separators, c); i >= 0 {
			counts[i]++
		}
	}
	best := 0
	for i, n := range counts {
		if n > counts[best] {
			best = i
		}
	}
	return rune(separators[best]), nil
}

// infer reads the whole text and returns the narrowest type that holds all values of
// each column. The first line names the columns.
func infer(ctx context.Context, text io.Reader, comma rune) (*arrow.Schema, error) {
	r := gocsv.NewReader(text)
	r.Comma = comma
	r.ReuseRecord = true
	header, err := r.Read()
	if err == io.EOF {
		return nil, errors.New("it has no header line")
	}
	if err != nil {
		return nil, err
	}
	fields := make([]arrow.Field, len(header))
	columns := make([]column, len(header))
	for i, name := range header {
		fields[i] = arrow.Field{Name: strings.Clone(name), Nullable: true}
	}
	for n := 1; ; n++ {
		if n%cancelEvery == 0 && ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		values, err := r.Read()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		for i, v := range values {
			columns[i].see(v)
		}
	}
	for i := range fields {
		fields[i].Type = columns[i].dataType()
	}
	return arrow.NewSchema(fields, nil), nil
}
