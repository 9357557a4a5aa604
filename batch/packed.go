package batch

import (
	"errors"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/tier"
)

// The forms of an image whose bytes are compressed; see Packed. On a device there is none.
const (
	HostPacked PayloadType = "host-packed"
	DiskPacked PayloadType = "disk-packed"
)

// PackedType returns the compressed form that an image has in tier k, and "" where
// there is none.
func PackedType(k tier.Kind) PayloadType {
	switch k {
	case tier.Host:
		return HostPacked
	case tier.Disk:
		return DiskPacked
	}
	return ""
}

const (
	// RunSize is how many bytes of a body one Run stands for. It is a request to the
	// disk, before it is compressed.
	RunSize = 1 << 20
	// FrameSize is how many bytes of a body are compressed for themselves, a multiple of
	// SumChunk.
	FrameSize = 256 << 10
)

// Run is RunSize bytes of a body, the last less, as they are stored: frame by frame, one
// after the other, from the beginning of a buffer of its own, which ends on a page.
type Run struct {
	Buffer *tier.Buffer
	Sum    uint64 // xxh3-64 of the stored bytes, without the rest of the last page
	Codec  uint8  // what the frames were compressed with, a number of package convert's
	// Frames are the stored lengths. A frame that is as long as its part of the body is
	// that, uncompressed.
	Frames [RunSize / FrameSize]uint32
}

// Stored returns how many bytes are stored.
func (r *Run) Stored() (n int64) {
	for _, f := range r.Frames {
		n += int64(f)
	}
	return n
}

// Packed is the payload of an image whose body is compressed, in host memory or on disk.
// Dictionaries that are images of their own are not: they are shared with images.
type Packed struct {
	desc     *Descriptor
	runs     []Run
	space    *tier.Space
	shared   []Shared
	released atomic.Bool
}

// NewPacked returns the compressed form of the image that d describes. It takes the
// buffers of runs over, which lie in space and stand for the body in order, and a reference
// to each of d's AllDictionaries, as NewImage does. It panics on arguments that break this.
func NewPacked(d *Descriptor, runs []Run, space *tier.Space, shared ...Shared) *Packed {
	switch {
	case d == nil || space == nil:
		panic("batch: a packed image needs a descriptor and a space")
	case PackedType(space.Kind()) == "":
		panic("batch: there is no packed image in a space of this tier")
	case int64(len(runs)) != (d.Body+RunSize-1)/RunSize:
		panic("batch: a packed image does not have a run for each part of its body")
	}
	for i := range runs {
		if b := runs[i].Buffer; b == nil || b.Space() != space || b.Size() < runs[i].Stored() {
			panic("batch: a packed image's run lies in another space or is cut short")
		}
	}
	checkShared(d, space, shared)
	return &Packed{desc: d, runs: runs, space: space, shared: shared}
}

// Type returns the form's name by the tier of its space.
func (p *Packed) Type() PayloadType { return PackedType(p.space.Kind()) }

// Space returns where the runs lie.
func (p *Packed) Space() *tier.Space { return p.space }

// Bytes returns what the runs are charged in their space.
func (p *Packed) Bytes() (n int64) {
	for i := range p.runs {
		n += p.runs[i].Buffer.Charge()
	}
	return n
}

// Descriptor returns what the bytes mean once they are uncompressed.
func (p *Packed) Descriptor() *Descriptor { return p.desc }

// Runs returns the stored body. It stays the payload's, and must not be changed.
func (p *Packed) Runs() []Run { return p.runs }

// Buffers returns the memory of the runs. It stays the payload's.
func (p *Packed) Buffers() []*tier.Buffer {
	out := make([]*tier.Buffer, len(p.runs))
	for i := range p.runs {
		out[i] = p.runs[i].Buffer
	}
	return out
}

// Shared returns the dictionaries, as Image.Shared does.
func (p *Packed) Shared() []Shared { return p.shared }

// EachShared calls f with the memory of each dictionary.
func (p *Packed) EachShared(f func(*tier.Buffer)) { eachBuffer(p.shared, f) }

// Release gives the runs and the references to dictionaries up. A second release changes
// nothing and returns tier.ErrReleased; an invariants build panics.
func (p *Packed) Release() error {
	if !p.released.CompareAndSwap(false, true) {
		if invariants.Enabled {
			panic("batch: packed image released twice")
		}
		return tier.ErrReleased
	}
	var err error
	for i := range p.runs {
		err = errors.Join(err, p.runs[i].Buffer.Release())
	}
	for _, s := range p.shared {
		err = errors.Join(err, s.Release())
	}
	return err
}
