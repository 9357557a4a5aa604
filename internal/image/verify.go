package image

import (
	"fmt"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// hasher hashes the chunks of a body of so many bytes, whose pieces come by in order, or, if each is
// a whole number of chunks, in any order.
type hasher struct {
	body int64
	hash *xxh3.Hasher // of the chunk of which a part has come by
}

// add takes the bytes at off, and calls f with each chunk that ends in them, until f fails.
func (h *hasher) add(p []byte, off int64, f func(chunk int64, sum uint64) error) error {
	for len(p) > 0 {
		chunk := off / payload.SumChunk
		begin, end := chunk*payload.SumChunk, min((chunk+1)*payload.SumChunk, h.body)
		n := min(int64(len(p)), end-off)
		var sum uint64
		if off == begin && off+n == end { // the usual case: a whole chunk
			sum = xxh3.Hash(p[:n])
		} else {
			if h.hash == nil {
				h.hash = xxh3.New()
			}
			if off == begin {
				h.hash.Reset()
			}
			h.hash.Write(p[:n]) // never fails
			if off+n == end {
				sum = h.hash.Sum64()
			}
		}
		p, off = p[n:], off+n
		if off == end {
			if err := f(chunk, sum); err != nil {
				return err
			}
		}
	}
	return nil
}

// Verifier checks a body's checksums while its bytes come by as those of a hasher do.
type Verifier struct {
	hasher
	desc *batch.Descriptor
	file tier.FileMemory
}

// NewVerifier returns a verifier of a body that is read from file.
func NewVerifier(desc *batch.Descriptor, file tier.FileMemory) *Verifier {
	return &Verifier{hasher: hasher{body: desc.Body}, desc: desc, file: file}
}

// Check takes the bytes at off. Wrong ones are a *CorruptError with their place on disk.
func (v *Verifier) Check(p []byte, off int64) error {
	return v.add(p, off, func(chunk int64, got uint64) error {
		if chunk >= int64(len(v.desc.Sums)) {
			return fmt.Errorf("convert: chunk %d of %d", chunk, len(v.desc.Sums))
		}
		want := v.desc.Sums[chunk]
		if got == want {
			return nil
		}
		volume, file, at := v.file.Locate(chunk * payload.SumChunk)
		return &CorruptError{Volume: volume + " " + file, Offset: at, Want: want, Got: got}
	})
}

// CheckIn checks the n bytes at in extents, which are those at off of the body.
func (v *Verifier) CheckIn(extents [][]byte, at, n, off int64) error {
	return Across(extents, at, n, func(p []byte) error {
		err := v.Check(p, off)
		off += int64(len(p))
		return err
	})
}

// Summer makes the checksums of a body whose bytes come by as those of a hasher do.
type Summer struct {
	hasher
	Sums []uint64
}

// NewSummer returns a summer of a body of so many bytes.
func NewSummer(body int64) *Summer {
	return &Summer{hasher{body: body}, make([]uint64, (body+payload.SumChunk-1)/payload.SumChunk)}
}

// Add takes the bytes at off.
func (s *Summer) Add(p []byte, off int64) {
	_ = s.add(p, off, func(chunk int64, sum uint64) error {
		s.Sums[chunk] = sum
		return nil
	})
}
