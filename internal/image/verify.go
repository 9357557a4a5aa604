package image

import (
	"fmt"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/batch"
)

// Summer computes or checks the checksums of blocks of a body whose bytes come by in order, in
// pieces of any size. So bytes are verified while they are copied, and not in a second pass. The
// first piece must begin at a block. Several Summers may work on different parts of one body at the
// same time.
type Summer struct {
	Desc *batch.Descriptor // of the body
	Made []uint64          // gets the checksums; nil: they are compared with those of Desc
	// Locate returns where the byte at off of the body is stored, for a *CorruptError. An empty
	// volume means that only the place in the body is known; so does a nil Locate.
	Locate func(off int64) (volume, file string, at int64)

	hash *xxh3.Hasher // of the block that pieces split; nil until one does
	part int64        // bytes of that block that hash has; 0 between blocks
}

// Add takes the bytes at off, which must follow on those of the call before. It returns a
// *CorruptError for the first block that differs. A block at the end of p that is not complete is
// decided by a later call.
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
			// A block in several pieces is rare: transfers cut at blocks where they can.
			if s.hash == nil {
				s.hash = xxh3.New()
			}
			s.hash.Write(p[:n]) // never fails
			// The piece ends within the block. The rest comes with the next call.
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
