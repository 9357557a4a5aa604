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
	for _, text := range []string{
		"", ":", "+", "+w:99999999999", "d:1,2,3,4", "ts", "tss", "+ud:", "+us:0,0", "+ud:127", "w:", "+m:",
	} {
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
		_, err := new(schemaReader).record(&structs[0])
		if err != nil && !errors.Is(err, convert.ErrInvalid) && !errors.Is(err, tier.ErrNotSupported) {
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

// TestParameters: parameters that make no type are an error, whatever arrow-go would make of them.
func TestParameters(t *testing.T) {
	field := arrow.Field{Name: "f", Type: arrow.PrimitiveTypes.Int8}
	for text, want := range map[string]arrow.DataType{
		"d:10,2":     &arrow.Decimal128Type{Precision: 10, Scale: 2},
		"d:10,2,128": &arrow.Decimal128Type{Precision: 10, Scale: 2},
		"d:10,128":   &arrow.Decimal128Type{Precision: 10, Scale: 128}, "w:0,128": nil,
		"d:10,-2,256": &arrow.Decimal256Type{Precision: 10, Scale: -2}, "tss": &arrow.TimestampType{},
		"w:x": nil, "w:": nil, "w": nil, "w:-4": nil, "w:4,128": nil, "w:99999999999": nil, "w:4x": nil,
		"d:3": nil, "d:1,2,128,4": nil, "d:1,2,128,128": nil, "d:1,2x": nil, "d:1,2,32x": nil, "d:39,1": nil,
	} {
		got, err := typeOf(nil, text, 0, nil)
		if (err == nil) != (want != nil) || err == nil && !arrow.TypeEqual(got, want) {
			t.Errorf("%q is %v, %v", text, got, err)
		}
	}
	for text, valid := range map[string]bool{
		"+us:5,7": true, "+us:5": false, "+us:5,,7": false, "+us:5,300": false, "+us:5,128": false, "+ud:7,x": false,
		"+ud:127,0": true, "+ud:5,5": false, "+ud:-1,5": false, "+us:": false, "+s": true, "+s:1": false,
	} {
		func() {
			defer func() { // as of arrow-go's panics, which record makes errors of
				if recover() != nil && valid {
					t.Errorf("%q panics", text)
				}
			}()
			if got, err := typeOf(nil, text, 0, []arrow.Field{field, field}); (err == nil) != valid {
				t.Errorf("%q is %v, %v", text, got, err)
			}
		}()
	}
}

// TestSchemasComeBack: a schema is read as it was written, with all its flags.
func TestSchemasComeBack(t *testing.T) {
	sorted := arrow.MapOf(arrow.BinaryTypes.String, arrow.PrimitiveTypes.Int8)
	sorted.KeysSorted = true
	unsorted := arrow.MapOf(arrow.PrimitiveTypes.Int8, arrow.Null)
	ordered := &arrow.DictionaryType{
		IndexType: arrow.PrimitiveTypes.Int8, ValueType: arrow.BinaryTypes.String, Ordered: true,
	}
	meta := arrow.NewMetadata([]string{"k", "k", ""}, []string{"v", "", "\xff\x00"})
	runs := arrow.RunEndEncodedOf(arrow.PrimitiveTypes.Int16, arrow.PrimitiveTypes.Int8)
	runs.ValueNullable = false
	want := arrow.NewSchema([]arrow.Field{
		{Name: "sorted", Type: sorted}, {Name: "unsorted", Type: unsorted, Nullable: true},
		{Name: "ordered", Type: ordered}, {Name: "runs", Type: runs},
		{Name: "", Type: arrow.ListOfNonNullable(arrow.PrimitiveTypes.Int8), Metadata: meta},
	}, &meta)
	e, s := new(exported), new(Schema)
	defer e.free()
	root := arrow.Field{Type: arrow.StructOf(want.Fields()...), Metadata: want.Metadata()}
	if err := (&schemaWriter{exported: e}).field(s, root); err != nil {
		t.Fatal(err)
	}
	got, err := new(schemaReader).record(s)
	if err != nil {
		t.Fatal(err)
	}
	if !got.Equal(want) || !got.Metadata().Equal(meta) || !got.Field(0).Type.(*arrow.MapType).KeysSorted ||
		got.Field(1).Type.(*arrow.MapType).KeysSorted || !got.Field(2).Type.(*arrow.DictionaryType).Ordered {
		t.Errorf("%s comes back as %s", want, got)
		for i, f := range want.Fields() {
			if !f.Equal(got.Field(i)) {
				t.Errorf("field %d is %#v, was %#v", i, got.Field(i), f)
			}
		}
	}
}
