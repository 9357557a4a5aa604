package image

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/batch"
)

// coded makes a record with a dictionary of n strings, every ninth of which is null.
func coded(n int) arrow.RecordBatch {
	dt := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.BinaryTypes.String}
	values, indices := array.NewStringBuilder(memory.DefaultAllocator), array.NewInt32Builder(memory.DefaultAllocator)
	for i := range n {
		if i%9 == 8 {
			values.AppendNull()
		} else {
			values.Append(fmt.Sprintf("value %d", i))
		}
	}
	indices.Append(int32(n - 1))
	return array.NewRecordBatch(arrow.NewSchema([]arrow.Field{{Name: "d", Type: dt, Nullable: true}}, nil),
		[]arrow.Array{array.NewDictionaryArray(dt, indices.NewArray(), values.NewArray())}, 1)
}

// laid lays a dictionary out on the heap.
func laid(t *testing.T, l *Layout) ([]byte, *batch.Descriptor) {
	t.Helper()
	body := make([]byte, l.Desc.Body)
	if err := l.WriteTo([][]byte{body}); err != nil {
		t.Fatal(err)
	}
	d, err := l.Descriptor()
	if err != nil {
		t.Fatal(err)
	}
	return body, d
}

// TestChain: the images of a chain have the bytes of the whole image once, but for up to a word of
// each buffer. Open assembles them. Descriptors that do not fit together are refused.
func TestChain(t *testing.T) {
	var plans, descs []*batch.Descriptor
	var last *Layout
	for _, n := range []int{701, 1403, 2999} {
		l, err := NewLayout(coded(n), MaxInline)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		dict := l.Dictionaries[0]
		plan := &batch.Descriptor{
			Rows: dict.Desc.Rows, Nodes: dict.Desc.Nodes, Buffers: dict.Desc.Buffers, Body: dict.Desc.Body,
		}
		if last != nil {
			plan = dict.Extension(plans[len(plans)-1])
		}
		plans, last = append(plans, plan), dict
	}
	bodies := make(map[*batch.Descriptor][][]byte)
	total := int64(0)
	for _, l := range last.Chain(plans) {
		body, d := laid(t, l)
		descs, bodies[d] = append(descs, d), [][]byte{body}
		total += l.bytes
	}
	if most := last.bytes + 2*3*8; total > most {
		t.Errorf("the images have %d bytes, want %d at most", total, most)
	}
	d := descs[2]
	whole, got, err := InOnePiece(d, bodies)
	if err != nil {
		t.Fatal(err)
	}
	want, plain := laid(t, last)
	if !bytes.Equal(got[0], want) || !slices.Equal(whole.Buffers, plain.Buffers) {
		t.Error("the assembled image is not the whole one")
	}
	shorter, _, err := InOnePiece(descs[1], bodies)
	if err != nil {
		t.Fatal(err)
	}
	if first := First(descs[1], whole); first.Rows != 1403 || first.Buffers[2].Length != shorter.Buffers[2].Length {
		t.Errorf("the first values have %d rows and buffers %v", first.Rows, first.Buffers)
	}

	for name, spoil := range map[string]func(d *batch.Descriptor){
		"negative":      func(d *batch.Descriptor) { d.From[2] = -8 },
		"within a word": func(d *batch.Descriptor) { d.From[1] += 4; d.Buffers[1].Length -= 4 },
		"a gap":         func(d *batch.Descriptor) { d.From[2] += 1 << 20 },
		"no base":       func(d *batch.Descriptor) { d.Dictionaries = nil },
		"few buffers":   func(d *batch.Descriptor) { d.From = d.From[:2] },
		"absent":        func(d *batch.Descriptor) { d.Buffers[0].Offset, d.Buffers[0].Length = -1, 0 },
	} {
		bad := *d
		bad.From, bad.Buffers = slices.Clone(d.From), slices.Clone(d.Buffers)
		spoil(&bad)
		var invalid *InvalidError
		if _, err := ChainParts(&bad, Whole(d)); !errors.As(err, &invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
