//go:build gorgonia && cgo && linux && (amd64 || arm64)

package cuda_test

import (
	"bytes"
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"gorgonia.org/cu"
)

// theirs runs f where a context of cu's is current, as a program does that uses cu.
func theirs(t testing.TB, ctx cu.CUContext, f func() error) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ok(t, cu.PushCurrentCtx(ctx))
	defer func() {
		_, err := cu.PopCurrentCtx()
		ok(t, err)
	}()
	ok(t, f())
}

// context makes one of cu's that the test's end destroys.
func (r *rig) context() (ctx cu.CUContext) {
	r.t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	dev, err := cu.GetDevice(0)
	ok(r.t, err)
	ctx, err = dev.MakeContext(cu.SchedAuto)
	ok(r.t, err)
	_, err = cu.PopCurrentCtx() // making it made it current
	ok(r.t, err)
	r.t.Cleanup(func() { ok(r.t, ctx.Destroy()) })
	return ctx
}

// adopt opens a device with ctx, which the test's end closes: that leaves the context alone.
func (r *rig) adopt(ctx cu.CUContext) *cuda.Device {
	r.t.Helper()
	d, err := r.lib.Adopt(0, cuda.ContextOf(ctx))
	ok(r.t, err)
	if d.Context() != cuda.ContextOf(ctx) {
		r.t.Error("another context was adopted")
	}
	r.t.Cleanup(func() {
		ok(r.t, d.Close())
		theirs(r.t, ctx, cu.Synchronize)
	})
	return d
}

// Work that a program puts by cu and work that the engine puts on the same context are in the order
// that they are given, and each finds what the other has done.
func TestWorkOfBothSides(t *testing.T) {
	const n, rounds = 4096, 20
	r := open(t, cudatest.Config{Delay: 200 * time.Microsecond})
	ctx := r.context()
	d := r.adopt(ctx)
	ours, mine, host := r.stream(d), r.alloc(d, n), r.host(d, n)
	var (
		other cu.Stream
		event cu.Event
		ptr   cu.DevicePtr
	)
	theirs(t, ctx, func() (err error) {
		var serr, eerr error
		other, serr = cu.MakeStream(cu.NonBlocking)
		event, eerr = cu.MakeEvent(cu.DisableTiming)
		ptr, err = cu.MemAlloc(n)
		return errors.Join(err, serr, eerr)
	})
	t.Cleanup(func() {
		theirs(t, ctx, func() error { return errors.Join(other.Destroy(), cu.DestroyEvent(&event), cu.MemFree(ptr)) })
	})
	for i := range byte(rounds) {
		theirs(t, ctx, func() error {
			return errors.Join(cu.MemsetD8Async(ptr, i, n, other), cu.MemsetD8Async(ptr, i+100, n/2, other), event.Record(other))
		})
		var behind *cuda.Mark
		ok(t, d.Here(func(c *cuda.Calls) (err error) {
			err = errors.Join(
				c.WaitEvent(ours, cuda.EventOf(event)), // or what was there before would be copied
				c.CopyOnDevice(ours, mine, cuda.Ptr(ptr), n),
				c.CopyToHost(ours, cuda.AddressOf(host), mine, n))
			var merr error
			behind, merr = c.Mark(ours, nil)
			return errors.Join(err, merr, c.WaitMark(cuda.StreamOf(other), behind))
		}))
		// What cu puts now is behind the copy, and must not be seen by it.
		theirs(t, ctx, func() error { return cu.MemsetD8Async(ptr, 255, n, other) })
		<-behind.Done()
		ok(t, behind.Err())
		if want := append(bytes.Repeat([]byte{i + 100}, n/2), bytes.Repeat([]byte{i}, n/2)...); !bytes.Equal(host, want) {
			t.Fatalf("round %d: the copy found %d … %d, want %d … %d", i, host[0], host[n-1], i+100, i)
		}
		theirs(t, ctx, other.Synchronize)
	}
}

// A *cu.Ctx, which has a thread of its own for its context, goes on with that.
func TestAdoptCtx(t *testing.T) {
	r := open(t, cudatest.Config{})
	ctx := cu.NewContext(cu.Device(0), cu.SchedAuto)
	t.Cleanup(func() { ok(t, ctx.Close()) })
	d := r.adopt(ctx.CUDAContext())
	p, err := ctx.MemAlloc(small)
	ok(t, err)
	s, host := r.stream(d), r.host(d, small)
	ok(t, d.Here(func(c *cuda.Calls) error {
		return errors.Join(c.Fill(s, cuda.Ptr(p), 7, small), c.CopyToHost(s, cuda.AddressOf(host), cuda.Ptr(p), small))
	}))
	ok(t, r.wait(d, s))
	if !bytes.Equal(host, bytes.Repeat([]byte{7}, small)) {
		t.Error("the bytes are not those that were filled in")
	}
	ctx.MemFree(p)
	ok(t, ctx.Error())
}

// A library that the program is not linked with would have another state than the one cu calls.
func TestOtherLibrary(t *testing.T) {
	other := cudatest.NewApart(t, cudatest.Config{Without: []string{"cuDeviceGetUuid_v2"}}) // which is not needed
	refused(t, other.Path, cuda.ErrNotLinked, "libcuda.so.1", "gorgonia")
	if n := other.Calls(""); n != 0 {
		t.Errorf("it was called %d times", n)
	}
}

// Failures are reported alike, whether cu has made the call or the run-time binding, also with a
// code that cu does not know.
func TestErrorsOfBothSides(t *testing.T) {
	r := open(t, cudatest.Config{})
	for symbol, call := range map[string]func(c *cuda.Calls) error{
		"cuStreamCreate": func(c *cuda.Calls) error { _, err := c.NewStream(); return err },
		"cuMemAlloc_v2":  func(c *cuda.Calls) error { _, err := c.Alloc(1); return err },
		"cuMemHostAlloc": func(c *cuda.Calls) error { _, err := c.AllocHost(1); return err }, // not cu's
	} {
		for _, code := range []cuda.Code{cuda.ErrOutOfMemory, 999, 4321} { // the last is unknown
			r.Fail(symbol, 0, code, 1)
			err := r.devices[0].Here(call)
			var e *cuda.Error
			if !errors.As(err, &e) || e.Call != symbol || e.Code != code || (e.Name == "") != (code == 4321) {
				t.Errorf("%s failed with %d, and told %v", symbol, code, err)
			}
		}
	}
}
