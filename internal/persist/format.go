// Package persist decides which batches outlive the process, describes them in files, and gives
// them back to the next engine.
//
// A volume with Config.Persist (package volumes) keeps each memory in a file of its own and can put
// a header behind it. It stores bytes without a meaning. This package writes the meaning, an Entry,
// into the header, and reads it again:
//
//	batch moves to the disk ──▶ Recorder ──Entry──▶ Volume.Persist     this engine
//	                                                     │ file
//	engine opens ◀── Found ◀──Entry── Schemas.Read ◀── Volume.Persisted  next engine
//	                   ├─ Adopt:  verify, make it a batch of this engine
//	                   └─ Forget: remove the file
//
//	Recorder   is called at every change of a batch, and keeps the files up to date
//	Found      what an earlier engine left, until it is adopted or forgotten
//	Entry      the description of a batch or a dictionary in its file
//	Inspect    lists the entries of a directory for tools, and takes nothing over
//
// Persistence is a property of the place, not of the batch: a batch persists while it has an image,
// current or clean, on such a disk. When the batch is dropped or its image freed, the volume
// removes the file. So nothing here has to delete the files of batches that end normally.
//
// A dictionary that batches share has a file of its own, which is written before the files of the
// batches that need it. Their entries list it by its key. Package volumes keeps the order of
// writing, so a reader always meets a dictionary before its users.
//
// The files outlive a killed process, because they are in the kernel's page cache. They are not
// synced: after a crash of the system a file may be incomplete, which its checksums show. Package
// volumes specifies the file around an entry, and encrypts both; docs/formats.md has the whole
// format.
//
// Locks: Recorder and Found each have a token, turn, which is held during I/O, and a mutex, under
// which nothing is called. Where both are needed, the token is taken first.
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

// Entry describes a batch or a dictionary in its file, so that another process can make an image of
// the file's memory. It is stored as JSON, in two parts: the meta, which never changes, and the
// place, which is rewritten when the batch moves to another operator.
//
// An entry that was read is input from outside. The file's checksums (package volumes) show that
// the bytes are those that were written. They do not show that a correct program wrote them. So
// fits checks every number that later code uses as a length or an index, and DecodeSchema bounds
// what arrow-go allocates.
type Entry struct {
	// ID is the batch's id in the engine that wrote the file. An adopted batch gets a new one.
	ID    batch.ID `json:"-"` // 0: a dictionary
	Place `json:"-"`
	// Dictionary is written so that the reader can tell a dictionary from a batch before it reads a
	// place, which a dictionary does not have.
	Dictionary bool
	// Descriptor is that of the plain image, also if the bytes are compressed. Its Schema,
	// Dictionaries and Metadata are not in its JSON: they are pointers, or types without a JSON
	// form. Read sets Schema and Metadata from the fields below. Batch.read sets Dictionaries from
	// the files that the keys name.
	Descriptor   *batch.Descriptor
	Dictionaries []uint64 // the keys of their files, in the order of Descriptor.Dictionaries
	Packed       bool
	Runs         []payload.Run // of a packed batch

	// The following are in JSON only; in memory they are in Descriptor, and nil here. Metadata has
	// bytes, not strings: encoding/json replaces invalid UTF-8 in strings, and Arrow's metadata may
	// have any bytes.
	Metadata [][2][]byte // keys and values; nil: the record has none
	Schema   []byte      // an Arrow IPC stream without batches
}

// Place is where a batch is in a plan.
type Place struct {
	Plan, Operator  string
	Port, Partition int
}

// filePlace is the place of a file in JSON. The id is here because the place, unlike the meta, is
// read only for batches.
type filePlace struct {
	ID batch.ID
	Place
}

// errFormat reports that an entry was written by another version, or contradicts itself.
var errFormat = errors.New("spillway: not a batch that this version reads")

// errSchema reports that a batch cannot persist, because its schema would not come back unchanged.
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
	// A stream without record batches is the smallest form that arrow-go reads back in full. IPC
	// drops some parts of a schema silently. Reading it back at once shows that while the batch can
	// still be refused; after a restart an adopted batch would not fit the plan that it came from.
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
	// The limits are for input from a file: arrow-go allocates the length that a message claims
	// before it reads the message. A schema's message is shorter than p, and it has no body.
	r, err := ipc.NewReader(bytes.NewReader(p), ipc.WithMetadataSizeLimit(int64(len(p))+1), ipc.WithBodySizeLimit(1))
	if err != nil {
		return nil, err
	}
	defer r.Release()
	return r.Schema(), nil
}

// meta returns the meta of e, with its schema as EncodeSchema writes it.
func (e *Entry) meta(schema []byte) []byte {
	// The copy shares all slices with e, and json only reads them.
	m := *e
	// A dictionary has no id of its own. Its identity is its key, which the volume derives from the
	// header.
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

// Schemas are the schemas that were read, by their IPC bytes. A directory may contain thousands of
// batches of one stream: they share one arrow.Schema. A Schemas is not safe for concurrent use.
type Schemas map[string]*arrow.Schema

// Read reads the meta and the place of a file. It returns an error that matches errFormat if they
// are not JSON or contradict themselves. The returned entry lacks Descriptor.Dictionaries. Read
// does not look at the file's body: only checksums show that the body has the described bytes.
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
	// The id and the flag are in different parts of the file. That they agree shows that the place
	// belongs to this meta.
	if d == nil || e.Dictionary != (e.ID == 0) || !e.fits() {
		return nil, errFormat
	}
	if d.Schema = s[string(e.Schema)]; d.Schema == nil {
		if d.Schema, err = DecodeSchema(e.Schema); err != nil {
			return nil, fmt.Errorf("%w: %w", errFormat, err)
		}
		s[string(e.Schema)] = d.Schema
	}
	// AdoptDictionary takes the type of the values from field 0.
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
	// Found keeps entries for as long as the engine is open. The raw bytes are not needed again.
	e.Metadata, e.Schema = nil, nil
	return e, nil
}

// fits reports whether the numbers in e are consistent, as far as code uses them before, or
// without, opening the record: to size buffers, to read ranges of the file and to index slices.
// Opening the record checks the arrays themselves.
func (e *Entry) fits() bool {
	d := e.Descriptor
	if b := d.Block; b != 0 && (b < tier.Page || b > payload.SumChunk || b&(b-1) != 0) {
		return false
	}
	runs := int64(0)
	if e.Packed {
		runs = (d.Body + payload.RunSize - 1) / payload.RunSize
	}
	// The bound of a quarter of the largest int64 lets later code add and round up lengths without
	// overflow.
	switch {
	case d.Rows < 0, d.Body < 0, d.Body%tier.Page != 0, d.Body > math.MaxInt64/4,
		int64(len(d.Sums)) != (d.Body+d.SumBlock()-1)/d.SumBlock(), int64(len(e.Runs)) != runs,
		e.ID == 0 && (e.Packed || d.Body == 0): // a dictionary that is an image of its own has bytes
		return false
	}
	// Every buffer is inside the body. The last comparison is written as a difference because the
	// sum of offset and length could overflow.
	for _, s := range d.Buffers {
		if s != payload.Absent && (s.Offset < 0 || s.Length < 0 || s.Offset > d.Body || s.Length > d.Body-s.Offset) {
			return false
		}
	}
	// Only a dictionary can extend another, and its base is its only dictionary.
	if d.From != nil && (e.ID != 0 || len(e.Dictionaries) != 1 || len(d.From) != len(d.Buffers)) {
		return false
	}
	for _, n := range d.From {
		if n < 0 || n > math.MaxInt64/4 {
			return false
		}
	}
	// A node outside has the number of a dictionary as its length.
	for _, n := range d.Nodes {
		if n.Nulls == payload.Outside && (n.Length < 0 || n.Length >= int64(len(e.Dictionaries))) {
			return false
		}
	}
	// The runs cover the body one after the other, RunSize bytes each except for the last. The
	// frames of a run cover it in the same way. A frame is never longer than what it encodes,
	// because one that would not shrink is stored as it is. So a run has at most RunSize stored
	// bytes, which check relies on.
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

// Stored returns the minimum length, in bytes, of the memory that e describes; 0 means that the
// batch has no memory, as one without rows. The memory may be longer: runs end on pages.
func (e *Entry) Stored() int64 {
	if !e.Packed {
		return e.Descriptor.Body
	}
	// Runs may be in any order in their memory.
	end := int64(0)
	for i := range e.Runs {
		end = max(end, e.Runs[i].Offset+e.Runs[i].Stored())
	}
	return end
}
