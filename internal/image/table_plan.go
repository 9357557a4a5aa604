package image

import (
	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/bitutil"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// Unknown is a number that the creator of an array does not give.
const Unknown = -1

// DeviceArray is an Arrow array whose buffers are in a device's memory, as the Arrow C data
// interface has it: the buffers in the order of the columnar format, beginning with the validity
// unless the type has none (null, run-end encoded, unions); children in the order of the type's
// fields.
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

// DeviceTable is a table in a device's memory that code outside the engine has made, for example
// one imported through the Arrow C device interface. Nothing has been copied or checked yet.
type DeviceTable struct {
	Space    *tier.Space // of the device
	Schema   *arrow.Schema
	Rows     int64
	Columns  []*DeviceArray
	Metadata *arrow.Metadata // the record's own; nil if it has none
	// Charged is memory of the space that was allocated from it, and stays charged to it until
	// Release is called. It may contain other things than the table's buffers.
	Charged []payload.DeviceRange
	// Release is called once, when the memory is not needed any more; never, if the table is
	// not adopted. It may be nil.
	Release func()
}

// TablePlan is where the buffers of a table go in an image, and where they are.
type TablePlan struct {
	Descriptor *batch.Descriptor     // without checksums, because the bytes were not read
	Ranges     []payload.DeviceRange // by Descriptor.Buffers
	Adjust     []payload.Adjustment
}

// PlanTable plans the image of t, as NewLayout does that of a record. Where buffers go depends on
// values on the device: the number of nulls, the first and last offset of strings and lists, the
// runs of a slice. fetch reads them and blocks until it has.
//
// A read of a device has a high latency, so reads are collected. The planner walks the arrays;
// where a value is not known it notes the question and goes on as if the array had no rows. Then
// all questions are answered in one fetch, and the walk begins again. Each walk gets at least one
// level deeper, so there are as many reads as levels of nesting, and not as arrays.
//
// Bitmaps and run ends are counted while they are read. So little host memory is needed, however
// long the arrays are, or claim to be. PlanTable does not take over the table: on an error the
// caller still has it.
func PlanTable(t DeviceTable, fetch func([]Peek) error) (*TablePlan, error) {
	known := make(facts)
	for {
		// The planner that goes through without a question has the plan; all before it are thrown
		// away.
		p := planner{facts: known}
		switch {
		case t.Rows < 0 || t.Rows > MaxRows:
			return nil, p.path.Invalid("%d rows", t.Rows)
		case len(t.Columns) != t.Schema.NumFields():
			return nil, p.path.Invalid("%d columns for %d fields", len(t.Columns), t.Schema.NumFields())
		}
		for i, c := range t.Columns {
			f := t.Schema.Field(i)
			if err := p.array(f.Name, f.Type, input{dev: c}, 0, t.Rows); err != nil {
				return nil, err
			}
		}
		var reads []Peek
		// The questions of this walk: count has added them without an answer.
		for c, f := range known {
			if !f.known {
				f.known = true // by the next walk
				take := func(p []byte, off int64) { c.add(&f.tally, p, off) }
				reads = append(reads, Peek{c.of.Addr, c.of.Length, take})
			}
		}
		if len(reads) == 0 {
			// One range for each span, also for the last ones without bytes.
			p.ranges = append(p.ranges, make([]payload.DeviceRange, len(p.spans)-len(p.ranges))...)
			return &TablePlan{Ranges: p.ranges, Adjust: p.adjust, Descriptor: &batch.Descriptor{
				Schema: t.Schema, Rows: t.Rows, Nodes: p.nodes, Buffers: p.spans,
				Body: extent.RoundUp(p.at, tier.Page), Metadata: t.Metadata,
			}}, nil
		}
		if err := fetch(reads); err != nil {
			return nil, err
		}
	}
}

// Peek is bytes of a device that must be read to plan a table or to adjust its buffers.
type Peek struct {
	Addr tier.Addr
	N    int64
	// Take gets the bytes in ascending pieces, whose lengths are multiples of 8 except for the
	// last, so that no value is divided. off is from Addr. The piece is valid only during the call.
	Take func(p []byte, off int64)
}

// PeekInto returns a Peek that copies the bytes at addr to dst.
func PeekInto(addr tier.Addr, dst []byte) Peek {
	return Peek{addr, int64(len(dst)), func(p []byte, off int64) { copy(dst[off:], p) }}
}

// facts are the questions that a plan has asked about a device's memory, and the answers so far. It
// is kept from one walk to the next. The key has the address, so two columns that share a buffer
// share the answer.
type facts map[census]*fact

type fact struct {
	tally tally
	known bool
}

// count returns the answer to c. If ok is false it is not known yet, and has been noted as a
// question for the next fetch.
func (f facts) count(c census) (tally, bool) {
	if got, ok := f[c]; ok && got.known {
		return got.tally, true
	}
	f[c] = new(fact)
	return tally{}, false
}

// census is a question about bytes of the device. There are three kinds:
//
//	width 0          how many of the n bits from bit from on are set
//	width > 0, n > 0 how many of the signed values are at most from, and how many are below from+n
//	width > 0, n = 0 the value itself, which is the only one
type census struct {
	of             payload.DeviceRange
	width, from, n int64
}

// tally is the answer to a census: one number, or two.
type tally [2]int64

// add counts the bytes p, from off on.
func (c census) add(t *tally, p []byte, off int64) {
	switch {
	case c.width == 0:
		// The piece has bits 8*off and following; those of the question are from c.from to
		// c.from+c.n.
		begin, end := max(0, c.from-8*off), min(8*int64(len(p)), c.from+c.n-8*off)
		if begin < end {
			t[0] += int64(bitutil.CountSetBits(p, int(begin), int(end-begin)))
		}
		return
	case c.n == 0:
		t[0] = OffsetAt(p, c.width, 0)
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
