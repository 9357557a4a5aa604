package input

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/parquet"
	"github.com/apache/arrow-go/v18/parquet/compress"
	"github.com/apache/arrow-go/v18/parquet/file"
	"github.com/apache/arrow-go/v18/parquet/metadata"
	"github.com/apache/arrow-go/v18/parquet/pqarrow"
)

// maxParquetRows limits the rows of a batch if the caller sets no number. Writers make row groups of
// 120,000 to a few million rows, and a cancelled run stops only between two batches.
const maxParquetRows = 1 << 20

// parquetBuffer is how much of a column chunk is read at once.
const parquetBuffer = 1 << 20

// parquetFile reads a Parquet file, a row group at a time or, where the caller wants batches of a
// size, in pieces of one. It decodes on one goroutine: a panic on a goroutine of pqarrow's own could
// not be caught.
type parquetFile struct {
	*Source
	pf      *file.Reader
	columns *pqarrow.FileReader
	group   int                  // the next row group
	batches pqarrow.RecordReader // of the row group before it; nil at first
}

// readParquet reads the file as Parquet, in batches of so many rows or, if rows is 0, of row groups.
func (s *Source) readParquet(rows int64) error {
	props := parquet.NewReaderProperties(&s.mem)
	props.BufferedStreamEnabled = true // no column chunk is read whole before it is decoded
	props.BufferSize = parquetBuffer
	// A page may be as large as the file, and mem refuses one that there is no memory for.
	props.MaxUncompressedPageSize = min(s.mem.max, math.MaxInt32)
	props.MaxCompressedPageSize = min(props.MaxUncompressedPageSize, s.size)
	pf, err := file.NewParquetReader(s.file, file.WithReadProps(props))
	if err != nil {
		return err
	}
	largest, err := s.inspect(pf.MetaData())
	if err != nil {
		return err
	}
	rows = min(cmp.Or(rows, maxParquetRows), max(1, largest)) // the reader takes memory for so many at once
	columns, err := pqarrow.NewFileReader(pf, pqarrow.ArrowReadProperties{BatchSize: rows}, &s.mem)
	if err != nil {
		return err
	}
	s.read = (&parquetFile{Source: s, pf: pf, columns: columns}).next
	if s.schema, err = columns.Schema(); err == nil && s.schema.NumFields() == 0 {
		err = errors.New("it has no columns")
	}
	return err
}

// seam is where one Parquet file ends and another begins.
const seam = "PAR1PAR1"

// inspect returns the number of rows of the largest row group, or an error for a file that pqarrow
// can't read, or of which it would read only a part. A file must not be several files, one behind the
// other, of which the last footer names places in the first: inspect looks for a seam between the
// column chunks and the footer, where a file has nothing but indexes.
func (s *Source) inspect(meta *metadata.FileMetaData) (rows int64, err error) {
	if meta.IsSetEncryptionAlgorithm() {
		return 0, wrongf("decrypt it first", "is an encrypted Parquet file, which is not read")
	}
	var at int64 // the end of the column chunks
	for group := range meta.NumRowGroups() {
		rg := meta.RowGroup(group)
		rows = max(rows, rg.NumRows())
		for i := range rg.NumColumns() {
			chunk, err := rg.ColumnChunk(i)
			if err != nil {
				return 0, err
			}
			codec := chunk.Compression()
			if _, err := compress.GetCodec(codec); err != nil {
				return 0, wrongf("write it again with ZSTD, SNAPPY, GZIP, BROTLI or LZ4_RAW",
					"has the column %q compressed with %s, which is not read", chunk.PathInSchema(), codec)
			}
			start, n := chunk.DataPageOffset(), chunk.TotalCompressedSize()
			if dictionary := chunk.DictionaryPageOffset(); dictionary > 0 {
				start = min(start, dictionary)
			}
			at = max(at, start+n)
		}
	}
	footer := s.size - int64(meta.Size()+4+len("PAR1"))
	buf := make([]byte, 64<<10)
	for ; at < footer; at += int64(len(buf) - len(seam) + 1) { // a seam may lie across two reads
		piece := buf[:min(int64(len(buf)), footer-at)]
		if _, err := s.file.ReadAt(piece, at); err != nil {
			return 0, err
		}
		if i := bytes.Index(piece, []byte(seam)); i >= 0 {
			return 0, wrongf("make each a file of its own",
				"is several Parquet files in one: another begins at byte %d", at+int64(i+len(seam)/2))
		}
	}
	stored := meta.KeyValueMetadata().FindValue("ARROW:schema")
	if stored == nil {
		return rows, nil
	}
	// Writers leave an Arrow schema in a file, as an IPC message in base64, which some do not pad.
	// pqarrow reads it without the checks of messages.
	message, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(*stored, "="))
	if err == nil {
		m := &messages{r: bufio.NewReader(bytes.NewReader(message)), end: int64(len(message)), mem: &s.mem}
		_, err = m.Message()
	}
	if err != nil {
		return 0, fmt.Errorf("in the Arrow schema that it stores: %w", err)
	}
	return rows, nil
}

func (p *parquetFile) next(ctx context.Context) (arrow.RecordBatch, error) {
	for p.batches == nil || !p.batches.Next() {
		if p.batches != nil && p.batches.Err() != nil {
			return nil, p.batches.Err()
		}
		if p.group == p.pf.NumRowGroups() {
			if n := p.pf.NumRows(); n != p.rows { // pqarrow returns no error for a column that ends early
				return nil, fmt.Errorf("its footer promises %d rows, and it holds %d", n, p.rows)
			}
			return nil, io.EOF
		}
		group := p.pf.RowGroup(p.group)
		p.group++
		if group.NumRows() == 0 {
			continue
		}
		// pqarrow opens the fields of a struct on goroutines of its own, where guard can't recover. So
		// open each column as pqarrow will, before it does.
		for i := range group.NumColumns() {
			pages, err := group.GetColumnPageReader(i)
			if err == nil {
				err = pages.Close()
			}
			if err != nil {
				return nil, err
			}
		}
		var err error
		p.mem.elsewhere = true
		p.batches, err = p.columns.GetRecordReader(ctx, nil, []int{p.group - 1})
		p.mem.elsewhere = false
		if err != nil {
			return nil, err
		}
	}
	rec := p.batches.RecordBatch()
	rec.Retain()
	return rec, nil
}
