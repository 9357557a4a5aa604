package cdevice

import (
	"errors"
	"sort"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/lookup"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
	"github.com/spillway-db/spillway/tier"
)

// body is a descriptor, and where its buffers are on the device.
type body struct {
	image.Cursor
	desc   *batch.Descriptor
	where  func(i int) tier.Addr // of the i-th of desc.Buffers
	adjust []payload.Adjustment  // of a table; ascending by their buffers
	// whole reports that the arrays are where they were made, so that the rows before the first row
	// of a slice are there, too.
	whole bool
}

// inBody returns an image as a body.
func inBody(d *batch.Descriptor, buf *tier.Buffer, at image.Path) (*body, error) {
	b := &body{Cursor: image.NewCursor(d), desc: d}
	b.Path = at
	begin := tier.Addr(0)
	if buf != nil {
		m, err := onDevice(at, buf)
		if err != nil {
			return nil, err
		}
		begin = m.Addr()
	}
	b.where = func(i int) tier.Addr { return begin + tier.Addr(d.Buffers[i].Offset) }
	return b, nil
}

// base returns the Base of a buffer's adjustment, if it is one of that kind, else 0.
func (b *body) base(i int, how payload.Adjust) int64 {
	j := sort.Search(len(b.adjust), func(j int) bool { return b.adjust[j].Buffer >= i })
	if j < len(b.adjust) && b.adjust[j].Buffer == i && b.adjust[j].How == how {
		return b.adjust[j].Base
	}
	return 0
}

// arrayWriter lays out the structs of an array, along the descriptor of an image.
type arrayWriter struct {
	mem    *memory
	dev    device
	space  *tier.Space
	id     uintptr
	count  int64
	body   *body
	shared []batch.Shared
	at     lookup.Table[*batch.Descriptor] // of shared
	absent []absent
	taken  []*tier.Buffer // for the time of the export
}

// absent is a buffer that the batch does without and C has to have.
type absent struct {
	at *uintptr
	n  int64 // bytes
}

// open finds the buffers of a payload.
func (w *arrayWriter) open(p batch.Payload) (d *batch.Descriptor, err error) {
	if p.Space().Kind() != tier.GPU {
		return nil, unsupported(nil, "a batch in %s: its memory is no device's", p.Space().ID())
	}
	img, ok := p.(*batch.Image)
	if !ok {
		return nil, unsupported(nil, "a payload of type %s", p.Type())
	}
	d, w.shared = img.Descriptor(), img.Shared()
	if img.Parts().Encoding != payload.Scattered {
		w.body, err = inBody(d, img.Buffer(), nil)
		return d, err
	}
	where := func(i int) tier.Addr { return img.Parts().Ranges[i].Addr }
	w.body = &body{image.NewCursor(d), d, where, img.Parts().Adjustments, isLent(img)}
	return d, nil
}

// isLent reports whether the buffers of a table are in their creator's arrays, and not in copies of
// what the rows show. Then what those arrays have before the first row is there as well.
func isLent(p *payload.Image) bool {
	for _, b := range p.Buffers() {
		if _, ok := b.Memory().(interface{ GiveBack(func()) }); !ok {
			return false
		}
	}
	return len(p.Buffers()) > 0
}

// draw takes n bytes of the device's memory for the time of the export, has them written by a function
// on a stream, and returns where they are.
func (w *arrayWriter) draw(
	n int64, write func(dev tier.Device, s tier.Stream, at tier.Addr) error,
) (*tier.Buffer, error) {
	buf, err := w.space.DrawNew(n)
	if err != nil {
		return nil, err
	}
	w.taken = append(w.taken, buf)
	m, err := onDevice(w.body.Path, buf)
	if err != nil {
		return nil, err
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return nil, err
	}
	return buf, errors.Join(write(m.Device(), s, m.Addr()), s.Sync(), s.Close())
}

// onDevice returns the memory of a buffer, which must be a device's.
func onDevice(at image.Path, buf *tier.Buffer) (tier.DeviceMemory, error) {
	m, ok := buf.Memory().(tier.DeviceMemory)
	if !ok {
		return nil, unsupported(at, "memory of type %T, which is no device's", buf.Memory())
	}
	return m, nil
}

// zeros takes the memory that absent buffers need: they are only read, so one piece will do.
func (w *arrayWriter) zeros() error {
	n := int64(0)
	for _, a := range w.absent {
		n = max(n, a.n)
	}
	if n == 0 {
		return nil
	}
	var begin tier.Addr
	_, err := w.draw(n, func(dev tier.Device, s tier.Stream, at tier.Addr) error {
		begin = at
		return dev.Fill(s, at, 0, n)
	})
	if err != nil {
		return err
	}
	at, err := w.dev.pointer(begin, n)
	for _, a := range w.absent {
		*a.at = at
	}
	return err
}

// record fills out with a struct of the columns.
func (w *arrayWriter) record(out *Array, d *batch.Descriptor) error {
	w.header(out, d.Rows, 0)
	w.buffers(out, []pointer{{}})
	sh := shape.Record(d.Schema)
	return w.children(out, &sh, 0)
}

// header fills in what is the same in all structs.
func (w *arrayWriter) header(out *Array, length, nulls int64) {
	w.count++
	out.Length, out.NullCount = length, nulls
	out.Release, out.PrivateData = callbacks().array, w.id
}

// pointer is a buffer's: where it is, or how many bytes of zeros have to be there.
type pointer struct {
	at    uintptr
	zeros int64
}

func (w *arrayWriter) buffers(out *Array, p []pointer) {
	at, to := place[uintptr](w.mem, len(p))
	for i, x := range p {
		if to[i] = x.at; x.zeros > 0 {
			w.absent = append(w.absent, absent{&to[i], x.zeros})
		}
	}
	out.Buffers, out.NBuffers = at, int64(len(p))
}

// children fills in the arrays of the children, each with front rows before the batch's.
func (w *arrayWriter) children(out *Array, sh *shape.Shape, front int64) error {
	at, structs := placeAll[Array](w.mem, sh.NumChildren)
	out.Children, out.NChildren = at, int64(len(structs))
	for i := range structs {
		name, dt := sh.Child(i)
		if err := w.array(&structs[i], name, dt, front); err != nil {
			return err
		}
	}
	return nil
}

// array fills out with the next array, of type dt. Of the array that it is a slice of, if it is
// one, front rows before its first are shown, too: its parent's offsets count them.
//
//	row of the whole array   0 … │ back … front … │ the batch's n rows │ …
//	C's array                    │ Offset │       Length               │
//
// Buffers begin back rows before the batch's first: front, and what makes bitmaps begin with a
// byte.
func (w *arrayWriter) array(out *Array, name string, dt arrow.DataType, front int64) error {
	b := w.body
	b.Path = append(b.Path, name)
	a, err := b.Next(dt)
	if err != nil {
		return err
	}
	w.header(out, a.Length+front, a.Nulls)
	back, first := front, int64(0) // first is what offsets begin with
	switch {
	case a.Null:
		out.NullCount = out.Length
	case a.Rows == shape.Runs:
		back = b.base(a.First+1, payload.Ends) // of the run ends' second buffer; they come first
		if out.Offset = back - front; out.Offset < 0 {
			return b.Path.Invalid("%d rows before the first", front)
		}
		back = 0
	default:
		for i, k := range a.Buffers {
			if (k.Role == shape.Validity || k.Role == shape.Bits) && a.Spans[i].Length > 0 {
				// All bitmaps of the array begin at the same bit.
				back += (b.base(a.First+i, payload.Bits) - front) & 7
				break
			}
		}
		bufs := make([]pointer, 0, len(a.Spans)+1)
		for i, s := range a.Spans {
			before, need := int64(0), int64(0) // bytes before the batch's, and as many as C must find
			if i < len(a.Buffers) {
				k := a.Buffers[i]
				before = back * k.Width
				_, need = k.Bytes(0, a.Length+back)
				switch k.Role {
				case shape.Validity, shape.Bits:
					before = back / 8 // as the batch does, the buffer begins at the bit back%8 of its first byte
					if k.Role == shape.Validity && s.Length <= 0 && a.Nulls > 0 && a.Nulls < a.Length {
						return b.Path.Invalid("%d nulls and no validity", a.Nulls)
					}
					if k.Role == shape.Validity && a.Nulls == 0 {
						need = 0
					}
				case shape.Offsets:
					first = b.base(a.First+i, payload.Lower)
					shown := b.Peek().Length
					if i+1 < len(a.Spans) {
						shown = a.Spans[i+1].Length
					}
					if first > 0 && shown <= 0 { // and where that would be is not known: zeros are equivalent
						first = 0
						bufs = append(bufs, pointer{zeros: need})
						continue
					}
				case shape.Data:
					before, need = first, 0
				}
			}
			p := pointer{zeros: need}
			switch {
			case s.Length <= 0:
			case before > 0 && !b.whole:
				return unsupported(b.Path, "the copy of a slice, which lacks what is before its first row"+
					" (buffer %d of %d; batch.PlainImage, which Mover.MoveAs makes of it, can be exported)",
					a.First+i, len(b.desc.Buffers))
			default:
				p.zeros = 0
				if p.at, err = w.dev.pointer(b.where(a.First+i)-tier.Addr(before), s.Length+before); err != nil {
					return err
				}
			}
			bufs = append(bufs, p)
		}
		if out.Offset = back - front; front > 0 && bufs[0].at != 0 && a.Nulls > 0 {
			out.NullCount = -1 // those before the first are not counted
		}
		if a.Views { // the last buffer has the lengths of the data buffers; it is there also if it has none
			data := a.Spans[len(a.Buffers):]
			at, sizes := place[int64](w.mem, max(1, len(data)))
			for i, s := range data {
				sizes[i] = max(0, s.Length)
			}
			bufs = append(bufs, pointer{at: at})
		}
		w.buffers(out, bufs)
	}
	switch a.Rows {
	case shape.Times:
		back *= a.Size
	case shape.Between, shape.Shown:
		back = first
	}
	if err := w.children(out, &a.Shape, back); err != nil {
		return err
	}
	if a.Values != nil {
		if err := w.dictionary(out, a.Values); err != nil {
			return err
		}
	}
	b.Path = b.Path[:len(b.Path)-1]
	return nil
}

func (w *arrayWriter) dictionary(out *Array, dt arrow.DataType) error {
	at, dict := place[Array](w.mem, 1)
	out.Dictionary = at
	outer := w.body
	n, outside, err := outer.Outside()
	if err != nil {
		return err
	}
	if outside {
		desc := outer.desc.Dictionaries[n]
		buf, err := w.memoryOf(desc)
		if err == nil && desc.From != nil {
			desc, buf, err = w.assemble(desc)
		}
		if err == nil {
			w.body, err = inBody(desc, buf, outer.Path)
		}
		if err != nil {
			return err
		}
	}
	err = w.array(&dict[0], "dictionary", dt, 0)
	w.body = outer
	return err
}

// memoryOf returns the body of a dictionary that the batch shares.
func (w *arrayWriter) memoryOf(desc *batch.Descriptor) (*tier.Buffer, error) {
	i := w.at.Find(len(w.shared), func(i int) *batch.Descriptor { return w.shared[i].Descriptor() }, desc)
	if i < 0 {
		return nil, errors.New("cdevice: a batch without a dictionary that it needs")
	}
	return w.shared[i].Buffer(), nil
}

// assemble copies the array of a dictionary that extends others to one piece of memory.
func (w *arrayWriter) assemble(desc *batch.Descriptor) (*batch.Descriptor, *tier.Buffer, error) {
	whole := image.Whole(desc)
	parts, err := image.ChainParts(desc, whole)
	if err != nil {
		return nil, nil, err
	}
	regions := make([]tier.Region, len(parts))
	for i, p := range parts {
		buf, err := w.memoryOf(p.Of)
		if err != nil {
			return nil, nil, err
		}
		from, err := onDevice(w.body.Path, buf)
		if err != nil {
			return nil, nil, err
		}
		regions[i] = tier.Region{Dst: tier.Addr(p.To), Src: from.Addr() + tier.Addr(p.From), Size: p.N}
	}
	buf, err := w.draw(whole.Body, func(dev tier.Device, s tier.Stream, at tier.Addr) error {
		for i := range regions {
			regions[i].Dst += at
		}
		return dev.CopyRegions(s, regions)
	})
	return whole, buf, err
}

// release gives up the memory that draw has taken.
func (w *arrayWriter) release() (err error) {
	for _, b := range w.taken {
		err = errors.Join(err, b.Release())
	}
	return err
}
