package arrowgen

import (
	"encoding/binary"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
)

func (g *Gen) binary(dt arrow.DataType, n int) *array.Data {
	wide := dt.ID() == arrow.LARGE_STRING || dt.ID() == arrow.LARGE_BINARY
	var values []byte
	if !g.Plain && g.Rng.IntN(2) == 0 {
		values = append(values, "before"...) // the first offset is not 0
	}
	offsets := putOffset(nil, wide, int64(len(values)))
	for range n {
		values = append(values, g.text()...)
		offsets = putOffset(offsets, wide, int64(len(values)))
	}
	if !g.Plain && g.Rng.IntN(2) == 0 {
		values = append(values, "after"...)
	}
	return g.finish(dt, g.rows(n), [][]byte{offsets, values})
}

func (g *Gen) views(dt arrow.DataType, n int) *array.Data {
	buffers := [][]byte{nil}
	if !g.Plain {
		for range g.Rng.IntN(3) {
			buffers = append(buffers, []byte("nobody refers to this"))
		}
	}
	headers := make([]byte, 0, 16*n)
	for i := range n {
		v := g.text()
		header := make([]byte, 16)
		binary.LittleEndian.PutUint32(header, uint32(len(v)))
		if copy(header[4:], v) < len(v) {
			k := g.Rng.IntN(len(buffers))
			clear(header[8:])
			binary.LittleEndian.PutUint32(header[8:], uint32(k))
			binary.LittleEndian.PutUint32(header[12:], uint32(len(buffers[k])))
			buffers[k] = append(buffers[k], v...)
		}
		if !g.Plain && i > 0 && g.Rng.IntN(8) == 0 { // two views of the same bytes
			copy(header, headers[16*g.Rng.IntN(i):])
		}
		headers = append(headers, header...)
	}
	if g.Plain && len(buffers[0]) == 0 {
		buffers = nil
	}
	return g.finish(dt, g.rows(n), append([][]byte{headers}, buffers...))
}

func (g *Gen) list(t arrow.ListLikeType, n int) *array.Data {
	wide := t.ID() == arrow.LARGE_LIST
	at := int64(g.slack())
	offsets := putOffset(nil, wide, at)
	for range n {
		at += max(0, g.Rng.Int64N(6)-1)
		offsets = putOffset(offsets, wide, at)
	}
	valid := g.rows(n)
	var child *array.Data
	if t.ID() == arrow.MAP { // neither entries nor keys may be null
		entry := t.Elem().(*arrow.StructType)
		entries := int(at) + g.slack()
		nulls := g.Nulls
		g.Nulls = 0
		keys := g.whole(entry.Field(0).Type, entries)
		g.Nulls = nulls
		child = g.finish(entry, rows{n: entries}, nil, keys, g.data(entry.Field(1).Type, entries))
	} else {
		child = g.data(t.Elem(), int(at)+g.slack())
	}
	return g.finish(t, valid, [][]byte{offsets}, child)
}

func (g *Gen) listView(t arrow.ListLikeType, n int) *array.Data {
	wide := t.ID() == arrow.LARGE_LIST_VIEW
	values := int64(2*n + g.slack())
	var offsets, sizes []byte
	at := int64(0)
	for range n {
		size := min(g.Rng.Int64N(4), values)
		off := g.Rng.Int64N(values - size + 1)
		if g.Plain { // in order and dense
			off = min(at, values)
			size = min(size, values-off)
			at = off + size
		}
		offsets = putOffset(offsets, wide, off)
		sizes = putOffset(sizes, wide, size)
	}
	return g.finish(t, g.rows(n), [][]byte{offsets, sizes}, g.data(t.Elem(), int(values)))
}

// codes returns n random type codes of a union.
func (g *Gen) codes(t arrow.UnionType, n int) []byte {
	codes := make([]byte, n)
	for i := range codes {
		codes[i] = byte(t.TypeCodes()[g.Rng.IntN(t.NumFields())])
	}
	return codes
}

func (g *Gen) denseUnion(t *arrow.DenseUnionType, n int) *array.Data {
	codes := g.codes(t, n)
	lengths := make([]int64, t.NumFields())
	for i := range lengths {
		lengths[i] = int64(g.slack())
	}
	var offsets []byte
	for _, code := range codes {
		child := t.ChildIDs()[code]
		if !g.Plain && lengths[child] > 0 && g.Rng.IntN(8) == 0 {
			lengths[child]-- // refer to the previous value again
		}
		offsets = putOffset(offsets, false, lengths[child])
		lengths[child]++
	}
	children := make([]arrow.ArrayData, len(lengths))
	for i, f := range t.Fields() {
		children[i] = g.data(f.Type, int(lengths[i])+g.slack())
	}
	return g.finish(t, rows{n: n}, [][]byte{codes, offsets}, children...)
}

func (g *Gen) dictionary(t *arrow.DictionaryType, n int) *array.Data {
	entries := 1 + g.Rng.IntN(20)
	dict := g.data(t.ValueType, entries)
	defer dict.Release()
	width := t.IndexType.(arrow.FixedWidthDataType).Bytes()
	b := make([]byte, 0, n*width)
	for range n {
		b = append(b, byte(g.Rng.IntN(entries)))
		b = append(b, make([]byte, width-1)...)
	}
	d := g.finish(t, g.rows(n), [][]byte{b})
	d.SetDictionary(dict)
	return d
}

func (g *Gen) runs(t *arrow.RunEndEncodedType, n int) *array.Data {
	var ends []byte
	runs := 0
	width := t.RunEnds().(arrow.FixedWidthDataType).Bytes()
	for at := 0; at < n; runs++ {
		at += 1 + g.Rng.IntN(6)
		if g.Plain {
			at = min(at, n)
		}
		ends = append(ends, binary.LittleEndian.AppendUint64(nil, uint64(at))[:width]...)
	}
	endsData := g.finish(t.RunEnds(), rows{n: runs}, [][]byte{ends})
	return g.finish(t, rows{n: n}, nil, endsData, g.data(t.Encoded(), runs+g.slack()))
}

// extension makes the storage and gives it the extension type.
func (g *Gen) extension(t arrow.ExtensionType, n int) *array.Data {
	s := g.data(t.StorageType(), n)
	defer s.Release()
	d := array.NewData(t, s.Len(), s.Buffers(), s.Children(), s.NullN(), s.Offset())
	if dict, ok := s.Dictionary().(*array.Data); ok && dict != nil {
		d.SetDictionary(dict)
	}
	return d
}
