// Package convert makes batches of Arrow records, moves them between memories, and opens them as
// records again. The Mover does all three.
//
//	mover.go         Mover and its calls: Move, Acquire, Consume
//	move.go          run: one move, from the look at the batch to the commit, and why it is retried
//	reserving.go     request: room for a move, in other spaces if one refuses its memory
//	waiting.go       what ends a wait: the batch was moved or dropped, or its GPU is lost
//	ingest.go        Ingest: a record becomes an image (the first half of Repository.Put)
//	registry.go      the converters, and which of their errors are the batch's own
//	record.go        Record: a batch becomes an Arrow record; columns.go: some of its columns
//	clone.go         Clone
//	table_adopt.go   AdoptTable: GPU memory of other code becomes a batch
//	together.go      Evict, for the monitor: small batches go to a disk with one write
//	pre_clean.go     pre-cleaning: adds a clean image on a disk while the batch stays
//	events.go        events; stats.go: counters; measure.go: Measure
//
// None of these files copies bytes: package internal/transfer does, and package internal/image lays
// them out.
//
// # The image
//
// A batch's bytes have one layout in all tiers, its image: the Arrow buffers in
// schema order, depth first, each at a multiple of 64 bytes and the large ones at a
// page. A Layout writes it from a record, with a checksum for each 64 KiB. Open returns a record
// whose buffers are the image's bytes, in place. Moves between the two only copy bytes.
//
//	arrow.RecordBatch --Layout--> image (GPU) <-> image (host) <-> image (disk)
//	                                   ^                |               ^
//	                                   +----------------+---------------+
//	arrow.RecordBatch <-------Open----------------------+
//
// # Converters and moves
//
// A Registry holds the converters, keyed by the forms of source and target: a type of payload in a
// tier. One built-in converter is registered for all pairs of an image's forms. All moves go through a
// Mover: it reserves in the target, takes the batch in transit, converts, commits, and releases the
// source. After any failure the batch is whole where it was, and the Mover has given back everything
// that it took.
//
// Where the free room of the target is in pieces, the allocation of a move that waits evicts
// batches (reservation.Config.Clear), while the move has its batch in transit and perhaps a permit.
// These evictions are moves of the monitor, which wait for no batch and no permit of a program, so
// they end. If they are not enough, the move gives everything back, waits until more memory was
// freed, and tries again.
//
// A program may bring payloads of its own. They need a converter to a plain image in host memory, and
// one from it to each form that its batches should have again. Other moves go by way of such an image
// (see route), and in a tier without a converter the batch is an ordinary image that remembers its
// type. So it is evicted and fetched like any other. Record, Columns and a repository's Reader use the
// converter to the image, too. For a payload with a method Descriptor the Mover reserves the
// descriptor's body, for others as many bytes as they are charged where they are. Registry.Wrap
// replaces a converter, built-in ones included, by a function that may call it.
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
	"github.com/spillway-db/spillway/internal/payload"
)

// Types with which a program's own converters make and read images.
type (
	// Layout is the plan of one record batch's image, and the writer of its bytes.
	Layout = image.Layout
	// InvalidError reports that the parts of an array do not fit together.
	InvalidError = image.InvalidError
	// CorruptError reports that the bytes of an image are not those that were laid out.
	CorruptError = image.CorruptError
)

// Types for Mover.Columns.
type (
	// Selection selects columns and rows of a batch.
	Selection = image.Selection
	// SelectionError reports that a batch lacks a column or a row of a Selection.
	SelectionError = image.SelectionError
)

// Types for Mover.AdoptTable.
type (
	// DeviceTable is a table in a device's memory that code outside the engine has made.
	DeviceTable = image.DeviceTable
	// DeviceArray is an Arrow array whose buffers are in a device's memory.
	DeviceArray = image.DeviceArray
	// DeviceRange is where one of these buffers is. The zero value is one that is absent, or has
	// no bytes.
	DeviceRange = payload.DeviceRange
)

// Codec is how batches are compressed on disk. The zero value is CodecAuto.
type Codec = codec.Codec

// The codecs. With CodecNone a batch is written from its own memory, as a batch.PlainImage;
// a compressed batch is a batch.CompressedImage.
const (
	CodecAuto    = codec.Auto // the one that moves the most bytes a second, as measured
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
	ErrInvalid   = image.ErrInvalid   // matches every *InvalidError
	ErrCorrupt   = image.ErrCorrupt   // matches every *CorruptError
	ErrSelection = image.ErrSelection // matches every *SelectionError
)

// NewLayout plans the image of rec, and retains rec until Close. A schema that is not
// little-endian is tier.ErrNotSupported, an array whose parts do not fit together an *InvalidError.
func NewLayout(rec arrow.RecordBatch) (*Layout, error) { return image.NewLayout(rec, image.MaxInline) }

// LogicalBytes returns how many bytes the buffers of rec have in an image, without the
// alignment between them: slices count what they show, and a dictionary that columns share
// counts once. It is 0 for a record that cannot be laid out.
func LogicalBytes(rec arrow.RecordBatch) int64 { return image.LogicalBytes(rec) }

// Open returns the record whose image is in extents, in place. release is called once, when the
// last buffer is released. dictionaries are the extents of d.AllDictionaries, in that order. All
// must stay as they are until then. If they do not fit together, the error is an *InvalidError.
func Open(d *batch.Descriptor, extents [][]byte, release func(), dictionaries ...[][]byte) (arrow.RecordBatch, error) {
	return image.Open(d, extents, release, dictionaries...)
}

// Verify checks that b is the chunk-th run of 64 KiB of the body that d describes.
// Other bytes are a *CorruptError with the chunk's offset in the body.
func Verify(d *batch.Descriptor, chunk int, b []byte) error { return image.Verify(d, chunk, b) }

// DifferenceError is where two records differ first.
type DifferenceError = equal.DifferenceError

// Equal compares the values of two records and returns nil, or a *DifferenceError with the first
// column and row that differ. Metadata is compared, too. Bytes under a null are not compared, and a
// dictionary equals its values. Floating-point numbers are compared by their bits.
//
// The Dictionary method of arrow-go's arrays writes at its first call. Before several goroutines
// compare one record, that call must have happened.
func Equal(a, b arrow.RecordBatch) error { return equal.Records(a, b) }
