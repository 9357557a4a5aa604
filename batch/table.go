package batch

import (
	"errors"
	"slices"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/tier"
)

// GPUTable is the form of a batch whose Arrow buffers are scattered over a device's
// memory; see Table.
const GPUTable PayloadType = "gpu-table"

// DeviceRange is where one Arrow buffer lies on a device. The zero value is one that is
// absent, or has no bytes.
type DeviceRange struct {
	Addr   tier.Addr
	Length int64 // bytes that are there to be read
}

// Adjust says how the bytes of a table's buffer become those of an image.
type Adjust uint8

// The ways. Those who copy a table as it is pay no attention to them.
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

// Table is the payload of a batch whose Arrow buffers lie in a device's memory each by
// itself, as GPU libraries such as libcudf make them: allocated one by one, or borrowed from
// whoever made them. The image in the other forms is what the descriptor says; a table
// has the same buffers at other places:
//
//	Descriptor.Buffers[i]   where buffer i is in the body of an image
//	Ranges()[i]             where it is on the device
//
// The descriptor of a table that was made elsewhere has no checksums, because nobody has
// read its bytes: it gets them when it becomes an image, and the batch another descriptor
// then. Dictionaries that are images of their own stay so: a table shares them with images.
type Table struct {
	desc     *Descriptor
	ranges   []DeviceRange
	adjust   []Adjustment
	bufs     []*tier.Buffer
	kept     int64
	space    *tier.Space
	shared   []Shared
	released atomic.Bool
}

// TableParts is what a Table is made of.
type TableParts struct {
	Descriptor  *Descriptor
	Ranges      []DeviceRange  // one for each of Descriptor.Buffers
	Adjustments []Adjustment   // nil if all buffers are as in an image
	Buffers     []*tier.Buffer // the memory that holds the ranges; taken over
	Kept        int64          // bytes of the ranges that others of the space are charged for, and keep while the table is there
	Space       *tier.Space    // of a GPU; that of the buffers
	Shared      []Shared       // the descriptor's dictionaries, as NewImage has them; taken over
}

// NewTable returns the table of these parts. It panics on parts that do not fit together, for
// that is a bug in a converter.
func NewTable(p TableParts) *Table {
	switch {
	case p.Descriptor == nil || p.Space == nil:
		panic("batch: a table needs a descriptor and a space")
	case p.Space.Kind() != tier.GPU:
		panic("batch: a table lies on a GPU")
	case len(p.Ranges) != len(p.Descriptor.Buffers):
		panic("batch: a table does not have a range for each of its buffers")
	case p.Kept < 0:
		panic("batch: a table keeps less than nothing")
	case p.Descriptor.Sums == nil && len(p.Shared) > 0:
		panic("batch: a table without checksums shares dictionaries")
	}
	for _, b := range p.Buffers {
		if b != nil && b.Space() != p.Space {
			panic("batch: a table's buffer lies in another space")
		}
	}
	for i, s := range p.Descriptor.Buffers {
		if s.Length > 0 && p.Ranges[i].Length < s.Length {
			panic("batch: a table's buffer is cut short")
		}
	}
	checkShared(p.Descriptor, p.Space, p.Shared)
	return &Table{desc: p.Descriptor, ranges: p.Ranges, adjust: p.Adjustments, bufs: p.Buffers, kept: p.Kept, space: p.Space, shared: p.Shared}
}

// Type returns GPUTable.
func (p *Table) Type() PayloadType { return GPUTable }

// Space returns the space of the device.
func (p *Table) Space() *tier.Space { return p.space }

// Bytes returns what the table's buffers are charged in their space, without dictionaries
// that it shares, and what it keeps there that others are charged for: what can be freed when it goes.
func (p *Table) Bytes() (n int64) {
	n = p.kept
	for _, b := range p.bufs {
		n += b.Charge()
	}
	return n
}

// Descriptor returns what the bytes mean. Its spans are places in an image.
func (p *Table) Descriptor() *Descriptor { return p.desc }

// Ranges returns where each of Descriptor.Buffers lies on the device. They stay the
// table's, and must not be changed.
func (p *Table) Ranges() []DeviceRange { return p.ranges }

// Adjustments returns which buffers are not as in an image. They stay the table's, and must
// not be changed.
func (p *Table) Adjustments() []Adjustment { return p.adjust }

// Lent says whether the buffers lie in the arrays of who made them, and not in copies of what the rows show: then what those
// arrays have before the first row is there as well.
func (p *Table) Lent() bool {
	for _, b := range p.bufs {
		if _, ok := b.Memory().(tier.LentMemory); !ok {
			return false
		}
	}
	return len(p.bufs) > 0
}

// Shared returns the dictionaries, as Image.Shared does.
func (p *Table) Shared() []Shared { return p.shared }

// EachShared calls f with the memory of each dictionary.
func (p *Table) EachShared(f func(*tier.Buffer)) { eachBuffer(p.shared, f) }

// Leased returns how many readers hold memory of the table's beyond itself.
func (p *Table) Leased() (n int) {
	for _, b := range p.bufs {
		n += b.Leased()
	}
	return n
}

// OnUnleased sets what is called when no reader holds memory of one of the table's buffers
// any more; see tier.Buffer.OnUnleased.
func (p *Table) OnUnleased(f func()) {
	for _, b := range p.bufs {
		b.OnUnleased(f)
	}
}

// Buffers returns the table's own memory. It stays the table's.
func (p *Table) Buffers() []*tier.Buffer { return slices.Clone(p.bufs) }

// Lease keeps the memory of all buffers until the returned function is called, also beyond
// Release. The caller must hold the batch.
func (p *Table) Lease() (end func()) {
	ends := make([]func(), 0, len(p.bufs))
	for _, b := range p.bufs {
		ends = append(ends, b.Lease())
	}
	return func() {
		for _, end := range slices.Backward(ends) {
			end()
		}
	}
}

// Release gives the buffers and the references to dictionaries up. A second release changes
// nothing and returns tier.ErrReleased; an invariants build panics.
func (p *Table) Release() error {
	if !p.released.CompareAndSwap(false, true) {
		if invariants.Enabled {
			panic("batch: table released twice")
		}
		return tier.ErrReleased
	}
	var err error
	for _, b := range p.bufs {
		err = errors.Join(err, b.Release())
	}
	for _, s := range p.shared {
		err = errors.Join(err, s.Release())
	}
	return err
}
