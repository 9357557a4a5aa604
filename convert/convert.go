// Package convert knows how batches look in memory and how they get from one
// memory to another.
//
// # The image
//
// A batch's bytes have one layout in all tiers, its image: the Arrow buffers in
// schema order, depth first, each at a multiple of 64 bytes and the large ones at a
// page. Layout makes it out of a record, with a checksum for each 64 KiB; Open makes a
// record out of it again, in place. Between the two nothing but bytes is copied.
//
//	arrow.RecordBatch ──Layout──▶ image (GPU) ◀─▶ image (host) ◀─▶ image (disk)
//	                                   ▲                │               ▲
//	                                   └────────────────┼───────────────┘
//	arrow.RecordBatch ◀───────Open──────────────────────┘
//
// # Converters and moves
//
// A Registry holds the converters, one function for a pair of payload types. The built-in ones are
// between images, and between images and tables. A Mover is the one way to move: it reserves in the
// target, locks the batch for transit, converts, commits, and releases the source; on any failure
// the batch is whole where it was and all that was taken is given back.
//
// A program may have forms of its own: payloads of a type of its own, and a converter for
// each way that they are to go. One to batch.HostImage is what Record, Columns and a
// repository's Reader need. A form that has a method Descriptor is given room for the
// descriptor's body, others for as many bytes as they take where they are. Registry.Wrap puts
// a function around a converter, also around a built-in one.
//
// Package internal/transfer documents what the built-in converters do, and in which order they take
// what they need. Package internal/image documents how a batch's bytes are laid out.
//
// # Locks
//
// The Registry's mutex has the rank Registry and is not held while a converter
// runs. A Mover has a mutex for its counters, under which nothing is called.
package convert

import (
	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/codec"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/image/columns"
	"github.com/spillway-db/spillway/internal/payload"
)

// What a converter of a program's own needs to make and to read images.
type (
	// Layout is the plan of one record batch's image, and the writer of its bytes.
	Layout = image.Layout
	// InvalidError reports that the parts of an array do not fit together.
	InvalidError = image.InvalidError
	// CorruptError reports that the bytes of an image are not those that were laid out.
	CorruptError = image.CorruptError
)

// Which columns and rows of a batch Mover.Columns opens.
type (
	// Selection says which columns and which rows of a batch are wanted.
	Selection = columns.Selection
	// SelectionError says what a batch does not have that a Selection wants.
	SelectionError = columns.SelectionError
)

// What Mover.AdoptTable takes.
type (
	// DeviceTable is a table in a device's memory that code outside the engine has made.
	DeviceTable = image.DeviceTable
	// DeviceArray is an Arrow array whose buffers lie in a device's memory.
	DeviceArray = image.DeviceArray
	// DeviceRange is where one of these buffers lies. The zero value is one that is absent, or has
	// no bytes.
	DeviceRange = payload.DeviceRange
)

// Codec says how what is written to disk is compressed. The zero value is CodecAuto.
type Codec = codec.Codec

// The codecs. A batch that is not compressed is written as it is, straight from where it
// lies; one that is compressed is a batch.DiskPacked.
const (
	CodecAuto    = codec.Auto // whichever moves most, as measured
	CodecNone    = codec.None
	CodecS2      = codec.S2      // github.com/klauspost/compress/s2, a faster Snappy
	CodecZstd    = codec.Zstd    // Zstandard, at its fastest
	CodecBitpack = codec.Bitpack // numbers in as few bits as they need
)

// ParseCodec reads what Codec.String writes.
func ParseCodec(s string) (Codec, error) { return codec.Parse(s) }

// Unknown is a number that the creator of an array does not give.
const Unknown = image.Unknown

// Errors to compare with errors.Is.
var (
	ErrInvalid   = image.ErrInvalid     // matches every *InvalidError
	ErrCorrupt   = image.ErrCorrupt     // matches every *CorruptError
	ErrSelection = columns.ErrSelection // matches every *SelectionError
)

// NewLayout plans the image of rec, and retains rec until Close. A schema that is not
// little-endian is tier.ErrNotSupported, an array whose parts do not fit together an *InvalidError.
func NewLayout(rec arrow.RecordBatch) (*Layout, error) { return image.NewLayout(rec) }

// LogicalBytes returns how many bytes the buffers of rec have in an image, without the
// alignment between them: slices count what they show, and a dictionary that columns share
// counts once. It is 0 for a record that cannot be laid out.
func LogicalBytes(rec arrow.RecordBatch) int64 { return image.LogicalBytes(rec) }

// Open returns the record whose image lies in extents, in place. release is called once, when the
// last buffer is released. dictionaries are the extents of d.AllDictionaries, in that order. All
// must stay as they are until then. What does not fit together is an *InvalidError.
func Open(d *batch.Descriptor, extents [][]byte, release func(), dictionaries ...[][]byte) (arrow.RecordBatch, error) {
	return image.Open(d, extents, release, dictionaries...)
}

// Verify checks that b is the chunk-th run of 64 KiB of the body that d describes.
// Other bytes are a *CorruptError with the chunk's offset in the body.
func Verify(d *batch.Descriptor, chunk int, b []byte) error { return image.Verify(d, chunk, b) }

// DifferenceError is where two records differ first.
type DifferenceError = equal.DifferenceError

// Equal compares what two records say and returns nil, or a *DifferenceError with the first
// column and row that differ. Metadata is compared, too. What lies under a null does not count, nor
// how a value is reached: a dictionary equals its values. Floating-point numbers are compared by
// their bits.
//
// The Dictionary method of arrow-go's arrays writes at its first call. Before several goroutines
// compare one record, that call must have happened.
func Equal(a, b arrow.RecordBatch) error { return equal.Records(a, b) }
