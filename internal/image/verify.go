package image

import (
	"fmt"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/batch"
)

// Summer computes the checksums of chunks of a body, whose bytes come by in order, in pieces of any
// size, and from the beginning of a chunk on. Several may work on parts of one body.
type Summer struct {
	Body  int64
	Block int64                               // bytes of a chunk
	Each  func(chunk int64, sum uint64) error // is called with the checksum of each chunk

	hash *xxh3.Hasher // the part of a chunk that has come by, when pieces split one
	part int64        // how many bytes that is
}

// NewVerifier returns a Summer that compares a body with the checksums of desc. Other bytes are a
// *CorruptError, with the place of the chunk that locate returns: an empty volume if that is only the
// place in the body.
func NewVerifier(desc *batch.Descriptor, locate func(off int64) (volume, file string, at int64)) *Summer {
	return &Summer{Body: desc.Body, Block: desc.SumBlock(), Each: func(chunk int64, got uint64) error {
		if chunk >= int64(len(desc.Sums)) {
			return fmt.Errorf("convert: chunk %d of %d", chunk, len(desc.Sums))
		}
		want := desc.Sums[chunk]
		if got == want {
			return nil
		}
		c := &CorruptError{Want: want, Got: got}
		var file string
		if c.Volume, file, c.Offset = locate(chunk * desc.SumBlock()); c.Volume != "" {
			c.Volume += " " + file
		}
		return c
	}}
}

// Add takes the bytes at off, which follow on those before.
func (s *Summer) Add(p []byte, off int64) error {
	for len(p) > 0 {
		chunk := off / s.Block
		size := min(s.Body-chunk*s.Block, s.Block)
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
		if err := s.Each(chunk, sum); err != nil {
			return err
		}
		p, off = p[n:], off+n
	}
	return nil
}
