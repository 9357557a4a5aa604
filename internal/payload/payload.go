// Package payload has the built-in forms of a batch's data, and the descriptor of their bytes.
// Package batch has names for what programs need of them: their converters make and read images.
//
//	Image ──┬─▶ Descriptor ──▶ Node, Span    what the bytes mean; one for all forms of a batch
//	Packed ─┤
//	Table ──┴─▶ Shared                       a dictionary in the same space, which batches share
//
// A payload owns its memory and one reference to each dictionary that it shares. It has no locks,
// and is safe for concurrent use.
package payload

import (
	"cmp"
	"errors"
	"slices"
	"sync/atomic"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lookup"
	"github.com/spillway-db/spillway/tier"
)

// Type names a form that a batch's data can have; see batch.PayloadType.
type Type string

// The built-in forms. On a device none is compressed.
const (
	GPUImage   Type = "gpu-image"
	HostImage  Type = "host-image"
	DiskImage  Type = "disk-image"
	HostPacked Type = "host-packed"
	DiskPacked Type = "disk-packed"
	GPUTable   Type = "gpu-table"
)

// ImageType returns the form that an image has in tier k, and "" for an invalid
// tier.
func ImageType(k tier.Kind) Type {
	switch k {
	case tier.GPU:
		return GPUImage
	case tier.Host:
		return HostImage
	case tier.Disk:
		return DiskImage
	}
	return ""
}

// SumChunk is how many bytes of a body one checksum covers. What is read to get at one
// column begins and ends at a multiple of it, so it is small beside a column; shorter runs
// would cost speed where bodies are laid out.
const SumChunk = 64 << 10

// Node is the length and the number of nulls of one array of a batch; or, with
// Nulls Outside, the place of an array that lies in an image of its own.
type Node struct {
	Length int64 // rows; outside: an index into Descriptor.Dictionaries
	Nulls  int64 // of them null
}

// Outside is what Node.Nulls is for an array that is not in the batch's own
// body. It has no further nodes and no buffers there.
const Outside = -1

// Span is where one Arrow buffer lies in a body, in bytes.
type Span struct {
	Offset int64 // a multiple of 64; -1 if the buffer is absent
	Length int64
}

// Absent is the span of a buffer that an array does not have.
var Absent = Span{Offset: -1}

// Descriptor describes the bytes of an image. It is immutable once made, and one descriptor is
// shared by all forms that a batch takes in its life.
//
// Nodes and Buffers are in schema order, depth first.
//
// A dictionary that is an image of its own has a descriptor of its own, whose
// schema is one field of the dictionary's type. The pointer to it is the
// dictionary's identity: it is the same in all batches that share the dictionary.
type Descriptor struct {
	Schema  *arrow.Schema
	Rows    int64
	Nodes   []Node // one for each array
	Buffers []Span // one for each buffer of each array
	Body    int64  // bytes; a multiple of tier.Page
	// Sums are the xxh3-64 of each SumChunk bytes of the body; the last chunk may be shorter. Nil
	// in a Table that is not summed.
	Sums []uint64

	// Dictionaries are the images that nodes Outside refer to by their place
	// here; each may have dictionaries itself. Nil if there are none.
	Dictionaries []*Descriptor
	// From is nil but in a dictionary that extends another one, its base: the only one of
	// Dictionaries. Of buffer i, the first From[i] bytes are the base's (which may in turn have
	// them from its own base), and the rest is in Buffers[i]; a multiple of 8. Rows and Nodes are
	// those of the whole array. A program that needs the array in one piece opens the batch as a
	// record, exports it by cdevice, or copies the parts.
	From []int64
	// Metadata is the record's own, beside its schema's; nil if it has none.
	Metadata *arrow.Metadata
}

// AllDictionaries returns every dictionary image that is needed to open this
// one: its own, and those that they need, each once and after those that it
// needs itself.
func (d *Descriptor) AllDictionaries() []*Descriptor {
	var seen lookup.Table[*Descriptor]
	return d.collect(nil, &seen)
}

func (d *Descriptor) collect(all []*Descriptor, seen *lookup.Table[*Descriptor]) []*Descriptor {
	for _, dict := range d.Dictionaries {
		if seen.Of(all, dict) < 0 {
			all = append(dict.collect(all, seen), dict)
		}
	}
	return all
}

// Cuts returns, ascending, the multiples of tier.Page inside (0, Body) at which
// no Arrow buffer is cut: where the body may be split between two pieces of
// memory so that it can still be opened in place.
func (d *Descriptor) Cuts() []int64 {
	spans := d.Buffers
	if !inOrder(spans) {
		spans = slices.Clone(spans)
		slices.SortFunc(spans, func(a, b Span) int { return cmp.Compare(a.Offset, b.Offset) })
	}
	var cuts []int64
	next := int64(tier.Page) // the first place that is not decided yet
	free := func(until int64) {
		for ; next <= until && next < d.Body; next += tier.Page {
			cuts = append(cuts, next)
		}
	}
	for _, s := range spans {
		if s.Offset < 0 || s.Length <= 0 {
			continue
		}
		free(s.Offset)
		if end := s.Offset + s.Length; end > next { // places inside s are passed over
			next = (end + tier.Page - 1) / tier.Page * tier.Page
		}
	}
	free(d.Body)
	return cuts
}

// inOrder reports whether the spans that are there ascend, as every layout of
// Spillway's makes them.
func inOrder(spans []Span) bool {
	last := int64(0)
	for _, s := range spans {
		if s.Offset < 0 {
			continue
		}
		if s.Offset < last {
			return false
		}
		last = s.Offset
	}
	return true
}

// Shared is the image of a dictionary in one space, of which the batches there
// that use the dictionary hold a reference each. Implementations are comparable
// and safe for concurrent use.
type Shared interface {
	// Descriptor returns what the bytes mean, and which dictionary it is.
	Descriptor() *Descriptor
	// Buffer returns the body's memory, which is there while a reference is.
	Buffer() *tier.Buffer
	// Release gives one reference up; the last one frees the memory.
	Release() error
}

// body is what the built-in payloads have in common: owned buffers in one space, a descriptor, and
// a reference to each dictionary, in the same space.
type body struct {
	desc     *Descriptor
	space    *tier.Space
	bytes    int64 // what bufs are charged
	bufs     []*tier.Buffer
	shared   []Shared
	released atomic.Bool
}

// hold takes over buffers, of which those that are nil have no bytes, and references to
// dictionaries.
func (p *body) hold(bufs []*tier.Buffer, shared []Shared) {
	p.bufs, p.shared = bufs, shared
	for _, b := range bufs {
		p.bytes += b.Charge()
	}
}

// check panics on parts that do not fit together, because that is a bug in a converter. name is for
// the message.
func (p *body) check(name string) {
	if p.desc == nil || p.space == nil {
		panic("payload: " + name + " needs a descriptor and a space")
	}
	for _, b := range p.bufs {
		if b != nil && b.Space() != p.space {
			panic("payload: a buffer of " + name + " lies in another space")
		}
	}
	dicts := p.desc.AllDictionaries()
	if len(dicts) != len(p.shared) {
		panic("payload: " + name + " does not have the dictionaries that it needs")
	}
	for i, dict := range dicts {
		switch s := p.shared[i]; {
		case s.Descriptor() != dict:
			panic("payload: " + name + " has another dictionary than the one it needs")
		case s.Buffer() != nil && s.Buffer().Space() != p.space:
			panic("payload: a dictionary of " + name + " lies in another space")
		}
	}
}

// Space returns where the payload lies.
func (p *body) Space() *tier.Space { return p.space }

// Bytes returns what the payload's own buffers are charged in its space; dictionaries,
// which it shares, do not count.
func (p *body) Bytes() int64 { return p.bytes }

// Descriptor returns what the bytes mean. Its spans are places in an image that is not
// compressed.
func (p *body) Descriptor() *Descriptor { return p.desc }

// Shared returns the dictionaries, in the order of Descriptor.AllDictionaries.
// They stay the payload's, and must not be changed.
func (p *body) Shared() []Shared { return p.shared }

// EachShared calls f with the memory of each dictionary.
func (p *body) EachShared(f func(*tier.Buffer)) {
	for _, s := range p.shared {
		if b := s.Buffer(); b != nil { // not an empty dictionary's
			f(b)
		}
	}
}

// Leased returns how many readers hold the memory beyond the payload.
func (p *body) Leased() (n int) {
	for _, b := range p.bufs {
		n += b.Leased()
	}
	return n
}

// OnUnleased sets what is called when no reader holds memory of any of the buffers any more; see
// tier.Buffer.OnUnleased. Leases that end at the same moment on two goroutines may call it twice.
func (p *body) OnUnleased(f func()) {
	last := f
	if len(p.bufs) > 1 && f != nil {
		last = func() {
			if p.Leased() == 0 {
				f()
			}
		}
	}
	for _, b := range p.bufs {
		b.OnUnleased(last)
	}
}

// Hold leases the payload's memory, and that of its dictionaries, until end is called. ok is false
// if memory is gone.
func (p *body) Hold() (end func(), ok bool) {
	var ends []func()
	release := func() {
		for _, end := range slices.Backward(ends) {
			end()
		}
	}
	defer func() {
		if !ok { // also where a program's dictionary panics
			release()
		}
	}()
	all := slices.Clone(p.bufs)
	p.EachShared(func(b *tier.Buffer) { all = append(all, b) })
	for _, b := range all {
		one, held := b.TryLease()
		if !held {
			return nil, false
		}
		ends = append(ends, one)
	}
	return release, true
}

// Buffers returns the payload's own memory, which stays the payload's. The slice must not be
// changed.
func (p *body) Buffers() []*tier.Buffer { return p.bufs }

// Release gives the buffers and the references to dictionaries up; memory that
// readers hold a lease on stays until the last lease ends. A second release changes nothing and
// returns tier.ErrReleased; an invariants build panics.
func (p *body) Release() (err error) {
	if !p.released.CompareAndSwap(false, true) {
		if invariants.Enabled {
			panic("payload: a payload was released twice")
		}
		return tier.ErrReleased
	}
	for _, b := range p.bufs {
		err = errors.Join(err, b.Release())
	}
	for _, s := range p.shared {
		err = errors.Join(err, releaseShared(s))
	}
	return err
}

// releaseShared makes a panic an error, because the dictionaries after s must be released, too.
func releaseShared(s Shared) (err error) {
	defer guard.Error(&err, "Shared.Release")
	return s.Release()
}

// Image is the payload of the three forms GPUImage, HostImage and DiskImage. It is the bytes of a
// batch in the one layout that all tiers share, in a buffer of any space, and a reference to each
// dictionary that it needs, in the same space.
type Image struct{ body }

// NewImage is documented at batch.NewImage.
func NewImage(d *Descriptor, buf *tier.Buffer, space *tier.Space, shared ...Shared) *Image {
	p := &Image{body{desc: d, space: space}}
	var bufs []*tier.Buffer
	if buf != nil {
		bufs = []*tier.Buffer{buf}
	}
	p.hold(bufs, shared)
	p.check("an image")
	if buf.Size() < d.Body {
		panic("payload: an image's buffer is shorter than its body")
	}
	return p
}

// Type returns the form's name by the tier of its space.
func (p *Image) Type() Type { return ImageType(p.space.Kind()) }

// Buffer returns the body's memory, nil if the body is empty. It stays the
// image's.
func (p *Image) Buffer() *tier.Buffer {
	if len(p.bufs) == 0 {
		return nil
	}
	return p.bufs[0]
}
