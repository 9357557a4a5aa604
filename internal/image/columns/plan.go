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

// Plan is the parts of a disk image that are read, their places in memory, and the descriptor that
// they have there.
//
//	image   │chunk│chunk│chunk│chunk│chunk│chunk│chunk│chunk│
//	           a a a a a             b b b           c
//	memory  │chunk│chunk│      │chunk│chunk│      │chunk│      in one piece
//	           a a a a a             b b b           c
type Plan struct {
	Desc   *batch.Descriptor // of the memory; Mend counts the nulls of what is cut
	Skip   []int64           // rows of each column before those that are wanted
	Runs   []ChunkRun        // what is read
	Shared []batch.Shared    // the dictionaries that desc needs, where the image is

	mends []mend
}

// Bound is an offset that must be known to plan. It is in one chunk of the image.
type Bound struct {
	At    int64 // in the image
	width int64 // 4 or 8 bytes
	to    *int64
}

// Set takes the bytes of the offset.
func (b *Bound) Set(p []byte) { *b.to = image.OffsetAt(p, b.width, 0) }

// ChunkRun is chunks that follow each other in the image and in memory.
type ChunkRun struct {
	Off int64 // in the image
	N   int64 // bytes
	At  int64 // in memory
}

// mend is a span of Plan.Desc whose bytes change when they were read: a bitmap, whose nulls are
// counted for a node, or, with a width, offsets of which base is subtracted.
type mend struct {
	span, node  int
	width, base int64
}

// Plan plans the reading of the columns from the image of d, whose dictionaries are shared. find
// sets the offsets that bound the strings of the rows.
func (c *Columns) Plan(of *batch.Descriptor, shared []batch.Shared, find func([]Bound) error) (*Plan, error) {
	columns, err := columnsOf(of, c)
	if err != nil {
		return nil, err
	}
	var bounds []Bound
	for i := range columns {
		if bounds, err = columns[i].choose(c, of, bounds); err != nil {
			return nil, err
		}
	}
	if err := find(bounds); err != nil {
		return nil, err
	}
	d := &batch.Descriptor{Schema: c.Schema, Rows: c.To - c.From, Metadata: of.Metadata}
	p := &Plan{Desc: d}
	var numbers lookup.Table[*batch.Descriptor] // of d's dictionaries
	for i := range columns {
		col := &columns[i]
		p.Skip = append(p.Skip, c.From-col.begin)
		nodes, spans := len(d.Nodes), len(d.Buffers)
		for _, n := range col.nodes {
			switch {
			case n.Nulls == payload.Outside:
				dict := of.Dictionaries[n.Length]
				at := numbers.Of(d.Dictionaries, dict)
				if at < 0 {
					at = len(d.Dictionaries)
					d.Dictionaries = append(d.Dictionaries, dict)
				}
				n.Length = int64(at)
			case col.cut && n.scale >= 0:
				n.Length, n.Nulls = (col.end-col.begin)*n.scale, 0
				if n.onlyNull {
					n.Nulls = n.Length
				}
			}
			d.Nodes = append(d.Nodes, n.Node)
		}
		for j := range col.parts {
			part := &col.parts[j]
			s := part.span
			if col.cut && part.scale >= 0 && s.Length > 0 {
				if s, err = part.needed(col.begin, col.end); err != nil {
					return nil, err
				}
				switch {
				case s.Length <= 0:
				case part.Role == shape.Validity:
					p.mends = append(p.mends, mend{span: spans + j, node: nodes + part.node})
				case part.Role == shape.Offsets:
					if base := col.parts[j+1].base(); base > 0 {
						p.mends = append(p.mends, mend{span: spans + j, width: part.Width, base: base})
					}
				}
			}
			d.Buffers = append(d.Buffers, s)
		}
	}
	p.lay(of)
	var at lookup.Table[*batch.Descriptor]
	for _, dict := range d.AllDictionaries() {
		i := at.Find(len(shared), func(i int) *batch.Descriptor { return shared[i].Descriptor() }, dict)
		p.Shared = append(p.Shared, shared[i])
	}
	return p, nil
}

// NoRows makes a record without rows, for which no memory is needed.
func (c *Columns) NoRows(of *batch.Descriptor) (arrow.RecordBatch, error) {
	d, err := image.Empty(c.Schema, of.Metadata)
	if err != nil {
		return nil, err
	}
	return image.OpenRows(d, nil, nil, image.NewLease(nil), nil)
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

// choose checks that the parts are in the body, before any is read, decides which rows are read, and
// appends the offsets that must be known to find their strings.
func (c *column) choose(of *Columns, d *batch.Descriptor, bounds []Bound) ([]Bound, error) {
	for _, p := range c.parts {
		s := p.span
		if s.Length < 0 || s.Length > 0 && (s.Offset < 0 || s.Offset > d.Body || s.Length > d.Body-s.Offset) {
			return nil, image.Path{}.Invalid("a buffer of %d bytes at %d in a body of %d", s.Length, s.Offset, d.Body)
		}
	}
	c.end = d.Rows
	if c.byRows {
		c.begin, c.end = of.From/c.granule*c.granule, of.To
		c.cut = c.begin > 0 || c.end < d.Rows
	}
	for i := range c.parts {
		p := &c.parts[i]
		if p.last = p.span.Length; !c.cut || p.Role != shape.Data || p.scale < 0 {
			continue
		}
		offsets := c.parts[i-1]
		if offsets.span.Length <= 0 || p.span.Length <= FewText {
			continue // it is as quickly read as its bounds are
		}
		for row, to := range map[int64]*int64{c.begin: &p.first, c.end: &p.last} {
			if row == 0 || row == d.Rows {
				continue
			}
			at := row * p.scale * offsets.Width
			if at > offsets.span.Length-offsets.Width {
				return nil, image.Path{}.Invalid("offsets of %d bytes end before row %d", offsets.span.Length, row)
			}
			bounds = append(bounds, Bound{At: offsets.span.Offset + at, width: offsets.Width, to: to})
		}
	}
	return bounds, nil
}

// FewText is up to how many bytes of text are read whole: as many as it takes to look
// up which of them are needed.
const FewText = 2 * payload.SumChunk

// needed returns the span in the image of the bytes that the rows have.
func (p *part) needed(begin, end int64) (payload.Span, error) {
	off, length := p.Bytes(begin*p.scale, (end-begin)*p.scale)
	if p.Role == shape.Data {
		off, length = p.base(), p.last-p.base()
	}
	if off < 0 || length < 0 || off > p.span.Length || length > p.span.Length-off {
		return p.span, image.Path{}.Invalid("a buffer of %d bytes where %d at %d are needed",
			p.span.Length, length, off)
	}
	if length == 0 {
		return payload.Span{}, nil
	}
	return payload.Span{Offset: p.span.Offset + off, Length: length}, nil
}

// lay gives the chunks that have something of the buffers their places in memory, and
// sets the spans of the buffers there. A buffer that two columns have stays one.
func (p *Plan) lay(of *batch.Descriptor) {
	chunk := of.SumBlock()
	for _, s := range p.Desc.Buffers {
		if s.Length > 0 {
			first := s.Offset / chunk * chunk
			end := min(image.RoundUp(s.Offset+s.Length, chunk), of.Body)
			p.Runs = append(p.Runs, ChunkRun{Off: first, N: end - first})
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

// Mend makes what was cut out into arrays of their own: it counts nulls and moves offsets. extents is
// the memory, which only the caller has.
func (p *Plan) Mend(extents [][]byte) error {
	for _, m := range p.mends {
		s := p.Desc.Buffers[m.span]
		b := image.Stretch(extents, s.Offset, s.Length)
		switch n := &p.Desc.Nodes[m.node]; {
		case b == nil:
			return image.Path{}.Invalid("a buffer of %d bytes at %d lies in several extents", s.Length, s.Offset)
		case m.width == 0:
			n.Nulls = n.Length - int64(bitutil.CountSetBits(b, 0, int(n.Length)))
		default:
			sumcopy.Lower{Width: m.width, Base: uint64(m.base)}.Copy(b, b)
		}
	}
	return nil
}
