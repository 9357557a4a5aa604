package spillway

import (
	"errors"
	"io"
	"log/slog"
	"runtime"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestNothingReleasedIsRecorded: a batch that is dropped right before its record is written has
// none, for its room may be another's by then.
func TestNothingReleasedIsRecorded(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs Linux, for locks that end with their process")
	}
	for codec, form := range map[convert.Codec]batch.PayloadType{convert.CodecNone: batch.DiskImage, convert.CodecS2: batch.DiskPacked} {
		eng, err := Open(t.Context(), Config{
			GPUs: []GPU{}, HostMemory: 16 << 20, Codec: codec, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
			Disks: []Disk{{Dir: t.TempDir(), Capacity: 16 << 20, Keep: true}},
		})
		if err != nil {
			t.Fatal(err)
		}
		numbers := array.NewInt64Builder(memory.DefaultAllocator)
		numbers.AppendEmptyValues(20_000)
		col := numbers.NewArray()
		rec := array.NewRecordBatch(arrow.NewSchema([]arrow.Field{{Name: "n", Type: col.DataType()}}, nil), []arrow.Array{col}, int64(col.Len()))
		p, err := eng.Mover().Ingest(t.Context(), rec, reservation.AnyInTier(tier.Disk))
		if err != nil {
			t.Fatal(err)
		}
		volume := eng.keeper.volumes[p.Space().ID()]
		if err := p.Release(); err != nil {
			t.Error(err)
		}
		if p.Type() != form {
			t.Errorf("it is a %s, want a %s", p.Type(), form)
		}
		if key, err := eng.keeper.record(volume, 1, standing{payload: p}); !errors.Is(err, tier.ErrReleased) {
			t.Errorf("%s: recorded as %d, %v", p.Type(), key, err)
		}
		if err := eng.Close(); err != nil {
			t.Error(err)
		}
	}
}
