package topology_test

import (
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/nvml"
	"github.com/spillway-db/spillway/topology"
)

var dgxAddresses = []string{"0000:07:00.0", "0000:0f:00.0", "0000:47:00.0", "0000:4e:00.0", "0000:87:00.0", "0000:90:00.0", "0000:b7:00.0", "0000:bd:00.0"}

// TestPublishedMatrix: of a DGX A100 we say what nvidia-smi does, as it is published.
func TestPublishedMatrix(t *testing.T) { eachBinding(t, testPublishedMatrix) }

func testPublishedMatrix(t *testing.T, bind binding) {
	top := discover(t, topology.Options{Root: readOnly(t, "dgx-a100"), GPUs: bind(a100s(dgxAddresses...))})
	if len(top.Warnings) > 0 {
		t.Errorf("warnings %q", top.Warnings)
	}
	text, err := os.ReadFile("testdata/dgx-a100.published")
	if err != nil {
		t.Fatal(err)
	}
	_, rows, _ := strings.Cut(string(text), "\n\n")
	var columns []string
	compared := 0
	for line := range strings.Lines(rows) {
		cells := strings.Split(strings.TrimRight(line, "\n"), "\t")
		if columns == nil {
			columns = cells
			continue
		}
		gpu := top.GPUs[compared/len(columns[1:])]
		for i, want := range cells[1:] {
			compared++
			var got string
			switch column := columns[i+1]; {
			case column == "CPU Affinity":
				got = gpu.CPUs.String()
			case column == "NUMA Affinity":
				got = fmt.Sprint(gpu.Node)
			default:
				p, ok := topology.Between(top, cells[0], strings.Replace(column, "NIC", "mlx5_", 1))
				back, _ := topology.Between(top, strings.Replace(column, "NIC", "mlx5_", 1), cells[0])
				if !ok || p != back {
					t.Errorf("%s to %s: %q, back %q, %v", cells[0], column, p, back, ok)
				}
				got = string(p)
			}
			if got != want {
				t.Errorf("%s, %s: %q, published is %q", cells[0], columns[i+1], got, want)
			}
		}
	}
	if compared != 8*22 {
		t.Errorf("%d cells were compared, want 176", compared)
	}
	golden(t, "dgx-a100.matrix", top.Matrix().String())
	golden(t, "dgx-a100.nvml.json", asJSON(t, top))
}

func TestNVMLFields(t *testing.T) { eachBinding(t, testNVMLFields) }

func testNVMLFields(t *testing.T, bind binding) {
	lib := a100s("0000:07:00.0")
	top := discover(t, topology.Options{Root: readOnly(t, "dgx-a100"), GPUs: bind(lib)})
	g := top.GPUs[0]
	if g.Name != "Mock NVIDIA A100-SXM4-40GB" || g.UUID != "GPU-a0000000-0000-4000-8000-000000000000" || g.PCIAddress != "0000:07:00.0" || g.DeviceID != "10de:20b0" ||
		g.MemoryBytes != 40*gib || g.FreeBytes != 39*gib || g.PCIeGeneration != 4 || g.PCIeWidth != 16 || g.Node != 3 || g.MemoryNode != 3 || g.Driver != "nvidia" || g.MIGEnabled {
		t.Errorf("got %+v", g)
	}
	want := []topology.Link{{"0000:c4:00.0", true, 2}, {"0000:c5:00.0", true, 2}, {"0000:c6:00.0", true, 2}, {"0000:c7:00.0", true, 2}, {"0000:c8:00.0", true, 2}, {"0000:c9:00.0", true, 2}}
	if !reflect.DeepEqual(g.Links, want) {
		t.Errorf("links %+v", g.Links)
	}
}

// Links that end at GPUs are counted between the two, those that are down not at all.
func TestDirectNVLinks(t *testing.T) { eachBinding(t, testDirectNVLinks) }

func testDirectNVLinks(t *testing.T, bind binding) {
	addresses := []string{"0000:07:00.0", "0000:0f:00.0", "0000:47:00.0"}
	lib := a100s(addresses...)
	for i, dev := range lib.gpus { // 0 and 1 have two links, 1 and 2 one, and one of 0 is down
		ends := [][]string{{addresses[1], addresses[1], addresses[2]}, {addresses[0], addresses[0], addresses[2]}, {addresses[1]}}[i]
		dev.up = func(link int) (bool, error) {
			if link >= len(ends) {
				return false, nvml.ErrInvalidArgument
			}
			return i != 0 || link != 2, nil
		}
		dev.remote = func(link int) (nvml.PCI, error) { return busID(ends[link]), nil }
		dev.kind = func(int) (nvml.LinkKind, error) { return nvml.LinkToGPU, nil }
	}
	top := discover(t, topology.Options{Root: readOnly(t, "dgx-a100"), GPUs: bind(lib)})
	for _, c := range []struct {
		a, b string
		want topology.Path
	}{{"GPU0", "GPU1", "NV2"}, {"GPU1", "GPU2", "NV1"}, {"GPU0", "GPU2", topology.SYS}} {
		if p, _ := topology.Between(top, c.a, c.b); p != c.want {
			t.Errorf("%s to %s: %q, want %q", c.a, c.b, p, c.want)
		}
	}
}

// TestNVLinkReports: what one end does not report the other does, a link that fails does not hide
// those behind it, and what is at the other end is known by its address too.
func TestNVLinkReports(t *testing.T) { eachBinding(t, testNVLinkReports) }

func testNVLinkReports(t *testing.T, bind binding) {
	addresses := []string{"0000:07:00.0", "0000:0f:00.0", "0000:47:00.0"}
	type link struct {
		to   string
		kind nvml.LinkKind
		err  error
	}
	const unknown, hidden, gpu, npu = nvml.LinkUnknown, "hidden", nvml.LinkToGPU, nvml.LinkToProcessor
	for name, c := range map[string]struct {
		links [3][]link
		want  [3]topology.Path // 0-1, 0-2, 1-2
		warns string
	}{
		"one end alone":      {[3][]link{{{addresses[1], gpu, nil}, {addresses[1], gpu, nil}}, {{"", gpu, errUnknown}}}, [3]topology.Path{"NV2", topology.SYS, topology.SYS}, "GPU 1: nvmlDeviceGetNvLinkState"},
		"the ends differ":    {[3][]link{{{addresses[1], gpu, nil}}, {{addresses[0], gpu, nil}, {addresses[0], gpu, nil}}}, [3]topology.Path{"NV2", topology.SYS, topology.SYS}, ""},
		"one fails":          {[3][]link{{{"", gpu, errUnknown}, {addresses[2], gpu, nil}}}, [3]topology.Path{topology.PXB, "NV1", topology.SYS}, "GPU 0: nvmlDeviceGetNvLinkState"},
		"one is not there":   {[3][]link{{{"", gpu, nvml.ErrNotSupported}, {addresses[2], gpu, nil}}}, [3]topology.Path{topology.PXB, "NV1", topology.SYS}, ""},
		"of an unknown kind": {[3][]link{{{addresses[1], unknown, nil}}}, [3]topology.Path{"NV1", topology.SYS, topology.SYS}, ""},
		"to switches that are not shown": {[3][]link{{{"", unknown, nil}, {hidden, unknown, nil}}, {{hidden, unknown, nil}, {"", unknown, nil}}, {{"", gpu, nil}}},
			[3]topology.Path{"NV2", topology.SYS, topology.SYS}, ""},
		"to processors alone": {[3][]link{{{"0004:00:00.0", npu, nil}}, {{"0004:00:00.0", npu, nil}}}, [3]topology.Path{topology.PXB, topology.SYS, topology.SYS}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			lib := a100s(addresses...)
			for i, dev := range lib.gpus {
				links := c.links[i]
				dev.up = func(k int) (bool, error) {
					if k >= len(links) {
						return false, nvml.ErrInvalidArgument
					}
					return true, links[k].err
				}
				dev.remote = func(k int) (nvml.PCI, error) {
					if links[k].to == hidden {
						return nvml.PCI{Domain: 0xffffffff, Bus: 0xff, Device: 0xff}, nil
					}
					return busID(links[k].to), nil
				}
				dev.kind = func(k int) (nvml.LinkKind, error) {
					if links[k].kind == unknown && k == 1 {
						return 0, nvml.ErrNotSupported
					}
					return links[k].kind, nil
				}
			}
			top := discover(t, topology.Options{Root: readOnly(t, "dgx-a100"), GPUs: bind(lib)})
			for i, pair := range [3][2]string{{"GPU0", "GPU1"}, {"GPU0", "GPU2"}, {"GPU1", "GPU2"}} {
				p, _ := topology.Between(top, pair[0], pair[1])
				if back, _ := topology.Between(top, pair[1], pair[0]); p != c.want[i] || back != p {
					t.Errorf("%s to %s: %q, back %q, want %q", pair[0], pair[1], p, back, c.want[i])
				}
			}
			if all := said(top.Warnings); !strings.Contains(all, c.warns) || c.warns == "" && all != "" {
				t.Errorf("warnings %q", top.Warnings)
			}
		})
	}
}

// TestOwnNodes: a node that is the GPU's own memory is none to take host memory from, unless there
// is no other.
func TestOwnNodes(t *testing.T) { eachBinding(t, testOwnNodes) }

func testOwnNodes(t *testing.T, bind binding) {
	node := func(id int, cpus string, gb int) string {
		dir := fmt.Sprintf("-- sys/devices/system/node/node%d/", id)
		return dir + "cpulist --\n" + cpus + "\n" + dir + "distance --\n10 80\n" + dir + fmt.Sprintf("meminfo --\nMemTotal: %d kB\nMemFree: 0 kB\n", gb<<20)
	}
	root := tree(t, base+busGPU("0009:01:00.0", "nvidia")+"-- sys/devices/pci0000:00/0009:01:00.0/numa_node --\n0\n-- proc/self/cgroup --\n-- proc/self/mountinfo --\n-- sys/devices/system/node/online --\n0,8\n"+node(0, "0-7", 12)+node(8, "", 4))
	for own, want := range map[int]string{8: "8 of 0 with 12", 0: " of 0,8 with 16", 5: " of 0,8 with 16", 1<<32 - 1: " of 0,8 with 16"} {
		lib := a100s("0009:01:00.0")
		lib.gpus[0].node = func() (int, error) { return own, nil }
		top := discover(t, topology.Options{Root: root, GPUs: bind(lib)})
		got := fmt.Sprintf("%s of %s with %d", top.GPUs[0].OwnNodes, top.Limits.MemoryNodes, top.Limits.MemoryBytes/gib)
		if got != want || top.GPUs[0].MemoryNode != 0 || len(top.Warnings) > 0 {
			t.Errorf("node %d: %q, memory of %d, warnings %q; want %q", own, got, top.GPUs[0].MemoryNode, top.Warnings, want)
		}
	}
}

// TestNodeByAffinity: if the kernel does not know a GPU's node, it comes from the driver's
// affinity, if that is one node. What the kernel knows is not queried twice.
func TestNodeByAffinity(t *testing.T) { eachBinding(t, testNodeByAffinity) }

func testNodeByAffinity(t *testing.T, bind binding) {
	for name, c := range map[string]struct {
		nodes, cpus []uint // the driver's answers; nil: not supported
		want        int
		near        string // CPUs
	}{
		"memory":                      {nodes: []uint{2}, want: 1, near: "14-27,42-55"},
		"memory before CPUs":          {nodes: []uint{1}, cpus: []uint{1 << 14}, want: 0, near: "0-13,28-41"},
		"CPUs":                        {cpus: []uint{0x3ffc<<40 | 0xfffc000}, want: 1, near: "14-27,42-55"},
		"CPUs, memory of both":        {nodes: []uint{3}, cpus: []uint{0x3fff}, want: 0, near: "0-13,28-41"},
		"both of both":                {nodes: []uint{3}, cpus: []uint{1<<56 - 1}, want: topology.Unknown, near: "0-55"},
		"nothing":                     {nodes: []uint{0, 0}, cpus: []uint{0}, want: topology.Unknown, near: "0-55"},
		"no such node":                {nodes: []uint{0, 1}, want: topology.Unknown, near: "0-55"},
		"one such node":               {nodes: []uint{2, 1}, want: topology.Unknown, near: "0-55"},
		"CPUs of none":                {cpus: []uint{0, 1}, want: topology.Unknown, near: "0-55"},
		"not supported by the driver": {want: topology.Unknown, near: "0-55"},
	} {
		t.Run(name, func(t *testing.T) {
			lib := a100s("0000:04:00.0")
			if c.nodes != nil {
				lib.gpus[0].nodes = func() ([]uint, error) { return c.nodes, nil }
			}
			if c.cpus != nil {
				lib.gpus[0].cpus = func() ([]uint, error) { return c.cpus, nil }
			}
			top := discover(t, topology.Options{Root: readOnly(t, "numa-unknown"), GPUs: bind(lib)})
			g := top.GPUs[0]
			if g.Node != c.want || g.CPUs.String() != c.near || c.want >= 0 && g.MemoryNode != c.want {
				t.Errorf("node %d, memory of %d, CPUs %s; want %d, %s", g.Node, g.MemoryNode, g.CPUs, c.want, c.near)
			}
			if told := strings.Contains(said(top.Warnings), "0000:04:00.0/numa_node"); told != (c.want == topology.Unknown) {
				t.Errorf("warnings %q", top.Warnings)
			}
		})
	}
	lib := a100s("0000:07:00.0")
	lib.gpus[0].nodes = func() ([]uint, error) { return []uint{1}, nil }
	if g := discover(t, topology.Options{Root: readOnly(t, "dgx-a100"), GPUs: bind(lib)}).GPUs[0]; g.Node != 3 {
		t.Errorf("the kernel's node 3 became %d", g.Node)
	}
}

func TestMIG(t *testing.T) { eachBinding(t, testMIG) }

func testMIG(t *testing.T, bind binding) {
	root := readOnly(t, "mig")
	top := discover(t, topology.Options{Root: root, GPUs: bind(migs())})
	golden(t, "mig.nvml.json", asJSON(t, top))
	golden(t, "mig.nvml.table", top.String())
	if g := top.GPUs[0]; !g.MIGEnabled || len(g.MIG) != 3 || g.MIG[1].GPUInstance != 3 || g.MIG[1].MemoryBytes != 3*gib {
		t.Errorf("got %+v", g)
	}
	if g := top.GPUs[1]; g.MIGEnabled || len(g.MIG) != 0 {
		t.Errorf("got %+v", g)
	}
	if len(top.Warnings) > 0 {
		t.Errorf("warnings %q", top.Warnings)
	}
}

// TestNVMLFails: what the library cannot return is a warning; without it, the PCI bus is what is
// known.
func TestNVMLFails(t *testing.T) { eachBinding(t, testNVMLFails) }

func testNVMLFails(t *testing.T, bind binding) {
	root := readOnly(t, "mig")
	refuses := func(code nvml.Code) func(*fakeLibrary) {
		return func(l *fakeLibrary) {
			l.open = &nvml.Error{Call: "nvmlInit_v2", Code: code, Text: "told by the library"}
		}
	}
	counts := func(n int, err error) func(*fakeLibrary) {
		return func(l *fakeLibrary) { l.count = func() (int, error) { return n, err } }
	}
	for name, c := range map[string]struct {
		harm  func(*fakeLibrary)
		gpus  int
		warns string
	}{
		"no library":       {func(l *fakeLibrary) { l.open = nvml.ErrNoLibrary }, 2, "libnvidia-ml.so.1 is not there"},
		"no driver":        {refuses(nvml.ErrDriverNotLoaded), 2, "modprobe nvidia"},
		"versions differ":  {refuses(errMismatch), 2, "cannot be initialized: nvmlInit_v2: "},
		"no count":         {counts(0, errUnknown), 2, "how many GPUs"},
		"a negative count": {counts(-1, nil), 2, "how many GPUs"},
		"a huge count":     {counts(1<<31-1, nil), 2, "how many GPUs"},
		"it panics":        {func(l *fakeLibrary) { l.count = nil }, 2, "panicked"},
		"one is lost":      {func(l *fakeLibrary) { l.lost = map[int]bool{0: true} }, 1, "GPU 0 cannot be asked"},
		"no memory": {func(l *fakeLibrary) {
			l.gpus[1].memory = func() (nvml.Memory, error) { return nvml.Memory{}, errUnknown }
		}, 2, "GPU 1: nvmlDeviceGetMemoryInfo"},
		"a function panics":       {func(l *fakeLibrary) { l.gpus[1].up = nil }, 2, "panicked"},
		"more free than there is": {func(l *fakeLibrary) { l.gpus[1].memory = memory(1, 1<<63) }, 2, "GPU 1 has 1 bytes of memory"},
		"an old driver": {func(l *fakeLibrary) {
			l.before = func(call string) error {
				switch call {
				case "nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2":
					return nil
				}
				return nvml.ErrFunctionNotFound
			}
		}, 2, "is not on the PCI bus"},
	} {
		t.Run(name, func(t *testing.T) {
			lib := migs()
			c.harm(lib)
			top := discover(t, topology.Options{Root: root, GPUs: bind(lib)})
			if len(top.GPUs) != c.gpus || !strings.Contains(said(top.Warnings), c.warns) {
				t.Errorf("%d GPUs, warnings %q", len(top.GPUs), top.Warnings)
			}
			for _, g := range top.GPUs {
				if g.MemoryBytes < 0 || g.FreeBytes > g.MemoryBytes {
					t.Errorf("got %+v", g)
				}
			}
			if lib.closed != lib.opened || (lib.open == nil) != (lib.opened == 1) {
				t.Errorf("opened %d times, closed %d times", lib.opened, lib.closed)
			}
		})
	}
}

func TestVisibleInstances(t *testing.T) { eachBinding(t, testVisibleInstances) }

func testVisibleInstances(t *testing.T, bind binding) {
	root := readOnly(t, "mig")
	for value, want := range map[string]string{
		"MIG-b2000000-0000-5000-8000-000000000000": "0/MIG-b2000000-0000-5000-8000-000000000000/3",
		"MIG-b3": "0/MIG-b3000000-0000-5000-8000-000000000000/4",
		"MIG-GPU-a0000000-0000-4000-8000-000000000000/1/0": "0/MIG-b0000000-0000-5000-8000-000000000000/1",
		"1,MIG-b0":       "1/40 0/MIG-b0000000-0000-5000-8000-000000000000/1",
		"MIG-b0,MIG-b2":  "0/MIG-b0000000-0000-5000-8000-000000000000/1 0/MIG-b2000000-0000-5000-8000-000000000000/3",
		"MIG-b":          "error: more than one",
		"MIG-":           "error: more than one",
		"MIG-c":          "error: is no MIG instance",
		"MIG-b1":         "error: is no MIG instance",
		"MIG-b0,MIG-b00": "error: twice",
		"MIG-GPU-a0000000-0000-4000-8000-000000000000/2/0": "error: is no MIG instance",
		"GPU-a0000000-0000-4000-8000-000000000001":         "1/40",
		"GPU-a0000000": "error: more than one",
		"gpu-a0000000-0000-4000-8000-000000000001":          "error: neither an index",
		"GPU-A0000000-0000-4000-8000-000000000001":          "1/40",
		"GPU-a0000000-0000-4000-8000-000000000001-and-more": "error: is no GPU's UUID",
	} {
		t.Run(value, func(t *testing.T) {
			top, err := topology.Discover(t.Context(), topology.Options{Root: root, GPUs: bind(migs()), LookupEnv: env(value)})
			got := ""
			if err != nil {
				got = "error: " + err.Error()
			} else {
				for i, g := range top.GPUs {
					if i > 0 {
						got += " "
					}
					got += fmt.Sprint(g.Index)
					if len(g.MIG) > 0 {
						got += "/" + g.MIG[0].UUID
					}
					got += fmt.Sprintf("/%d", g.MemoryBytes/gib)
				}
			}
			reason, wantsError := strings.CutPrefix(want, "error: ")
			if wantsError && (err == nil || !strings.Contains(err.Error(), reason)) || !wantsError && got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
}

// TestVisibleBesideLost: where the driver cannot ask one GPU, the others keep their numbers, and a
// value that may mean that one is no mistake.
func TestVisibleBesideLost(t *testing.T) { eachBinding(t, testVisibleBesideLost) }

func testVisibleBesideLost(t *testing.T, bind binding) {
	root := readOnly(t, "mig")
	for _, c := range []struct {
		lost        int
		value, want string
	}{
		{0, "1", "1"}, {0, "0", "left out"}, {0, "0,1", "1, left out"}, {0, "GPU-a0000000-0000-4000-8000-000000000000", "left out"},
		{0, "MIG-b0", "left out"}, {1, "0", "0"}, {1, "1", "left out"}, {1, "GPU-", "error"}, {1, "0,0", "error"},
		{-1, "2", "error"}, {-1, "GPU-c", "error"}, {-1, "MIG-c", "error"},
	} {
		lib := migs()
		lib.lost = map[int]bool{c.lost: true}
		top, err := topology.Discover(t.Context(), topology.Options{Root: root, GPUs: bind(lib), LookupEnv: env(c.value)})
		var got []string
		if err != nil {
			got = []string{"error"}
		} else {
			for _, g := range top.GPUs {
				got = append(got, fmt.Sprint(g.Index))
			}
			if strings.Contains(said(top.Warnings), "left out") {
				got = append(got, "left out")
			}
		}
		if strings.Join(got, ", ") != c.want {
			t.Errorf("GPU %d lost, %q: %q, %v; want %q", c.lost, c.value, got, err, c.want)
		}
	}
}

// The library of this machine, or that there is none: no crash, and a word of it.
func TestSystemGPUs(t *testing.T) {
	gpus, err := topology.NVMLAt(topology.SystemLibrary)(t.Context())
	t.Logf("%d GPUs, %v", len(gpus), err)
	for _, g := range gpus {
		if g.PCIAddress == "" || g.UUID == "" {
			t.Errorf("got %+v", g)
		}
	}
}
