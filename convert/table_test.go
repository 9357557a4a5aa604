package convert

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/faultdev"
)

var (
	toGPU  = reservation.AnyInTier(tier.GPU)
	toHost = reservation.AnyInTier(tier.Host)
	toDisk = reservation.AnyInTier(tier.Disk)
)

// as moves a batch to a form and checks that it is whole there.
func (m *machine) as(t *testing.T, b *batch.Batch, to reservation.Strategy, form batch.PayloadType, at tier.Kind) {
	t.Helper()
	if err := m.mover.MoveAs(t.Context(), b, to, form); err != nil {
		t.Fatalf("to %s: %v", form, err)
	}
	if got := b.Info().Payload.Type(); got != form {
		t.Fatalf("the batch is %s, want %s", got, form)
	}
	if !m.mover.cfg.Builtin.Outside { // the digest is that of another layout there
		m.whole(t, b, at)
		return
	}
	m.rests(t, b, at)
	m.says(t, b, m.records[b.ID()], at)
}

// Every type goes from every form to a table and back, byte for byte.
func TestTablesOfEveryType(t *testing.T) {
	t.Parallel()
	onEachGPUPinnedOrNot(t, tablesOfEveryType)
}

func tablesOfEveryType(t *testing.T, gpu gpus) {
	for _, outside := range []bool{false, true} {
		m := newMachine(t, machineConfig{gpus: gpu, buffered: true, outside: outside})
		for i, dt := range arrowgen.Types() {
			if outside && !arrowgen.HasDictionary(dt) || gpu.skips(i) {
				continue
			}
			for _, rows := range gpu.rowsOf(i) {
				t.Run(fmt.Sprintf("%v/%d/%d", outside, i, rows), func(t *testing.T) {
					g := arrowgen.New(uint64(i + rows))
					rec := g.Record(arrowgen.Schema(dt, dt), rows)
					defer rec.Release()
					b := m.put(t, rec, tier.Host)
					m.as(t, b, toGPU, batch.ScatteredImage, tier.GPU)
					m.as(t, b, toHost, batch.PlainImage, tier.Host)
					m.as(t, b, toGPU, batch.PlainImage, tier.GPU)
					m.as(t, b, toGPU, batch.ScatteredImage, tier.GPU)
					m.as(t, b, toDisk, batch.PlainImage, tier.Disk)
					m.as(t, b, toGPU, batch.ScatteredImage, tier.GPU)
					m.as(t, b, toGPU, batch.PlainImage, tier.GPU)
				})
			}
		}
	}
}

// longTable returns a record that takes three asynchronous copies. It is made once.
func longTable(t *testing.T) arrow.RecordBatch {
	t.Helper()
	rec := threePieces()
	if l, err := image.NewLayout(rec, image.MaxInline); err != nil || l.Desc.Body < 2*transfer.MaxPiece {
		t.Fatalf("too little for this test, or %v", err)
	} else {
		l.Close()
	}
	return rec
}

var threePieces = sync.OnceValue(func() arrow.RecordBatch {
	const rows = 100_000
	numbers, strings := arrowgen.Ints(1, rows, 20), arrowgen.Strings(1, rows, 1) // strings take long to compare
	return array.NewRecordBatch(arrowgen.Schema(append(slices.Repeat([]arrow.DataType{arrow.PrimitiveTypes.Int64}, 20), arrow.BinaryTypes.String)...),
		append(numbers.Columns(), strings.Column(0)), rows)
})

// A table that is larger than what one copy carries, and packed images as its source.
func TestLargeTables(t *testing.T) { onEachGPUPinnedOrNot(t, largeTables) }

func largeTables(t *testing.T, g gpus) {
	m := newMachine(t, machineConfig{gpus: g, onDisk: g.emulator == nil, gpu: 64 << 20, host: 64 << 20, disk: 64 << 20, codec: CodecS2})
	rec := longTable(t)
	b := m.laid(t, rec)
	m.as(t, b, toGPU, batch.ScatteredImage, tier.GPU)
	m.as(t, b, toHost, batch.PlainImage, tier.Host)
	m.as(t, b, toHost, batch.CompressedImage, tier.Host)
	m.as(t, b, toGPU, batch.ScatteredImage, tier.GPU)
	m.as(t, b, toDisk, batch.PlainImage, tier.Disk)
	m.as(t, b, toDisk, batch.CompressedImage, tier.Disk)
	m.as(t, b, toGPU, batch.ScatteredImage, tier.GPU)
	c, err := m.mover.Clone(t.Context(), b, nil)
	if err != nil {
		t.Fatal(err)
	}
	if c.Info().Payload.Type() != batch.ScatteredImage {
		t.Errorf("the clone is %s", c.Info().Payload.Type())
	}
	m.drop(t, b)
	m.records[c.ID()] = rec
	m.as(t, c, toHost, batch.PlainImage, tier.Host)
	m.drop(t, c)
}

// The device makes one copy for all buffers of a table, and allocates no memory.
func TestTableIsOneCopy(t *testing.T) { onEachGPU(t, 1, tableIsOneCopy) }

func tableIsOneCopy(t *testing.T, g gpus) {
	var dev *faultdev.Device
	m := newMachine(t, machineConfig{gpus: g, wrap: func(d tier.Device) tier.Device { dev = faultdev.New(d, 1); return dev }})
	rec := arrowgen.New(1).Record(arrowgen.Schema(arrowgen.Flat()...), 100)
	defer rec.Release()
	b := m.put(t, rec, tier.Host)
	for _, step := range []func(){
		func() { m.as(t, b, toGPU, batch.ScatteredImage, tier.GPU) },
		func() { m.as(t, b, toHost, batch.PlainImage, tier.Host) },
	} {
		before := dev.Count("copy-regions")
		others := dev.Count("copy-to-device", "copy-to-host", "fill", "alloc")
		if step(); b.Info().Space.Kind == tier.Host {
			if n := dev.Count("copy-regions") - before; n != 1 {
				t.Errorf("%d batched copies, want 1", n)
			}
			if n := dev.Count("copy-to-device", "copy-to-host", "fill", "alloc") - others; n != 0 {
				t.Errorf("%d other operations", n)
			}
		}
	}
}

// says checks that a batch says what the record does, and has good checksums on disk.
func (m *machine) says(t *testing.T, b *batch.Batch, rec arrow.RecordBatch, k tier.Kind) {
	t.Helper()
	if at := b.Info().Space.Kind; at != k {
		t.Fatalf("it is in %s, want %s", at, k)
	}
	got, err := m.opened(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	defer got.Release()
	if err := equal.Records(rec, got); err != nil {
		t.Fatalf("in %s: %v", k, err)
	}
}

func (m *machine) adoptForeign(t *testing.T, f *foreigner, rec arrow.RecordBatch) *batch.Batch {
	t.Helper()
	p, err := m.mover.AdoptTable(t.Context(), f.table(rec, m.spaces[tier.GPU]))
	if err != nil {
		f.release()
		t.Fatal(err)
	}
	return m.own(t, rec, p)
}

// own makes a batch that the test drops.
func (m *machine) own(t *testing.T, rec arrow.RecordBatch, p batch.Payload) *batch.Batch {
	t.Helper()
	b, err := batch.New(batch.Options{ID: m.ids.Next(), Payload: p})
	if err != nil {
		t.Fatal(err)
	}
	m.records[b.ID()] = rec
	return b
}

func (m *machine) laid(t *testing.T, rec arrow.RecordBatch) *batch.Batch {
	t.Helper()
	p, err := m.mover.Ingest(t.Context(), rec, toHost)
	if err != nil {
		t.Fatal(err)
	}
	return m.own(t, rec, p)
}

func (m *machine) drop(t *testing.T, b *batch.Batch) {
	t.Helper()
	if err := b.Drop(); err != nil {
		t.Fatal(err)
	}
}

// A cancelled move of a table leaves it where it is.
func TestTableMoveIsCancelled(t *testing.T) { onEachGPU(t, 1, tableMoveIsCancelled) }

func tableMoveIsCancelled(t *testing.T, g gpus) {
	var dev *faultdev.Device
	m := newMachine(t, machineConfig{gpus: g, gpu: 64 << 20, host: 64 << 20, disk: 64 << 20, wrap: func(d tier.Device) tier.Device { dev = faultdev.New(d, 1); return dev }})
	rec := longTable(t)
	b := m.laid(t, rec)
	defer m.drop(t, b)
	m.as(t, b, toGPU, batch.ScatteredImage, tier.GPU)
	for _, to := range []struct {
		form batch.PayloadType
		at   tier.Kind
	}{{batch.PlainImage, tier.Host}, {batch.PlainImage, tier.Disk}, {batch.PlainImage, tier.GPU}} {
		ctx, cancel := context.WithCancel(t.Context())
		remove := dev.Add(faultdev.Rule{Ops: []string{"copy-regions"}, Times: 1, Effect: faultdev.Do(func(string, int64) { cancel() })})
		err := m.mover.MoveAs(ctx, b, reservation.AnyInTier(to.at), to.form)
		remove()
		if !errors.Is(err, context.Canceled) {
			t.Errorf("to %s in %s: %v", to.form, to.at, err)
		}
		if b.Info().Payload.Type() != batch.ScatteredImage {
			t.Fatalf("the batch is %s", b.Info().Payload.Type())
		}
		m.whole(t, b, tier.GPU)
	}
}

// A table whose dictionary cannot be copied stays where it is, and keeps no room elsewhere.
func TestTableWhoseDictionaryCannotBeCopied(t *testing.T) {
	injected := errors.New("injected")
	for _, to := range []struct {
		form batch.PayloadType
		at   tier.Kind
	}{{batch.PlainImage, tier.Host}, {batch.PlainImage, tier.Disk}} {
		var dev *faultdev.Device
		m := newMachine(t, machineConfig{wrap: func(d tier.Device) tier.Device { dev = faultdev.New(d, 1); return dev }})
		rec := coded(1, 2_000)
		defer rec.Release()
		b := m.put(t, rec, tier.GPU)
		m.as(t, b, toGPU, batch.ScatteredImage, tier.GPU)
		remove := dev.Add(faultdev.Rule{Times: 1, Effect: faultdev.Fail(injected)})
		err := m.mover.MoveAs(t.Context(), b, reservation.AnyInTier(to.at), to.form)
		remove()
		if !errors.Is(err, injected) {
			t.Errorf("to %s: %v", to.form, err)
		}
		m.rests(t, b, tier.GPU)
		m.as(t, b, reservation.AnyInTier(to.at), to.form, to.at)
	}
}

// A fault at each operation of the device leaves the batch where it was, and nothing is
// lost: the same move succeeds afterwards.
func TestTableFaults(t *testing.T) {
	t.Parallel()
	onEachGPU(t, 1, tableFaults)
}

var scattered = Form{batch.ScatteredImage, tier.GPU}

func tableFaults(t *testing.T, gpu gpus) {
	injected := errors.New("injected")
	first, step := testseed.Share(t, 3)
	for _, effect := range []faultdev.Effect{faultdev.Fail(injected), faultdev.FailWork(injected)} {
		var dev *faultdev.Device
		m := newMachine(t, machineConfig{gpus: gpu, wrap: func(d tier.Device) tier.Device { dev = faultdev.New(d, 1); return dev }})
		g := arrowgen.New(9)
		rec := g.Record(arrowgen.Schema(arrow.BinaryTypes.String, arrow.FixedWidthTypes.Boolean, arrow.ListOf(arrow.PrimitiveTypes.Int16)), 3_000) // several chunks
		defer rec.Release()
		for _, own := range []bool{true, false} {
			for _, to := range []struct {
				from, to Form
			}{
				{scattered, ImageIn(tier.Host)}, {scattered, ImageIn(tier.GPU)}, {scattered, ImageIn(tier.Disk)},
				{ImageIn(tier.Host), scattered}, {ImageIn(tier.GPU), scattered}, {ImageIn(tier.Disk), scattered},
			} {
				if !own && to.from != scattered {
					continue
				}
				hits := 0
				for skip := first; ; skip += step {
					var b *batch.Batch
					if own {
						b = m.laid(t, rec)
						m.as(t, b, reservation.AnyInTier(to.from.Kind), to.from.Type, to.from.Kind)
					} else {
						b = m.adoptForeign(t, newForeign(t, m), rec)
					}
					at := b.Info().Space.Kind
					remove := dev.Add(faultdev.Rule{Skip: skip, Times: 1, Effect: effect})
					err := m.mover.MoveAs(context.Background(), b, reservation.AnyInTier(to.to.Kind), to.to.Type)
					hit := dev.Hits() > 0
					remove()
					if !hit {
						if err != nil {
							t.Fatal(err)
						}
						m.drop(t, b)
						break
					}
					hits++
					if err == nil {
						t.Fatalf("%s to %s: the fault at %d went unnoticed", to.from, to.to, skip)
					}
					if !errors.Is(err, injected) {
						t.Fatalf("%s to %s: %v", to.from, to.to, err)
					}
					if b.Info().Payload.Type() != to.from.Type {
						t.Fatalf("the batch is %s", b.Info().Payload.Type())
					}
					m.rests(t, b, at)
					m.says(t, b, rec, at)
					m.drop(t, b)
				}
				if hits == 0 && first == 0 {
					t.Errorf("%s to %s: no fault hit", to.from, to.to)
				}
			}
		}
	}
}
