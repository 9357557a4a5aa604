package input

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math"

	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
)

const (
	continuation = 0xffffffff // before the length of a message's metadata since format 0.15
	bufferSize   = 1 << 20    // of readers

	// maxExpansion is how many times as large as compressed bytes the memory may be that is
	// allocated ahead of the decompressed ones.
	maxExpansion = 16

	// minWindow is the history, in bytes, that a zstd decoder may keep of any buffer. RFC 8878 asks
	// encoders not to need more. Of a large buffer it may keep maxExpansion times its bytes.
	minWindow = 8 << 20
)

// messages reads the messages of an IPC stream or file one by one; it is an ipc.MessageReader.
//
// It trusts no number in a message. Metadata, a body and each buffer in it must lie within what is
// left of the file. Memory for what a pipe or a compressed buffer declares grows with the bytes that
// arrive. A batch must have the field nodes and buffers that arrow-go takes from it without
// counting, and the bytes for its rows.
//
// Message decompresses buffers itself, because arrow-go allocates the declared length first. It
// passes them on in the form that Arrow has for buffers of a compressed body that are stored as they
// are: behind a length of -1.
//
// A message is valid until the next call of Message. Buffers of its body may be retained.
type messages struct {
	r     *bufio.Reader
	start int64 // offset of the last message
	at    int64 // offset of the next byte of r
	end   int64 // offset of the end of the bytes, or of the message in a file
	piped bool  // end is not known
	mem   *limitedAllocator

	file   io.ReaderAt    // nil for a stream
	blocks []block        // the messages of file that are left
	ids    map[int64]bool // the dictionaries of file that were read

	layout *layout // of the stream's schema; nil before that
	held   []byte  // metadata of a schema message that begins the next stream; usually nil
	last   *ipc.Message

	zstd *zstd.Decoder
	lz4  *lz4.Reader
}

// block is the place of a message in a file.
type block struct{ at, end int64 }

// Retain does nothing: the arrowReader owns the messages.
func (m *messages) Retain() {}

// Release does nothing.
func (m *messages) Release() {}

func (m *messages) close() {
	m.drop()
	if m.zstd != nil {
		m.zstd.Close()
	}
}

// drop releases the last message.
func (m *messages) drop() {
	if m.last != nil {
		m.last.Release()
		m.last = nil
	}
}

// another reports whether another stream follows the one that has ended, and begins it.
func (m *messages) another() (bool, error) {
	m.layout = nil
	if m.held != nil {
		return true, nil
	}
	if m.file != nil {
		return false, nil
	}
	m.start = m.at
	_, err := m.r.Peek(1)
	if err == io.EOF {
		return false, nil
	}
	return err == nil, err
}

// Message reads the next message. It returns io.EOF at the end of a stream.
func (m *messages) Message() (*ipc.Message, error) {
	m.drop()
	if m.held == nil && m.file != nil {
		if len(m.blocks) == 0 {
			return nil, io.EOF
		}
		b := m.blocks[0]
		m.blocks = m.blocks[1:]
		m.r.Reset(io.NewSectionReader(m.file, b.at, b.end-b.at))
		m.at, m.end = b.at, b.end
	}
	msg, err := m.message()
	if err != nil && err != io.EOF {
		err = fmt.Errorf("the message at byte %d: %w", m.start, err)
	}
	m.last = msg
	return msg, err
}

func (m *messages) message() (*ipc.Message, error) {
	meta, err := m.metadata()
	if err != nil {
		return nil, err
	}
	h, err := readHeader(meta)
	if err != nil {
		return nil, err
	}
	if h.kind == schemaHeader {
		if m.layout != nil { // the stream ends without a mark
			m.held = meta
			return nil, io.EOF
		}
		m.layout = h.schema
	}
	body, err := m.body(h.bodyLength)
	if err != nil {
		return nil, err
	}
	defer func() { body.Release() }()
	if m.file != nil && h.kind != schemaHeader && m.at != m.end {
		return nil, fmt.Errorf("it ends at byte %d, and by the footer at byte %d", m.at, m.end)
	}
	if m.file != nil && h.kind == dictionaryHeader && !h.delta {
		// A footer does not give the order of dictionaries and batches.
		if m.ids[h.dictionary] {
			return nil, fmt.Errorf("dictionary %d is replaced by another one, which is not supported in a file", h.dictionary)
		}
		m.ids[h.dictionary] = true
	}
	if m.layout != nil && (h.kind == dictionaryHeader || h.kind == batchHeader) {
		plain, err := m.plain(h, body)
		if err != nil {
			return nil, err
		}
		body.Release()
		body = plain
		if err := m.layout.check(h); err != nil {
			return nil, err
		}
	}
	return ipc.NewMessage(memory.NewBufferBytes(meta), body), nil
}

// metadata reads the next message up to its body.
func (m *messages) metadata() ([]byte, error) {
	if meta := m.held; meta != nil {
		m.held = nil
		return meta, nil
	}
	m.start = m.at
	n, err := m.uint32()
	if err == nil && n == continuation {
		n, err = m.uint32()
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
	}
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, io.EOF // the mark of the end
	}
	if left := m.end - m.at; int64(n) > min(left, math.MaxInt32) {
		return nil, fmt.Errorf("it declares %d bytes of metadata, and %s", n, m.left())
	}
	var meta bytes.Buffer
	got, err := io.CopyN(&meta, m.r, int64(n)) // grows as the bytes come
	m.at += got
	if err != nil {
		return nil, unexpected(err)
	}
	return meta.Bytes(), nil
}

// left formats the number of bytes that a message could have.
func (m *messages) left() string {
	if m.piped {
		return "no message has so many"
	}
	return fmt.Sprintf("%d bytes are left", m.end-m.at)
}

func (m *messages) uint32() (uint32, error) {
	var b [4]byte
	n, err := io.ReadFull(m.r, b[:])
	m.at += int64(n)
	return binary.LittleEndian.Uint32(b[:]), err
}

// body reads n bytes.
func (m *messages) body(n int64) (*memory.Buffer, error) {
	if n < 0 || n > m.end-m.at {
		return nil, fmt.Errorf("it declares a body of %d bytes, and %s", n, m.left())
	}
	b := memory.NewResizableBuffer(m.mem)
	if !m.piped {
		b.Reserve(int(n))
	}
	if err := fill(b, m.r, n); err != nil {
		b.Release()
		return nil, err
	}
	m.at += n
	return b, nil
}

// fill appends n bytes of r to b. It doubles b as bytes arrive, if there is not enough room.
func fill(b *memory.Buffer, r io.Reader, n int64) error {
	for n > 0 {
		have := b.Len()
		room := b.Cap() - have
		if room == 0 {
			room = max(have, bufferSize)
		}
		b.ResizeNoShrink(have + int(min(n, int64(room))))
		got, err := io.ReadFull(r, b.Bytes()[have:])
		if err != nil {
			return unexpected(err)
		}
		n -= int64(got)
	}
	return nil
}

// unexpected returns io.ErrUnexpectedEOF for io.EOF.
func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// plain checks that each buffer of a batch lies within its body, and returns the body. If the body
// is compressed, plain returns one with decompressed buffers and changes the metadata to match.
func (m *messages) plain(h header, body *memory.Buffer) (*memory.Buffer, error) {
	declared := int64(0)
	for b := h.buffers; len(b) > 0; b = b[16:] {
		at, n := int64(binary.LittleEndian.Uint64(b)), int64(binary.LittleEndian.Uint64(b[8:]))
		if n == 0 {
			continue // arrow-go doesn't read its offset
		}
		if size := int64(body.Len()); at < 0 || n < 0 || at > size || n > size-at {
			return nil, fmt.Errorf("it has a buffer of %d bytes at byte %d of a body of %d", n, at, size)
		}
		if h.compressed {
			if n < 8 {
				return nil, fmt.Errorf("it has a compressed buffer of %d bytes, which is too short for a length", n)
			}
			declared += max(0, int64(binary.LittleEndian.Uint64(body.Bytes()[at:])))
		}
	}
	if !h.compressed {
		body.Retain()
		return body, nil
	}
	out := memory.NewResizableBuffer(m.mem)
	if declared >= 0 { // no overflow
		out.Reserve(int(min(declared, maxExpansion*int64(body.Len()))))
	}
	for b := h.buffers; len(b) > 0; b = b[16:] {
		at, n := binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:])
		if n == 0 {
			continue
		}
		start, err := m.appendPlain(out, h.codec, body.Bytes()[at:at+n])
		if err != nil {
			out.Release()
			return nil, err
		}
		binary.LittleEndian.PutUint64(b, uint64(start))
		binary.LittleEndian.PutUint64(b[8:], uint64(out.Len()-start))
	}
	return out, nil
}

// appendPlain appends a decompressed buffer to out, behind a length of -1, and returns where that
// begins. compressed is the decompressed length and the compressed bytes.
func (m *messages) appendPlain(out *memory.Buffer, codec byte, compressed []byte) (start int, err error) {
	const stored = -1 // the length of a buffer that is not compressed
	n := int64(binary.LittleEndian.Uint64(compressed))
	compressed = compressed[8:]
	// The bytes behind the length are aligned to 64 bytes, which Arrow recommends.
	start = (out.Len()+8+63)/64*64 - 8
	out.ResizeNoShrink(start + 8)
	binary.LittleEndian.PutUint64(out.Bytes()[start:], math.MaxUint64) // stored
	switch {
	case n == stored:
		return start, fill(out, bytes.NewReader(compressed), int64(len(compressed)))
	case n < 0:
		return start, fmt.Errorf("it has a compressed buffer of %d bytes when decompressed", n)
	}
	r, err := m.decompressor(codec, compressed)
	if err == nil {
		err = fill(out, r, n)
	}
	if err != nil {
		err = fmt.Errorf("it has a compressed buffer that is not the %d bytes that it declares: %w", n, err)
	}
	return start, err
}

func (m *messages) decompressor(codec byte, compressed []byte) (io.Reader, error) {
	const lz4Frame, zstdFrame = 0, 1
	r := bytes.NewReader(compressed)
	switch codec {
	case lz4Frame:
		if m.lz4 == nil {
			m.lz4 = lz4.NewReader(nil)
		}
		m.lz4.Reset(r)
		return m.lz4, nil
	case zstdFrame:
		window := zstd.WithDecoderMaxWindow(uint64(max(minWindow, maxExpansion*len(compressed))))
		if m.zstd == nil {
			var err error
			if m.zstd, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true)); err != nil {
				return nil, err
			}
		}
		return m.zstd, m.zstd.ResetWithOptions(r, window)
	}
	return nil, fmt.Errorf("codec %d is not supported", codec)
}
