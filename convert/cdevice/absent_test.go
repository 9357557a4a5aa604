package cdevice

import (
	"errors"
	"fmt"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	arrowmemory "github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// stripped is d without the buffers that are never read, where all rows are null: Go's Arrow lets
// arrays be so.
func stripped(d arrow.ArrayData) *array.Data {
	bufs := append([]*arrowmemory.Buffer(nil), d.Buffers()...)
	if d.Len() > 0 && d.NullN() == d.Len() {
		for i := 1; i < len(bufs); i++ {
			bufs[i] = nil
		}
	}
	var children []arrow.ArrayData
	for _, c := range d.Children() {
		children = append(children, stripped(c))
	}
	if dict, ok := d.Dictionary().(*array.Data); ok && dict != nil {
		return array.NewDataWithDictionary(d.DataType(), d.Len(), bufs, d.NullN(), d.Offset(), dict)
	}
	return array.NewData(d.DataType(), d.Len(), bufs, children, d.NullN(), d.Offset())
}

// bare returns a record of a column of nothing but nulls and without the buffers for values; nil if
// Go's Arrow cannot have it.
func bare(schema *arrow.Schema, rows int) (rec arrow.RecordBatch) {
	defer func() {
		if recover() != nil {
			rec = nil
		}
	}()
	g := arrowgen.New(1)
	g.Nulls = 1
	whole := g.Record(schema, rows)
	var cols []arrow.Array
	for _, c := range whole.Columns() {
		cols = append(cols, array.MakeFromData(stripped(c.Data())))
	}
	return array.NewRecordBatch(schema, cols, int64(rows))
}

// hasExtension says whether an extension is in a type: the test registers none.
func hasExtension(dt arrow.DataType) bool {
	switch t := dt.(type) {
	case arrow.ExtensionType:
		return true
	case *arrow.DictionaryType:
		return hasExtension(t.ValueType)
	case arrow.NestedType:
		for _, f := range t.Fields() {
			if hasExtension(f.Type) {
				return true
			}
		}
	}
	return false
}

// What a program in C gets has all buffers that the interface asks for, of every type: also where a
// batch does without, and where there are no rows.
func TestNoBufferIsMissing(t *testing.T) {
	lib := buildConsumer(t)
	r := newRig(t, nil)
	tried := 0
	first, step := testseed.Half(t, 4)
	for i, dt := range arrowgen.Types() {
		if nestedExtension(dt) || hasExtension(dt) {
			continue
		}
		for k, rows := range []int{0, 1, 9, 800} {
			if (i+k)%step != first {
				continue
			}
			schema := arrowgen.Schema(dt, arrow.PrimitiveTypes.Int32)
			recs := []arrow.RecordBatch{arrowgen.New(uint64(i)).Record(schema, rows)}
			if rec := bare(schema, rows); rec != nil {
				recs = append(recs, rec)
				tried++
			}
			for j, rec := range recs {
				for _, form := range []batch.PayloadType{batch.PlainImage, batch.ScatteredImage} {
					t.Run(fmt.Sprintf("%d %s/%d/%d/%s", i, dt.Name(), rows, j, form), func(t *testing.T) {
						b := r.put(t, rec, form)
						a, s := r.export(t, b, Config{Failed: func(err error) { t.Error(err) }})
						if n := call(lib.missing, a, s); n != 0 {
							t.Errorf("%d buffers of %s are missing", n, dt)
						}
						used := r.gpu.State().Used()
						table, err := Import(t.Context(), r.mover, r.gpu, a, s, Config{})
						if err != nil {
							t.Fatal(err)
						}
						c := r.batch(t, table)
						r.says(t, c, rec)
						r.drop(t, c)
						if r.gpu.State().Used() > used {
							t.Errorf("%d bytes are used after the release, %d while it was exported",
								r.gpu.State().Used(), used)
						}
						r.drop(t, b)
					})
				}
				rec.Release()
			}
		}
	}
	if tried*step < 100 {
		t.Errorf("%d records without buffers were tried", tried)
	}
}

// Where there is no room for the zeros that C wants, the export says so and leaves everything as it
// was.
func TestNoRoomForZeros(t *testing.T) {
	r := newRig(t, nil)
	rec := bare(arrowgen.Schema(arrow.PrimitiveTypes.Int64), 10_000)
	defer rec.Release()
	b := r.put(t, rec, batch.PlainImage)
	defer r.drop(t, b)
	h := r.hold(t, b)
	rest, err := r.gpu.Promise(r.gpu.State().Available)
	if err != nil {
		t.Fatal(err)
	}
	used, array := r.gpu.State().Used(), new(DeviceArray)
	var full *tier.NoSpaceError
	if err := Export(h, array, new(Schema), Config{}); !errors.As(err, &full) || full.Requested < 80_000 || array.Array.Release != 0 {
		t.Errorf("no room: %v", err)
	}
	if r.gpu.State().Used() != used {
		t.Errorf("%d bytes are used, %d before", r.gpu.State().Used(), used)
	}
	if err := errors.Join(r.gpu.Release(rest), h.Close()); err != nil {
		t.Error(err)
	}
}

// elsewhere is a device of which some addresses are no pointers.
type elsewhere struct {
	mappedDevice
	from int // the first call that is refused
}

func (d *elsewhere) Pointer(a tier.Addr, n int64) (uintptr, error) {
	if d.from--; d.from < 0 {
		return 0, errors.New("elsewhere")
	}
	return d.mappedDevice.Pointer(a, n)
}

// An export of which a buffer cannot be shown gives up what it took, once.
func TestBufferThatIsNoPointer(t *testing.T) {
	var dev *elsewhere
	r := newRig(t, func(d tier.Device) tier.Device {
		dev = &elsewhere{mappedDevice: d.(mappedDevice)}
		return dev
	})
	rec := bare(arrowgen.Schema(arrow.PrimitiveTypes.Int64), 100)
	defer rec.Release()
	b := r.put(t, rec, batch.PlainImage)
	defer r.drop(t, b)
	refused := 0
	for err := errors.New("not yet"); err != nil; {
		h, a, s := r.hold(t, b), new(DeviceArray), new(Schema)
		dev.from = refused
		if err = Export(h, a, s, Config{}); err == nil {
			a.Release()
			s.Close()
			break
		}
		refused++
		if errors.Is(err, tier.ErrReleased) || a.Array.Release != 0 {
			t.Errorf("pointer %d refused: %v", refused, err)
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
	if refused != 2 {
		t.Errorf("%d refusals, want those of the validity and of the zeros", refused)
	}
}
