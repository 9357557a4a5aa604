package image

import (
	"maps"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/bitutil"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/shape"
	"github.com/spillway-db/spillway/tier"
)

// TablePlan walks the arrays of a foreign table, as planner does those of a record. What
// it has to know of the device's memory may be missing at first: then it goes on as if there
// were no rows, and walks again when everything that was missing has been read at once. Each
// walk gets at least one level deeper.
type TablePlan struct {
	planner
	Ranges  []payload.DeviceRange // by span; filled up behind the last that has bytes
	Adjust  []payload.Adjustment
	known   map[payload.DeviceRange][]byte // a value each
	counted map[census]*tally
	missing tableFacts // to be read
}

// tableFacts is what must be known of a table beside its owner's data.
type tableFacts struct {
	values map[payload.DeviceRange][]byte
	counts map[census]*tally
}

// Unknown is a number that the creator of an array does not give.
const Unknown = -1

// DeviceArray is an Arrow array whose buffers lie in a device's memory, as the Arrow C data
// interface has it: the buffers in the order of the columnar format, beginning with the
// validity unless the type has none (null, run-end encoded, unions); children in the order
// of the type's fields.
type DeviceArray struct {
	Length int64 // rows
	Offset int64 // rows that the buffers and the children have before the first
	Nulls  int64 // of the rows; Unknown has them counted

	// Buffers have an Addr of 0 where they are absent: a validity without nulls, and what has no
	// bytes, as without rows. Length is in bytes, and may be Unknown, except for the data buffers
	// of views.
	Buffers    []payload.DeviceRange
	Children   []*DeviceArray
	Dictionary *DeviceArray
}

// DeviceTable is a table in a device's memory that code outside the engine has made.
type DeviceTable struct {
	Space    *tier.Space // of the device
	Schema   *arrow.Schema
	Rows     int64
	Columns  []*DeviceArray
	Metadata *arrow.Metadata // the record's own; nil if it has none
	// Charged is memory of the space that stays charged until Release is called. It may have other
	// contents, too.
	Charged []payload.DeviceRange
	// Release is called once, when the memory is not needed any more; never, if the table is
	// not adopted. It may be nil.
	Release func()
}

// PlanTable plans the image of t. fetch reads what must be known of it. That takes no memory to
// speak of, however long arrays say they are: bitmaps and run ends are counted as they come by.
func PlanTable(t DeviceTable, fetch func([]Peek) error) (*TablePlan, error) {
	known, counted := make(map[payload.DeviceRange][]byte), make(map[census]*tally)
	for {
		p := &TablePlan{known: known, counted: counted}
		p.missing = tableFacts{make(map[payload.DeviceRange][]byte), make(map[census]*tally)}
		if err := p.table(t); err != nil {
			return nil, err
		}
		var reads []Peek
		for r, dst := range p.missing.values {
			reads = append(reads, PeekInto(r.Addr, dst))
		}
		for c, sum := range p.missing.counts {
			reads = append(reads, Peek{c.of.Addr, c.of.Length, func(p []byte, off int64) { c.add(sum, p, off) }})
		}
		if len(reads) == 0 {
			for len(p.Ranges) < len(p.spans) {
				p.Ranges = append(p.Ranges, payload.DeviceRange{})
			}
			return p, nil
		}
		if err := fetch(reads); err != nil {
			return nil, err
		}
		maps.Copy(known, p.missing.values)
		maps.Copy(counted, p.missing.counts)
	}
}

// Peek is bytes of a device that the host has to know something of.
type Peek struct {
	Addr tier.Addr
	N    int64
	Take func(p []byte, off int64) // gets them in ascending pieces of 8n bytes, except for the last, and does not keep those
}

// PeekInto keeps the bytes.
func PeekInto(addr tier.Addr, dst []byte) Peek {
	return Peek{addr, int64(len(dst)), func(p []byte, off int64) { copy(dst[off:], p) }}
}

// Descriptor says what the image of t is, whose checksums are not known.
func (p *TablePlan) Descriptor(t DeviceTable) *batch.Descriptor {
	return &batch.Descriptor{
		Schema: t.Schema, Rows: t.Rows, Nodes: p.nodes, Buffers: p.spans,
		Body: RoundUp(p.at, tier.Page), Metadata: t.Metadata,
	}
}

func (p *TablePlan) table(t DeviceTable) error {
	switch {
	case t.Rows < 0 || t.Rows > MaxRows:
		return p.path.Invalid("%d rows", t.Rows)
	case len(t.Columns) != t.Schema.NumFields():
		return p.path.Invalid("%d columns for %d fields", len(t.Columns), t.Schema.NumFields())
	}
	for i, c := range t.Columns {
		f := t.Schema.Field(i)
		if err := p.child(f.Name, f.Type, c, 0, t.Rows); err != nil {
			return err
		}
	}
	return nil
}

func (p *TablePlan) child(name string, dt arrow.DataType, a *DeviceArray, from, n int64) error {
	p.path.Push(name)
	err := p.array(dt, a, from, n)
	p.path.Pop()
	return err
}

// deviceRows are some of an array's deviceRows.
type deviceRows struct {
	*DeviceArray
	at    int64 // the first, counted from the beginning of the buffers
	n     int64
	nulls int64
}

// array plans the n rows of a from the row from on.
func (p *TablePlan) array(dt arrow.DataType, a *DeviceArray, from, n int64) error {
	sh, ok := shape.Of(dt)
	switch {
	case !ok:
		return p.path.Invalid("no layout for the type %s", dt)
	case a == nil:
		return p.path.Invalid("no data")
	case a.Offset < 0 || a.Length < 0 || a.Offset > MaxRows || a.Length > MaxRows || a.Nulls < Unknown || a.Nulls > a.Length:
		return p.path.Invalid("offset %d, length %d, %d nulls", a.Offset, a.Length, a.Nulls)
	case from < 0 || n < 0 || n > a.Length || from > a.Length-n:
		return p.path.Invalid("%d rows from %d on of an array of %d", n, from, a.Length)
	case len(a.Buffers) < len(sh.Buffers) || len(a.Buffers) > len(sh.Buffers) && !sh.Views:
		return p.path.Invalid("%d buffers of %s, want %d", len(a.Buffers), sh.Type, len(sh.Buffers))
	case len(a.Children) != sh.NumChildren():
		return p.path.Invalid("%d children of %s, want %d", len(a.Children), sh.Type, sh.NumChildren())
	}
	s := deviceRows{DeviceArray: a, at: a.Offset + from, n: n}
	switch {
	case sh.Null:
		p.node(n, n)
	case sh.HasValidity():
		if err := p.validity(&s, from); err != nil {
			return err
		}
	default:
		p.node(n, 0)
	}
	if sh.Rows == shape.Runs {
		return p.runs(sh.Type.(*arrow.RunEndEncodedType), s)
	}
	spanned, err := p.buffers(&sh, s)
	if err != nil {
		return err
	}
	for i, c := range a.Children {
		name, dt := sh.Child(i)
		switch sh.Rows {
		case shape.Same:
			err = p.child(name, dt, c, s.at, n)
		case shape.Times:
			if sh.Size < 0 || sh.Size > 0 && s.at+n > MaxRows/sh.Size {
				return p.path.Invalid("%d lists of %d", n, sh.Size)
			}
			err = p.child(name, dt, c, s.at*sh.Size, n*sh.Size)
		case shape.Between:
			err = p.child(name, dt, c, spanned.from, spanned.to-spanned.from)
		case shape.Shown:
			err = p.whole(name, dt, c)
		}
		if err != nil {
			return err
		}
	}
	if sh.Values != nil {
		return p.dictionary(sh.Values, s)
	}
	return nil
}

// buffers plans the buffers of s except for its validity, and returns what its offsets span.
func (p *TablePlan) buffers(sh *shape.Shape, s deviceRows) (spanned extent, err error) {
	for i, b := range sh.Buffers {
		switch b.Role {
		case shape.Validity:
		case shape.Bits:
			err = p.booleans(s)
		case shape.Offsets:
			spanned, err = p.offsets(s, b.Width)
		case shape.Data:
			err = p.data(s, spanned)
		default:
			err = p.fixed(s, i, b.Width)
		}
		if err != nil {
			return spanned, err
		}
	}
	if sh.Views {
		err = p.viewed(s)
	}
	return spanned, err
}

// whole plans a child with everything that it has.
func (p *TablePlan) whole(name string, dt arrow.DataType, a *DeviceArray) error {
	n := int64(0)
	if a != nil {
		n = a.Length
	}
	return p.child(name, dt, a, 0, n)
}

// bodyMost is more than any device has, and little enough that sums of bytes stay in range.
const bodyMost = 1 << 62

// lies gives a place to the n bytes of a buffer from at on, of which the device has more if
// more is not 0.
func (p *TablePlan) lies(b payload.DeviceRange, at, n, more int64) error {
	if b.Length < Unknown || b.Length != Unknown && (at+n+more > b.Length || at+n+more < 0) {
		return p.path.Invalid("a buffer of %d bytes: too short for %d from %d on", b.Length, n+more, at)
	}
	if uint64(b.Addr) > 1<<63 { // sums of addresses stay in range
		return p.path.Invalid("a buffer at %#x", uint64(b.Addr))
	}
	if n > bodyMost-p.at {
		return p.path.Invalid("%d bytes behind %d others: more than there can be", n, p.at)
	}
	if p.place(n) {
		for len(p.Ranges) < len(p.spans)-1 {
			p.Ranges = append(p.Ranges, payload.DeviceRange{})
		}
		p.Ranges = append(p.Ranges, payload.DeviceRange{Addr: b.Addr + tier.Addr(at), Length: n + more})
	}
	return nil
}

// adjusted says how the buffer that was placed last is put right.
func (p *TablePlan) adjusted(a payload.Adjustment) {
	a.Buffer = len(p.spans) - 1
	p.Adjust = append(p.Adjust, a)
}

// read returns a value of the device's, or false if it has to be fetched first.
func (p *TablePlan) read(b payload.DeviceRange, at, width int64) ([]byte, bool, error) {
	key, err := p.within(b, at, width)
	if err != nil {
		return nil, false, err
	}
	if got, ok := p.known[key]; ok {
		return got, true, nil
	}
	p.missing.values[key] = make([]byte, width)
	return nil, false, nil
}

// within returns where n bytes of a buffer are, from at on.
func (p *TablePlan) within(b payload.DeviceRange, at, n int64) (payload.DeviceRange, error) {
	if b.Length != Unknown && at+n > b.Length {
		return b, p.path.Invalid("a buffer of %d bytes: too short for %d from %d on", b.Length, n, at)
	}
	return payload.DeviceRange{Addr: b.Addr + tier.Addr(at), Length: n}, nil
}

// validity plans the bitmap of s and counts its nulls, where the count for these rows is not given.
func (p *TablePlan) validity(s *deviceRows, from int64) error {
	b := s.Buffers[0]
	told := s.Nulls
	if told > 0 && (from != 0 || s.n != s.Length) {
		told = Unknown
	}
	switch {
	case b.Addr == 0 && s.Nulls > 0:
		return p.path.Invalid("%d nulls and no validity", s.Nulls)
	case b.Addr == 0 || s.n == 0:
		told = 0
	}
	if told == Unknown {
		at, err := p.within(b, s.at/8, (s.at%8+s.n+7)/8)
		if err != nil {
			return err
		}
		valid, _ := p.count(census{of: at, from: s.at % 8, n: s.n})
		told = s.n - valid[0] // until it is counted: all
	}
	s.nulls = told
	p.node(s.n, told)
	if told == 0 {
		p.absent()
		return nil
	}
	return p.bitmap(b, s.at, s.n)
}

// bitmap plans the n bits from at on.
func (p *TablePlan) bitmap(b payload.DeviceRange, at, n int64) error {
	shift, size := at%8, (n+7)/8
	if err := p.lies(b, at/8, size, (shift+n+7)/8-size); err != nil {
		return err
	}
	if n > 0 && (shift != 0 || n%8 != 0) {
		p.adjusted(payload.Adjustment{How: payload.Bits, Base: shift, Count: n})
	}
	return nil
}

// lacks handles a buffer that is absent, which is allowed without rows only. The claim that all
// rows are null may be wrong, and a reader of the batch would rely on it.
func (p *TablePlan) lacks(s deviceRows, i int) (bool, error) {
	switch {
	case s.n > 0 && s.Buffers[i].Addr == 0:
		return true, p.path.Invalid("buffer %d is missing, of %d rows", i, s.n)
	case s.n > 0:
		return false, nil
	case s.Buffers[i].Addr != 0:
		p.raw(nil)
	default:
		p.absent()
	}
	return true, nil
}

func (p *TablePlan) booleans(s deviceRows) error {
	if lacks, err := p.lacks(s, 1); lacks {
		return err
	}
	return p.bitmap(s.Buffers[1], s.at, s.n)
}

func (p *TablePlan) fixed(s deviceRows, i int, width int64) error {
	if width < 0 || width > 0 && s.at+s.n > (1<<62)/width {
		return p.path.Invalid("%d values of %d bytes", s.n, width)
	}
	if width == 0 {
		p.raw(nil)
		return nil
	}
	if lacks, err := p.lacks(s, i); lacks {
		return err
	}
	return p.lies(s.Buffers[i], s.at*width, s.n*width, 0)
}

// offsets plans buffer 1 and returns which bytes or values its offsets span.
func (p *TablePlan) offsets(s deviceRows, width int64) (e extent, err error) {
	if lacks, err := p.lacks(s, 1); lacks {
		return e, err
	}
	b := s.Buffers[1]
	one, ok1, err := p.read(b, s.at*width, width)
	if err != nil {
		return e, err
	}
	end, ok2, err := p.read(b, (s.at+s.n)*width, width)
	if err != nil {
		return e, err
	}
	if ok1 && ok2 {
		e = extent{OffsetAt(one, width, 0), OffsetAt(end, width, 0)}
	}
	if e.from < 0 || e.to < e.from || e.to > MaxRows {
		return e, p.path.Invalid("offsets from %d to %d", e.from, e.to)
	}
	if err := p.lies(b, s.at*width, (s.n+1)*width, 0); err != nil {
		return e, err
	}
	if e.from != 0 {
		p.adjusted(payload.Adjustment{How: payload.Lower, Width: width, Base: e.from})
	}
	return e, nil
}

// data plans buffer 2, the bytes that the offsets span.
func (p *TablePlan) data(s deviceRows, e extent) error {
	b := s.Buffers[2]
	switch {
	case b.Addr == 0 && e.to > e.from:
		return p.path.Invalid("offsets reach to byte %d of none", e.to)
	case b.Addr == 0:
		p.absent()
		return nil
	}
	return p.lies(b, e.from, e.to-e.from, 0)
}

// viewed plans the data buffers of views, whole.
func (p *TablePlan) viewed(s deviceRows) error {
	data := s.Buffers[2:]
	if s.n == 0 {
		data = nil
	}
	p.planner.node(int64(len(data)), 0)
	for i, b := range data {
		if b.Length < 0 || b.Addr == 0 && b.Length > 0 {
			return p.path.Invalid("data buffer %d of the views has %d bytes at %#x", i, b.Length, uint64(b.Addr))
		}
		if err := p.lies(b, 0, b.Length, 0); err != nil {
			return err
		}
	}
	return nil
}

// dictionary plans the dictionary of s, whole.
func (p *TablePlan) dictionary(dt arrow.DataType, s deviceRows) error {
	if s.Dictionary == nil {
		if s.n > s.nulls {
			return p.path.Invalid("no dictionary")
		}
		p.empty(dt)
		return nil
	}
	return p.whole("dictionary", dt, s.Dictionary)
}

// runs plans the runs that s shows. Those of a slice are found among the run ends, which are
// read for that.
func (p *TablePlan) runs(t *arrow.RunEndEncodedType, s deviceRows) error {
	index, ok := t.RunEnds().(arrow.FixedWidthDataType)
	ends := s.Children[0]
	switch {
	case !ok || !t.ValidRunEndsType(t.RunEnds()):
		return p.path.Invalid("run ends of type %s", t.RunEnds())
	case ends == nil || len(ends.Buffers) != 2 || ends.Length < 0 || ends.Offset < 0 || ends.Length > MaxRows || ends.Offset > MaxRows:
		return p.path.Invalid("run ends that are no array")
	case s.n > 0 && (ends.Length == 0 || ends.Buffers[1].Addr == 0):
		return p.path.Invalid("%d rows and no runs", s.n)
	}
	width := int64(index.Bytes())
	first, last := int64(0), ends.Length
	if s.n == 0 {
		last = 0
	} else if s.at > 0 {
		at, err := p.within(ends.Buffers[1], ends.Offset*width, ends.Length*width)
		if err != nil {
			return err
		}
		// Run ends ascend. Of those that do not, as of others, no more is shown than there is.
		if before, ok := p.count(census{of: at, width: width, from: s.at, n: s.n}); ok {
			if first, last = before[0], before[1]+1; last > ends.Length {
				return p.path.Invalid("the runs end before row %d", s.at+s.n)
			}
		}
	}
	p.path.Push("run_ends")
	p.node(last-first, 0)
	p.absent()
	err := p.fixed(deviceRows{DeviceArray: ends, at: ends.Offset + first, n: last - first}, 1, width)
	if err == nil && s.at > 0 && last > first {
		p.adjusted(payload.Adjustment{How: payload.Ends, Width: width, Base: s.at, Count: s.n})
	}
	p.path.Pop()
	if err != nil {
		return err
	}
	return p.child("values", t.Encoded(), s.Children[1], first, last-first)
}

// count returns what c counts, or false if it has to be counted first.
func (p *TablePlan) count(c census) (tally, bool) {
	if got, ok := p.counted[c]; ok {
		return *got, true
	}
	p.missing.counts[c] = new(tally)
	return tally{}, false
}

// census is a question about bytes of the device's that may be too many to be kept. Without a width
// it is how many of the n bits from bit from on are set; else how many of the signed values are at
// most from, and how many below from + n.
type census struct {
	of             payload.DeviceRange
	width, from, n int64
}

// tally is the answer to a census: one number, or two.
type tally [2]int64

// add counts the bytes p, from off on.
func (c census) add(t *tally, p []byte, off int64) {
	if c.width == 0 {
		begin, end := max(0, c.from-8*off), min(8*int64(len(p)), c.from+c.n-8*off)
		if begin < end {
			t[0] += int64(bitutil.CountSetBits(p, int(begin), int(end-begin)))
		}
		return
	}
	for i := range int64(len(p)) / c.width {
		switch v := signed(p, c.width, i); {
		case v <= c.from:
			t[0]++
			t[1]++
		case v < c.from+c.n:
			t[1]++
		}
	}
}
