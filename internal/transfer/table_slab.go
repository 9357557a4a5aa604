package transfer

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// SlabMost is how many bytes of small buffers share an allocation: few enough for memory in
// pieces, and so many that allocating is no part of a move's time. 500 allocations, or frees, took
// a sixth of that of 64 MiB.
const SlabMost = MaxPiece

// SlabAlign is how buffers in one allocation are aligned: as devices align allocations.
const SlabAlign = 256

// scattered allocates the buffers of a table, as long as the image's, or as the old table's.
func scattered(t *payload.TableParts, old *payload.Table, r reservation.Reservation) error {
	t.Ranges = make([]payload.DeviceRange, len(t.Descriptor.Buffers))
	if old != nil {
		t.Adjustments = old.Adjustments()
	}
	first := make(map[int64]int) // by place in the body: some are of several columns
	s := slab{table: t, r: r}
	for i, span := range t.Descriptor.Buffers {
		if span.Length <= 0 {
			continue
		}
		if _, ok := first[span.Offset]; ok {
			continue
		}
		first[span.Offset] = i
		t.Ranges[i].Length = span.Length
		if old != nil {
			t.Ranges[i].Length = old.Ranges()[i].Length
		}
		if err := s.add(i); err != nil {
			return err
		}
	}
	if err := s.take(s.of); err != nil {
		return err
	}
	for i, span := range t.Descriptor.Buffers {
		if span.Length > 0 {
			t.Ranges[i] = t.Ranges[first[span.Offset]]
		}
	}
	return nil
}

// slab gathers the buffers of a table that are to share an allocation.
type slab struct {
	table *payload.TableParts
	r     reservation.Reservation
	of    []int // by number; their lengths are known
	bytes int64 // of all of them, with what is lost between
	alone int64 // what they are charged if each has an allocation of its own
}

// add puts buffer i into the slab, after what is there has been allocated if both are too
// much. All together must not be charged more than each by itself, which is what is reserved.
func (s *slab) add(i int) error {
	n, space := s.table.Ranges[i].Length, s.r.Space()
	if len(s.of) > 0 && (s.bytes+n > SlabMost || space.Charge(s.bytes+n) > s.alone+space.Charge(n)) {
		if err := s.take(s.of); err != nil {
			return err
		}
		s.of, s.bytes, s.alone = s.of[:0], 0, 0
	}
	s.of = append(s.of, i)
	s.bytes += image.RoundUp(n, SlabAlign)
	s.alone += space.Charge(n)
	return nil
}

// take allocates buffers side by side, or half of them, and then the others, where there is
// no piece for all.
func (s *slab) take(of []int) error {
	if len(of) == 0 {
		return nil
	}
	end, n := int64(0), int64(0)
	for _, i := range of {
		n = end + s.table.Ranges[i].Length
		end += image.RoundUp(s.table.Ranges[i].Length, SlabAlign)
	}
	buf, err := s.r.Alloc(n)
	if half := len(of) / 2; half > 0 && errors.Is(err, tier.ErrNoSpace) {
		if err := s.take(of[:half]); err != nil {
			return err
		}
		return s.take(of[half:])
	}
	if err != nil {
		return err
	}
	s.table.Buffers = append(s.table.Buffers, buf)
	m, ok := buf.Memory().(tier.DeviceMemory)
	if !ok {
		return fmt.Errorf("convert: a table in %T: %w", buf.Memory(), tier.ErrNotSupported)
	}
	at := m.Addr()
	for _, i := range of {
		s.table.Ranges[i].Addr = at
		at += tier.Addr(image.RoundUp(s.table.Ranges[i].Length, SlabAlign))
	}
	return nil
}
