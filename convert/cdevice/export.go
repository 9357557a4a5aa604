package cdevice

import (
	"errors"
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

// Export fills array and schema with the batch that h holds, an image or a table in a GPU's
// memory, as a struct of its columns. It takes h over: the handle is closed when the array's
// release callback is called; on an error it stays the caller's. The schema has a release
// callback of its own.
//
// Nothing is copied: the array's buffers are the batch's memory, which consumers only read. A
// buffer without bytes is NULL, and a dictionary has the array of it that the batch shares
// with others. The lengths of a view's data buffers, the last of its buffers, lie in host
// memory, as in Arrow's own implementation. Tables of others' of which some arrays are slices
// that do not begin where their buffers do (batch.Table.Adjustments) are an *UnsupportedError: as an image they can be exported.
//
// array and schema are written over, whatever they hold. They may be C's memory or Go's; in
// Go's, the caller must keep them alive while C has their addresses.
func Export(h *batch.Handle, array *DeviceArray, schema *Schema, cfg Config) (err error) {
	payload := h.Payload()
	if payload == nil {
		return fmt.Errorf("cdevice: exporting a closed handle: %w", tier.ErrReleased)
	}
	dev, err := deviceOf(payload.Space(), cfg)
	if err != nil {
		return err
	}
	if cfg.Event != 0 && cfg.Stream != nil {
		return errors.New("cdevice: exporting with Config.Event and with Config.Stream: want one of them")
	}
	back, err := dev.lend()
	if err != nil {
		return err
	}
	r := callbacks()
	names := &exported{mem: new(memory)}
	var endEvent func() error
	values := &exported{mem: new(memory), done: func() {
		if err := errors.Join(endEvent(), h.Close(), back()); err != nil && cfg.Failed != nil {
			cfg.Failed(err)
		}
	}}
	w := &arrayWriter{mem: values.mem, dev: dev, id: r.add(values)}
	s := &schemaWriter{mem: names.mem, id: r.add(names)}
	defer func() {
		if err != nil {
			r.drop(w.id, s.id)
			err = errors.Join(err, back())
		}
	}()
	var outArray Array
	var outSchema Schema
	desc, err := w.open(payload)
	if err != nil {
		return err
	}
	var meta arrow.Metadata = desc.Schema.Metadata()
	if err := s.field(&outSchema, arrow.Field{Type: arrow.StructOf(desc.Schema.Fields()...), Metadata: meta}); err != nil {
		return err
	}
	if err := w.record(&outArray, desc); err != nil {
		return err
	}
	var event uintptr
	if event, endEvent, err = dev.event(values.mem, cfg.Stream); err != nil {
		return err
	}
	values.left.Store(w.count)
	names.left.Store(s.count)
	*array = DeviceArray{Array: outArray, DeviceID: dev.id, DeviceType: dev.kind, SyncEvent: cfg.Event | event}
	*schema = outSchema
	return nil
}

// drop forgets exports that nobody has seen.
func (r *releases) drop(ids ...uintptr) {
	for _, id := range ids {
		r.mu.Lock()
		e := r.mu.out[id]
		delete(r.mu.out, id)
		r.mu.Unlock()
		e.mem.free()
	}
}

// places says where the buffers of a body are on the device.
type places struct {
	desc  *batch.Descriptor
	nodes []batch.Node // not yet taken
	spans []batch.Span
	where func(i int) tier.Addr // of the i-th of desc.Buffers
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

// arrayWriter lays out the structs of an array, beside the descriptor of an image.
type arrayWriter struct {
	mem    *memory
	dev    device
	id     uintptr
	count  int64
	path   path
	body   *places
	shared []batch.Shared
}

// open finds the buffers of a payload.
func (w *arrayWriter) open(p batch.Payload) (d *batch.Descriptor, err error) {
	if p.Space().Kind() != tier.GPU {
		return nil, w.path.unsupported("a batch in %s: its memory is no device's", p.Space().ID())
	}
	switch p := p.(type) {
	case *batch.Image:
		d, w.shared = p.Descriptor(), p.Shared()
		w.body, err = inBody(d, p.Buffer())
		return d, err
	case *batch.Table:
		for _, a := range p.Adjustments() {
			if a.How != batch.Bits || a.Base != 0 { // bits behind the last row are nobody's
				return nil, w.path.unsupported("a table with slices of others' arrays (buffer %d of %d is one)", a.Buffer, len(p.Ranges()))
			}
		}
		d, w.shared = p.Descriptor(), p.Shared()
		w.body = placesOf(d, func(i int) tier.Addr { return p.Ranges()[i].Addr })
		return d, nil
	}
	return nil, w.path.unsupported("a payload of type %s", p.Type())
}

func (w *arrayWriter) record(out *Array, d *batch.Descriptor) error {
	w.header(out, batch.Node{Length: d.Rows})
	fields := d.Schema.Fields()
	if err := w.buffers(out, []uintptr{0}); err != nil {
		return err
	}
	return w.children(out, fields)
}

// header fills in what is the same in all structs.
func (w *arrayWriter) header(out *Array, n batch.Node) {
	w.count++
	out.Length, out.NullCount = n.Length, n.Nulls
	out.Release, out.PrivateData = callbacks().array, w.id
}

func (w *arrayWriter) buffers(out *Array, p []uintptr) error {
	at, to, err := place[uintptr](w.mem, len(p))
	copy(to, p)
	out.Buffers, out.NBuffers = at, int64(len(p))
	return err
}

func (w *arrayWriter) children(out *Array, fields []arrow.Field) (err error) {
	at, structs, err := place[Array](w.mem, len(fields))
	if err != nil {
		return err
	}
	if out.Children, err = pointers(w.mem, at, len(fields), arraySize); err != nil {
		return err
	}
	out.NChildren = int64(len(fields))
	for i, f := range fields {
		w.path.push(f.Name)
		if err := w.array(&structs[i], f.Type); err != nil {
			return err
		}
		w.path.pop()
	}
	return nil
}

func (w *arrayWriter) node() (n batch.Node, err error) {
	if len(w.body.nodes) == 0 {
		return n, w.path.invalid("the descriptor has no node for it")
	}
	n, w.body.nodes = w.body.nodes[0], w.body.nodes[1:]
	return n, nil
}

// spans takes the next n buffers, which are appended as pointers, and returns their lengths.
func (w *arrayWriter) spans(to []uintptr, n int) ([]uintptr, []int64, error) {
	b := w.body
	if n > len(b.spans) {
		return nil, nil, w.path.invalid("the descriptor has no buffers for it")
	}
	var lengths []int64
	for i, s := range b.spans[:n] {
		p := uintptr(0)
		if s.Length > 0 {
			var err error
			if p, err = w.dev.pointer(b.where(len(b.desc.Buffers)-len(b.spans)+i), s.Length); err != nil {
				return nil, nil, err
			}
		}
		to, lengths = append(to, p), append(lengths, max(0, s.Length))
	}
	b.spans = b.spans[n:]
	return to, lengths, nil
}

// array fills out with the next array, of type dt.
func (w *arrayWriter) array(out *Array, dt arrow.DataType) error {
	if e, ok := dt.(arrow.ExtensionType); ok {
		dt = e.StorageType()
	}
	n, err := w.node()
	if err != nil {
		return err
	}
	w.header(out, n)
	count := 2
	switch t := dt.(type) {
	case *arrow.NullType:
		return nil
	case *arrow.RunEndEncodedType:
		return w.children(out, t.Fields())
	case *arrow.SparseUnionType, *arrow.StructType, *arrow.FixedSizeListType:
		count = 1
	case *arrow.ListViewType, *arrow.LargeListViewType:
		count = 3
	case arrow.BinaryViewDataType:
		return w.views(out)
	case arrow.BinaryDataType:
		count = 3
	}
	bufs, _, err := w.spans(nil, count)
	if err != nil {
		return err
	}
	if err := w.buffers(out, bufs); err != nil {
		return err
	}
	switch t := dt.(type) {
	case *arrow.DictionaryType:
		return w.dictionary(out, t)
	case arrow.NestedType:
		return w.children(out, t.Fields())
	}
	return nil
}

// views appends the lengths of the data buffers, as one more buffer.
func (w *arrayWriter) views(out *Array) error {
	bufs, _, err := w.spans(nil, 2)
	if err != nil {
		return err
	}
	data, err := w.node()
	if err != nil {
		return err
	}
	bufs, lengths, err := w.spans(bufs, int(data.Length))
	if err != nil {
		return err
	}
	at, sizes, err := place[int64](w.mem, max(1, len(lengths))) // the buffer is there also if it has none
	if err != nil {
		return err
	}
	copy(sizes, lengths)
	return w.buffers(out, append(bufs, at))
}

func (w *arrayWriter) dictionary(out *Array, t *arrow.DictionaryType) error {
	at, dict, err := place[Array](w.mem, 1)
	if err != nil {
		return err
	}
	out.Dictionary = at
	w.path.push("dictionary")
	defer w.path.pop()
	if len(w.body.nodes) == 0 || w.body.nodes[0].Nulls != batch.Outside {
		return w.array(&dict[0], t.ValueType)
	}
	n, _ := w.node()
	if n.Length < 0 || n.Length >= int64(len(w.body.desc.Dictionaries)) {
		return w.path.invalid("dictionary %d of %d", n.Length, len(w.body.desc.Dictionaries))
	}
	desc := w.body.desc.Dictionaries[n.Length]
	for _, s := range w.shared {
		if s.Descriptor() != desc {
			continue
		}
		outer := w.body
		if w.body, err = inBody(desc, s.Buffer()); err != nil {
			return err
		}
		err = w.array(&dict[0], t.ValueType)
		w.body = outer
		return err
	}
	return errors.New("cdevice: a batch without a dictionary that it needs")
}
