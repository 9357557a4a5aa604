package cdevice

import (
	"errors"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/lookup"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
	"github.com/spillway-db/spillway/tier"
)

// places says where the buffers of a body are on the device.
type places struct {
	desc   *batch.Descriptor
	nodes  []payload.Node // not yet taken
	spans  []payload.Span
	where  func(i int) tier.Addr // of the i-th of desc.Buffers
	adjust []payload.Adjustment  // of a table; ascending by their buffers
	whole  bool                  // the arrays lie where they were made: what a slice leaves out before its first row is there
}

func placesOf(d *batch.Descriptor, where func(i int) tier.Addr) *places {
	return &places{desc: d, nodes: d.Nodes, spans: d.Buffers, where: where}
}

// inBody returns the places of an image.
func inBody(d *batch.Descriptor, buf *tier.Buffer) (*places, error) {
	if buf == nil {
		return placesOf(d, func(int) tier.Addr { return 0 }), nil
	}
	m, ok := buf.Memory().(tier.DeviceMemory)
	if !ok {
		return nil, path(nil).unsupported("memory of type %T, which is no device's", buf.Memory())
	}
	return placesOf(d, func(i int) tier.Addr { return m.Addr() + tier.Addr(d.Buffers[i].Offset) }), nil
}

// next is the number of the buffer that is taken next.
func (p *places) next() int { return len(p.desc.Buffers) - len(p.spans) }

// base returns the Base of a buffer's adjustment, if it is one of that kind, else 0.
func (p *places) base(i int, how payload.Adjust) int64 {
	for len(p.adjust) > 0 && p.adjust[0].Buffer < p.next() {
		p.adjust = p.adjust[1:]
	}
	for _, a := range p.adjust {
		if a.Buffer >= i {
			if a.Buffer == i && a.How == how {
				return a.Base
			}
			break
		}
	}
	return 0
}

// arrayWriter lays out the structs of an array, beside the descriptor of an image.
type arrayWriter struct {
	mem    *memory
	dev    device
	id     uintptr
	count  int64
	path   path
	body   *places
	shared []batch.Shared
	at     lookup.Table[*batch.Descriptor] // of shared
	absent []absent
}

// absent is a buffer that the batch does without and C has to have.
type absent struct {
	at *uintptr
	n  int64 // bytes
}

// open finds the buffers of a payload.
func (w *arrayWriter) open(p batch.Payload) (d *batch.Descriptor, err error) {
	if p.Space().Kind() != tier.GPU {
		return nil, w.path.unsupported("a batch in %s: its memory is no device's", p.Space().ID())
	}
	img, ok := p.(*batch.Image)
	if !ok {
		return nil, w.path.unsupported("a payload of type %s", p.Type())
	}
	d, w.shared = img.Descriptor(), img.Shared()
	if img.Encoding() != payload.Scattered {
		w.body, err = inBody(d, img.Buffer())
		return d, err
	}
	w.body = placesOf(d, func(i int) tier.Addr { return img.Ranges()[i].Addr })
	w.body.adjust, w.body.whole = img.Adjustments(), isLent(img)
	return d, nil
}

// isLent reports whether the buffers of a table are in their creator's arrays, and not in copies of
// what the rows show. Then what those arrays have before the first row is there as well.
func isLent(p *batch.Image) bool {
	for _, b := range p.Buffers() {
		if _, ok := b.Memory().(interface{ GiveBack(func()) }); !ok {
			return false
		}
	}
	return len(p.Buffers()) > 0
}

// zeros takes the memory that absent buffers need: they are only read, so one piece will do. It is
// nil if there are none.
func (w *arrayWriter) zeros(space *tier.Space) (_ *tier.Buffer, err error) {
	n := int64(0)
	for _, a := range w.absent {
		n = max(n, a.n)
	}
	if n == 0 {
		return nil, nil
	}
	buf, err := space.DrawNew(n)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, buf.Release())
		}
	}()
	m, ok := buf.Memory().(tier.DeviceMemory)
	if !ok {
		return nil, w.path.unsupported("memory of type %T, which is no device's", buf.Memory())
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return nil, err
	}
	if err := errors.Join(m.Device().Fill(s, m.Addr(), 0, n), s.Sync(), s.Close()); err != nil { // as brief as to allocate it
		return nil, err
	}
	at, err := w.dev.pointer(m.Addr(), n)
	if err != nil {
		return nil, err
	}
	for _, a := range w.absent {
		*a.at = at
	}
	return buf, nil
}

func (w *arrayWriter) record(out *Array, d *batch.Descriptor) error {
	w.header(out, payload.Node{Length: d.Rows})
	if err := w.buffers(out, []pointer{{}}); err != nil {
		return err
	}
	sh := shape.Record(d.Schema)
	return w.children(out, &sh, 0)
}

// header fills in what is the same in all structs.
func (w *arrayWriter) header(out *Array, n payload.Node) {
	w.count++
	out.Length, out.NullCount = n.Length, n.Nulls
	out.Release, out.PrivateData = callbacks().array, w.id
}

// pointer is a buffer's: where it is, or how many bytes of zeros have to be there.
type pointer struct {
	at    uintptr
	zeros int64
}

func (w *arrayWriter) buffers(out *Array, p []pointer) error {
	at, to, err := place[uintptr](w.mem, len(p))
	if err != nil {
		return err
	}
	for i, x := range p {
		if to[i] = x.at; x.zeros > 0 {
			w.absent = append(w.absent, absent{&to[i], x.zeros})
		}
	}
	out.Buffers, out.NBuffers = at, int64(len(p))
	return nil
}

// children fills in the arrays of the children, each with front rows before the batch's.
func (w *arrayWriter) children(out *Array, sh *shape.Shape, front int64) (err error) {
	if sh.NumChildren() == 0 {
		return nil
	}
	at, structs, err := place[Array](w.mem, sh.NumChildren())
	if err != nil {
		return err
	}
	if out.Children, err = pointers(w.mem, at, len(structs), arraySize); err != nil {
		return err
	}
	out.NChildren = int64(len(structs))
	for i := range structs {
		name, dt := sh.Child(i)
		w.path.push(name)
		if err := w.array(&structs[i], dt, front); err != nil {
			return err
		}
		w.path.pop()
	}
	return nil
}

func (w *arrayWriter) node() (n payload.Node, err error) {
	if len(w.body.nodes) == 0 {
		return n, w.path.invalid("the descriptor has no node for it")
	}
	n, w.body.nodes = w.body.nodes[0], w.body.nodes[1:]
	return n, nil
}

// array fills out with the next array, of type dt. Of the array that it is a slice of, if it is
// one, front rows before its first are shown, too: its parent's offsets count them.
//
//	row of the whole array   0 … │ back … front … │ the batch's n rows │ …
//	C's array                    │ Offset │       Length               │
//
// Buffers begin back rows before the batch's first: front, and what makes bitmaps begin with a
// byte.
func (w *arrayWriter) array(out *Array, dt arrow.DataType, front int64) error {
	sh, ok := shape.Of(dt)
	if !ok {
		return w.path.unsupported("the type %s", dt)
	}
	n, err := w.node()
	if err != nil {
		return err
	}
	w.header(out, n)
	out.Length += front
	switch {
	case sh.Null:
		out.NullCount = out.Length
		return nil
	case sh.Rows == shape.Runs:
		out.Offset = w.body.base(w.body.next()+1, payload.Ends) - front // the run ends' second buffer; they come first
		if out.Offset < 0 {
			return w.path.invalid("%d rows before the first", front)
		}
		return w.children(out, &sh, 0)
	}
	r := rows{n: n.Length, front: front, nulls: n.Nulls}
	bufs, err := w.spans(&r, sh.Buffers)
	if err != nil {
		return err
	}
	if out.Offset = r.back - front; front > 0 && bufs[0].at != 0 && n.Nulls > 0 {
		out.NullCount = -1 // those before the first are not counted
	}
	if sh.Views {
		return w.views(out, bufs)
	}
	if err := w.buffers(out, bufs); err != nil {
		return err
	}
	if sh.Values != nil {
		return w.dictionary(out, sh.Values)
	}
	switch front = r.first; sh.Rows {
	case shape.Same:
		front = r.back
	case shape.Times:
		front = r.back * sh.Size
	}
	return w.children(out, &sh, front)
}

// views appends the lengths of the data buffers, as one more buffer.
func (w *arrayWriter) views(out *Array, bufs []pointer) error {
	data, err := w.node()
	if err != nil {
		return err
	}
	if data.Length < 0 || data.Length > int64(len(w.body.spans)) {
		return w.path.invalid("%d data buffers of views", data.Length)
	}
	at, sizes, err := place[int64](w.mem, max(1, int(data.Length))) // the buffer is there also if it has none
	if err != nil {
		return err
	}
	for i := range data.Length {
		sizes[i] = max(0, w.body.spans[0].Length)
		p, err := w.span(0, 0)
		if err != nil {
			return err
		}
		bufs = append(bufs, p)
	}
	return w.buffers(out, append(bufs, pointer{at: at}))
}

func (w *arrayWriter) dictionary(out *Array, dt arrow.DataType) error {
	at, dict, err := place[Array](w.mem, 1)
	if err != nil {
		return err
	}
	out.Dictionary = at
	w.path.push("dictionary")
	defer w.path.pop()
	if len(w.body.nodes) == 0 || w.body.nodes[0].Nulls != payload.Outside {
		return w.array(&dict[0], dt, 0)
	}
	n, _ := w.node()
	if n.Length < 0 || n.Length >= int64(len(w.body.desc.Dictionaries)) {
		return w.path.invalid("dictionary %d of %d", n.Length, len(w.body.desc.Dictionaries))
	}
	desc := w.body.desc.Dictionaries[n.Length]
	i := w.at.Find(len(w.shared), func(i int) *batch.Descriptor { return w.shared[i].Descriptor() }, desc)
	if i < 0 {
		return errors.New("cdevice: a batch without a dictionary that it needs")
	}
	outer := w.body
	if w.body, err = inBody(desc, w.shared[i].Buffer()); err != nil {
		return err
	}
	err = w.array(&dict[0], dt, 0)
	w.body = outer
	return err
}
