package cdevice

import (
	"errors"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/tier"
)

// More than half of a GPU's memory comes back to where it was exported. It is charged once,
// whatever has it, until the last holder has given it up, and counts as what a move of the batch
// would free.
func TestOwnExportIsChargedOnce(t *testing.T) {
	r := newRig(t, nil)
	dict := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int16, ValueType: arrow.BinaryTypes.String}
	for _, c := range []struct {
		schema *arrow.Schema
		rows   int
		forms  []batch.PayloadType
	}{
		{arrowgen.Schema(arrow.PrimitiveTypes.Int64, arrow.BinaryTypes.String), 400_000, []batch.PayloadType{batch.PlainImage}},
		{arrowgen.Schema(dict, arrow.BinaryTypes.StringView, arrow.PrimitiveTypes.Int64), 5000, []batch.PayloadType{batch.PlainImage, batch.ScatteredImage}},
	} {
		for _, form := range c.forms {
			rec := arrowgen.New(2).Record(c.schema, c.rows)
			b := r.put(t, rec, form)
			used := r.gpu.State().Used()
			half := r.slice(t, b, 0, c.rows/2) // a slice of what a consumer has sent back
			again := r.slice(t, half, 3, c.rows/2)
			if r.gpu.State().Used() != used || c.rows > 5000 && used < rigMemory/2 {
				t.Errorf("%s: %d bytes are used, %d before, of %d", form, r.gpu.State().Used(), used, rigMemory)
			}
			if n := again.Info().Bytes; n <= 0 || n > used/2+rigMemory/100 {
				t.Errorf("%s: a slice of half of %d bytes has %d", form, used, n)
			}
			r.drop(t, b)
			r.drop(t, half)
			want := rec.NewSlice(3, int64(c.rows/2))
			r.says(t, again, want)
			if r.gpu.State().Used() != used {
				t.Errorf("%s: %d bytes are used, %d while the export was a batch", form, r.gpu.State().Used(), used)
			}
			if err := r.mover.Move(t.Context(), again, onHost); err != nil {
				t.Fatal(err)
			}
			if r.gpu.State().Used() != 0 {
				t.Errorf("%s: when all has gone %d bytes are used", form, r.gpu.State().Used())
			}
			r.says(t, again, want)
			r.drop(t, again)
			want.Release()
			rec.Release()
		}
	}
}

// An export that comes back as a foreign array is not recognized, and what there is no room for is
// refused.
func TestExportThatIsAnothers(t *testing.T) {
	lib := buildConsumer(t)
	r := newRig(t, nil)
	rec := arrowgen.New(2).Record(arrowgen.Schema(arrow.PrimitiveTypes.Int64, arrow.BinaryTypes.String), 400_000)
	defer rec.Release()
	b := r.put(t, rec, batch.PlainImage)
	defer r.drop(t, b)
	a, s := r.export(t, b, Config{})
	of := Array{Release: a.Array.Release + 1, PrivateData: a.Array.PrivateData}
	if own := callbacks().charged(&of, r.gpu); own != nil {
		t.Errorf("an array with another release is taken for an export with %v", own)
	}
	call(lib.produce, a, nil)
	var full *tier.NoSpaceError
	if _, err := Import(t.Context(), r.mover, r.gpu, a, s, Config{}); !errors.As(err, &full) {
		t.Errorf("more than half of the GPU, twice: %v", err)
	}
	a.Release()
	s.Close()
}
