package input

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"math"

	"github.com/apache/arrow-go/v18/arrow"
)

// arrow-go reads the flatbuffers of Arrow IPC metadata without verifying them. It allocates the
// declared length of a vector, and a Go program doesn't survive the allocation of more memory than
// the machine has. So this package first reads each table and vector that arrow-go will read. The
// numbers of slots and types are those of Arrow's Message.fbs, Schema.fbs and File.fbs.

var (
	errMetadata = errors.New("its metadata is inconsistent")
	le          = binary.LittleEndian
)

// inconsistent is deferred by functions that read tables: it makes their panics errMetadata.
func inconsistent(err *error) {
	if recover() != nil {
		*err = errMetadata
	}
}

// table is a table of a flatbuffer. Its methods panic instead of reading outside the buffer.
type table struct {
	b  []byte
	at int
	// left is how many tables of vectors may still be read. Vectors can share tables, and so
	// the number of tables that a reader visits may grow exponentially with their depth.
	left *int
}

// root returns the root table of a flatbuffer.
func root(b []byte) table {
	left := len(b) / 4
	return table{b, 0, &left}.follow(0)
}

// follow returns the table that the offset at pos leads to.
func (t table) follow(pos int) table {
	return table{t.b, pos + int(le.Uint32(t.b[pos:])), t.left}
}

// slot returns the position of a slot's content, or 0 if the slot is absent.
func (t table) slot(index int) int {
	vtable := t.at - int(int32(le.Uint32(t.b[t.at:])))
	size := int(le.Uint16(t.b[vtable:]))
	if at := 4 + 2*index; at+2 <= size {
		if offset := int(le.Uint16(t.b[vtable+at:])); offset != 0 {
			return t.at + offset
		}
	}
	return 0
}

// scalar returns the number of size bytes in a slot, or 0 if the slot is absent.
func (t table) scalar(index, size int) (n uint64) {
	if pos := t.slot(index); pos != 0 {
		for i, c := range t.b[pos:][:size] {
			n |= uint64(c) << (8 * i)
		}
	}
	return n
}

// child returns the table that the offset in a slot leads to, and whether the slot is present.
func (t table) child(index int) (child table, ok bool) {
	if pos := t.slot(index); pos != 0 {
		return t.follow(pos), true
	}
	return table{}, false
}

// vector returns the elements, each of size bytes, of the vector in a slot, or nil if it is absent.
// A string is a vector of bytes.
func (t table) vector(index, size int) []byte {
	v, ok := t.child(index)
	if !ok {
		return nil
	}
	return v.b[v.at+4:][:int(le.Uint32(v.b[v.at:]))*size]
}

// tables iterates over the tables of the vector in a slot.
func (t table) tables(index int) iter.Seq[table] {
	return func(yield func(table) bool) {
		v, _ := t.child(index)
		for i := range len(t.vector(index, 4)) / 4 {
			if *t.left--; *t.left < 0 {
				panic(errMetadata)
			}
			if !yield(t.follow(v.at + 4 + 4*i)) {
				return
			}
		}
	}
}

// pairs reads the KeyValue tables in a slot.
func (t table) pairs(index int) {
	for pair := range t.tables(index) {
		pair.vector(0, 1)
		pair.vector(1, 1)
	}
}

// fields reads the fields in a slot, which have so many levels of fields above them. It appends the
// ids of their dictionaries to ids, those of a field before those of its children.
func (t table) fields(ids []int64, slot, levels int) (_ []int64, err error) {
	for field := range t.tables(slot) {
		if levels >= maxNesting {
			return nil, errNested()
		}
		field.vector(0, 1) // name
		field.pairs(6)
		dataType, _ := field.child(3)
		switch field.scalar(2, 1) {
		case 10: // timestamps
			dataType.vector(1, 1) // time zone
		case 14: // unions
			dataType.vector(1, 4) // type codes
		}
		if encoding, coded := field.child(4); coded {
			encoding.child(1) // the type of the indices
			ids = append(ids, int64(encoding.scalar(0, 8)))
		}
		if ids, err = field.fields(ids, 5, levels+1); err != nil {
			return nil, err
		}
	}
	return ids, nil
}

// The kinds of messages that this package reads.
const (
	schemaHeader     = 1
	dictionaryHeader = 2
	batchHeader      = 3
)

// header is the verified metadata of a message.
type header struct {
	kind       byte
	bodyLength int64

	// Of a schema.
	ids []int64 // of the dictionaries, in the order of the fields
	old bool    // unions and run-end encoded columns have a validity buffer

	// Of a batch of records or of a dictionary's values. The vectors are parts of the metadata.
	nodes      []byte // of 16 bytes: rows and nulls
	buffers    []byte // of 16 bytes: offset and length in the body
	variadic   []byte // of 8 bytes: the number of data buffers of a column of views
	compressed bool
	codec      byte

	dictionary int64 // its id
	delta      bool  // the values are appended to those of the dictionary before
}

// readHeader verifies the metadata of a message and reads it.
func readHeader(meta []byte) (h header, err error) {
	defer inconsistent(&err)
	message := root(meta)
	message.pairs(4)
	h.kind, h.bodyLength = byte(message.scalar(1, 1)), int64(message.scalar(3, 8))
	batch, ok := message.child(2)
	switch h.kind {
	case schemaHeader:
		const v5 = 4
		h.old = message.scalar(0, 2) < v5
		batch.pairs(2)
		batch.vector(3, 8) // features
		h.ids, err = batch.fields(nil, 1, 0)
		return h, err
	case dictionaryHeader:
		h.dictionary, h.delta = int64(batch.scalar(0, 8)), batch.scalar(2, 1) != 0
		batch, ok = batch.child(1)
	case batchHeader:
	default:
		return h, nil // arrow-go refuses it
	}
	if !ok {
		return h, errMetadata
	}
	h.nodes, h.buffers, h.variadic = batch.vector(1, 16), batch.vector(2, 16), batch.vector(4, 8)
	if compression, ok := batch.child(3); ok {
		h.compressed, h.codec = true, byte(compression.scalar(0, 1))
		if method := compression.scalar(1, 1); method != 0 {
			return h, fmt.Errorf("it is compressed by method %d, which is not supported", method)
		}
	}
	return h, nil
}

// layout has the parts of a stream's batches. arrow-go takes as many field nodes and buffers from a
// batch as the types have, without a look at how many there are.
type layout struct {
	batch        []part
	dictionaries map[int64][]part // by id
	ids          []int64          // of the dictionaries that add has not met yet
}

// part is one node of a type in a batch: a column, a child, or dictionary indices.
type part struct {
	unused  int // the number of buffers before the others that arrow-go skips
	buffers []arrow.BufferSpec
	views   bool // the node has a count of more buffers
}

// newLayout returns the layout of the batches behind a schema, which is that of a message.
func newLayout(schema *arrow.Schema, message header) *layout {
	l := &layout{dictionaries: map[int64][]part{}, ids: message.ids}
	for _, field := range schema.Fields() {
		l.batch = l.add(l.batch, field.Type, message.old)
	}
	return l
}

// add appends the parts of a type in old or new metadata.
func (l *layout) add(to []part, dt arrow.DataType, old bool) []part {
	spec := dt.Layout()
	p := part{buffers: spec.Buffers, views: spec.VariadicSpec != nil}
	switch t := dt.(type) {
	case arrow.ExtensionType:
		return l.add(to, t.StorageType(), old)
	case *arrow.DictionaryType:
		id := l.ids[0]
		l.ids = l.ids[1:]
		l.dictionaries[id] = l.add(nil, t.ValueType, true) // arrow-go reads them as if they were old
	case *arrow.NullType:
		p.buffers = nil
	case *arrow.RunEndEncodedType, arrow.UnionType:
		if t.ID() == arrow.RUN_END_ENCODED {
			p.buffers = nil
		}
		if old {
			p.unused = 1
		}
	}
	to = append(to, p)
	if nested, ok := dt.(arrow.NestedType); ok {
		for _, field := range nested.Fields() {
			to = l.add(to, field.Type, old)
		}
	}
	return to
}

// check returns an error for a batch that doesn't have the nodes of its type, has fewer buffers, or
// has more rows than its buffers hold. A batch may have more buffers than arrow-go reads. All of its
// buffers must lie within its body.
func (l *layout) check(h header) error {
	parts, ok := l.batch, true
	if h.kind == dictionaryHeader {
		if parts, ok = l.dictionaries[h.dictionary]; !ok {
			return fmt.Errorf("it is of dictionary %d, which no column has", h.dictionary)
		}
	}
	nodes, buffers, variadic := len(h.nodes)/16, len(h.buffers)/16, h.variadic
	next := 0 // the buffer behind those of the parts so far
	for i, p := range parts {
		first := next + p.unused
		next = first + len(p.buffers)
		if p.views && len(variadic) > 0 {
			next += int(min(le.Uint64(variadic), math.MaxInt32))
			variadic = variadic[8:]
		} else if p.views {
			ok = false
		}
		if i >= nodes || next > buffers {
			continue // an error below
		}
		rows, nulls := le.Uint64(h.nodes[16*i:]), le.Uint64(h.nodes[16*i+8:])
		fits := rows <= math.MaxInt64
		for j, spec := range p.buffers {
			bits := 8 * spec.ByteWidth
			if spec.Kind == arrow.KindBitmap {
				bits = 1
			}
			if bits <= 0 || j == 0 && bits == 1 && nulls == 0 { // arrow-go reads no bitmap without nulls
				continue
			}
			n := le.Uint64(h.buffers[16*(first+j)+8:])
			if h.compressed && n > 0 {
				n -= 8 // the length before the bytes
			}
			fits = fits && rows <= 8*n/uint64(bits)
		}
		if !fits {
			return fmt.Errorf("it has a column of %d rows, which its buffers do not hold", rows)
		}
	}
	if ok && nodes == len(parts) && buffers >= next {
		return nil
	}
	has := fmt.Sprintf("%d nodes and %d buffers where its type has %d and %d", nodes, buffers, len(parts), next)
	if h.kind == dictionaryHeader {
		return fmt.Errorf("dictionary %d has %s: dictionaries of dictionaries, unions or run-end encoded values "+
			"are not supported", h.dictionary, has)
	}
	return fmt.Errorf("it has %s", has)
}
