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

// planner walks arrays, depth first in schema order, and decides where each buffer goes in the
// body. The arrays are those of a record in host memory or those of a table on a device, but not
// both.
//
// Each array adds its node, then its spans, then its children and its dictionary. For a record the
// planner also adds pieces, which are what to write. For a table it adds ranges and adjustments,
// which are what to copy; facts is not nil then. The rows that an array needs are passed down from
// its parent, so slices are compacted at every level without a pass of their own.
//
// A planner is used for one walk. After an error it is useless, and path still names the array that
// failed.
type planner struct {
	path   Path
	nodes  []payload.Node
	spans  []payload.Span
	pieces []piece
	// at is the end of the last buffer. begun is where the small buffers begin that would be in one
	// piece with the next one; see put.
	at     int64
	begun  int64
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

// outside is the dictionaries of a record that are images of their own. One value is shared by the
// planner of the record and those of its dictionaries, which may use dictionaries themselves.
type outside struct {
	order []*Layout                 // each after those that it uses itself
	of    map[*array.Data][]*Layout // of an array: one for each type that it is used as
}

// laidOut is a dictionary in a body: its type, and its nodes and spans, which are repeated for each
// other column that uses the same array. The bytes are in the body once.
type laidOut struct {
	dt    arrow.DataType
	nodes []payload.Node
	spans []payload.Span
}

// MaxInline is the length, in bytes, of the largest dictionary that is put in the body of the
// batches that use it; see Layout. An image of its own would take at least as much: one page.
const MaxInline = tier.Page

// maxBody bounds addresses and lengths, so that sums of two of them do not overflow an int64. No
// device has as much memory.
const maxBody = 1 << 62

// MaxRows limits lengths and offsets of arrays, so that their products with the widths of values
// can be checked within 64 bits. Widths of more than 2^14 bytes are checked separately; see take.
const MaxRows = 1 << 48

// Path names the array that a walker is at, from the column down, for error messages. A walker
// appends when it goes down, and shortens the path when it comes back without an error.
type Path []string

// Invalid returns an *InvalidError for the array at p.
func (p Path) Invalid(format string, args ...any) error {
	return &InvalidError{Path: strings.Join(p, "."), Problem: fmt.Sprintf(format, args...)}
}

// input is an array to lay out: either host or dev is set, or neither, which stands for an array
// that is missing because it has no rows.
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

// rows are the rows of an array that are laid out. The array has the number of buffers and children
// that its type asks for; see planner.rows.
type rows struct {
	input
	shape.Shape
	at int64 // the first row, counted from the beginning of the buffers: the array's own offset is included
	n  int64
	// nulls is of these n rows, once validity has counted them.
	nulls   int64
	spanned interval // of Offsets: from the first to the last, once they are added
}

// buffer is one buffer of an array: bytes of a record, or addr of a table. It is the array's whole
// buffer, or after narrow only what some rows have.
type buffer struct {
	// there is false if the array does not have the buffer. One without bytes may be there.
	there bool
	size  int64 // bytes; Unknown for some of a device's
	bytes []byte
	addr  tier.Addr
}

// all, as a number of rows, stands for the rows that the array itself has. The values of a
// dictionary are not determined by the rows of its user.
const all = -1

// rows checks the parts of an array of type dt and returns n rows of it, beginning with row from of
// the array. The array may have more rows. One that should have no rows may be missing; it then has
// no buffers. rows looks at no buffer.
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
		// A program may build a record from data of another type. The pointers are equal in almost
		// all cases, so the storage types are rarely compared.
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

// buffer returns the i-th buffer of the array, in the order of Shape.Buffers. Behind them are the
// data buffers of views.
func (s *rows) buffer(i int) (m buffer) {
	if s.dev != nil {
		if b := s.dev.Buffers[i]; b.Addr != 0 {
			m = buffer{there: true, size: b.Length, addr: b.Addr}
		}
		return m
	}
	// arrow-go's Buffers has an entry for a validity in every array, also in unions and runs, where
	// the format has none. The C data interface, which tables follow, leaves it out.
	if !s.HasValidity {
		i++
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

// array lays out n rows of an array from row from on, or all of them, and everything below it. name
// is what messages call it.
func (p *planner) array(name string, dt arrow.DataType, in input, from, n int64) error {
	p.path = append(p.path, name)
	s, err := p.rows(dt, in, from, n)
	switch {
	case err != nil:
		return err
	case s.HasValidity:
		// The validity comes first, because the node needs the number of nulls, and because the rules
		// for other buffers depend on whether all rows are null.
		if err := p.validity(&s); err != nil {
			return err
		}
	case s.Null:
		s.nulls = s.n
	}
	p.nodes = append(p.nodes, payload.Node{Length: s.n, Nulls: s.nulls})
	var shown []interval // the values that the rows show of each child, where buffers determine them
	for i, b := range s.Buffers {
		// Views, list views and dense unions of a record are compacted, for which their values are
		// read. The values of a table are on the device: there these buffers and what they refer to
		// are kept whole.
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
	// Then the children: which of their values the rows show depends on the type.
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
			// A table's child is kept whole, because its parent's offsets are.
			if first, rows = 0, all; s.dev == nil {
				first, rows = shown[i].from, shown[i].to-shown[i].from
			}
		}
		if err := p.array(name, dt, s.child(i), first, rows); err != nil {
			return err
		}
	}
	// The dictionary comes last, as in a Cursor.
	if s.Values != nil {
		if err := p.dictionary(&s); err != nil {
			return err
		}
	}
	p.path = p.path[:len(p.path)-1]
	return nil
}

// take returns the bytes that the rows have in buffer i. If none is true, there are no bytes to
// add: take has added the span itself. Whether a missing buffer is an error depends on where it
// comes from. A record may lack a buffer if it has no rows or all are null, as arrow-go makes such
// arrays. Of a table, the claim that all rows are null may be wrong, and a reader of the batch
// would rely on it.
func (p *planner) take(s *rows, i int, b shape.Buffer) (m buffer, none bool, err error) {
	m = s.buffer(i)
	switch {
	case b.Width < 0 || b.Width > 0 && s.at+s.n >= maxBody/b.Width:
		return m, false, p.path.Invalid("%d values of %d bytes", s.n, b.Width)
	case b.Role == shape.Data && m.size != Unknown && s.spanned.to > m.size:
		// The offsets were added before their data, so spanned is known.
		return m, false, p.path.Invalid("offsets reach to byte %d of %d", s.spanned.to, m.size)
	case !m.there && (s.n == 0 || s.dev == nil && s.nulls == s.n || b.Role == shape.Data):
		p.spans = append(p.spans, payload.Absent)
		return m, true, nil
	case s.n == 0 && b.Role == shape.Offsets && s.dev == nil && m.size >= b.Width:
		// The columnar format has one offset more than rows, so an empty array has one too.
		// Consumers in C read it without looking at the length.
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

// narrow returns n bytes of buffer i from byte at on, which the buffer must have. The length of a
// device's buffer may be Unknown: then the creator is trusted, as the C data interface requires.
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

// put gives a buffer of n bytes its place in the body and adds its span. The bytes are those of m,
// adjusted if adj is not nil; m may have more than n. If from is not nil, it makes the bytes and m
// is ignored. n of 0 adds an empty span, which takes no room.
func (p *planner) put(n int64, m buffer, adj *payload.Adjustment, from source) {
	if n == 0 {
		p.spans = append(p.spans, payload.Span{})
		return
	}
	// A large buffer begins at a page, where the body may be cut. A small one follows the one
	// before, unless the small ones since the last such page would become longer than
	// smallTogether.
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
		// Spans without bytes were added since the last range. Ranges go by the number of the span.
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
		case adj.How == payload.Bits && adj.Base == 0:
			// A bitmap that begins at a byte only differs in the bits behind its end. All but the last
			// byte is copied as it is; the last byte is made now. So a bitmap that is not shifted costs
			// no more than other buffers.
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

// validity adds the span of the validity of s, Absent if there is no null, and sets s.nulls. The
// array's own number of nulls is not trusted for a record, because it may be unknown or be that of
// an unsliced array. Counting reads an eighth of a byte for each row, which is little against
// copying.
func (p *planner) validity(s *rows) error {
	m := s.buffer(0)
	switch s.nulls = Unknown; {
	case s.dev != nil && !m.there && s.dev.Nulls > 0:
		return p.path.Invalid("%d nulls and no validity", s.dev.Nulls)
	case s.n == 0 || !m.there || s.dev == nil && m.size == 0: // arrow-go takes a bitmap without bytes for none
		s.nulls = 0
	case s.dev != nil && (s.dev.Nulls == 0 || s.n == s.dev.Length):
		// The creator's number holds for the whole array. For some of its rows it only helps if it is
		// 0.
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
		// On the first walk the bits are not counted yet, and all rows count as null: the walk then
		// plans a bitmap. The next walk replaces that plan.
		valid, _ := p.facts.count(census{of: payload.DeviceRange{Addr: m.addr, Length: m.size}, from: s.at % 8, n: s.n})
		s.nulls = s.n - valid[0]
	}
	if s.nulls == 0 {
		p.spans = append(p.spans, payload.Absent)
	} else {
		p.bits(s, m)
	}
	return nil
}

// bits adds the bitmap in m: the bits of the rows, moved so that the first is bit 0 of the first
// byte. A bitmap that begins and ends with whole bytes needs no change.
func (p *planner) bits(s *rows, m buffer) {
	var adj *payload.Adjustment
	if s.at%8 != 0 || s.n%8 != 0 {
		adj = &payload.Adjustment{How: payload.Bits, Base: s.at % 8, Count: s.n}
	}
	p.put((s.n+7)/8, m, adj, nil)
}

// interval is the values of a child, or the bytes of a buffer, from from up to and without to.
type interval struct{ from, to int64 }

// offsets adds n+1 offsets, lowered so that the first is 0, and returns the values from the first
// to the last as a half-open interval. Offsets in between are not looked at: wrong ones come out as
// wrong as they went in, and opening must not rely on them. On a device the interval is empty until
// the two values have been read.
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

// OffsetAt returns the i-th integer of width bytes, 4 or 8, which is signed and little-endian like
// all offsets of the Arrow format.
func OffsetAt(b []byte, width, i int64) int64 {
	if width == 4 {
		return int64(int32(binary.LittleEndian.Uint32(b[4*i:])))
	}
	return int64(binary.LittleEndian.Uint64(b[8*i:]))
}

// wholeData adds the data buffers of a table's views as they are, after a node with their number. A
// table without rows keeps none.
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

// dictionary lays out the dictionary of s. For a record there are three cases: an array that is in
// the body already gets the same nodes and spans again; a large one becomes an image of its own,
// and here only a node refers to it; any other goes into the body. The dictionary of a table always
// goes into the body, because nothing identifies it across tables.
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
	// On a device, or missing because no row has a value.
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

// outsider returns the layout of a dictionary that is to be an image of its own. It returns nil if
// the dictionary goes into the body: it is small, or it is not an *array.Data of arrow-go, whose
// pointer identifies it. A layout that another column has planned is returned again.
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
	// The only way to know the length is to plan it. It shares outside, so that inner dictionaries
	// are found by others, and come before it in order.
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

// Empty describes a record without rows. Its body has no bytes, so the record can be opened without
// memory.
func Empty(schema *arrow.Schema, metadata *arrow.Metadata) (*batch.Descriptor, error) {
	var p planner
	for _, f := range schema.Fields() {
		if err := p.array(f.Name, f.Type, input{}, 0, 0); err != nil {
			return nil, err
		}
	}
	return &batch.Descriptor{Schema: schema, Nodes: p.nodes, Buffers: p.spans, Metadata: metadata}, nil
}
