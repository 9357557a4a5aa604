package image

import (
	"encoding/binary"
	"math"
	"sort"

	"github.com/apache/arrow-go/v18/arrow"
)

// runs lays out the runs that s shows, with the ends counted from its first row.
func (p *planner) runs(t *arrow.RunEndEncodedType, s slice) error {
	children := s.d.Children()
	index, ok := t.RunEnds().(arrow.FixedWidthDataType)
	ends := children[0]
	switch {
	case !ok || !t.ValidRunEndsType(t.RunEnds()):
		return p.path.Invalid("run ends of type %s", t.RunEnds())
	case ends == nil || ends.DataType().ID() != t.RunEnds().ID():
		return p.path.Invalid("the run ends are not of type %s", t.RunEnds())
	case s.at > math.MaxInt64-s.n:
		return p.path.Invalid("%d rows from %d on", s.n, s.at)
	}
	width, runs := int64(index.Bytes()), int64(ends.Len())
	e := slice{d: ends, at: int64(ends.Offset()), n: runs}
	if e.at < 0 || runs < 0 {
		return p.path.Invalid("run ends of offset %d, length %d", e.at, runs)
	}
	b, has, all, err := p.need(e, 1, width, 0)
	if err != nil {
		return err
	}
	first, last := int64(0), int64(0)
	if s.n > 0 {
		if !all {
			return p.path.Invalid("%d rows and no runs", s.n)
		}
		b = b[e.at*width:][:runs*width]
		first = int64(sort.Search(int(runs), func(i int) bool { return signed(b, width, int64(i)) > s.at }))
		last = first + int64(sort.Search(int(runs-first), func(i int) bool { return signed(b, width, first+int64(i)) >= s.at+s.n })) + 1
		if last > runs {
			return p.path.Invalid("the runs end before row %d", s.at+s.n)
		}
	}
	p.path.Push("run_ends")
	p.node(last-first, 0)
	p.absent()
	switch n := (last - first) * width; {
	case !has:
		p.absent()
	case n == 0:
		p.raw(nil)
	case s.at == 0 && signed(b, width, last-1) == s.n:
		p.raw(b[first*width:][:n])
	default:
		p.made(n, &runEnds{b[first*width:][:n], width, s.at, s.n})
	}
	p.path.Pop()
	return p.child("values", t.Encoded(), children[1], first, last-first)
}

// signed returns the i-th integer of width bytes.
func signed(b []byte, width, i int64) int64 {
	switch width {
	case 2:
		return int64(int16(binary.LittleEndian.Uint16(b[2*i:])))
	case 4:
		return int64(int32(binary.LittleEndian.Uint32(b[4*i:])))
	}
	return int64(binary.LittleEndian.Uint64(b[8*i:]))
}

// extent is the values of a child from from up to, and without, to.
type extent struct{ from, to int64 }

// denseOffsets adds the offsets of a dense union and returns which values of
// each child they show.
func (p *planner) denseOffsets(t arrow.UnionType, s slice) ([]extent, error) {
	fields := t.NumFields()
	shown := make([]extent, fields)
	b, has, all, err := p.need(s, 2, 4, 0)
	switch {
	case err != nil:
		return nil, err
	case !has:
		p.absent()
		return shown, nil
	case !all || s.n == 0:
		p.raw(nil)
		return shown, nil
	}
	b = b[4*s.at:][:4*s.n]
	codes, _ := s.buffer(1)
	codes = codes[s.at:][:s.n]
	var child [128]int16 // by code: the child's number + 1
	for i, code := range t.TypeCodes() {
		if code >= 0 {
			child[code] = int16(i) + 1
		}
	}
	for i, code := range codes {
		if code > 127 || child[code] == 0 || int(child[code]) > fields {
			return nil, p.path.Invalid("row %d has the type code %d, which the union does not have", i, int8(code))
		}
		at := OffsetAt(b, 4, int64(i))
		if at < 0 {
			return nil, p.path.Invalid("row %d has the offset %d", i, at)
		}
		e := &shown[child[code]-1]
		if e.to == 0 {
			e.from = at
		}
		e.from, e.to = min(e.from, at), max(e.to, at+1)
	}
	moved := &denseOffsets{codes: codes, offsets: b}
	raw := true
	for code, c := range child {
		if c > 0 {
			moved.base[code] = uint32(shown[c-1].from)
			raw = raw && shown[c-1].from == 0
		}
	}
	if raw {
		p.raw(b)
	} else {
		p.made(int64(len(b)), moved)
	}
	return shown, nil
}

// listView adds list views, and returns the values between the first and the last that a list
// shows, into which they are. Null lists are empty and begin at 0.
func (p *planner) listView(s slice, width int64) ([]extent, error) {
	offsets, has1, all1, err := p.need(s, 1, width, 0)
	if err != nil {
		return nil, err
	}
	sizes, has2, all2, err := p.need(s, 2, width, 0)
	if err != nil {
		return nil, err
	}
	var shown extent
	if s.n > 0 && all1 && all2 {
		valid, _ := s.buffer(0)
		if s.nulls == 0 {
			valid = nil
		}
		l := listViews{offsets: offsets[s.at*width:][:s.n*width], sizes: sizes[s.at*width:][:s.n*width], valid: valid, at: s.at, width: width}
		if shown, err = p.shown(&l, s.n); err != nil {
			return nil, err
		}
		if l.base = shown.from; l.base == 0 && valid == nil {
			p.raw(l.offsets)
		} else {
			p.made(s.n*width, &l)
		}
		if valid == nil {
			p.raw(l.sizes)
		} else {
			p.made(s.n*width, &listSizes{l})
		}
	} else {
		for _, has := range []bool{has1, has2} {
			if has && s.n == 0 {
				p.raw(nil)
			} else {
				p.absent()
			}
		}
	}
	return []extent{shown}, nil
}

// shown returns which values the lists show.
func (p *planner) shown(l *listViews, n int64) (extent, error) {
	e := extent{from: math.MaxInt64}
	for i := range n {
		size := l.size(i)
		if size == 0 {
			continue
		}
		at := OffsetAt(l.offsets, l.width, i)
		if at < 0 || size < 0 || at > math.MaxInt64-size {
			return e, p.path.Invalid("row %d is a list of %d values from %d on", i, size, at)
		}
		e.from, e.to = min(e.from, at), max(e.to, at+size)
	}
	if e.to == 0 {
		e.from = 0
	}
	return e, nil
}

const (
	viewWidth  = 16 // bytes of a view
	viewInline = 12 // bytes that a view has room for

	// viewStride is for how many views there is one entry in the index of those
	// that are compacted: 8 bytes for 4 KiB of views.
	viewStride = 256
)

// views lays out binary or string views. There are three ways to keep the bytes that they refer to:
// all data buffers as they are; the range of each buffer from the first to the last byte that a
// view refers to; or only these bytes, gathered in the views' order. views chooses the first of
// them that keeps at most an eighth more bytes and buffers than necessary. Only the last takes time
// for each byte, and slices of arrays that a builder made do not need it.
func (p *planner) views(s slice) error {
	b, has, all, err := p.need(s, 1, viewWidth, 0)
	if err != nil {
		return err
	}
	if !has || !all || s.n == 0 {
		if has && s.n == 0 {
			p.raw(nil)
		} else {
			p.absent()
		}
		p.node(0, 0)
		return nil
	}
	v := &views{views: b[s.at*viewWidth:][:s.n*viewWidth], at: s.at}
	if s.nulls > 0 {
		v.valid, _ = s.buffer(0)
	}
	total := int64(0)
	for i := 2; i < len(s.d.Buffers()); i++ {
		data, _ := s.buffer(i)
		v.data = append(v.data, data)
		total += int64(len(data))
	}
	used, ranges, err := p.used(v, s.n)
	if err != nil {
		return err
	}
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
		p.raw(v.views)
		p.node(int64(len(v.data)), 0)
		for _, data := range v.data {
			p.raw(data)
		}
	case used >= spanned-spanned/8:
		p.made(int64(len(v.views)), &movedViews{v, ranges})
		p.node(int64(kept), 0)
		for i, r := range ranges {
			if r.to > 0 {
				p.raw(v.data[i][r.from:r.to])
			}
		}
	default:
		v.split(p.maxVar)
		p.made(int64(len(v.views)), v)
		p.node(int64(len(v.begins)), 0)
		for i, begin := range v.begins {
			end := v.total
			if i+1 < len(v.begins) {
				end = v.begins[i+1]
			}
			p.made(end-begin, &viewData{v, begin})
		}
	}
	return nil
}

// used checks the views and returns how many bytes they refer to, and which
// part of each data buffer those lie in.
func (p *planner) used(v *views, n int64) (used int64, ranges []viewRange, err error) {
	ranges = make([]viewRange, len(v.data))
	for i := range n {
		size := int64(int32(binary.LittleEndian.Uint32(v.views[i*viewWidth:])))
		if uint64(size) <= viewInline || isNull(v.valid, v.at+i) {
			continue
		}
		if size < 0 {
			return 0, nil, p.path.Invalid("row %d is a view of %d bytes", i, size)
		}
		k, at := v.place(i)
		if k < 0 || k >= int64(len(v.data)) || at < 0 || at > int64(len(v.data[k]))-size {
			return 0, nil, p.path.Invalid("row %d is a view of %d bytes at %d of buffer %d of %d", i, size, at, k, len(v.data))
		}
		r := &ranges[k]
		if r.to == 0 {
			r.from = at
		}
		r.from, r.to = min(r.from, at), max(r.to, at+size)
		used += size
	}
	return used, ranges, nil
}
