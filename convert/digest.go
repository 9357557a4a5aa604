package convert

import (
	"context"
	"fmt"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

// Digest computes the fingerprint of all bytes of the image that h holds, where
// they are: on the device if it can compute, over the host extents, or else
// through pinned chunks; onDevice says which. Two images of the same record have the same.
func (m *Mover) Digest(ctx context.Context, h *batch.Handle) (d tier.Digest, onDevice bool, err error) {
	img, ok := h.Payload().(*batch.Image)
	if !ok {
		return d, false, fmt.Errorf("convert: %s has no digest", h.Payload().Type())
	}
	if img.Buffer() == nil {
		return d, false, nil
	}
	b := m.cfg.Builtin
	add := func(p []byte, off int64) error {
		d = d.Add(tier.DigestBytes(p, off/8))
		return nil
	}
	discard := func([]byte, int64) (stage, error) { return finished{}, nil }
	size, node := img.Descriptor().Body, img.Space().Node()
	switch src := img.Buffer().Memory().(type) {
	case tier.HostMemory:
		off := int64(0)
		for _, p := range src.Extents() {
			for len(p) > 0 {
				if err := context.Cause(ctx); err != nil {
					return d, false, err
				}
				n := min(len(p), maxPiece)
				d = d.Add(tier.DigestBytes(p[:n], off/8))
				p, off = p[n:], off+int64(n)
			}
		}
		return d, false, nil
	case tier.DeviceMemory:
		err = b.onStream(ctx, img.Space(), func(dev tier.Device, s tier.Stream) error {
			c, ok := dev.(tier.Computer)
			if !ok {
				return b.staged(ctx, node, size, fetchDevice(dev, s, src), discard, add)
			}
			onDevice = true
			if err := c.Digest(s, src.Addr(), size, 0, &d); err != nil {
				return err
			}
			e, err := record(dev, s)
			if err != nil {
				return err
			}
			<-e.Done() // d is ours again only then
			return e.Err()
		})
		return d, onDevice, err
	case tier.FileMemory:
		v := newVerifier(img.Descriptor(), src)
		err = b.staged(ctx, node, size, fetchFile(ctx, src), discard, func(p []byte, off int64) error {
			if err := v.check(p, off); err != nil {
				return err
			}
			return add(p, off)
		})
		return d, false, err
	}
	return d, false, fmt.Errorf("convert: the digest of %T: %w", img.Buffer().Memory(), tier.ErrNotSupported)
}
