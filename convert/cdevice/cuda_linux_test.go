//go:build linux && (amd64 || arm64)

package cdevice

import (
	"bytes"
	"context"
	"errors"
	"os"
	"runtime"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/ebitengine/purego"

	"github.com/spillway-db/spillway/batch"
	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
	"github.com/spillway-db/spillway/tier/faultdev"

	"github.com/spillway-db/spillway/internal/arrowgen"
)

// cudaRig is a rig over the last GPU of a driver.
type cudaRig struct {
	*rig
	device   tier.Device
	path     string             // of the driver
	ordinal  int                // of the GPU
	emulator *cudatest.Emulator // nil for a real one
}

// newCUDARig makes a rig over the second of two emulated GPUs, in which nothing may be left at the
// end; or with SPILLWAY_CUDA over the first of the driver that it names, "real" for the machine's.
// The device is wrapped, as programs may have it.
func newCUDARig(t *testing.T) *cudaRig {
	t.Helper()
	r := &cudaRig{}
	switch wanted := os.Getenv("SPILLWAY_CUDA"); wanted {
	default:
		r.path = wanted
	case "real":
		r.path = "libcuda.so.1"
	case "":
		r.emulator = cudatest.New(t, cudatest.Config{Devices: 2, Memory: 2 * rigMemory})
		r.path, r.ordinal = r.emulator.Path, 1
		t.Cleanup(func() {
			for _, leak := range r.emulator.Leaks() {
				t.Error(leak)
			}
		})
	}
	d, err := cuda.Load(r.path)
	if err != nil {
		t.Fatal(err)
	}
	if r.device, err = d.Open(cuda.Config{Ordinal: r.ordinal, Node: -1, Memory: rigMemory}); err != nil {
		t.Fatal(err)
	}
	r.rig = newRigOn(t, r.device, func(d tier.Device) tier.Device { return faultdev.New(d, 1) })
	return r
}

// others are a program in C that uses the same GPU by itself.
type others struct{ consume, produce, openGate, releases uintptr }

func (r *cudaRig) others(t *testing.T) others {
	t.Helper()
	lib := build(t, "cuda.c")
	f := func(name string) uintptr { return function(t, lib, name) }
	o := others{f("cuda_consume"), f("cuda_produce"), f("cuda_open_gate"), f("releases")}
	path := append([]byte(r.path), 0)
	err, _, _ := purego.SyscallN(f("cuda_open"), addressOf(&path[0]), uintptr(r.ordinal))
	runtime.KeepAlive(path)
	if err != 0 {
		t.Fatalf("the program in C cannot use the driver: %d", int32(err))
	}
	end, shut := f("cuda_end"), f("cuda_close")
	t.Cleanup(func() {
		for _, f := range []uintptr{end, shut} {
			if err, _, _ := purego.SyscallN(f); err != 0 {
				t.Errorf("the program in C cannot give up what it has: %d", int32(err))
			}
		}
	})
	return o
}

// busy returns a stream on which much work is under way, which ends by writing a buffer of b anew:
// with what was there.
func (r *cudaRig) busy(t *testing.T, b *batch.Batch) tier.Stream {
	t.Helper()
	s, err := r.device.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(s.Sync(), s.Close()); err != nil {
			t.Error(err)
		}
	})
	img := b.Info().Payload.(*batch.Image)
	base := img.Buffer().Memory().(tier.DeviceMemory).Addr()
	span := img.Descriptor().Buffers[1] // the values of the first column
	room, err := r.device.Alloc(s, span.Length)
	if err != nil {
		t.Fatal(err)
	}
	at := base + tier.Addr(span.Offset)
	if err := errors.Join(r.device.CopyRegions(s, []tier.Region{{Dst: room, Src: at, Size: span.Length}}), s.Sync(), r.device.Fill(s, at, 0xee, span.Length)); err != nil {
		t.Fatal(err)
	}
	if r.emulator != nil {
		r.emulator.Set("delay_ns", 200_000)
	}
	for range 20 {
		if err := r.device.Fill(s, at, 0xdd, span.Length); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(r.device.CopyRegions(s, []tier.Region{{Dst: at, Src: room, Size: span.Length}}), r.device.Free(s, room)); err != nil {
		t.Fatal(err)
	}
	if r.emulator != nil {
		r.emulator.Set("delay_ns", 0)
	}
	return s
}

// A program in C with the same driver reads what was exported from a CUDA device, and waits for the
// event of an array on which work is under way.
func TestConsumerInCOfCUDA(t *testing.T) {
	r := newCUDARig(t)
	c := r.others(t)
	for _, rows := range []int{0, 1, 5000} {
		for _, form := range []batch.PayloadType{batch.PlainImage, batch.ScatteredImage} {
			rec := arrowgen.New(uint64(rows)).Record(consumable(), rows)
			b := r.put(t, rec, form)
			a, s := r.export(t, b, Config{})
			if a.DeviceType != CUDA || a.DeviceID != int64(r.ordinal) || a.SyncEvent != 0 {
				t.Errorf("%d rows of a %s: exported as %+v", rows, form, a)
			}
			if got, want := call(c.consume, a, s), hashedRows(rows, rec.Columns()...); got != want {
				t.Errorf("%d rows of a %s: the consumer read %#x, want %#x", rows, form, got, want)
			}
			if b.Info().State != batch.Idle {
				t.Errorf("the batch is %s after its release", b.Info().State)
			}
			r.drop(t, b)
			rec.Release()
		}
	}
	rec := arrowgen.New(3).Record(consumable(), 5000)
	defer rec.Release()
	b := r.put(t, rec, batch.PlainImage)
	defer r.drop(t, b)
	part := r.slice(t, b, 13, 4000)
	want := rec.NewSlice(13, 4000)
	defer want.Release()
	a, s := r.export(t, part, Config{})
	if got, want := call(c.consume, a, s), hashedRows(3987, want.Columns()...); got != want {
		t.Errorf("of a slice the consumer read %#x, want %#x", got, want)
	}
	r.drop(t, part)
	a, s = r.export(t, b, Config{Stream: r.busy(t, b), Failed: func(err error) { t.Error(err) }})
	if a.SyncEvent == 0 {
		t.Error("work is under way, and the array has no event")
	}
	if got, want := call(c.consume, a, s), hashedRows(5000, rec.Columns()...); got != want {
		t.Errorf("the consumer read %#x, want %#x", got, want)
	}
}

// A program in C waits for the event of an array, reads it and releases it after everything was
// closed that the batch was in.
func TestConsumerInCOfCUDAIsLast(t *testing.T) {
	r := newCUDARig(t)
	c := r.others(t)
	rec := arrowgen.New(3).Record(consumable(), 5000)
	defer rec.Release()
	b := r.put(t, rec, batch.PlainImage)
	work, err := r.device.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	a, s := r.export(t, b, Config{Stream: work, Failed: func(err error) { t.Error(err) }})
	r.drop(t, b)
	if err := r.close(); err != nil {
		t.Fatal(err)
	}
	if got, want := call(c.consume, a, s), hashedRows(5000, rec.Columns()...); got != want {
		t.Errorf("the consumer read %#x, want %#x", got, want)
	}
	if r.emulator != nil && r.emulator.Live("allocations")+r.emulator.Live("pools")+r.emulator.Live("events") != 1 { // the program's own event
		t.Errorf("after the release there are still %v", r.emulator.Leaks())
	}
}

// What a program in C has made in memory of its own on the GPU is imported when it is there, used,
// and released once.
func TestProducerInCOfCUDA(t *testing.T) {
	r := newCUDARig(t)
	c := r.others(t)
	if r.emulator == nil {
		t.Skip("needs the CUDA emulator, of which it is seen what waits for what: SPILLWAY_CUDA asks for a real GPU")
	}
	released := func() int { n, _, _ := purego.SyscallN(c.releases); return int(n) }
	rec := arrowgen.New(8).Record(consumable(), 500)
	defer rec.Release()
	b := r.put(t, rec, batch.PlainImage)
	for i, away := range []bool{false, true} {
		a, s := r.export(t, b, Config{})
		if err := call(c.produce, a, s); err != 0 {
			t.Fatalf("the producer ends with %d", err)
		}
		// While its work is not done the import waits, and gives up with its context.
		ctx, cancel := context.WithCancelCause(t.Context())
		why := errors.New("why")
		imported := r.importing(t, ctx, a, s)
		cancel(why)
		if got := <-imported; !errors.Is(got.err, why) || a.Array.Release == 0 {
			t.Fatalf("an import that is cancelled: %v", got.err)
		}
		imported = r.importing(t, t.Context(), a, s)
		select {
		case got := <-imported:
			t.Fatalf("the import did not wait: %v", got.err)
		default:
		}
		_, _, _ = purego.SyscallN(c.openGate)
		got := <-imported
		if got.err != nil {
			t.Fatal(got.err)
		}
		if n := r.emulator.Live("allocations"); n < 30 {
			t.Errorf("%d allocations on the GPU: the producer's are not its own", n)
		}
		x := r.batch(t, got.table)
		r.says(t, x, rec)
		if released() != i {
			t.Errorf("released %d times while it is in use", released())
		}
		if away {
			if err := r.mover.Move(t.Context(), x, onHost); err != nil {
				t.Fatal(err)
			}
			r.says(t, x, rec)
		}
		r.drop(t, x)
		if released() != i+1 || b.Info().State != batch.Idle {
			t.Errorf("released %d times, want %d; the batch is %s", released(), i+1, b.Info().State)
		}
	}
	r.drop(t, b)
}

// TestBuffersOfColumns: the columns of an exported batch, and its slices, are read at the addresses
// that Child and Buffer return.
func TestBuffersOfColumns(t *testing.T) {
	r := newCUDARig(t)
	const rows, from, to = 100, 13, 90
	rec := arrowgen.Ints(1, rows, 2)
	defer rec.Release()
	b := r.put(t, rec, batch.PlainImage)
	part := r.slice(t, b, from, to)
	s, err := r.device.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		b     *batch.Batch
		first int
		rows  int64
	}{{b, 0, rows}, {part, from, to - from}} {
		a, schema := r.export(t, c.b, Config{})
		if n := a.Array.NChildren; n != rec.NumCols() {
			t.Fatalf("%d columns, want %d", n, rec.NumCols())
		}
		for i := range int(rec.NumCols()) {
			col := a.Array.Child(i)
			if col.Length != c.rows || col.NBuffers != 2 || col.Buffer(0) != 0 {
				t.Errorf("column %d: %+v, the validity is at %#x", i, *col, col.Buffer(0))
			}
			got := make([]byte, 8*c.rows)
			at := tier.Addr(col.Buffer(1)) + 8*tier.Addr(a.Array.Offset+col.Offset)
			if err := errors.Join(r.device.CopyRegions(s, []tier.Region{{HostDst: got, Src: at}}), s.Sync()); err != nil {
				t.Fatal(err)
			}
			want := rec.Column(i).Data().Buffers()[1].Bytes()[8*c.first:][:len(got)]
			if !bytes.Equal(got, want) {
				t.Errorf("column %d, rows from %d: read %x, want %x", i, c.first, got, want)
			}
		}
		for name, f := range map[string]func(){
			"a child too many":  func() { a.Array.Child(int(rec.NumCols())) },
			"a buffer too many": func() { a.Array.Child(0).Buffer(2) },
		} {
			func() {
				defer func() {
					if recover() == nil {
						t.Errorf("%s: no panic", name)
					}
				}()
				f()
			}()
		}
		a.Release()
		schema.Close()
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	r.drop(t, part)
	r.drop(t, b)
}

type imported struct {
	table batch.Payload
	err   error
}

// importing imports beside the test, and returns when the GPU waits.
func (r *cudaRig) importing(t *testing.T, ctx context.Context, a *DeviceArray, s *Schema) chan imported {
	t.Helper()
	before := r.emulator.Calls("cuStreamWaitEvent")
	done := make(chan imported, 1)
	go func() {
		table, err := Import(ctx, r.mover, r.gpu, a, s, Config{})
		done <- imported{table, err}
	}()
	for r.emulator.Calls("cuStreamWaitEvent") == before && len(done) == 0 {
		runtime.Gosched()
	}
	return done
}

// Every type goes to C's structs and back without a byte being copied, as on the simulated device.
func TestRoundTripOfCUDA(t *testing.T) {
	r := newCUDARig(t)
	copies := func() (n int64) {
		for _, name := range []string{"cuMemcpyDtoDAsync_v2", "cuMemcpyHtoDAsync_v2"} {
			if r.emulator != nil {
				n += r.emulator.Calls(name)
			}
		}
		return n
	}
	for i, dt := range arrowgen.Types() {
		if nestedExtension(dt) || hasExtension(dt) {
			continue
		}
		for _, form := range []batch.PayloadType{batch.PlainImage, batch.ScatteredImage} {
			rec := arrowgen.New(uint64(i)).Record(arrowgen.Schema(dt, arrow.PrimitiveTypes.Int32), 70)
			b := r.put(t, rec, form)
			where, outstanding, before := r.addresses(t, b), r.device.Outstanding(), copies()
			array, schema := r.export(t, b, Config{})
			table, err := Import(t.Context(), r.mover, r.gpu, array, schema, Config{ID: 77}) // the device knows better
			if err != nil {
				t.Fatalf("%s as a %s: %v", dt, form, err)
			}
			for i, s := range table.(*batch.Image).Parts.Ranges {
				if s.Length > 0 && !where[s.Addr] {
					t.Errorf("%s: buffer %d lies at %#x, where the batch has none", dt, i, uint64(s.Addr))
				}
			}
			if copies() != before || r.device.Outstanding() > outstanding { // what was freed before may come back meanwhile
				t.Errorf("%s: %d copies to the device, %d bytes there, %d before", dt, copies()-before, r.device.Outstanding(), outstanding)
			}
			c := r.batch(t, table)
			r.says(t, c, rec)
			r.drop(t, c)
			r.drop(t, b)
			rec.Release()
		}
	}
}

// What a CUDA device cannot do is an error, and leaves everything with the caller.
func TestCUDARefusals(t *testing.T) {
	r := newCUDARig(t)
	rec := arrowgen.Ints(1, 100, 1)
	defer rec.Release()
	b := r.put(t, rec, batch.PlainImage)
	defer r.drop(t, b)
	h := r.hold(t, b)
	s := r.busy(t, b)
	if err := Export(h, new(DeviceArray), new(Schema), Config{Event: 1, Stream: s}); err == nil {
		t.Error("exported with two events")
	}
	if err := Export(h, new(DeviceArray), new(Schema), Config{Stream: struct{ tier.Stream }{s}}); err == nil {
		t.Error("exported with a stream that is not the device's")
	}
	simulated := newRig(t, nil)
	sb := simulated.put(t, rec, batch.PlainImage)
	sh := simulated.hold(t, sb)
	if err := Export(sh, new(DeviceArray), new(Schema), Config{Stream: s}); !errors.Is(err, tier.ErrNotSupported) {
		t.Errorf("a stream for the simulated device: %v", err)
	}
	if err := sh.Close(); err != nil {
		t.Error(err)
	}
	simulated.drop(t, sb)
	if r.emulator != nil {
		for _, name := range []string{"cuEventCreate", "cuEventRecord"} {
			live := r.emulator.Live("events")
			r.emulator.Fail(name, 0, driver.ErrOutOfMemory, 1)
			err := Export(h, new(DeviceArray), new(Schema), Config{Stream: s})
			r.emulator.ClearFailures()
			if !errors.Is(err, driver.ErrOutOfMemory) || r.emulator.Live("events") != live {
				t.Errorf("%s refused: %v, %d events, %d before", name, err, r.emulator.Live("events"), live)
			}
		}
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}

	array, schema := r.export(t, b, Config{})
	defer schema.Close()
	defer array.Release()
	array.DeviceID++
	var wrong *DeviceError
	if _, err := Import(t.Context(), r.mover, r.gpu, array, schema, Config{}); !errors.As(err, &wrong) || wrong.WantID != int64(r.ordinal) {
		t.Errorf("an array of another device: %v", err)
	}
	array.DeviceID--
	if r.emulator == nil {
		return // a real driver takes a handle that is none for a pointer
	}
	none := driver.Event(12345)
	array.SyncEvent = addressOf(&none)
	if _, err := Import(t.Context(), r.mover, r.gpu, array, schema, Config{}); !errors.Is(err, driver.ErrInvalidHandle) || array.Array.Release == 0 {
		t.Errorf("an event that is none: %v", err)
	}
	array.SyncEvent = 0
	first := at[Array](several[uintptr](array.Array.Children, 1)[0])
	where := &several[uintptr](first.Buffers, 2)[1]
	was := *where
	*where = 1 << 40
	if _, err := Import(t.Context(), r.mover, r.gpu, array, schema, Config{}); !errors.Is(err, driver.ErrNotFound) || array.Array.Release == 0 {
		t.Errorf("a buffer that is nowhere: %v", err)
	}
	*where = was
}

// A batch is exported with an event and memory of zeros, imported again and released. Each call of
// the driver's is refused once: a failure leaves all as it was, and nothing is left.
func TestCUDAFails(t *testing.T) {
	r := newCUDARig(t)
	if r.emulator == nil {
		t.Skip("needs the CUDA emulator, which refuses calls on purpose: SPILLWAY_CUDA asks for a real GPU")
	}
	rec := bare(arrowgen.Schema(arrow.PrimitiveTypes.Int64, arrow.PrimitiveTypes.Float32), 100)
	defer rec.Release()
	b := r.put(t, rec, batch.PlainImage)
	defer r.drop(t, b)
	work, err := r.device.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	var exports, imports int
	for n, more := int64(0), true; more; n++ {
		before := r.emulator.Calls("")
		h := r.hold(t, b)
		a, s := new(DeviceArray), new(Schema)
		r.emulator.Fail("", n, driver.ErrInvalidValue, 1)
		err := Export(h, a, s, Config{Stream: work})
		if err != nil {
			exports++
			r.emulator.ClearFailures()
			if err := h.Close(); err != nil {
				t.Error(err)
			}
		} else {
			table, err := Import(t.Context(), r.mover, r.gpu, a, s, Config{})
			if err != nil {
				imports++
				r.emulator.ClearFailures()
				a.Release()
				s.Close()
			} else {
				c := r.batch(t, table)
				r.drop(t, c)
			}
		}
		more = r.emulator.Calls("")-before > n
		r.emulator.ClearFailures()
		if b.Info().State != batch.Idle || callbacks().open() != 0 {
			t.Errorf("call %d refused (%v): the batch is %s, and %d exports are out", n, err, b.Info().State, callbacks().open())
		}
		if err := work.Sync(); err != nil {
			t.Fatalf("call %d refused: %v", n, err)
		}
	}
	if exports < 5 || imports < 3 {
		t.Errorf("%d exports and %d imports failed", exports, imports)
	}
	if err := work.Close(); err != nil {
		t.Error(err)
	}
	r.says(t, b, rec)
}
