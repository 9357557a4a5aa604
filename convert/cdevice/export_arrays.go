package cdevice

import (
	"errors"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
	"github.com/spillway-db/spillway/tier"
)

// body is what arrayWriter walks: a descriptor with a Cursor, and where its buffers are on the
// device. An image is in one piece from begin on; a table's buffers are at ranges. A dictionary
// outside is a body of its own, which replaces the outer one while it is walked.
type body struct {
	image.Cursor
	desc   *batch.Descriptor
	begin  tier.Addr                  // of the buffers, unless they have ranges
	ranges []payload.DeviceRange      // of a table
	adjust map[int]payload.Adjustment // of a table, by its buffers
	// whole reports that a table's buffers are its creator's arrays, so that the rows before the
	// first row of a slice are there, too, and can be shown with an offset.
	whole bool
}

// base returns the Base of buffer i's adjustment if it is of kind how, else 0: how far the buffer
// is from one that begins with the batch's first row.
func (b *body) base(i int, how payload.Adjust) int64 {
	if a := b.adjust[i]; a.How == how {
		return a.Base
	}
	return 0
}

// arrayWriter writes the structs of an array into the memory of an export, along the descriptor of
// an image.
type arrayWriter struct {
	*exported
	dev  device
	body body
	// buffers are the memory of the image, of the dictionaries that the batch shares, and what was
	// taken for the time of the export, by the descriptor of the bytes; nil for a body without
	// bytes. taken are those that the release must give back.
	buffers map[*batch.Descriptor]*tier.Buffer
	taken   []*tier.Buffer

	// absent are buffers that the batch does without and C has to have: where their addresses go.
	// They are only read, so one piece of memory will do for all.
	absent []*uintptr
	zeros  int64 // bytes that the longest of them needs
}

// image fills out with the struct of an image's columns. It sets w.ranges to the memory that stays
// charged during the export.
func (w *arrayWriter) image(out *Array, img *batch.Image) (err error) {
	d := img.Descriptor()
	// The keys are all descriptors that the walk can meet: the image's own and those of its
	// dictionaries.
	w.buffers = map[*batch.Descriptor]*tier.Buffer{d: img.Buffer()}
	for _, s := range img.Parts.Shared {
		w.buffers[s.Descriptor()] = s.Buffer()
	}
	if img.Parts.Type != payload.ScatteredImage {
		err = w.open(d)
	} else {
		w.body = body{Cursor: image.NewCursor(d), desc: d, ranges: img.Parts.Ranges, whole: isLent(img)}
		w.body.adjust = make(map[int]payload.Adjustment)
		for _, a := range img.Parts.Adjustments {
			w.body.adjust[a.Buffer] = a
		}
	}
	if err != nil {
		return err
	}
	// A record is a struct without nulls: one buffer, a validity that is absent.
	w.header(out, d.Rows, 0)
	out.Buffers, _ = place[uintptr](&w.memory, 1)
	out.NBuffers = 1
	sh := shape.Record(d.Schema)
	if err := w.children(out, nil, &sh, 0); err != nil {
		return err
	}
	// The walk has found how many zeros are needed. One piece of memory serves all absent buffers.
	if w.zeros > 0 {
		err := w.draw(&batch.Descriptor{Body: w.zeros}, func(dev tier.Device, s tier.Stream, begin tier.Addr) error {
			at, err := w.dev.Pointer(begin, w.zeros)
			for _, p := range w.absent {
				*p = at
			}
			return errors.Join(err, dev.Fill(s, begin, 0, w.zeros))
		})
		if err != nil {
			return err
		}
	}
	// An import of the same memory finds it here, and is not charged twice.
	w.ranges = slices.Clone(img.Parts.Ranges)
	for _, b := range w.buffers {
		if b == nil {
			continue
		}
		if m, ok := b.Memory().(tier.DeviceMemory); ok {
			w.ranges = append(w.ranges, payload.DeviceRange{Addr: m.Addr(), Length: m.Size()})
		}
	}
	return nil
}

// isLent reports whether the buffers of a table are in their creator's arrays. Otherwise they are
// in copies of what the rows show, in the engine's memory.
func isLent(p *payload.Image) bool {
	if p.Buffer() == nil {
		return false
	}
	_, copied := p.Buffer().Memory().(tier.DeviceMemory)
	return !copied
}

// open makes an image in one piece the body.
func (w *arrayWriter) open(d *batch.Descriptor) error {
	begin, err := w.addrOf(d)
	w.body = body{Cursor: image.NewCursor(d), desc: d, begin: begin}
	return err
}

// addrOf returns where the memory of the descriptor begins, 0 if it has none.
func (w *arrayWriter) addrOf(d *batch.Descriptor) (tier.Addr, error) {
	buf, ok := w.buffers[d]
	switch {
	case !ok:
		return 0, errors.New("cdevice: a batch without a dictionary that it needs")
	case buf == nil:
		return 0, nil
	}
	m, ok := buf.Memory().(tier.DeviceMemory)
	if !ok {
		return 0, unsupported(w.body.Path, "memory of type %T, which is no device's", buf.Memory())
	}
	return m.Addr(), nil
}

// draw takes memory of the device for the body of d until the release, and has write fill it, by
// work on a stream that draw waits for. The memory is in w.taken also after an error.
func (w *arrayWriter) draw(
	d *batch.Descriptor, write func(dev tier.Device, s tier.Stream, at tier.Addr) error,
) error {
	buf, err := w.space.DrawNew(d.Body)
	if err != nil {
		return err
	}
	w.taken, w.buffers[d] = append(w.taken, buf), buf
	at, err := w.addrOf(d)
	if err != nil {
		return err
	}
	s, err := w.dev.NewStream()
	if err != nil {
		return err
	}
	return errors.Join(write(w.dev.Device, s, at), s.Sync(), s.Close())
}

// header fills in what is the same in all structs, and counts the struct.
func (w *arrayWriter) header(out *Array, length, nulls int64) {
	w.left.Add(1)
	out.Length, out.NullCount = length, nulls
	out.Release, out.PrivateData = callbacks().array, w.id
}

// children fills in the structs of the children of sh, each with front rows before those that the
// batch has.
func (w *arrayWriter) children(out *Array, p image.Path, sh *shape.Shape, front int64) error {
	at, structs := placeAll[Array](&w.memory, sh.NumChildren)
	out.Children, out.NChildren = at, int64(len(structs))
	for i := range structs {
		name, dt := sh.Child(i)
		if err := w.array(&structs[i], append(p, name), dt, front); err != nil {
			return err
		}
	}
	return nil
}

// array fills out with the next array, of type dt, and all below it.
//
// The array may be a slice of one that its creator has made, of which the batch shows n rows. C's
// array must then begin earlier, for two reasons. Its parent's offsets count from the beginning of
// the whole array, so the front rows before the batch's are shown too. And bitmaps must begin with
// a byte, so up to 7 rows more are passed over by Offset.
//
//	row of the whole array   0 … │ back … front … │ the batch's n rows │ …
//	C's array                    │ Offset │       Length               │
//
// Buffers begin back rows before the batch's first: front, and what makes bitmaps begin with a
// byte. For an array that is no slice, and everything in an image, both are 0.
func (w *arrayWriter) array(out *Array, p image.Path, dt arrow.DataType, front int64) error {
	b := &w.body
	b.Path = p
	a, err := b.Next(dt)
	if err != nil {
		return err
	}
	w.header(out, a.Length+front, a.Nulls)
	// First find back.
	back, first := front, int64(0)
	for i, k := range a.Buffers {
		if (k.Role == shape.Validity || k.Role == shape.Bits) && a.Spans[i].Length > 0 {
			// All bitmaps of the array begin at the same bit, so the first one decides.
			back += (b.base(a.First+i, payload.Bits) - front) & 7
			break
		}
	}
	if a.Rows == shape.Runs { // the second buffer of the run ends, which come first
		back = b.base(a.First+1, payload.Ends)
	}
	// The runs of a slice may begin fewer rows before it than the parent needs; C's array cannot
	// show those.
	if out.Offset = back - front; out.Offset < 0 {
		return p.Invalid("%d rows before the first", front)
	}
	switch {
	case a.Null:
		out.NullCount = out.Length
	case front > 0 && a.Nulls > 0:
		out.NullCount = -1 // those before the first are not counted
	}
	out.NBuffers = int64(len(a.Spans))
	if a.Views {
		out.NBuffers++
	}
	// Then the buffers: each begins before bytes earlier than the batch's has it. first is what its
	// offsets begin with, which the children, or the data, are counted from.
	var to []uintptr
	out.Buffers, to = place[uintptr](&w.memory, int(out.NBuffers))
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
					return p.Invalid("%d nulls and no validity", a.Nulls)
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
					first, s.Length = 0, 0
				}
			case shape.Data:
				before, need = first, 0
			}
		}
		switch {
		case s.Length > 0 && before > 0 && !b.whole:
			// An engine's copy of a slice has no bytes before its first row to point to.
			return unsupported(p, "the copy of a slice, which lacks what is before its first row"+
				" (buffer %d of %d; batch.PlainImage, which Mover.MoveAs makes of it, can be exported)",
				a.First+i, len(b.desc.Buffers))
		case s.Length > 0:
			at := b.begin + tier.Addr(b.desc.Buffers[a.First+i].Offset)
			if b.ranges != nil {
				at = b.ranges[a.First+i].Addr
			}
			if to[i], err = w.dev.Pointer(at-tier.Addr(before), s.Length+before); err != nil {
				return err
			}
		case need > 0:
			w.absent, w.zeros = append(w.absent, &to[i]), max(w.zeros, need)
		}
	}
	if a.Views { // the last buffer has the lengths of the data buffers; it is there also if it has none
		data := a.Spans[len(a.Buffers):]
		at, sizes := place[int64](&w.memory, max(1, len(data)))
		for i, s := range data {
			sizes[i] = max(0, s.Length)
		}
		to[len(a.Spans)] = at
	}
	switch a.Rows { // back becomes the children's front
	case shape.Times:
		back *= a.Size
	case shape.Between, shape.Shown:
		back = first
	case shape.Runs:
		back = 0
	}
	if err := w.children(out, p, &a.Shape, back); err != nil || a.Values == nil {
		return err
	}
	return w.dictionary(out, append(p, "dictionary"), a.Values)
}

// dictionary fills in the dictionary of an array: in the body, or an image of its own. C needs each
// array in one piece, so a dictionary that extends others is copied to memory that is taken for the
// export.
func (w *arrayWriter) dictionary(out *Array, p image.Path, dt arrow.DataType) error {
	at, dict := place[Array](&w.memory, 1)
	out.Dictionary = at
	n, outside, err := w.body.Outside()
	switch {
	case err != nil:
		return err
	case !outside:
		return w.array(&dict[0], p, dt, 0)
	}
	// The outer walk goes on where it was afterwards.
	outer := w.body
	defer func() { w.body = outer }()
	desc := outer.desc.Dictionaries[n]
	if desc.From != nil {
		whole := image.Whole(desc)
		parts, err := image.ChainParts(desc, whole)
		if err != nil {
			return err
		}
		// One copy on the device for each image of the chain.
		regions := make([]tier.Region, len(parts))
		for i, p := range parts {
			from, err := w.addrOf(p.Of)
			if err != nil {
				return err
			}
			regions[i] = tier.Region{Dst: tier.Addr(p.To), Src: from + tier.Addr(p.From), Size: p.N}
		}
		err = w.draw(whole, func(dev tier.Device, s tier.Stream, at tier.Addr) error {
			for i := range regions {
				regions[i].Dst += at
			}
			return dev.CopyRegions(s, regions)
		})
		if err != nil {
			return err
		}
		desc = whole
	}
	if err := w.open(desc); err != nil {
		return err
	}
	return w.array(&dict[0], p, dt, 0)
}
