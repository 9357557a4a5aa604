package convert

import (
	"errors"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestSplitChunksOfABatchAreVerified: a batch that is brought to an arena in which there is no room
// in one piece is compared with its checksums, also where two extents share a chunk.
func TestSplitChunksOfABatchAreVerified(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b := m.put(t, numbered(1, 130000), tier.Disk) // 3 MiB of 4
	var held []*tier.Buffer
	for {
		r, err := m.reservations.TryReserve(reservation.AnyInTier(tier.Host), 64*tier.Page, nil)
		if err != nil {
			break
		}
		buf, err := r.Alloc(64 * tier.Page)
		if err := errors.Join(err, r.Release()); err != nil {
			t.Fatal(err)
		}
		held = append(held, buf)
	}
	middle := held[len(held)/2]
	for _, buf := range held {
		if buf != middle {
			if err := buf.Release(); err != nil {
				t.Fatal(err)
			}
		}
	}
	defer func() {
		if err := middle.Release(); err != nil {
			t.Error(err)
		}
	}()
	move := func(to tier.Kind) error {
		return m.mover.Move(t.Context(), b, reservation.AnyInTier(to))
	}
	if err := move(tier.Host); err != nil {
		t.Fatal(err)
	}
	extents := b.Info().Payload.(*batch.Image).Buffer().Memory().(tier.HostMemory).Extents()
	at := int64(len(extents[0])) // in the body
	if len(extents) < 2 || at%payload.SumChunk == 0 {
		t.Fatalf("%d extents, the first of %d bytes: no chunk is split", len(extents), at)
	}
	if err := move(tier.Disk); err != nil {
		t.Fatal(err)
	}
	for _, off := range []int64{at - 1, at} {
		flip(t, b, off)
		if err := move(tier.Host); !errors.Is(err, image.ErrCorrupt) {
			t.Errorf("byte %d of the body was changed: %v", off, err)
		}
		flip(t, b, off)
	}
	if err := move(tier.Host); err != nil {
		t.Error(err)
	}
}
