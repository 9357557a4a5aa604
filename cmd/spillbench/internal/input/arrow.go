package input

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

const (
	continuation = 0xffffffff // before the length of a message's metadata since format 0.15
	blockSize    = 24         // of a Block in a file's footer: offset, metadata length, padding, body length
)

// arrowFile reads an Arrow IPC file with positioned reads. The mapped reader of
// arrow-go is not used: it panics on dictionaries.
type arrowFile struct {
	f      *os.File
	size   int64 // of the file
	r      *ipc.FileReader
	blocks []byte // of the record batches, as the footer lists them
	i      int
}

func newArrowFile(f *os.File, size int64, mem memory.Allocator) (decoder, error) {
	footer, err := readFooter(f, size)
	if err != nil {
		return nil, err
	}
	if err := verify(footer, &footerShape); err != nil {
		return nil, err
	}
	dictionaries := vector(footer, root(footer), 2, blockSize)
	for i := 0; i < len(dictionaries); i += blockSize {
		if err := verifyBlock(f, size, dictionaries[i:]); err != nil {
			return nil, err
		}
	}
	// Without limits of their own: the reader holds each block against the
	// file's size, and large batches are what this program is for.
	r, err := ipc.NewFileReader(f, ipc.WithAllocator(mem), ipc.WithBodySizeLimit(0), ipc.WithMetadataSizeLimit(0))
	if err != nil {
		return nil, err
	}
	return &arrowFile{f: f, size: size, r: r, blocks: vector(footer, root(footer), 3, blockSize)}, nil
}

// readFooter returns the footer's flatbuffer, which precedes its own length and the closing magic.
func readFooter(f *os.File, size int64) ([]byte, error) {
	const tail = 4 + 6
	end := make([]byte, tail)
	if size < 8+tail {
		return nil, io.ErrUnexpectedEOF
	}
	if _, err := f.ReadAt(end, size-tail); err != nil {
		return nil, err
	}
	if !bytes.Equal(end[4:], ipc.Magic) {
		return nil, errors.New("its end is missing")
	}
	n := int64(binary.LittleEndian.Uint32(end))
	if n == 0 || n > size-tail-8 {
		return nil, errMetadata
	}
	footer := make([]byte, n)
	_, err := f.ReadAt(footer, size-tail-n)
	return footer, err
}

// verifyBlock walks the metadata of the message that a footer's block names.
func verifyBlock(f *os.File, size int64, block []byte) error {
	at, n := int64(binary.LittleEndian.Uint64(block)), int64(int32(binary.LittleEndian.Uint32(block[8:])))
	if at < 0 || n < 8 || at > size-n {
		return errMetadata
	}
	meta := make([]byte, n)
	if _, err := f.ReadAt(meta, at); err != nil {
		return err
	}
	return verifyMessage(meta)
}

// verifyMessage walks a message's metadata behind its length, with or without the
// mark before that.
func verifyMessage(b []byte) error {
	if len(b) >= 8 && binary.LittleEndian.Uint32(b) == continuation {
		b = b[4:]
	}
	if len(b) < 4 {
		return errMetadata
	}
	return verify(b[4:], &messageShape)
}

func (a *arrowFile) schema() *arrow.Schema { return a.r.Schema() }

func (a *arrowFile) next(context.Context) (arrow.RecordBatch, error) {
	if a.i >= a.r.NumRecords() {
		return nil, io.EOF
	}
	if err := verifyBlock(a.f, a.size, a.blocks[a.i*blockSize:]); err != nil {
		return nil, err
	}
	rec, err := a.r.RecordBatchAt(a.i)
	if err != nil {
		return nil, err
	}
	a.i++
	return rec, nil
}

func (a *arrowFile) close() error { return a.r.Close() }

// arrowStream reads an Arrow IPC stream from front to back.
type arrowStream struct {
	r *ipc.Reader
}

func newArrowStream(f *os.File, size int64, mem memory.Allocator) (decoder, error) {
	// No message is larger than the file that it is in; what claims to be is
	// refused before memory is taken for it.
	messages := ipc.NewMessageReader(&verifiedStream{r: bufio.NewReaderSize(f, 1<<20), limit: size},
		ipc.WithAllocator(mem), ipc.WithBodySizeLimit(size), ipc.WithMetadataSizeLimit(size))
	r, err := ipc.NewReaderFromMessageReader(messages, ipc.WithAllocator(mem))
	if err != nil {
		return nil, err
	}
	return &arrowStream{r: r}, nil
}

func (a *arrowStream) schema() *arrow.Schema { return a.r.Schema() }

func (a *arrowStream) next(context.Context) (arrow.RecordBatch, error) {
	if !a.r.Next() {
		if err := a.r.Err(); err != nil {
			return nil, err
		}
		return nil, io.EOF
	}
	rec := a.r.RecordBatch()
	rec.Retain()
	return rec, nil
}

func (a *arrowStream) close() error {
	a.r.Release()
	return nil
}

// verifiedStream passes a stream of messages on, and each message's metadata
// only when it has been walked.
type verifiedStream struct {
	r     *bufio.Reader
	limit int64  // no metadata is longer
	head  []byte // what of a message's length and metadata has not been passed on
	body  int64  // how much of its body has not
}

func (s *verifiedStream) Read(p []byte) (int, error) {
	if len(s.head) == 0 && s.body == 0 {
		if err := s.message(); err != nil {
			return 0, err
		}
	}
	if len(s.head) > 0 {
		n := copy(p, s.head)
		s.head = s.head[n:]
		return n, nil
	}
	n, err := s.r.Read(p[:min(int64(len(p)), s.body)])
	s.body -= int64(n)
	return n, err
}

// message reads the next message up to its body.
func (s *verifiedStream) message() error {
	prefix, err := s.r.Peek(8)
	if len(prefix) < 8 {
		// The end, or too little for a message: the reader judges that.
		if len(prefix) > 0 {
			s.head = bytes.Clone(prefix)
			s.r.Discard(len(prefix)) // buffered: cannot fail
			return nil
		}
		return err
	}
	skip, n := 4, int64(binary.LittleEndian.Uint32(prefix))
	if n == continuation {
		skip, n = 8, int64(binary.LittleEndian.Uint32(prefix[4:]))
	}
	if n > s.limit {
		return fmt.Errorf("a message has %d bytes of metadata, and the file %d in all", n, s.limit)
	}
	s.head = make([]byte, int64(skip)+n)
	if _, err := io.ReadFull(s.r, s.head); err != nil {
		return fmt.Errorf("in the metadata of a message: %w", err)
	}
	if n == 0 {
		return nil // the mark of the end
	}
	meta := s.head[skip:]
	if err := verify(meta, &messageShape); err != nil {
		return err
	}
	if at := field(meta, root(meta), 3); at != 0 { // bodyLength
		s.body = max(0, int64(binary.LittleEndian.Uint64(meta[at:])))
	}
	return nil
}
