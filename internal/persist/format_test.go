package persist

import (
	"bytes"
	"errors"
	"reflect"
	"slices"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// entryOfRecord describes the image of a record.
func entryOfRecord(t testing.TB, rec arrow.RecordBatch) (*Entry, []byte) {
	t.Helper()
	l, err := image.NewLayout(rec, image.MaxInline)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if l.Desc.Body > 0 {
		if err := l.WriteTo([][]byte{make([]byte, l.Desc.Body)}); err != nil {
			t.Fatal(err)
		}
	}
	d, err := l.Descriptor()
	if err != nil {
		t.Fatal(err)
	}
	plain := *d
	plain.Dictionaries = nil
	k := &Entry{ID: 77, Place: Place{"query", "join", 3, -4}, Descriptor: &plain}
	for i := range d.Dictionaries {
		k.Dictionaries = append(k.Dictionaries, uint64(i)+5)
	}
	schema, err := EncodeSchema(rec.Schema())
	if err != nil {
		t.Fatal(err)
	}
	return k, schema
}

// TestEntryIsReadAsItWasWritten: of every type that can be recorded, packed or not.
func TestEntryIsReadAsItWasWritten(t *testing.T) {
	g := arrowgen.New(3)
	tried := 0
	for _, dt := range arrowgen.Types() {
		if _, err := EncodeSchema(arrowgen.Schema(dt)); err != nil {
			if !errors.Is(err, errSchema) {
				t.Errorf("%v: %v", dt, err)
			}
			continue
		}
		tried++
		rec := g.Record(arrowgen.Schema(dt, arrow.PrimitiveTypes.Int64), 40)
		k, schema := entryOfRecord(t, rec)
		if tried%4 < 2 {
			k.Descriptor.Block = payload.RowBlock
			k.Descriptor.Sums = make([]uint64, k.Descriptor.Body/payload.RowBlock)
		}
		if tried%2 == 0 {
			k.Packed, k.Runs = true, fullRuns(k.Descriptor)
		}
		if tried%3 == 0 {
			m := arrow.NewMetadata([]string{"a", ""}, []string{"", "b"})
			k.Descriptor.Metadata = &m
		}
		back, err := readBack(k, schema)
		if err != nil {
			t.Errorf("%v: %v", dt, err)
			continue
		}
		if err := equal.Schemas(k.Descriptor.Schema, back.Descriptor.Schema); err != nil {
			t.Errorf("%v: %v", dt, err)
		}
		got, want := *back, *k
		gotDesc, wantDesc := *back.Descriptor, *k.Descriptor
		gotDesc.Schema, wantDesc.Schema, got.Descriptor, want.Descriptor = nil, nil, nil, nil
		if !sameEntry(got, want) || !sameDescriptor(gotDesc, wantDesc) {
			t.Errorf("%v: %+v %+v, want %+v %+v", dt, got, gotDesc, want, wantDesc)
		}
	}
	if tried < 150 {
		t.Errorf("only %d types can be recorded", tried)
	}
}

// readBack reads what e's file would say.
func readBack(e *Entry, schema []byte) (*Entry, error) {
	return make(Schemas).Read(e.meta(schema), e.place())
}

// fullRuns are runs whose frames are not compressed.
func fullRuns(d *batch.Descriptor) (runs []payload.Run) {
	for left := d.Body; left > 0; {
		r := payload.Run{Codec: 2, Sum: uint64(left)}
		for run := min(payload.RunSize, left); run > 0; {
			n := min(d.Frame(), run)
			r.Frames = append(r.Frames, uint32(n))
			run, left = run-n, left-n
		}
		runs = append(runs, r)
	}
	return runs
}

func sameEntry(a, b Entry) bool {
	return a.ID == b.ID && a.Place == b.Place && a.Packed == b.Packed &&
		same(a.Runs, b.Runs) && same(a.Dictionaries, b.Dictionaries)
}

func sameDescriptor(a, b batch.Descriptor) bool {
	return a.Rows == b.Rows && a.Body == b.Body && a.Block == b.Block && same(a.Nodes, b.Nodes) &&
		same(a.Buffers, b.Buffers) && same(a.Sums, b.Sums) &&
		same(a.From, b.From) &&
		(a.Metadata == nil) == (b.Metadata == nil) && (a.Metadata == nil || a.Metadata.Equal(*b.Metadata))
}

// same compares slices, of which none and empty are the same.
func same[T any](a, b []T) bool {
	return len(a) == 0 && len(b) == 0 || reflect.DeepEqual(a, b)
}

// TestEntryIsCut: no beginning of what was written is taken for the whole.
func TestEntryIsCut(t *testing.T) {
	k, schema := entryOfRecord(t, arrowgen.New(1).Record(arrowgen.Schema(arrow.BinaryTypes.String, arrow.ListOf(arrow.PrimitiveTypes.Int8)), 30))
	meta, place := k.meta(schema), k.place()
	for n := range meta {
		if _, err := make(Schemas).Read(meta[:n], place); !errors.Is(err, errFormat) {
			t.Fatalf("%d of %d bytes: %v", n, len(meta), err)
		}
	}
	for n := range place {
		if _, err := make(Schemas).Read(meta, place[:n]); !errors.Is(err, errFormat) {
			t.Fatalf("%d of %d bytes of the place: %v", n, len(place), err)
		}
	}
	if _, err := make(Schemas).Read(append(slices.Clone(meta), 0), place); !errors.Is(err, errFormat) {
		t.Errorf("with a byte behind: %v", err)
	}
	if _, err := make(Schemas).Read(meta, new(Entry).place()); !errors.Is(err, errFormat) {
		t.Errorf("with the place of a dictionary: %v", err)
	}
	if _, err := make(Schemas).Read(meta, append(place, 0)); !errors.Is(err, errFormat) {
		t.Errorf("with a byte behind the place: %v", err)
	}
}

// TestForgedDescriptor: what a file names by keys, or has in another form, is not taken from its
// descriptor.
func TestForgedDescriptor(t *testing.T) {
	k, schema := entryOfRecord(t, arrowgen.New(1).Record(arrowgen.Schema(arrow.PrimitiveTypes.Int64), 30))
	meta := k.meta(schema)
	for _, forged := range []string{`"Dictionaries":[{"Rows":7}]`, `"Metadata":{}`, `"Schema":{}`} {
		const begin = `"Descriptor":{`
		bad := bytes.Replace(meta, []byte(begin), []byte(begin+forged+","), 1)
		back, err := make(Schemas).Read(bad, k.place())
		if err != nil || bytes.Equal(bad, meta) {
			t.Fatalf("%s: %v", forged, err)
		}
		if d := back.Descriptor; d.Dictionaries != nil || d.Metadata != nil || d.Schema.NumFields() != 1 {
			t.Errorf("%s: %+v", forged, d)
		}
	}
}

// TestSchemasAreReadOnce: equal ones are one, and one that is damaged is refused.
func TestSchemasAreReadOnce(t *testing.T) {
	k, schema := entryOfRecord(t, arrowgen.New(1).Record(arrowgen.Schema(arrow.BinaryTypes.String), 30))
	s := make(Schemas)
	one, err := s.Read(k.meta(schema), k.place())
	if err != nil {
		t.Fatal(err)
	}
	two, err := s.Read(k.meta(slices.Clone(schema)), k.place())
	if err != nil {
		t.Fatal(err)
	}
	if one.Descriptor.Schema != two.Descriptor.Schema {
		t.Error("two batches of a schema have one each")
	}
	for name, wrong := range map[string][]byte{"no": nil, "a part of its": schema[:len(schema)/2]} {
		if _, err := s.Read(k.meta(wrong), k.place()); !errors.Is(err, errFormat) {
			t.Errorf("with %s schema: %v", name, err)
		}
	}
}

// TestDictionariesHaveBytes: a dictionary without any, which nobody writes, is refused:
// who adopts one counts on its memory.
func TestDictionariesHaveBytes(t *testing.T) {
	k, schema := entryOfRecord(t, arrowgen.New(1).Record(arrowgen.Schema(arrow.PrimitiveTypes.Int32), 0))
	if k.Descriptor.Body != 0 || k.Stored() != 0 {
		t.Fatalf("%d bytes, %d stored", k.Descriptor.Body, k.Stored())
	}
	if _, err := readBack(k, schema); err != nil {
		t.Errorf("a batch without bytes: %v", err)
	}
	k.ID = 0
	if _, err := readBack(k, schema); !errors.Is(err, errFormat) {
		t.Errorf("a dictionary without bytes: %v", err)
	}
}

// TestExtensionIsReadAsItWasWritten: where the buffers of an extension begin persists. An extension of
// nothing, or of two dictionaries, or a batch that is one, is refused.
func TestExtensionIsReadAsItWasWritten(t *testing.T) {
	rec := arrowgen.New(1).Record(arrowgen.Schema(arrow.BinaryTypes.String), 900)
	k, schema := entryOfRecord(t, rec)
	k.ID, k.Dictionaries, k.Descriptor.From = 0, []uint64{7}, make([]int64, len(k.Descriptor.Buffers))
	for i := range k.Descriptor.From {
		k.Descriptor.From[i] = int64(8 * i)
	}
	back, err := readBack(k, schema)
	if err != nil || !sameDescriptor(*back.Descriptor, *k.Descriptor) || !same(back.Dictionaries, k.Dictionaries) {
		t.Errorf("%+v, %v", back, err)
	}
	for name, spoil := range map[string]func(k *Entry){
		"no base":   func(k *Entry) { k.Dictionaries = nil },
		"two bases": func(k *Entry) { k.Dictionaries = []uint64{7, 8} },
		"a batch":   func(k *Entry) { k.ID = 3 },
		"a buffer":  func(k *Entry) { k.Descriptor.From = k.Descriptor.From[1:] },
		"negative":  func(k *Entry) { k.Descriptor.From[1] = -8 },
		"huge":      func(k *Entry) { k.Descriptor.From[1] = 1 << 62 },
	} {
		bad, d := *k, *k.Descriptor
		d.From = slices.Clone(d.From)
		bad.Descriptor = &d
		spoil(&bad)
		if _, err := readBack(&bad, schema); !errors.Is(err, errFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// FuzzEntry: no bytes make the reader panic, or return what would make others read or allocate out of
// range; what it accepts can be opened, or is refused, without a panic.
func FuzzEntry(f *testing.F) {
	g := arrowgen.New(5)
	for _, dt := range []arrow.DataType{arrow.PrimitiveTypes.Int32, arrow.BinaryTypes.StringView, arrow.ListOf(arrow.BinaryTypes.String)} {
		k, schema := entryOfRecord(f, g.Record(arrowgen.Schema(dt), 20))
		f.Add(k.meta(schema), k.place())
		k.Packed, k.Runs = true, fullRuns(k.Descriptor)
		f.Add(k.meta(schema), k.place())
	}
	f.Fuzz(func(t *testing.T, meta, place []byte) {
		k, err := make(Schemas).Read(meta, place)
		if err != nil {
			return
		}
		d := k.Descriptor
		if d.Body < 0 || d.Body%tier.Page != 0 || int64(len(d.Sums)) != (d.Body+d.SumBlock()-1)/d.SumBlock() {
			t.Errorf("%d bytes with %d sums", d.Body, len(d.Sums))
		}
		if n := k.Stored(); n < 0 || !k.Packed && n != d.Body {
			t.Errorf("a memory of %d bytes for a body of %d", n, d.Body)
		}
		if d.Body > 1<<20 || len(k.Dictionaries) > 0 {
			return
		}
		d.Cuts()
		rec, err := image.Open(d, [][]byte{make([]byte, d.Body)}, func() {})
		if err == nil {
			rec.Release()
		}
	})
}

// TestEntryFitsTogether: what does not is refused, each by itself, though the bytes are sound.
func TestEntryFitsTogether(t *testing.T) {
	for name, change := range map[string]func(*Entry){
		"rows below 0":               func(k *Entry) { k.Descriptor.Rows = -1 },
		"a body below 0":             func(k *Entry) { k.Descriptor.Body = -tier.Page; k.Descriptor.Sums = nil },
		"a body that ends in a page": func(k *Entry) { k.Descriptor.Body -= 8; k.Descriptor.Buffers = nil },
		"a sum too many":             func(k *Entry) { k.Descriptor.Sums = append(slices.Clone(k.Descriptor.Sums), 1) },
		"no sums":                    func(k *Entry) { k.Descriptor.Sums = nil },
		"sums of other blocks":       func(k *Entry) { k.Descriptor.Block, k.Descriptor.Body = payload.SumChunk/2, 16*tier.Page },
		"blocks of 3 pages":          func(k *Entry) { k.Descriptor.Block = 3 * tier.Page },
		"blocks of half a page": func(k *Entry) {
			k.Descriptor.Block, k.Descriptor.Sums = tier.Page/2, make([]uint64, 2)
		},
		"blocks that are too long":   func(k *Entry) { k.Descriptor.Block = 2 * payload.SumChunk },
		"runs of what is not packed": func(k *Entry) { k.Runs = fullRuns(k.Descriptor) },
		"no runs":                    func(k *Entry) { k.Packed = true },
		"a frame that is too long":   func(k *Entry) { k.Packed, k.Runs = true, fullRuns(k.Descriptor); k.Runs[0].Frames[0]++ },
		"a frame without bytes":      func(k *Entry) { k.Packed, k.Runs = true, fullRuns(k.Descriptor); k.Runs[0].Frames[0] = 0 },
		"a frame too few": func(k *Entry) {
			k.Packed, k.Runs = true, fullRuns(k.Descriptor)
			k.Runs[0].Frames = k.Runs[0].Frames[1:]
		},
		"a frame too many": func(k *Entry) {
			k.Packed, k.Runs = true, fullRuns(k.Descriptor)
			k.Runs[0].Frames = append(k.Runs[0].Frames, 1)
		},
		"a buffer beyond the body": func(k *Entry) { k.Descriptor.Buffers[1].Length = k.Descriptor.Body + 1 },
		"a buffer before it":       func(k *Entry) { k.Descriptor.Buffers[1].Offset = -8 },
		"a dictionary that is not named": func(k *Entry) {
			k.Descriptor.Nodes[0] = payload.Node{Length: int64(len(k.Dictionaries)), Nulls: payload.Outside}
		},
		"a dictionary that is packed": func(k *Entry) { k.ID, k.Packed, k.Runs = 0, true, fullRuns(k.Descriptor) },
	} {
		k, schema := entryOfRecord(t, arrowgen.New(1).Record(arrowgen.Schema(arrow.PrimitiveTypes.Int64), 300))
		if _, err := readBack(k, schema); err != nil {
			t.Fatal(err)
		}
		change(k)
		if _, err := readBack(k, schema); !errors.Is(err, errFormat) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
