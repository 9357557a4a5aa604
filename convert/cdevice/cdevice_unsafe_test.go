package cdevice

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"unsafe"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	arrowmem "github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// nestedExtension says whether an extension of an extension is in a type, which the C data
// interface has no word for.
func nestedExtension(dt arrow.DataType) bool {
	switch t := dt.(type) {
	case arrow.ExtensionType:
		_, again := t.StorageType().(arrow.ExtensionType)
		return again || nestedExtension(t.StorageType())
	case *arrow.DictionaryType:
		return nestedExtension(t.ValueType)
	case arrow.NestedType:
		for _, f := range t.Fields() {
			if nestedExtension(f.Type) {
				return true
			}
		}
	}
	return false
}

// Export and import of every type, images and tables: the addresses are the same, no memory
// is taken on the device, and the record is what it was.
func TestRoundTripOfEveryType(t *testing.T) {
	r := newRig(t, nil)
	for _, name := range []string{"spillway.test", "spillway.outer"} {
		if err := arrow.RegisterExtensionType(arrowgen.NewExtension(name, arrow.Null)); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = arrow.UnregisterExtensionType(name) }()
	}
	first, step := testseed.Half(t, 4)
	for i, dt := range arrowgen.Types() {
		if nestedExtension(dt) {
			continue
		}
		for k, rows := range []int{0, 1, 70, 800} {
			if (i+k)%step != first {
				continue
			}
			for _, form := range []batch.PayloadType{batch.PlainImage, batch.ScatteredImage} {
				t.Run(fmt.Sprintf("%d %s/%d/%s", i, dt.Name(), rows, form), func(t *testing.T) {
					rec := arrowgen.New(uint64(i)).Record(arrowgen.Schema(dt, arrow.PrimitiveTypes.Int32), rows)
					defer rec.Release()
					b := r.put(t, rec, form)
					defer r.drop(t, b)
					used, outstanding := r.gpu.State().Used(), r.dev.Outstanding()
					where := r.addresses(t, b)

					array, schema := r.export(t, b, Config{})
					if b.Info().State != batch.Processing {
						t.Errorf("an exported batch is %s", b.Info().State)
					}
					p, err := Import(t.Context(), r.mover, r.gpu, array, schema, Config{})
					if err != nil {
						t.Fatal(err)
					}
					table := p.(*batch.Image)
					if array.Array.Release != 0 || schema.Release != 0 {
						t.Error("what was imported is not marked")
					}
					if got := r.dev.Outstanding(); got != outstanding {
						t.Errorf("the device holds %d bytes, %d before", got, outstanding)
					}
					for i, s := range table.Parts.Ranges {
						if s.Length > 0 && !where[s.Addr] {
							t.Errorf("buffer %d lies at %#x, where the batch has none", i, uint64(s.Addr))
						}
					}
					if n := len(table.Parts.Adjustments); n > 0 && plainTail(table) {
						t.Errorf("%d buffers are crooked", n)
					}
					c := r.batch(t, table)
					r.says(t, c, rec)
					r.drop(t, c)
					if b.Info().State != batch.Idle || r.gpu.State().Used() != used {
						t.Errorf("the batch is %s, %d bytes are used, %d before",
							b.Info().State, r.gpu.State().Used(), used)
					}
				})
			}
		}
	}
}

// plainTail says whether a table has no bitmap that ends within a byte.
func plainTail(t *batch.Image) bool {
	for _, a := range t.Parts.Adjustments {
		if a.How == payload.Bits && a.Base == 0 {
			return false
		}
	}
	return true
}

// addresses are where the buffers of a batch are.
func (r *rig) addresses(t testing.TB, b *batch.Batch) map[tier.Addr]bool {
	t.Helper()
	out := make(map[tier.Addr]bool)
	body := func(d *batch.Descriptor, buf *tier.Buffer) {
		for _, s := range d.Buffers {
			if s.Length > 0 {
				out[buf.Memory().(tier.DeviceMemory).Addr()+tier.Addr(s.Offset)] = true
			}
		}
	}
	var shared []batch.Shared
	p := b.Info().Payload.(*batch.Image)
	shared = p.Parts.Shared
	if p.Parts.Type != payload.ScatteredImage {
		body(p.Descriptor(), p.Buffer())
	}
	for _, s := range p.Parts.Ranges {
		out[s.Addr] = true
	}
	for _, s := range shared {
		body(s.Descriptor(), s.Buffer())
	}
	return out
}

// says checks that a batch on the GPU says what the record does.
func (r *rig) says(t testing.TB, b *batch.Batch, rec arrow.RecordBatch) {
	t.Helper()
	h := r.hold(t, b)
	got, err := r.mover.Record(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	if err := convert.Equal(rec, got); err != nil {
		t.Error(err)
	}
	got.Release()
	if err := h.Close(); err != nil {
		t.Error(err)
	}
}

// What was imported goes back to its owner once: when it is moved away, or dropped.
func TestReleasedOnce(t *testing.T) {
	r := newRig(t, nil)
	rec := arrowgen.New(1).Record(arrowgen.Schema(arrow.BinaryTypes.String, arrow.PrimitiveTypes.Int64), 100)
	defer rec.Release()
	for _, away := range []bool{false, true} {
		b := r.put(t, rec, batch.PlainImage)
		array, schema := r.export(t, b, Config{})
		table, err := Import(t.Context(), r.mover, r.gpu, array, schema, Config{})
		if err != nil {
			t.Fatal(err)
		}
		c := r.batch(t, table)
		r.drop(t, b) // it is in use still
		if !away {
			end, _ := table.(*batch.Image).TryLease()
			r.drop(t, c)
			if n := callbacks().open(); n != 1 {
				t.Errorf("%d exports are open, although one is leased", n)
			}
			end()
		} else if err := r.mover.Move(t.Context(), c, onHost); err != nil {
			t.Fatal(err)
		}
		if n := callbacks().open(); n != 0 || r.gpu.State().Used() != 0 {
			t.Errorf("%d exports are open, the GPU holds %+v", n, r.gpu.State().Usage)
		}
		if away {
			r.drop(t, c)
		}
	}
}

// A consumer that releases instead of importing, and one that imports again what was
// imported.
func TestExportOfAnImport(t *testing.T) {
	r := newRig(t, nil)
	for _, rows := range []int{64, 67} { // bitmaps of whole bytes, and such as end within one
		exportAnImport(t, r, rows)
	}
}

// TestExportOfExtension: a dictionary that extends an earlier one is exported in one piece, whose
// memory is taken until the release.
func TestExportOfExtension(t *testing.T) {
	r := newRig(t, nil)
	dt := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int16, ValueType: arrow.BinaryTypes.String}
	var all []*batch.Batch
	var recs []arrow.RecordBatch
	for n := 600; n < 1000; n += 100 {
		values, indices := array.NewStringBuilder(arrowmem.DefaultAllocator), array.NewInt16Builder(arrowmem.DefaultAllocator)
		for i := range n {
			if i%7 == 6 {
				values.AppendNull()
			} else {
				values.Append(fmt.Sprintf("value %d of the dictionary", i))
			}
			indices.Append(int16(n - 1 - i))
		}
		rec := array.NewRecordBatch(arrow.NewSchema([]arrow.Field{{Name: "d", Type: dt, Nullable: true}}, nil),
			[]arrow.Array{array.NewDictionaryArray(dt, indices.NewArray(), values.NewArray())}, int64(n))
		recs, all = append(recs, rec), append(all, r.put(t, rec, batch.PlainImage))
	}
	if n := len(all[3].Info().Descriptor.AllDictionaries()); n < 3 {
		t.Fatalf("the last batch needs %d dictionaries: the test shows nothing", n)
	}
	for i, b := range all {
		used := r.gpu.State().Used()
		array, schema := r.export(t, b, Config{})
		if more := r.gpu.State().Used() - used; (i > 0) != (more > 0) {
			t.Errorf("batch %d: the export takes %d bytes", i, more)
		}
		table, err := Import(t.Context(), r.mover, r.gpu, array, schema, Config{})
		if err != nil {
			t.Fatal(err)
		}
		c := r.batch(t, table)
		r.says(t, c, recs[i])
		r.drop(t, c)
		if r.gpu.State().Used() != used {
			t.Errorf("batch %d: %d bytes are used, %d before", i, r.gpu.State().Used(), used)
		}
	}
	for _, b := range all {
		r.drop(t, b)
	}
}

func exportAnImport(t *testing.T, r *rig, rows int) {
	rec := arrowgen.New(1).Record(arrowgen.Schema(arrow.PrimitiveTypes.Int64, arrow.BinaryTypes.Binary, arrow.FixedWidthTypes.Boolean), rows)
	defer rec.Release()
	b := r.put(t, rec, batch.ScatteredImage)
	array, schema := r.export(t, b, Config{})
	array.Release()
	array.Release() // nothing happens
	schema.Close()
	if b.Info().State != batch.Idle {
		t.Errorf("a released batch is %s", b.Info().State)
	}
	array, schema = r.export(t, b, Config{})
	table, err := Import(t.Context(), r.mover, r.gpu, array, schema, Config{})
	if err != nil {
		t.Fatal(err)
	}
	c := r.batch(t, table)
	array, schema = r.export(t, c, Config{})
	if table, err = Import(t.Context(), r.mover, r.gpu, array, schema, Config{}); err != nil {
		t.Fatal(err)
	}
	d := r.batch(t, table)
	r.says(t, d, rec)
	for _, x := range []*batch.Batch{b, c, d} {
		r.drop(t, x)
	}
}

func TestExportRefuses(t *testing.T) {
	r := newRig(t, nil)
	rec := arrowgen.Ints(1, 10, 1)
	defer rec.Release()
	b := r.put(t, rec, batch.PlainImage)
	defer r.drop(t, b)
	array, schema := new(DeviceArray), new(Schema)
	h := r.hold(t, b)
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if err := Export(h, array, schema, Config{}); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("a closed handle: %v", err)
	}
	if err := r.mover.Move(t.Context(), b, onHost); err != nil {
		t.Fatal(err)
	}
	h, err := r.mover.Acquire(t.Context(), b, reservation.AnyInTier(tier.Host))
	if err != nil {
		t.Fatal(err)
	}
	if err := Export(h, array, schema, Config{}); !errors.Is(err, tier.ErrNotSupported) {
		t.Errorf("a batch in host memory: %v", err)
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	if array.Array.Release != 0 {
		t.Error("something was exported")
	}
}

// The structs have the sizes and places that the interface says, on 64-bit machines.
func TestLayoutOfStructs(t *testing.T) {
	if unsafe.Sizeof(uintptr(0)) != 8 {
		t.Skip("needs a 64-bit machine, whose sizes these are")
	}
	var d DeviceArray
	for name, got := range map[string][2]uintptr{
		"schema":       {unsafe.Sizeof(Schema{}), 72},
		"array":        {unsafe.Sizeof(Array{}), 80},
		"device array": {unsafe.Sizeof(d), 128},
		"device_id":    {unsafe.Offsetof(d.DeviceID), 80},
		"device_type":  {unsafe.Offsetof(d.DeviceType), 88},
		"sync_event":   {unsafe.Offsetof(d.SyncEvent), 96},
		"release":      {unsafe.Offsetof(d.Array.Release), 64},
	} {
		if got[0] != got[1] {
			t.Errorf("%s: %d, want %d", name, got[0], got[1])
		}
	}
}

// claimed is a device that claims to be a CUDA device, whose addresses must not be read.
type claimed struct{ tier.Device }

func (d claimed) Info() tier.DeviceInfo {
	i := d.Device.Info()
	i.Backend = "cuda"
	return i
}

func TestCUDA(t *testing.T) {
	r := newRig(t, func(d tier.Device) tier.Device { return claimed{d} })
	rec := arrowgen.New(2).Record(arrowgen.Schema(arrow.PrimitiveTypes.Int64, arrow.BinaryTypes.String), 50)
	defer rec.Release()
	b := r.put(t, rec, batch.PlainImage)
	defer r.drop(t, b)
	array, schema := r.export(t, b, Config{ID: 3, Event: 77})
	if array.DeviceType != CUDA || array.DeviceID != 3 || array.SyncEvent != 77 {
		t.Errorf("exported as %+v", array)
	}
	img := b.Info().Payload.(*batch.Image)
	first := at[Array](several[uintptr](array.Array.Children, 2)[0])
	want := uintptr(img.Buffer().Memory().(tier.DeviceMemory).Addr()) + uintptr(img.Descriptor().Buffers[1].Offset)
	if got := several[uintptr](first.Buffers, 2)[1]; got != want {
		t.Errorf("the values are at %#x, want %#x", got, want)
	}
	var wrong *DeviceError
	if _, err := Import(t.Context(), r.mover, r.gpu, array, schema, Config{ID: 2}); !errors.As(err, &wrong) || wrong.ID != 3 || wrong.WantID != 2 {
		t.Errorf("another device: %v", err)
	}
	if _, err := Import(t.Context(), r.mover, r.gpu, array, schema, Config{ID: 3}); !errors.Is(err, tier.ErrNotSupported) {
		t.Errorf("nobody to wait: %v", err)
	}
	gone := errors.New("gone")
	fails := func(context.Context, uintptr) error { return gone }
	if _, err := Import(t.Context(), r.mover, r.gpu, array, schema, Config{ID: 3, Wait: fails}); !errors.Is(err, gone) {
		t.Errorf("a failed event: %v", err)
	}
	panics := func(context.Context, uintptr) error { panic(gone) }
	if _, err := Import(t.Context(), r.mover, r.gpu, array, schema, Config{ID: 3, Wait: panics}); !errors.Is(err, gone) || !strings.Contains(err.Error(), "Config.Wait panicked") {
		t.Errorf("a wait that panics: %v", err)
	}
	waited := uintptr(0)
	table, err := Import(t.Context(), r.mover, r.gpu, array, schema, Config{ID: 3, Wait: func(_ context.Context, e uintptr) error { waited = e; return nil }})
	if err != nil || waited != 77 {
		t.Fatalf("waited for %d, %v", waited, err)
	}
	c := r.batch(t, table)
	r.says(t, c, rec)
	r.drop(t, c)
}

// TestPanicOfFailed: it is logged, and not C's, and the array is released.
func TestPanicOfFailed(t *testing.T) {
	if invariants.Enabled {
		t.Skip("needs a build without -tags invariants, where a second Close is an error")
	}
	r := newRig(t, nil)
	rec := arrowgen.Ints(1, 10, 1)
	defer rec.Release()
	b := r.put(t, rec, batch.PlainImage)
	h := r.hold(t, b)
	told := 0
	array, schema := new(DeviceArray), new(Schema)
	if err := Export(h, array, schema, Config{Failed: func(error) { told++; panic("failed") }}); err != nil {
		t.Fatal(err)
	}
	if err := h.Close(); err != nil { // so that the release cannot
		t.Fatal(err)
	}
	panics = new(guard.Log) // of many only some are written
	log := new(bytes.Buffer)
	before := slog.Default()
	defer slog.SetDefault(before)
	slog.SetDefault(slog.New(slog.NewTextHandler(log, nil)))
	array.Release()
	schema.Close()
	if told != 1 || array.Array.Release != 0 || !strings.Contains(log.String(), "Config.Failed") {
		t.Errorf("told %d times, released %v; the log: %s", told, array.Array.Release == 0, log)
	}
	r.drop(t, b)
}

func TestOtherBackendNeedsAType(t *testing.T) {
	r := newRig(t, func(d tier.Device) tier.Device { return struct{ tier.Device }{d} })
	rec := arrowgen.Ints(1, 10, 1)
	defer rec.Release()
	b := r.put(t, rec, batch.PlainImage)
	defer r.drop(t, b)
	h := r.hold(t, b)
	if err := Export(h, new(DeviceArray), new(Schema), Config{}); !errors.Is(err, tier.ErrNotSupported) {
		t.Errorf("a device of unknown kind: %v", err)
	}
	array, schema := new(DeviceArray), new(Schema)
	if err := Export(h, array, schema, Config{Type: 10, ID: 1}); err != nil || array.DeviceType != 10 || array.DeviceID != 1 {
		t.Fatalf("%v, %+v", err, array)
	}
	array.Release()
	schema.Close()
}

// What is released may be a variable of a function whose stack grows just then.
func TestReleaseOnAStackThatGrows(t *testing.T) {
	r := callbacks()
	for depth := range 400 {
		e := new(exported)
		e.left.Store(1)
		r.add(e)
		released := make(chan bool)
		go func() { released <- releasedAt(depth, r.array, e.id) }()
		if !<-released {
			t.Fatalf("%d calls deep what was released does not say so", depth)
		}
	}
	if n := r.open(); n != 0 {
		t.Errorf("%d exports are open", n)
	}
}

//go:noinline
func releasedAt(depth int, callback, id uintptr) bool {
	if depth > 0 {
		return releasedAt(depth-1, callback, id) && depth > 0
	}
	a := DeviceArray{Array: Array{Release: callback, PrivateData: id}}
	a.Release()
	return a.Array.Release == 0
}
