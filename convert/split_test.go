package convert

import (
	"bytes"
	"errors"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// inExtents is host memory in several pieces.
type inExtents [][]byte

func (m inExtents) Extents() [][]byte { return m }

func (m inExtents) Size() (n int64) {
	for _, e := range m {
		n += int64(len(e))
	}
	return n
}

// cutAt makes such memory of n bytes that is cut at these places.
func cutAt(n int64, cuts ...int64) (m inExtents) {
	p := make([]byte, n)
	last := int64(0)
	for _, c := range append(cuts, n) {
		m = append(m, p[last:c:c])
		last = c
	}
	return m
}

// TestChunksThatExtentsSplitAreVerified: bytes from disk that are to lie in several extents of host
// memory are compared with their checksums wherever the extents end: a change of any part of a
// chunk that two or three of them share is found, and located where the chunk begins.
func TestChunksThatExtentsSplitAreVerified(t *testing.T) {
	m := newMachine(t, machineConfig{disk: 32 << 20})
	b := m.put(t, numbered(1, 60_000), tier.Disk) // 1.4 MiB
	img, ok := b.Info().Payload.(*batch.Image)
	if !ok || b.Info().Descriptor.Body < 3*payload.SumChunk+4*tier.Page {
		t.Fatalf("%s of %d bytes", b.Info().Payload.Type(), b.Info().Descriptor.Body)
	}
	desc, file := img.Descriptor(), img.Buffer().Memory().(tier.FileMemory)
	sound := make([]byte, desc.Body)
	if err := file.ReadAt(t.Context(), sound, 0); err != nil {
		t.Fatal(err)
	}
	const chunk, page = payload.SumChunk, tier.Page
	first, step := testseed.Share(t, 3)
	for i, cuts := range [][]int64{
		{}, {chunk}, {page}, {chunk - page}, {chunk + page}, {chunk + page, chunk + 2*page},
		{page, 2*chunk + chunk/2, 3*chunk + page}, {3*chunk + 2*page}, {desc.Body - page},
	} {
		if i%step != first {
			continue
		}
		var parts []int64 // beginnings of what lies in one extent and one chunk
		last := int64(0)
		for _, end := range append(cuts, desc.Body) {
			for last < end {
				parts = append(parts, last)
				last = min(end, last-last%chunk+chunk)
			}
		}
		into := cutAt(desc.Body, cuts...)
		if err := transfer.DiskToHost(t.Context(), desc, into, file); err != nil || !bytes.Equal(bytes.Join(into, nil), sound) {
			t.Errorf("cut at %v: %v", cuts, err)
		}
		for _, at := range parts {
			if err := file.WriteAt(t.Context(), []byte{sound[at] ^ 4}, at); err != nil {
				t.Fatal(err)
			}
			err := transfer.DiskToHost(t.Context(), desc, cutAt(desc.Body, cuts...), file)
			volume, name, offset := file.Locate(at / chunk * chunk)
			var c *image.CorruptError
			if !errors.As(err, &c) || c.Offset != offset || c.Volume != volume+" "+name || c.Want != desc.Sums[at/chunk] {
				t.Errorf("cut at %v, byte %d changed: %v", cuts, at, err)
			}
			if err := file.WriteAt(t.Context(), sound[at:at+1], at); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestSplitChunksOfABatchAreVerified: the same for a batch that is brought to an arena in which
// there is no room in one piece.
func TestSplitChunksOfABatchAreVerified(t *testing.T) {
	m := newMachine(t, machineConfig{})
	b := m.put(t, numbered(1, 130000), tier.Disk) // 3 MiB of 4
	var held []*tier.Buffer
	for {
		r, err := m.reservations.TryReserve(reservation.AnyInTier(tier.Host), 64*tier.Page)
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
