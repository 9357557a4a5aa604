package input

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"
	flatbuffers "github.com/google/flatbuffers/go"
)

// arrow-go reads the flatbuffers of Arrow IPC metadata without verifying them. It allocates the
// declared length of the vectors of fields and of custom metadata, and a Go program doesn't survive
// the allocation of more memory than the machine has. So this package reads these vectors first.
// Other offsets that lead outside the metadata make arrow-go panic, and guard returns an error.
//
// Slots have the numbers of the code that flatc makes of Arrow's Message.fbs and Schema.fbs: 4 for the
// first field of a table, 6 for the second, and so on.

var (
	errMetadata = errors.New("its metadata is inconsistent")
	le          = binary.LittleEndian
)

// maxDepth is how many levels of fields arrow-go may follow on its stack. checkFields allows fewer.
const maxDepth = 2000

// table is a table of a flatbuffer. Its methods panic instead of reading outside the buffer.
type table struct {
	flatbuffers.Table

	// left is how many bytes the vectors may still have together. Tables can share vectors, and so
	// the lengths alone bound nothing.
	left *int
}

// follow returns the table that the offset at pos leads to.
func (t table) follow(pos flatbuffers.UOffsetT) table {
	t.Pos = t.Indirect(pos)
	return t
}

// child returns the table in a slot, and whether there is one. The methods of a missing table panic.
func (t table) child(slot flatbuffers.VOffsetT) (child table, ok bool) {
	if offset := t.Offset(slot); offset != 0 {
		return t.follow(t.Pos + flatbuffers.UOffsetT(offset)), true
	}
	return table{}, false
}

// vector returns the position and the elements, each of size bytes, of the vector in a slot. They are
// 0 and nil if there is none.
func (t table) vector(slot flatbuffers.VOffsetT, size int) (pos flatbuffers.UOffsetT, elements []byte) {
	if offset := flatbuffers.UOffsetT(t.Offset(slot)); offset != 0 {
		pos = t.Vector(offset)
		elements = t.Bytes[pos:][:t.VectorLen(offset)*size]
	}
	if *t.left -= len(elements); *t.left < 0 {
		panic(errMetadata)
	}
	return pos, elements
}

// numbers returns the elements, each of so many numbers, of the vector in a slot. They are part of the
// metadata. Like arrow-go's values they need a little-endian machine.
func (t table) numbers(slot flatbuffers.VOffsetT, each int) []int64 {
	_, elements := t.vector(slot, 8*each)
	return arrow.Int64Traits.CastFromBytes(elements)
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
	ids []int64 // of the dictionaries: that of a field before those of its children
	old bool    // unions and run-end encoded columns have a validity buffer

	// Of a batch of records or of a dictionary's values. The vectors are parts of the metadata.
	nodes      []int64 // the rows and nulls of each
	buffers    []int64 // the offset in the body and length of each
	variadic   []int64 // the number of data buffers of each column of views
	compressed bool
	codec      byte

	dictionary int64 // its id
	delta      bool  // the values are appended to those of the dictionary before
}

// verify calls read with the root table of a flatbuffer. It returns errMetadata if read leaves the buffer.
func verify(buffer []byte, read func(root table) error) (err error) {
	defer func() {
		if recover() != nil {
			err = errMetadata
		}
	}()
	left := 4 * len(buffer) // writers hardly share vectors
	return read(table{flatbuffers.Table{Bytes: buffer}, &left}.follow(0))
}

// read reads the metadata of a message.
func (h *header) read(message table) error {
	message.vector(12, 4) // custom metadata
	h.kind, h.bodyLength = message.GetByteSlot(6, 0), message.GetInt64Slot(10, 0)
	batch, _ := message.child(8)
	switch h.kind {
	case schemaHeader:
		h.old = message.GetInt16Slot(4, 0) < 4 // before version 5
		batch.vector(8, 4)                     // custom metadata
		h.readFields(batch, 6, 0)
		return nil
	case dictionaryHeader:
		h.dictionary, h.delta = batch.GetInt64Slot(4, 0), batch.GetBoolSlot(8, false)
		batch, _ = batch.child(6)
	case batchHeader:
	default:
		return nil // arrow-go refuses it
	}
	h.nodes, h.buffers, h.variadic = batch.numbers(6, 2), batch.numbers(8, 2), batch.numbers(12, 1)
	if compression, ok := batch.child(10); ok {
		h.compressed, h.codec = true, compression.GetByteSlot(4, 0)
		if method := compression.GetByteSlot(6, 0); method != 0 {
			return fmt.Errorf("it is compressed by method %d, which is not supported", method)
		}
	}
	return nil
}

// footerAt is where readFooter expects the footer: behind room for footerMessage and an offset.
const footerAt = 32

// footerMessage begins the metadata of a schema message. Its version, at versionAt, is set later, and the
// offset of the schema follows it.
const footerMessage = "\x10\x00\x00\x00" + // the position of the message's table
	"\x0a\x00\x0c\x00\x04\x00\x06\x00\x08\x00\x00\x00" + // the vtable: version, kind and schema in the table
	"\x0c\x00\x00\x00\x00\x00\x01\x00" // the table: the distance to the vtable, version and kind

const versionAt = 20

// readFooter verifies a file's footer and returns the offsets of the file's messages, the dictionaries
// first. It writes to the bytes before the footer, so that all together are a message of its schema.
func readFooter(meta []byte) (places []int64, err error) {
	err = verify(meta[footerAt:], func(footer table) error {
		for _, slot := range []flatbuffers.VOffsetT{8, 10} {
			for block := range slices.Chunk(footer.numbers(slot, 3), 3) {
				places = append(places, block[0])
			}
		}
		schema, ok := footer.child(6)
		if !ok {
			return errMetadata
		}
		n := copy(meta, footerMessage)
		le.PutUint16(meta[versionAt:], uint16(footer.GetInt16Slot(4, 0)))
		le.PutUint32(meta[n:], uint32(footerAt+int(schema.Pos)-n))
		return nil
	})
	return places, err
}

// readFields verifies the fields in a slot of parent, which have so many levels of fields above them.
func (h *header) readFields(parent table, slot flatbuffers.VOffsetT, levels int) {
	pos, fields := parent.vector(slot, 4)
	for i := 0; i < len(fields); i += 4 {
		if levels == maxDepth {
			panic(errMetadata)
		}
		field := parent.follow(pos + flatbuffers.UOffsetT(i))
		field.vector(16, 4) // custom metadata
		if encoding, coded := field.child(12); coded {
			h.ids = append(h.ids, encoding.GetInt64Slot(4, 0))
		}
		h.readFields(field, 14, levels+1)
	}
}

// layout has the types of a stream's batches. arrow-go takes as many field nodes and buffers from a
// batch as the types have, without a look at how many there are.
type layout struct {
	header  // of the schema
	columns *arrow.StructType
	values  []arrow.DataType // of the dictionaries, in the order of ids
}

// setColumns sets the types that arrow-go has read from the schema.
func (l *layout) setColumns(schema *arrow.Schema) {
	l.columns = arrow.StructOf(schema.Fields()...)
	l.addDictionaries(l.columns)
}

// addDictionaries adds the types of the values of the dictionaries in a type.
func (l *layout) addDictionaries(in arrow.DataType) {
	switch t := in.(type) {
	case arrow.ExtensionType:
		l.addDictionaries(t.StorageType())
	case *arrow.DictionaryType:
		l.values = append(l.values, t.ValueType)
		l.addDictionaries(t.ValueType)
	case arrow.NestedType:
		for _, field := range t.Fields() {
			l.addDictionaries(field.Type)
		}
	}
}

// check returns an error for a batch that doesn't have the nodes of its type, has fewer buffers, or
// has more rows than its buffers hold. A batch may have more buffers than arrow-go reads. All of its
// buffers must lie within its body.
func (l *layout) check(h header) error {
	c := cursor{header: h}
	if h.kind == batchHeader {
		for _, field := range l.columns.Fields() {
			c.skip(field.Type, l.old)
		}
	} else if i := slices.Index(l.ids, h.dictionary); i >= 0 {
		c.skip(l.values[i], true) // arrow-go reads them as if their metadata were old
	} else {
		return fmt.Errorf("it is of dictionary %d, which no column has", h.dictionary)
	}
	nodes, buffers := len(h.nodes)/2, len(h.buffers)/2
	if nodes == c.node && buffers >= c.buffer {
		return c.err
	}
	what, note := "it", ""
	if h.kind == dictionaryHeader {
		what = fmt.Sprint("dictionary ", h.dictionary)
		note = ": dictionaries of dictionaries, unions or run-end encoded values are not supported"
	}
	return fmt.Errorf("%s has %d nodes and %d buffers where its type has %d and %d%s",
		what, nodes, buffers, c.node, c.buffer, note)
}

// cursor is where arrow-go is in a batch. Of the variadic counts it has those that are left.
type cursor struct {
	header
	node, buffer int // the next ones
	err          error
}

// skip skips an array in old or new metadata. It sets err if the buffers don't hold its rows.
func (c *cursor) skip(dt arrow.DataType, old bool) {
	if extension, ok := dt.(arrow.ExtensionType); ok {
		dt = extension.StorageType()
	}
	spec := dt.Layout()
	buffers := spec.Buffers
	if buffers[0].Kind != arrow.KindBitmap && old && dt.ID() != arrow.NULL {
		c.buffer++ // a bitmap that arrow-go ignores
	}
	if buffers[0].Kind == arrow.KindAlwaysNull {
		buffers = nil
	}
	first := c.buffer
	c.buffer += len(buffers)
	if spec.VariadicSpec != nil {
		c.buffer += int(min(c.variadic[0], math.MaxInt32)) // arrow-go recovers from a missing count
		c.variadic = c.variadic[1:]
	}
	if 2*c.node < len(c.nodes) && 2*c.buffer <= len(c.buffers) {
		rows, nulls, held := c.nodes[2*c.node], c.nodes[2*c.node+1], int64(math.MaxInt64)
		for i, spec := range buffers {
			bits := int64(8 * spec.ByteWidth)
			if spec.Kind == arrow.KindBitmap {
				bits = 1
			}
			if bits <= 0 || i == 0 && bits == 1 && nulls == 0 { // without nulls arrow-go reads no bitmap
				continue
			}
			n := c.buffers[2*(first+i)+1]
			if c.compressed && n > 0 {
				n -= 8 // the length before the bytes
			}
			held = min(held, 8*n/bits)
		}
		if rows < 0 || rows > held {
			c.err = fmt.Errorf("it has a column of %d rows, which its buffers do not hold", rows)
		}
	}
	c.node++
	if nested, ok := dt.(arrow.NestedType); ok {
		for _, field := range nested.Fields() {
			c.skip(field.Type, old)
		}
	}
}
