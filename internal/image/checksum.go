package image

import (
	"errors"
	"fmt"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/batch"
)

// ErrCorrupt matches every *CorruptError.
var ErrCorrupt = errors.New("corrupt")

// CorruptError says that the bytes of an image are not those that were laid
// out: the checksum of a chunk is another.
type CorruptError struct {
	Batch  batch.ID // 0 where it is not known
	Volume string   // where the bytes were read from; empty if from memory
	Offset int64    // of the chunk: in the volume, or without one in the body
	Want   uint64   // the checksum in the descriptor
	Got    uint64   // that of the bytes
	Cause  error    // why they cannot be uncompressed, or a *tier.AlteredError; nil where the checksums tell
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

// Verify checks that b is the chunk-th run of batch.SumChunk bytes of the body
// that d describes, the last of which may be shorter. Other bytes are a
// *CorruptError with the chunk's offset in the body.
func Verify(d *batch.Descriptor, chunk int, b []byte) error {
	if chunk < 0 || chunk >= len(d.Sums) {
		return fmt.Errorf("convert: chunk %d of %d", chunk, len(d.Sums))
	}
	off := int64(chunk) * batch.SumChunk
	if n := min(d.Body-off, batch.SumChunk); int64(len(b)) != n {
		return fmt.Errorf("convert: chunk %d has %d bytes, not %d", chunk, n, len(b))
	}
	if got, want := xxh3.Hash(b), d.Sums[chunk]; got != want {
		return &CorruptError{Offset: off, Want: want, Got: got}
	}
	return nil
}
