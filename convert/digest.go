package convert

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

// Digest computes the fingerprint of all bytes of the image that h holds, where
// they are: on the device if it can compute, over the host extents, or else
// through pinned chunks; onDevice says which. Dictionaries that are images of their
// own count as if they followed the body, in the order of AllDictionaries. Two images
// of the same record have the same.
func (m *Mover) Digest(ctx context.Context, h *batch.Handle) (d tier.Digest, onDevice bool, err error) {
	ctx, end, err := m.operations.begin(ctx)
	if err != nil {
		return d, false, err
	}
	defer end()
	payload := h.Payload()
	if payload == nil {
		return d, false, fmt.Errorf("convert: the digest of a closed handle: %w", tier.ErrReleased)
	}
	img, ok := payload.(imaged)
	if !ok {
		return d, false, fmt.Errorf("convert: %s has no digest", payload.Type())
	}
	b := m.cfg.Builtin
	src, err := b.from(ctx, img)
	if err != nil {
		return d, false, ofLost(err, img.Space())
	}
	if src.table != nil {
		src.table.sums = nil // the digest is all that is wanted
	}
	if d, onDevice, err = b.digest(ctx, src, 0); err != nil {
		return d, onDevice, ofLost(err, img.Space())
	}
	at := src.size
	for _, s := range img.Shared() {
		src, err := b.fromBuffer(s.Descriptor(), s.Buffer(), img.Space())
		if err != nil {
			return d, onDevice, err
		}
		dict, _, err := b.digest(ctx, src, at)
		if err != nil {
			return d, onDevice, ofLost(err, img.Space())
		}
		d = d.Add(dict)
		at += src.size
	}
	return d, onDevice, nil
}

// digest is Digest for a body, counted from byte base on.
func (b *Builtin) digest(ctx context.Context, src *source, base int64) (d tier.Digest, onDevice bool, err error) {
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
	pinned := int64(diskUnderWay)
	if src.packed == nil {
		var err error
		if pinned, err = b.stagedAtOnce(src.space.Node()); err != nil {
			return err
		}
	}
	return b.OnDisk(ctx, min(src.size, pinned), false, read)
}
