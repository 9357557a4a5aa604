//go:build gorgonia && cgo && linux && (amd64 || arm64)

package gorgonia_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/apache/arrow-go/v18/arrow/array"
	"gorgonia.org/cu"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert/cdevice"
	"github.com/spillway-db/spillway/internal/arrowgen"
	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
	"github.com/spillway-db/spillway/tier/cuda/gorgonia"
	"github.com/spillway-db/spillway/tier/faultdev"
	"github.com/spillway-db/spillway/tier/sim"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// emulated returns the driver, in which nothing may be left when the test ends.
func emulated(t *testing.T, cfg cudatest.Config) *cudatest.Emulator {
	t.Helper()
	e := cudatest.NewLinked(t, cfg)
	t.Cleanup(func() {
		for _, leak := range e.Leaks() {
			t.Error(leak)
		}
	})
	return e
}

// within runs f on a thread where ctx is current, as a program does that has no *cu.Ctx.
func within(t testing.TB, ctx cu.CUContext, f func() error) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	must(t, cu.PushCurrentCtx(ctx))
	err := f()
	_, popErr := cu.PopCurrentCtx()
	must(t, errors.Join(err, popErr))
}

// newContext makes a context, which the test's end destroys.
func newContext(t testing.TB) (ctx cu.CUContext) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ctx, err := cu.Device(0).MakeContext(cu.SchedAuto)
	must(t, err)
	_, err = cu.PopCurrentCtx() // MakeContext has made it current
	must(t, err)
	t.Cleanup(func() { must(t, ctx.Destroy()) })
	return ctx
}

// openDevice opens a device in ctx, which the test's end closes.
func openDevice(t testing.TB, ctx cu.CUContext) tier.Device {
	t.Helper()
	dev, err := gorgonia.Open(ctx, cuda.Config{Memory: 1 << 20})
	must(t, err)
	t.Cleanup(func() {
		if err := dev.Close(); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Error(err)
		}
	})
	return dev
}

// A kernel of cu's runs on the batches of a Drain that the engine has spilled to host memory and to
// disk and brings back, in a context of cu's and in the engine's own.
func TestKernelOnDrainedBatches(t *testing.T) {
	t.Run("cu's context", func(t *testing.T) {
		emulated(t, cudatest.Config{})
		addToSpilled(t, spillway.GPUConfig{Device: openDevice(t, newContext(t)), Own: true})
	})
	t.Run("the engine's context", func(t *testing.T) {
		emulated(t, cudatest.Config{})
		addToSpilled(t, spillway.GPUConfig{Backend: spillway.CUDA, Memory: spillway.Bytes(1 << 20)})
	})
}

// TestRealKernelOnDrainedBatches is TestKernelOnDrainedBatches on a real GPU.
func TestRealKernelOnDrainedBatches(t *testing.T) {
	if path := cudatest.Real(t); path != "" && path != driver.DefaultPath {
		t.Skipf("needs %s to be the driver that the program is linked with, not %s", cudatest.RealVariable, path)
	}
	t.Run("cu's context", func(t *testing.T) {
		addToSpilled(t, spillway.GPUConfig{Device: openDevice(t, newContext(t)), Own: true})
	})
	t.Run("the engine's context", func(t *testing.T) {
		addToSpilled(t, spillway.GPUConfig{Backend: spillway.CUDA, Memory: spillway.Bytes(1 << 20)})
	})
}

// addToSpilled puts more batches than the GPU and host memory hold, and adds to each number of them
// by a kernel.
func addToSpilled(t *testing.T, gpu spillway.GPUConfig) {
	const batches, rows, addend = 60, 8192, -12345
	ctx := t.Context()
	eng, err := spillway.Open(ctx, spillway.Config{
		GPUs: []spillway.GPUConfig{gpu}, HostMemory: spillway.Bytes(1 << 20),
		Disks:  []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 << 20)}},
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	must(t, err)
	plan, err := eng.Plan("add")
	must(t, err)
	scan, err := plan.Repository("scan", 0)
	must(t, err)
	want := make(map[int64]int) // how often there is each sum
	for i := range batches {
		rec := arrowgen.Ints(uint64(i), rows, 1)
		for _, x := range rec.Column(0).(*array.Int64).Int64Values() {
			want[x+addend]++
		}
		must(t, scan.Put(ctx, 0, rec))
		rec.Release()
	}
	scan.CloseInput()
	if used := eng.Stats().Spaces; len(used) != 3 || used[1].Used() == 0 || used[2].Used() == 0 {
		t.Fatalf("nothing was spilled: %+v", used)
	}

	room, err := eng.Reserve(ctx, reservation.AnyInTier(tier.GPU), 8*rows)
	must(t, err)
	result, err := room.Alloc(8 * rows)
	must(t, err)
	k := newKernel(t, result.Memory().(tier.DeviceMemory).Device())
	out, err := gorgonia.DevicePtr(result)
	must(t, err)
	for h, err := range scan.Drain(ctx, 0, tier.GPU) {
		must(t, err)
		sums := k.add(t, out, h, addend)
		if len(sums) != rows {
			t.Errorf("%d sums of a batch, want %d", len(sums), rows)
		}
		for _, x := range sums {
			want[x]--
		}
	}
	k.close(t)
	must(t, errors.Join(result.Release(), room.Release(), eng.Close()))
	for x, n := range want {
		if n != 0 {
			t.Fatalf("%d is there %d times less than it should be", x, n)
		}
	}
}

// kernel is that of testdata, loaded into the context of a device.
type kernel struct {
	dev    tier.Device
	ctx    cu.CUContext
	module cu.Module
	sum    cu.Function
	stream tier.Stream
	queue  cu.Stream // the same
}

func newKernel(t *testing.T, dev tier.Device) *kernel {
	t.Helper()
	k := &kernel{dev: dev}
	var err error
	k.ctx, err = gorgonia.Context(dev)
	must(t, err)
	within(t, k.ctx, func() (err error) {
		if k.module, err = cu.LoadData(addPTX); err == nil {
			k.sum, err = k.module.Function("spillway_example_add")
		}
		return err
	})
	k.stream, err = dev.NewStream()
	must(t, err)
	k.queue, err = gorgonia.Stream(k.stream)
	must(t, err)
	return k
}

// add returns what the kernel writes to out for the first column of a batch, and closes h.
func (k *kernel) add(t *testing.T, out cu.DevicePtr, h *spillway.Handle, addend int64) []int64 {
	t.Helper()
	var a cdevice.DeviceArray
	var schema cdevice.Schema
	must(t, cdevice.Export(h, &a, &schema, cdevice.Config{Failed: func(err error) { t.Error(err) }}))
	column := a.Array.Child(0)
	n := column.Length
	in := cu.DevicePtr(column.Buffer(1)) + 8*cu.DevicePtr(a.Array.Offset+column.Offset)
	within(t, k.ctx, func() error {
		return k.sum.Launch(int(n+255)/256, 1, 1, 256, 1, 1, 0, k.queue, []unsafe.Pointer{
			unsafe.Pointer(&out), unsafe.Pointer(&in), unsafe.Pointer(&n), unsafe.Pointer(&addend),
		})
	})
	b := make([]byte, 8*n)
	must(t, k.dev.CopyRegions(k.stream, []tier.Region{{HostDst: b, Src: gorgonia.Addr(out)}}))
	must(t, k.stream.Sync())
	a.Release()
	schema.Close()
	sums := make([]int64, n)
	for i := range sums {
		sums[i] = int64(binary.LittleEndian.Uint64(b[8*i:]))
	}
	return sums
}

func (k *kernel) close(t *testing.T) {
	t.Helper()
	must(t, k.stream.Close())
	within(t, k.ctx, func() error { return k.module.Unload() })
}

// A kernel that fails ends the context, and the engine reports the loss of its GPU.
func TestKernelFails(t *testing.T) {
	cudatest.NewLinked(t, cudatest.Config{})
	dev := openDevice(t, newContext(t))
	k := newKernel(t, dev)
	lost := make(chan error, 10)
	cancel := dev.(tier.Losable).OnLost(func(err error) { lost <- err })
	defer cancel()
	nowhere, n := cu.DevicePtr(8), int64(1)
	within(t, k.ctx, func() error {
		return k.sum.Launch(1, 1, 1, 32, 1, 1, 0, k.queue, []unsafe.Pointer{
			unsafe.Pointer(&nowhere), unsafe.Pointer(&nowhere), unsafe.Pointer(&n), unsafe.Pointer(&n),
		})
	})
	if err := k.stream.Sync(); !errors.Is(err, driver.ErrIllegalAddress) {
		t.Errorf("the kernel wrote to address 8, and the stream reports %v", err)
	}
	if err := <-lost; !errors.Is(err, driver.ErrIllegalAddress) {
		t.Errorf("the device is lost: %v", err)
	}
	if err := dev.Close(); !errors.Is(err, driver.ErrIllegalAddress) {
		t.Errorf("closing the device: %v", err)
	}
}

// Each handle goes to the other side and comes back as it was.
func TestRoundTrips(t *testing.T) {
	emulated(t, cudatest.Config{})
	ctx := newContext(t)
	dev := openDevice(t, ctx)
	if got, err := gorgonia.Context(faultdev.New(dev, 1)); got != ctx || err != nil {
		t.Errorf("the device works in %v (%v), want %v", got, err, ctx)
	}
	var theirs cu.Stream
	within(t, ctx, func() (err error) { theirs, err = cu.MakeStream(cu.NonBlocking); return err })
	s, err := gorgonia.AdoptStream(dev, theirs)
	must(t, err)
	if got, err := gorgonia.Stream(s); got != theirs || err != nil {
		t.Errorf("the stream adopted is %v (%v), want %v", got, err, theirs)
	}
	must(t, s.Close())

	const n = 100
	var p cu.DevicePtr
	within(t, ctx, func() (err error) {
		p, err = cu.MemAlloc(n)
		return errors.Join(err, cu.MemsetD8Async(p, 7, n, theirs), theirs.Synchronize())
	})
	s, err = dev.NewStream()
	must(t, err)
	got := make([]byte, n)
	if dev.CopyRegions(s, []tier.Region{{HostDst: got, Src: gorgonia.Addr(p)}}) == nil {
		t.Error("the device read memory that it has not borrowed")
	}
	giveBack, err := dev.(tier.Borrower).Borrow(gorgonia.Addr(p), n)
	must(t, err)
	must(t, errors.Join(dev.CopyRegions(s, []tier.Region{{HostDst: got, Src: gorgonia.Addr(p)}}), s.Close()))
	giveBack()
	if !bytes.Equal(got, bytes.Repeat([]byte{7}, n)) {
		t.Errorf("the device reads %d in memory of cu's, want sevens", got)
	}
	within(t, ctx, func() error { return errors.Join(cu.MemFree(p), theirs.Destroy()) })
}

// TestAdoptCtx: a *cu.Ctx, which has a thread of its own for its context, works in that while a
// device does, and after it is closed.
func TestAdoptCtx(t *testing.T) {
	emulated(t, cudatest.Config{})
	const n = 100
	ctx := cu.NewContext(cu.Device(0), cu.SchedAuto)
	t.Cleanup(func() { must(t, ctx.Close()) })
	dev := openDevice(t, ctx.CUDAContext())
	s, err := dev.NewStream()
	must(t, err)
	p, err := ctx.MemAlloc(n)
	must(t, err)
	giveBack, err := dev.(tier.Borrower).Borrow(gorgonia.Addr(p), n)
	must(t, err)
	got := make([]byte, n)
	must(t, errors.Join(dev.Fill(s, gorgonia.Addr(p), 7, n), dev.CopyRegions(s, []tier.Region{{HostDst: got, Src: gorgonia.Addr(p)}}), s.Sync()))
	if !bytes.Equal(got, bytes.Repeat([]byte{7}, n)) {
		t.Errorf("the bytes are %d", got)
	}
	giveBack()
	must(t, errors.Join(s.Close(), dev.Close()))
	ctx.MemFree(p)
	must(t, ctx.Error())
}

// Streams of both sides wait for the other side's events.
func TestEventsOfBothSides(t *testing.T) {
	emulated(t, cudatest.Config{Delay: 200 * time.Microsecond})
	const n = 4096
	ctx := newContext(t)
	dev := openDevice(t, ctx)
	s, err := dev.NewStream()
	must(t, err)
	a, err := dev.Alloc(s, n)
	must(t, errors.Join(err, s.Sync()))
	p := cu.DevicePtr(a)
	var theirs cu.Stream
	var event cu.Event
	within(t, ctx, func() error {
		var serr, eerr error
		theirs, serr = cu.MakeStream(cu.NonBlocking)
		event, eerr = cu.MakeEvent(cu.DisableTiming)
		return errors.Join(serr, eerr)
	})
	for i := range byte(20) {
		var got [n]byte
		within(t, ctx, func() error { return errors.Join(cu.MemsetD8Async(p, i, n, theirs), event.Record(theirs)) })
		behind, err := gorgonia.AdoptEvent(s, event)
		must(t, err)
		must(t, dev.CopyRegions(s, []tier.Region{{HostDst: got[:], Src: a}})) // waits for the memset
		ours, end, err := gorgonia.Event(s)
		must(t, err)
		within(t, ctx, func() error { return errors.Join(theirs.Wait(ours, 0), cu.MemsetD8Async(p, 255, n, theirs)) })
		must(t, tier.Wait(context.Background(), behind))
		must(t, s.Sync())
		if !bytes.Equal(got[:], bytes.Repeat([]byte{i}, n)) {
			t.Fatalf("round %d: read %d … %d", i, got[0], got[n-1])
		}
		within(t, ctx, theirs.Synchronize)
		must(t, end())
	}
	within(t, ctx, func() error { return errors.Join(theirs.Destroy(), cu.DestroyEvent(&event)) })
	must(t, errors.Join(dev.Free(s, a), s.Close()))
}

// TestRefusals: handles of other backends and of other contexts are refused.
func TestRefusals(t *testing.T) {
	emulated(t, cudatest.Config{Devices: 2})
	ctx := newContext(t)
	dev := openDevice(t, ctx)
	simulated, err := sim.New(sim.Config{Memory: 1 << 20})
	must(t, err)
	s, err := simulated.NewStream()
	must(t, err)
	ours, err := dev.NewStream()
	must(t, err)
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs:       []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}},
		HostMemory: spillway.Bytes(1 << 20), Disks: []spillway.DiskConfig{},
	})
	must(t, err)
	buffer := func(k tier.Kind) error {
		r, err := eng.Reserve(t.Context(), reservation.AnyInTier(k), 4096)
		must(t, err)
		b, err := r.Alloc(4096)
		must(t, err)
		_, refused := gorgonia.DevicePtr(b)
		must(t, errors.Join(b.Release(), r.Release()))
		return refused
	}
	open := func(ctx cu.CUContext, cfg cuda.Config) error { _, err := gorgonia.Open(ctx, cfg); return err }
	_, context := gorgonia.Context(simulated)
	_, stream := gorgonia.Stream(s)
	_, _, event := gorgonia.Event(s)
	_, adopted := gorgonia.AdoptStream(dev, cu.NoStream)
	_, awaited := gorgonia.AdoptEvent(ours, cu.Event{})
	for name, c := range map[string]struct {
		err  error
		want error // nil: any
		says string
	}{
		"no context":                  {open(cu.CUContext{}, cuda.Config{}), nil, "MakeContext"},
		"two contexts":                {open(ctx, cuda.Config{Context: 1}), nil, "want 0"},
		"a context of another GPU":    {open(ctx, cuda.Config{Ordinal: 1}), nil, "set Config.Ordinal to 0"},
		"the context of a simulation": {context, tier.ErrNotSupported, ""},
		"a stream of a simulation":    {stream, tier.ErrNotSupported, ""},
		"an event of a simulation":    {event, tier.ErrNotSupported, ""},
		"no stream":                   {adopted, nil, "0x0"},
		"no event":                    {awaited, nil, "none"},
		"a buffer of a simulation":    {buffer(tier.GPU), tier.ErrNotSupported, "gpu:0"},
		"a buffer in host memory":     {buffer(tier.Host), tier.ErrNotSupported, "host:0"},
	} {
		if c.err == nil || c.want != nil && !errors.Is(c.err, c.want) || !strings.Contains(c.err.Error(), c.says) {
			t.Errorf("%s: %v, want %v with %q", name, c.err, c.want, c.says)
		}
	}
	if p, err := gorgonia.DevicePtr(nil); p != 0 || err != nil {
		t.Errorf("no bytes are at %v (%v)", p, err)
	}
	must(t, errors.Join(ours.Close(), s.Close(), simulated.Close(), eng.Close()))
}
