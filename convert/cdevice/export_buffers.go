package cdevice

import (
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
	"github.com/spillway-db/spillway/tier"
)

// rows are those of an array that is exported.
type rows struct {
	n, nulls int64
	front    int64 // before them; what is shown of the array begins there
	back     int64 // before them; the buffers begin there
	first    int64 // what their offsets begin with
}

// spans takes the next buffers and finds out where they begin.
func (w *arrayWriter) spans(r *rows, kinds []shape.Buffer) (out []pointer, err error) {
	b := w.body
	if len(kinds) > len(b.spans) {
		return nil, w.path.invalid("the descriptor has no buffers for it")
	}
	r.back = r.front
	for i, k := range kinds {
		if (k.Role == shape.Validity || k.Role == shape.Bits) && b.spans[i].Length > 0 { // all bitmaps begin at the same bit
			r.back += (b.base(b.next()+i, payload.Bits) - r.front) & 7
			break
		}
	}
	for i, k := range kinds {
		before, need := int64(0), (r.n+r.back)*k.Width
		switch k.Role {
		case shape.Validity, shape.Bits:
			before, need = (r.back-b.base(b.next(), payload.Bits))/8, (r.n+r.back+7)/8
			if k.Role == shape.Validity && r.nulls == 0 {
				need = 0
			} else if k.Role == shape.Validity && b.spans[0].Length <= 0 && r.nulls < r.n {
				return nil, w.path.invalid("%d nulls and no validity", r.nulls)
			}
		case shape.Offsets: // one more than there are rows
			before, need = r.back*k.Width, need+k.Width
			r.first = b.base(b.next(), payload.Lower)
			if r.first > 0 && b.nothing(kinds[i+1:]) { // and where that would be is not known: zeros are equivalent
				r.first, b.spans = 0, b.spans[1:]
				out = append(out, pointer{zeros: need})
				continue
			}
		case shape.Data:
			before, need = r.first, 0
		default:
			before = r.back * k.Width
		}
		p, err := w.span(before, need)
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}

// nothing reports whether the offsets in the next buffer show no bytes, if these are behind it, or
// no rows of the next array.
func (p *places) nothing(behind []shape.Buffer) bool {
	if len(behind) > 0 {
		return p.spans[1].Length <= 0
	}
	return len(p.nodes) == 0 || p.nodes[0].Length == 0
}

// span takes the next buffer, from so many bytes before it on. If it is absent, zeros of the length
// that it needs will do.
func (w *arrayWriter) span(before, need int64) (p pointer, err error) {
	b, i := w.body, w.body.next()
	n := b.spans[0].Length
	b.spans = b.spans[1:]
	switch {
	case n <= 0:
		return pointer{zeros: need}, nil
	case before > 0 && !b.whole:
		return p, w.path.unsupported("the copy of a slice, which lacks what is before its first row"+
			" (buffer %d of %d; batch.GPUImage, which Mover.MoveAs makes of it, can be exported)", i, len(b.desc.Buffers))
	}
	p.at, err = w.dev.pointer(b.where(i)-tier.Addr(before), n+before)
	return p, err
}
