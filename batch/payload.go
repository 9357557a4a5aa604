package batch

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// PayloadType names a form that a batch's data can have. Converters are
// registered by pairs of them; users may bring their own.
type PayloadType = payload.Type

// The built-in forms. A packed one is an image whose bytes are compressed. A table's Arrow buffers
// are scattered over a device's memory, as GPU libraries make them.
const (
	GPUImage   = payload.GPUImage
	HostImage  = payload.HostImage
	DiskImage  = payload.DiskImage
	HostPacked = payload.HostPacked
	DiskPacked = payload.DiskPacked
	GPUTable   = payload.GPUTable
)

// ImageType returns the form that an image has in tier k, and "" for an invalid
// tier.
func ImageType(k tier.Kind) PayloadType {
	if !k.Valid() {
		return ""
	}
	return payload.TypeOf(k, payload.Plain)
}

// Payload is the form that a batch has now. It is immutable except for its release,
// and owned by one batch, which releases it. Implementations are comparable (a
// pointer, as a rule) and safe for concurrent use.
//
// A payload may have a method Descriptor() *Descriptor that returns the batch's schema and rows. It
// may have the methods Leased() int and OnUnleased(func()). They show that readers still hold its
// memory, which its release will then not free at once, and when that is over; see
// tier.Buffer.OnUnleased.
type Payload interface {
	Type() PayloadType
	// Space returns where the bytes lie; never nil.
	Space() *tier.Space
	// Bytes returns what the payload is charged in its space.
	Bytes() int64
	// Release gives the memory up. All device work that uses it must be done.
	// The only error is tier.ErrReleased, for a second call.
	Release() error
}

// described and leased are the optional parts of a Payload.
type (
	described interface{ Descriptor() *Descriptor }
	leased    interface {
		Leased() int
		OnUnleased(f func())
	}
)

// What the built-in forms of a batch's data are made of.
type (
	// Image is the bytes of a batch in the one layout that all tiers share, in a buffer of any
	// space: the payload of GPUImage, HostImage and DiskImage.
	Image = payload.Image
	// Descriptor describes the bytes of an image. It is immutable once made, and one descriptor is
	// shared by all forms that a batch takes in its life.
	Descriptor = payload.Descriptor
	// Shared is the image of a dictionary in one space, of which the batches there that use the
	// dictionary hold a reference each.
	Shared = payload.Shared
)

// NewImage returns the image that d describes, whose body is in buf. It takes
// buf over: Release releases it. buf is nil if, and only if, the body is empty;
// then space is where the image counts, and else it must be the
// buffer's. shared are d's AllDictionaries in their order, in the same space: one
// reference to each, which the image takes over and releases with itself. NewImage
// panics on arguments that break this, because that is a bug in a converter.
func NewImage(d *Descriptor, buf *tier.Buffer, space *tier.Space, shared ...Shared) *Image {
	return payload.NewImage(d, buf, space, shared...)
}

// ErrUnmovable is matched by every UnmovableError.
var ErrUnmovable = errors.New("batch: it cannot be converted")

// UnmovableError reports that a batch could not be given another form for a reason that is its
// own: no converter takes its form, its bytes are corrupt, or a converter refused it or
// panicked. The batch is as it was, and other batches can still be moved between the same
// spaces. It matches ErrUnmovable, and what Err matches.
type UnmovableError struct {
	Batch ID // 0 where it is not known
	Err   error
}

func (e *UnmovableError) Error() string {
	if e.Batch == 0 {
		return e.Err.Error()
	}
	return fmt.Sprintf("batch %d cannot be converted: %v", e.Batch, e.Err)
}

// Unwrap returns ErrUnmovable and Err.
func (e *UnmovableError) Unwrap() []error { return []error{ErrUnmovable, e.Err} }

// payloadTraits is what the methods of a payload have returned. They do not change.
type payloadTraits struct {
	form  PayloadType
	space *tier.Space
	bytes int64
	desc  *Descriptor // nil if the payload has none
}

// inspect calls the methods of a payload that is offered, before anything changes. A panic is an error.
func inspect(p Payload) (s payloadTraits, err error) {
	defer guard.Error(&err, "a method of a payload")
	if d, ok := p.(described); ok {
		s.desc = d.Descriptor()
	}
	s.form, s.space, s.bytes = p.Type(), p.Space(), p.Bytes()
	return s, nil
}

// holdLocked makes p, which may be nil, the batch's payload. The batch keeps its descriptor if p
// has none.
func (b *Batch) holdLocked(p Payload, traits payloadTraits) {
	b.mu.payload, b.mu.traits = p, traits
	if traits.desc != nil {
		b.mu.desc = traits.desc
	}
}
