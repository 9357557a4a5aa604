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
	"encoding/json"
	"errors"
	"fmt"
	"math"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/ipc"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// Entry describes a batch or a dictionary in its file, so that another process can open the file's
// memory. The file has it in JSON, in two parts: the meta never changes, and the place does when
// the batch moves to another operator. Files have checksums (package volumes), which do not show
// what the writer meant: fits checks the lengths, and arrow-go gets a bound for those in a schema.
type Entry struct {
	ID           batch.ID `json:"-"` // 0: a dictionary
	Place        `json:"-"`
	Dictionary   bool
	Descriptor   *batch.Descriptor // in JSON without Schema, Dictionaries and Metadata; when read without Dictionaries
	Dictionaries []uint64          // the keys of their files, in the order of Descriptor.Dictionaries
	Packed       bool
	Runs         []payload.Run // of a packed batch

	// In JSON only.
	Metadata [][2][]byte // keys and values; nil: the record has none
	Schema   []byte      // an Arrow IPC stream without batches
}

// Place is where a batch is in a plan.
type Place struct {
	Plan, Operator  string
	Port, Partition int
}

// filePlace is the place of a file, in JSON.
type filePlace struct {
	ID batch.ID
	Place
}

// errFormat: the file was written by another version, or it contradicts itself.
var errFormat = errors.New("spillway: not a batch that this version reads")

// errSchema: a batch cannot persist, because its schema would not come back as it is.
var errSchema = errors.New("spillway: the schema cannot be written as an Arrow IPC message")

// EncodeSchema returns a schema as an Arrow IPC message, which is refused with
// errSchema if a message cannot express all of it: dictionaries of dictionaries, for example, and
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
	m := *e
	m.Dictionary, m.Schema = e.ID == 0, schema
	if all := e.Descriptor.Metadata; all != nil {
		m.Metadata = make([][2][]byte, all.Len())
		for i := range m.Metadata {
			m.Metadata[i] = [2][]byte{[]byte(all.Keys()[i]), []byte(all.Values()[i])}
		}
	}
	p, _ := json.Marshal(&m) // numbers, bytes and slices of them
	return p
}

// place returns the place of e.
func (e *Entry) place() []byte {
	p, _ := json.Marshal(filePlace{e.ID, e.Place})
	return p
}

// Schemas are the schemas that were read, so that equal ones are read once. It is not safe for
// concurrent use.
type Schemas map[string]*arrow.Schema

// Read reads the meta and the place of a file. Inconsistent input is errFormat. Only the checksums
// show that the memories contain what they should.
func (s Schemas) Read(meta, place []byte) (*Entry, error) {
	e, at := new(Entry), filePlace{}
	err := json.Unmarshal(meta, e)
	if err == nil && !e.Dictionary {
		err = json.Unmarshal(place, &at)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errFormat, err)
	}
	e.ID, e.Place = at.ID, at.Place
	d := e.Descriptor
	if d == nil || e.Dictionary != (e.ID == 0) || !e.fits() {
		return nil, errFormat
	}
	if d.Schema = s[string(e.Schema)]; d.Schema == nil {
		if d.Schema, err = DecodeSchema(e.Schema); err != nil {
			return nil, fmt.Errorf("%w: %w", errFormat, err)
		}
		s[string(e.Schema)] = d.Schema
	}
	if e.Dictionary && d.Schema.NumFields() != 1 {
		return nil, errFormat
	}
	if e.Metadata != nil {
		var keys, values []string
		for _, pair := range e.Metadata {
			keys, values = append(keys, string(pair[0])), append(values, string(pair[1]))
		}
		all := arrow.NewMetadata(keys, values)
		d.Metadata = &all
	}
	e.Metadata, e.Schema = nil, nil
	return e, nil
}

// fits reports whether the parts of e fit together, so far as others count on it before
// they open the batch: opening checks the rest.
func (e *Entry) fits() bool {
	d := e.Descriptor
	if b := d.Block; b != 0 && (b < tier.Page || b > payload.SumChunk || b&(b-1) != 0) {
		return false
	}
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
	if d.From != nil && (e.ID != 0 || len(e.Dictionaries) != 1 || len(d.From) != len(d.Buffers)) {
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
		run := min(payload.RunSize, left)
		left -= run
		for _, f := range e.Runs[i].Frames {
			size := min(d.Frame(), run)
			if f == 0 || int64(f) > size {
				return false
			}
			run -= size
		}
		if run > 0 {
			return false
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
