package input

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// arrow-go reads the flatbuffers of Arrow IPC metadata without verifying them:
// it allocates what a vector's length says, and a length that is broken asks for more
// than the machine has, which no Go program survives. So the metadata is walked here
// first. Each shape lists what a table's slots hold, in the order of Arrow's
// Message.fbs, Schema.fbs and File.fbs; what is not listed is a scalar.

// slot is what one slot of a flatbuffers table holds.
type slot struct {
	index  int
	table  *shape        // a table
	tables *shape        // a vector of tables
	vector int           // a vector of scalars or structs of so many bytes; text is one of bytes
	union  map[int]shape // a table whose shape depends on the scalar in the slot before; others are opaque
}

// shape is what the slots of a table hold.
type shape struct {
	slots []slot
	check func(w *walk, table int) error // more than the lengths; may be nil
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
	schemaShape = shape{slots: []slot{{index: 1, tables: &fieldShape}, {index: 2, tables: &pairShape}, {index: 3, vector: 8}}}
	batchShape  = shape{slots: []slot{{index: 1, vector: 16}, {index: 2, vector: 16}, {index: 3, table: &plainShape}, {index: 4, vector: 8}},
		check: checkVariadic}
	messageShape = shape{slots: []slot{
		{index: 2, union: map[int]shape{
			1: schemaShape,
			2: {slots: []slot{{index: 1, table: &batchShape}}}, // DictionaryBatch
			3: batchShape,
		}},
		{index: 4, tables: &pairShape},
	}}
	footerShape = shape{slots: []slot{
		{index: 1, table: &schemaShape},
		{index: 2, vector: blockSize}, {index: 3, vector: blockSize}, // dictionaries, record batches
		{index: 4, tables: &pairShape},
	}}
)

var errMetadata = errors.New("its metadata is inconsistent")

// walk verifies one flatbuffer.
type walk struct {
	b      []byte
	tables int // how many may still be visited: tables may be shared, so their depth alone bounds nothing
}

// verify walks b, whose root table is of shape s. The runtime checks all accesses; verify returns
// errMetadata for one outside the buffer.
func verify(b []byte, s *shape) (err error) {
	defer func() {
		if recover() != nil {
			err = errMetadata
		}
	}()
	w := &walk{b: b, tables: len(b) / 4}
	return w.table(root(b), s, 0)
}

// root returns where the root table starts.
func root(b []byte) int { return int(binary.LittleEndian.Uint32(b)) }

// field returns where a table's slot lies, 0 if it is absent.
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

// follow returns where the offset at pos leads.
func follow(b []byte, pos int) int { return pos + int(binary.LittleEndian.Uint32(b[pos:])) }

// vector returns the elements of a vector in a table's slot, nil if it is
// absent.
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

// checkVariadic holds each count of data buffers of a view column against the
// buffers that there are.
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
