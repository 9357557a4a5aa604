package image

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/bitutil"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/lookup"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
	"github.com/spillway-db/spillway/tier"
)

// planner walks a record's arrays and decides where their buffers go in the body.
type planner struct {
	path   Path
	nodes  []payload.Node
	spans  []payload.Span
	pieces []piece
	at     int64 // end of the last buffer
	begun  int64 // where the small buffers behind the last place to cut begin
	bytes  int64
	dicts  map[arrow.ArrayData]laidDict // those that were laid out
	maxVar int64                        // longest data buffer of views; 0 for the format's limit

	inline  int64                 // up to how many bytes a dictionary lies in the body
	outside *outside              // nil until a dictionary is an image of its own
	uses    []*Layout             // those that nodes here refer to
	numbers lookup.Table[*Layout] // of uses
	spanned [1]extent             // what buffers returns for offsets
}

// outside is the dictionaries of a record that are images of their own.
type outside struct {
	order []*Layout           // inner ones first
	of    map[typed][]*Layout // more than one if types differ that have one fingerprint
}

// typed is an array under a type, by its fingerprint and, for an extension, its name. Types that
// are the same have the same; of those that differ few do.
type typed struct {
	data              *array.Data
	fingerprint, name string
}

func typedAs(data *array.Data, dt arrow.DataType) typed {
	name := ""
	if e, ok := dt.(arrow.ExtensionType); ok {
		name = e.ExtensionName()
	}
	return typed{data, dt.Fingerprint(), name}
}

// inlineMost is up to how many bytes a dictionary lies in the body of those that
// use it; see Layout.
const inlineMost = tier.Page

// laidDict is where a dictionary's nodes and spans are.
type laidDict struct {
	dt           arrow.DataType
	nodes, spans [2]int
}

// Path names the array that a walker is at, for error messages.
type Path []string

func (p *Path) Push(name string) { *p = append(*p, name) }
func (p *Path) Pop()             { *p = (*p)[:len(*p)-1] }

func (p Path) Invalid(format string, args ...any) error {
	return &InvalidError{Path: strings.Join(p, "."), Problem: fmt.Sprintf(format, args...)}
}

func (p *planner) record(rec arrow.RecordBatch, schema *arrow.Schema) error {
	rows, cols := rec.NumRows(), int(rec.NumCols())
	if rows < 0 {
		return p.path.Invalid("%d rows", rows)
	}
	empty := rows == 0 && cols == 0 // arrow-go lets such a record have any schema
	if cols != schema.NumFields() && !empty {
		return p.path.Invalid("%d columns for %d fields", cols, schema.NumFields())
	}
	p.nodes = make([]payload.Node, 0, 2*schema.NumFields())
	p.spans = make([]payload.Span, 0, 3*schema.NumFields())
	p.pieces = make([]piece, 0, 3*schema.NumFields())
	for i := range schema.NumFields() {
		f := schema.Field(i)
		p.path.Push(f.Name)
		if empty {
			p.empty(f.Type)
		} else if err := p.array(f.Type, rec.Column(i).Data(), 0, rows); err != nil {
			return err
		}
		p.path.Pop()
	}
	return nil
}

// child lays out a child under its name.
func (p *planner) child(name string, dt arrow.DataType, d arrow.ArrayData, from, n int64) error {
	p.path.Push(name)
	err := p.array(dt, d, from, n)
	p.path.Pop()
	return err
}

// array lays out the n rows of d from the row from on.
func (p *planner) array(dt arrow.DataType, d arrow.ArrayData, from, n int64) error {
	if d == nil || d == arrow.ArrayData((*array.Data)(nil)) {
		return p.path.Invalid("no data")
	}
	sh, ok := shape.Of(dt)
	off, length := int64(d.Offset()), int64(d.Len())
	switch {
	case !ok:
		return p.path.Invalid("no layout for the type %s", dt)
	case off < 0 || length < 0 || off > math.MaxInt64-length:
		return p.path.Invalid("offset %d, length %d", off, length)
	case from < 0 || n < 0 || n > length || from > length-n:
		return p.path.Invalid("%d rows from %d on of an array of %d", n, from, length)
	case shape.Storage(d.DataType()).ID() != sh.Type.ID():
		return p.path.Invalid("the data is of type %s, the field of type %s", d.DataType(), sh.Type)
	case sh.NumChildren() > 0 && len(d.Children()) != sh.NumChildren():
		return p.path.Invalid("%d children, want %d", len(d.Children()), sh.NumChildren())
	}
	s := slice{d: d, at: off + from, n: n}
	switch {
	case sh.Null:
		p.node(n, n)
		return nil
	case sh.HasValidity():
		var err error
		if s.nulls, err = p.validity(s); err != nil {
			return err
		}
	default:
		p.node(n, 0)
	}
	if sh.Rows == shape.Runs {
		return p.runs(sh.Type.(*arrow.RunEndEncodedType), s)
	}
	shown, err := p.buffers(&sh, s)
	if err != nil {
		return err
	}
	for i, c := range d.Children()[:sh.NumChildren()] {
		name, dt := sh.Child(i)
		var e extent
		switch sh.Rows {
		case shape.Same:
			e = extent{s.at, s.at + n}
		case shape.Times:
			if sh.Size < 0 || sh.Size > 0 && s.at > math.MaxInt64/sh.Size-n {
				return p.path.Invalid("%d lists of %d", n, sh.Size)
			}
			e = extent{s.at * sh.Size, (s.at + n) * sh.Size}
		case shape.Between:
			e = shown[0]
		case shape.Shown:
			e = shown[i]
		}
		if err := p.child(name, dt, c, e.from, e.to-e.from); err != nil {
			return err
		}
	}
	if sh.Values != nil {
		return p.dictionary(sh.Values, s)
	}
	return nil
}

// buffers lays out the buffers of s except for its validity. It returns which values of each child
// they show, if they say that.
func (p *planner) buffers(sh *shape.Shape, s slice) (shown []extent, err error) {
	first := 0 // where arrow-go has them: it leaves room for a validity
	if !sh.HasValidity() {
		first = 1
	}
	for i, b := range sh.Buffers {
		switch b.Role {
		case shape.Bits:
			err = p.booleans(s)
		case shape.Values, shape.Codes:
			err = p.fixed(s, first+i, b.Width)
		case shape.Offsets:
			p.spanned[0], err = p.offsets(s, b.Width)
			shown = p.spanned[:]
		case shape.Data:
			err = p.data(s, shown[0])
		case shape.Views:
			err = p.views(s)
		case shape.Starts: // with the sizes
			shown, err = p.listView(s, b.Width)
		case shape.Places:
			shown, err = p.denseOffsets(sh.Type.(arrow.UnionType), s)
		}
		if err != nil {
			return nil, err
		}
	}
	return shown, nil
}

// slice is a run of rows of an array.
type slice struct {
	d     arrow.ArrayData
	at    int64 // first row, counted from the beginning of the buffers
	n     int64
	nulls int64
}

// buffer returns the bytes of buffer i and whether the array has it.
func (s slice) buffer(i int) ([]byte, bool) {
	if bufs := s.d.Buffers(); i < len(bufs) && bufs[i] != nil {
		return bufs[i].Bytes(), true
	}
	return nil, false
}

// need returns buffer i, which must have the bytes up to row at+n+extra, each
// width bytes. Without rows, or with nothing but nulls, it may be absent, and
// without rows it may be short; then all is false.
func (p *planner) need(s slice, i int, width, extra int64) (b []byte, has, all bool, err error) {
	b, has = s.buffer(i)
	switch {
	case !has && (s.n == 0 || s.nulls == s.n):
		return nil, false, false, nil
	case !has:
		return nil, false, false, p.path.Invalid("buffer %d of %s is missing", i, s.d.DataType())
	case s.n == 0 && width == 0:
		return b, true, true, nil
	}
	rows := int64(math.MaxInt64)
	if width > 0 {
		rows = int64(len(b)) / width
	}
	if s.at > math.MaxInt64-s.n-extra || s.at+s.n+extra > rows {
		if s.n == 0 {
			return b, true, false, nil
		}
		return nil, false, false, p.path.Invalid("buffer %d of %s has %d bytes: too short for %d rows from %d on",
			i, s.d.DataType(), len(b), s.n, s.at)
	}
	return b, true, true, nil
}

func (p *planner) node(n, nulls int64) {
	p.nodes = append(p.nodes, payload.Node{Length: n, Nulls: nulls})
}

func (p *planner) absent() { p.spans = append(p.spans, payload.Absent) }

// raw gives bytes of the source a place.
func (p *planner) raw(b []byte) {
	if n := int64(len(b)); p.place(n) {
		p.pieces = append(p.pieces, piece{off: p.at - n, n: n, raw: b})
	}
}

// made gives n bytes a place that from makes.
func (p *planner) made(n int64, from source) {
	if p.place(n) {
		p.pieces = append(p.pieces, piece{off: p.at - n, n: n, from: from})
	}
}

// place adds a span of n bytes; false if there is nothing to write.
func (p *planner) place(n int64) bool {
	if n == 0 {
		p.spans = append(p.spans, payload.Span{})
		return false
	}
	off := RoundUp(p.at, AlignSmall)
	if n >= large {
		off = RoundUp(p.at, alignLarge)
		p.begun = off + n
	} else if off+n-p.begun > smallTogether {
		off = RoundUp(p.at, alignLarge)
		p.begun = off
	}
	p.spans = append(p.spans, payload.Span{Offset: off, Length: n})
	p.at = off + n
	p.bytes += n
	return true
}

// validity adds the node and the validity of s, and returns its nulls.
func (p *planner) validity(s slice) (nulls int64, err error) {
	b, _ := s.buffer(0)
	if len(b) > 0 && s.n > 0 { // arrow-go takes a bitmap without bytes for none
		if s.at > math.MaxInt64-s.n || (s.at+s.n-1)/8 >= int64(len(b)) {
			return 0, p.path.Invalid("a validity of %d bytes is too short for %d rows from %d on", len(b), s.n, s.at)
		}
		nulls = s.n - int64(bitutil.CountSetBits(b, int(s.at), int(s.n)))
	}
	p.node(s.n, nulls)
	if nulls == 0 {
		p.absent()
	} else {
		p.bitmap(b, s.at, s.n)
	}
	return nulls, nil
}

// bitmap gives the n bits from at on a place.
func (p *planner) bitmap(b []byte, at, n int64) {
	if at%8 != 0 {
		p.made((n+7)/8, newBits(b, at, n))
		return
	}
	b = b[at/8:][:(n+7)/8]
	if !p.place(int64(len(b))) {
		return
	}
	whole := n / 8
	if whole > 0 {
		p.pieces = append(p.pieces, piece{off: p.at - int64(len(b)), n: whole, raw: b[:whole]})
	}
	if tail := n % 8; tail > 0 { // the bits behind the end have no meaning
		p.pieces = append(p.pieces, piece{off: p.at - 1, n: 1, raw: []byte{b[whole] & (1<<tail - 1)}})
	}
}

func (p *planner) booleans(s slice) error {
	b, has := s.buffer(1)
	switch {
	case !has && (s.n == 0 || s.nulls == s.n):
		p.absent()
		return nil
	case s.n == 0:
		p.raw(nil)
		return nil
	case s.at > math.MaxInt64-s.n || (s.at+s.n-1)/8 >= int64(len(b)):
		return p.path.Invalid("%d bytes are too short for %d bits from %d on", len(b), s.n, s.at)
	}
	p.bitmap(b, s.at, s.n)
	return nil
}

// fixed adds buffer i, whose values have width bytes.
func (p *planner) fixed(s slice, i int, width int64) error {
	if width < 0 {
		return p.path.Invalid("values of %d bytes", width)
	}
	b, has, all, err := p.need(s, i, width, 0)
	switch {
	case err != nil:
		return err
	case !has:
		p.absent()
	case !all || width == 0:
		p.raw(nil)
	default:
		p.raw(b[s.at*width:][:s.n*width])
	}
	return nil
}

// offsets adds buffer 1, n+1 offsets, so that the first is 0, and returns which
// bytes or values they span.
func (p *planner) offsets(s slice, width int64) (e extent, err error) {
	b, has, all, err := p.need(s, 1, width, 1)
	switch {
	case err != nil:
		return e, err
	case !has:
		p.absent()
		return e, nil
	case !all:
		p.raw(nil)
		return e, nil
	}
	b = b[s.at*width:][:(s.n+1)*width]
	first, last := OffsetAt(b, width, 0), OffsetAt(b, width, s.n)
	if first < 0 || last < first {
		return e, p.path.Invalid("offsets from %d to %d", first, last)
	}
	switch {
	case s.n == 0:
		p.raw(zeros[:width])
		return e, nil
	case first == 0:
		p.raw(b)
	case width == 4:
		p.made(int64(len(b)), &lower32{b, uint32(first)})
	default:
		p.made(int64(len(b)), &lower64{b, uint64(first)})
	}
	return extent{first, last}, nil
}

var zeros [8]byte

func OffsetAt(b []byte, width, i int64) int64 {
	if width == 4 {
		return int64(int32(binary.LittleEndian.Uint32(b[4*i:])))
	}
	return int64(binary.LittleEndian.Uint64(b[8*i:]))
}

// data adds buffer 2, the bytes that the offsets span.
func (p *planner) data(s slice, e extent) error {
	b, has := s.buffer(2)
	switch {
	case e.to > int64(len(b)):
		return p.path.Invalid("offsets reach to byte %d of %d", e.to, len(b))
	case !has:
		p.absent()
	default:
		p.raw(b[e.from:e.to])
	}
	return nil
}

// dictionary lays out the dictionary of s, unless it is there already.
func (p *planner) dictionary(dt arrow.DataType, s slice) error {
	d := s.d.Dictionary()
	if d == nil || d == arrow.ArrayData((*array.Data)(nil)) {
		if s.n > s.nulls {
			return p.path.Invalid("no dictionary")
		}
		p.empty(dt)
		return nil
	}
	if laid, ok := p.dicts[d]; ok && equal.Types(laid.dt, dt) {
		p.nodes = append(p.nodes, p.nodes[laid.nodes[0]:laid.nodes[1]]...)
		p.spans = append(p.spans, p.spans[laid.spans[0]:laid.spans[1]]...)
		return nil
	}
	l, err := p.outsider(dt, d)
	if err != nil {
		return err
	}
	if l != nil {
		p.use(l)
		return nil
	}
	nodes, spans := len(p.nodes), len(p.spans)
	if err := p.child("dictionary", dt, d, 0, int64(d.Len())); err != nil {
		return err
	}
	if p.dicts == nil {
		p.dicts = make(map[arrow.ArrayData]laidDict)
	}
	p.dicts[d] = laidDict{dt, [2]int{nodes, len(p.nodes)}, [2]int{spans, len(p.spans)}}
	return nil
}

// use adds the node that refers to l.
func (p *planner) use(l *Layout) {
	i := p.numbers.Of(p.uses, l)
	if i < 0 {
		i = len(p.uses)
		p.uses = append(p.uses, l)
	}
	p.node(int64(i), payload.Outside)
}

// outsider returns the layout of a dictionary that is to be an image of its own,
// and nil for one that is not: because it is small, or because it is not arrow-go's
// and nothing is known of its identity.
func (p *planner) outsider(dt arrow.DataType, d arrow.ArrayData) (*Layout, error) {
	data, ok := d.(*array.Data)
	if !ok {
		return nil, nil
	}
	if p.outside == nil {
		p.outside = &outside{of: make(map[typed][]*Layout)}
	}
	key := typedAs(data, dt)
	for _, l := range p.outside.of[key] {
		if equal.Types(l.valueType, dt) {
			return l, nil
		}
	}
	sub := planner{path: p.path, inline: p.inline, outside: p.outside, maxVar: p.maxVar}
	if err := sub.child("dictionary", dt, d, 0, int64(d.Len())); err != nil {
		return nil, err
	}
	if sub.at <= p.inline {
		return nil, nil // planned again where it lies, which is little work
	}
	schema := arrow.NewSchema([]arrow.Field{{Name: "dictionary", Type: dt, Nullable: true}}, nil)
	l := sub.layout(schema, int64(d.Len()))
	l.source, l.valueType, l.number = data, dt, len(p.outside.order)
	p.outside.of[key] = append(p.outside.of[key], l)
	p.outside.order = append(p.outside.order, l)
	return l, nil
}

// Empty describes a record without rows, which has no bytes.
func Empty(schema *arrow.Schema, metadata *arrow.Metadata) *batch.Descriptor {
	var p planner
	for _, f := range schema.Fields() {
		p.empty(f.Type)
	}
	return &batch.Descriptor{Schema: schema, Nodes: p.nodes, Buffers: p.spans, Metadata: metadata}
}

// empty lays out an array without rows and buffers, where the source has none. A type without a
// shape gets an array that cannot be opened.
func (p *planner) empty(dt arrow.DataType) {
	sh, _ := shape.Of(dt)
	p.node(0, 0)
	for range sh.Buffers {
		p.absent()
	}
	if sh.Views {
		p.node(0, 0)
	}
	for i := range sh.NumChildren() {
		_, child := sh.Child(i)
		p.empty(child)
	}
	if sh.Values != nil {
		p.empty(sh.Values)
	}
}
