package payload

import (
	"slices"

	"github.com/spillway-db/spillway/tier"
)

// DeviceRange is where one Arrow buffer lies on a device. The zero value is one that is
// absent, or has no bytes.
type DeviceRange struct {
	Addr   tier.Addr
	Length int64 // bytes that are there to be read
}

// Adjust says how the bytes of a table's buffer become those of an image.
type Adjust uint8

// The ways. Code that copies a table as it is ignores them.
const (
	// Bits: the Count bits from bit Base of the first byte on; what is behind them is zero.
	Bits Adjust = iota + 1
	// Lower: Base is subtracted from each value of Width bytes.
	Lower
	// Ends: as Lower, and a value is Count at most: the ends of runs.
	Ends
)

// Adjustment says that a buffer of a table is not byte for byte that of the image, because
// the array is the slice of another one.
type Adjustment struct {
	Buffer      int // index into Descriptor.Buffers; they ascend
	How         Adjust
	Width       int64
	Base, Count int64
}

// Table is the payload of a batch whose Arrow buffers are separate memories of a device, as GPU
// libraries such as libcudf make them: allocated one by one, or borrowed from their creator. The
// descriptor describes the image in the other forms; a table has the same buffers at other places:
//
//	Descriptor.Buffers[i]   where buffer i is in the body of an image
//	Ranges()[i]             where it is on the device
//
// The descriptor of a table that was made elsewhere has no checksums, because its bytes were never
// read. It gets them when it becomes an image, and the batch another descriptor then. Dictionaries
// that are images of their own stay so: a table shares them with images.
type Table struct {
	body
	ranges []DeviceRange
	adjust []Adjustment
	kept   int64
}

// TableParts is what a Table is made of.
type TableParts struct {
	Descriptor  *Descriptor
	Ranges      []DeviceRange  // one for each of Descriptor.Buffers
	Adjustments []Adjustment   // nil if all buffers are as in an image
	Buffers     []*tier.Buffer // the memory that holds the ranges; taken over
	// Kept is how many bytes of the ranges other holders in the space are charged for. They keep them
	// while the table is there.
	Kept   int64
	Space  *tier.Space // of a GPU; that of the buffers
	Shared []Shared    // the descriptor's dictionaries, as NewImage has them; taken over
}

// NewTable returns the table of these parts. It panics on parts that do not fit together, because
// that is a bug in a converter.
func NewTable(p TableParts) *Table {
	t := &Table{body{desc: p.Descriptor, space: p.Space}, p.Ranges, p.Adjustments, p.Kept}
	t.hold(p.Buffers, p.Shared)
	t.check("a table")
	switch {
	case p.Space.Kind() != tier.GPU:
		panic("payload: a table lies on a GPU")
	case len(p.Ranges) != len(p.Descriptor.Buffers):
		panic("payload: a table does not have a range for each of its buffers")
	case p.Kept < 0:
		panic("payload: a table keeps less than nothing")
	case p.Descriptor.Sums == nil && len(p.Shared) > 0:
		panic("payload: a table without checksums shares dictionaries")
	}
	for i, s := range p.Descriptor.Buffers {
		if s.Length > 0 && p.Ranges[i].Length < s.Length {
			panic("payload: a table's buffer is cut short")
		}
	}
	return t
}

// Type returns GPUTable.
func (p *Table) Type() Type { return GPUTable }

// Bytes returns what the table's buffers are charged in their space, without dictionaries that it
// shares, and what it keeps there that others are charged for: what can be freed when it goes.
func (p *Table) Bytes() int64 { return p.kept + p.body.Bytes() }

// Ranges returns where each of Descriptor.Buffers lies on the device. They stay the
// table's, and must not be changed.
func (p *Table) Ranges() []DeviceRange { return p.ranges }

// Adjustments returns which buffers are not as in an image. They stay the table's, and must
// not be changed.
func (p *Table) Adjustments() []Adjustment { return p.adjust }

// Lease keeps the memory of all buffers until the returned function is called, also beyond
// Release. The caller must hold the batch.
func (p *Table) Lease() (end func()) {
	ends := make([]func(), 0, len(p.Buffers()))
	for _, b := range p.Buffers() {
		ends = append(ends, b.Lease())
	}
	return func() {
		for _, end := range slices.Backward(ends) {
			end()
		}
	}
}
