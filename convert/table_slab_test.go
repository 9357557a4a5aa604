package convert

import (
	"slices"
	"sync/atomic"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/tier"
)

// wide makes a record of so many columns.
func wide(columns, rows int) arrow.RecordBatch {
	types := slices.Repeat([]arrow.DataType{arrow.PrimitiveTypes.Int64, arrow.BinaryTypes.String}, columns/2)
	return arrowgen.New(3).Record(arrowgen.Schema(types...), rows)
}

// counted counts the allocations and frees of a simulated device.
func counted(allocs, frees *atomic.Int64) func(sim.Op) error {
	return func(op sim.Op) error {
		if op.Stage != sim.Submit {
			return nil
		}
		switch op.Kind {
		case sim.OpAlloc:
			allocs.Add(1)
		case sim.OpFree:
			frees.Add(1)
		}
		return nil
	}
}

// TestTableOfManyBuffersIsOneAllocation, and its ranges are apart and aligned.
func TestTableOfManyBuffersIsOneAllocation(t *testing.T) {
	var allocs, frees atomic.Int64
	m := newMachine(t, machineConfig{gpu: 64 << 20, host: 64 << 20, faults: counted(&allocs, &frees)})
	rec := wide(200, 5000)
	defer rec.Release()
	b := m.put(t, rec, tier.Host)
	before := allocs.Load()
	m.as(t, b, toGPU, batch.ScatteredImage, tier.GPU)
	if n := allocs.Load() - before; n != 1 {
		t.Errorf("%d allocations for %d buffers", n, len(b.Info().Descriptor.Buffers))
	}
	tr, err := b.TryTransit()
	if err != nil {
		t.Fatal(err)
	}
	ranges := slices.Clone(tr.Payload().(*batch.Image).Parts.Ranges)
	if err := tr.Abort(); err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(ranges, func(a, b payload.DeviceRange) int { return int(a.Addr) - int(b.Addr) })
	end := tier.Addr(0)
	for _, r := range ranges {
		if r.Length == 0 {
			continue
		}
		if r.Addr%64 != 0 || r.Addr < end {
			t.Errorf("%d bytes at %#x, where the last range ends at %#x", r.Length, uint64(r.Addr), uint64(end))
		}
		end = r.Addr + tier.Addr(r.Length)
	}
	before = frees.Load()
	m.as(t, b, toHost, batch.PlainImage, tier.Host)
	if n := frees.Load() - before; n != 1 {
		t.Errorf("%d frees", n)
	}
}
