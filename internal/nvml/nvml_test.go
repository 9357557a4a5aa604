package nvml_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/internal/dynlib"
	"github.com/spillway-db/spillway/internal/nvml"
	"github.com/spillway-db/spillway/test/nvmltest"
)

// questions are all that can be asked, by the function of the library that is called.
var questions = map[string]func(l *nvml.Library, gpu, part nvml.Device) (any, error){
	"nvmlDeviceGetCount_v2":              func(l *nvml.Library, _, _ nvml.Device) (any, error) { return l.Count() },
	"nvmlDeviceGetHandleByIndex_v2":      func(l *nvml.Library, _, _ nvml.Device) (any, error) { return l.Device(1) },
	"nvmlDeviceGetName":                  func(l *nvml.Library, d, _ nvml.Device) (any, error) { return l.Name(d) },
	"nvmlDeviceGetUUID":                  func(l *nvml.Library, d, _ nvml.Device) (any, error) { return l.UUID(d) },
	"nvmlDeviceGetPciInfo_v3":            func(l *nvml.Library, d, _ nvml.Device) (any, error) { return l.PCI(d) },
	"nvmlDeviceGetMemoryInfo":            func(l *nvml.Library, d, _ nvml.Device) (any, error) { return l.Memory(d) },
	"nvmlDeviceGetMaxPcieLinkGeneration": func(l *nvml.Library, d, _ nvml.Device) (any, error) { return l.PCIeGeneration(d) },
	"nvmlDeviceGetCurrPcieLinkWidth":     func(l *nvml.Library, d, _ nvml.Device) (any, error) { return l.PCIeWidth(d) },
	"nvmlDeviceGetNumaNodeId":            func(l *nvml.Library, d, _ nvml.Device) (any, error) { return l.Node(d) },
	"nvmlDeviceGetMemoryAffinity":        func(l *nvml.Library, d, _ nvml.Device) (any, error) { return l.NodeAffinity(d) },
	"nvmlDeviceGetCpuAffinity":           func(l *nvml.Library, d, _ nvml.Device) (any, error) { return l.CPUAffinity(d) },
	"nvmlDeviceGetNvLinkState":           func(l *nvml.Library, d, _ nvml.Device) (any, error) { return l.LinkUp(d, 3) },
	"nvmlDeviceGetNvLinkRemotePciInfo_v2": func(l *nvml.Library, d, _ nvml.Device) (any, error) {
		return l.LinkRemote(d, 3)
	},
	"nvmlDeviceGetNvLinkRemoteDeviceType": func(l *nvml.Library, d, _ nvml.Device) (any, error) { return l.LinkKind(d, 3) },
	"nvmlDeviceGetMigMode":                func(l *nvml.Library, d, _ nvml.Device) (any, error) { return l.MIG(d) },
	"nvmlDeviceGetMaxMigDeviceCount":      func(l *nvml.Library, d, _ nvml.Device) (any, error) { return l.MaxInstances(d) },
	"nvmlDeviceGetMigDeviceHandleByIndex": func(l *nvml.Library, d, _ nvml.Device) (any, error) { return l.Instance(d, 2) },
	"nvmlDeviceGetGpuInstanceId":          func(l *nvml.Library, _, p nvml.Device) (any, error) { return l.GPUInstance(p) },
	"nvmlDeviceGetComputeInstanceId":      func(l *nvml.Library, _, p nvml.Device) (any, error) { return l.ComputeInstance(p) },
}

// open opens the library of a test, and closes it with the test.
func open(t *testing.T, f *nvmltest.Fake) *nvml.Library {
	t.Helper()
	l, err := nvml.Open(f.Path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		l.Close()
		if n := f.Initialized(); n != 0 {
			t.Errorf("the library is left initialized %d times", n)
		}
	})
	return l
}

// device returns a GPU.
func device(t *testing.T, l *nvml.Library, index int) nvml.Device {
	t.Helper()
	d, err := l.Device(index)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// bits returns words with bits set.
func bits(words int, set ...int) []uint {
	w := make([]uint, words)
	for _, k := range set {
		w[k/64] |= 1 << (k % 64)
	}
	return w
}

// Every function's answer is what the library has said, of each kind of device.
func TestAnswers(t *testing.T) {
	l := open(t, nvmltest.New(t))
	first, second := device(t, l, 0), device(t, l, 1)
	part, err := l.Instance(first, 2)
	if err != nil || part == first || part == second || first == second {
		t.Fatalf("handles %#x, %#x and %#x, %v", first, second, part, err)
	}
	type answers map[string]any
	remote := func(l *nvml.Library, k int) func(nvml.Device) (nvml.PCI, error) {
		return func(d nvml.Device) (nvml.PCI, error) { return l.LinkRemote(d, k) }
	}
	at := func(call func(nvml.Device, int) (nvml.LinkKind, error), k int) func(nvml.Device) (nvml.LinkKind, error) {
		return func(d nvml.Device) (nvml.LinkKind, error) { return call(d, k) }
	}
	up := func(k int) func(nvml.Device) (bool, error) {
		return func(d nvml.Device) (bool, error) { return l.LinkUp(d, k) }
	}
	for d, want := range map[nvml.Device]answers{
		first: {
			"Name": "Spillway NVML fake 0", "UUID": "GPU-e0e1e2e3-e4e5-e6e7-e8e9-eaebeceded00",
			"PCI": nvml.PCI{Address: "00000000:19:00.0", Domain: 0, Bus: 0x19, Device: 0, DeviceID: 0x20b510de}, "Memory": nvml.Memory{Total: 1 << 34, Free: 1<<34 - 0x12345678, Used: 0x12345678},
			"PCIeGeneration": 4, "PCIeWidth": 16, "Node": nvml.ErrNotSupported,
			"NodeAffinity": bits(16, 0, 1023), "CPUAffinity": bits(128, 40, 8191),
			"MIG": true, "MaxInstances": 7, "GPUInstance": nvml.ErrInvalidArgument, "ComputeInstance": nvml.ErrInvalidArgument,
			"link 0": true, "link 4": false, "link 5": nvml.ErrNotSupported, "link 18": nvml.ErrInvalidArgument,
			"remote 2": nvml.PCI{Address: "00000000:1A:00.0", Domain: 0, Bus: 0x1a, Device: 0, DeviceID: 0x20b510de}, "remote 3": nvml.PCI{Address: "00AB0003:C7:04.0", Domain: 0xab0003, Bus: 0xc7, Device: 4, DeviceID: 0x1af110de},
			"kind 0": nvml.LinkToSwitch, "kind 1": nvml.LinkToProcessor, "kind 2": nvml.LinkToGPU, "kind 3": nvml.LinkUnknown, "kind 4": nvml.ErrInvalidArgument,
		},
		second: {
			"Name": "Spillway NVML fake 1", "UUID": "GPU-e1e1e2e3-e4e5-e6e7-e8e9-eaebeceded00",
			"PCI": nvml.PCI{Address: "00000000:1A:00.0", Domain: 0, Bus: 0x1a, Device: 0, DeviceID: 0x20b510de}, "Memory": nvml.Memory{Total: 2 << 34, Free: 2<<34 - 0x12345678, Used: 0x12345678},
			"PCIeGeneration": 5, "PCIeWidth": 8, "Node": 1<<32 - 1,
			"NodeAffinity": bits(16, 1, 1023), "CPUAffinity": bits(128, 41, 8191), "MIG": false, "MaxInstances": 7,
			"remote 2": nvml.PCI{Address: "00000000:19:00.0", Domain: 0, Bus: 0x19, Device: 0, DeviceID: 0x20b510de},
		},
		part: {
			"Name": "Spillway NVML fake MIG 3g", "UUID": "MIG-e0e1e2e3-e4e5-e6e7-e8e9-eaebeceded03", "PCI": nvml.ErrInvalidArgument,
			"Memory": nvml.Memory{Total: 19 << 30, Free: 19<<30 - 0x12345678, Used: 0x12345678}, "GPUInstance": 13, "ComputeInstance": 23, "MIG": nvml.ErrInvalidArgument,
		},
		first + 1: {"Name": nvml.ErrInvalidArgument},
	} {
		for name, call := range map[string]any{
			"Name": l.Name, "UUID": l.UUID, "PCI": l.PCI, "Memory": l.Memory, "PCIeGeneration": l.PCIeGeneration, "PCIeWidth": l.PCIeWidth,
			"Node": l.Node, "NodeAffinity": l.NodeAffinity, "CPUAffinity": l.CPUAffinity, "MIG": l.MIG, "MaxInstances": l.MaxInstances,
			"GPUInstance": l.GPUInstance, "ComputeInstance": l.ComputeInstance, "link 0": up(0), "link 4": up(4), "link 5": up(5), "link 18": up(18),
			"remote 2": remote(l, 2), "remote 3": remote(l, 3), "kind 0": at(l.LinkKind, 0), "kind 1": at(l.LinkKind, 1),
			"kind 2": at(l.LinkKind, 2), "kind 3": at(l.LinkKind, 3), "kind 4": at(l.LinkKind, 4),
		} {
			if want[name] == nil {
				continue
			}
			out := reflect.ValueOf(call).Call([]reflect.Value{reflect.ValueOf(d)})
			got, err := out[0].Interface(), out[1].Interface()
			if code, fails := want[name].(nvml.Code); fails {
				if err, is := err.(error); !is || !errors.Is(err, code) {
					t.Errorf("device %#x, %s: %v, want %v", d, name, err, code)
				}
				continue
			}
			if err != nil || !reflect.DeepEqual(got, want[name]) {
				t.Errorf("device %#x, %s: %v, %v; want %v", d, name, got, err, want[name])
			}
		}
	}
	if n, err := l.Count(); n != 2 || err != nil {
		t.Errorf("%d GPUs, %v", n, err)
	}
	for _, k := range []int{1, 7, -1} {
		want := nvml.ErrInvalidArgument
		if k == 1 {
			want = nvml.ErrNotFound
		}
		if _, err := l.Instance(first, k); !errors.Is(err, want) {
			t.Errorf("instance %d: %v, want %v", k, err, want)
		}
	}
	if _, err := l.Device(2); !errors.Is(err, nvml.ErrInvalidArgument) {
		t.Errorf("a GPU that is not there: %v", err)
	}
}

// Each call that fails is an error with its name and what the library says, and a function that the
// library does not have is an error of its calls, and of no others.
func TestEachCallFails(t *testing.T) {
	for name, ask := range questions {
		t.Run(name, func(t *testing.T) {
			f := nvmltest.New(t)
			l := open(t, f)
			gpu := device(t, l, 1) // the first does not support everything
			part, err := l.Instance(gpu, 0)
			if err != nil {
				t.Fatal(err)
			}
			before := f.Calls(name)
			if got, err := ask(l, gpu, part); err != nil || f.Calls(name) != before+1 {
				t.Errorf("%v, %v after %d calls, want one", got, err, f.Calls(name)-before)
			}
			for code, text := range map[int32]string{999: "Unknown Error (999)", 3: "what the library says (3)", 998: "NVML result 998"} {
				f.Fail(name, code)
				got, err := ask(l, gpu, part)
				var failed *nvml.Error
				if !errors.As(err, &failed) || !errors.Is(err, nvml.Code(code)) || failed.Call != name || err.Error() != name+": "+text {
					t.Errorf("with code %d: %v, %v", code, got, err)
				}
			}
			old := nvmltest.New(t, name)
			lacks := open(t, old)
			if got, err := ask(lacks, gpu, part); !errors.Is(err, nvml.ErrFunctionNotFound) || !strings.Contains(err.Error(), name+": the library has no such function") {
				t.Errorf("without the function: %v, %v", got, err)
			}
			for other, ask := range questions {
				if _, err := ask(lacks, 0, 0); other != name && errors.Is(err, nvml.ErrFunctionNotFound) {
					t.Errorf("without %s: %v", name, err)
				}
			}
		})
	}
}

// An error without a text has its number.
func TestNoErrorString(t *testing.T) {
	f := nvmltest.New(t, "nvmlErrorString")
	l := open(t, f)
	f.Fail("nvmlDeviceGetCount_v2", 15)
	if _, err := l.Count(); err == nil || err.Error() != "nvmlDeviceGetCount_v2: NVML result 15" {
		t.Errorf("got %v", err)
	}
}

// What the usual buffer is too small for is asked again with larger ones, and not for ever.
func TestTooSmall(t *testing.T) {
	f := nvmltest.New(t)
	l := open(t, f)
	d := device(t, l, 0)
	for _, c := range []struct{ length, calls int }{{95, 1}, {96, 2}, {191, 2}, {192, 3}, {1535, 5}, {1536, -5}} {
		f.Set("name_length", int64(c.length))
		before := f.Calls("nvmlDeviceGetName")
		name, err := l.Name(d)
		calls := int(f.Calls("nvmlDeviceGetName") - before)
		if c.calls < 0 {
			if !errors.Is(err, nvml.ErrInsufficientSize) || calls != -c.calls {
				t.Errorf("%d bytes: %v after %d calls", c.length, err, calls)
			}
		} else if err != nil || len(name) != c.length || calls != c.calls || !strings.HasPrefix(name, "Spillway NVML fake 0") || name[len(name)-1] != byte('a'+(len(name)-1)%26) {
			t.Errorf("%d bytes: %q, %v after %d calls, want %d", c.length, name, err, calls, c.calls)
		}
	}
	for setting, ask := range map[string]func(nvml.Device) ([]uint, error){"node_words": l.NodeAffinity, "cpu_words": l.CPUAffinity} {
		for _, c := range []struct{ needed, nodes, cpus int }{{1, 16, 128}, {17, 32, 128}, {129, 256, 256}, {256, 256, 256}, {257, 0, 512}, {2049, 0, 0}} {
			f.Set(setting, int64(c.needed))
			want := c.nodes
			if setting == "cpu_words" {
				want = c.cpus
			}
			w, err := ask(d)
			if want == 0 && !errors.Is(err, nvml.ErrInsufficientSize) || want > 0 && (err != nil || len(w) != want || w[want-1] != 1<<63) {
				t.Errorf("%s %d: %d words, %v; want %d", setting, c.needed, len(w), err, want)
			}
		}
	}
}

// A library that is not there, or does not start, is an error that says which, and is given up.
func TestOpenFails(t *testing.T) {
	dir := t.TempDir()
	garbage := filepath.Join(dir, "libnvidia-ml.so.1")
	if err := os.WriteFile(garbage, []byte("not a library"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{garbage, filepath.Join(dir, "none.so")} {
		if l, err := nvml.Open(path); l != nil || !errors.Is(err, nvml.ErrNoLibrary) || runtime.GOOS == "linux" && !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v, %v", path, l, err)
		}
	}
	f := nvmltest.New(t)
	for code, want := range map[int32]error{9: nvml.ErrDriverNotLoaded, 18: nvml.Code(18)} {
		f.Fail("nvmlInit_v2", code)
		if l, err := nvml.Open(f.Path); l != nil || !errors.Is(err, want) || errors.Is(err, nvml.ErrNoLibrary) || !strings.Contains(err.Error(), "nvmlInit_v2: what the library says") {
			t.Errorf("%v: %v, %v", want, l, err)
		}
	}
	if f.Initialized() != 0 || f.Calls("nvmlShutdown") != 0 {
		t.Errorf("what was never initialized is left so %d times, and was shut down %d times", f.Initialized(), f.Calls("nvmlShutdown"))
	}
	if l, err := nvml.Open("libc.so.6"); l != nil || !errors.Is(err, nvml.ErrFunctionNotFound) {
		t.Errorf("a library of something else: %v, %v", l, err)
	}
}

// After Close, and after an Open that fails, the library is out of the process. One that is open
// twice stays.
func TestClose(t *testing.T) {
	nvmltest.New(t) // skips the test where there is no library
	path := nvmltest.Source.Write(t)
	loaded := func() bool {
		path, err := filepath.EvalSymlinks(path) // as the system says it
		if err != nil {
			t.Fatal(err)
		}
		maps, err := os.ReadFile("/proc/self/maps")
		if err != nil {
			t.Skip("needs /proc: ", err)
		}
		return strings.Contains(string(maps), path)
	}
	a, err := nvml.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	b, err := nvml.Open(path)
	if err != nil || !loaded() {
		t.Fatalf("opened again: %v, and loaded: %v", err, loaded())
	}
	a.Close()
	if n, err := b.Count(); n != 2 || err != nil || !loaded() {
		t.Errorf("after another was closed: %d GPUs, %v", n, err)
	}
	b.Close()
	if loaded() {
		t.Error("the library is loaded after Close")
	}
	path = nvmltest.Source.Write(t, "nvmlInit_v2")
	if _, err := nvml.Open(path); !errors.Is(err, nvml.ErrFunctionNotFound) || loaded() {
		t.Errorf("after Open failed (%v) the library is loaded: %v", err, loaded())
	}
}

// Several goroutines use one library, and libraries of their own, at a time.
func TestConcurrent(t *testing.T) {
	f := nvmltest.New(t)
	shared := open(t, f)
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			own, err := nvml.Open(f.Path)
			if err != nil {
				t.Error(err)
				return
			}
			defer own.Close()
			for k := range 50 {
				l := []*nvml.Library{shared, own}[k%2]
				d, err := l.Device(i % 2)
				if err != nil {
					t.Error(err)
					return
				}
				name, err := l.Name(d)
				m, err2 := l.Memory(d)
				if want := fmt.Sprintf("Spillway NVML fake %d", i%2); name != want || m.Used != 0x12345678 || err != nil || err2 != nil {
					t.Errorf("%q, %+v, %v, %v", name, m, err, err2)
				}
			}
		})
	}
	all.Wait()
}

// What is called is all that the library for tests has, and all of it is called.
func TestEveryFunction(t *testing.T) {
	f := nvmltest.New(t)
	lib, err := dynlib.Open(f.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer lib.Close()
	image, err := os.ReadFile(f.Path)
	if err != nil {
		t.Fatal(err)
	}
	had := 0
	for _, word := range strings.Split(string(image), "\x00") {
		if !strings.HasPrefix(word, "nvml") || lib.Find(word) == 0 {
			continue
		}
		had++
		switch word {
		case "nvmlInit_v2", "nvmlShutdown", "nvmlErrorString":
		default:
			if questions[word] == nil {
				t.Errorf("%s is not asked", word)
			}
		}
	}
	if had < len(questions) {
		t.Errorf("the library has %d functions", had)
	}
}
