package input

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"math"
)

// arrow-go reads the flatbuffers of Arrow IPC metadata without verifying them. It allocates the
// declared length of a vector, and a Go program doesn't survive the allocation of more memory than
// the machine has. So this package first reads each table and vector that arrow-go will read. The
// numbers of slots and types are those of Arrow's Message.fbs, Schema.fbs and File.fbs.

var errMetadata = errors.New("its metadata is inconsistent")

// inconsistent is deferred by functions that read tables: it makes their panics errMetadata.
func inconsistent(err *error) {
	if recover() != nil {
		*err = errMetadata
	}
}

// table is a table of a flatbuffer. Its methods panic instead of reading outside the buffer.
type table struct {
	b    []byte
	at   int
	left *int // how many tables of vectors may still be read: vectors can share tables, so depth bounds nothing
}

// root returns the root table of a flatbuffer.
func root(b []byte) table {
	left := len(b) / 4
	return table{b, int(binary.LittleEndian.Uint32(b)), &left}
}

// slot returns the position of a slot's content, or 0 if the slot is absent.
func (t table) slot(index int) int {
	vtable := t.at - int(int32(binary.LittleEndian.Uint32(t.b[t.at:])))
	size := int(binary.LittleEndian.Uint16(t.b[vtable:]))
	if at := 4 + 2*index; at+2 <= size {
		if offset := int(binary.LittleEndian.Uint16(t.b[vtable+at:])); offset != 0 {
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
func (t table) child(index int) (table, bool) {
	pos := t.slot(index)
	if pos == 0 {
		return table{}, false
	}
	return t.follow(pos), true
}

// follow returns the table that the offset at pos leads to.
func (t table) follow(pos int) table {
	return table{t.b, pos + int(binary.LittleEndian.Uint32(t.b[pos:])), t.left}
}

// vector returns the elements, each of size bytes, of the vector in a slot, or nil if it is absent.
// A string is a vector of bytes.
func (t table) vector(index, size int) []byte {
	v, ok := t.child(index)
	if !ok {
		return nil
	}
	n := int(binary.LittleEndian.Uint32(v.b[v.at:]))
	return v.b[v.at+4:][:n*size]
}

// tables iterates over the tables of the vector in a slot.
func (t table) tables(index int) iter.Seq[table] {
	return func(yield func(table) bool) {
		n := len(t.vector(index, 4)) / 4
		if n == 0 {
			return
		}
		v, _ := t.child(index)
		for i := range n {
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
	schema     *layout // of a schema message

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
	if !ok {
		return h, errMetadata
	}
	switch h.kind {
	case schemaHeader:
		const v5 = 4
		h.schema, err = readSchema(batch, message.scalar(0, 2) < v5)
		return h, err
	case dictionaryHeader:
		h.dictionary, h.delta = int64(batch.scalar(0, 8)), batch.scalar(2, 1) != 0
		if batch, ok = batch.child(1); !ok {
			return h, errMetadata
		}
	case batchHeader:
	default:
		return h, nil // arrow-go refuses it
	}
	h.nodes, h.buffers, h.variadic = batch.vector(1, 16), batch.vector(2, 16), batch.vector(4, 8)
	for v := h.variadic; len(v) > 0; v = v[8:] {
		if n, all := binary.LittleEndian.Uint64(v), len(h.buffers)/16; n > uint64(all) {
			return h, fmt.Errorf("%w: a column of %d buffers in a batch of %d", errMetadata, n, all)
		}
	}
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
}

// part is one node of a type in a batch: a column, a child, or dictionary indices.
type part struct {
	buffers  int
	validity bool  // the first buffer is a bitmap; arrow-go ignores it if there are no nulls
	bits     int64 // of a row in the second buffer; 0 if arrow-go checks the length of that
	views    bool  // the node has a count of more buffers
}

// readSchema verifies the fields of a schema and returns their layout. In old metadata unions and
// run-end encoded columns have a validity buffer.
func readSchema(schema table, old bool) (l *layout, err error) {
	defer inconsistent(&err)
	l = &layout{dictionaries: map[int64][]part{}}
	schema.pairs(2)
	schema.vector(3, 8) // features
	l.batch, err = l.fields(nil, schema, 1, 0, old)
	return l, err
}

// fields appends the parts of the fields in a slot, which have so many levels of fields above them.
func (l *layout) fields(to []part, parent table, slot, levels int, old bool) (_ []part, err error) {
	for field := range parent.tables(slot) {
		if levels >= maxNesting {
			return nil, errNested()
		}
		field.vector(0, 1) // name
		field.pairs(6)
		encoding, coded := field.child(4)
		if !coded {
			if to, err = l.fields(append(to, partOf(field, old)), field, 5, levels+1, old); err != nil {
				return nil, err
			}
			continue
		}
		encoding.child(1) // the type of the indices
		// arrow-go reads the values of dictionaries as if they were old.
		values, err := l.fields([]part{partOf(field, true)}, field, 5, levels+1, true)
		if err != nil {
			return nil, err
		}
		l.dictionaries[int64(encoding.scalar(0, 8))] = values
		to = append(to, part{buffers: 2, validity: true})
	}
	return to, nil
}

// partOf returns the part of a field's type, or that of the values of its dictionary if it has one.
func partOf(field table, old bool) part {
	kind := field.scalar(2, 1)
	switch kind {
	case 2, 3, 7, 8, 9, 11, 15, 18: // numbers, dates, times, intervals, binary of one length
		return part{buffers: 2, validity: true}
	case 4, 5, 25: // binary, text, views of lists
		return part{buffers: 3, validity: true, bits: 32}
	case 6: // Boolean
		return part{buffers: 2, validity: true, bits: 1}
	case 10: // timestamps
		zoned, _ := field.child(3)
		zoned.vector(1, 1)
		return part{buffers: 2, validity: true}
	case 12, 17: // lists, maps
		return part{buffers: 2, validity: true, bits: 32}
	case 13, 16: // structs, lists of one length
		return part{buffers: 1, validity: true}
	case 19, 20, 26: // large binary, text and views of lists
		return part{buffers: 3, validity: true, bits: 64}
	case 21: // large lists
		return part{buffers: 2, validity: true, bits: 64}
	case 23, 24: // views of binary and text
		return part{buffers: 2, validity: true, bits: 128, views: true}
	case 14, 22: // unions, run-end encoded
		var p part
		if old {
			p.buffers++
		}
		if kind == 14 {
			union, _ := field.child(3)
			union.vector(1, 4) // ids
			const dense = 1
			p.buffers++
			if union.scalar(0, 2) == dense {
				p.buffers++
			}
		}
		return p
	}
	return part{} // Null, or a type that arrow-go refuses
}

// check returns an error for a batch that doesn't have the nodes of its type, has fewer buffers, or
// has more rows than its buffers hold. A batch may have more buffers than arrow-go reads.
func (l *layout) check(h header) error {
	parts, inDictionary := l.batch, h.kind == dictionaryHeader
	if inDictionary {
		var ok bool
		if parts, ok = l.dictionaries[h.dictionary]; !ok {
			return fmt.Errorf("it is of dictionary %d, which no column has", h.dictionary)
		}
	}
	variadic := h.variadic
	starts, total := make([]int, len(parts)), 0 // the first buffer of each part, and the number of all
	missing := len(h.nodes) != 16*len(parts)
	for i, p := range parts {
		starts[i] = total
		total += p.buffers
		if !p.views {
			continue
		}
		if len(variadic) == 0 {
			missing = true
			continue
		}
		total += int(binary.LittleEndian.Uint64(variadic)) // readHeader has bounded it
		variadic = variadic[8:]
	}
	if missing || len(h.buffers) < 16*total {
		has := fmt.Sprintf("%d nodes and %d buffers where its type has %d and %d",
			len(h.nodes)/16, len(h.buffers)/16, len(parts), total)
		if inDictionary {
			return fmt.Errorf("dictionary %d has %s: dictionaries of dictionaries, unions or run-end encoded values "+
				"are not supported", h.dictionary, has)
		}
		return fmt.Errorf("it has %s", has)
	}
	bits := func(buffer int) uint64 {
		n := binary.LittleEndian.Uint64(h.buffers[16*buffer+8:])
		if h.compressed && n > 0 {
			n -= 8 // the length before the bytes
		}
		return 8 * n
	}
	for i, p := range parts {
		rows, nulls := binary.LittleEndian.Uint64(h.nodes[16*i:]), binary.LittleEndian.Uint64(h.nodes[16*i+8:])
		if rows > math.MaxInt64 || p.validity && nulls > 0 && rows > bits(starts[i]) ||
			p.bits > 0 && rows > bits(starts[i]+1)/uint64(p.bits) {
			return fmt.Errorf("it has a column of %d rows, which its buffers do not hold", rows)
		}
	}
	return nil
}
