package convert

import (
	"context"
	"errors"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestVerifyFindsEveryChunk: an image on disk, compressed or not, and a dictionary, of which
// a byte is another.
func TestVerifyFindsEveryChunk(t *testing.T) {
	for _, codec := range []Codec{CodecNone, CodecS2} {
		m := newMachine(t, machineConfig{codec: codec})
		b := m.put(t, numbered(1, 20000), tier.Host)
		if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.Disk)); err != nil {
			t.Fatal(err)
		}
		if err := m.mover.Verify(t.Context(), b.Info().Payload); err != nil {
			t.Fatal(err)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if err := m.mover.Verify(ended, b.Info().Payload); !errors.Is(err, context.Canceled) {
			t.Errorf("with a context that has ended: %v", err)
		}
		img := b.Info().Payload.(*batch.Image)
		file := img.Buffer().Memory().(tier.FileMemory)
		stored := [][2]int64{{0, img.Descriptor().Body}} // from, to
		if img.Parts.Type == payload.CompressedImage {
			stored = nil
			for _, r := range img.Parts.Runs {
				stored = append(stored, [2]int64{r.Offset, r.Offset + r.Stored()})
			}
		}
		found := 0
		for _, part := range stored {
			for off := part[0]; off < part[1]; off += payload.SumChunk / 2 {
				flipIn(t, file, off)
				if err := m.mover.Verify(t.Context(), b.Info().Payload); !errors.Is(err, image.ErrCorrupt) {
					t.Errorf("%s, byte %d: %v", codec, off, err)
				}
				found++
				flipIn(t, file, off)
			}
		}
		if found < 4 {
			t.Errorf("%s: only %d bytes were changed", codec, found)
		}
	}
}
