package transfer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
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
	used := make(map[*batch.Descriptor]bool) // not only by those that extend them
	for _, dict := range img.Descriptor().Dictionaries {
		used[dict] = true
	}
	for _, s := range img.Shared() {
		for _, dict := range s.Descriptor().Dictionaries {
			used[dict] = used[dict] || s.Descriptor().From == nil
		}
	}
	for _, s := range img.Shared() {
		if !used[s.Descriptor()] {
			continue
		}
		dict, size, err := b.digestShared(ctx, img, s, at)
		if err != nil {
			return d, onDevice, err
		}
		d = d.Add(dict)
		at += size
	}
	return d, onDevice, nil
}

// digestShared is digest for a dictionary, and returns the length of its image. That of an extension
// is the digest of the image that it would have if it extended no other one.
func (b *Builtin) digestShared(ctx context.Context, img Imaged, s batch.Shared, base int64) (d tier.Digest, size int64, err error) {
	desc := s.Descriptor()
	whole := image.Whole(desc)
	if desc.From == nil {
		src, err := b.fromBuffer(desc, s.Buffer(), img.Space())
		if err == nil {
			d, _, err = b.digestOf(ctx, src, base)
		}
		return d, whole.Body, err
	}
	parts, err := image.ChainParts(desc, whole)
	if err != nil {
		return d, 0, err
	}
	end := int64(0)
	for _, span := range append(slices.Clone(whole.Buffers), payload.Span{Offset: whole.Body}) {
		if span.Offset >= end { // zeros between the buffers, less than a page
			d = d.Add(tier.DigestBytes(make([]byte, span.Offset-end), (base+end)/8))
			end = image.RoundUp(span.Offset+span.Length, 8)
		}
	}
	chain := make(map[*batch.Descriptor]*source)
	for _, part := range parts {
		chain[part.Of] = nil
	}
	for _, c := range img.Shared() {
		of := c.Descriptor()
		if _, ok := chain[of]; !ok {
			continue
		}
		if chain[of], err = b.fromBuffer(of, c.Buffer(), img.Space()); err != nil {
			return d, 0, err
		}
	}
	sums := make([]tier.Digest, len(parts))
	if err := b.digestParts(ctx, img.Space(), parts, chain, base, sums); err != nil {
		return d, 0, err
	}
	for _, sum := range sums {
		d = d.Add(sum)
	}
	return d, whole.Body, nil
}

// digestParts computes the digests of parts, whose image begins at byte base, from the bodies of
// their dictionaries: on the device if it can compute.
func (b *Builtin) digestParts(ctx context.Context, space *tier.Space, parts []image.ChainPart,
	chain map[*batch.Descriptor]*source, base int64, sums []tier.Digest) error {
	if space.Kind() == tier.GPU {
		err := b.onStream(ctx, space, func(dev tier.Device, s tier.Stream) error {
			c, ok := dev.(tier.Computer)
			if !ok {
				return tier.ErrNotSupported
			}
			for i, p := range parts {
				at := chain[p.Of].device[0].Addr + tier.Addr(p.From)
				if err := c.Digest(s, at, image.RoundUp(p.N, 8), (base+p.To)/8, &sums[i]); err != nil {
					return err
				}
			}
			return await(record(dev, s))
		})
		if !errors.Is(err, tier.ErrNotSupported) {
			return err
		}
	}
	clear(sums)
	var mu sync.Mutex
	for of, src := range chain {
		src.see(func(p []byte, off int64) {
			for i, part := range parts {
				begin, end := max(part.From, off), min(part.From+part.N, off+int64(len(p)))
				if part.Of == of && begin < end {
					sum := tier.DigestBytes(p[begin-off:end-off], (base+part.To+begin-part.From)/8)
					mu.Lock()
					sums[i] = sums[i].Add(sum)
					mu.Unlock()
				}
			}
		})
		if err := b.look(ctx, src); err != nil {
			return err
		}
	}
	return nil
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
