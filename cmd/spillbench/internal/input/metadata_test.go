package input

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	flatbuffers "github.com/google/flatbuffers/go"
)

// TestBrokenLengths makes each length in an IPC stream's schema message absurd in
// turn: all that are vectors' must be found before arrow-go allocates for them.
func TestBrokenLengths(t *testing.T) {
	whole := encode(t, asStream(ipc.WithZstd()), 10)
	n := int(binary.LittleEndian.Uint32(whole[4:]))
	meta := whole[8 : 8+n]
	if _, err := readHeader(meta); err != nil {
		t.Fatalf("whole metadata: %v", err)
	}
	found := 0
	for at := 0; at+4 <= len(meta); at += 4 {
		old := binary.LittleEndian.Uint32(meta[at:])
		binary.LittleEndian.PutUint32(meta[at:], 0x7fff_ffff)
		if _, err := readHeader(meta); errors.Is(err, errMetadata) {
			found++
		}
		binary.LittleEndian.PutUint32(meta[at:], old)
	}
	// Names, types and children of seven fields, three vectors each at the least.
	if found < 7*3 {
		t.Errorf("%d broken lengths were found in %d bytes", found, len(meta))
	}
}

// TestSharedFields refuses metadata of a few bytes in which fields share their children, so that they
// are exponentially many, and metadata of fields that are nested thousands of levels deep.
func TestSharedFields(t *testing.T) {
	for _, c := range []struct{ levels, children int }{{40, 2}, {maxDepth + 1, 1}} {
		b := flatbuffers.NewBuilder(0)
		vector := func(of flatbuffers.UOffsetT, n int) flatbuffers.UOffsetT {
			b.StartVector(4, n, 4)
			for range n {
				b.PrependUOffsetT(of)
			}
			return b.EndVector(n)
		}
		b.StartObject(7)
		field := b.EndObject()
		for range c.levels {
			children := vector(field, c.children)
			b.StartObject(7)
			b.PrependUOffsetTSlot(5, children, 0)
			field = b.EndObject()
		}
		fields := vector(field, 1)
		b.StartObject(4)
		b.PrependUOffsetTSlot(1, fields, 0)
		schema := b.EndObject()
		b.StartObject(5)
		b.PrependByteSlot(1, schemaHeader, 0)
		b.PrependUOffsetTSlot(2, schema, 0)
		b.Finish(b.EndObject())
		if _, err := readHeader(b.FinishedBytes()); !errors.Is(err, errMetadata) {
			t.Errorf("%d levels of %d fields: %v", c.levels, c.children, err)
		}
	}
}

// TestVerifyAcceptsAllTypes accepts metadata of every type that has more than scalars in it, and
// refuses a stream with a broken length of each kind of text.
func TestVerifyAcceptsAllTypes(t *testing.T) {
	meta := arrow.NewMetadata([]string{"k"}, []string{"v"})
	schema := arrow.NewSchema([]arrow.Field{
		{Name: "zoned", Type: &arrow.TimestampType{Unit: arrow.Second, TimeZone: "Europe/Berlin"}, Metadata: meta},
		{Name: "union", Type: arrow.SparseUnionOf([]arrow.Field{
			{Name: "a", Type: arrow.PrimitiveTypes.Int8}, {Name: "b", Type: arrow.BinaryTypes.String},
		}, []arrow.UnionTypeCode{3, 7})},
		{Name: "coded", Type: coded},
		{Name: "view", Type: arrow.BinaryTypes.StringView},
		{Name: "map", Type: arrow.MapOf(arrow.BinaryTypes.String, arrow.ListOf(arrow.PrimitiveTypes.Int64))},
		{Name: "runs", Type: arrow.RunEndEncodedOf(arrow.PrimitiveTypes.Int32, arrow.BinaryTypes.String)},
		{Name: "decimal", Type: &arrow.Decimal256Type{Precision: 40, Scale: 2}},
		{Name: "", Type: arrow.Null, Nullable: true},
	}, &meta)
	payload := ipc.GetSchemaPayload(schema, memory.DefaultAllocator)
	defer payload.Release()
	if _, err := readHeader(payload.Meta().Bytes()); err != nil {
		t.Error(err)
	}
	var buf bytes.Buffer
	if err := ipc.NewWriter(&buf, ipc.WithSchema(schema)).Close(); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"Europe/Berlin", "zoned", "k"} { // a time zone, a name, a key
		broken := bytes.Clone(buf.Bytes())
		length := binary.LittleEndian.AppendUint32(nil, uint32(len(text)))
		at := bytes.Index(broken, append(length, text...))
		if at < 0 {
			t.Fatalf("%q is not in the metadata", text)
		}
		binary.LittleEndian.PutUint32(broken[at:], 0x7fff_ffff)
		path := write(t, "f", broken)
		_, _, all, err := measured(t, path)
		checkError(t, err, path, "cannot be read as Arrow stream")
		if all > readersAlloc {
			t.Errorf("the length of %q is broken: %d bytes were allocated", text, all)
		}
	}
}

// readHeader reads the metadata of a message.
func readHeader(meta []byte) (h header, err error) {
	err = verify(meta, h.read)
	return h, err
}
