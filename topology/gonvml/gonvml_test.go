//go:build cgo && !windows

package gonvml_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxa100"

	own "github.com/spillway-db/spillway/internal/nvml"
	"github.com/spillway-db/spillway/test/nvmltest"
	"github.com/spillway-db/spillway/topology"
	"github.com/spillway-db/spillway/topology/gonvml"
)

func ExampleGPUs() {
	top, err := topology.Discover(context.Background(), topology.Options{
		GPUs:      gonvml.GPUs(dgxa100.New()), // a mock; nvml.New() is this machine's library
		LookupEnv: func(string) (string, bool) { return "", false },
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%d times %s, %d GiB\n", len(top.GPUs), top.GPUs[0].Name, top.GPUs[0].MemoryBytes>>30)
	// Output: 8 times Mock NVIDIA A100-SXM4-40GB, 40 GiB
}

// go-nvml's own mock has eight GPUs and does not implement most queries: these are properties that
// the GPUs do not have, and no errors.
func TestDGXA100(t *testing.T) {
	server := dgxa100.New()
	server.Devices[3].(*dgxa100.Device).MigMode = nvml.DEVICE_MIG_ENABLE
	var want []topology.GPU
	for i, d := range server.Devices {
		d := d.(*dgxa100.Device)
		want = append(want, topology.GPU{
			Index: i, Name: d.Name, UUID: d.UUID, DeviceID: "10de:20b0", MemoryBytes: int64(d.MemoryInfo.Total), MIGEnabled: i == 3,
		})
	}
	if got, err := gonvml.GPUs(server)(t.Context()); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v\nwant %+v", got, err, want)
	}
	if a, b := len(server.InitCalls()), len(server.ShutdownCalls()); a != 1 || b != 1 {
		t.Errorf("the library is initialized %d times and shut down %d times", a, b)
	}
}

// oneGPU is a mock with a GPU whose name is asked for by name.
func oneGPU(name func() (string, nvml.Return)) *mock.Interface {
	return &mock.Interface{
		InitFunc:           func() nvml.Return { return nvml.SUCCESS },
		ShutdownFunc:       func() nvml.Return { return nvml.SUCCESS },
		DeviceGetCountFunc: func() (int, nvml.Return) { return 1, nvml.SUCCESS },
		DeviceGetHandleByIndexFunc: func(int) (nvml.Device, nvml.Return) {
			return &mock.Device{GetNameFunc: name}, nvml.SUCCESS
		},
	}
}

// A function that the driver's library does not have is not called: the process would die.
func TestOldDriver(t *testing.T) {
	lib := oneGPU(func() (string, nvml.Return) {
		t.Error("a function without a symbol is called")
		return "", nvml.SUCCESS
	})
	lib.ExtensionsFunc = func() nvml.ExtendedInterface {
		return &mock.ExtendedInterface{LookupSymbolFunc: func(name string) error {
			if strings.HasPrefix(name, "nvmlDeviceGetCount") || strings.HasPrefix(name, "nvmlDeviceGetHandle") {
				return nil
			}
			return errors.New("no symbol")
		}}
	}
	if got, err := gonvml.GPUs(lib)(t.Context()); err != nil || !reflect.DeepEqual(got, []topology.GPU{{}}) {
		t.Errorf("%+v, %v", got, err)
	}
}

// A mock without symbols is asked all the same, and a panic of its own is reported.
func TestMocks(t *testing.T) {
	lib := oneGPU(func() (string, nvml.Return) { return "a GPU", nvml.SUCCESS })
	if got, err := gonvml.GPUs(lib)(t.Context()); err != nil || len(got) != 1 || got[0].Name != "a GPU" {
		t.Errorf("%+v, %v", got, err)
	}
	lib = oneGPU(func() (string, nvml.Return) { panic("the mock's own") })
	top, err := topology.Discover(t.Context(), topology.Options{Root: t.TempDir(), GPUs: gonvml.GPUs(lib)})
	if err != nil || !strings.Contains(fmt.Sprint(top.Warnings), "panicked: the mock's own") {
		t.Errorf("%v, %v", top.Warnings, err)
	}
}

// The codes that topology handles are go-nvml's.
func TestCodes(t *testing.T) {
	for code, want := range map[own.Code]nvml.Return{
		own.ErrInvalidArgument:  nvml.ERROR_INVALID_ARGUMENT,
		own.ErrNotSupported:     nvml.ERROR_NOT_SUPPORTED,
		own.ErrNotFound:         nvml.ERROR_NOT_FOUND,
		own.ErrInsufficientSize: nvml.ERROR_INSUFFICIENT_SIZE,
		own.ErrDriverNotLoaded:  nvml.ERROR_DRIVER_NOT_LOADED,
		own.ErrFunctionNotFound: nvml.ERROR_FUNCTION_NOT_FOUND,
	} {
		if nvml.Return(code) != want {
			t.Errorf("%v is %v of go-nvml, not %v", code, nvml.Return(code), want)
		}
	}
}

// The compiler finds NVIDIA's functions, types and constants in the library of the tests.
func TestHeader(t *testing.T) {
	dir, err := exec.Command("go", "list", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml/pkg/nvml").Output()
	if err != nil {
		t.Fatal(err)
	}
	header := fmt.Sprintf("-DNVIDIA_HEADER=%q", strings.TrimSpace(string(dir))+"/nvml.h")
	if _, err := nvmltest.Source.Compile("-Werror", header); err != nil {
		t.Error(err)
	}
}

const libraryVar = "SPILLWAY_TEST_NVML"

// Both bindings list the same GPUs of a library in C, or of this machine's, and fail alike. Each
// library has a process of its own: go-nvml calls the first that a process loads.
func TestSameAnswers(t *testing.T) {
	if path := os.Getenv(libraryVar); path != "" {
		compare(t, path)
		return
	}
	full := nvmltest.New(t)
	paths := map[string]string{
		"all functions": full.Path,
		"old":           nvmltest.New(t, "nvmlDeviceGetNumaNodeId", "nvmlDeviceGetMigMode", "nvmlDeviceGetNvLinkState").Path,
		"very old":      nvmltest.New(t, "nvmlDeviceGetHandleByIndex_v2").Path,
		"none":          "/no/such/library.so",
		"the machine's": own.DefaultPath,
	}
	for name, path := range paths {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestSameAnswers$")
		cmd.Env = append(os.Environ(), libraryVar+"="+path)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", name, err, out)
		}
	}
}

func compare(t *testing.T, path string) {
	want, wantErr := topology.NVML(func() (own.Interface, error) { return own.Open(path) })(t.Context())
	source := gonvml.GPUs(nvml.New(nvml.WithLibraryPath(path)))
	for range 2 { // the library is shut down, and opened again
		got, err := source(t.Context())
		if errors.Is(wantErr, own.ErrNoLibrary) {
			if !errors.Is(err, own.ErrNoLibrary) {
				t.Errorf("%v; run-time binding: %v", err, wantErr)
			}
			return
		}
		if fmt.Sprint(err) != fmt.Sprint(wantErr) {
			t.Errorf("%v; run-time binding: %v", err, wantErr)
		}
		if !reflect.DeepEqual(stable(got), stable(want)) {
			t.Errorf("%+v; run-time binding: %+v", got, want)
		}
	}
}

// stable returns GPUs without what changes from one query to the next: free memory. The library of
// the tests marks the last bit of a set, and the bindings ask for sets of other sizes.
func stable(list []topology.GPU) []topology.GPU {
	list = slices.Clone(list)
	for i := range list {
		g := &list[i]
		last := func(n int) bool { return n >= 1023 }
		g.FreeBytes = 0
		g.NodeAffinity = slices.DeleteFunc(slices.Clone(g.NodeAffinity), last)
		g.CPUAffinity = slices.DeleteFunc(slices.Clone(g.CPUAffinity), last)
		g.MIG = slices.Clone(g.MIG)
		for k := range g.MIG {
			g.MIG[k].FreeBytes = 0
		}
	}
	return list
}
