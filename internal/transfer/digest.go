package transfer

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// Digest computes the fingerprint of an image's body and of its dictionaries behind it.
func (b *Builtin) Digest(ctx context.Context, img Imaged) (d tier.Digest, onDevice bool, err error) {
	src, err := b.from(ctx, img)
	if err != nil {
		return d, false, err
	}
	if src.table != nil {
		src.table.sums = nil // the digest is all that is wanted
	}
	if d, onDevice, err = b.digestOf(ctx, src, 0); err != nil {
		return d, onDevice, err
	}
	at := src.size
	for _, s := range img.Shared() {
		src, err := b.fromBuffer(s.Descriptor(), s.Buffer(), img.Space())
		if err != nil {
			return d, onDevice, err
		}
		dict, _, err := b.digestOf(ctx, src, at)
		if err != nil {
			return d, onDevice, err
		}
		d = d.Add(dict)
		at += src.size
	}
	return d, onDevice, nil
}

// digestOf is digest for a body, counted from byte base on.
func (b *Builtin) digestOf(ctx context.Context, src *source, base int64) (d tier.Digest, onDevice bool, err error) {
	if len(src.device) == 1 && src.table == nil {
		err := b.onStream(ctx, src.space, func(dev tier.Device, s tier.Stream) error {
			c, ok := dev.(tier.Computer)
			if !ok {
				return tier.ErrNotSupported
			}
			if err := c.Digest(s, src.device[0].Addr, src.size, base/8, &d); err != nil {
				return err
			}
			return await(record(dev, s)) // d is ours again only then
		})
		if !errors.Is(err, tier.ErrNotSupported) { // as a decorator's device may say
			return d, err == nil, err
		}
		d = tier.Digest{}
	}
	var mu sync.Mutex
	src.see(func(p []byte, off int64) {
		part := tier.DigestBytes(p, (base+off)/8)
		mu.Lock()
		defer mu.Unlock()
		d = d.Add(part)
	})
	return d, false, b.look(ctx, src)
}

// see has f see all bytes, too, after the source's own check.
func (s *source) see(f func(p []byte, off int64)) {
	own := s.check
	s.check = func(p []byte, off int64) error {
		if own != nil {
			if err := own(p, off); err != nil {
				return err
			}
		}
		f(p, off)
		return nil
	}
}

// look brings the bytes of src to host memory for its check, with a permit if that reads a disk.
func (b *Builtin) look(ctx context.Context, src *source) error {
	read := func(ctx context.Context) error { return b.transfer(ctx, nil, src) }
	if src.space.Kind() != tier.Disk || src.size == 0 {
		return read(ctx)
	}
	pinned := int64(DiskUnderWay)
	if src.packed == nil {
		var err error
		if pinned, err = b.StagedAtOnce(src.space.Node()); err != nil {
			return err
		}
	}
	return b.OnDisk(ctx, min(src.size, pinned), false, read)
}

// Verify reads all bytes of an image on disk, compressed or not, and compares them with their
// checksums.
func (b *Builtin) Verify(ctx context.Context, p batch.Payload) error {
	switch p := p.(type) {
	case *batch.Image:
		return b.VerifyBody(ctx, p.Descriptor(), p.Buffer())
	case *payload.Packed:
		return b.inLanes(ctx, p.Space().Node(), len(p.Runs()), func(ctx context.Context, l *lane, i int) error {
			_, err := b.stored(ctx, l, &p.Runs()[i])
			return err
		})
	}
	return fmt.Errorf("convert: verifying %s: %w", p.Type(), tier.ErrNotSupported)
}

// VerifyBody is verify for a body that is not compressed.
func (b *Builtin) VerifyBody(ctx context.Context, d *batch.Descriptor, buf *tier.Buffer) error {
	src, err := b.fromBuffer(d, buf, buf.Space())
	if err != nil {
		return err
	}
	if buf != nil && src.file == nil { // nothing would be compared
		return fmt.Errorf("convert: verifying %T: %w", buf.Memory(), tier.ErrNotSupported)
	}
	return b.transfer(ctx, nil, src)
}
