package transfer

import (
	"context"
	"errors"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/codec"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
	"github.com/zeebo/xxh3"
)

// verifier checks a body's checksums while its bytes come by in order, in
// pieces of any size.
type verifier struct {
	desc *batch.Descriptor
	file tier.FileMemory
	hash *xxh3.Hasher // the part of a chunk that has come by, when pieces split one
	part int64        // how many bytes that is
}

func NewVerifier(desc *batch.Descriptor, file tier.FileMemory) *verifier {
	return &verifier{desc: desc, file: file}
}

// Check takes the bytes at off, which follow on those before.
func (v *verifier) Check(p []byte, off int64) error {
	for len(p) > 0 {
		chunk := off / payload.SumChunk
		start := chunk * payload.SumChunk
		size := min(v.desc.Body-start, payload.SumChunk)
		if v.part == 0 && int64(len(p)) >= size { // the usual case: a whole chunk
			if err := image.Verify(v.desc, int(chunk), p[:size]); err != nil {
				return v.locate(err, start)
			}
			p, off = p[size:], off+size
			continue
		}
		if v.hash == nil {
			v.hash = xxh3.New()
		}
		n := min(int64(len(p)), size-v.part)
		v.hash.Write(p[:n]) // never fails
		v.part += n
		p, off = p[n:], off+n
		if v.part == size {
			got := v.hash.Sum64()
			v.hash.Reset()
			v.part = 0
			if want := v.desc.Sums[chunk]; got != want {
				return v.locate(&image.CorruptError{Want: want, Got: got}, start)
			}
		}
	}
	return nil
}

// checkIn checks the n bytes at in extents, which are those at off of the body.
func (v *verifier) checkIn(extents [][]byte, at, n, off int64) error {
	return image.Across(extents, at, n, func(p []byte) error {
		err := v.Check(p, off)
		off += int64(len(p))
		return err
	})
}

// locate adds where on disk the corrupt chunk begins.
func (v *verifier) locate(err error, off int64) error {
	var c *image.CorruptError
	if errors.As(err, &c) {
		volume, file, at := v.file.Locate(off)
		c.Volume, c.Offset = volume+" "+file, at
	}
	return err
}

// Checked returns the memory of a volume for reading or writing a body: what an encrypted volume
// itself finds altered is corrupt, as is what the checksums find. All that converters do on disks
// goes through it.
func Checked(m tier.FileMemory) tier.FileMemory { return checkedFile{m} }

type checkedFile struct{ tier.FileMemory }

func (f checkedFile) ReadAt(ctx context.Context, p []byte, off int64) error {
	return corruptFile(f.FileMemory.ReadAt(ctx, p, off))
}

// WriteAt reads, too, where it writes a part of what is sealed as a whole.
func (f checkedFile) WriteAt(ctx context.Context, p []byte, off int64) error {
	return corruptFile(f.FileMemory.WriteAt(ctx, p, off))
}

func corruptFile(err error) error {
	var a *tier.AlteredError
	if !errors.As(err, &a) {
		return err
	}
	return &image.CorruptError{Volume: a.Volume + " " + a.File, Offset: a.Offset, Cause: err}
}

// metered returns the memory of a disk's space as checked does, so that what is done with it is
// timed if codecs are chosen by that.
func (b *Builtin) metered(space *tier.Space, m tier.FileMemory) tier.FileMemory {
	m = Checked(m)
	if b.Codec != codec.Auto {
		return m
	}
	return b.Choose.Metered(space.ID(), m)
}
