// Package persist is what survives a process, above the disk: which batches lie there, and where
// they stood.
//
//	Recorder   an observer of batches: makes each that comes to such a disk persist
//	Found      what an earlier engine left, until it is adopted or forgotten
//	Entry      the description of a batch or a dictionary in its file; format.go has its format
//
// The files are those of package volumes. A killed process loses no batch whose file was complete;
// a failure of the system may, and checksums find it.
package persist

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/ipc"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// Entry is what the header of a file says besides its memories, so that another process can open
// them as a batch or a dictionary.
type Entry struct {
	ID              batch.ID // 0: a dictionary
	Plan, Operator  string
	Port, Partition int
	Descriptor      *batch.Descriptor // without Dictionaries when it was read
	Dictionaries    []uint64          // the keys of their files, in the order of Descriptor.Dictionaries
	Packed          bool
	Runs            []payload.Run // of a packed batch
}

// The meta of a file: fixedMeta, then the items that it counts, and the schema, which is an Arrow IPC
// stream without batches. Each pair of the metadata is two texts: a text is its length, u32, and its
// bytes. The place of a file: fixedPlace, plan and operator as texts. All numbers are little-endian.
// The files have checksums (package volumes). These say nothing of what the writer meant: the lengths
// are checked here, and arrow-go gets a bound for the lengths in a schema.
type fixedMeta struct {
	Flags      uint32
	Rows, Body int64
	Block      uint32 // Descriptor.Block
	// How many there are. The schema is counted in bytes.
	Nodes, Buffers, Sums, Dictionaries, Runs, Metadata, Schema uint32
}

// fixedRun is a payload.Run without its frames. Those of all runs follow them.
type fixedRun struct {
	Offset int64
	Sum    uint64
	Codec  uint8
}

type fixedPlace struct {
	ID, Port, Partition int64
}

const (
	packed       = 1
	withMetadata = 2
	dictionary   = 4
	extension    = 8 // a dictionary with Descriptor.From: as many numbers as buffers, after Dictionaries
)

// errFormat: the file was written by another version, or it contradicts itself.
var errFormat = errors.New("spillway: not a batch that this version reads")

// errSchema: a batch cannot persist, because its schema would not come back as it is.
var errSchema = errors.New("spillway: the schema cannot be written as an Arrow IPC message")

// EncodeSchema returns a schema as an Arrow IPC message, which is refused with
// errSchema if it does not say all of it: dictionaries of dictionaries, for example, and
// extensions that are not registered.
func EncodeSchema(s *arrow.Schema) (_ []byte, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w: %w", errSchema, err)
		}
	}()
	defer guard.Error(&err, "convert: writing a schema")
	var b bytes.Buffer
	if err := ipc.NewWriter(&b, ipc.WithSchema(s)).Close(); err != nil {
		return nil, err
	}
	back, err := DecodeSchema(b.Bytes())
	if err != nil {
		return nil, err
	}
	return b.Bytes(), equal.Schemas(s, back)
}

// DecodeSchema reads what EncodeSchema has written.
func DecodeSchema(p []byte) (_ *arrow.Schema, err error) {
	defer guard.Error(&err, "convert: reading a schema")
	// A schema has no body, and its message is no longer than what is there.
	r, err := ipc.NewReader(bytes.NewReader(p), ipc.WithMetadataSizeLimit(int64(len(p))+1), ipc.WithBodySizeLimit(1))
	if err != nil {
		return nil, err
	}
	defer r.Release()
	return r.Schema(), nil
}

// meta returns the meta of e, with its schema as EncodeSchema writes it.
func (e *Entry) meta(schema []byte) []byte {
	d := e.Descriptor
	f := fixedMeta{
		Rows: d.Rows, Body: d.Body, Block: uint32(d.Block),
		Nodes: uint32(len(d.Nodes)), Buffers: uint32(len(d.Buffers)), Sums: uint32(len(d.Sums)),
		Dictionaries: uint32(len(e.Dictionaries)), Runs: uint32(len(e.Runs)), Schema: uint32(len(schema)),
	}
	if e.Packed {
		f.Flags |= packed
	}
	if e.ID == 0 {
		f.Flags |= dictionary
	}
	if d.From != nil {
		f.Flags |= extension
	}
	if d.Metadata != nil {
		f.Flags |= withMetadata
		f.Metadata = uint32(d.Metadata.Len())
	}
	var p []byte
	var runs []fixedRun
	var frames []uint32
	for i := range e.Runs {
		r := &e.Runs[i]
		runs, frames = append(runs, fixedRun{r.Offset, r.Sum, r.Codec}), append(frames, r.Frames...)
	}
	for _, part := range []any{f, d.Nodes, d.Buffers, d.Sums, e.Dictionaries, d.From, runs, frames} {
		p, _ = binary.Append(p, binary.LittleEndian, part) // all are of a fixed size
	}
	for i := range f.Metadata {
		p = appendText(appendText(p, d.Metadata.Keys()[i]), d.Metadata.Values()[i])
	}
	return append(p, schema...)
}

// place returns the place of e.
func (e *Entry) place() []byte {
	p, _ := binary.Append(nil, binary.LittleEndian, fixedPlace{int64(e.ID), int64(e.Port), int64(e.Partition)})
	return appendText(appendText(p, e.Plan), e.Operator)
}

func appendText(p []byte, s string) []byte {
	return append(binary.LittleEndian.AppendUint32(p, uint32(len(s))), s...)
}

// Schemas reads schemas, equal ones once. The zero value is ready. It is not safe for concurrent
// use.
type Schemas struct {
	known map[string]readSchema
}

type readSchema struct {
	schema *arrow.Schema
	err    error
}

func (s *Schemas) read(p []byte) (*arrow.Schema, error) {
	known, ok := s.known[string(p)]
	if !ok {
		known.schema, known.err = DecodeSchema(p)
		if s.known == nil {
			s.known = make(map[string]readSchema)
		}
		s.known[string(p)] = known
	}
	return known.schema, known.err
}

// Read reads the meta and the place of a file. Inconsistent input is errFormat. Only the checksums
// show that the memories contain what they should.
func (s *Schemas) Read(meta, place []byte) (*Entry, error) {
	r := reader{p: meta}
	f := one[fixedMeta](&r)
	d := &batch.Descriptor{Rows: f.Rows, Body: f.Body, Block: int64(f.Block)}
	if f.Block != 0 && (bits.OnesCount32(f.Block) != 1 || f.Block < tier.Page || f.Block > payload.SumChunk) {
		r.bad = true
	}
	e := &Entry{Descriptor: d, Packed: f.Flags&packed != 0}
	d.Nodes, d.Buffers = list[payload.Node](&r, f.Nodes), list[payload.Span](&r, f.Buffers)
	d.Sums, e.Dictionaries = list[uint64](&r, f.Sums), list[uint64](&r, f.Dictionaries)
	if f.Flags&extension != 0 {
		d.From = list[int64](&r, f.Buffers)
	}
	runs, left := list[fixedRun](&r, f.Runs), d.Body
	for _, run := range runs {
		n := (min(max(left, 0), payload.RunSize) + d.Frame() - 1) / d.Frame()
		e.Runs = append(e.Runs, payload.Run{
			Offset: run.Offset, Sum: run.Sum, Codec: run.Codec, Frames: list[uint32](&r, uint32(n)),
		})
		left -= payload.RunSize
	}
	if f.Flags&withMetadata != 0 {
		var keys, values []string
		for range min(f.Metadata, uint32(len(r.p))) {
			keys, values = append(keys, r.text()), append(values, r.text())
		}
		m := arrow.NewMetadata(keys, values)
		d.Metadata = &m
	}
	schema := list[byte](&r, f.Schema)
	if f.Flags&dictionary == 0 {
		r.bad = r.bad || len(r.p) > 0
		r.p = place
		at := one[fixedPlace](&r)
		e.ID, e.Port, e.Partition = batch.ID(at.ID), int(at.Port), int(at.Partition)
		e.Plan, e.Operator = r.text(), r.text()
	}
	known := f.Flags&^(packed|withMetadata|dictionary|extension) == 0 && (e.ID == 0) == (f.Flags&dictionary != 0)
	if r.bad || len(r.p) > 0 || !known || !e.fits() {
		return nil, errFormat
	}
	var err error
	if d.Schema, err = s.read(schema); err != nil {
		return nil, fmt.Errorf("%w: %w", errFormat, err)
	}
	if e.ID == 0 && d.Schema.NumFields() != 1 {
		return nil, errFormat
	}
	return e, nil
}

// fits reports whether the parts of e fit together, so far as others count on it before
// they open the batch: opening checks the rest.
func (e *Entry) fits() bool {
	d := e.Descriptor
	runs := int64(0)
	if e.Packed {
		runs = (d.Body + payload.RunSize - 1) / payload.RunSize
	}
	switch {
	case d.Rows < 0, d.Body < 0, d.Body%tier.Page != 0, d.Body > math.MaxInt64/4,
		int64(len(d.Sums)) != (d.Body+d.SumBlock()-1)/d.SumBlock(), int64(len(e.Runs)) != runs,
		e.ID == 0 && (e.Packed || d.Body == 0): // a dictionary that is an image of its own has bytes
		return false
	}
	for _, s := range d.Buffers {
		if s != payload.Absent && (s.Offset < 0 || s.Length < 0 || s.Offset > d.Body || s.Length > d.Body-s.Offset) {
			return false
		}
	}
	if d.From != nil && (e.ID != 0 || len(e.Dictionaries) != 1) {
		return false
	}
	for _, n := range d.From {
		if n < 0 || n > math.MaxInt64/4 {
			return false
		}
	}
	for _, n := range d.Nodes {
		if n.Nulls == payload.Outside && (n.Length < 0 || n.Length >= int64(len(e.Dictionaries))) {
			return false
		}
	}
	left := d.Body
	for i := range e.Runs {
		if at := e.Runs[i].Offset; at < 0 || at > math.MaxInt64/4 {
			return false
		}
		for _, f := range e.Runs[i].Frames {
			size := min(d.Frame(), left)
			if f == 0 || int64(f) > size {
				return false
			}
			left -= size
		}
	}
	return true
}

// Stored returns how many bytes the memory has at least that the batch lies in; 0: it has none.
func (e *Entry) Stored() int64 {
	if !e.Packed {
		return e.Descriptor.Body
	}
	end := int64(0)
	for i := range e.Runs {
		end = max(end, e.Runs[i].Offset+e.Runs[i].Stored())
	}
	return end
}

// reader takes bytes off the front. After the end all is zero, and bad is set.
type reader struct {
	p   []byte
	bad bool
}

func one[T any](r *reader) (item T) {
	if all := list[T](r, 1); len(all) == 1 {
		item = all[0]
	}
	return item
}

// list takes n items of a fixed size.
func list[T any](r *reader, n uint32) []T {
	size := uint64(n) * uint64(binary.Size(*new(T)))
	if size > uint64(len(r.p)) {
		r.bad, r.p = true, nil
		return nil
	}
	items := make([]T, n)
	_, err := binary.Decode(r.p[:size], binary.LittleEndian, items)
	r.bad = r.bad || err != nil
	r.p = r.p[size:]
	return items
}

func (r *reader) text() string { return string(list[byte](r, one[uint32](r))) }
