package input

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"

	"github.com/spillway-db/spillway/internal/equal"
)

// maxFooterGap is how many bytes may lie between a file's last message and its footer: the mark of
// the stream's end and padding.
const maxFooterGap = 8 + 64

// arrowReader reads streams of Arrow IPC, one behind the other, or the stream in a file. messages
// reads the messages and arrow-go decodes them.
type arrowReader struct {
	messages *messages
	named    int           // the dictionaries and batches that the footer of a file names
	r        *ipc.Reader   // of the stream that is being read
	first    *arrow.Schema // of the first stream
}

// newArrow reads the messages of a stream, or of a file whose footer names so many of them.
func newArrow(m *messages, named int) (*arrow.Schema, nextFunc, error) {
	a := &arrowReader{messages: m, named: named}
	if err := a.open(); err != nil {
		return nil, nil, err
	}
	a.first = a.r.Schema()
	return a.first, a.next, nil
}

// newArrowFile reads the size bytes of f: a magic number, a stream, and a footer, which names the
// places of the stream's dictionaries and batches.
func newArrowFile(f *os.File, size int64, mem *limitedAllocator) (*arrow.Schema, nextFunc, error) {
	const begin = 8 // behind the magic and its padding
	footer, named, err := readFooter(f, size, begin)
	if err != nil {
		return nil, nil, err
	}
	stream := bufio.NewReaderSize(io.NewSectionReader(f, begin, footer-begin), bufferSize)
	return newArrow(&messages{r: stream, at: begin, end: footer, mem: mem, ids: map[int64]bool{}}, named)
}

// readFooter returns the offset of a file's footer, which is begin at least, and the number of
// dictionaries and batches that it names. Behind the footer are its length and the closing magic.
func readFooter(f *os.File, size, begin int64) (start int64, named int, err error) {
	defer inconsistent(&err)
	const tailSize, blockSize = 4 + 6, 24
	if size < begin+tailSize {
		return 0, 0, io.ErrUnexpectedEOF
	}
	tail := make([]byte, tailSize)
	if _, err := f.ReadAt(tail, size-tailSize); err != nil {
		return 0, 0, err
	}
	if !bytes.Equal(tail[4:], ipc.Magic) {
		return 0, 0, errors.New("its end is missing")
	}
	n := int64(le.Uint32(tail))
	if start = size - tailSize - n; start < begin {
		return 0, 0, errMetadata
	}
	b := make([]byte, n)
	if _, err := f.ReadAt(b, start); err != nil {
		return 0, 0, err
	}
	const dictionaries, batches = 2, 3
	footer := root(b)
	return start, (len(footer.vector(dictionaries, blockSize)) + len(footer.vector(batches, blockSize))) / blockSize, nil
}

// open begins a stream: the next message must be its schema.
func (a *arrowReader) open() (err error) {
	if a.r, err = ipc.NewReaderFromMessageReader(a.messages, ipc.WithAllocator(a.messages.mem)); err == nil {
		a.messages.layout = newLayout(a.r.Schema(), a.messages.schema)
	}
	return err
}

// next returns the next batch, with the schema of the first stream.
func (a *arrowReader) next(context.Context) (arrow.RecordBatch, error) {
	for {
		rec, err := a.r.Read()
		switch {
		case err == nil:
			return array.NewRecordBatchWithMetadata(a.first, rec.Columns(), rec.NumRows(), equal.Metadata(rec)), nil
		case err != io.EOF:
			return nil, err
		}
		if err := a.another(); err != nil {
			return nil, err
		}
	}
}

// another begins the stream behind the one that has ended, or returns io.EOF if there is none. Its
// columns must be those of the first stream. The metadata of the schema itself may differ, because
// that of two tables from pandas does.
func (a *arrowReader) another() error {
	m := a.messages
	if m.ids != nil {
		return a.atFooter()
	}
	if m.held == nil {
		if _, err := m.r.Peek(1); err != nil {
			return err
		}
		m.start = m.at
	}
	m.layout = nil
	at := m.start
	if err := a.open(); err != nil {
		return fmt.Errorf("the bytes behind the end of a stream, from byte %d on, are no other stream: %w", at, err)
	}
	columns := func(s *arrow.Schema) *arrow.Schema { return arrow.NewSchemaWithEndian(s.Fields(), nil, s.Endianness()) }
	var d *equal.DifferenceError
	if errors.As(equal.Schemas(columns(a.first), columns(a.r.Schema())), &d) {
		in := ""
		if d.Path != "" {
			in = fmt.Sprintf(" in column %q", d.Path)
		}
		return &Error{
			Err: fmt.Errorf("has a stream of another schema at byte %d: they differ%s: %s and %s", at, in, d.A, d.B),
			Fix: "make it a file of its own",
		}
	}
	return nil
}

// atFooter returns io.EOF at the end of a file's stream. The footer must name all messages: where it
// doesn't, the file may be several files, one behind the other.
func (a *arrowReader) atFooter() error {
	m := a.messages
	switch gap := m.end - m.at; {
	case gap > maxFooterGap:
		return &Error{
			Err: fmt.Errorf("has %d bytes, from byte %d on, that its footer does not name: it may be several files in one",
				gap, m.at),
			Fix: "name the files one by one",
		}
	case m.seen != a.named:
		return fmt.Errorf("it has %d dictionaries and batches, and its footer names %d", m.seen, a.named)
	}
	return io.EOF
}
