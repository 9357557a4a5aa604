package cdevice

import (
	"errors"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/tier"
)

// FuzzFormat: whatever a format says and how many children come with it, there is a type or a
// typed error.
func FuzzFormat(f *testing.F) {
	for _, dt := range arrowgen.Types() {
		if text, ok := format(dt); ok {
			f.Add(text, 1)
		}
	}
	for _, text := range []string{"", ":", "+", "+w:99999999999", "d:1,2,3,4", "ts", "tss", "+ud:", "+us:0,0", "+ud:127", "w:", "+m:"} {
		f.Add(text, 2)
	}
	f.Fuzz(func(t *testing.T, text string, children int) {
		mem := new(memory)
		defer mem.free()
		at := mem.text(text)
		fields := make([]Schema, children&3)
		structs := make([]Schema, 1)
		to, kept := placeAll[Schema](mem, len(fields))
		number := mem.text("i")
		for i := range kept {
			kept[i] = Schema{Format: number, Release: 1}
		}
		structs[0] = Schema{Format: at, Release: 1, NChildren: int64(len(fields)), Children: to}
		if _, err := new(schemaReader).record(&structs[0]); err != nil && !errors.Is(err, convert.ErrInvalid) && !errors.Is(err, tier.ErrNotSupported) {
			t.Errorf("%q: %v", text, err)
		}
	})
}

// Every type comes back from its format.
func TestFormats(t *testing.T) {
	for _, dt := range arrowgen.Flat() {
		text, ok := format(dt)
		if !ok {
			t.Errorf("%s has no format", dt)
			continue
		}
		if got, err := typeOf(nil, text, 0, nil); err != nil || !arrow.TypeEqual(got, dt) {
			t.Errorf("%s is %q, which is %v, %v", dt, text, got, err)
		}
	}
}
