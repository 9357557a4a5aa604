package payload

import "github.com/spillway-db/spillway/tier"

// PackedType returns the compressed form that an image has in tier k, and "" where
// there is none.
func PackedType(k tier.Kind) Type {
	switch k {
	case tier.Host:
		return HostPacked
	case tier.Disk:
		return DiskPacked
	}
	return ""
}

const (
	// RunSize is how many bytes of a body are in one Run. It is a request to the disk, before it is
	// compressed.
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
	body
	runs []Run
}

// NewPacked returns the compressed form of the image that d describes. It takes over the buffers of
// runs, which are in space and contain the body in order. It also takes over a reference to each of
// d's AllDictionaries, as NewImage does. It panics on arguments that break this.
func NewPacked(d *Descriptor, runs []Run, space *tier.Space, shared ...Shared) *Packed {
	bufs := make([]*tier.Buffer, len(runs))
	for i := range runs {
		bufs[i] = runs[i].Buffer
	}
	p := &Packed{body{desc: d, space: space}, runs}
	p.hold(bufs, shared)
	p.check("a packed image")
	switch {
	case PackedType(space.Kind()) == "":
		panic("payload: there is no packed image in a space of this tier")
	case int64(len(runs)) != (d.Body+RunSize-1)/RunSize:
		panic("payload: a packed image does not have a run for each part of its body")
	}
	for i := range runs {
		if b := runs[i].Buffer; b == nil || b.Size() < runs[i].Stored() {
			panic("payload: a packed image's run is cut short")
		}
	}
	return p
}

// Type returns the form's name by the tier of its space.
func (p *Packed) Type() Type { return PackedType(p.space.Kind()) }

// Runs returns the stored body. It stays the payload's, and must not be changed.
func (p *Packed) Runs() []Run { return p.runs }
