package image

import (
	"fmt"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/batch"
)

// Summer computes the checksums of chunks of a body, whose bytes come by in order, in pieces of any
// size, and from the beginning of a chunk on. Several may work on parts of one body.
type Summer struct {
	Desc *batch.Descriptor // of the body
	Made []uint64          // gets the checksums; nil: they are compared with those of Desc
	// Locate returns where the byte at off of the body is stored, for a *CorruptError: an empty volume if
	// that is only the place in the body. Nil: that is all that is known.
	Locate func(off int64) (volume, file string, at int64)

	hash *xxh3.Hasher // the part of a chunk that has come by, when pieces split one
	part int64        // how many bytes that is
}

// Add takes the bytes at off, which follow on those before.
func (s *Summer) Add(p []byte, off int64) error {
	for len(p) > 0 {
		block := s.Desc.SumBlock()
		chunk := off / block
		size := min(s.Desc.Body-chunk*block, block)
		n := min(int64(len(p)), size-s.part)
		var sum uint64
		if n == size { // the usual case: a whole chunk
			sum = xxh3.Hash(p[:n])
		} else {
			if s.hash == nil {
				s.hash = xxh3.New()
			}
			s.hash.Write(p[:n]) // never fails
			if s.part += n; s.part < size {
				return nil
			}
			sum = s.hash.Sum64()
			s.hash.Reset()
			s.part = 0
		}
		switch {
		case s.Made != nil:
			s.Made[chunk] = sum
		case chunk >= int64(len(s.Desc.Sums)):
			return fmt.Errorf("convert: chunk %d of %d", chunk, len(s.Desc.Sums))
		case s.Desc.Sums[chunk] != sum:
			c := &CorruptError{Want: s.Desc.Sums[chunk], Got: sum, Offset: chunk * block}
			if s.Locate != nil {
				var file string
				if c.Volume, file, c.Offset = s.Locate(c.Offset); c.Volume != "" {
					c.Volume += " " + file
				}
			}
			return c
		}
		p, off = p[n:], off+n
	}
	return nil
}
