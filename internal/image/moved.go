package image

import (
	"encoding/binary"
	"math"
	"sort"

	"github.com/spillway-db/spillway/internal/sumcopy"
)

// bits is a run of a bitmap that does not begin with a byte, and is moved so
// that it does. The bits behind its end are zero.
type bits struct {
	src   []byte // from the byte with the first bit on, to the byte with the last
	shift uint   // where in its byte the first bit is
	n     int64
}

func newBits(b []byte, at, n int64) *bits {
	return &bits{src: b[at/8 : (at+n+7)/8], shift: uint(at % 8), n: n}
}

func (s *bits) read(dst []byte, at int64) {
	src, d := s.src[at:], dst
	right, left := s.shift&63, (64-s.shift)&63 // &63 shows the compiler that they are below 64
	for len(d) >= 32 && len(src) >= 40 {
		v, w := binary.LittleEndian.Uint64(src), binary.LittleEndian.Uint64(src[8:])
		x, y := binary.LittleEndian.Uint64(src[16:]), binary.LittleEndian.Uint64(src[24:])
		z := binary.LittleEndian.Uint64(src[32:])
		binary.LittleEndian.PutUint64(d, v>>right|w<<left)
		binary.LittleEndian.PutUint64(d[8:], w>>right|x<<left)
		binary.LittleEndian.PutUint64(d[16:], x>>right|y<<left)
		binary.LittleEndian.PutUint64(d[24:], y>>right|z<<left)
		d, src = d[32:], src[32:]
	}
	for i := range d {
		d[i] = src[i] >> s.shift
		if i+1 < len(src) {
			d[i] |= src[i+1] << (8 - s.shift)
		}
	}
	if tail := s.n % 8; tail != 0 && at+int64(len(dst)) == (s.n+7)/8 {
		dst[len(dst)-1] &= 1<<tail - 1
	}
}

// lower32 subtracts base from 32-bit offsets. Layout.emitLarge knows it, to do
// that while it copies.
type lower32 struct {
	src  []byte
	base uint32
}

func (s *lower32) read(dst []byte, at int64) { sumcopy.Sub32(dst, s.src[at:], s.base) }

// lower64 subtracts base from 64-bit offsets.
type lower64 struct {
	src  []byte
	base uint64
}

func (s *lower64) read(dst []byte, at int64) { sumcopy.Sub64(dst, s.src[at:], s.base) }

// runEnds counts the ends of runs from the row base on, and at most to length.
type runEnds struct {
	src                 []byte
	width, base, length int64
}

func (s *runEnds) read(dst []byte, at int64) {
	for i := int64(0); i < int64(len(dst)); i += s.width {
		putOffset(dst[i:], s.width, min(signed(s.src, s.width, (at+i)/s.width)-s.base, s.length))
	}
}

// putOffset writes v in width bytes.
func putOffset(b []byte, width, v int64) {
	switch width {
	case 2:
		binary.LittleEndian.PutUint16(b, uint16(v))
	case 4:
		binary.LittleEndian.PutUint32(b, uint32(v))
	default:
		binary.LittleEndian.PutUint64(b, uint64(v))
	}
}

// denseOffsets counts the offsets of a dense union from the first value that it
// shows of each child.
type denseOffsets struct {
	codes   []byte // checked
	offsets []byte
	base    [128]uint32 // by type code
}

func (s *denseOffsets) read(dst []byte, at int64) {
	for i := int64(0); i < int64(len(dst)); i += 4 {
		v := binary.LittleEndian.Uint32(s.offsets[at+i:])
		binary.LittleEndian.PutUint32(dst[i:], v-s.base[s.codes[(at+i)/4]&127])
	}
}

// listViews makes the offsets of list views, counted from base.
type listViews struct {
	offsets, sizes  []byte
	valid           []byte // nil if all are
	at, width, base int64
}

// size returns the size of list i, 0 for a null.
func (s *listViews) size(i int64) int64 {
	if isNull(s.valid, s.at+i) {
		return 0
	}
	return OffsetAt(s.sizes, s.width, i)
}

func isNull(valid []byte, i int64) bool { return valid != nil && valid[i/8]>>(i%8)&1 == 0 }

func (s *listViews) read(dst []byte, at int64) {
	for o := int64(0); o < int64(len(dst)); o += s.width {
		i, v := (at+o)/s.width, int64(0)
		if s.size(i) != 0 {
			v = OffsetAt(s.offsets, s.width, i) - s.base
		}
		putOffset(dst[o:], s.width, v)
	}
}

// listSizes makes the sizes of list views of which some are null.
type listSizes struct{ listViews }

func (s *listSizes) read(dst []byte, at int64) {
	for o := int64(0); o < int64(len(dst)); o += s.width {
		putOffset(dst[o:], s.width, s.size((at+o)/s.width))
	}
}

// movedViews makes views into data buffers of which only ranges are kept. Null
// views are zero.
type movedViews struct {
	*views
	ranges []viewRange // by buffer
}

// viewRange is the bytes of a data buffer that views refer to, and its number among the buffers that
// have some. In one that no view refers to, to is 0.
type viewRange struct {
	from, to int64
	number   uint32
}

func (s *movedViews) read(dst []byte, at int64) {
	copy(dst, s.views.views[at:])
	for i := int64(0); i < int64(len(dst)); i += viewWidth {
		d := dst[i:][:viewWidth]
		switch {
		case isNull(s.valid, s.at+(at+i)/viewWidth):
			clear(d)
		case binary.LittleEndian.Uint32(d) > viewInline:
			r := &s.ranges[binary.LittleEndian.Uint32(d[8:])]
			binary.LittleEndian.PutUint32(d[8:], r.number)
			binary.LittleEndian.PutUint32(d[12:], binary.LittleEndian.Uint32(d[12:])-uint32(r.from))
		}
	}
}

// views makes views into data that was gathered in their order. Null views are
// zero.
type views struct {
	views []byte
	data  [][]byte
	valid []byte // nil if all are
	at    int64

	index  []int64 // of every viewStride-th view: how many bytes those before it refer to
	begins []int64 // where in the gathered bytes each new data buffer begins
	total  int64   // gathered bytes
}

// size returns the length of value i, 0 for a null.
func (s *views) size(i int64) int64 {
	if isNull(s.valid, s.at+i) {
		return 0
	}
	return int64(int32(binary.LittleEndian.Uint32(s.views[i*viewWidth:])))
}

// place returns where value i is, if it is not in the view.
func (s *views) place(i int64) (buffer, at int64) {
	v := s.views[i*viewWidth:]
	return int64(int32(binary.LittleEndian.Uint32(v[8:]))), int64(int32(binary.LittleEndian.Uint32(v[12:])))
}

// split makes the index and decides which data buffer each value goes to: one
// buffer for all, as far as 32-bit offsets reach, or up to most bytes if that is not 0.
func (s *views) split(most int64) {
	if most <= 0 || most > math.MaxInt32 {
		most = math.MaxInt32
	}
	n := int64(len(s.views) / viewWidth)
	s.index = make([]int64, 0, n/viewStride+1)
	for i := range n {
		if i%viewStride == 0 {
			s.index = append(s.index, s.total)
		}
		size := s.size(i)
		if size <= viewInline {
			continue
		}
		if len(s.begins) == 0 || s.total+size-s.begins[len(s.begins)-1] > most {
			s.begins = append(s.begins, s.total)
		}
		s.total += size
	}
}

// before returns the last indexed view at or before view i, and how many bytes
// those before it refer to.
func (s *views) before(i int64) (view, bytes int64) {
	k := i / viewStride
	return k * viewStride, s.index[k]
}

func (s *views) read(dst []byte, at int64) {
	i, end := at/viewWidth, (at+int64(len(dst)))/viewWidth
	k, pos := s.before(i)
	buf := max(0, sort.Search(len(s.begins), func(j int) bool { return s.begins[j] > pos })-1)
	for ; k < end; k++ {
		size := s.size(k)
		out := size > viewInline
		for out && buf+1 < len(s.begins) && s.begins[buf+1] <= pos {
			buf++
		}
		if k >= i {
			d := dst[(k-i)*viewWidth:][:viewWidth]
			if isNull(s.valid, s.at+k) {
				clear(d)
			} else {
				copy(d, s.views[k*viewWidth:][:viewWidth])
			}
			if out {
				binary.LittleEndian.PutUint32(d[8:], uint32(buf))
				binary.LittleEndian.PutUint32(d[12:], uint32(pos-s.begins[buf]))
			}
		}
		if out {
			pos += size
		}
	}
}

// viewData makes one data buffer of views: the gathered bytes from begin on.
type viewData struct {
	*views
	begin int64
}

func (s *viewData) read(dst []byte, at int64) {
	at += s.begin
	k := max(0, sort.Search(len(s.index), func(j int) bool { return s.index[j] > at })-1)
	pos := s.index[k]
	for i := int64(k) * viewStride; len(dst) > 0; i++ {
		size := s.size(i)
		if size <= viewInline {
			continue
		}
		if pos+size > at {
			buffer, off := s.place(i)
			n := copy(dst, s.data[buffer][off+at-pos:][:pos+size-at])
			dst, at = dst[n:], at+int64(n)
		}
		pos += size
	}
}
