package input

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// arrow-go reads the flatbuffers of Arrow IPC metadata without verifying them. It allocates the
// declared length of a vector, and a Go program doesn't survive the allocation of more memory than
// the machine has. So this package walks the metadata first. Each shape lists the slots of a table
// that are not scalars, in the order of Arrow's Message.fbs, Schema.fbs and File.fbs.

// slot is the content of one slot of a flatbuffers table. One of the fields behind index is set.
type slot struct {
	index  int
	table  *shape        // a table
	tables *shape        // a vector of tables
	vector int           // a vector of scalars, structs or characters of so many bytes
	union  map[int]shape // a table of the shape that the scalar in the slot before selects, or of an unknown one
}

// shape is the content of a table.
type shape struct {
	slots []slot
	check func(w *walk, table int) error // checks more than the lengths; may be nil
}

const text1 = 1 // a string is a vector of single bytes

var (
	pairShape  = shape{slots: []slot{{index: 0, vector: text1}, {index: 1, vector: text1}}} // KeyValue
	plainShape = shape{}                                                                    // a table of scalars
	fieldShape = shape{slots: []slot{
		{index: 0, vector: text1},
		{index: 3, union: map[int]shape{
			10: {slots: []slot{{index: 1, vector: text1}}}, // Timestamp: the time zone
			14: {slots: []slot{{index: 1, vector: 4}}},     // Union: the type ids
		}},
		{index: 4, table: &shape{slots: []slot{{index: 1, table: &plainShape}}}}, // DictionaryEncoding
		{index: 5}, // children: a vector of fields, which cannot be named within itself
		{index: 6, tables: &pairShape},
	}}
	schemaShape = shape{slots: []slot{
		{index: 1, tables: &fieldShape}, {index: 2, tables: &pairShape}, {index: 3, vector: 8},
	}}
	batchShape = shape{slots: []slot{
		{index: 1, vector: 16}, {index: 2, vector: 16}, {index: 3, table: &plainShape}, {index: 4, vector: 8},
	}, check: checkVariadic}
	messageShape = shape{slots: []slot{
		{index: 2, union: map[int]shape{
			schemaHeader:     schemaShape,
			dictionaryHeader: {slots: []slot{{index: 1, table: &batchShape}}},
			batchHeader:      batchShape,
		}},
		{index: 4, tables: &pairShape},
	}}
	footerShape = shape{slots: []slot{
		{index: 1, table: &schemaShape},
		{index: 2, vector: blockSize}, {index: 3, vector: blockSize}, // dictionaries, record batches
		{index: 4, tables: &pairShape},
	}}
)

// The kinds of messages that this package knows, as in Message.fbs.
const (
	schemaHeader     = 1
	dictionaryHeader = 2
	batchHeader      = 3
)

var errMetadata = errors.New("its metadata is inconsistent")

// verifyMessage verifies a message's metadata behind its length, with or without the continuation
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

// walk verifies one flatbuffer.
type walk struct {
	b      []byte
	tables int // how many may still be visited: tables may be shared, so their depth alone bounds nothing
}

// verify walks b, whose root table is of shape s. The runtime checks all accesses; verify returns
// errMetadata for one outside the buffer.
func verify(b []byte, s *shape) (err error) {
	defer inconsistent(&err)
	w := &walk{b: b, tables: len(b) / 4}
	return w.table(root(b), s, 0)
}

// root returns the position of the root table.
func root(b []byte) int { return int(binary.LittleEndian.Uint32(b)) }

// field returns the position of a table's slot, or 0 if it is absent.
func field(b []byte, table, index int) int {
	vtable := table - int(int32(binary.LittleEndian.Uint32(b[table:])))
	size := int(binary.LittleEndian.Uint16(b[vtable:]))
	if at := 4 + 2*index; at+2 <= size {
		if off := int(binary.LittleEndian.Uint16(b[vtable+at:])); off != 0 {
			return table + off
		}
	}
	return 0
}

// follow returns the position that the offset at pos refers to.
func follow(b []byte, pos int) int { return pos + int(binary.LittleEndian.Uint32(b[pos:])) }

// vector returns the elements of the vector in a table's slot, or nil if it is absent.
func vector(b []byte, table, index, size int) []byte {
	pos := field(b, table, index)
	if pos == 0 {
		return nil
	}
	at := follow(b, pos)
	n := int(binary.LittleEndian.Uint32(b[at:]))
	return b[at+4:][:n*size]
}

// table walks a table in so many levels of fields. Of all shapes only that of a field contains
// itself.
func (w *walk) table(pos int, s *shape, levels int) error {
	if w.tables--; w.tables < 0 {
		return errMetadata
	}
	if levels >= maxNesting {
		return errNested()
	}
	for _, f := range s.slots {
		at := field(w.b, pos, f.index)
		if at == 0 {
			continue
		}
		var err error
		switch {
		case f.table != nil:
			err = w.table(follow(w.b, at), f.table, levels)
		case f.tables != nil:
			err = w.each(vector(w.b, pos, f.index, 4), follow(w.b, at)+4, f.tables, levels)
		case f.union != nil:
			if kind := field(w.b, pos, f.index-1); kind != 0 {
				of := f.union[int(w.b[kind])]
				err = w.table(follow(w.b, at), &of, levels)
			}
		case f.vector == 0: // the children of a field, which are fields
			err = w.each(vector(w.b, pos, f.index, 4), follow(w.b, at)+4, s, levels+1)
		default:
			vector(w.b, pos, f.index, f.vector)
		}
		if err != nil {
			return err
		}
	}
	if s.check != nil {
		return s.check(w, pos)
	}
	return nil
}

// each walks the tables that the offsets, which begin at pos, lead to.
func (w *walk) each(offsets []byte, pos int, s *shape, levels int) error {
	for i := 0; i < len(offsets); i += 4 {
		if err := w.table(follow(w.b, pos+i), s, levels); err != nil {
			return err
		}
	}
	return nil
}

// checkVariadic returns an error if a column of views has more data buffers than the batch has
// buffers.
func checkVariadic(w *walk, table int) error {
	buffers := uint64(len(vector(w.b, table, 2, 16)) / 16)
	counts := vector(w.b, table, 4, 8)
	for i := 0; i < len(counts); i += 8 {
		if n := binary.LittleEndian.Uint64(counts[i:]); n > buffers {
			return fmt.Errorf("%w: a column of %d buffers in a batch of %d", errMetadata, n, buffers)
		}
	}
	return nil
}

// header is the metadata of a message without the content of a schema.
type header struct {
	kind       byte
	version    uint16 // of the metadata; 4 is V5
	table      int    // of the schema, dictionary or record batch
	bodyLength int64

	batch      int // the table of a record batch, or of a dictionary's values; 0: there is none
	compressed bool
	codec      byte

	dictionary int64 // its id
	delta      bool  // the values are appended to those of the dictionary before
}

// headerOf reads verified metadata.
func headerOf(meta []byte) (h header, err error) {
	defer inconsistent(&err)
	at := root(meta)
	scalar := func(table, index, size int) (n uint64) {
		if pos := field(meta, table, index); pos != 0 {
			for i, c := range meta[pos:][:size] {
				n |= uint64(c) << (8 * i)
			}
		}
		return n
	}
	child := func(table, index int) int {
		if pos := field(meta, table, index); pos != 0 {
			return follow(meta, pos)
		}
		return 0
	}
	h = header{
		version: uint16(scalar(at, 0, 2)), kind: byte(scalar(at, 1, 1)),
		table: child(at, 2), bodyLength: int64(scalar(at, 3, 8)),
	}
	switch {
	case h.table == 0:
		return h, errMetadata
	case h.kind == batchHeader:
		h.batch = h.table
	case h.kind == dictionaryHeader:
		h.dictionary, h.batch, h.delta = int64(scalar(h.table, 0, 8)), child(h.table, 1), scalar(h.table, 2, 1) != 0
		if h.batch == 0 {
			return h, errMetadata
		}
	}
	if h.batch != 0 {
		if c := child(h.batch, 3); c != 0 {
			h.compressed, h.codec = true, byte(scalar(c, 0, 1))
			if method := scalar(c, 1, 1); method != 0 {
				return h, fmt.Errorf("it is compressed by method %d, which is not supported", method)
			}
		}
	}
	return h, nil
}

// inconsistent is deferred: reading beyond a buffer, which panics, becomes errMetadata.
func inconsistent(err *error) {
	if recover() != nil {
		*err = errMetadata
	}
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

// The types in Schema.fbs that differ from the others, by their number in its union Type.
const (
	typeNull          = 1
	typeUnion         = 14
	typeRunEndEncoded = 22
)

// typeParts are the parts of the types in Schema.fbs. Unions and run-end encoded types have no
// validity; values adds it for old metadata.
var typeParts = [...]part{
	2:  {buffers: 2, validity: true},                         // Int
	3:  {buffers: 2, validity: true},                         // FloatingPoint
	4:  {buffers: 3, validity: true, bits: 32},               // Binary
	5:  {buffers: 3, validity: true, bits: 32},               // Utf8
	6:  {buffers: 2, validity: true, bits: 1},                // Bool
	7:  {buffers: 2, validity: true},                         // Decimal
	8:  {buffers: 2, validity: true},                         // Date
	9:  {buffers: 2, validity: true},                         // Time
	10: {buffers: 2, validity: true},                         // Timestamp
	11: {buffers: 2, validity: true},                         // Interval
	12: {buffers: 2, validity: true, bits: 32},               // List
	13: {buffers: 1, validity: true},                         // Struct_
	15: {buffers: 2, validity: true},                         // FixedSizeBinary
	16: {buffers: 1, validity: true},                         // FixedSizeList
	17: {buffers: 2, validity: true, bits: 32},               // Map
	18: {buffers: 2, validity: true},                         // Duration
	19: {buffers: 3, validity: true, bits: 64},               // LargeBinary
	20: {buffers: 3, validity: true, bits: 64},               // LargeUtf8
	21: {buffers: 2, validity: true, bits: 64},               // LargeList
	23: {buffers: 2, validity: true, bits: 128, views: true}, // BinaryView
	24: {buffers: 2, validity: true, bits: 128, views: true}, // Utf8View
	25: {buffers: 3, validity: true, bits: 32},               // ListView
	26: {buffers: 3, validity: true, bits: 64},               // LargeListView
}

// layoutOf reads the schema in a message's verified metadata.
func layoutOf(meta []byte, h header) (l *layout, err error) {
	defer inconsistent(&err)
	l = &layout{dictionaries: map[int64][]part{}}
	const v5 = 4
	l.batch = l.children(nil, meta, h.table, 1, h.version < v5)
	return l, nil
}

// children appends the parts of the fields in a table's slot. In old metadata unions have validity.
func (l *layout) children(to []part, meta []byte, table, slot int, old bool) []part {
	pos := field(meta, table, slot)
	if pos == 0 {
		return to
	}
	first := follow(meta, pos) + 4
	for i := range len(vector(meta, table, slot, 4)) / 4 {
		to = l.column(to, meta, follow(meta, first+4*i), old)
	}
	return to
}

func (l *layout) column(to []part, meta []byte, at int, old bool) []part {
	encoding := field(meta, at, 4)
	if encoding == 0 {
		return l.values(to, meta, at, old)
	}
	id := int64(0)
	if pos := field(meta, follow(meta, encoding), 0); pos != 0 {
		id = int64(binary.LittleEndian.Uint64(meta[pos:]))
	}
	l.dictionaries[id] = l.values(nil, meta, at, true) // arrow-go reads dictionaries as if they were old
	return append(to, part{buffers: 2, validity: true})
}

// values appends the parts of a field, or of the values of its dictionary if it has one.
func (l *layout) values(to []part, meta []byte, at int, old bool) []part {
	kind := typeNull
	if pos := field(meta, at, 2); pos != 0 {
		kind = int(meta[pos])
	}
	var p part
	switch {
	case kind == typeUnion:
		p.buffers = 1
		if t := field(meta, at, 3); t != 0 {
			if mode := field(meta, follow(meta, t), 0); mode != 0 && meta[mode] == 1 { // dense
				p.buffers = 2
			}
		}
		if old {
			p.buffers++
		}
	case kind == typeRunEndEncoded:
		if old {
			p.buffers = 1
		}
	case kind < len(typeParts): // arrow-go refuses the others
		p = typeParts[kind]
	}
	return l.children(append(to, p), meta, at, 5, old)
}

// check refuses a batch that has not the nodes of its type, one that has fewer buffers, and one of
// more rows than its buffers hold. Batches may have more buffers than arrow-go reads.
func (l *layout) check(meta []byte, h header) (err error) {
	defer inconsistent(&err)
	want := l.batch
	if h.kind == dictionaryHeader {
		var ok bool
		if want, ok = l.dictionaries[h.dictionary]; !ok {
			return fmt.Errorf("it is of dictionary %d, which no column has", h.dictionary)
		}
	}
	nodes, buffers, counts := vector(meta, h.batch, 1, 16), vector(meta, h.batch, 2, 16), vector(meta, h.batch, 4, 8)
	total, views := 0, 0
	for _, p := range want {
		total += p.buffers
		if p.views {
			if 8*views < len(counts) {
				total += int(binary.LittleEndian.Uint64(counts[8*views:])) // checkVariadic has bounded it
			}
			views++
		}
	}
	if len(nodes) != 16*len(want) || len(buffers) < 16*total || len(counts) < 8*views {
		has := fmt.Sprintf("%d nodes and %d buffers where its type has %d and %d",
			len(nodes)/16, len(buffers)/16, len(want), total)
		if h.kind == dictionaryHeader {
			return fmt.Errorf("dictionary %d has %s: dictionaries of dictionaries, unions or run-end encoded values "+
				"are not supported", h.dictionary, has)
		}
		return fmt.Errorf("it has %s", has)
	}
	bitsOf := func(buffer int) uint64 {
		n := binary.LittleEndian.Uint64(buffers[16*buffer+8:])
		if h.compressed && n > 0 {
			n -= 8 // the length before the bytes
		}
		return 8 * n
	}
	next := 0 // buffer
	for i, p := range want {
		rows, nulls := binary.LittleEndian.Uint64(nodes[16*i:]), binary.LittleEndian.Uint64(nodes[16*i+8:])
		if rows > math.MaxInt64 || p.validity && nulls > 0 && rows > bitsOf(next) ||
			p.bits > 0 && rows > bitsOf(next+1)/uint64(p.bits) {
			return fmt.Errorf("it has a column of %d rows, which its buffers do not hold", rows)
		}
		next += p.buffers
		if p.views {
			next += int(binary.LittleEndian.Uint64(counts))
			counts = counts[8:]
		}
	}
	return nil
}
