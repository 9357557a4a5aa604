package convert

import (
	"errors"

	"github.com/spillway-db/spillway/batch"
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

func newVerifier(desc *batch.Descriptor, file tier.FileMemory) *verifier {
	return &verifier{desc: desc, file: file}
}

// check takes the bytes at off, which follow on those before.
func (v *verifier) check(p []byte, off int64) error {
	for len(p) > 0 {
		chunk := off / batch.SumChunk
		start := chunk * batch.SumChunk
		size := min(v.desc.Body-start, batch.SumChunk)
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

// locate adds where on disk the corrupt chunk begins.
func (v *verifier) locate(err error, off int64) error {
	var c *CorruptError
	if errors.As(err, &c) {
		volume, file, at := v.file.Locate(off)
		c.Volume, c.Offset = volume+" "+file, at
	}
	return err
}
