package image

import (
	"encoding/binary"
	"math"
	"sort"

	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/sumcopy"
)

// source makes the bytes of a buffer that are not in the record's memory as they should be.
type source interface {
	// read fills dst with the bytes from at on. at is a multiple of 64, and so is dst's length unless
	// it reaches to the end.
	read(dst []byte, at int64)
}

// adjusted is a buffer of which each value is adjusted by itself.
type adjusted struct {
	src []byte
	adj *payload.Adjustment
}

func (s *adjusted) read(dst []byte, at int64) { adjust(s.adj, dst, s.src[at:], at) }

// adjust fills dst with the bytes of an adjusted buffer from at on, a multiple of 64. src is where
// they are in the source; it may be dst, unless bits are shifted.
func adjust(a *payload.Adjustment, dst, src []byte, at int64) {
	switch a.How {
	case payload.Bits:
		if a.Base != 0 {
			shiftBits(dst, src, uint(a.Base))
		}
		if end := (a.Count + 7) / 8; at+int64(len(dst)) == end && a.Count%8 != 0 {
			dst[len(dst)-1] &= 1<<(a.Count%8) - 1
		}
	case payload.Ends:
		for i := int64(0); i < int64(len(dst)); i += a.Width {
			putOffset(dst[i:], a.Width, min(signed(src[i:], a.Width, 0)-a.Base, a.Count))
		}
	case payload.Lower:
		sumcopy.Lower{Width: a.Width, Base: uint64(a.Base)}.Copy(dst, src)
	}
}

// shiftBits fills dst with the bits of src from bit shift on, which is below 8.
func shiftBits(dst, src []byte, shift uint) {
	right, left := shift&63, (64-shift)&63 // &63 shows the compiler that they are below 64
	for len(dst) >= 32 && len(src) >= 40 {
		v, w := binary.LittleEndian.Uint64(src), binary.LittleEndian.Uint64(src[8:])
		x, y := binary.LittleEndian.Uint64(src[16:]), binary.LittleEndian.Uint64(src[24:])
		z := binary.LittleEndian.Uint64(src[32:])
		binary.LittleEndian.PutUint64(dst, v>>right|w<<left)
		binary.LittleEndian.PutUint64(dst[8:], w>>right|x<<left)
		binary.LittleEndian.PutUint64(dst[16:], x>>right|y<<left)
		binary.LittleEndian.PutUint64(dst[24:], y>>right|z<<left)
		dst, src = dst[32:], src[32:]
	}
	for i := range dst {
		dst[i] = src[i] >> shift
		if i+1 < len(src) {
			dst[i] |= src[i+1] << (8 - shift)
		}
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

// listViews makes the offsets of list views, counted from base, or their sizes.
type listViews struct {
	sizesOnly       bool
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
		i := (at + o) / s.width
		v := s.size(i)
		if v != 0 && !s.sizesOnly {
			v = OffsetAt(s.offsets, s.width, i) - s.base
		}
		putOffset(dst[o:], s.width, v)
	}
}

// movedViews makes views into data buffers of which only ranges are kept. Null
// views are zero.
type movedViews struct {
	*views
	ranges []viewRange // by buffer
}

// viewRange is the bytes of a data buffer that views refer to, and its number among the buffers that
// have some. In a buffer that no view refers to, to is 0.
type viewRange struct {
	extent
	number uint32
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
// buffer for all, as far as 32-bit offsets reach, or up to limit bytes if that is not 0.
func (s *views) split(limit int64) {
	if limit <= 0 || limit > math.MaxInt32 {
		limit = math.MaxInt32
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
		if len(s.begins) == 0 || s.total+size-s.begins[len(s.begins)-1] > limit {
			s.begins = append(s.begins, s.total)
		}
		s.total += size
	}
}

func (s *views) read(dst []byte, at int64) {
	i, end := at/viewWidth, (at+int64(len(dst)))/viewWidth
	k, pos := i/viewStride*viewStride, s.index[i/viewStride] // the last indexed view that is not after i
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
