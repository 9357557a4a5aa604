package columns

import (
	"cmp"
	"slices"
	"sort"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/lookup"
	"github.com/spillway-db/spillway/internal/payload"
)

// Plan is the parts of an image that are read at once, and their places in memory. These are whole
// blocks of its checksums.
//
//	image   │block│block│block│block│block│block│block│block│
//	           a a a a a             b b b           c
//	memory  │block│block│      │block│block│      │block│      in one piece
//	           a a a a a             b b b           c
type Plan struct {
	Memory *batch.Descriptor // the length of the memory, the places of buffers, and the dictionaries
	Runs   []Run             // what is read
	Shared []batch.Shared    // the dictionaries, where the image is

	chosen *chosen
}

// Run is blocks that follow each other in the image and in memory.
type Run struct {
	Off int64 // in the image
	N   int64 // bytes
	At  int64 // in memory
}

// FewText is up to how many bytes of text are read whole: as many as it takes to look up which of
// them are needed.
const FewText = 2 * payload.SumChunk

// Plan plans the reading of the columns and rows from an image, whose dictionaries are shared. It
// calls read for the offsets that bound the strings of the rows.
func (c *Columns) Plan(of *batch.Descriptor, shared []batch.Shared, read func([]Piece) error) (*Plan, error) {
	rows := c.To - c.From
	parts, err := choose(of, c, rows != of.Rows)
	if err != nil {
		return nil, err
	}
	var bounds []*int64
	var pieces []Piece
	for i := range parts.buffers {
		b := &parts.buffers[i]
		if b.offsets == nil {
			continue
		}
		if b.span.Length <= FewText {
			b.whole, b.offsets = true, nil
			continue
		}
		b.last = b.span.Length
		for to, row := range map[*int64]int64{&b.first: c.From, &b.last: c.To} {
			o := b.offsets
			at := row * o.scale * o.Width
			if at > o.span.Length-o.Width {
				return nil, image.Path{}.Invalid("offsets of %d bytes end before row %d", o.span.Length, row)
			}
			if row > 0 && row < of.Rows {
				bounds = append(bounds, to)
				pieces = append(pieces, Piece{Off: o.span.Offset + at, To: make([]byte, o.Width)})
			}
		}
	}
	if err := read(slices.Clone(pieces)); err != nil {
		return nil, err
	}
	for i, to := range bounds {
		*to = image.OffsetAt(pieces[i].To, int64(len(pieces[i].To)), 0)
	}

	// All blocks that have something of the buffers are read, each once.
	var runs []Run
	block := of.SumBlock()
	for i := range parts.buffers {
		b := &parts.buffers[i]
		if b.span.Length <= 0 {
			continue
		}
		if !b.whole {
			off, size, err := parts.part(b, rows)
			if err != nil {
				return nil, err
			}
			b.at, b.size = b.at+off, size
		}
		if b.size > 0 {
			first := b.at / block * block
			runs = append(runs, Run{Off: first, N: min(image.RoundUp(b.at+b.size, block), of.Body) - first})
		}
	}
	slices.SortFunc(runs, func(a, b Run) int { return cmp.Compare(a.Off, b.Off) })
	p := &Plan{chosen: parts, Memory: &batch.Descriptor{Rows: rows, Dictionaries: parts.desc.Dictionaries}}
	for _, r := range runs {
		if last := len(p.Runs) - 1; last >= 0 && r.Off <= p.Runs[last].Off+p.Runs[last].N {
			p.Runs[last].N = max(p.Runs[last].N, r.Off+r.N-p.Runs[last].Off)
			continue
		}
		p.Runs = append(p.Runs, r)
	}
	for i := range p.Runs {
		p.Runs[i].At = p.Memory.Body
		p.Memory.Body += p.Runs[i].N
	}
	for i := range parts.buffers {
		if b := &parts.buffers[i]; b.size > 0 {
			r := p.Runs[sort.Search(len(p.Runs), func(i int) bool { return p.Runs[i].Off > b.at })-1]
			b.at += r.At - r.Off
			p.Memory.Buffers = append(p.Memory.Buffers, payload.Span{Offset: b.at, Length: b.size})
		}
	}
	var at lookup.Table[*batch.Descriptor]
	for _, dict := range p.Memory.AllDictionaries() {
		i := at.Find(len(shared), func(i int) *batch.Descriptor { return shared[i].Descriptor() }, dict)
		p.Shared = append(p.Shared, shared[i])
	}
	return p, nil
}

// Open opens the rows in the memory, which has what was planned and is changed. On an error it ends
// the lease.
func (p *Plan) Open(extents [][]byte, l *image.Lease, find image.Finder) (_ arrow.RecordBatch, err error) {
	defer func() {
		if err != nil {
			l.End()
		}
	}()
	defer guard.Error(&err, "convert: opening columns")
	c := p.chosen
	for i := range c.buffers {
		b := &c.buffers[i]
		if b.whole || b.size <= 0 {
			continue
		}
		// The bytes before, which are those of other rows, make room for a buffer that is aligned.
		before := b.at % image.AlignSmall
		all := image.Stretch(extents, b.at-before, before+b.size)
		if all == nil {
			return nil, image.Path{}.Invalid("a buffer of %d bytes at %d lies in several extents", b.size, b.at)
		}
		b.at, b.to = b.at-before, all[:b.size]
		copy(b.to, all[before:])
	}
	d, skip := c.describe(p.Memory.Rows, 0)
	d.Body = p.Memory.Body
	return image.OpenRows(d, skip, extents, l, find)
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
	parts, err := choose(of, c, false)
	if err != nil {
		return nil, nil, err
	}
	d, skip = parts.describe(c.To-c.From, 0)
	d.Body = of.Body
	return d, skip, nil
}
