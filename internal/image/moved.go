package image

import (
	"encoding/binary"
	"math"

	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/sumcopy"
)

// source makes the bytes of a buffer that the record has in another form, while they are written.
// So a plan needs no memory for them.
type source interface {
	// read fills dst with the bytes of the buffer from at on. at is a multiple of 64, and so is
	// len(dst), unless it reaches to the end of the buffer: no value is divided. Callers read the
	// bytes in order, each once, or begin again at 0. So a source may keep a position.
	read(dst []byte, at int64)
}

// adjusted is a buffer each value of which is adjusted independently of the others, so that any
// part of it can be made alone. It is the only source that tables on a device have too.
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

// shiftBits fills dst with the bits of src from bit shift on, which is below 8. Bits behind the end
// of src count as 0.
func shiftBits(dst, src []byte, shift uint) {
	right, left := shift&63, (64-shift)&63 // &63 shows the compiler that they are below 64
	// Four words at a time. Each needs the byte after it, hence 40 bytes of src.
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
	// The rest, byte by byte: the last one may have no byte after it.
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

// denseOffsets makes the offsets of a dense union, each lowered by the first value that the union
// shows of the child. The child is looked up for each row, because two rows that follow each other
// may differ.
type denseOffsets struct {
	codes   []byte // of the rows; planner.denseOffsets has checked that the union has each
	offsets []byte
	base    [128]uint32 // by type code
}

func (s *denseOffsets) read(dst []byte, at int64) {
	for i := int64(0); i < int64(len(dst)); i += 4 {
		v := binary.LittleEndian.Uint32(s.offsets[at+i:])
		binary.LittleEndian.PutUint32(dst[i:], v-s.base[s.codes[(at+i)/4]&127])
	}
}

// listViews makes the offsets of list views, lowered by base, or with sizesOnly their sizes. Null
// and empty lists have 0 for both.
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

// movedViews makes views for data buffers of which only a range is kept: it replaces the number of
// the buffer and lowers the offset. Null views are zero, because they may have any bytes and equal
// records should have equal images.
type movedViews struct {
	*views
	ranges []viewRange // by buffer
}

// viewRange is the bytes of a data buffer that views refer to, and its number among the buffers that
// have some. In a buffer that no view refers to, to is 0.
type viewRange struct {
	interval
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

// views makes views for data that is gathered in the order of the views, so that only bytes that
// are shown are kept. viewData makes that data. Null views are zero.
//
// The place of a value depends on the lengths of all before it, so read must be called in order;
// done and buffer are what it has to remember.
type views struct {
	views []byte
	data  [][]byte
	valid []byte // nil if all are
	at    int64

	begins []viewBegin // of the new data buffers
	total  int64       // gathered bytes
	done   int64       // of these, the bytes of the views that were read
	buffer int         // the data buffer of the last of them
}

// viewBegin is where a new data buffer begins.
type viewBegin struct {
	at   int64 // in the gathered bytes
	view int64 // the first that refers to it
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

// split decides which new data buffer each value goes to, and sets begins and total. All values go
// to one buffer as far as 32-bit offsets reach; if limit is not 0, a buffer has at most limit
// bytes, except for a single longer value.
func (s *views) split(limit int64) {
	if limit <= 0 || limit > math.MaxInt32 {
		limit = math.MaxInt32
	}
	for i := range int64(len(s.views) / viewWidth) {
		size := s.size(i)
		if size <= viewInline {
			continue
		}
		// A value is never divided between two buffers.
		if n := len(s.begins); n == 0 || s.total+size-s.begins[n-1].at > limit {
			s.begins = append(s.begins, viewBegin{s.total, i})
		}
		s.total += size
	}
}

func (s *views) read(dst []byte, at int64) {
	if at == 0 {
		s.done, s.buffer = 0, 0
	}
	copy(dst, s.views[at:])
	for i := at / viewWidth; len(dst) > 0; i++ {
		d := dst[:viewWidth]
		dst = dst[viewWidth:]
		if isNull(s.valid, s.at+i) {
			clear(d)
		} else if size := s.size(i); size > viewInline {
			// The value is the first of the next buffer.
			if s.buffer+1 < len(s.begins) && s.begins[s.buffer+1].view == i {
				s.buffer++
			}
			binary.LittleEndian.PutUint32(d[8:], uint32(s.buffer))
			binary.LittleEndian.PutUint32(d[12:], uint32(s.done-s.begins[s.buffer].at))
			s.done += size
		}
	}
}

// viewData makes one of the new data buffers of views. It is read independently of the views
// themselves, and has its own position.
type viewData struct {
	*views
	begin viewBegin
	next  viewBegin // the bytes that are read next are of this view, which begins there, or of a later one
}

func (s *viewData) read(dst []byte, at int64) {
	if at == 0 {
		s.next = s.begin
	}
	// at now counts in the bytes of all new data buffers, as next and begin do.
	at += s.begin.at
	for ; len(dst) > 0; s.next.view++ {
		size := s.size(s.next.view)
		if size <= viewInline {
			continue
		}
		buffer, off := s.place(s.next.view)
		n := copy(dst, s.data[buffer][off+at-s.next.at:][:s.next.at+size-at])
		dst, at = dst[n:], at+int64(n)
		if at < s.next.at+size {
			return
		}
		s.next.at += size
	}
}
