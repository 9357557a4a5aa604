package input

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"

	"github.com/spillway-db/spillway/internal/equal"
)

const (
	blockSize = 24 // of a Block in a file's footer: offset, metadata length, padding, body length

	// maxFooterGap is how many bytes may lie between a file's last message and its footer: the mark
	// of the stream's end and padding.
	maxFooterGap = 8 + 64
)

// arrowReader reads both formats of Arrow IPC: a file is a stream with a directory of its messages,
// the footer. messages reads the messages and arrow-go decodes them.
type arrowReader struct {
	messages *messages
	r        *ipc.Reader   // of the stream that is being read
	first    *arrow.Schema // the schema of the first stream
}

func newArrowReader(m *messages) (*arrowReader, error) {
	a := &arrowReader{messages: m}
	if err := a.open(); err != nil {
		m.close()
		return nil, err
	}
	a.first = a.r.Schema()
	return a, nil
}

// open begins a stream: the next message must be its schema.
func (a *arrowReader) open() error {
	r, err := ipc.NewReaderFromMessageReader(a.messages, ipc.WithAllocator(a.messages.mem))
	if err == nil {
		a.r = r
	}
	return err
}

// newArrowStream reads the size bytes of r. A size of -1 is that of a pipe.
func newArrowStream(r *bufio.Reader, size int64, mem *limitedAllocator) (decoder, error) {
	if size < 0 {
		return newArrowReader(&messages{r: r, end: math.MaxInt64, piped: true, mem: mem})
	}
	return newArrowReader(&messages{r: r, end: size, mem: mem})
}

// newArrowFile reads the size bytes of f. The footer must name all messages: where it doesn't, f may be
// several files, one behind the other.
func newArrowFile(f *os.File, size int64, mem *limitedAllocator) (decoder, error) {
	blocks, end, footer, err := readFooter(f, size)
	if err != nil {
		return nil, err
	}
	m := &messages{r: bufio.NewReaderSize(nil, bufferSize), mem: mem, file: f, blocks: blocks, ids: map[int64]bool{}}
	a, err := newArrowReader(m)
	if err != nil {
		return nil, err
	}
	if end = max(end, m.at); footer-end > maxFooterGap {
		m.close()
		return nil, &Error{
			Err: fmt.Errorf("has %d bytes, from byte %d on, that its footer does not name: it may be several files in one",
				footer-end, end),
			Fix: "name the files one by one",
		}
	}
	return a, nil
}

// readFooter returns the places of the schema, of the dictionaries and of the record batches, the end
// of the last of them, and the offset of the footer. Behind the footer are its length and the closing
// magic.
func readFooter(f *os.File, size int64) (blocks []block, end, start int64, err error) {
	defer inconsistent(&err)
	const schemaAt = 8 // behind the magic and its padding
	const tailSize = 4 + 6
	if size < schemaAt+tailSize {
		return nil, 0, 0, io.ErrUnexpectedEOF
	}
	var tail [tailSize]byte
	if _, err := f.ReadAt(tail[:], size-tailSize); err != nil {
		return nil, 0, 0, err
	}
	if !bytes.Equal(tail[4:], ipc.Magic) {
		return nil, 0, 0, errors.New("its end is missing")
	}
	n := int64(binary.LittleEndian.Uint32(tail[:]))
	if n == 0 || n > size-tailSize-schemaAt {
		return nil, 0, 0, errMetadata
	}
	b := make([]byte, n)
	start = size - tailSize - n
	if _, err := f.ReadAt(b, start); err != nil {
		return nil, 0, 0, err
	}
	footer := root(b)
	footer.pairs(4)
	if schema, ok := footer.child(1); ok { // a copy of the schema message's
		if _, err := readSchema(schema, false); err != nil {
			return nil, 0, 0, err
		}
	}
	blocks, end = []block{{schemaAt, start}}, schemaAt
	for _, list := range []int{2, 3} { // dictionaries, record batches
		for b := footer.vector(list, blockSize); len(b) > 0; b = b[blockSize:] {
			at, head := int64(binary.LittleEndian.Uint64(b)), int64(int32(binary.LittleEndian.Uint32(b[8:])))
			body := int64(binary.LittleEndian.Uint64(b[16:]))
			if at < 0 || head < 0 || body < 0 || head > start-at || body > start-at-head {
				return nil, 0, 0, fmt.Errorf("its footer, at byte %d, names a message of %d and %d bytes at byte %d",
					start, head, body, at)
			}
			blocks = append(blocks, block{at, at + head + body})
			end = max(end, at+head+body)
		}
	}
	return blocks, end, start, nil
}

func (a *arrowReader) schema() *arrow.Schema { return a.first }

func (a *arrowReader) next(context.Context) (arrow.RecordBatch, error) {
	for {
		if a.r.Next() {
			return a.record(a.r.RecordBatch()), nil
		}
		if err := a.r.Err(); err != nil {
			return nil, err
		}
		if err := a.another(); err != nil {
			return nil, err
		}
	}
}

// record returns a reference to rec with the schema of the first stream.
func (a *arrowReader) record(rec arrow.RecordBatch) arrow.RecordBatch {
	if rec.Schema() == a.first {
		rec.Retain()
		return rec
	}
	return array.NewRecordBatchWithMetadata(a.first, rec.Columns(), rec.NumRows(), equal.Metadata(rec))
}

// another begins the stream behind the one that has ended, or returns io.EOF if there is none. Its
// columns must be those of the first stream. The metadata of the schema itself may differ, because
// that of two tables from pandas does.
func (a *arrowReader) another() error {
	more, err := a.messages.another()
	switch {
	case err != nil:
		return err
	case !more:
		return io.EOF
	}
	at := a.messages.start
	a.r.Release()
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

func (a *arrowReader) close() error {
	a.r.Release()
	a.messages.close()
	return nil
}
