package input

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/parquet"
	"github.com/apache/arrow-go/v18/parquet/compress"
	"github.com/apache/arrow-go/v18/parquet/file"
	"github.com/apache/arrow-go/v18/parquet/metadata"
	"github.com/apache/arrow-go/v18/parquet/pqarrow"
)

// maxParquetRows is the most rows of a batch that was not asked for: writers
// make row groups of 120,000 to a few million rows, and between two batches a
// cancelled run stops.
const maxParquetRows = 1 << 20

// parquetBuffer is how much of a column chunk is read at once.
const parquetBuffer = 1 << 20

// parquetFile reads a Parquet file, a row group at a time or, where the caller
// wants batches of a size, in pieces of one. It decodes on one goroutine: a panic
// on a goroutine of pqarrow's own could not be caught.
type parquetFile struct {
	pf    *file.Reader
	mem   *limitedAllocator
	size  int64 // of the file in bytes
	r     *pqarrow.FileReader
	sc    *arrow.Schema
	rows  int64 // of the file, as its footer says
	read  int64
	group int // the next row group
	cur   pqarrow.RecordReader
}

func newParquet(ctx context.Context, f *os.File, size int64, mem *limitedAllocator, rows int64) (decoder, error) {
	props := parquet.NewReaderProperties(mem)
	props.BufferedStreamEnabled = true // no column chunk is read whole before it is decoded
	props.BufferSize = parquetBuffer
	// A page is as large as its writer made it; what there is no memory for, mem refuses.
	props.MaxCompressedPageSize = min(mem.max, math.MaxInt32)
	props.MaxUncompressedPageSize = props.MaxCompressedPageSize
	pf, err := file.NewParquetReader(f, file.WithReadProps(props))
	if err != nil {
		return nil, err
	}
	if err := supported(pf.MetaData()); err != nil {
		return nil, err
	}
	if err := verifyStoredSchema(pf.MetaData().KeyValueMetadata()); err != nil {
		return nil, err
	}
	if rows <= 0 {
		rows = maxParquetRows
	}
	rows = min(rows, largestGroup(pf)) // the reader takes memory for so many at once
	p := &parquetFile{pf: pf, mem: mem, size: size, rows: pf.NumRows()}
	p.r, err = pqarrow.NewFileReader(pf, pqarrow.ArrowReadProperties{BatchSize: rows}, mem)
	if err != nil {
		return nil, err
	}
	if p.sc, err = p.r.Schema(); err != nil {
		return nil, err
	}
	if p.sc.NumFields() == 0 {
		return nil, errors.New("it has no columns")
	}
	return p, context.Cause(ctx)
}

// supported names what of a file cannot be read, though nothing is wrong with it.
func supported(meta *metadata.FileMetaData) error {
	if meta.IsSetEncryptionAlgorithm() {
		return &Error{Err: errors.New("is an encrypted Parquet file, which is not read"), Fix: "decrypt it first"}
	}
	for group := range meta.NumRowGroups() {
		rg := meta.RowGroup(group)
		for i := range rg.NumColumns() {
			chunk, err := rg.ColumnChunk(i)
			if err != nil {
				return err
			}
			if _, err := compress.GetCodec(chunk.Compression()); err != nil {
				return &Error{
					Err: fmt.Errorf("has the column %q compressed with %s, which is not read", chunk.PathInSchema(), chunk.Compression()),
					Fix: "write it again with ZSTD, SNAPPY, GZIP, BROTLI or LZ4_RAW",
				}
			}
		}
	}
	return nil
}

// largestGroup returns how many rows the largest row group has, or 1.
func largestGroup(pf *file.Reader) int64 {
	most := int64(1)
	for i := range pf.NumRowGroups() {
		most = max(most, pf.MetaData().RowGroup(i).NumRows())
	}
	return most
}

// verifyStoredSchema walks the Arrow schema that writers leave in a file, as an
// IPC message in base64.
func verifyStoredSchema(pairs metadata.KeyValueMetadata) error {
	stored := pairs.FindValue("ARROW:schema")
	if stored == nil {
		return nil
	}
	message, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(*stored, "=")) // some writers do not pad
	if err == nil {
		err = verifyMessage(message)
	}
	if err != nil {
		return fmt.Errorf("in the Arrow schema that it stores: %w", err)
	}
	return nil
}

func (p *parquetFile) schema() *arrow.Schema { return p.sc }

func (p *parquetFile) next(ctx context.Context) (arrow.RecordBatch, error) {
	for {
		if p.cur == nil {
			if p.group >= p.pf.NumRowGroups() {
				return nil, p.end()
			}
			i := p.group
			p.group++
			if p.pf.MetaData().RowGroup(i).NumRows() == 0 {
				continue
			}
			if err := p.rehearse(i); err != nil {
				return nil, err
			}
			p.mem.elsewhere = true
			cur, err := p.r.GetRecordReader(ctx, nil, []int{i})
			p.mem.elsewhere = false
			if err != nil {
				return nil, err
			}
			p.cur = cur
		}
		if p.cur.Next() {
			rec := p.cur.RecordBatch()
			p.read += rec.NumRows()
			rec.Retain()
			return rec, nil
		}
		err := p.cur.Err()
		p.cur.Release()
		p.cur = nil
		if err != nil && err != io.EOF {
			return nil, err
		}
	}
}

// rehearse opens each column of a row group as pqarrow will, which does so for
// the fields of a struct on a goroutine of its own.
func (p *parquetFile) rehearse(group int) error {
	rg := p.pf.RowGroup(group)
	for i := range rg.NumColumns() {
		chunk, err := rg.MetaData().ColumnChunk(i)
		if err != nil {
			return err
		}
		start, n := chunk.DataPageOffset(), chunk.TotalCompressedSize()
		if chunk.HasDictionaryPage() && chunk.DictionaryPageOffset() > 0 {
			start = min(start, chunk.DictionaryPageOffset())
		}
		if start < 0 || n < 0 || start > p.size-n {
			return fmt.Errorf("column %d of row group %d lies at %d to %d of %d bytes", i, group, start, start+n, p.size)
		}
		pages, err := rg.GetColumnPageReader(i)
		if err != nil {
			return err
		}
		if err := pages.Close(); err != nil {
			return err
		}
	}
	return nil
}

// end checks that all rows came: a column that ends early is not an error to
// pqarrow.
func (p *parquetFile) end() error {
	if p.read != p.rows {
		return fmt.Errorf("its footer promises %d rows, and it holds %d", p.rows, p.read)
	}
	return io.EOF
}

func (p *parquetFile) close() error {
	if p.cur != nil {
		p.cur.Release()
		p.cur = nil
	}
	return nil // the file is the Source's
}
