package input

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
)

const (
	continuation = 0xffffffff // before the length of a message's metadata since format 0.15
	bufferSize   = 1 << 20    // of readers

	// maxExpansion limits the memory that is allocated before decompression, as a multiple of the
	// compressed bytes.
	maxExpansion = 16

	// minWindow is the window, in bytes, that a zstd decoder accepts for every buffer. RFC 8878 asks
	// encoders not to need more. For large buffers the limit is maxExpansion times their compressed
	// bytes.
	minWindow = 8 << 20
)

// messages reads the messages of an IPC stream one by one; it is an ipc.MessageReader.
//
// It trusts no number in a message. Metadata, bodies and buffers must fit into the rest of the file.
// For the lengths that a pipe or a compressed buffer declares, it allocates memory only as bytes
// arrive. A batch must have the field nodes and buffers that arrow-go reads without counting them, and
// the bytes for its rows.
//
// Message decompresses buffers itself, because arrow-go allocates the declared length first. It
// passes them on in the form that Arrow has for buffers of a compressed body that are stored as they
// are: behind a length of -1.
//
// Messages are on the Go heap and need no Release.
type messages struct {
	r     *bufio.Reader
	start int64 // offset of the last message
	at    int64 // offset of the next byte of r
	end   int64 // offset of the end of the bytes; pipeSize if it is not known
	mem   *limitedAllocator

	// Of a file; nil and 0 for a stream.
	file   io.ReaderAt
	places []int64 // offsets of the messages that were not read yet
	last   int64   // the largest offset that a message has reached
	ids    []int64 // of the dictionaries that were read

	layout *layout        // of the stream's batches; nil before its schema
	held   *memory.Buffer // metadata of a schema message that begins the file or the next stream; usually nil

	zstd *zstd.Decoder
	lz4  *lz4.Reader
}

// Retain does nothing: the garbage collector frees messages.
func (m *messages) Retain() {}

// Release does nothing.
func (m *messages) Release() {}

// Message reads the next message. It returns io.EOF at the end of a stream.
func (m *messages) Message() (msg *ipc.Message, err error) {
	defer func() {
		if err != nil && err != io.EOF {
			err = fmt.Errorf("the message at byte %d: %w", m.start, err)
		}
	}()
	meta, err := m.metadata()
	if err != nil {
		return nil, err
	}
	var h header
	if err := verify(meta.Bytes(), h.read); err != nil {
		return nil, err
	}
	if h.kind == schemaHeader {
		switch {
		case m.layout == nil:
			m.layout = &layout{header: h}
		case m.file != nil:
			return nil, errMetadata
		default: // the stream ends without a mark
			m.held = meta
			return nil, io.EOF
		}
	}
	body, err := m.take("a body of %d bytes", h.bodyLength)
	if err != nil {
		return nil, err
	}
	m.last = max(m.last, m.at)
	if m.layout != nil && (h.kind == dictionaryHeader || h.kind == batchHeader) {
		if body, err = m.plain(h, body); err == nil {
			err = m.layout.check(h)
		}
		if err != nil {
			return nil, err
		}
	}
	if m.file != nil && h.kind == dictionaryHeader && !h.delta {
		if slices.Contains(m.ids, h.dictionary) { // all batches would get the last one
			return nil, fmt.Errorf("dictionary %d is replaced by another one, which is not supported in a file",
				h.dictionary)
		}
		m.ids = append(m.ids, h.dictionary)
	}
	return ipc.NewMessage(meta, body), nil
}

// metadata reads the next message up to its body. It returns io.EOF at the end of a stream.
func (m *messages) metadata() (*memory.Buffer, error) {
	if meta := m.held; meta != nil {
		m.held = nil
		return meta, nil
	}
	if m.file != nil {
		if err := m.seek(); err != nil {
			return nil, err
		}
	}
	m.start = m.at
	var n uint32
	err := binary.Read(m, le, &n)
	if n == continuation {
		if err = binary.Read(m, le, &n); err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
	}
	if err == nil && n == 0 {
		err = io.EOF // the mark of the end
	}
	if err == io.EOF && m.file != nil {
		err = errMetadata
	}
	if err != nil {
		return nil, err
	}
	return m.take("%d bytes of metadata", int64(n))
}

// seek goes to the next message of a file. It returns io.EOF behind the last one.
func (m *messages) seek() error {
	if len(m.places) == 0 {
		return io.EOF
	}
	at := m.places[0]
	m.places = m.places[1:]
	if at < 0 || at >= m.end {
		return errMetadata
	}
	if skip := at - m.at; skip >= 0 && skip <= int64(m.r.Buffered()) {
		_, _ = m.r.Discard(int(skip)) // it cannot fail
	} else {
		m.r.Reset(io.NewSectionReader(m.file, at, m.end-at))
	}
	m.at = at
	return nil
}

// Read reads the next bytes.
func (m *messages) Read(p []byte) (int, error) {
	n, err := m.r.Read(p)
	m.at += int64(n)
	return n, err
}

// take reads n bytes, which errors describe by the format what.
func (m *messages) take(what string, n int64) (*memory.Buffer, error) {
	if left := m.end - m.at; n < 0 || n > left {
		return nil, fmt.Errorf("it declares %s, and at most %d can follow", fmt.Sprintf(what, n), left)
	}
	b := memory.NewResizableBuffer(m.mem)
	if m.end != pipeSize {
		b.Reserve(int(n))
	}
	return b, fill(b, m, n)
}

// fill appends n bytes of r to b. It at most doubles b before bytes arrive, if there is not enough
// room.
func fill(b *memory.Buffer, r io.Reader, n int64) error {
	for n > 0 {
		have := b.Len()
		step := min(n, int64(max(b.Cap()-have, have, bufferSize)))
		b.ResizeNoShrink(have + int(step))
		if _, err := io.ReadFull(r, b.Bytes()[have:]); err == io.EOF {
			return io.ErrUnexpectedEOF
		} else if err != nil {
			return err
		}
		n -= step
	}
	return nil
}

// plain checks that each buffer of a batch lies within its body, and returns the body. If the body
// is compressed, plain returns one with decompressed buffers and changes the metadata to match.
func (m *messages) plain(h header, body *memory.Buffer) (*memory.Buffer, error) {
	declared, size := int64(0), int64(body.Len())
	for b := range slices.Chunk(h.buffers, 2) {
		switch at, n := b[0], b[1]; {
		case n == 0: // arrow-go doesn't read its offset
		case at < 0 || n < 0 || at > size || n > size-at:
			return nil, fmt.Errorf("it has a buffer of %d bytes at byte %d of a body of %d", n, at, size)
		case h.compressed && n < 8:
			return nil, fmt.Errorf("it has a compressed buffer of %d bytes, which is too short for a length", n)
		case h.compressed:
			declared += max(0, int64(le.Uint64(body.Bytes()[at:])))
		}
	}
	if !h.compressed {
		return body, nil
	}
	out := memory.NewResizableBuffer(m.mem)
	if declared >= 0 { // no overflow
		out.Reserve(int(min(declared, maxExpansion*size)))
	}
	for b := range slices.Chunk(h.buffers, 2) {
		at, n := b[0], b[1]
		if n == 0 {
			continue
		}
		// The bytes behind the length are aligned to 64 bytes, which Arrow recommends.
		start := (out.Len()+8+63)/64*64 - 8
		out.ResizeNoShrink(start + 8)
		le.PutUint64(out.Bytes()[start:], math.MaxUint64) // a length of -1
		if err := m.decompress(out, h.codec, body.Bytes()[at:at+n]); err != nil {
			return nil, err
		}
		b[0], b[1] = int64(start), int64(out.Len()-start)
	}
	return out, nil
}

// decompress appends a decompressed buffer to out. compressed is the decompressed length, or -1 if
// the buffer is stored as it is, and the compressed bytes.
func (m *messages) decompress(out *memory.Buffer, codec byte, compressed []byte) (err error) {
	const lz4Frame, zstdFrame = 0, 1
	n := int64(le.Uint64(compressed))
	compressed = compressed[8:]
	src := bytes.NewReader(compressed)
	var r io.Reader
	switch {
	case n == -1:
		r, n = src, src.Size()
	case codec == lz4Frame:
		if m.lz4 == nil {
			m.lz4 = lz4.NewReader(nil)
		}
		m.lz4.Reset(src)
		r = m.lz4
	case codec == zstdFrame:
		if m.zstd == nil { // with a concurrency of 1 it has no goroutines, and needs no Close
			m.zstd, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true))
		}
		if window := max(minWindow, maxExpansion*len(compressed)); err == nil {
			err = m.zstd.ResetWithOptions(src, zstd.WithDecoderMaxWindow(uint64(window)))
		}
		r = m.zstd
	default:
		return fmt.Errorf("codec %d is not supported", codec)
	}
	if err == nil {
		err = fill(out, r, n)
	}
	if err != nil {
		err = fmt.Errorf("it has a compressed buffer that is not the %d bytes that it declares: %w", n, err)
	}
	return err
}
