// Package payload has Image, the built-in payload of batches, and the descriptor of its bytes.
// Package batch has names for what programs need of them: their converters make and read images.
//
//	Image ──▶ Descriptor ──▶ Node, Span    what the bytes mean, in every tier and encoding
//	  ├─────▶ Run, or DeviceRange          how they are stored: compressed, or scattered
//	  └─────▶ Shared                       a dictionary in the same space, which batches share
//
// An image owns its memory and one reference to each dictionary that it shares. It has no locks, and
// is safe for concurrent use.
package payload

import (
	"cmp"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/tier"
)

// Type names a type of payload; see batch.PayloadType.
type Type string

// The types of an Image.
const (
	// PlainImage is the body as the descriptor describes it, in one buffer.
	PlainImage Type = "image"
	// CompressedImage is the body in runs, in one buffer in host memory or on disk. Dictionaries that
	// are images of their own are not compressed: they are shared with plain images.
	CompressedImage Type = "compressed"
	// ScatteredImage is the Arrow buffers at separate places of a device, as GPU libraries such as
	// libcudf make them: allocated one by one, or borrowed from their creator.
	ScatteredImage Type = "scattered"
)

const (
	// SumChunk is how many bytes of a body one checksum covers, unless Descriptor.Block is set. What
	// is read to get at one column begins and ends at a multiple of it, so it is small compared with
	// a column; shorter runs would cost speed where bodies are laid out.
	SumChunk = 64 << 10
	// RowBlock is Descriptor.Block of batches that are to be read some rows at a time.
	RowBlock = tier.Page
)

// Node is the length and the number of nulls of one array of a batch; or, with
// Nulls Outside, the place of an array that is in an image of its own.
type Node struct {
	Length int64 // rows; outside: an index into Descriptor.Dictionaries
	Nulls  int64 // of them null
}

// Outside is what Node.Nulls is for an array that is not in the batch's own
// body. It has no further nodes and no buffers there.
const Outside = -1

// Span is where one Arrow buffer is in a body, in bytes.
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
//
// In JSON, in the files of persisted batches, it lacks its schema, dictionaries and metadata.
type Descriptor struct {
	Schema  *arrow.Schema `json:"-"`
	Rows    int64
	Nodes   []Node // one for each array
	Buffers []Span // one for each buffer of each array
	Body    int64  // bytes; a multiple of tier.Page
	// Sums are the xxh3-64 of each SumBlock bytes of the body; the last block may be shorter. Nil
	// in a scattered image that is not summed.
	Sums []uint64
	// Block is how many bytes one of Sums covers: a power of two from tier.Page to SumChunk. 0 means
	// SumChunk.
	Block int64

	// Dictionaries are the images that nodes Outside refer to by their place
	// here; each may have dictionaries itself. Nil if there are none.
	Dictionaries []*Descriptor `json:"-"`
	// From is nil but in a dictionary that extends another one, its base: the only one of
	// Dictionaries. Of buffer i, the first From[i] bytes are the base's (which may in turn have
	// them from its own base), and the rest is in Buffers[i]; a multiple of 8. Rows and Nodes are
	// those of the whole array. A program that needs the array in one piece opens the batch as a
	// record, exports it by cdevice, or copies the parts.
	From []int64
	// Metadata is the record's own, besides its schema's; nil if it has none.
	Metadata *arrow.Metadata `json:"-"`
}

// SumBlock returns how many bytes of the body one checksum covers.
func (d *Descriptor) SumBlock() int64 { return cmp.Or(d.Block, SumChunk) }

// Frame returns how many bytes of a compressed body are compressed for themselves: FrameSize, or a
// block if blocks are shorter than SumChunk. Merging 200 runs of 1 MiB in 48 MiB, frames of 4, 8 and 16
// KiB made the runs 115, 114 and 113 MiB long, of which 164, 188 and 243 MiB were read.
func (d *Descriptor) Frame() int64 { return cmp.Or(d.Block, FrameSize) }

// AllDictionaries returns every dictionary image that is needed to open this
// one: its own, and those that they need, each once and after those that it
// needs itself.
func (d *Descriptor) AllDictionaries() []*Descriptor {
	if len(d.Dictionaries) == 0 { // almost all
		return nil
	}
	return d.collect(nil, make(map[*Descriptor]bool))
}

func (d *Descriptor) collect(all []*Descriptor, seen map[*Descriptor]bool) []*Descriptor {
	for _, dict := range d.Dictionaries {
		if !seen[dict] {
			seen[dict] = true
			all = append(dict.collect(all, seen), dict)
		}
	}
	return all
}

// Cuts returns, ascending, the multiples of tier.Page inside (0, Body) at which no Arrow buffer is
// cut: where the body may be split between two pieces of memory so that it can still be opened in
// place.
func (d *Descriptor) Cuts() []int64 {
	byOffset := func(a, b Span) int { return cmp.Compare(a.Offset, b.Offset) }
	spans := slices.DeleteFunc(slices.Clone(d.Buffers), func(s Span) bool { return s.Offset < 0 || s.Length <= 0 })
	if !slices.IsSortedFunc(spans, byOffset) { // the layout is a program's
		slices.SortFunc(spans, byOffset)
	}
	var cuts []int64
	next := int64(tier.Page) // the first place that is not decided yet
	for _, s := range append(spans, Span{Offset: d.Body}) {
		for ; next <= s.Offset && next < d.Body; next += tier.Page {
			cuts = append(cuts, next)
		}
		if end := s.Offset + s.Length; end > next { // places inside s are passed over
			next = (end + tier.Page - 1) / tier.Page * tier.Page
		}
	}
	return cuts
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
