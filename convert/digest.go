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
	switch p := img.(type) {
	case *batch.Image:
		d, onDevice, err = m.digest(ctx, p.Space(), p.Descriptor(), p.Buffer(), 0)
	case *batch.Packed:
		d, err = m.digestPacked(ctx, p)
	case *batch.Table:
		d, err = m.digestTable(ctx, p)
	}
	at := img.Descriptor().Body
	for _, s := range img.Shared() {
		if err != nil {
			break
		}
		var dict tier.Digest
		dict, _, err = m.digest(ctx, img.Space(), s.Descriptor(), s.Buffer(), at)
		d = d.Add(dict)
		at += s.Descriptor().Body
	}
	return d, onDevice, ofLost(err, img.Space())
}

// digest is Digest for the body in buf, counted from byte base on.
func (m *Mover) digest(ctx context.Context, space *tier.Space, desc *batch.Descriptor, buf *tier.Buffer, base int64) (d tier.Digest, onDevice bool, err error) {
	if buf == nil {
		return d, false, nil
	}
	b := m.cfg.Builtin
	add := func(p []byte, off int64) error {
		d = d.Add(tier.DigestBytes(p, (base+off)/8))
		return nil
	}
	size, node := desc.Body, space.Node()
	switch src := buf.Memory().(type) {
	case tier.HostMemory:
		off := int64(0)
		for _, p := range src.Extents() {
			for len(p) > 0 {
				if err := context.Cause(ctx); err != nil {
					return d, false, err
				}
				n := min(len(p), maxPiece)
				d = d.Add(tier.DigestBytes(p[:n], (base+off)/8))
				p, off = p[n:], off+int64(n)
			}
		}
		return d, false, nil
	case tier.DeviceMemory:
		err = b.onStream(ctx, space, func(dev tier.Device, s tier.Stream) error {
			c, ok := dev.(tier.Computer)
			if !ok {
				return b.staged(ctx, node, size, fetchDevice(dev, s, src), nil, add, true)
			}
			err := c.Digest(s, src.Addr(), size, base/8, &d)
			if errors.Is(err, tier.ErrNotSupported) { // a decorator's device does not compute
				return b.staged(ctx, node, size, fetchDevice(dev, s, src), nil, add, true)
			}
			if err != nil {
				return err
			}
			onDevice = true
			return await(record(dev, s)) // d is ours again only then
		})
		return d, onDevice, err
	case tier.FileMemory:
		pinned, err := b.stagedAtOnce(node)
		if err != nil {
			return d, false, err
		}
		src = checked(src)
		v := newVerifier(desc, src)
		err = b.OnDisk(ctx, min(size, pinned), false, func(ctx context.Context) error {
			return b.staged(ctx, node, size, fetchFile(ctx, src), nil, func(p []byte, off int64) error {
				if err := v.check(p, off); err != nil {
					return err
				}
				return add(p, off)
			}, true)
		})
		return d, false, err
	}
	return d, false, fmt.Errorf("convert: the digest of %T: %w", buf.Memory(), tier.ErrNotSupported)
}

// digestPacked uncompresses the body and drops what it has looked at.
func (m *Mover) digestPacked(ctx context.Context, p *batch.Packed) (d tier.Digest, err error) {
	b := m.cfg.Builtin
	var mu sync.Mutex
	add := laneTarget(func(_ context.Context, _ *lane, p []byte, off int64) error {
		part := tier.DigestBytes(p, off/8)
		mu.Lock()
		defer mu.Unlock()
		d = d.Add(part)
		return nil
	})
	unpack := func(ctx context.Context) error { return b.unpack(ctx, p.Space(), p, add) }
	if p.Space().Kind() == tier.Disk {
		err = b.OnDisk(ctx, min(p.Descriptor().Body, diskUnderWay), false, unpack)
	} else {
		err = unpack(ctx)
	}
	return d, err
}
