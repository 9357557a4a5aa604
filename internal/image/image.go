// Package image defines the bytes of a batch: it plans where the Arrow buffers of a record go in
// one body of memory, writes them, opens them again in place, and verifies them. All tiers share
// this layout, so a move between tiers copies bytes and never looks at values.
//
// The package does no I/O and takes no memory from a space. Package internal/transfer does both: it
// allocates the body, gives it to this package as byte slices (extents), and moves it.
//
//	arrow.RecordBatch --NewLayout, WriteTo--> image --Open--> arrow.RecordBatch
//	DeviceTable --PlanTable--> TablePlan --PartsOf--> Parts   where a table's buffers go in an image
//
// Writing has two steps, because memory must be reserved before anything is written. NewLayout
// plans: it walks the arrays, checks them, and computes the length of the body. Write then lays out
// the bytes and computes a checksum for each block. A table on a device is planned by the same
// planner. Its bytes cannot be read here, so the plan lists the copies, and what must be read to
// make the plan.
//
// Reading has one step. Open makes arrays whose buffers are slices of the extents, and copies
// nothing. A Lease counts these buffers and calls a function when the last one is released. Bytes
// from a disk must be verified first; Summer does that while they are read.
//
//	plan.go         planner: walks the arrays of a record, or of a table on a device, and decides
//	                where each buffer goes
//	plan_nested.go  what the planner does for runs, unions, list views and string views
//	layout.go       Layout: the plan of a record, and the writer of the bytes and checksums
//	moved.go        buffers that change as they are written: offsets, bitmaps, views
//	extend.go       dictionaries that share their first values with an earlier one
//	cursor.go       Cursor: reads a descriptor along its schema's types
//	open.go         Open: a record in place; verify.go: checks bytes as they are read
//	table_plan.go   what must be read of a device to plan a table; table_parts.go: its copies
//
// Some columns and rows of an image are read by these; all three find the buffers in walk.go:
//
//	Selection --Of--> Columns --Within--> descriptor            of an image that has all of its bytes
//	                     +--Plan--> ColumnsPlan --Open--> record  of what is read of an image on disk
//	descriptor --NewRows--> Rows --Next--> record               some rows at a time, in little memory
//
// Records, tables and descriptors may come from code outside the engine, or from a file. So every
// length and offset is checked before it is used as an index, and a mismatch is an *InvalidError.
// Values are not checked, except for those that say where other values are.
//
// All walks use the table of types in package shape. The comment at Layout specifies the image.
// docs/formats.md has the part that programs may rely on. The package has no locks. Descriptors are
// immutable and shared; all other types belong to one goroutine, except for Lease.
package image

import (
	"errors"
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/endian"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

// ErrInvalid matches every *InvalidError.
var ErrInvalid = errors.New("invalid array")

// InvalidError reports that the parts of an array do not fit together, in a record or a table to
// lay out or in a descriptor to open.
type InvalidError struct {
	// Path is the column and what is in it, as "a.[].b"; empty for the record as a whole.
	Path    string
	Problem string
}

func (e *InvalidError) Error() string {
	if e.Path == "" {
		return "convert: invalid record: " + e.Problem
	}
	return fmt.Sprintf("convert: invalid array %s: %s", e.Path, e.Problem)
}

// Is matches ErrInvalid.
func (e *InvalidError) Is(target error) bool { return target == ErrInvalid }

// CheckEndian returns an error that matches tier.ErrNotSupported for a schema that is not
// little-endian. An image has the record's own bytes, and all readers, also those on a GPU, take
// them as little-endian.
func CheckEndian(s *arrow.Schema) error {
	if e := s.Endianness(); e != endian.LittleEndian {
		return fmt.Errorf("convert: a %s-endian schema: only little-endian data is kept: %w", e, tier.ErrNotSupported)
	}
	return nil
}

// ErrCorrupt matches every *CorruptError.
var ErrCorrupt = errors.New("corrupt")

// CorruptError reports that the bytes of an image are not those that were laid out: the checksum of
// a block differs, or the block cannot be uncompressed or decrypted.
type CorruptError struct {
	// Batch is set by the callers who know it; 0 means that it is not known. Volume is where the
	// bytes were read from; empty means from memory.
	Batch  batch.ID
	Volume string
	Offset int64  // of the chunk: in the volume, or without one in the body
	Want   uint64 // the checksum in the descriptor
	Got    uint64 // that of the bytes
	Cause  error  // why they cannot be uncompressed, or a *tier.AlteredError; nil if the checksums differ
}

func (e *CorruptError) Error() string {
	s := "convert: corrupt data"
	if e.Batch != 0 {
		s += fmt.Sprintf(" of batch %d", e.Batch)
	}
	if e.Volume != "" {
		s += " on " + e.Volume
	}
	if e.Cause != nil {
		return fmt.Sprintf("%s at offset %d: %v", s, e.Offset, e.Cause)
	}
	return fmt.Sprintf("%s at offset %d: checksum %016x, want %016x", s, e.Offset, e.Got, e.Want)
}

// Unwrap returns Cause.
func (e *CorruptError) Unwrap() error { return e.Cause }

// Is matches ErrCorrupt.
func (e *CorruptError) Is(target error) bool { return target == ErrCorrupt }

// Verify checks that b is block number chunk of the body that d describes: d.SumBlock bytes, or
// fewer at the end of the body. If the checksum differs, it returns a *CorruptError with the
// block's offset in the body. A wrong length or number is another error, because it is the caller's
// mistake.
func Verify(d *batch.Descriptor, chunk int, b []byte) error {
	if d == nil {
		return errors.New("convert: verifying a chunk: the descriptor is nil")
	}
	if chunk < 0 || chunk >= len(d.Sums) {
		return fmt.Errorf("convert: chunk %d of %d", chunk, len(d.Sums))
	}
	off := int64(chunk) * d.SumBlock()
	if n := min(d.Body-off, d.SumBlock()); int64(len(b)) != n {
		return fmt.Errorf("convert: chunk %d has %d bytes, not %d", chunk, n, len(b))
	}
	sum := Summer{Desc: d}
	return sum.Add(b, off)
}

// View returns the n bytes at off of extents as one slice. If they are in several extents, it
// returns only those in the first of these; it returns nil if off is behind the last. The slice's
// capacity ends with it, so an append cannot write into the bytes that follow.
func View(extents [][]byte, off, n int64) []byte {
	for _, e := range extents {
		if off < int64(len(e)) {
			end := min(off+n, int64(len(e)))
			return e[off:end:end]
		}
		off -= int64(len(e))
	}
	return nil
}

// Stretch returns the n bytes at off of extents, without copying, if they are in one extent; else
// nil. An Arrow buffer must be in one piece, so opening in place depends on it. The layout makes it
// possible: see payload.Descriptor.Cuts.
func Stretch(extents [][]byte, off, n int64) []byte {
	if p := View(extents, off, n); int64(len(p)) == n {
		return p
	}
	return nil
}

// Gather copies len(dst) bytes at off of extents to dst. It fails if the extents end before.
func Gather(dst []byte, extents [][]byte, off int64) error {
	return Across(extents, off, int64(len(dst)), func(p []byte) error { dst = dst[copy(dst, p):]; return nil })
}

// Across calls f for the part of the n bytes at off that each extent has, in order, and stops at
// the first error. If the extents end too early, it returns an error, after it has called f for
// what there is.
func Across(extents [][]byte, off, n int64, f func([]byte) error) error {
	for _, e := range extents {
		if off >= int64(len(e)) {
			off -= int64(len(e))
			continue
		}
		p := e[off:min(int64(len(e)), off+n)]
		if err := f(p); err != nil {
			return err
		}
		off, n = 0, n-int64(len(p))
		if n == 0 {
			return nil
		}
	}
	if n > 0 {
		return fmt.Errorf("convert: memory ends %d bytes before what it should hold", n)
	}
	return nil
}
