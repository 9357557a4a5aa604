package cuda_test

import (
	"testing"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
)

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// rig is a library of the emulator with its devices, which the test's end closes and
// looks for leaks.
type rig struct {
	t testing.TB
	*cudatest.Emulator
	lib     *cuda.Library
	devices []*cuda.Device
}

func open(t testing.TB, cfg cudatest.Config) *rig {
	t.Helper()
	r := &rig{t: t, Emulator: cudatest.New(t, cfg)}
	var err error
	r.lib, err = cuda.Load(r.Path)
	ok(t, err)
	infos, err := r.lib.Devices()
	ok(t, err)
	t.Cleanup(r.close)
	for i := range infos {
		d, err := r.lib.Open(i, 0)
		ok(t, err)
		r.devices = append(r.devices, d)
	}
	return r
}

func (r *rig) close() {
	for _, d := range r.devices {
		if err := d.Close(); err != nil && err != cuda.ErrClosed {
			r.t.Errorf("closing a device: %v", err)
		}
	}
	for _, leak := range r.Leaks() {
		r.t.Error(leak)
	}
}

// do runs f on the first device, and fails the test with its error.
func (r *rig) do(f func(c *cuda.Calls) error) {
	r.t.Helper()
	ok(r.t, r.devices[0].Here(f))
}

// of runs f with the context of d for its result.
func of[T any](t testing.TB, d *cuda.Device, f func(c *cuda.Calls) (T, error)) T {
	t.Helper()
	var v T
	ok(t, d.Here(func(c *cuda.Calls) (err error) { v, err = f(c); return err }))
	return v
}

// stream returns a stream of the first device that the test's end destroys.
func (r *rig) stream(d *cuda.Device) cuda.Stream {
	r.t.Helper()
	s := of(r.t, d, (*cuda.Calls).NewStream)
	r.t.Cleanup(func() { ok(r.t, d.Here(func(c *cuda.Calls) error { return c.DestroyStream(s) })) })
	return s
}

func (r *rig) alloc(d *cuda.Device, n int64) cuda.Ptr {
	r.t.Helper()
	p := of(r.t, d, func(c *cuda.Calls) (cuda.Ptr, error) { return c.Alloc(n) })
	r.t.Cleanup(func() { ok(r.t, d.Here(func(c *cuda.Calls) error { return c.Free(p) })) })
	return p
}

// host returns pinned host memory.
func (r *rig) host(d *cuda.Device, n int64) []byte {
	r.t.Helper()
	p := of(r.t, d, func(c *cuda.Calls) (uintptr, error) { return c.AllocHost(n) })
	r.t.Cleanup(func() { ok(r.t, d.Here(func(c *cuda.Calls) error { return c.FreeHost(p) })) })
	return cuda.HostBytes(p, n)
}

// wait waits for the work on s so far, and returns how it went.
func (r *rig) wait(d *cuda.Device, s cuda.Stream) error {
	r.t.Helper()
	m := of(r.t, d, func(c *cuda.Calls) (*cuda.Mark, error) { return c.Mark(s, nil) })
	<-m.Done()
	return m.Err()
}

// pattern fills b with bytes that differ by seed.
func pattern(b []byte, seed int) {
	for i := range b {
		b[i] = byte(i*7 + i>>8*13 + seed*31)
	}
}
