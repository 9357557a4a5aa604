package payload

import (
	"cmp"
	"errors"
	"slices"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/tier"
)

// Form is a type of payload in a tier.
type Form struct {
	Type Type
	Kind tier.Kind
}

// Forms returns the forms that images have: only those on a device are scattered, and none there is
// compressed.
func Forms() (all []Form) {
	for _, k := range tier.Kinds() {
		other := CompressedImage
		if k.IsDevice() {
			other = ScatteredImage
		}
		all = append(all, Form{PlainImage, k}, Form{other, k})
	}
	return all
}

const (
	// RunSize is how many bytes of a body are in one Run. It is a request to the disk, before it is
	// compressed.
	RunSize = 1 << 20
	// FrameSize is how many bytes of a body are compressed for themselves, unless Descriptor.Block is
	// set; a multiple of SumChunk.
	FrameSize = 256 << 10
)

// Run is RunSize bytes of a body, the last less, as they are stored: frame by frame, one after the
// other. It begins and ends on a page. Runs may be in any order in their buffer.
type Run struct {
	Offset int64  // in the buffer
	Sum    uint64 // xxh3-64 of the stored bytes, without the rest of the last page
	Codec  uint8  // what the frames were compressed with, a number of package convert's
	// Frames are the stored lengths, of Descriptor.Frame bytes each, the last of the body less. A
	// frame that is as long as its part of the body is that, uncompressed.
	Frames []uint32
}

// Stored returns how many bytes are stored.
func (r *Run) Stored() (n int64) {
	for _, f := range r.Frames {
		n += int64(f)
	}
	return n
}

// DeviceRange is where one Arrow buffer is on a device. The zero value is one that is
// absent, or has no bytes.
type DeviceRange struct {
	Addr   tier.Addr
	Length int64 // bytes that are there to be read
}

// Adjust is a way in which the bytes of a scattered buffer become those of a plain image.
type Adjust uint8

// The ways. Code that copies a scattered image as it is ignores them.
const (
	// Bits: the Count bits from bit Base of the first byte on; what is behind them is zero.
	Bits Adjust = iota + 1
	// Lower: Base is subtracted from each value of Width bytes.
	Lower
	// Ends: as Lower, and a value is Count at most: the ends of runs.
	Ends
)

// Adjustment describes a scattered buffer that differs from that of a plain image, because the
// array is a slice of another one.
type Adjustment struct {
	Buffer      int // index into Descriptor.Buffers; they ascend
	How         Adjust
	Width       int64
	Base, Count int64
}

// Parts are what an Image is made of.
type Parts struct {
	// Descriptor describes the bytes. It may have no checksums if the image is scattered and was
	// made elsewhere, because its bytes were never read: the image that is made of it gets them, with
	// another descriptor.
	Descriptor *Descriptor
	Space      *tier.Space
	// Buffers are the memory: none if the body is empty, and one unless the image is scattered. The
	// image takes them over.
	Buffers []*tier.Buffer
	// Runs are the body of a compressed image, in order; else nil.
	Runs []Run
	// Ranges are where each of Descriptor.Buffers is on the device, if the image is scattered; else
	// nil. Adjustments are nil if all of these are as in a plain image.
	Ranges      []DeviceRange
	Adjustments []Adjustment
	// Kept is how many bytes of the ranges other holders in the space are charged for. They keep them
	// while the image is there.
	Kept int64
	// Shared is a reference to each of the descriptor's AllDictionaries, in that order and in the same
	// space. The image takes them over.
	Shared []Shared
	Type   Type // PlainImage, CompressedImage or ScatteredImage; "" means PlainImage
	// Program is the type of the program's payload that the image was made of; "" if there was none. The
	// batch gets it again where a converter to it is registered.
	Program Type
}

// Image is the built-in payload: the bytes of a batch in one space, and a reference to each
// dictionary that it needs, in the same space. The descriptor is that of the plain image, whatever
// the type.
type Image struct {
	// Parts are what the image is made of: its type, what that needs, and the program's type. They
	// stay the image's. Only Program may be changed, before others see the image.
	Parts    Parts
	bytes    int64 // charged for the buffers, and kept
	released atomic.Bool
}

// New returns the image of these parts. It panics on parts that do not fit together, because that is
// a bug in a converter.
func New(p Parts) *Image {
	const bug = "payload: an image "
	d := p.Descriptor
	if d == nil || p.Space == nil {
		panic(bug + "needs a descriptor and a space")
	}
	p.Type = cmp.Or(p.Type, PlainImage)
	size := int64(0)
	img := &Image{Parts: p, bytes: p.Kept}
	for _, b := range p.Buffers {
		if b != nil && b.Space() != p.Space {
			panic(bug + "has a buffer in another space")
		}
		size, img.bytes = size+b.Size(), img.bytes+b.Charge()
	}
	dicts := d.AllDictionaries()
	if len(dicts) != len(p.Shared) {
		panic(bug + "does not have the dictionaries that it needs")
	}
	for i, dict := range dicts {
		switch s := p.Shared[i]; {
		case s.Descriptor() != dict:
			panic(bug + "has another dictionary than the one it needs")
		case s.Buffer() != nil && s.Buffer().Space() != p.Space:
			panic(bug + "has a dictionary in another space")
		}
	}
	switch {
	case p.Type != ScatteredImage && len(p.Buffers) > 1:
		panic(bug + "is in several buffers")
	case p.Type == PlainImage && size < d.Body:
		panic(bug + "has a buffer shorter than its body")
	case p.Type == CompressedImage && p.Space.Kind().IsDevice():
		panic(bug + "is compressed on a device")
	case p.Type == CompressedImage && int64(len(p.Runs)) != (d.Body+RunSize-1)/RunSize:
		panic(bug + "does not have a run for each part of its body")
	case p.Type == ScatteredImage && !p.Space.Kind().IsDevice():
		panic(bug + "is scattered outside a GPU")
	case p.Type == ScatteredImage && len(p.Ranges) != len(d.Buffers):
		panic(bug + "does not have a range for each of its buffers")
	case p.Kept < 0:
		panic(bug + "keeps less than nothing")
	case d.Sums == nil && len(p.Shared) > 0 && p.Type == ScatteredImage:
		panic(bug + "shares dictionaries without having checksums")
	}
	for i := range p.Runs {
		if r := &p.Runs[i]; r.Offset < 0 || r.Offset+r.Stored() > size {
			panic(bug + "has a run outside its buffer")
		}
	}
	for i := range p.Ranges {
		if d.Buffers[i].Length > 0 && p.Ranges[i].Length < d.Buffers[i].Length {
			panic(bug + "has a buffer that is cut short")
		}
	}
	return img
}

// NewImage is documented at batch.NewImage.
func NewImage(d *Descriptor, buf *tier.Buffer, space *tier.Space, shared ...Shared) *Image {
	p := Parts{Descriptor: d, Space: space, Shared: shared}
	if buf != nil {
		p.Buffers = []*tier.Buffer{buf}
	}
	return New(p)
}

// Type returns how the bytes are stored.
func (p *Image) Type() Type { return p.Parts.Type }

// Space returns where the image is.
func (p *Image) Space() *tier.Space { return p.Parts.Space }

// Bytes returns what the image's own buffers are charged in its space, and what it keeps there that
// others are charged for: what can be freed when it goes. Dictionaries, which it shares, do not count.
func (p *Image) Bytes() int64 { return p.bytes }

// Descriptor returns what the bytes mean. Its spans are places in a plain image.
func (p *Image) Descriptor() *Descriptor { return p.Parts.Descriptor }

// Buffers returns the image's own memory, which stays the image's. The slice must not be changed.
func (p *Image) Buffers() []*tier.Buffer { return p.Parts.Buffers }

// Buffer returns the memory of an image that is not scattered, nil if its body is empty. It stays the
// image's.
func (p *Image) Buffer() *tier.Buffer {
	if len(p.Parts.Buffers) == 0 {
		return nil
	}
	return p.Parts.Buffers[0]
}

// EachShared calls f with the memory of each dictionary.
func (p *Image) EachShared(f func(*tier.Buffer)) {
	for _, s := range p.Parts.Shared {
		if b := s.Buffer(); b != nil { // not an empty dictionary's
			f(b)
		}
	}
}

// Leased returns how many readers hold the memory beyond the image.
func (p *Image) Leased() (n int) {
	for _, b := range p.Parts.Buffers {
		n += b.Leased()
	}
	return n
}

// OnUnleased sets what is called when no reader holds memory of any of the buffers any more; see
// tier.Buffer.OnUnleased. Leases that end at the same moment on two goroutines may call it twice.
func (p *Image) OnUnleased(f func()) {
	last := f
	if len(p.Parts.Buffers) > 1 && f != nil {
		last = func() {
			if p.Leased() == 0 {
				f()
			}
		}
	}
	for _, b := range p.Parts.Buffers {
		b.OnUnleased(last)
	}
}

// TryLease leases the memory of all buffers until the returned function is called, also beyond
// Release. ok is false if some of it is gone.
func (p *Image) TryLease() (end func(), ok bool) { return lease(p.Parts.Buffers) }

// Hold is TryLease for the memory of the dictionaries, too. A program's dictionary may panic.
func (p *Image) Hold() (end func(), ok bool) {
	all := slices.Clone(p.Parts.Buffers)
	p.EachShared(func(b *tier.Buffer) { all = append(all, b) })
	return lease(all)
}

// lease leases all buffers, or none.
func lease(all []*tier.Buffer) (end func(), ok bool) {
	var ends []func()
	end = func() {
		for _, end := range slices.Backward(ends) {
			end()
		}
	}
	for _, b := range all {
		one, ok := b.TryLease()
		if !ok {
			end()
			return nil, false
		}
		ends = append(ends, one)
	}
	return end, true
}

// Release gives the buffers and the references to dictionaries up; memory that
// readers hold a lease on stays until the last lease ends. A second release changes nothing and
// returns tier.ErrReleased; an invariants build panics.
func (p *Image) Release() (err error) {
	if !p.released.CompareAndSwap(false, true) {
		if invariants.Enabled {
			panic("payload: an image was released twice")
		}
		return tier.ErrReleased
	}
	return p.Parts.Release()
}

// Release gives up what no image has taken over.
func (p *Parts) Release() (err error) {
	for _, b := range p.Buffers {
		err = errors.Join(err, b.Release())
	}
	for _, s := range p.Shared {
		err = errors.Join(err, releaseShared(s))
	}
	return err
}

// releaseShared makes a panic an error, because the dictionaries after s must be released, too.
func releaseShared(s Shared) (err error) {
	defer guard.Error(&err, "Shared.Release")
	return s.Release()
}
