package transfer

import (
	"context"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/tier"
)

// Together writes the bodies of images, which are all on one device or in one host space, side by
// side to a buffer on a disk. It passes them through pinned chunks, so that one request writes many.
func (b *Builtin) Together(ctx context.Context, buf *tier.Buffer, images []*batch.Image) error {
	dst, err := b.into(buf)
	if err != nil {
		return err
	}
	src := &source{space: images[0].Space(), streamed: streamed{stream: new(stream)}}
	for _, img := range images {
		switch m := img.Buffer().Memory().(type) {
		case tier.DeviceMemory:
			src.device = append(src.device, image.Part{Off: src.size, N: m.Size(), Addr: m.Addr()})
		case tier.HostMemory:
			off := src.size
			for _, e := range m.Extents() {
				src.device = append(src.device, image.Part{Off: off, N: int64(len(e)), Made: e})
				off += int64(len(e))
			}
		}
		src.size += img.Descriptor().Body
	}
	write := func() error { return b.staged(ctx, dst, src) }
	return b.Permitted(ctx, dst.space, src.space, src.size, func(permitted context.Context) error {
		ctx = permitted
		return safely(func() error {
			if src.space.Kind() == tier.GPU {
				return b.onStreams(ctx, dst, src, write)
			}
			return write()
		})
	})
}
