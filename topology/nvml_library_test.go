package topology_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/test/nvmltest"
	"github.com/spillway-db/spillway/topology"
)

// TestLibrary: the results of a library in C are listed, with each thing in its field.
func TestLibrary(t *testing.T) {
	f := nvmltest.New(t)
	gpus, err := topology.NVMLAt(f.Path)(t.Context())
	want := []topology.GPU{
		{Name: "Spillway NVML fake 0", UUID: "GPU-e0e1e2e3-e4e5-e6e7-e8e9-eaebeceded00", PCIAddress: "0000:19:00.0", DeviceID: "10de:20b5",
			MemoryBytes: 16 * gib, FreeBytes: 16*gib - 0x12345678, PCIeGeneration: 4, PCIeWidth: 16,
			Links:        []topology.Link{{"ab0000:c4:01.0", true, 1}, {"0000:1a:00.0", false, 1}, {"ab0003:c7:04.0", false, 1}},
			NodeAffinity: topology.Set{0, 1023}, CPUAffinity: topology.Set{40, 8191}, MIGEnabled: true, MIG: []topology.MIGInstance{
				{"MIG-e0e1e2e3-e4e5-e6e7-e8e9-eaebeceded01", "Spillway NVML fake MIG 1g", 11, 21, 17 * gib, 17*gib - 0x12345678},
				{"MIG-e0e1e2e3-e4e5-e6e7-e8e9-eaebeceded03", "Spillway NVML fake MIG 3g", 13, 23, 19 * gib, 19*gib - 0x12345678},
			}},
		{Index: 1, Name: "Spillway NVML fake 1", UUID: "GPU-e1e1e2e3-e4e5-e6e7-e8e9-eaebeceded00", PCIAddress: "0000:1a:00.0", DeviceID: "10de:20b5",
			MemoryBytes: 32 * gib, FreeBytes: 32*gib - 0x12345678, PCIeGeneration: 5, PCIeWidth: 8,
			Links:    []topology.Link{{"ab0000:c4:01.0", true, 1}, {"0000:19:00.0", false, 1}, {"ab0003:c7:04.0", false, 1}},
			OwnNodes: topology.Set{1<<32 - 1}, NodeAffinity: topology.Set{1, 1023}, CPUAffinity: topology.Set{41, 8191}},
	}
	if err != nil || !reflect.DeepEqual(gpus, want) {
		t.Errorf("got %+v, %v\nwant %+v", gpus, err, want)
	}
	if n := f.Initialized(); n != 0 {
		t.Errorf("the library is left initialized %d times", n)
	}
	if top := discover(t, topology.Options{Root: readOnly(t, "mig"), GPUs: topology.NVMLAt(f.Path)}); len(top.Warnings) > 0 {
		t.Errorf("warnings %q", top.Warnings)
	}
}

// A library that lacks everything but GPUs' handles lists them all the same, and without the
// function for those, none.
func TestOldLibrary(t *testing.T) {
	f := nvmltest.New(t, "nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMaxPcieLinkGeneration",
		"nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetNumaNodeId", "nvmlDeviceGetMemoryAffinity", "nvmlDeviceGetCpuAffinity", "nvmlDeviceGetNvLinkState",
		"nvmlDeviceGetMigMode", "nvmlErrorString")
	gpus, err := topology.NVMLAt(f.Path)(t.Context())
	if err != nil || !reflect.DeepEqual(gpus, []topology.GPU{{}, {Index: 1}}) {
		t.Errorf("got %+v, %v", gpus, err)
	}
	f = nvmltest.New(t, "nvmlDeviceGetHandleByIndex_v2")
	gpus, err = topology.NVMLAt(f.Path)(t.Context())
	if len(gpus) != 0 || err == nil || !strings.Contains(err.Error(), "GPU 1 cannot be asked: nvmlDeviceGetHandleByIndex_v2: the library has no such function") {
		t.Errorf("without handles: %+v, %v", gpus, err)
	}
}

// TestSystemLibrary: a program finds the library by its name, also where the loader must find all
// symbols at once. With go-nvml linked it would not start then.
func TestSystemLibrary(t *testing.T) {
	const variable = "TOPOLOGY_TEST_LISTS"
	list := func(source func(context.Context) ([]topology.GPU, error)) string {
		gpus, err := source(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return asJSON(t, gpus)
	}
	if path := os.Getenv(variable); path != "" {
		if err := os.WriteFile(path, []byte(list(topology.NVMLAt(topology.SystemLibrary))), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	f := nvmltest.New(t)
	out := filepath.Join(t.TempDir(), "gpus.json")
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestSystemLibrary$")
	cmd.Env = append(os.Environ(), variable+"="+out, "LD_LIBRARY_PATH="+filepath.Dir(f.Path))
	if len(bindings) == 1 {
		cmd.Env = append(cmd.Env, "LD_BIND_NOW=1")
	}
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	got, err := os.ReadFile(out)
	if want := list(topology.NVMLAt(f.Path)); err != nil || string(got) != want {
		t.Errorf("the program lists %s, %v; want %s", got, err, want)
	}
}

// TestNoLibrary: without a library the result is what the PCI bus shows, and a warning says what is
// not known.
func TestNoLibrary(t *testing.T) {
	top := discover(t, topology.Options{Root: readOnly(t, "dgx-a100"), GPUs: topology.NVMLAt(filepath.Join(t.TempDir(), "none.so"))})
	if len(top.GPUs) != 8 || top.GPUs[0].PCIAddress != "0000:07:00.0" || len(top.Warnings) != 1 ||
		!strings.Contains(top.Warnings[0].What, "libnvidia-ml.so.1 is not there") || !strings.Contains(top.Warnings[0].What, "NVLinks") {
		t.Errorf("%d GPUs, warnings %q", len(top.GPUs), top.Warnings)
	}
}
