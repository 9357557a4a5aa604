package transfer

import (
	"context"
	"fmt"

	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/tier"
)

// borrowed lets dev read the peeks. Bytes of a table that is not adopted yet are unknown to it.
func borrowed(dev tier.Device, reads []image.Peek) (end func(), err error) {
	b, ok := tier.As[tier.Borrower](dev)
	if !ok {
		return func() {}, nil
	}
	var loans []func()
	end = func() {
		for _, e := range loans {
			e()
		}
	}
	for _, r := range reads {
		if r.N == 0 {
			continue
		}
		e, err := b.Borrow(r.Addr, r.N)
		if err != nil {
			end()
			return nil, fmt.Errorf("convert: reading the shape of a table: %w", err)
		}
		loans = append(loans, e)
	}
	return end, nil
}

// Peek reads from a device, many places at once, through one pinned chunk.
func (b *Builtin) Peek(ctx context.Context, space *tier.Space, reads []image.Peek) error {
	if len(reads) == 0 {
		return nil
	}
	pool, err := b.Staging(space.Node())
	if err != nil {
		return err
	}
	return b.onStream(ctx, space, func(dev tier.Device, s tier.Stream) error {
		chunk, err := pool.Borrow(ctx)
		if err != nil {
			return err
		}
		defer pool.Return(chunk)
		end, err := borrowed(dev, reads)
		if err != nil {
			return err
		}
		defer end()
		room := chunk[:len(chunk)&^7]
		var regions []tier.Region
		var then []func()
		for off := int64(0); len(reads) > 0; { // of the first that is not done
			if err := context.Cause(ctx); err != nil {
				return err
			}
			regions, then = regions[:0], then[:0]
			for at := 0; at < len(room) && len(reads) > 0; {
				r, from := reads[0], off
				p := room[at:min(len(room), at+int(min(r.N-off, int64(len(room)))))]
				if len(p) > 0 {
					regions = append(regions, tier.Region{HostDst: p[:len(p):len(p)], Src: r.Addr + tier.Addr(off)})
					then = append(then, func() { r.Take(p, from) })
				}
				at += int(image.RoundUp(int64(len(p)), 8))
				if off += int64(len(p)); off == r.N {
					reads, off = reads[1:], 0
				}
			}
			if err := await(copyRegions(dev, s, regions)); err != nil {
				return fmt.Errorf("convert: reading the shape of a table: %w", err)
			}
			for _, take := range then {
				take()
			}
		}
		return nil
	})
}
