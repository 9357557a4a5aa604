package columns

import (
	"cmp"
	"slices"
	"sort"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/bitutil"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/lookup"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
	"github.com/spillway-db/spillway/internal/sumcopy"
)

// Plan says what of a disk image is read, where in memory it comes to lie, and
// what it means there.
//
//	image   │chunk│chunk│chunk│chunk│chunk│chunk│chunk│chunk│
//	           a a a a a             b b b           c
//	memory  │chunk│chunk│      │chunk│chunk│      │chunk│      in one piece
//	           a a a a a             b b b           c
type Plan struct {
	Desc   *batch.Descriptor // of the memory; mend counts the nulls of what is cut
	Skip   []int64           // rows of each column before those that are wanted
	Runs   []ChunkRun        // what is read
	Shared []batch.Shared    // the dictionaries that desc needs, where the image is

	of      *batch.Descriptor // of the image
	chosen  *Columns
	columns []cutColumn
	numbers lookup.Table[*batch.Descriptor] // of desc's dictionaries
	bitmaps []bitmapAt
	offsets []offsetsAt
}

// Bound is an offset that must be known to plan. It lies in one chunk of the image.
type Bound struct {
	At    int64 // in the image
	width int64 // 4 or 8 bytes
	to    *int64
}

// Set takes the bytes of the offset.
func (b *Bound) Set(p []byte) { *b.to = image.OffsetAt(p, b.width, 0) }

// cutColumn is a column and its rows that are read.
type cutColumn struct {
	imageColumn
	begin, end int64
	cut        bool       // not all rows
	text       []textRows // for each of parts
}

// textRows is which bytes of a shape.Data the rows have.
type textRows struct{ first, last int64 }

// base is from where on the text is read: a multiple of image.AlignSmall.
func (t textRows) base() int64 { return t.first / image.AlignSmall * image.AlignSmall }

// ChunkRun is chunks that follow each other in the image and in memory.
type ChunkRun struct {
	Off int64 // in the image
	N   int64 // bytes
	At  int64 // in memory
}

// bitmapAt is a bitmap that was cut, whose nulls are to be counted.
type bitmapAt struct{ node, span int }

// offsetsAt is offsets whose text begins elsewhere now.
type offsetsAt struct {
	span        int
	width, base int64
}

// Plan plans the reading of the columns from the image of d, whose dictionaries are shared. find
// sets the offsets that say where the wanted strings lie.
func (c *Columns) Plan(of *batch.Descriptor, shared []batch.Shared, find func([]Bound) error) (*Plan, error) {
	columns, err := columnsOf(of, c)
	if err != nil {
		return nil, err
	}
	p := &Plan{of: of, chosen: c, columns: make([]cutColumn, len(columns))}
	var bounds []Bound
	for i, column := range columns {
		p.columns[i].imageColumn = column
		if err := column.inBody(of.Body); err != nil {
			return nil, err
		}
		found, err := p.columns[i].choose(c, of.Rows)
		if err != nil {
			return nil, err
		}
		bounds = append(bounds, found...)
	}
	if err := find(bounds); err != nil {
		return nil, err
	}
	return p, p.describe(shared)
}

// NoRows makes a record without rows, for which no memory is needed.
func (c *Columns) NoRows(of *batch.Descriptor) (arrow.RecordBatch, error) {
	return image.OpenRows(image.Empty(c.Schema, of.Metadata), nil, nil, image.NewLease(nil), nil)
}

// Within describes the columns where they are, in an image that has all of its bytes. skip is how
// many rows each has before those that were chosen.
func (c *Columns) Within(of *batch.Descriptor) (d *batch.Descriptor, skip []int64, err error) {
	columns, err := columnsOf(of, c)
	if err != nil {
		return nil, nil, err
	}
	d = &batch.Descriptor{
		Schema: c.Schema, Rows: c.To - c.From, Body: of.Body,
		Dictionaries: of.Dictionaries, Metadata: of.Metadata,
	}
	for i := range columns {
		skip = append(skip, c.From)
		for _, n := range columns[i].nodes {
			d.Nodes = append(d.Nodes, n.Node)
		}
		for _, p := range columns[i].parts {
			d.Buffers = append(d.Buffers, p.span)
		}
	}
	return d, skip, nil
}

// inBody refuses parts that are not in the body: before any is read.
func (c *imageColumn) inBody(body int64) error {
	for _, p := range c.parts {
		if s := p.span; s.Length < 0 || s.Length > 0 && (s.Offset < 0 || s.Offset > body || s.Length > body-s.Offset) {
			return image.Path(nil).Invalid("a buffer of %d bytes at %d in a body of %d", s.Length, s.Offset, body)
		}
	}
	return nil
}

// choose decides which rows are read, and returns the offsets that must be known to
// say which bytes those have.
func (c *cutColumn) choose(of *Columns, rows int64) ([]Bound, error) {
	c.end = rows
	if !c.byRows {
		return nil, nil
	}
	c.begin, c.end = of.From/c.granule*c.granule, of.To
	if c.cut = c.begin > 0 || c.end < rows; !c.cut {
		return nil, nil
	}
	var bounds []Bound
	c.text = make([]textRows, len(c.parts))
	for i, p := range c.parts {
		if p.Role != shape.Data || p.scale < 0 {
			continue
		}
		t := &c.text[i]
		t.last = p.span.Length
		offsets := c.parts[i-1]
		if offsets.span.Length <= 0 || p.span.Length <= FewText {
			continue // it is as quickly read as its bounds are
		}
		for row, to := range map[int64]*int64{c.begin: &t.first, c.end: &t.last} {
			if row == 0 || row == rows {
				continue
			}
			at := row * p.scale * offsets.Width
			if at > offsets.span.Length-offsets.Width {
				return nil, image.Path(nil).Invalid("offsets of %d bytes end before row %d", offsets.span.Length, row)
			}
			bounds = append(bounds, Bound{At: offsets.span.Offset + at, width: offsets.Width, to: to})
		}
	}
	return bounds, nil
}

// FewText is up to how many bytes of text are read whole: as many as it takes to look
// up which of them are needed.
const FewText = 2 * payload.SumChunk

// needed returns where in the image those bytes of part i are that are read.
func (c *cutColumn) needed(i int) (payload.Span, error) {
	p := c.parts[i]
	if !c.cut || p.scale < 0 || p.span.Length <= 0 {
		return p.span, nil
	}
	at, n := c.begin*p.scale, (c.end-c.begin)*p.scale
	var off, length int64
	switch p.Role {
	case shape.Validity, shape.Bits:
		off, length = at/8, (n+7)/8
	case shape.Values:
		off, length = at*p.Width, n*p.Width
	case shape.Offsets:
		off, length = at*p.Width, (n+1)*p.Width
	case shape.Data:
		off = c.text[i].base()
		length = c.text[i].last - off
	}
	if off < 0 || length < 0 || off > p.span.Length || length > p.span.Length-off {
		return p.span, image.Path(nil).Invalid("a buffer of %d bytes where %d at %d are needed", p.span.Length, length, off)
	}
	if length == 0 {
		return payload.Span{}, nil
	}
	return payload.Span{Offset: p.span.Offset + off, Length: length}, nil
}

// describe makes what follows from the columns and their rows.
func (p *Plan) describe(shared []batch.Shared) error {
	of := p.of
	p.Desc = &batch.Descriptor{Schema: p.chosen.Schema, Rows: p.chosen.To - p.chosen.From, Metadata: of.Metadata}
	for i := range p.columns {
		c := &p.columns[i]
		p.Skip = append(p.Skip, p.chosen.From-c.begin)
		nodes, spans := len(p.Desc.Nodes), len(p.Desc.Buffers)
		if err := p.addNodes(c); err != nil {
			return err
		}
		for j, part := range c.parts {
			s, err := c.needed(j)
			if err != nil {
				return err
			}
			p.Desc.Buffers = append(p.Desc.Buffers, s)
			if !c.cut || part.scale < 0 || s.Length <= 0 {
				continue
			}
			switch part.Role {
			case shape.Validity:
				p.bitmaps = append(p.bitmaps, bitmapAt{nodes + part.node, spans + j})
			case shape.Offsets:
				if base := c.text[j+1].base(); base > 0 {
					p.offsets = append(p.offsets, offsetsAt{spans + j, part.Width, base})
				}
			}
		}
	}
	p.lay(of.Body)
	var at lookup.Table[*batch.Descriptor]
	for _, d := range p.Desc.AllDictionaries() {
		i := at.Find(len(shared), func(i int) *batch.Descriptor { return shared[i].Descriptor() }, d)
		p.Shared = append(p.Shared, shared[i])
	}
	return nil
}

// addNodes adds the arrays of c. What they have of the batch's dictionaries is
// numbered anew.
func (p *Plan) addNodes(c *cutColumn) error {
	dicts := p.of.Dictionaries
	for _, n := range c.nodes {
		switch {
		case n.Nulls == payload.Outside:
			if n.Length < 0 || n.Length >= int64(len(dicts)) {
				return image.Path(nil).Invalid("dictionary %d of %d", n.Length, len(dicts))
			}
			at := p.numbers.Of(p.Desc.Dictionaries, dicts[n.Length])
			if at < 0 {
				at = len(p.Desc.Dictionaries)
				p.Desc.Dictionaries = append(p.Desc.Dictionaries, dicts[n.Length])
			}
			n.Length = int64(at)
		case c.cut && n.scale >= 0:
			n.Length, n.Nulls = (c.end-c.begin)*n.scale, 0
			if n.onlyNull {
				n.Nulls = n.Length
			}
		}
		p.Desc.Nodes = append(p.Desc.Nodes, n.Node)
	}
	return nil
}

// lay gives the chunks that have something of the buffers their places in memory, and
// says where the buffers are there. A buffer that two columns have stays one.
func (p *Plan) lay(body int64) {
	for _, s := range p.Desc.Buffers {
		if s.Length > 0 {
			first := s.Offset / payload.SumChunk * payload.SumChunk
			p.Runs = append(p.Runs, ChunkRun{Off: first, N: min(image.RoundUp(s.Offset+s.Length, payload.SumChunk), body) - first})
		}
	}
	slices.SortFunc(p.Runs, func(a, b ChunkRun) int { return cmp.Compare(a.Off, b.Off) })
	runs := p.Runs[:0]
	for _, r := range p.Runs {
		if last := len(runs) - 1; last >= 0 && r.Off <= runs[last].Off+runs[last].N {
			runs[last].N = max(runs[last].N, r.Off+r.N-runs[last].Off)
			continue
		}
		runs = append(runs, r)
	}
	p.Runs = runs
	for i := range runs {
		runs[i].At = p.Desc.Body
		p.Desc.Body += runs[i].N
	}
	for i, s := range p.Desc.Buffers {
		if s.Length > 0 {
			r := runs[sort.Search(len(runs), func(i int) bool { return runs[i].Off > s.Offset })-1]
			p.Desc.Buffers[i].Offset = r.At + s.Offset - r.Off
		}
	}
}

// Mend makes what was cut out into arrays of their own: the nulls are counted and offsets are
// moved. extents is the memory, which the caller alone has.
func (p *Plan) Mend(extents [][]byte) error {
	for _, b := range p.bitmaps {
		bits, err := p.buffer(extents, b.span)
		if err != nil {
			return err
		}
		n := &p.Desc.Nodes[b.node]
		n.Nulls = n.Length - int64(bitutil.CountSetBits(bits, 0, int(n.Length)))
	}
	for _, o := range p.offsets {
		b, err := p.buffer(extents, o.span)
		if err != nil {
			return err
		}
		if o.width == 4 {
			sumcopy.Sub32(b, b, uint32(o.base))
		} else {
			sumcopy.Sub64(b, b, uint64(o.base))
		}
	}
	return nil
}

// buffer returns the bytes of a span, which lies in one extent.
func (p *Plan) buffer(extents [][]byte, span int) ([]byte, error) {
	s := p.Desc.Buffers[span]
	b := image.Stretch(extents, s.Offset, s.Length)
	if int64(len(b)) != s.Length {
		return nil, image.Path(nil).Invalid("a buffer of %d bytes at %d lies in several extents", s.Length, s.Offset)
	}
	return b, nil
}
