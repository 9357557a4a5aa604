package cuda_test

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/size"
)

// openReal opens the first device of a real driver; the rig has no emulator.
func openReal(t testing.TB) *rig {
	t.Helper()
	lib, err := cuda.Load(cudatest.Real(t))
	ok(t, err)
	d, err := lib.Open(0, 0)
	ok(t, err)
	t.Cleanup(func() { ok(t, d.Close()) })
	return &rig{t: t, lib: lib, devices: []*cuda.Device{d}}
}

// TestRealCopy sends bytes to the device, over it, and back, one by one and as a batch.
func TestRealCopy(t *testing.T) {
	const n = 1<<20 + 13
	r := openReal(t)
	d := r.devices[0]
	t.Logf("%s, CUDA %s, batches by %q", d.Info().Name, r.lib.Version(), r.lib.Batch())
	s, a, b := r.stream(d), r.alloc(d, n), r.alloc(d, n)
	in, out := r.host(d, n), r.host(d, n)
	pattern(in, 3)
	r.do(func(c *cuda.Calls) error {
		return errors.Join(c.CopyToDevice(s, a, extent.Address(in), n), c.CopyOnDevice(s, b, a, n),
			c.CopyToHost(s, extent.Address(out), b, n))
	})
	ok(t, r.wait(d, s))
	if !bytes.Equal(in, out) {
		t.Error("what came back is not what was sent")
	}
	if r.lib.Batch() == "" {
		t.Log("this driver has no batches of copies")
		return
	}
	clear(out)
	const pieces = 100
	var there, back []cuda.Copy
	for i := range int64(pieces) {
		from, to := i*n/pieces, (i+1)*n/pieces
		there = append(there, cuda.Copy{Dst: b + cuda.Ptr(from), HostSrc: extent.Address(in[from:]), Size: to - from})
		back = append(back, cuda.Copy{HostDst: extent.Address(out[from:]), Src: b + cuda.Ptr(from), Size: to - from})
	}
	r.do(func(c *cuda.Calls) error {
		return errors.Join(c.Fill(s, b, 0, n), c.CopyBatch(s, there), c.CopyBatch(s, back))
	})
	ok(t, r.wait(d, s))
	if !bytes.Equal(in, out) {
		t.Error("what came back in a batch is not what was sent")
	}
}

// TestRealOrder: a stream waits for a word of the host's, another for a mark in it, and marks are
// not reached before.
func TestRealOrder(t *testing.T) {
	r := openReal(t)
	if !r.lib.HasValues() {
		t.Skip("needs a driver whose streams can wait for words")
	}
	d := r.devices[0]
	s, other := r.stream(d), r.stream(d)
	p, h := r.alloc(d, 8), r.host(d, 8)
	unblock := r.gate(d, s)
	first := of(t, d, func(c *cuda.Calls) (*cuda.Mark, error) {
		m, err := c.Mark(s, nil)
		return m, errors.Join(c.Fill(s, p, 7, 8), err)
	})
	filled := of(t, d, func(c *cuda.Calls) (*cuda.Mark, error) { return c.Mark(s, nil) })
	r.do(func(c *cuda.Calls) error {
		return errors.Join(c.WaitMark(other, filled), c.CopyToHost(other, extent.Address(h), p, 8))
	})
	behind := of(t, d, func(c *cuda.Calls) (*cuda.Mark, error) { return c.Mark(other, nil) })
	if reached(first) || reached(filled) || reached(behind) {
		t.Error("a mark is reached before the work in front of it is done")
	}
	unblock()
	<-behind.Done()
	if err := behind.Err(); err != nil || !bytes.Equal(h, bytes.Repeat([]byte{7}, 8)) {
		t.Errorf("behind the mark are %v, %v", h, err)
	}
}

// TestRealMistake: an unallocated address is refused with a typed error, and the context goes on.
func TestRealMistake(t *testing.T) {
	r := openReal(t)
	d := r.devices[0]
	s := r.stream(d)
	h := r.host(d, 8)
	err := d.Here(func(c *cuda.Calls) error { return c.CopyToDevice(s, 1, extent.Address(h), 8) })
	var e *cuda.Error
	if !errors.As(err, &e) || e.Call == "" || e.Code == 0 {
		t.Errorf("copying to address 1: %v", err)
	}
	ok(t, r.wait(d, s))
}

// BenchmarkRealCopy is one asynchronous copy between memory that the driver pinned and the device,
// and the wait for it: the limit of all others.
func BenchmarkRealCopy(b *testing.B) {
	r := openReal(b)
	d := r.devices[0]
	for _, n := range []int64{4 << 10, 1 << 20, 64 << 20, 256 << 20} {
		if n > d.Info().Memory/4 {
			continue
		}
		s, p := r.stream(d), r.alloc(d, n)
		h := r.host(d, n)
		pattern(h, 1)
		at := extent.Address(h)
		for name, put := range map[string]func(c *cuda.Calls) error{
			"to device": func(c *cuda.Calls) error { return c.CopyToDevice(s, p, at, n) },
			"to host":   func(c *cuda.Calls) error { return c.CopyToHost(s, at, p, n) },
		} {
			b.Run(fmt.Sprintf("%s/%s", name, size.Format(n)), func(b *testing.B) {
				b.SetBytes(n)
				b.ReportAllocs()
				for b.Loop() {
					var m *cuda.Mark
					err := d.Here(func(c *cuda.Calls) (err error) {
						if err = put(c); err == nil {
							m, err = c.Mark(s, nil)
						}
						return err
					})
					if err != nil {
						b.Fatal(err)
					}
					<-m.Done()
					if err := m.Err(); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
