package trace

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"time"
)

// Trace is what was recorded.
type Trace struct {
	Header
	Events []Event // by time
	Lost   int64   // events that are missing
	CutOff bool    // the end of the file is missing, or damaged
}

// What is read at most, so that damaged bytes cannot ask for all memory.
const (
	mostHeader = 1 << 20
	mostChunk  = 1 << 20
)

// Read reads a trace up to its end, or up to where it was cut off. An error that matches ErrFormat
// says that there is no whole header; others are the reader's.
func Read(from io.Reader) (*Trace, error) {
	r := bufio.NewReader(from)
	var line [len(magic)]byte
	n, err := io.ReadFull(r, line[:])
	if err != nil && !ended(err) {
		return nil, err
	}
	if begin := line[:n]; string(begin) != magic {
		return nil, fmt.Errorf("%w: it begins with %q, want %q", ErrFormat, begin, magic)
	}
	head, err := block(r, mostHeader, false)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFormat, err)
	}
	t := new(Trace)
	if err := json.Unmarshal(head, &t.Header); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFormat, err)
	}
	for !t.CutOff {
		chunk, err := block(r, mostChunk, true)
		switch {
		case err == io.EOF:
			return t, nil
		case errors.Is(err, errDamaged) || ended(err):
			t.CutOff = true
		case err != nil:
			return nil, err
		default:
			t.CutOff = !t.add(chunk)
		}
	}
	return t, nil
}

func ended(err error) bool { return err == io.EOF || err == io.ErrUnexpectedEOF }

var errDamaged = errors.New("damaged")

// block reads a length, a checksum if it has one, and so many bytes. io.EOF is an end before it.
func block(r *bufio.Reader, most uint64, summed bool) ([]byte, error) {
	n, err := binary.ReadUvarint(r)
	if err != nil && !ended(err) {
		err = errDamaged // too long a number
	}
	if err == nil && n > most {
		err = errDamaged
	}
	if err != nil {
		return nil, err
	}
	var sum [4]byte
	if summed {
		if _, err := io.ReadFull(r, sum[:]); err != nil {
			return nil, unexpected(err)
		}
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return nil, unexpected(err)
	}
	if summed && crc32.ChecksumIEEE(b) != binary.LittleEndian.Uint32(sum[:]) {
		return nil, errDamaged
	}
	return b, nil
}

func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// add adds the events of a chunk, and reports whether all of it could be read.
func (t *Trace) add(chunk []byte) bool {
	d := decoder{left: chunk}
	at := time.Duration(0)
	for len(d.left) > 0 {
		e := d.event()
		if at += e.At; d.bad || at < 0 {
			return false
		}
		e.At = at
		if e.Kind == Lost {
			t.Lost += e.Bytes
			continue
		}
		t.Events = append(t.Events, e)
	}
	return true
}
