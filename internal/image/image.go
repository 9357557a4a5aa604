// Package image lays out the bytes of a batch, and opens and verifies them. It does no I/O and
// takes no memory from a space: package internal/transfer does.
//
//	arrow.RecordBatch --NewLayout, WriteTo--> image --Open--> arrow.RecordBatch
//	DeviceTable --PlanTable--> TablePlan --PartsOf--> Parts   where a table's buffers go in an image
//
//	plan.go         planner: walks the arrays of a record, or of a table on a device, and decides
//	                where each buffer goes
//	plan_nested.go  what the planner does for runs, unions, list views and string views
//	layout.go       Layout: the plan of a record, and the writer of the bytes and checksums
//	moved.go        buffers that change as they are written: offsets, bitmaps, views
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
// All walks use the table of types in package shape. The comment at Layout specifies the image.
// docs/formats.md has the part that programs may rely on.
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

// InvalidError reports that the parts of an array do not fit together, in a record to lay out or in
// a descriptor to open.
type InvalidError struct {
	Path    string // the column and what is in it, "a.[].b"; empty for the whole
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

// CheckEndian returns tier.ErrNotSupported for a schema that is not little-endian. Its bytes are
// not swapped: an image is copied as it is.
func CheckEndian(s *arrow.Schema) error {
	if e := s.Endianness(); e != endian.LittleEndian {
		return fmt.Errorf("convert: a %s-endian schema: only little-endian data is kept: %w", e, tier.ErrNotSupported)
	}
	return nil
}

// ErrCorrupt matches every *CorruptError.
var ErrCorrupt = errors.New("corrupt")

// CorruptError reports that the bytes of an image are not those that were laid
// out: the checksum of a chunk is another.
type CorruptError struct {
	Batch  batch.ID // 0 where it is not known
	Volume string   // where the bytes were read from; empty if from memory
	Offset int64    // of the chunk: in the volume, or without one in the body
	Want   uint64   // the checksum in the descriptor
	Got    uint64   // that of the bytes
	Cause  error    // why they cannot be uncompressed, or a *tier.AlteredError; nil if the checksums differ
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

// Verify checks that b is the chunk-th run of d.SumBlock bytes of the body
// that d describes, the last of which may be shorter. Other bytes are a
// *CorruptError with the chunk's offset in the body.
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

// View returns the n bytes at off of extents, or those of them that are in one extent.
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

// Stretch returns the n bytes at off of extents if they are in one extent; else nil.
func Stretch(extents [][]byte, off, n int64) []byte {
	if p := View(extents, off, n); int64(len(p)) == n {
		return p
	}
	return nil
}

// Gather copies the bytes at off of extents.
func Gather(dst []byte, extents [][]byte, off int64) error {
	return Across(extents, off, int64(len(dst)), func(p []byte) error { dst = dst[copy(dst, p):]; return nil })
}

// Across calls f for each part of the n bytes at off of extents, until it fails.
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
