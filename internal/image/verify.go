package image

import (
	"errors"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// Verifier checks a body's checksums while its bytes come by in order, in
// pieces of any size.
type Verifier struct {
	desc *batch.Descriptor
	file tier.FileMemory
	hash *xxh3.Hasher // the part of a chunk that has come by, when pieces split one
	part int64        // how many bytes that is
}

// NewVerifier returns a verifier of a body that is read from file.
func NewVerifier(desc *batch.Descriptor, file tier.FileMemory) *Verifier {
	return &Verifier{desc: desc, file: file}
}

// Check takes the bytes at off, which follow on those before.
func (v *Verifier) Check(p []byte, off int64) error {
	for len(p) > 0 {
		chunk := off / payload.SumChunk
		start := chunk * payload.SumChunk
		size := min(v.desc.Body-start, payload.SumChunk)
		if v.part == 0 && int64(len(p)) >= size { // the usual case: a whole chunk
			if err := Verify(v.desc, int(chunk), p[:size]); err != nil {
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
				return v.locate(&CorruptError{Want: want, Got: got}, start)
			}
		}
	}
	return nil
}

// CheckIn checks the n bytes at in extents, which are those at off of the body.
func (v *Verifier) CheckIn(extents [][]byte, at, n, off int64) error {
	return Across(extents, at, n, func(p []byte) error {
		err := v.Check(p, off)
		off += int64(len(p))
		return err
	})
}

// locate adds where on disk the corrupt chunk begins.
func (v *Verifier) locate(err error, off int64) error {
	var c *CorruptError
	if errors.As(err, &c) {
		volume, file, at := v.file.Locate(off)
		c.Volume, c.Offset = volume+" "+file, at
	}
	return err
}
