// Package persist is what survives a process, above the disk: which batches lie there, and where
// they stood.
//
//	Recorder   an observer of batches: writes a record of each that comes to such a disk
//	Found      what an earlier engine has recorded, until it is adopted or forgotten
//	Entry      what a record says of a batch or of a dictionary; format.go has its format
//
// A volume orders a record and the use of its room (package disk). A killed process loses no batch
// whose record was written; a failure of the system may, and checksums find it.
package persist

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// Entry is what is recorded beside the bytes of a batch on disk, or of a dictionary, so that
// another process can open them.
type Entry struct {
	ID              batch.ID // 0: a dictionary
	Plan, Operator  string
	Port, Partition int
	Descriptor      *batch.Descriptor // without Dictionaries when it was read
	Dictionaries    []uint64          // the keys of their records, in their place
	Packed          bool
	Runs            []payload.Run // of a packed batch; without their buffers when it was read
}

// The format, of which all numbers are little-endian: "SPB2", then
//
//	flags u32 (1: packed, 2: metadata) · id u64 · port i64 · partition i64 · plan · operator
//	rows i64 · body i64 · nodes, of length i64 and nulls i64 · buffers, of offset i64 and length i64
//	sums, of u64 · dictionaries, of a key u64
//	runs, of codec u64, sum u64 and four lengths of frames u32
//	the record's metadata, by pairs of strings
//	xxh3-64 of the schema u64
//
// A string is its length, u64, and its bytes; a list its length, u64, and its items. The
// schema, an Arrow IPC stream without batches, is recorded beside, once for all that have it. The
// manifest's frames have checksums. The schema has one here, too: it must be this batch's, and
// arrow-go believes the lengths in it, and takes as much memory as they say.
const magic = "SPB2"

const (
	packed       = 1
	withMetadata = 2
)

// errFormat: what was recorded was written by another version, or is not what it says.
var errFormat = errors.New("spillway: not a recorded batch that this version reads")

// errSchema: a batch cannot be recorded, because its schema would not come back as it is.
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

// Marshal writes e; schema is its descriptor's, as EncodeSchema writes it, and must be
// recorded beside.
func (e *Entry) Marshal(schema []byte) []byte {
	d := e.Descriptor
	flags := uint32(0)
	if e.Packed {
		flags |= packed
	}
	if d.Metadata != nil {
		flags |= withMetadata
	}
	size := 256 + len(e.Plan) + len(e.Operator) + 16*(len(d.Nodes)+len(d.Buffers)) + 8*(len(d.Sums)+len(e.Dictionaries)) + 32*len(e.Runs)
	p := append(make([]byte, 0, size), magic...)
	p = binary.LittleEndian.AppendUint32(p, flags)
	number := func(n int64) { p = binary.LittleEndian.AppendUint64(p, uint64(n)) }
	text := func(s string) { number(int64(len(s))); p = append(p, s...) }
	number(int64(e.ID))
	number(int64(e.Port))
	number(int64(e.Partition))
	text(e.Plan)
	text(e.Operator)
	number(d.Rows)
	number(d.Body)
	number(int64(len(d.Nodes)))
	for _, n := range d.Nodes {
		number(n.Length)
		number(n.Nulls)
	}
	number(int64(len(d.Buffers)))
	for _, s := range d.Buffers {
		number(s.Offset)
		number(s.Length)
	}
	number(int64(len(d.Sums)))
	for _, s := range d.Sums {
		number(int64(s))
	}
	number(int64(len(e.Dictionaries)))
	for _, key := range e.Dictionaries {
		number(int64(key))
	}
	number(int64(len(e.Runs)))
	for i := range e.Runs {
		r := &e.Runs[i]
		number(int64(r.Codec))
		number(int64(r.Sum))
		for _, f := range r.Frames {
			p = binary.LittleEndian.AppendUint32(p, f)
		}
	}
	if d.Metadata != nil {
		number(int64(d.Metadata.Len()))
		for i, key := range d.Metadata.Keys() {
			text(key)
			text(d.Metadata.Values()[i])
		}
	}
	return binary.LittleEndian.AppendUint64(p, xxh3.Hash(schema))
}

// Schemas reads schemas as EncodeSchema writes them, each once. The zero value is ready. It is
// not safe for concurrent use.
type Schemas struct {
	schemas map[schemaPlace]readSchema
}

// schemaPlace is where a schema lies.
type schemaPlace struct {
	at *byte
	n  int
}

type readSchema struct {
	schema *arrow.Schema
	sum    uint64
	err    error
}

// read returns the schema that p says. p must not change while s is used.
func (s *Schemas) read(p []byte, sum uint64) (*arrow.Schema, error) {
	if len(p) == 0 {
		return nil, errors.New("there is no schema")
	}
	place := schemaPlace{&p[0], len(p)}
	known, ok := s.schemas[place]
	if !ok {
		known.sum = xxh3.Hash(p)
	}
	if known.sum != sum {
		return nil, errors.New("it has another schema")
	}
	if !ok {
		known.schema, known.err = DecodeSchema(p)
		if s.schemas == nil {
			s.schemas = make(map[schemaPlace]readSchema)
		}
		s.schemas[place] = known
	}
	return known.schema, known.err
}

// Unmarshal reads what Marshal has written, and the schema beside it. s keeps the result: the bytes
// must not change, and batches of the same bytes in the same memory share it. Inconsistent input is
// errFormat. Only the checksums show that the bytes on disk fit it.
func (s *Schemas) Unmarshal(p, schema []byte) (*Entry, error) {
	r := reader{p: p}
	if string(r.take(4)) != magic {
		return nil, errFormat
	}
	k := &Entry{Descriptor: new(batch.Descriptor)}
	d := k.Descriptor
	flags := r.word()
	k.ID = batch.ID(r.number())
	k.Port, k.Partition = int(r.number()), int(r.number())
	k.Plan, k.Operator = r.text(), r.text()
	d.Rows, d.Body = r.number(), r.number()
	d.Nodes = make([]payload.Node, r.count(16))
	for i := range d.Nodes {
		d.Nodes[i] = payload.Node{Length: r.number(), Nulls: r.number()}
	}
	d.Buffers = make([]payload.Span, r.count(16))
	for i := range d.Buffers {
		d.Buffers[i] = payload.Span{Offset: r.number(), Length: r.number()}
	}
	d.Sums = make([]uint64, r.count(8))
	for i := range d.Sums {
		d.Sums[i] = uint64(r.number())
	}
	k.Dictionaries = make([]uint64, r.count(8))
	for i := range k.Dictionaries {
		k.Dictionaries[i] = uint64(r.number())
	}
	const run = 16 + 4*payload.RunSize/payload.FrameSize
	k.Runs = make([]payload.Run, r.count(run))
	for i := range k.Runs {
		codec := r.number()
		k.Runs[i].Codec, k.Runs[i].Sum = uint8(codec), uint64(r.number())
		r.bad = r.bad || codec < 0 || codec > math.MaxUint8
		for j := range k.Runs[i].Frames {
			k.Runs[i].Frames[j] = r.word()
		}
	}
	k.Packed = flags&packed != 0
	if flags&withMetadata != 0 {
		keys := make([]string, r.count(16))
		values := make([]string, len(keys))
		for i := range keys {
			keys[i], values[i] = r.text(), r.text()
		}
		m := arrow.NewMetadata(keys, values)
		d.Metadata = &m
	}
	sum := uint64(r.number())
	if r.bad || len(r.p) > 0 || flags&^(packed|withMetadata) != 0 || !k.fits() {
		return nil, errFormat
	}
	var err error
	if d.Schema, err = s.read(schema, sum); err != nil {
		return nil, fmt.Errorf("%w: %w", errFormat, err)
	}
	if k.ID == 0 && d.Schema.NumFields() != 1 {
		return nil, errFormat
	}
	return k, nil
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
		int64(len(d.Sums)) != (d.Body+payload.SumChunk-1)/payload.SumChunk, int64(len(e.Runs)) != runs,
		e.ID == 0 && (e.Packed || d.Body == 0): // a dictionary that is an image of its own has bytes
		return false
	}
	for _, s := range d.Buffers {
		if s != payload.Absent && (s.Offset < 0 || s.Length < 0 || s.Offset > d.Body || s.Length > d.Body-s.Offset) {
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
		for _, f := range e.Runs[i].Frames {
			size := min(payload.FrameSize, left)
			if int64(f) > size || (f == 0) != (size == 0) {
				return false
			}
			left -= size
		}
	}
	return true
}

// Memories returns how long each of the memories is that the batch lies in, in order;
// packed ones are at least so long.
func (e *Entry) Memories() (sizes []int64) {
	if !e.Packed && e.Descriptor.Body > 0 {
		return []int64{e.Descriptor.Body}
	}
	for i := range e.Runs {
		sizes = append(sizes, e.Runs[i].Stored())
	}
	return sizes
}

// reader takes bytes off the front. After the end all is zero, and bad is set.
type reader struct {
	p   []byte
	bad bool
}

func (r *reader) take(n uint64) []byte {
	if n > uint64(len(r.p)) {
		r.bad, r.p = true, nil
		return make([]byte, min(n, 8))
	}
	out := r.p[:n]
	r.p = r.p[n:]
	return out
}

func (r *reader) number() int64 { return int64(binary.LittleEndian.Uint64(r.take(8))) }
func (r *reader) word() uint32  { return binary.LittleEndian.Uint32(r.take(4)) }

func (r *reader) text() string {
	n := uint64(r.number())
	if n > uint64(len(r.p)) {
		r.bad, r.p = true, nil
		return ""
	}
	return string(r.take(n))
}

// count takes the length of a list whose items have so many bytes each.
func (r *reader) count(each uint64) int {
	n := uint64(r.number())
	if n > uint64(len(r.p))/each {
		r.bad, r.p = true, nil
		return 0
	}
	return int(n)
}
