package image

import (
	"encoding/binary"
	"math"
	"sort"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
)

// runs lays out the runs that the rows of s show. The ends are counted from the first row, and the
// last is at most the number of rows, so that the array begins at offset 0 like all others. The
// first and the last run are found by binary search in a record. On a device they are counted by
// reading all ends; if the array begins at row 0 there, all runs are kept, because a last run that
// is too long does no harm.
func (p *planner) runs(s *rows) error {
	t := s.Type.(*arrow.RunEndEncodedType)
	index, ok := t.RunEnds().(arrow.FixedWidthDataType)
	if !ok || !t.ValidRunEndsType(t.RunEnds()) {
		return p.path.Invalid("run ends of type %s", t.RunEnds())
	}
	p.path = append(p.path, "run_ends")
	e, err := p.rows(t.RunEnds(), s.child(0), 0, all)
	if err != nil {
		return err
	}
	// An array without rows shows no runs, whatever its children have.
	if s.n == 0 {
		e.n = 0
	}
	// The child with the run ends is laid out here and not by array, because its values must be
	// adjusted. Its spans are a validity, always absent, and the ends.
	width, first, end := int64(index.Bytes()), int64(0), int64(0) // the runs that s shows
	p.spans = append(p.spans, payload.Absent)
	m, none, err := p.take(&e, 1, e.Buffers[1])
	if err != nil {
		return err
	}
	if !none {
		// clamped means that the ends must be changed: lowered by s.at, and the last one cut to the
		// rows.
		clamped := s.at > 0
		end = e.n
		if s.dev == nil {
			runs, stop := int(e.n), s.at+s.n
			first = int64(sort.Search(runs, func(i int) bool { return signed(m.bytes, width, int64(i)) > s.at }))
			end = 1 + int64(sort.Search(runs, func(i int) bool { return signed(m.bytes, width, int64(i)) >= stop }))
			clamped = clamped || end <= e.n && signed(m.bytes, width, end-1) != s.n
		} else if s.at > 0 { // run ends ascend; of those that do not, no more is shown than there is
			before, ok := p.facts.count(census{
				of: payload.DeviceRange{Addr: m.addr, Length: m.size}, width: width, from: s.at, n: s.n,
			})
			if ok {
				first, end = before[0], before[1]+1
			}
		}
		// Only these runs are kept. end is the number of the first run that reaches to the last
		// row, plus 1. It exceeds e.n if the runs are too short, which is an error below.
		if end <= e.n && first < end {
			if m, err = p.narrow(&e, 1, m, first*width, (end-first)*width); err != nil {
				return err
			}
			var adj *payload.Adjustment
			if clamped {
				adj = &payload.Adjustment{How: payload.Ends, Width: width, Base: s.at, Count: s.n}
			}
			p.put(m.size, m, adj, nil)
		}
	}
	if end > e.n || s.n > 0 && first >= end {
		return p.path.Invalid("the runs end before row %d", s.at+s.n)
	}
	// The node of the child with the run ends. Then the values of the same runs.
	p.nodes = append(p.nodes, payload.Node{Length: end - first, Nulls: 0})
	p.path = p.path[:len(p.path)-1]
	if err := p.array("values", t.Encoded(), s.child(1), first, end-first); err != nil {
		return err
	}
	p.path = p.path[:len(p.path)-1] // that of s
	return nil
}

// signed returns the i-th integer of width bytes: 2, 4 or 8, the widths that run ends may have.
func signed(b []byte, width, i int64) int64 {
	if width == 2 {
		return int64(int16(binary.LittleEndian.Uint16(b[2*i:])))
	}
	return OffsetAt(b, width, i)
}

// denseOffsets adds the offsets of a record's dense union, lowered for each child by the first that
// is shown, and returns which values of each child the rows show. Values between that no row shows
// are kept. Each row is checked, because its type code is an index here.
func (p *planner) denseOffsets(s *rows, b shape.Buffer) ([]interval, error) {
	t := s.Type.(arrow.UnionType)
	shown := make([]interval, t.NumFields())
	m, none, err := p.take(s, 1, b)
	if none || err != nil {
		return shown, err
	}
	d := &denseOffsets{codes: s.buffer(0).bytes[s.at:][:s.n], offsets: m.bytes}
	// The format limits type codes to 0 to 127. 0 in the table means that no child has the code.
	var child [128]int16 // by code: the child's number + 1
	for i, code := range t.TypeCodes() {
		if code >= 0 && i < len(shown) {
			child[code] = int16(i) + 1
		}
	}
	for i, code := range d.codes {
		if code > 127 || child[code] == 0 {
			return nil, p.path.Invalid("row %d has the type code %d, which the union does not have", i, int8(code))
		}
		at := OffsetAt(d.offsets, 4, int64(i))
		if at < 0 {
			return nil, p.path.Invalid("row %d has the offset %d", i, at)
		}
		// The child's values from the lowest offset to the highest are shown.
		shown[child[code]-1].add(at, 1)
	}
	// If every child is shown from its first value on, the offsets need no change.
	raw := true
	for code, c := range child {
		if c > 0 {
			d.base[code] = uint32(shown[c-1].from)
			raw = raw && d.base[code] == 0
		}
	}
	if raw {
		p.put(4*s.n, buffer{bytes: d.offsets}, nil, nil)
	} else {
		p.put(4*s.n, buffer{}, nil, d)
	}
	return shown, nil
}

// add extends e to the n values from at on, where n > 0. A to of 0 means that e is empty.
func (e *interval) add(at, n int64) {
	if e.to == 0 {
		e.from = at
	}
	e.from, e.to = min(e.from, at), max(e.to, at+n)
}

// listView adds the offsets and sizes of a record's list views, and returns the child's values
// between the first and the last that a list shows. Views may be in any order, overlap and leave
// gaps, so values in between cannot be taken out without moving each list. A null list becomes
// empty at offset 0, so that equal arrays have equal images.
func (p *planner) listView(s *rows, b shape.Buffer) ([]interval, error) {
	shown := make([]interval, 1)
	offsets, lacks1, err := p.take(s, 1, b)
	if err != nil {
		return nil, err
	}
	sizes, lacks2, err := p.take(s, 2, b)
	if err != nil {
		return nil, err
	}
	if lacks1 || lacks2 { // nothing is shown: there are no rows, or all are null
		if !lacks1 || !lacks2 {
			p.spans = append(p.spans, payload.Absent)
		}
		return shown, nil
	}
	width := b.Width
	l := listViews{offsets: offsets.bytes, sizes: sizes.bytes, at: s.at, width: width}
	if s.nulls > 0 {
		l.valid = s.buffer(0).bytes
	}
	for i := range s.n {
		// A null or empty list shows nothing, wherever it is.
		size := l.size(i)
		if size == 0 {
			continue
		}
		at := OffsetAt(l.offsets, width, i)
		if at < 0 || size < 0 || at > math.MaxInt64-size {
			return nil, p.path.Invalid("row %d is a list of %d values from %d on", i, size, at)
		}
		shown[0].add(at, size)
	}
	// The child begins with the first value that is shown, so all offsets are lowered by as much.
	l.base = shown[0].from
	// Without nulls the sizes are copied as they are, and so are the offsets if no list begins
	// later.
	starts, lengths := source(&l), source(nil)
	if l.valid != nil {
		sizes := l
		sizes.sizesOnly = true
		lengths = &sizes
	} else if l.base == 0 {
		starts = nil
	}
	p.put(s.n*width, offsets, nil, starts)
	p.put(s.n*width, sizes, nil, lengths)
	return shown, nil
}

// The format of a view: 16 bytes, of which the first 4 are the length. A value of up to 12 bytes is
// in the view. A longer one has 4 bytes of its beginning there, the number of a data buffer, and
// the offset in it.
const (
	viewWidth  = 16
	viewInline = 12
)

// views lays out a record's binary or string views. There are three ways to keep the bytes that they
// refer to: all data buffers as they are; the range of each buffer from the first to the last byte
// that a view refers to; or only these bytes, gathered in the views' order. views chooses the first
// of them that keeps at most an eighth more bytes and buffers than necessary. Only the last takes
// time for each byte, and slices of arrays that a builder made do not need it.
func (p *planner) views(s *rows, b shape.Buffer) error {
	m, none, err := p.take(s, 1, b)
	if err != nil {
		return err
	}
	if none {
		p.nodes = append(p.nodes, payload.Node{Length: 0, Nulls: 0})
		return nil
	}
	v := &views{views: m.bytes, at: s.at}
	if s.nulls > 0 {
		v.valid = s.buffer(0).bytes
	}
	total := int64(0)
	// Buffers 0 and 1 are the validity and the views.
	for i := 2; i < len(s.host.Buffers()); i++ {
		data := s.buffer(i)
		v.data = append(v.data, data.bytes)
		total += data.size
	}
	// used counts the bytes that views refer to, ranges what each data buffer has of them. Bytes
	// that two views share count twice, which only makes keeping the buffers as they are more
	// likely.
	used, ranges := int64(0), make([]viewRange, len(v.data))
	for i := range s.n {
		size := v.size(i)
		// The value is in the view, and needs no data buffer. A negative size is large as a uint64.
		if uint64(size) <= viewInline {
			continue
		}
		if size < 0 {
			return p.path.Invalid("row %d is a view of %d bytes", i, size)
		}
		k, at := v.place(i)
		// Each view is checked, because its numbers are indices here and in any consumer.
		if k < 0 || k >= int64(len(v.data)) || at < 0 || at > int64(len(v.data[k]))-size {
			return p.path.Invalid("row %d is a view of %d bytes at %d of buffer %d of %d", i, size, at, k, len(v.data))
		}
		ranges[k].add(at, size)
		used += size
	}
	// Data buffers that no view refers to are left out, and the others get new numbers.
	spanned, kept := int64(0), 0
	for i := range ranges {
		if r := &ranges[i]; r.to > 0 {
			spanned += r.to - r.from
			r.number = uint32(kept)
			kept++
		}
	}
	switch {
	case used >= total-total/8 && kept >= len(ranges)-len(ranges)/8:
		// First way: everything as it is. The views need no change either.
		p.put(s.n*viewWidth, buffer{bytes: v.views}, nil, nil)
		p.nodes = append(p.nodes, payload.Node{Length: int64(len(v.data)), Nulls: 0})
		for _, data := range v.data {
			p.put(int64(len(data)), buffer{bytes: data}, nil, nil)
		}
	case used >= spanned-spanned/8:
		// Second way: a range of each buffer.
		p.put(s.n*viewWidth, buffer{}, nil, &movedViews{v, ranges})
		p.nodes = append(p.nodes, payload.Node{Length: int64(kept), Nulls: 0})
		for i, r := range ranges {
			if r.to > 0 {
				p.put(r.to-r.from, buffer{bytes: v.data[i][r.from:r.to]}, nil, nil)
			}
		}
	default:
		// Third way: only the bytes that are shown.
		v.split(p.maxVar)
		p.put(s.n*viewWidth, buffer{}, nil, v)
		p.nodes = append(p.nodes, payload.Node{Length: int64(len(v.begins)), Nulls: 0})
		for i, begin := range v.begins {
			end := v.total
			if i+1 < len(v.begins) {
				end = v.begins[i+1].at
			}
			p.put(end-begin.at, buffer{}, nil, &viewData{views: v, begin: begin})
		}
	}
	return nil
}
