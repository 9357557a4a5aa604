package cdevice

import (
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
)

// TestExportOfManyDictionaries: each of many shared dictionaries is exported with its own column.
func TestExportOfManyDictionaries(t *testing.T) {
	r := newRig(t, nil)
	rec := arrowgen.Coded(400)
	defer rec.Release()
	b := r.put(t, rec, batch.PlainImage)
	if n := len(b.Info().Descriptor.AllDictionaries()); n < 400 {
		t.Fatalf("the batch shares %d dictionaries: the test shows nothing", n)
	}
	array, schema := r.export(t, b, Config{})
	table, err := Import(t.Context(), r.mover, r.gpu, array, schema, Config{})
	if err != nil {
		t.Fatal(err)
	}
	c := r.batch(t, table)
	r.says(t, c, rec)
	r.drop(t, c)
	r.drop(t, b)
}
