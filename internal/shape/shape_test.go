package shape

import (
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/internal/arrowgen"
)

// TestAsArrowGoLaysOut: the buffers of every type are those that arrow-go's arrays have, but that
// it leaves room for a validity where the format has none.
func TestAsArrowGoLaysOut(t *testing.T) {
	for _, dt := range arrowgen.Types() {
		s, ok := Of(dt)
		if !ok {
			t.Errorf("%s has no shape", dt)
			continue
		}
		want := dt.Layout()
		specs := want.Buffers
		if len(specs) > 0 && specs[0].Kind == arrow.KindAlwaysNull {
			specs = specs[1:]
		}
		if len(specs) != len(s.Buffers) || want.HasDict != (s.Values != nil) || (want.VariadicSpec != nil) != s.Views {
			t.Errorf("%s: %+v, arrow-go has %+v", dt, s, want)
			continue
		}
		for i, b := range s.Buffers {
			kind := arrow.KindFixedWidth
			switch b.Role {
			case Validity, Bits:
				kind = arrow.KindBitmap
			case Data:
				kind = arrow.KindVarWidth
			}
			if specs[i].Kind != kind || kind == arrow.KindFixedWidth && int64(specs[i].ByteWidth) != b.Width {
				t.Errorf("%s: buffer %d is %+v, arrow-go has %+v", dt, i, b, specs[i])
			}
		}
		fields := 0
		if n, ok := Storage(dt).(arrow.NestedType); ok {
			fields = n.NumFields()
			for i, f := range n.Fields() {
				if _, child := s.Child(i); !arrow.TypeEqual(child, f.Type) {
					t.Errorf("%s: child %d is %s, arrow-go has %s", dt, i, child, f.Type)
				}
			}
		}
		if fields != s.NumChildren {
			t.Errorf("%s has %d children, arrow-go has %d", dt, s.NumChildren, fields)
		}
		if n := testing.AllocsPerRun(10, func() { Of(dt) }); n > 1 {
			t.Errorf("the shape of %s takes %v allocations", dt, n)
		}
	}
}

// TestNoShape: what is no type of the format has none.
func TestNoShape(t *testing.T) {
	for _, dt := range []arrow.DataType{nil, &arrow.DictionaryType{IndexType: arrow.BinaryTypes.String, ValueType: arrow.Null}} {
		if s, ok := Of(dt); ok {
			t.Errorf("%v has the shape %+v", dt, s)
		}
	}
}
