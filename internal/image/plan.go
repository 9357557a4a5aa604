package image

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/bitutil"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
	"github.com/spillway-db/spillway/tier"
)

// planner walks arrays and decides where each buffer goes in the body. The arrays are those of a
// record in host memory or those of a table on a device, but not both. Of a record, the planner
// lists the pieces to write; of a table, the ranges to copy.
type planner struct {
	path   Path
	nodes  []payload.Node
	spans  []payload.Span
	pieces []piece
	at     int64 // end of the last buffer
	begun  int64 // where the small buffers after the last place to cut begin
	bytes  int64 // in buffers
	maxVar int64 // longest data buffer of views; 0 for the format's limit

	inline  int64                       // dictionaries of up to so many bytes are in the body
	dicts   map[arrow.ArrayData]laidOut // dictionaries in the body
	outside *outside                    // nil until a dictionary is an image of its own
	uses    []*Layout                   // dictionaries that nodes here refer to
	numbers map[*Layout]int             // of uses

	ranges []payload.DeviceRange // of a table, by span; up to the last span that has bytes
	adjust []payload.Adjustment
	facts  facts // what is known of the device's memory
}

// outside is the dictionaries of a record that are images of their own.
type outside struct {
	order []*Layout                 // inner ones first
	of    map[*array.Data][]*Layout // of an array: one for each type that it is used as
}

// laidOut is a dictionary in a body: its type, nodes and spans.
type laidOut struct {
	dt    arrow.DataType
	nodes []payload.Node
	spans []payload.Span
}

// MaxInline is up to how many bytes a dictionary is in the body of those that use it; see Layout.
const MaxInline = tier.Page

// maxBody is more than any device has, and small enough that sums of bytes stay in range.
const maxBody = 1 << 62

// MaxRows limits lengths and offsets of arrays, so that their products with the widths of values
// can be checked within 64 bits.
const MaxRows = 1 << 48

// Path names the array that a walker is at, for error messages.
type Path []string

// Invalid returns an *InvalidError for the array at p.
func (p Path) Invalid(format string, args ...any) error {
	return &InvalidError{Path: strings.Join(p, "."), Problem: fmt.Sprintf(format, args...)}
}

// input is an array to lay out: host or dev is set, or neither if there is no array.
type input struct {
	host arrow.ArrayData
	dev  *DeviceArray
}

func (in input) child(i int) (c input) {
	switch {
	case in.dev != nil:
		c.dev = in.dev.Children[i]
	case in.host != nil:
		c.host = in.host.Children()[i]
	}
	return c
}

// rows are some rows of an array that has as many parts as its type asks for.
type rows struct {
	input
	shape.Shape
	at      int64 // the first row, counted from the beginning of the buffers
	n       int64
	nulls   int64
	spanned interval // what the offsets span, once they are added
}

// buffer is one buffer of an array.
type buffer struct {
	there bool
	size  int64 // bytes; Unknown for some of a device's
	bytes []byte
	addr  tier.Addr
}

// all is the number of rows of an array with everything that it has.
const all = -1

// rows checks the parts of an array of type dt, and returns its n rows from the row from on. An array
// without rows may be missing, and lacks all buffers then.
func (p *planner) rows(dt arrow.DataType, in input, from, n int64) (s rows, err error) {
	s.input, s.n = in, n
	var ok bool
	if s.Shape, ok = shape.Of(dt); !ok {
		return s, p.path.Invalid("no layout for the type %s", dt)
	}
	if in.dev == nil && (in.host == nil || in.host == arrow.ArrayData((*array.Data)(nil))) {
		if n > 0 {
			return s, p.path.Invalid("no data")
		}
		s.input, s.n = input{}, 0
		return s, nil
	}
	var length int64
	children, want := 0, s.NumChildren
	if d := in.dev; d != nil {
		s.at, length, children = d.Offset, d.Length, len(d.Children)
		switch buffers := len(d.Buffers); {
		case d.Nulls < Unknown || d.Nulls > length:
			return s, p.path.Invalid("%d nulls of %d rows", d.Nulls, length)
		case buffers < len(s.Buffers) || buffers > len(s.Buffers) && !s.Views:
			return s, p.path.Invalid("%d buffers of %s, want %d", buffers, s.Type, len(s.Buffers))
		}
	} else {
		s.at, length, children = int64(in.host.Offset()), int64(in.host.Len()), len(in.host.Children())
		if got := in.host.DataType(); got != dt && shape.Storage(got).ID() != s.Type.ID() {
			return s, p.path.Invalid("the data is of type %s, not of type %s", got, s.Type)
		}
		if want == 0 {
			children = 0 // arrow-go ignores them, too
		}
	}
	if n == all {
		n = length
		s.n = n
	}
	switch {
	case s.at < 0 || length < 0 || s.at > MaxRows || length > MaxRows:
		return s, p.path.Invalid("offset %d, length %d", s.at, length)
	case from < 0 || n < 0 || n > length || from > length-n:
		return s, p.path.Invalid("%d rows from %d on of an array of %d", n, from, length)
	case children != want:
		return s, p.path.Invalid("%d children, want %d", children, want)
	}
	s.at += from
	return s, nil
}

// buffer returns the buffer with number i of Shape.Buffers, or after them one of a view's data.
func (s *rows) buffer(i int) (m buffer) {
	if s.dev != nil {
		if b := s.dev.Buffers[i]; b.Addr != 0 {
			m = buffer{there: true, size: b.Length, addr: b.Addr}
		}
		return m
	}
	if !s.HasValidity {
		i++ // arrow-go leaves room for a validity
	}
	if s.host == nil {
		return m
	}
	if bufs := s.host.Buffers(); i < len(bufs) && bufs[i] != nil {
		b := bufs[i].Bytes()
		m = buffer{there: true, size: int64(len(b)), bytes: b}
	}
	return m
}

// array lays out the n rows of an array from the row from on, or all of them. The array is called name
// in messages.
func (p *planner) array(name string, dt arrow.DataType, in input, from, n int64) error {
	p.path = append(p.path, name)
	s, err := p.rows(dt, in, from, n)
	switch {
	case err != nil:
		return err
	case s.HasValidity:
		if err := p.validity(&s); err != nil {
			return err
		}
	case s.Null:
		s.nulls = s.n
	}
	p.nodes = append(p.nodes, payload.Node{Length: s.n, Nulls: s.nulls})
	var shown []interval // the values that the rows show of each child, where buffers determine them
	for i, b := range s.Buffers {
		switch record := s.dev == nil; {
		case b.Role == shape.Validity, record && b.Role == shape.Sizes: // listView adds the sizes
		case record && b.Role == shape.Views:
			err = p.views(&s, b)
		case record && b.Role == shape.Starts:
			shown, err = p.listView(&s, b)
		case record && b.Role == shape.Places:
			shown, err = p.denseOffsets(&s, b)
		default:
			m, none, fails := p.take(&s, i, b)
			switch err = fails; {
			case err != nil || none:
			case b.Role == shape.Bits:
				p.bits(&s, m)
			case b.Role == shape.Offsets:
				s.spanned, err = p.offsets(&s, m, b.Width)
			default:
				p.put(m.size, m, nil, nil)
			}
		}
		if err != nil {
			return err
		}
	}
	if s.Views && s.dev != nil {
		if err := p.wholeData(&s); err != nil {
			return err
		}
	}
	if s.Rows == shape.Runs {
		return p.runs(&s)
	}
	for i := range s.NumChildren {
		name, dt := s.Child(i)
		first, rows := s.at, s.n
		switch s.Rows {
		case shape.Times:
			if s.Size < 0 || s.Size > 0 && s.at+s.n > MaxRows/s.Size {
				return p.path.Invalid("%d lists of %d", s.n, s.Size)
			}
			first, rows = s.at*s.Size, s.n*s.Size
		case shape.Between:
			first, rows = s.spanned.from, s.spanned.to-s.spanned.from
		case shape.Shown:
			if first, rows = 0, all; s.dev == nil {
				first, rows = shown[i].from, shown[i].to-shown[i].from
			}
		}
		if err := p.array(name, dt, s.child(i), first, rows); err != nil {
			return err
		}
	}
	if s.Values != nil {
		if err := p.dictionary(&s); err != nil {
			return err
		}
	}
	p.path = p.path[:len(p.path)-1]
	return nil
}

// take returns the bytes that the rows have in buffer i. If there are none, it adds the span. A record
// may lack a buffer also if all rows are null; of a table, that claim may be wrong, and a reader of
// the batch would rely on it.
func (p *planner) take(s *rows, i int, b shape.Buffer) (m buffer, none bool, err error) {
	m = s.buffer(i)
	switch {
	case b.Width < 0 || b.Width > 0 && s.at+s.n >= maxBody/b.Width:
		return m, false, p.path.Invalid("%d values of %d bytes", s.n, b.Width)
	case b.Role == shape.Data && m.size != Unknown && s.spanned.to > m.size:
		return m, false, p.path.Invalid("offsets reach to byte %d of %d", s.spanned.to, m.size)
	case !m.there && (s.n == 0 || s.dev == nil && s.nulls == s.n || b.Role == shape.Data):
		p.spans = append(p.spans, payload.Absent)
		return m, true, nil
	case s.n == 0 && b.Role == shape.Offsets && s.dev == nil && m.size >= b.Width:
		// An array without rows has one offset, too, because consumers in C read it.
		p.put(b.Width, buffer{bytes: zeros[:b.Width]}, nil, nil)
		return m, true, nil
	}
	off, n := b.Bytes(s.at, s.n)
	if b.Role == shape.Data {
		off, n = s.spanned.from, s.spanned.to-s.spanned.from
	}
	if s.n == 0 || n == 0 {
		p.spans = append(p.spans, payload.Span{})
		return m, true, nil
	}
	if !m.there {
		return m, false, p.path.Invalid("buffer %d of %s is missing, of %d rows", i, s.Type, s.n)
	}
	m, err = p.narrow(s, i, m, off, n)
	return m, false, err
}

var zeros [8]byte

// narrow returns the n bytes of buffer i from at on.
func (p *planner) narrow(s *rows, i int, m buffer, at, n int64) (buffer, error) {
	switch {
	case m.size < Unknown || m.size != Unknown && at+n > m.size:
		return m, p.path.Invalid("buffer %d of %s has %d bytes: too short for %d rows from %d on",
			i, s.Type, m.size, s.n, s.at)
	case uint64(m.addr) > 1<<63: // sums of addresses stay in range
		return m, p.path.Invalid("a buffer at %#x", uint64(m.addr))
	case n > maxBody-p.at:
		return m, p.path.Invalid("%d bytes after %d others: more than there can be", n, p.at)
	case s.dev == nil:
		m.bytes = m.bytes[at : at+n]
	}
	m.addr, m.size = m.addr+tier.Addr(at), n
	return m, nil
}

// put adds the span of a buffer of n bytes. They are those of m, adjusted if adj is not nil,
// for which m may have more; or those that from makes.
func (p *planner) put(n int64, m buffer, adj *payload.Adjustment, from source) {
	if n == 0 {
		p.spans = append(p.spans, payload.Span{})
		return
	}
	off := extent.RoundUp(p.at, AlignSmall)
	if n >= large {
		off = extent.RoundUp(p.at, alignLarge)
		p.begun = off + n
	} else if off+n-p.begun > smallTogether {
		off = extent.RoundUp(p.at, alignLarge)
		p.begun = off
	}
	span := payload.Span{Offset: off, Length: n}
	p.at, p.bytes = off+n, p.bytes+n
	if p.facts != nil { // of a table
		p.ranges = append(p.ranges, make([]payload.DeviceRange, len(p.spans)-len(p.ranges))...)
		p.ranges = append(p.ranges, payload.DeviceRange{Addr: m.addr, Length: m.size})
		if adj != nil {
			adj.Buffer = len(p.spans)
			p.adjust = append(p.adjust, *adj)
		}
	} else {
		raw := m.bytes
		switch {
		case from != nil:
			raw = nil
		case adj == nil:
		case adj.How == payload.Bits && adj.Base == 0: // all but the last byte is copied as it is
			tail := raw[n-1] & (1<<(adj.Count%8) - 1)
			if n > 1 {
				p.pieces = append(p.pieces, piece{off: off, n: n - 1, raw: raw})
			}
			off, n, raw = off+n-1, 1, []byte{tail}
		default:
			from = &adjusted{raw, adj}
			if adj.How != payload.Lower {
				raw = nil
			}
		}
		p.pieces = append(p.pieces, piece{off: off, n: n, raw: raw, from: from})
	}
	p.spans = append(p.spans, span)
}

// validity adds the validity of s. It counts the nulls, unless a table has their number.
func (p *planner) validity(s *rows) error {
	m := s.buffer(0)
	switch s.nulls = Unknown; {
	case s.dev != nil && !m.there && s.dev.Nulls > 0:
		return p.path.Invalid("%d nulls and no validity", s.dev.Nulls)
	case s.n == 0 || !m.there || s.dev == nil && m.size == 0: // arrow-go takes a bitmap without bytes for none
		s.nulls = 0
	case s.dev != nil && (s.dev.Nulls == 0 || s.n == s.dev.Length):
		s.nulls = s.dev.Nulls
	}
	if s.nulls != 0 {
		var err error
		if m, _, err = p.take(s, 0, s.Buffers[0]); err != nil {
			return err
		}
	}
	switch {
	case s.nulls != Unknown:
	case s.dev == nil:
		s.nulls = s.n - int64(bitutil.CountSetBits(m.bytes, int(s.at%8), int(s.n)))
	default:
		valid, _ := p.facts.count(census{of: payload.DeviceRange{Addr: m.addr, Length: m.size}, from: s.at % 8, n: s.n})
		s.nulls = s.n - valid[0] // until they are counted: all
	}
	if s.nulls == 0 {
		p.spans = append(p.spans, payload.Absent)
	} else {
		p.bits(s, m)
	}
	return nil
}

// bits adds the bitmap that is in m.
func (p *planner) bits(s *rows, m buffer) {
	var adj *payload.Adjustment
	if s.at%8 != 0 || s.n%8 != 0 {
		adj = &payload.Adjustment{How: payload.Bits, Base: s.at % 8, Count: s.n}
	}
	p.put((s.n+7)/8, m, adj, nil)
}

// interval is the values of a child from from up to, and without, to.
type interval struct{ from, to int64 }

// offsets adds the n+1 offsets in m, so that the first is 0, and returns what they span.
func (p *planner) offsets(s *rows, m buffer, width int64) (e interval, err error) {
	if s.dev == nil {
		e = interval{OffsetAt(m.bytes, width, 0), OffsetAt(m.bytes, width, s.n)}
	} else {
		first, ok1 := p.facts.count(census{of: payload.DeviceRange{Addr: m.addr, Length: width}, width: width})
		end := m.addr + tier.Addr(m.size-width)
		last, ok2 := p.facts.count(census{of: payload.DeviceRange{Addr: end, Length: width}, width: width})
		if ok1 && ok2 {
			e = interval{first[0], last[0]}
		}
	}
	if e.from < 0 || e.to < e.from || s.dev != nil && e.to > MaxRows {
		return e, p.path.Invalid("offsets from %d to %d", e.from, e.to)
	}
	var adj *payload.Adjustment
	if e.from != 0 {
		adj = &payload.Adjustment{How: payload.Lower, Width: width, Base: e.from}
	}
	p.put(m.size, m, adj, nil)
	return e, nil
}

// OffsetAt returns the i-th integer of width bytes, 4 or 8.
func OffsetAt(b []byte, width, i int64) int64 {
	if width == 4 {
		return int64(int32(binary.LittleEndian.Uint32(b[4*i:])))
	}
	return int64(binary.LittleEndian.Uint64(b[8*i:]))
}

// wholeData adds the data buffers of a table's views.
func (p *planner) wholeData(s *rows) error {
	first, end := len(s.Buffers), len(s.dev.Buffers)
	if s.n == 0 {
		end = first
	}
	p.nodes = append(p.nodes, payload.Node{Length: int64(end - first), Nulls: 0})
	for i := first; i < end; i++ {
		b := s.dev.Buffers[i]
		if b.Length < 0 || b.Addr == 0 && b.Length > 0 {
			return p.path.Invalid("data buffer %d of the views has %d bytes at %#x", i-first, b.Length, uint64(b.Addr))
		}
		m, err := p.narrow(s, i, s.buffer(i), 0, b.Length)
		if err != nil {
			return err
		}
		p.put(m.size, m, nil, nil)
	}
	return nil
}

// dictionary lays out the dictionary of s, unless it is there already.
func (p *planner) dictionary(s *rows) error {
	dt := s.Values
	var in input
	switch {
	case s.dev != nil:
		in.dev = s.dev.Dictionary
	case s.host != nil && s.host.Dictionary() != arrow.ArrayData((*array.Data)(nil)):
		in.host = s.host.Dictionary()
	}
	if in == (input{}) && s.n > s.nulls {
		return p.path.Invalid("no dictionary")
	}
	if in.host == nil {
		return p.array("dictionary", dt, in, 0, all)
	}
	if laid, ok := p.dicts[in.host]; ok && equal.Types(laid.dt, dt) {
		p.nodes = append(p.nodes, laid.nodes...)
		p.spans = append(p.spans, laid.spans...)
		return nil
	}
	l, err := p.outsider(dt, in)
	if err != nil {
		return err
	}
	if l != nil {
		i, ok := p.numbers[l]
		if !ok {
			if p.numbers == nil {
				p.numbers = make(map[*Layout]int)
			}
			i = len(p.uses)
			p.numbers[l], p.uses = i, append(p.uses, l)
		}
		p.nodes = append(p.nodes, payload.Node{Length: int64(i), Nulls: payload.Outside})
		return nil
	}
	nodes, spans := len(p.nodes), len(p.spans)
	if err := p.array("dictionary", dt, in, 0, all); err != nil {
		return err
	}
	if p.dicts == nil {
		p.dicts = make(map[arrow.ArrayData]laidOut)
	}
	p.dicts[in.host] = laidOut{dt, p.nodes[nodes:], p.spans[spans:]}
	return nil
}

// outsider returns the layout of a dictionary that is to be an image of its own, and nil for one
// that is not: because it is small, or because it is not arrow-go's, so that nothing is known of its
// identity.
func (p *planner) outsider(dt arrow.DataType, in input) (*Layout, error) {
	data, ok := in.host.(*array.Data)
	if !ok {
		return nil, nil
	}
	if p.outside == nil {
		p.outside = &outside{of: make(map[*array.Data][]*Layout)}
	}
	for _, l := range p.outside.of[data] {
		if equal.Types(l.ValueType, dt) {
			return l, nil
		}
	}
	sub := planner{path: p.path, inline: p.inline, outside: p.outside, maxVar: p.maxVar}
	if err := sub.array("dictionary", dt, in, 0, all); err != nil {
		return nil, err
	}
	if sub.at <= p.inline {
		return nil, nil // planned again where it is, which is little work
	}
	schema := arrow.NewSchema([]arrow.Field{{Name: "dictionary", Type: dt, Nullable: true}}, nil)
	l := sub.layout(schema, int64(data.Len()))
	l.Source, l.ValueType, l.Number = data, dt, len(p.outside.order)
	p.outside.of[data] = append(p.outside.of[data], l)
	p.outside.order = append(p.outside.order, l)
	return l, nil
}

// Empty describes a record without rows, which has no bytes.
func Empty(schema *arrow.Schema, metadata *arrow.Metadata) (*batch.Descriptor, error) {
	var p planner
	for _, f := range schema.Fields() {
		if err := p.array(f.Name, f.Type, input{}, 0, 0); err != nil {
			return nil, err
		}
	}
	return &batch.Descriptor{Schema: schema, Nodes: p.nodes, Buffers: p.spans, Metadata: metadata}, nil
}
