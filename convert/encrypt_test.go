package convert

import (
	"errors"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// TestEncryptedVolumeSaysWhatIsCorrupt: what the volume finds altered reaches every reader of a
// batch as a *CorruptError of the batch, with the place, whatever is read and however it is stored.
// The batch is whole when the disk gives the right bytes again.
func TestEncryptedVolumeSaysWhatIsCorrupt(t *testing.T) {
	for _, codec := range []Codec{CodecNone, CodecZstd, CodecAuto} {
		t.Run(codec.String(), func(t *testing.T) {
			m := newMachine(t, machineConfig{gpu: 8 << 20, host: 16 << 20, codec: codec, auto: codec == CodecAuto, encrypt: true})
			rec := arrowgen.Flights(1, 40_000)
			b := m.put(t, rec, tier.Disk)
			readers := map[string]func() error{
				"moved to host memory": func() error {
					return m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.Host))
				},
				"moved to the device": func() error {
					return m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.GPU))
				},
				"packed": func() error {
					return m.mover.MoveAs(t.Context(), b, reservation.AnyInTier(tier.Host), batch.CompressedImage)
				},
				"columns": func() error {
					return m.columnsOf(t.Context(), b,
						image.Selection{Columns: []string{rec.ColumnName(0), rec.ColumnName(int(rec.NumCols()) - 1)}})
				},
				"digest": func() error {
					h, err := b.Open(t.Context(), tier.ID{}, false)
					if err != nil {
						return err
					}
					_, err = m.mover.Digest(t.Context(), h)
					return errors.Join(err, h.Close())
				},
			}
			for name, read := range readers {
				remove := m.files.Add(faultfs.Rule{Ops: []string{"read"}, Effect: faultfs.BitFlip()})
				err := read()
				remove()
				var c *image.CorruptError
				var a *tier.AlteredError
				if !errors.Is(err, image.ErrCorrupt) || !errors.As(err, &c) || !errors.As(err, &a) {
					t.Errorf("%s: %v", name, err)
					continue
				}
				if c.Batch != b.ID() || c.Volume != a.Volume+" "+a.File || c.Offset != a.Offset {
					t.Errorf("%s: told as %+v of %+v", name, c, a)
				}
				m.rests(t, b, tier.Disk)
			}
			m.whole(t, b, tier.Disk)
		})
	}
}
