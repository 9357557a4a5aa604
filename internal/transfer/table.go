package transfer

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// fromScattered returns the bytes of a scattered image as those of a plain one. To host memory the
// device does one batched copy of all buffers straight to their places, or one for each MaxPiece of
// large ones; no device memory is needed. To disk, and where bytes must be looked at on their way to a
// device, it is the same a pinned chunk at a time. The checksums of an image that was a plain one
// before are known, others are made as the bytes come by. Bits that do not begin with a byte are moved
// here, because no copy of the device's can.
func (b *Builtin) fromScattered(ctx context.Context, t *payload.Image) (*bytesFrom, error) {
	d := t.Descriptor()
	parts := image.PartsOf(d, t.Ranges(), t.Adjustments())
	s := &bytesFrom{Source: &deviceMemory{space: t.Space(), parts: parts}, space: t.Space(), desc: d, size: d.Body}
	if d.Sums == nil {
		s.sums = make([]uint64, (d.Body+payload.SumChunk-1)/payload.SumChunk)
	}
	var reads []image.Peek
	made := make(map[int][]byte)
	for i, p := range parts {
		if p.Adj != nil && p.Adj.How == payload.Bits && p.Adj.Base != 0 {
			made[i] = make([]byte, (p.Adj.Base+p.Adj.Count+7)/8)
			reads = append(reads, image.PeekInto(p.Addr, made[i]))
		}
	}
	if err := b.Peek(ctx, t.Space(), reads); err != nil {
		return nil, err
	}
	for i, bits := range made {
		parts[i].Made = image.MadeBits(parts[i].Adj, bits)
	}
	s.adjust = parts.Adjusted()
	return s, nil
}

// TableBytes returns what a table of d is charged in a space at most, while it is made of
// an image or of another table.
func TableBytes(d *batch.Descriptor, space *tier.Space) (n int64) {
	for _, s := range d.Buffers {
		if s.Length > 0 {
			n += space.Charge(s.Length)
		}
	}
	return n
}

// SlabMost is how many bytes of small buffers share an allocation: few enough for memory in
// pieces, and so many that allocating is no part of a move's time. 500 allocations, or frees, took
// a sixth of that of 64 MiB.
const SlabMost = MaxPiece

// SlabAlign is how buffers in one allocation are aligned: as devices align allocations.
const SlabAlign = 256

// scatter allocates the buffers of a scattered image, as long as those of a plain image. Small ones are
// next to each other in one allocation, as long as that is not charged more than each by itself, which
// is what is reserved.
func scatter(t *payload.Parts, r reservation.Reservation) error {
	t.Ranges = make([]payload.DeviceRange, len(t.Descriptor.Buffers))
	first := make(map[int64]int) // by place in the body: some are of several columns
	var slab []int               // the buffers that are to share an allocation, by number
	var bytes, alone int64       // of the slab, with what is lost between; and charged without it
	for i, span := range t.Descriptor.Buffers {
		if _, ok := first[span.Offset]; ok || span.Length <= 0 {
			continue
		}
		first[span.Offset] = i
		n := span.Length
		t.Ranges[i].Length = n
		charge := r.Space().Charge(n)
		if len(slab) > 0 && (bytes+n > SlabMost || r.Space().Charge(bytes+n) > alone+charge) {
			if err := allocSlab(t, slab, r); err != nil {
				return err
			}
			slab, bytes, alone = slab[:0], 0, 0
		}
		slab = append(slab, i)
		bytes += image.RoundUp(n, SlabAlign)
		alone += charge
	}
	if err := allocSlab(t, slab, r); err != nil {
		return err
	}
	for i, span := range t.Descriptor.Buffers {
		if span.Length > 0 {
			t.Ranges[i] = t.Ranges[first[span.Offset]]
		}
	}
	return nil
}

// allocSlab allocates buffers side by side, or half of them, and then the others, where there is no
// piece for all.
func allocSlab(t *payload.Parts, slab []int, r reservation.Reservation) error {
	if len(slab) == 0 {
		return nil
	}
	end, n := int64(0), int64(0)
	for _, i := range slab {
		n = end + t.Ranges[i].Length
		end += image.RoundUp(t.Ranges[i].Length, SlabAlign)
	}
	buf, err := r.Alloc(n)
	if half := len(slab) / 2; half > 0 && errors.Is(err, tier.ErrNoSpace) {
		if err := allocSlab(t, slab[:half], r); err != nil {
			return err
		}
		return allocSlab(t, slab[half:], r)
	}
	if err != nil {
		return err
	}
	t.Buffers = append(t.Buffers, buf)
	m, ok := buf.Memory().(tier.DeviceMemory)
	if !ok {
		return fmt.Errorf("convert: a table in %T: %w", buf.Memory(), tier.ErrNotSupported)
	}
	at := m.Addr()
	for _, i := range slab {
		t.Ranges[i].Addr = at
		at += tier.Addr(image.RoundUp(t.Ranges[i].Length, SlabAlign))
	}
	return nil
}

// Peek reads from a device, many places at once, through pinned chunks. Bytes of a table that is not
// adopted yet are unknown to the device, and are borrowed meanwhile.
func (b *Builtin) Peek(ctx context.Context, space *tier.Space, reads []image.Peek) error {
	pool, err := b.Streams(space.ID())
	if len(reads) == 0 || err != nil {
		return err
	}
	m := &deviceMemory{space: space}
	src := &bytesFrom{Source: m, space: space}
	borrower, borrows := tier.As[tier.Borrower](pool.Device())
	for _, r := range reads {
		if borrows && r.N > 0 {
			end, err := borrower.Borrow(r.Addr, r.N)
			if err != nil {
				return fmt.Errorf("convert: reading the shape of a table: %w", err)
			}
			defer end()
		}
		m.parts = append(m.parts, image.Part{Off: src.size, N: r.N, Addr: r.Addr})
		src.size += image.RoundUp(r.N, 8) // so that no value is cut
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
