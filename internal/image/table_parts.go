package image

import (
	"slices"
	"sort"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// Part is one Arrow buffer of a table on a device: N bytes, which belong at Off of the body of the
// image and are at Addr now.
type Part struct {
	Off, N int64
	Addr   tier.Addr
	// Adj is how the bytes must be changed when they have been copied; nil if they are as in the
	// image.
	Adj  *payload.Adjustment
	Made []byte // the bytes, where they had to be made on the host; else nil
}

// Parts are the buffers that have bytes, ascending by their places in a body. Between
// them the body is zero.
type Parts []Part

// PartsOf lists the buffers of a table that have bytes. ranges and adjust are as in a TablePlan.
// Columns that share a dictionary in the body have the same spans; that is one part.
func PartsOf(d *batch.Descriptor, ranges []payload.DeviceRange, adjust []payload.Adjustment) Parts {
	parts := make(Parts, 0, len(d.Buffers))
	for i, s := range d.Buffers {
		var adj *payload.Adjustment
		if len(adjust) > 0 && adjust[0].Buffer == i {
			adj, adjust = &adjust[0], adjust[1:]
		}
		if s.Length > 0 {
			parts = append(parts, Part{Off: s.Offset, N: s.Length, Addr: ranges[i].Addr, Adj: adj})
		}
	}
	// Spans are in schema order, which is the order in the body, except for dictionaries that
	// columns share.
	slices.SortStableFunc(parts, func(a, b Part) int { return int(min(1, max(-1, a.Off-b.Off))) })
	return slices.CompactFunc(parts, func(a, b Part) bool { return a.Off == b.Off })
}

// Between returns the copies that bring the n bytes at off of an image from the places of src to
// those of dst, both on devices, and the number of bytes copied. The two may divide the body
// differently.
func Between(dst, src Parts, off, n int64) (copies []tier.Region, bytes int64) {
	dst, src = dst.within(off, n), src.within(off, n)
	for len(dst) > 0 && len(src) > 0 {
		d, s := &dst[0], &src[0]
		begin, end := max(d.Off, s.Off, off), min(d.Off+d.N, s.Off+s.N, off+n)
		if n := end - begin; n > 0 {
			copies = append(
				copies,
				tier.Region{Dst: d.Addr + tier.Addr(begin-d.Off), Src: s.Addr + tier.Addr(begin-s.Off), Size: n},
			)
			bytes += n
		}
		// Go on with the next part on the side that ends first.
		if d.Off+d.N < s.Off+s.N {
			dst = dst[1:]
		} else {
			src = src[1:]
		}
	}
	return copies, bytes
}

// within returns the parts that have some of the n bytes at off.
func (t Parts) within(off, n int64) Parts {
	t = t[sort.Search(len(t), func(i int) bool { return t[i].Off+t[i].N > off }):]
	return t[:sort.Search(len(t), func(i int) bool { return t[i].Off >= off+n })]
}

// Gather appends to to the copies that fill p, the n bytes of the body at off, from the device, and
// returns it. The rest of p is written at once: zeros between buffers, and parts that were made on
// the host. p is complete when the copies are done, except for adjustments; see Apply.
func (t Parts) Gather(to []tier.Region, p []byte, off int64) []tier.Region {
	n, done := int64(len(p)), int64(0)
	for _, part := range t.within(off, n) {
		begin, end := max(part.Off, off), min(part.Off+part.N, off+n)
		dst, at := p[begin-off:end-off:end-off], begin-part.Off
		// The memory may have old bytes.
		clear(p[done : begin-off])
		if part.Made != nil {
			copy(dst, part.Made[at:])
		} else {
			to = append(to, tier.Region{HostDst: dst, Src: part.Addr + tier.Addr(at)})
		}
		done = end - off
	}
	clear(p[done:])
	return to
}

// Adjusted returns the parts that must be adjusted after they were copied.
func (t Parts) Adjusted() (out Parts) {
	for _, p := range t {
		if p.Adj != nil && p.Made == nil {
			out = append(out, p)
		}
	}
	return out
}

// Apply adjusts p, the bytes of the body at off, in place. t must be what Adjusted has returned,
// and p must have been copied. off is a multiple of 64, so that no value is divided. Bitmaps that
// must be shifted cannot be adjusted in place, because their bits come from two bytes: MadeBits
// makes them.
func (t Parts) Apply(p []byte, off int64) {
	n := int64(len(p))
	for _, part := range t.within(off, n) {
		begin, end := max(part.Off, off), min(part.Off+part.N, off+n)
		adjust(part.Adj, p[begin-off:end-off], p[begin-off:end-off], begin-part.Off)
	}
}

// MadeBits returns the bitmap of an adjustment, made of the bytes that hold its bits on the device.
func MadeBits(a *payload.Adjustment, src []byte) []byte {
	out := make([]byte, (a.Count+7)/8)
	adjust(a, out, src, 0)
	return out
}
