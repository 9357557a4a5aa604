package cdevice

import (
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/lookup"
)

// TestExportOfManyDictionaries: four times as many dictionaries take about four times as many steps
// to be found.
func TestExportOfManyDictionaries(t *testing.T) {
	exported := func(n int) int64 {
		r := newRig(t, nil)
		rec := arrowgen.Coded(n)
		defer rec.Release()
		b := r.put(t, rec, batch.PlainImage)
		defer r.drop(t, b)
		before := lookup.Steps()
		array, schema := r.export(t, b, Config{})
		steps := lookup.Steps() - before
		array.Release()
		schema.Close()
		return steps
	}
	const n = 100
	if one, four := exported(n), exported(4*n); one < n || four > 5*one {
		t.Errorf("%d steps for %d dictionaries, %d for %d", one, n, four, 4*n)
	}
}
