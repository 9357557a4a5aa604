package transfer

import (
	"context"
	"fmt"
	"sync"

	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/tier"
)

// fromScattered returns the bytes of a scattered image as those of a plain one. To host memory the
// device does one batched copy of all buffers straight to their places, or one for each MaxPiece of
// large ones; no device memory is needed. To disk, and where bytes must be looked at on their way
// to a device, it is the same a pinned chunk at a time. The checksums of an image that was a plain
// one before are known, others are made as the bytes come by. Bits that do not begin with a byte
// are moved here, because no copy of the device's can.
func (b *Builtin) fromScattered(ctx context.Context, t *payload.Parts) (*bytesFrom, error) {
	d := t.Descriptor
	parts := image.PartsOf(d, t.Ranges, t.Adjustments)
	s := &bytesFrom{Source: &deviceMemory{space: t.Space, parts: parts}, space: t.Space, desc: d, size: d.Body}
	if d.Sums == nil {
		s.sums = make([]uint64, (d.Body+payload.SumChunk-1)/payload.SumChunk)
	}
	// Bitmaps that must be shifted are read here at once: they are short, and a byte of the image
	// has bits of two bytes there, which different pieces may have.
	var reads []image.Peek
	made := make(map[int][]byte)
	for i, p := range parts {
		if p.Adj != nil && p.Adj.How == payload.Bits && p.Adj.Base != 0 {
			made[i] = make([]byte, (p.Adj.Base+p.Adj.Count+7)/8)
			reads = append(reads, image.PeekInto(p.Addr, made[i]))
		}
	}
	if err := b.Peek(ctx, t.Space, reads); err != nil {
		return nil, err
	}
	for i, bits := range made {
		parts[i].Made = image.MadeBits(parts[i].Adj, bits)
	}
	s.adjust = parts.Adjusted()
	return s, nil
}

// Peek reads bytes of a device at many places, through pinned chunks, and gives them to the reads'
// Take, one call at a time. The memory of a table that is not adopted yet is unknown to the device,
// so it is borrowed meanwhile. Peek returns when all bytes were taken, or with an error.
func (b *Builtin) Peek(ctx context.Context, space *tier.Space, reads []image.Peek) error {
	pool, err := b.Streams(space.ID())
	if len(reads) == 0 || err != nil {
		return err
	}
	// The places become the parts of one body, so that one copy moves them all. It is not verified,
	// but seen.
	m := &deviceMemory{space: space}
	src := &bytesFrom{Source: m, space: space}
	borrower, borrows := tier.As[tier.Borrower](pool.Device)
	for _, r := range reads {
		if borrows && r.N > 0 {
			end, err := borrower.Borrow(r.Addr, r.N)
			if err != nil {
				return fmt.Errorf("convert: reading the shape of a table: %w", err)
			}
			defer end()
		}
		m.parts = append(m.parts, image.Part{Off: src.size, N: r.N, Addr: r.Addr})
		// Each begins at a multiple of 8, and so does each piece, so no value is divided.
		src.size += extent.RoundUp(r.N, 8)
	}
	var mu sync.Mutex
	src.see = func(p []byte, off int64) {
		mu.Lock()
		defer mu.Unlock()
		for i, part := range m.parts {
			begin, end := max(off, part.Off), min(off+int64(len(p)), part.Off+part.N)
			if begin < end {
				reads[i].Take(p[begin-off:end-off], begin-part.Off)
			}
		}
	}
	if err := b.copy(ctx, new(bytesTo), src); err != nil {
		return fmt.Errorf("convert: reading the shape of a table: %w", err)
	}
	return nil
}
