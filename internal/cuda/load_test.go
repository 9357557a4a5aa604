package cuda_test

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
)

// refused checks that Load returns why there is no CUDA, as a distinct and readable error.
func refused(t *testing.T, path string, reason error, words ...string) {
	t.Helper()
	lib, err := cuda.Load(path)
	var load *cuda.LoadError
	if lib != nil && err == nil || !errors.As(err, &load) {
		t.Fatalf("Load gave %v, want a LoadError", err)
	}
	if !errors.Is(err, cuda.ErrUnavailable) || !errors.Is(err, reason) {
		t.Errorf("%v does not match ErrUnavailable and %v", err, reason)
	}
	for _, w := range append(words, path) {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q does not say %q", err, w)
		}
	}
	for _, other := range []error{cuda.ErrNoLibrary, cuda.ErrNotDriver, cuda.ErrDriverTooOld, cuda.ErrDriverRefused} {
		if other != reason && errors.Is(err, other) {
			t.Errorf("%v matches %v, too", err, other)
		}
	}
}

func TestNoLibrary(t *testing.T) {
	refused(t, filepath.Join(t.TempDir(), "libcuda.so.1"), cuda.ErrNoLibrary)
}

// A file that is no library at all.
func TestNoObject(t *testing.T) {
	path := filepath.Join(t.TempDir(), "libcuda.so.1")
	ok(t, os.WriteFile(path, []byte("not a library"), 0o600))
	refused(t, path, cuda.ErrNoLibrary)
}

// A library of something else.
func TestNotDriver(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs the C library of Linux")
	}
	refused(t, "libc.so.6", cuda.ErrNotDriver, "cuInit")
}

func TestDriverTooOld(t *testing.T) {
	old := cudatest.New(t, cudatest.Config{Version: 10020})
	refused(t, old.Path, cuda.ErrDriverTooOld, "10.2", "11.0")
	lacks := cudatest.New(t, cudatest.Config{Without: []string{"cuDevicePrimaryCtxRelease_v2"}})
	refused(t, lacks.Path, cuda.ErrDriverTooOld, "cuDevicePrimaryCtxRelease_v2", "11.0")
	if n := lacks.Calls("cuInit"); n != 0 {
		t.Errorf("a driver that is too old was initialized")
	}
}

func TestNoDevice(t *testing.T) {
	e := cudatest.New(t, cudatest.Config{Devices: -1})
	refused(t, e.Path, cuda.ErrDriverRefused, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device")
	if _, err := cuda.Load(e.Path); !errors.Is(err, cuda.ErrNoDevice) {
		t.Errorf("%v does not match ErrNoDevice", err)
	}
}

func TestDriverRefuses(t *testing.T) {
	for _, symbol := range []string{"cuDriverGetVersion", "cuInit"} {
		e := cudatest.New(t, cudatest.Config{})
		e.Fail(symbol, 0, 999, 1)
		refused(t, e.Path, cuda.ErrDriverRefused, symbol, "CUDA_ERROR_UNKNOWN")
	}
}

// Each needed function is looked up before anything is called.
func TestEachNeededFunction(t *testing.T) {
	for name, needed := range cuda.SymbolNames() {
		if !needed || name == "cuInit" || name == "cuDriverGetVersion" {
			continue
		}
		e := cudatest.New(t, cudatest.Config{Without: []string{name}})
		refused(t, e.Path, cuda.ErrDriverTooOld, name)
	}
}

// Without its optional functions a driver is good, and says what it lacks.
func TestOptionalFunctions(t *testing.T) {
	var without []string
	for name, needed := range cuda.SymbolNames() {
		if !needed {
			without = append(without, name)
		}
	}
	r := open(t, cudatest.Config{Version: 11000, Without: without})
	if r.lib.HasPools() || r.lib.Batch() != "" {
		t.Error("the library claims to have what it has not")
	}
	d := r.devices[0]
	if d.Info().Pools || !strings.HasPrefix(d.Info().UUID, "GPU-e0e1e2e3-") {
		t.Errorf("the device describes itself as %+v", d.Info())
	}
	s, p := r.stream(d), r.alloc(d, 1000)
	for name, call := range map[string]func(c *cuda.Calls) error{
		"cuMemAllocFromPoolAsync": func(c *cuda.Calls) error { _, err := c.AllocAsync(s, 1, 1); return err },
		"cuMemFreeAsync":          func(c *cuda.Calls) error { return c.FreeAsync(s, p) },
		"cuMemPoolCreate":         func(c *cuda.Calls) error { _, err := c.NewPool(); return err },
		"cuMemPoolDestroy":        func(c *cuda.Calls) error { return c.DestroyPool(1) },
		"cuMemPoolTrimTo":         func(c *cuda.Calls) error { return c.TrimPool(1) },
		"cuMemPoolGetAttribute":   func(c *cuda.Calls) error { _, err := c.PoolUnused(1); return err },
		"cuMemPoolSetAccess":      func(c *cuda.Calls) error { return c.ShowPool(1, 0) },
		"cuStreamWaitValue32_v2":  func(c *cuda.Calls) error { return c.WaitValue(s, p, 1) },
		"cuMemcpyBatchAsync":      func(c *cuda.Calls) error { return c.CopyBatch(s, []cuda.Copy{{Dst: p, Src: p + 500, Size: 1}}) },
	} {
		err := d.Here(call)
		var e *cuda.Error
		if !errors.Is(err, cuda.ErrNotSupported) || !errors.As(err, &e) || e.Call != name {
			t.Errorf("%s: %v, want that it is not supported", name, err)
		}
	}
	ok(t, r.wait(d, s))
}

// NVIDIA's own library, where it is installed on a machine that has no device.
func TestRealDriver(t *testing.T) {
	lib, err := cuda.Load("")
	switch {
	case err == nil:
		infos, err := lib.Devices()
		ok(t, err)
		if len(infos) == 0 {
			t.Error("a driver without a device has started")
		}
	case errors.Is(err, cuda.ErrNoLibrary):
		t.Skip("needs NVIDIA's driver: ", err)
	case !errors.Is(err, cuda.ErrUnavailable):
		t.Errorf("%v does not match ErrUnavailable", err)
	}
}
