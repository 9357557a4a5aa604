package cuda_test

import (
	"bytes"
	"errors"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/internal/address"
	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier"
)

// digest computes on the device what the size bytes at src come to, in pieces of the given sizes.
func (r *rig) digest(d *cuda.Device, s cuda.Stream, src, out cuda.Ptr, first int64, pieces ...int64) (tier.Digest, error) {
	r.t.Helper()
	back := r.host(d, 16)
	err := d.Here(func(c *cuda.Calls) error {
		err := c.Fill(s, out, 0, 16)
		for _, n := range pieces {
			err = errors.Join(err, c.Digest(s, src, n, first, out))
			src, first = src+cuda.Ptr(n), first+n/8
		}
		return errors.Join(err, c.CopyToHost(s, address.Of(back), out, 16))
	})
	if werr := r.wait(d, s); err == nil {
		err = werr
	}
	got := words(back)
	return tier.Digest{Hash: got[0], Sum: got[1]}, err
}

// The digest of pieces that follow each other is that of the whole, and each device has its kernel.
func TestDigest(t *testing.T) {
	const n = 100_003
	r := open(t, cudatest.Config{Devices: 2})
	for i, d := range r.devices {
		s, src, out, h := r.stream(d), r.alloc(d, n), r.alloc(d, 16), r.host(d, n)
		pattern(h, i)
		ok(t, d.Here(func(c *cuda.Calls) error { return c.CopyToDevice(s, src, address.Of(h), n) }))
		for _, first := range []int64{0, 1 << 40, -1} {
			for _, pieces := range [][]int64{{n}, {8, n - 8}, {4096, 0, 4096, n - 8192}} {
				got, err := r.digest(d, s, src, out, first, pieces...)
				if want := tier.DigestBytes(h, first); err != nil || got != want {
					t.Errorf("the digest of %v from %d is %x (%v), want %x", pieces, first, got, err, want)
				}
			}
		}
		if loads := r.Calls("cuModuleLoadData"); loads != int64(i+1) {
			t.Errorf("%d devices loaded %d kernels", i+1, loads)
		}
	}
}

func TestDigestMistakes(t *testing.T) {
	r := open(t, cudatest.Config{})
	d := r.devices[0]
	s, src, out := r.stream(d), r.alloc(d, 64), r.alloc(d, 64)
	for name, call := range map[string]func(c *cuda.Calls) error{
		"half a word":      func(c *cuda.Calls) error { return c.Digest(s, src+4, 8, 0, out) },
		"into half a word": func(c *cuda.Calls) error { return c.Digest(s, src, 8, 0, out+4) },
		"a negative size":  func(c *cuda.Calls) error { return c.Digest(s, src, -8, 0, out) },
	} {
		if err := d.Here(call); !errors.Is(err, cuda.ErrInvalidValue) || !strings.Contains(err.Error(), "spillway_digest") {
			t.Errorf("the digest of %s: %v", name, err)
		}
	}
	if r.Calls("cuModuleLoadData") != 0 {
		t.Error("a kernel was loaded for that")
	}
}

// Memory that is freed behind the digest is there for it.
func TestDigestOfWhatIsFreedBehind(t *testing.T) {
	const n = 1 << 16
	r := open(t, cudatest.Config{})
	d := r.devices[0]
	s, out, back := r.stream(d), r.alloc(d, 16), r.host(d, 16)
	pool := of(t, d, func(c *cuda.Calls) (cuda.Pool, error) { return c.NewPool() })
	t.Cleanup(func() { r.do(func(c *cuda.Calls) error { return c.DestroyPool(pool) }) })
	src := of(t, d, func(c *cuda.Calls) (cuda.Ptr, error) { return c.AllocAsync(s, pool, n) })
	unblock := r.gate(d, s)
	r.do(func(c *cuda.Calls) error {
		return errors.Join(c.Fill(s, src, 7, n), c.Fill(s, out, 0, 16), c.Digest(s, src, n, 3, out), c.FreeAsync(s, src),
			c.CopyToHost(s, address.Of(back), out, 16))
	})
	unblock()
	ok(t, r.wait(d, s))
	got, want := words(back), tier.DigestBytes(bytes.Repeat([]byte{7}, n), 3)
	if got != [2]uint64{want.Hash, want.Sum} {
		t.Errorf("the digest is %x, want %x", got, want)
	}
}

// A driver without a compiler for PTX, or with too old a one, is reported at once, and always.
func TestNoKernel(t *testing.T) {
	for _, code := range []cuda.Code{cuda.ErrInvalidImage, cuda.ErrNoBinaryForGPU, cuda.ErrInvalidPTX, cuda.ErrNoJITCompiler,
		cuda.ErrUnsupportedPTX, cuda.ErrJITDisabled, cuda.ErrNotSupported} {
		t.Run(code.Error(), func(t *testing.T) {
			r := open(t, cudatest.Config{})
			d := r.devices[0]
			s, src, out := r.stream(d), r.alloc(d, 64), r.alloc(d, 16)
			r.Fail("cuModuleLoadData", 0, code, 1)
			for range 2 {
				if err := d.PrepareDigest(); !errors.Is(err, cuda.ErrNoKernel) || !errors.Is(err, code) {
					t.Errorf("the driver says so: %v", err)
				}
				if _, err := r.digest(d, s, src, out, 0, 64); !errors.Is(err, cuda.ErrNoKernel) {
					t.Errorf("the driver has said so: %v", err)
				}
			}
			if n := r.Calls("cuModuleLoadData"); n != 1 {
				t.Errorf("the driver says so, and was asked %d times", n)
			}
		})
	}
	t.Run("a module without the kernel", func(t *testing.T) {
		r := open(t, cudatest.Config{})
		r.Fail("cuModuleGetFunction", 0, cuda.ErrNotFound, 1)
		if err := r.devices[0].PrepareDigest(); !errors.Is(err, cuda.ErrNoKernel) || r.Live("modules") != 0 {
			t.Errorf("%v, and %d modules are there", err, r.Live("modules"))
		}
	})
	t.Run("a driver that is lazy", func(t *testing.T) {
		r := open(t, cudatest.Config{})
		d := r.devices[0]
		s, src, out := r.stream(d), r.alloc(d, 64), r.alloc(d, 16)
		r.Fail("cuLaunchKernel", 0, cuda.ErrNoJITCompiler, 1)
		if _, err := r.digest(d, s, src, out, 0, 64); !errors.Is(err, cuda.ErrNoKernel) {
			t.Error(err)
		}
	})
}

// What may be better the next time is tried the next time.
func TestKernelLoadsLater(t *testing.T) {
	for _, symbol := range []string{"cuDeviceGetAttribute", "cuModuleLoadData", "cuModuleGetFunction"} {
		t.Run(symbol, func(t *testing.T) {
			r := open(t, cudatest.Config{})
			d := r.devices[0]
			r.Fail(symbol, 0, cuda.ErrOutOfMemory, 1)
			if err := d.PrepareDigest(); !errors.Is(err, cuda.ErrOutOfMemory) || errors.Is(err, cuda.ErrNoKernel) {
				t.Error(err)
			}
			ok(t, d.PrepareDigest())
			if n := r.Live("modules"); n != 1 {
				t.Errorf("it failed, and there are %d modules", n)
			}
		})
	}
}

// Many want the kernel at once, wherever they are: it is loaded once, and gone when the device is
// closed.
func TestKernelIsLoadedOnce(t *testing.T) {
	r := open(t, cudatest.Config{})
	d := r.devices[0]
	s, src, out := r.stream(d), of(t, d, func(c *cuda.Calls) (cuda.Ptr, error) { return c.Alloc(64) }), r.alloc(d, 16)
	compute := func(c *cuda.Calls) error { return c.Digest(s, src, 64, 0, out) }
	var all sync.WaitGroup
	for i := range 12 {
		all.Go(func() {
			runtime.Gosched()
			var err error
			if i%2 == 0 {
				err = d.PrepareDigest()
			} else {
				err = d.Here(compute)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if n := r.Calls("cuModuleLoadData"); n != 1 {
		t.Errorf("the kernel was loaded %d times", n)
	}
	r.do(func(c *cuda.Calls) error { return c.Free(src) })
}

// Text that this driver, or any, would not take is not taken here.
func TestModules(t *testing.T) {
	const entry = ".visible .entry spillway_digest()\n"
	for _, c := range []struct {
		version int
		text    string
		want    error
	}{
		{11000, ".version 7.0\n.target sm_50\n.address_size 64\n" + entry, nil},
		{11000, ".version 7.1\n.target sm_50\n.address_size 64\n" + entry, cuda.ErrUnsupportedPTX},
		{12080, ".version 9.0\n.target sm_50\n.address_size 64\n" + entry, cuda.ErrUnsupportedPTX},
		{11000, ".version 7.0\n.target sm_50\n.address_size 32\n" + entry, cuda.ErrInvalidPTX},
		{11000, ".version 7.0\n.target compute_50\n.address_size 64\n" + entry, cuda.ErrInvalidPTX},
		{11000, ".version seven\n.target sm_50\n.address_size 64\n" + entry, cuda.ErrInvalidPTX},
		{11000, ".target sm_50\n.version 7.0\n.address_size 64\n" + entry, cuda.ErrInvalidPTX},
		{11000, entry, cuda.ErrInvalidPTX},
		{11000, ".version 7.0\n.target sm_50\n.address_size 64\n.entry spillway_digest()\n", cuda.ErrNotFound},
		{11000, ".version 7.0\n.target sm_50\n.address_size 64\n.visible .entry spillway_digest2()\n.visible .func spillway_digest()\n", cuda.ErrNotFound},
	} {
		t.Run("", func(t *testing.T) {
			r := open(t, cudatest.Config{Version: c.version})
			err := r.devices[0].Here(func(calls *cuda.Calls) error {
				m, err := calls.LoadModule([]byte(c.text + "\x00"))
				if err != nil {
					return err
				}
				_, err = calls.Function(m, "spillway_digest")
				return errors.Join(err, calls.UnloadModule(m))
			})
			if !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
				t.Errorf("%q with CUDA %d: %v, want %v", c.text, c.version, err, c.want)
			}
		})
	}
}

// Grids that a device cannot have are refused, as are those that the kernel is not made for.
func TestGrids(t *testing.T) {
	r := open(t, cudatest.Config{Version: 11000}) // our text is for all drivers that can be bound
	d := r.devices[0]
	s, a := r.stream(d), r.alloc(d, 256)
	ok(t, d.PrepareDigest())
	m := of(t, d, func(c *cuda.Calls) (cuda.Module, error) { return c.LoadModule(append([]byte(cuda.DigestPTX()), 0)) })
	f := of(t, d, func(c *cuda.Calls) (cuda.Function, error) { return c.Function(m, "spillway_digest") })
	for _, c := range []struct {
		grid cuda.Grid
		want error
	}{
		{cuda.Grid{Blocks: 1, Threads: 32}, nil}, {cuda.Grid{Blocks: 1<<31 - 1, Threads: 256}, nil},
		{cuda.Grid{Blocks: 0, Threads: 32}, cuda.ErrInvalidValue}, {cuda.Grid{Blocks: 1, Threads: 0}, cuda.ErrInvalidValue},
		{cuda.Grid{Blocks: 1, Threads: 1056}, cuda.ErrInvalidValue}, {cuda.Grid{Blocks: 1, Threads: 288}, cuda.ErrInvalidValue},
		{cuda.Grid{Blocks: 1, Threads: 40}, cuda.ErrInvalidValue}, {cuda.Grid{Blocks: 1 << 31, Threads: 32}, cuda.ErrInvalidValue},
	} {
		err := d.Here(func(calls *cuda.Calls) error { return calls.Launch(s, f, c.grid, uint64(a), 64, 0, uint64(a)+128) })
		if !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
			t.Errorf("%+v: %v, want %v", c.grid, err, c.want)
		}
	}
	ok(t, r.wait(d, s))
	r.do(func(c *cuda.Calls) error { return c.UnloadModule(m) })
}
