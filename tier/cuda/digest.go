package cuda

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/address"
	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/tier"
)

// digestBytes is what the kernel makes: two words.
const digestBytes = 16

// sum is a digest in pinned memory that a caller waits for.
type sum struct {
	out  *tier.Digest
	from []byte
}

// Digest implements tier.Computer, by a kernel that the driver compiles at the first call. Where it
// cannot, or has no room for what the kernel makes, that is tier.ErrNotSupported.
func (d *gpu) Digest(ts tier.Stream, src tier.Addr, size, first int64, out *tier.Digest) error {
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	defer d.gate.Leave()
	switch {
	case src%8 != 0:
		return fmt.Errorf("cuda: a digest from address %#x, which is not a multiple of 8", uint64(src))
	case out == nil:
		return errors.New("cuda: a digest without a destination")
	}
	if err := d.at(src, size); err != nil {
		return err
	}
	if err := d.dev.PrepareDigest(); errors.Is(err, cuda.ErrNoKernel) {
		return fmt.Errorf("cuda: %w: %w", tier.ErrNotSupported, err)
	} else if err != nil {
		return err
	}
	if s.scratch == 0 { // the stream is the caller's alone
		at, err := d.scratch(s)
		if errors.Is(err, cuda.ErrOutOfMemory) {
			return fmt.Errorf("cuda: no room for a digest: %w: %w", tier.ErrNotSupported, err)
		}
		if err != nil {
			return err
		}
		s.scratch = at
	}
	b, err := d.bounce.get(digestBytes)
	if err != nil {
		return err
	}
	work := due{sums: []sum{{out, b}}, bytes: int64(cap(b))}
	return s.put(work, func(c *cuda.Calls) error {
		// What is refused half-way leaves nothing behind that the next digest here would not begin
		// with anew.
		if err := c.Fill(s.handle, s.scratch, 0, digestBytes); err != nil {
			return err
		}
		if err := c.Digest(s.handle, cuda.Ptr(src), size, first, s.scratch); err != nil {
			return err
		}
		return c.CopyToHost(s.handle, address.Of(b), s.scratch, digestBytes)
	})
}
