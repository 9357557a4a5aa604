package convert

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/image/imagetest"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
	"github.com/spillway-db/spillway/tier/faultdev"
)

var compressedIn = []reservation.Strategy{toHost, toDisk}

// A table of any type, a foreign one sliced at every level or one of the mover's own, is
// compressed on its way to host memory and to disk, and is what it was there and as a table again.
func TestTablesOfEveryTypeArePacked(t *testing.T) { onEachGPU(t, 1, tablesOfEveryTypeArePacked) }

func tablesOfEveryTypeArePacked(t *testing.T, g gpus) {
	for _, outside := range []bool{false, true} {
		m := newMachine(t, machineConfig{gpus: g, codec: CodecZstd, buffered: true, outside: outside})
		for i, dt := range arrowgen.Types() {
			if outside && !arrowgen.HasDictionary(dt) || g.skips(i) {
				continue
			}
			for _, to := range compressedIn {
				const form = batch.CompressedImage
				whole := arrowgen.New(uint64(i)).Record(arrowgen.Schema(dt), 90)
				rec := whole.NewSlice(5, 83)
				f := newForeign(t, m)
				b := m.adoptForeign(t, f, rec)
				for n := range 2 { // at first of the foreign table, then of one that knows its checksums
					if err := m.mover.MoveAs(t.Context(), b, to, form); err != nil {
						t.Fatalf("%s to %s: %v", dt, form, err)
					}
					if b.Info().Payload.Type() != form || f.released != 1 {
						t.Fatalf("%s is a %s, want %s; released %d times", dt, b.Info().Payload.Type(), form, f.released)
					}
					m.says(t, b, rec, b.Info().Space.Kind)
					m.rests(t, b, b.Info().Space.Kind)
					if n == 0 {
						if err := m.mover.MoveAs(t.Context(), b, toGPU, batch.ScatteredImage); err != nil {
							t.Fatal(err)
						}
						m.says(t, b, rec, tier.GPU)
					}
				}
				m.drop(t, b)
				rec.Release()
				whole.Release()
			}
		}
	}
}

// A table of many runs is compressed with chunks longer than a frame and shorter than one, and
// is shorter then; a move that chooses the form itself compresses it as it does an image.
func TestLargeTableIsPacked(t *testing.T) { onEachGPU(t, 1, largeTableIsPacked) }

func largeTableIsPacked(t *testing.T, g gpus) {
	for _, chunk := range []int64{16 << 10, 512 << 10} {
		for _, auto := range []bool{false, true} {
			m := newMachine(t, machineConfig{gpus: g, gpu: 24 << 20, host: 24 << 20, codec: CodecS2, chunk: chunk})
			rec := arrowgen.Flights(1, testseed.Rounds(90_000, 40_000))
			b := m.put(t, rec, tier.GPU)
			if err := m.mover.MoveAs(t.Context(), b, toGPU, batch.ScatteredImage); err != nil {
				t.Fatal(err)
			}
			var err error
			if auto {
				err = evictOne(t.Context(), m.mover, b, tier.ID{Kind: tier.Disk}, ReasonTrigger)
			} else {
				err = m.mover.MoveAs(t.Context(), b, toHost, batch.CompressedImage)
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := b.Info().Payload.Type(); got != batch.CompressedImage {
				t.Errorf("it is a %s", got)
			}
			if n, body := b.Info().Bytes, b.Info().Descriptor.Body; n > body*3/4 {
				t.Errorf("%d bytes of %d", n, body)
			}
			if err := m.same(t.Context(), b); err != nil {
				t.Error(err)
			}
			rec.Release()
		}
	}
}

// Each copy of the device's and each write that fails while a table is compressed leaves it
// whole where it was, and so does the end of the context.
func TestEveryFailureOfPackingATable(t *testing.T) {
	ours := errors.New("ours")
	for _, tc := range []struct {
		name  string
		arm   func(m *machine, dev *faultdev.Device, skip int, cancel func()) (remove func())
		want  error
		least int // of failures: a context that ends during the last writes ends too late
	}{
		{"copies", func(_ *machine, dev *faultdev.Device, skip int, _ func()) func() {
			return dev.Add(faultdev.Rule{Ops: []string{"copy-*"}, Skip: skip, Times: 1, Effect: faultdev.Fail(ours)})
		}, ours, 2},
		{"writes", func(m *machine, _ *faultdev.Device, skip int, _ func()) func() {
			return m.files.Add(faultfs.Rule{Ops: []string{"write"}, Skip: skip, Times: 1, Effect: faultfs.Fail(syscall.EIO)})
		}, syscall.EIO, 2},
		{"cancelled", func(m *machine, _ *faultdev.Device, skip int, cancel func()) func() {
			return m.files.Add(faultfs.Rule{Ops: []string{"write"}, Skip: skip, Times: 1,
				Effect: faultfs.Do(func(string, string) { cancel() })})
		}, ours, 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var dev *faultdev.Device
			m := newMachine(t, machineConfig{codec: CodecS2, gpu: 8 << 20, host: 8 << 20,
				wrap: func(d tier.Device) tier.Device { dev = faultdev.New(d, 1); return dev }})
			rec := arrowgen.Flights(1, 50_000)
			defer rec.Release()
			b := m.adoptForeign(t, newForeign(t, m), rec)
			defer m.drop(t, b)
			failed := 0
			for ; ; failed++ {
				ctx, cancel := context.WithCancelCause(t.Context())
				remove := tc.arm(m, dev, failed, func() { cancel(ours) })
				err := m.mover.MoveAs(ctx, b, toDisk, batch.CompressedImage)
				remove()
				cancel(nil)
				if err == nil {
					break
				}
				if !errors.Is(err, tc.want) {
					t.Fatalf("failure %d: %v", failed, err)
				}
				if b.Info().Payload.Type() != batch.ScatteredImage || b.Info().State != batch.Idle {
					t.Fatalf("failure %d: the batch is a %s, %s", failed, b.Info().Payload.Type(), b.Info().State)
				}
				for _, k := range []tier.Kind{tier.Host, tier.Disk} {
					want := map[tier.Kind]int64{tier.Host: m.base}[k]
					if u := m.spaces[k].State().Usage; u.Live != want || u.Reserved != 0 {
						t.Fatalf("failure %d: %s holds %+v, want %d", failed, k, u, want)
					}
				}
			}
			if failed < tc.least {
				t.Errorf("only %d failed", failed)
			}
			m.says(t, b, rec, tier.Disk)
		})
	}
}

// A foreign table that is compressed gets the checksums of the image that would be laid out.
func TestPackedTableHasTheSumsOfTheImage(t *testing.T) {
	m := newMachine(t, machineConfig{codec: CodecBitpack})
	g := arrowgen.New(3)
	g.Plain = true
	rec := g.Record(arrowgen.Schema(arrow.PrimitiveTypes.Int32, arrow.BinaryTypes.String, arrow.FixedWidthTypes.Boolean), 9000)
	defer rec.Release()
	part := rec.NewSlice(11, 8777)
	defer part.Release()
	b := m.adoptForeign(t, newForeign(t, m), part)
	if err := m.mover.MoveAs(t.Context(), b, toDisk, batch.CompressedImage); err != nil {
		t.Fatal(err)
	}
	defer m.drop(t, b)
	laid, _ := imagetest.LaidOut(t, part)
	if got := b.Info().Descriptor; len(got.Sums) < 2 || fmt.Sprint(got.Sums) != fmt.Sprint(laid.Sums) {
		t.Errorf("the sums are %x, laid out %x", got.Sums, laid.Sums)
	}
}
