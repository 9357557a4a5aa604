package test

import (
	"fmt"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
)

// wideRecord has a hundred columns and a schema of its own.
func wideRecord(first int64) arrow.RecordBatch {
	var fields []arrow.Field
	var columns []arrow.Array
	for i := range 100 {
		b := array.NewInt64Builder(memory.DefaultAllocator)
		b.Append(first + int64(i))
		fields = append(fields, arrow.Field{Name: fmt.Sprintf("the column of number %d", i), Type: arrow.PrimitiveTypes.Int64})
		columns = append(columns, b.NewArray())
	}
	meta := arrow.NewMetadata([]string{"of"}, []string{"all the records of this test"})
	return array.NewRecordBatch(arrow.NewSchema(fields, &meta), columns, 1)
}

// TestSchemaOfManyBatches: each file has the schema, and the engine that finds them has it once.
func TestSchemaOfManyBatches(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	const batches = 30
	dir, copied := t.TempDir(), t.TempDir()
	eng := persistentEngine(t, dir, func(c *spillway.Config) { c.Codec = convert.CodecNone })
	plan, err := eng.Plan("query")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("join", 0)
	if err != nil {
		t.Fatal(err)
	}
	for n := range int64(batches) {
		p, err := eng.Mover().Ingest(t.Context(), wideRecord(n), reservation.AnyInTier(tier.Disk))
		if err != nil {
			t.Fatal(err)
		}
		b, err := eng.NewBatch(p)
		if err != nil {
			t.Fatal(err)
		}
		if err := repo.PutBatch(0, b); err != nil {
			t.Fatal(err)
		}
	}
	testfs.CopyTree(t, copied, dir)
	closePersistent(t, eng)
	wantNothingIn(t, dir)

	eng = persistentEngine(t, copied)
	kept := eng.Persisted()
	if len(kept) != batches {
		t.Fatalf("%d are kept", len(kept))
	}
	for i, k := range kept {
		if k.Schema != kept[0].Schema {
			t.Error("a batch has a schema of its own")
		}
		b, err := eng.Adopt(t.Context(), k)
		if err != nil {
			t.Fatal(err)
		}
		rec := recordOf(t, eng, b)
		if err := convert.Equal(wideRecord(int64(i)), rec); err != nil {
			t.Errorf("record %d: %v", i, err)
		}
		rec.Release()
		if err := b.Drop(); err != nil {
			t.Error(err)
		}
	}
	closePersistent(t, eng)
	wantNothingIn(t, copied)
}
