package input

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/internal/equal"
)

const (
	// maxFooterGap is how many bytes may lie between a file's last message and its footer: the mark
	// of the stream's end and padding.
	maxFooterGap = 8 + 64
	// maxStart is how many bytes a file without batches may have before its footer, in addition to the
	// schema, which the footer has too: the magic and the schema's message have padding.
	maxStart = 2 * 64
)

// arrowReader reads streams of Arrow IPC, one behind the other, or the messages of a file. messages
// reads the messages and arrow-go decodes them.
type arrowReader struct {
	*messages
	stream *ipc.Reader   // the one that is being read
	schema *arrow.Schema // of the first stream
}

// readArrow reads the file as an Arrow stream.
func (s *Source) readArrow(m *messages) error {
	a := &arrowReader{messages: m}
	if err := a.open(); err != nil {
		return err
	}
	a.schema = a.stream.Schema()
	s.schema, s.read = a.schema, a.next
	return nil
}

// readArrowFile reads an Arrow file: a magic number and padding, a stream, a footer, its length and the
// magic again. The footer has the schema and the places of the other messages. readArrowFile uses these,
// because not all writers put the schema into the stream, and a dictionary may be behind the batches that
// use it.
func (s *Source) readArrowFile() error {
	tail := make([]byte, 4+len(ipc.Magic))
	at := max(0, s.size-int64(len(tail)))
	if _, err := s.file.ReadAt(tail, at); err != nil {
		return err
	}
	if !bytes.Equal(tail[4:], ipc.Magic) {
		return errors.New("its end is missing")
	}
	n := int64(le.Uint32(tail))
	if n > at {
		return errMetadata
	}
	schema := memory.NewResizableBuffer(&s.mem)
	schema.Resize(footerAt + int(n))
	if _, err := s.file.ReadAt(schema.Bytes()[footerAt:], at-n); err != nil {
		return err
	}
	places, err := readFooter(schema.Bytes())
	if err != nil {
		return err
	}
	r := bufio.NewReaderSize(io.NewSectionReader(s.file, 0, at-n), bufferSize)
	return s.readArrow(&messages{
		r: r, end: at - n, mem: &s.mem, held: schema,
		file: s.file, places: places, last: maxStart + n,
	})
}

// open begins a stream: the next message must be its schema.
func (a *arrowReader) open() (err error) {
	a.layout = nil
	if a.stream, err = ipc.NewReaderFromMessageReader(a.messages, ipc.WithAllocator(a.mem)); err == nil {
		a.layout.setColumns(a.stream.Schema())
	}
	return err
}

// next returns the next batch, with the schema of the first stream.
func (a *arrowReader) next(context.Context) (arrow.RecordBatch, error) {
	for {
		rec, err := a.stream.Read()
		if err == nil {
			return array.NewRecordBatchWithMetadata(a.schema, rec.Columns(), rec.NumRows(), equal.Metadata(rec)), nil
		}
		if err == io.EOF {
			err = a.another()
		}
		if err != nil {
			return nil, err
		}
	}
}

// another begins the stream behind the one that has ended, or returns io.EOF if there is none. Its
// columns must be those of the first stream. The metadata of the schema itself may differ, because
// that of two tables from pandas does.
func (a *arrowReader) another() error {
	if a.file != nil {
		if gap := a.end - a.last; gap > maxFooterGap {
			return wrongf("name the files one by one",
				"has %d bytes, from byte %d on, that are not its stream or footer: it may be several files in one",
				gap, a.last)
		}
		return io.EOF
	}
	if a.held == nil {
		if _, err := a.r.Peek(1); err != nil {
			return err
		}
		a.start = a.at
	}
	at := a.start
	if err := a.open(); err != nil {
		return fmt.Errorf("the bytes behind the end of a stream, from byte %d on, are no other stream: %w", at, err)
	}
	first, second := arrow.NewSchema(a.schema.Fields(), nil), arrow.NewSchema(a.stream.Schema().Fields(), nil)
	if err := equal.Schemas(first, second); err != nil {
		return wrongf("make it a file of its own", "has a stream of another schema at byte %d: %s", at,
			strings.Replace(err.Error(), "convert: the records", "they", 1))
	}
	return nil
}
