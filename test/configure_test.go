package test

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/sim"
	"github.com/spillway-db/spillway/topology"
)

// recorded are the machines of topology/testdata that a configuration is made for.
var recorded = []string{"laptop", "workstation", "vm", "pod", "cgroup-v1", "mig", "numa-unknown", "server", "dgx-a100"}

// discovered has the topology of each recorded machine that was asked for, by name.
var (
	discoveredMu sync.Mutex
	discovered   = make(map[string]topology.Topology)
)

// recordedMachine returns a recorded machine. The caller may change its GPUs.
func recordedMachine(t testing.TB, name string) *topology.Topology {
	t.Helper()
	discoveredMu.Lock()
	defer discoveredMu.Unlock()
	top, ok := discovered[name]
	if !ok {
		root := testfs.MemoryDir(t)
		if err := testfs.UnpackTree(filepath.Join("..", "topology", "testdata", name+".txtar"), root); err != nil {
			t.Fatal(err)
		}
		found, err := topology.Discover(t.Context(), topology.Options{Root: root})
		if err != nil {
			t.Fatal(err)
		}
		top, discovered[name] = *found, *found
	}
	top.GPUs = slices.Clone(top.GPUs)
	return &top
}

// shape prints what matters of a configuration.
func shape(c spillway.Config) string {
	at := func(node *int) string {
		if node == nil {
			return ""
		}
		return fmt.Sprintf("@%d", *node)
	}
	var parts []string
	for i, g := range c.GPUs {
		parts = append(parts, fmt.Sprintf("gpu:%d%s=%d", i, at(g.Node), g.Memory.Bytes))
	}
	for i, h := range c.Hosts {
		text := fmt.Sprintf("host:%d@%d=%d", i, h.Node, h.Memory.Bytes>>20)
		for _, g := range h.GPUs {
			text += fmt.Sprintf(" for gpu:%d", g)
		}
		parts = append(parts, text)
	}
	for i, d := range c.Disks {
		parts = append(parts, fmt.Sprintf("disk:%d%s=%d %s", i, at(d.Node), d.Capacity.Bytes, d.Dir))
	}
	return strings.Join(parts, ", ")
}

// TestConfigureDefaults: what each machine gets if nothing is said. Host sizes are in MiB.
func TestConfigureDefaults(t *testing.T) {
	t.Setenv("TMPDIR", "/tmp")
	for machine, want := range map[string]string{
		"laptop":      "gpu:0@0=0, host:0@0=3947, disk:0@0=0 /tmp",
		"workstation": "gpu:0@0=0, host:0@0=15869, disk:0@0=0 /tmp",
		"vm":          "gpu:0@0=0, host:0@0=983, disk:0=0 /tmp",  // its /tmp is memory
		"pod":         "gpu:0@1=0, host:0@1=2048, disk:0=0 /tmp", // an overlay is on no disk that is known
		"cgroup-v1":   "gpu:0@0=0, host:0@0=1536, disk:0=0 /tmp",
		"mig":         "gpu:0@0=0, gpu:1@0=0, host:0@0=16384, disk:0@0=0 /tmp",
		// No device says where it is.
		"numa-unknown": "gpu:0@-1=0, gpu:1@-1=0, host:0@0=16000, host:1@1=16000, disk:0=0 /tmp",
		// The third GPU is given to virtual machines.
		"server": "gpu:0@0=0, gpu:1@1=0, host:0@0=61440, host:1@1=61440, disk:0@0=0 /tmp",
		"dgx-a100": "gpu:0@3=0, gpu:1@3=0, gpu:2@1=0, gpu:3@1=0, gpu:4@7=0, gpu:5@7=0, gpu:6@5=0, gpu:7@5=0, " +
			"host:0@0=32226, host:1@1=32226, host:2@2=32226, host:3@3=32226, host:4@4=32226, host:5@5=32226, host:6@6=32226, host:7@7=32226, disk:0@2=0 /tmp",
	} {
		t.Run(machine, func(t *testing.T) {
			top := recordedMachine(t, machine)
			cfg, err := spillway.Configure(top, spillway.Config{})
			if err != nil {
				t.Fatal(err)
			}
			if got := shape(cfg); got != want {
				t.Errorf("got  %s\nwant %s", got, want)
			}
			if cfg.Topology != top {
				t.Error("the configuration has another topology")
			}
			sum := int64(0)
			for _, h := range cfg.Hosts {
				sum += h.Memory.Bytes
			}
			if sum > top.Limits.MemoryBytes/4 {
				t.Errorf("host spaces take %d of %d bytes", sum, top.Limits.MemoryBytes)
			}
		})
	}
}

func TestConfigurePerGPU(t *testing.T) {
	t.Setenv("TMPDIR", "/tmp")
	for machine, want := range map[string]string{
		"laptop":       "host:0@0=3947 for gpu:0",
		"vm":           "host:0@0=983 for gpu:0",
		"mig":          "host:0@0=8192 for gpu:0, host:1@0=8192 for gpu:1",
		"server":       "host:0@0=61440 for gpu:0, host:1@1=61440 for gpu:1",
		"numa-unknown": "host:0@-1=16000 for gpu:0, host:1@-1=16000 for gpu:1",
		// Two on a node, which they must not take more than half of: here their share is as much.
		// See TestConfigureUnequalNodes.
		"dgx-a100": "host:0@3=32226 for gpu:0, host:1@3=32226 for gpu:1, host:2@1=32226 for gpu:2, host:3@1=32226 for gpu:3, " +
			"host:4@7=32226 for gpu:4, host:5@7=32226 for gpu:5, host:6@5=32226 for gpu:6, host:7@5=32226 for gpu:7",
	} {
		cfg, err := spillway.Configure(
			recordedMachine(t, machine),
			spillway.Config{HostPerGPU: true, Disks: []spillway.DiskConfig{}},
		)
		if err != nil {
			t.Fatal(err)
		}
		cfg.GPUs = nil
		if got := shape(cfg); got != want {
			t.Errorf("%s: got  %s\nwant %s", machine, got, want)
		}
	}
}

// TestConfigurePerNamedGPU: host spaces are on the nodes of the GPUs, whatever names these.
func TestConfigurePerNamedGPU(t *testing.T) {
	const uuid = "GPU-aa%s00-e4e5-e6e7-e8e9-eaebecedee00"
	top := numa([][]int{{10, 30}, {30, 10}}, []int64{32, 32}, 0, 1)
	for i, begin := range []string{"bbbb", "cccc"} {
		top.GPUs[i].UUID, top.GPUs[i].PCIAddress = fmt.Sprintf(uuid, begin), fmt.Sprintf("0000:e%d:00.0", i)
	}
	top.GPUs[1].MIG = []topology.MIGInstance{{UUID: "MIG-dddd0000-e4e5-e6e7-e8e9-eaebecedee00"}}
	dev, err := sim.New(sim.Config{Memory: 1 << 20, Node: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	for name, c := range map[string]struct {
		gpu  spillway.GPUConfig
		node int
	}{
		"UUID":                     {spillway.GPUConfig{ID: fmt.Sprintf(uuid, "cccc")}, 1},
		"PCI address":              {spillway.GPUConfig{ID: "e1:00.0"}, 1},
		"beginning of a UUID":      {spillway.GPUConfig{ID: "GPU-aacc"}, 1},
		"beginning of an instance": {spillway.GPUConfig{ID: "MIG-dddd"}, 1},
		"beginning of two":         {spillway.GPUConfig{ID: "GPU-aa"}, 0},
		"device of the program":    {spillway.GPUConfig{Device: dev}, 1},
		"device on another node":   {spillway.GPUConfig{Device: dev, Node: new(int)}, 0},
	} {
		cfg, err := spillway.Configure(
			top,
			spillway.Config{GPUs: []spillway.GPUConfig{c.gpu}, HostPerGPU: true, Disks: []spillway.DiskConfig{}},
		)
		if err != nil {
			t.Fatal(err)
		}
		if n := cfg.Hosts[0].Node; n != c.node {
			t.Errorf("%s: the host space is on node %d", name, n)
		}
	}
}

// numa is a machine with nodes of so many GiB and so many GPUs on each.
func numa(distances [][]int, gib []int64, gpus ...int) *topology.Topology {
	top := &topology.Topology{}
	for i := range gib {
		top.Nodes = append(top.Nodes, topology.Node{ID: i, MemoryBytes: gib[i] << 30, Distances: distances[i]})
		top.Memory.TotalBytes += gib[i] << 30
		if gib[i] > 0 {
			top.Limits.MemoryNodes = append(top.Limits.MemoryNodes, i)
		}
	}
	top.Limits.MemoryBytes = top.Memory.TotalBytes
	for i, node := range gpus {
		top.GPUs = append(top.GPUs, topology.GPU{Index: i, UUID: fmt.Sprint(i), Driver: "nvidia", Node: node})
	}
	return top
}

// unlimited is top without what it says of limits.
func unlimited(top *topology.Topology) *topology.Topology {
	top.Limits = topology.Limits{}
	return top
}

// TestConfigureUnequalNodes: nodes of unequal size, without memory and at unequal distances
// of the GPUs. Host sizes are in MiB.
func TestConfigureUnequalNodes(t *testing.T) {
	flat := func(n int) (d [][]int) {
		for i := range n {
			d = append(d, slices.Repeat([]int{20}, n))
			d[i][i] = 10
		}
		return d
	}
	four := [][]int{{10, 20, 30, 11}, {20, 10, 12, 20}, {30, 12, 10, 30}, {11, 20, 30, 10}}
	for name, c := range map[string]struct {
		top    *topology.Topology
		perGPU bool
		want   string
	}{
		"of unequal size":       {numa(flat(2), []int64{32, 96}), false, "host:0@0=8192, host:1@1=24576"},
		"one without memory":    {numa(flat(3), []int64{64, 0, 64}), false, "host:0@0=16384, host:1@2=16384"},
		"the first has none":    {numa(flat(2), []int64{0, 64}), false, "host:0@1=16384"},
		"limits not known":      {unlimited(numa(flat(3), []int64{64, 0, 64})), false, "host:0@0=16384, host:1@2=16384"},
		"GPUs on nodes without": {numa(four, []int64{64, 0, 64, 0}, 1, 3), true, "host:0@2=16384 for gpu:0, host:1@0=16384 for gpu:1"},
		"GPUs at all distances": {numa(four, []int64{64, 0, 64, 0}, 0, 1, 2, 3), true,
			"host:0@0=8192 for gpu:0, host:1@2=8192 for gpu:1, host:2@2=8192 for gpu:2, host:3@0=8192 for gpu:3"},
		// A quarter of all would be 8 GiB for each of them: as much as the node has.
		"no more than half of a node":   {numa(flat(2), []int64{8, 120}, 0, 0, 0, 0), true, "host:0@0=1024 for gpu:0, host:1@0=1024 for gpu:1, host:2@0=1024 for gpu:2, host:3@0=1024 for gpu:3"},
		"half of one, a part of others": {numa(flat(2), []int64{8, 120}, 0, 1), true, "host:0@0=4096 for gpu:0, host:1@1=16384 for gpu:1"},
	} {
		cfg, err := spillway.Configure(c.top, spillway.Config{HostPerGPU: c.perGPU, Disks: []spillway.DiskConfig{}})
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		cfg.GPUs = nil
		if got := shape(cfg); got != c.want {
			t.Errorf("%s: got  %s\nwant %s", name, got, c.want)
		}
	}
}

func TestConfigureSizes(t *testing.T) {
	top := recordedMachine(t, "dgx-a100")
	for i := range top.GPUs {
		top.GPUs[i].MemoryBytes = 40 << 30
	}
	cfg, err := spillway.Configure(top, spillway.Config{
		HostMemory: spillway.Share(0.5), GPUMemory: spillway.Share(0.25), MaxGPUs: 3,
		Disks: []spillway.DiskConfig{
			{
				Dir:      "/raid/spill",
				Capacity: spillway.Share(0.75),
			},
			{Dir: "/data2", Capacity: spillway.Bytes(1 << 40), Reserve: 5},
			{Dir: "/data3/../data3/x"},
			{Dir: "/data"},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := "gpu:0@3=10737418240, gpu:1@3=10737418240, gpu:2@1=10737418240, "
	for i := range 8 {
		want += fmt.Sprintf("host:%d@%d=64453, ", i, i)
	}
	// A RAID over two nodes is on neither; /data is not /data2.
	want += "disk:0=0 /raid/spill, disk:1@7=1099511627776 /data2, disk:2@5=0 /data3/../data3/x, disk:3@2=0 /data"
	if got := shape(cfg); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if cfg.Disks[0].Capacity != spillway.Share(0.75) || cfg.Disks[1].Reserve != 5 {
		t.Errorf("disks %+v", cfg.Disks)
	}
	// A part of a GPU is what the instance has.
	top.GPUs[0].MIGEnabled, top.GPUs[0].MIG = true, []topology.MIGInstance{{MemoryBytes: 5 << 30}}
	if cfg, err = spillway.Configure(
		top,
		spillway.Config{GPUMemory: spillway.Share(1)},
	); err != nil || len(cfg.GPUs) != 1 ||
		cfg.GPUs[0].Memory != spillway.Bytes(5<<30) {
		t.Errorf("%s, %v", shape(cfg), err)
	}
	// A simulated GPU has its share of the host's memory.
	if cfg, err = spillway.Configure(
		recordedMachine(t, "vm"),
		spillway.Config{GPUMemory: spillway.Share(0.5)},
	); err != nil ||
		cfg.GPUs[0].Memory != spillway.Bytes(4026532<<10/2/tier.Page*tier.Page) {
		t.Errorf("%s, %v", shape(cfg), err)
	}
	// Only the second node's memory may be taken.
	top.Limits.MemoryNodes, top.Limits.MemoryBytes = topology.Set{1}, 64<<30
	if cfg, err = spillway.Configure(
		top,
		spillway.Config{},
	); err != nil || len(cfg.Hosts) != 1 || cfg.Hosts[0].Node != 1 ||
		cfg.Hosts[0].Memory != spillway.Bytes(16<<30) {
		t.Errorf("%s, %v", shape(cfg), err)
	}
}

// TestConfigureInstances: a GPU space is on what CUDA shows, which beside an instance is nothing
// else.
func TestConfigureInstances(t *testing.T) {
	whole := func(id string) topology.GPU { return topology.GPU{UUID: id, Driver: "nvidia"} }
	divided := func(id string, instances ...string) topology.GPU {
		g := topology.GPU{UUID: id, Driver: "nvidia", MIGEnabled: true}
		for _, i := range instances {
			g.MIG = append(g.MIG, topology.MIGInstance{UUID: i})
		}
		return g
	}
	for want, gpus := range map[string][]topology.GPU{
		"a b":  {whole("a"), whole("b")},
		"i":    {whole("a"), divided("b", "i", "j"), divided("c", "k")},
		"b":    {divided("a"), whole("b")}, // has no instance yet
		"":     {divided("a")},             // simulated
		"i ":   {divided("a", "i")},
		"none": {},
	} {
		top := recordedMachine(t, "vm")
		top.GPUs = gpus
		cfg, err := spillway.Configure(top, spillway.Config{})
		var ids []string
		for _, g := range cfg.GPUs {
			ids = append(ids, g.ID)
		}
		if got := strings.Join(ids, " "); err != nil || got != strings.TrimSpace(strings.TrimPrefix(want, "none")) {
			t.Errorf("got %q, %v; want %q", got, err, want)
		}
	}
}

// TestConfigureUnknownMemory: if the machine's memory is not known, bytes are used as given.
func TestConfigureUnknownMemory(t *testing.T) {
	top := &topology.Topology{Nodes: []topology.Node{{}}}
	cfg, err := spillway.Configure(
		top,
		spillway.Config{
			HostMemory: spillway.Bytes(4 << 30),
			GPUMemory:  spillway.Bytes(2 << 30),
			Disks:      []spillway.DiskConfig{},
		},
	)
	if got := shape(cfg); err != nil || got != "gpu:0@0=2147483648, host:0@0=4096" {
		t.Errorf("%s, %v", got, err)
	}
}

// TestConfigureErrors: each value that makes no sense, and each that the machine does not
// have, is an error that names its field.
func TestConfigureErrors(t *testing.T) {
	dgx, vm := recordedMachine(t, "dgx-a100"), recordedMachine(t, "vm")
	known := recordedMachine(t, "mig")
	for i := range known.GPUs {
		known.GPUs[i].MemoryBytes = 40 << 30
	}
	bytes, share := spillway.Bytes, spillway.Share
	disk := func(a spillway.Amount) []spillway.DiskConfig { return []spillway.DiskConfig{{}, {Capacity: a}} }
	for name, c := range map[string]struct {
		top  *topology.Topology
		cfg  spillway.Config
		want string
	}{
		"no topology":                 {nil, spillway.Config{}, "topology"},
		"an empty topology":           {&topology.Topology{}, spillway.Config{}, "no NUMA node"},
		"negative host memory":        {vm, spillway.Config{HostMemory: bytes(-1)}, "HostMemory: -1 bytes are negative"},
		"a share above 1":             {vm, spillway.Config{HostMemory: share(1.5)}, "HostMemory: a share of 1.5"},
		"a negative share":            {vm, spillway.Config{HostMemory: share(-0.1)}, "HostMemory: a share of -0.1"},
		"a share that is no number":   {vm, spillway.Config{GPUMemory: share(math.NaN())}, "GPUMemory: a share of NaN"},
		"bytes and a share":           {vm, spillway.Config{HostMemory: spillway.Amount{Bytes: 1 << 30, Share: 0.5}}, "HostMemory: there are both bytes and"},
		"more host memory than there": {vm, spillway.Config{HostMemory: bytes(1 << 50)}, "HostMemory: "},
		"too little host memory":      {vm, spillway.Config{HostMemory: bytes(4096)}, "HostMemory: 4096 bytes are too little"},
		"too little for eight":        {dgx, spillway.Config{HostMemory: bytes(1 << 20)}, "of 8 spaces"},
		"too much for the GPUs' nodes": {dgx, spillway.Config{HostPerGPU: true, HostMemory: share(1)},
			"HostMemory: 2 spaces"},
		"a negative number of GPUs":    {vm, spillway.Config{MaxGPUs: -1}, "MaxGPUs is -1"},
		"less GPU memory than a page":  {vm, spillway.Config{GPUMemory: bytes(10)}, "GPUMemory: 10 bytes are too little"},
		"a share of next to nothing":   {vm, spillway.Config{GPUMemory: share(1e-12)}, "GPUMemory: 0.0000000001% of"},
		"a share of an unknown GPU":    {dgx, spillway.Config{GPUMemory: share(0.5)}, "GPUMemory: a share of GPU 0"},
		"a tiny share of a GPU":        {known, spillway.Config{GPUMemory: share(1e-12)}, "GPUMemory: 0.0000000001% of GPU 0"},
		"more than the GPU has":        {known, spillway.Config{GPUMemory: bytes(41 << 30)}, "GPUMemory: 44023414784 bytes"},
		"both together too much":       {vm, spillway.Config{GPUMemory: share(0.6), HostMemory: share(0.6)}, "make them smaller"},
		"both together too many bytes": {recordedMachine(t, "pod"), spillway.Config{GPUMemory: bytes(6 << 30), HostMemory: bytes(6 << 30)}, "host memory of 6442450944 bytes and simulated GPU memory of 6442450944 are more than the 8589934592"},
		"a simulated GPU of too much":  {vm, spillway.Config{GPUMemory: bytes(1 << 50)}, "GPUMemory: 1125899906842624 bytes"},
		"negative capacity":            {vm, spillway.Config{Disks: disk(bytes(-1))}, "disk:1: Capacity: -1 bytes"},
		"a capacity above all":         {vm, spillway.Config{Disks: disk(share(2))}, "disk:1: Capacity: a share of 2"},
		"a negative reserve of a disk": {vm, spillway.Config{Disks: []spillway.DiskConfig{{Reserve: -1}}}, "disk:0: Reserve is -1"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg, err := spillway.Configure(c.top, c.cfg)
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(), "spillway: ") {
				t.Errorf("got %s, %v; want an error with %q", shape(cfg), err, c.want)
			}
			if !reflect.DeepEqual(cfg, spillway.Config{}) {
				t.Errorf("beside an error: %s", shape(cfg))
			}
		})
	}
}

// TestConfigureHugeNodes: nodes of more memory together than a number can say.
func TestConfigureHugeNodes(t *testing.T) {
	top := &topology.Topology{}
	for i, n := range []int64{1 << 62, 1 << 62, 1 << 62, 1<<62 + 1} {
		top.Nodes = append(top.Nodes, topology.Node{ID: i, MemoryBytes: n})
	}
	cfg, err := spillway.Configure(
		top,
		spillway.Config{HostMemory: spillway.Bytes(1 << 30), Disks: []spillway.DiskConfig{}},
	)
	if err != nil {
		t.Fatal(err)
	}
	for i, h := range cfg.Hosts {
		if h.Memory.Bytes != 1<<28 {
			t.Errorf("host:%d has %d bytes", i, h.Memory.Bytes)
		}
	}
}

// TestConfigurePlacesErrors: what Configure fills in may be changed, and is checked again.
func TestConfigurePlacesErrors(t *testing.T) {
	far := -2
	mib, both := spillway.Bytes(1<<20), spillway.Amount{Bytes: 1, Share: 0.5}
	one := []spillway.GPUConfig{{Backend: spillway.Sim, Memory: mib}}
	for want, cfg := range map[string]spillway.Config{
		"HostMemory and Hosts are both":    {HostMemory: mib, Hosts: []spillway.HostConfig{{Memory: mib}}},
		"HostPerGPU and Hosts are both":    {HostPerGPU: true, Hosts: []spillway.HostConfig{{Memory: mib}}},
		"GPUMemory and GPUs are both":      {GPUMemory: mib, GPUs: []spillway.GPUConfig{{Memory: mib}}},
		"MaxGPUs and GPUs are both":        {MaxGPUs: 1, GPUs: []spillway.GPUConfig{}},
		"GPUs has no GPU space that":       {HostPerGPU: true, GPUs: []spillway.GPUConfig{}},
		"no host space in Hosts":           {Hosts: []spillway.HostConfig{}},
		"host:1: memory of 0 bytes":        {Hosts: []spillway.HostConfig{{Memory: mib}, {}}},
		"host:1: memory of 9223372036":     {Hosts: []spillway.HostConfig{{Memory: mib}, {Memory: spillway.Bytes(math.MaxInt64)}}},
		"host:0: Memory: a share of 2":     {Hosts: []spillway.HostConfig{{Memory: spillway.Share(2)}}},
		"host:0: memory of 4096 bytes":     {Topology: numa([][]int{{10}}, []int64{4}), Hosts: []spillway.HostConfig{{Memory: spillway.Share(1. / (1 << 20))}}},
		"host:0: NUMA node -2":             {Hosts: []spillway.HostConfig{{Memory: mib, Node: far}}},
		"no gpu:1":                         {GPUs: one, Hosts: []spillway.HostConfig{{Memory: mib, GPUs: []int{0, 1}}}},
		"no gpu:3000":                      {Hosts: []spillway.HostConfig{{Memory: mib, GPUs: []int{3000}}}},
		"no gpu:-1":                        {Hosts: []spillway.HostConfig{{Memory: mib, GPUs: []int{-1}}}},
		"want one above 0, up to 1":        {GPUs: []spillway.GPUConfig{{Memory: spillway.Share(1.1)}}},
		"gpu:0: Memory: there are both":    {GPUs: []spillway.GPUConfig{{Memory: both}}},
		"a share is for a backend's":       {GPUs: []spillway.GPUConfig{{Memory: spillway.Share(1), Device: struct{ tier.Device }{}}}},
		"gpu:0: NUMA node -2":              {GPUs: []spillway.GPUConfig{{Node: &far}}},
		"disk:0: NUMA node -2":             {Disks: []spillway.DiskConfig{{Node: &far}}},
		"disk:0: Capacity: a share of 1.5": {Disks: []spillway.DiskConfig{{Capacity: spillway.Share(1.5)}}},
		"disk:0: Capacity: a share of NaN": {Disks: []spillway.DiskConfig{{Capacity: spillway.Share(math.NaN())}}},
		"disk:0: Capacity: there are both": {Disks: []spillway.DiskConfig{{Capacity: both}}},
		"the machine has no NUMA node ":    {Hosts: []spillway.HostConfig{{Memory: mib, Node: 5000}}},
		"the topology has no NUMA node":    {Topology: new(topology.Topology)},
		"Budgets[1] is nil":                {Limits: spillway.Limits{Budgets: []*quota.Budget{newBudget(t, 1), nil}}},
	} {
		cfg.Disks = append(cfg.Disks, spillway.DiskConfig{Dir: t.TempDir(), Capacity: spillway.Bytes(1 << 20)})
		if cfg.Hosts == nil {
			cfg.HostMemory = mib
		}
		eng, err := spillway.Open(t.Context(), cfg)
		if err == nil {
			err = eng.Close()
			t.Errorf("it was opened; want an error with %q; closing: %v", want, err)
		} else if !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// TestConfiguredEngines: Open takes the configuration of each machine; data moves down to what
// is near, and comes back whole.
func TestConfiguredEngines(t *testing.T) {
	t.Parallel()
	for i, machine := range recorded {
		for k, perGPU := range []bool{false, true} {
			if testseed.Hurried() && i%2 != k {
				continue // the other way of this machine
			}
			t.Run(
				fmt.Sprintf("%s/%d", machine, k),
				func(t *testing.T) { configuredEngine(t, recordedMachine(t, machine), perGPU) },
			)
		}
	}
}

func configuredEngine(t *testing.T, top *topology.Topology, perGPU bool) {
	dir := t.TempDir()
	cfg, err := spillway.Configure(top, spillway.Config{
		HostPerGPU: perGPU, HostMemory: spillway.Bytes(8 << 20), GPUMemory: spillway.Bytes(256 << 10),
		Disks: []spillway.DiskConfig{{Dir: dir, Capacity: spillway.Bytes(64 << 20)}},
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range cfg.GPUs {
		cfg.GPUs[i].Backend = spillway.Sim
	}
	cfg.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	eng, err := spillway.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := eng.Close(); err != nil {
			t.Error(err)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("%v is left, %v", left, err)
		}
	}()
	spaces := eng.Reservations().Spaces()
	if g, h, d := len(
		spaces.InTier(tier.GPU),
	), len(
		spaces.InTier(tier.Host),
	), len(
		spaces.InTier(tier.Disk),
	); g != len(cfg.GPUs) || h != len(cfg.Hosts) ||
		d != 1 {
		t.Fatalf("%d GPU spaces, %d of the host, %d disks: want %s", g, h, d, shape(cfg))
	}
	for i, s := range spaces.InTier(tier.GPU) {
		if s.Node != *cfg.GPUs[i].Node {
			t.Errorf("%s is on node %d, want %d", s.ID(), s.Node, *cfg.GPUs[i].Node)
		}
		first := reservation.ToDowngrade(s.ID(), tier.Host).Candidates(spaces, nil)[0]
		if perGPU && first.ID().Ordinal != i {
			t.Errorf("%s moves down to %s first", s.ID(), first.ID())
		}
		if near := top.MemoryNode(s.Node); near != topology.Unknown && first.Node != near {
			t.Errorf("%s moves down to node %d, though %d is near", s.ID(), first.Node, near)
		}
	}
	for i, s := range spaces.InTier(tier.Host) {
		if s.Node != cfg.Hosts[i].Node || s.Capacity != cfg.Hosts[i].Memory.Bytes {
			t.Errorf("%s is on node %d with %d bytes, want %+v", s.ID(), s.Node, s.Capacity, cfg.Hosts[i])
		}
	}
	node := topology.Unknown
	if n := cfg.Disks[0].Node; n != nil {
		node = *n
	}
	if s := spaces.InTier(tier.Disk)[0]; s.Node != node {
		t.Errorf("%s is on node %d, want %d", s.ID(), s.Node, node)
	}
	roundTrip(t, eng)
}

// roundTrip puts more batches than the memories hold, and takes them out again.
func roundTrip(t *testing.T, eng *spillway.Engine) {
	t.Helper()
	const batches, rows = 90, 16 << 10 // 128 KiB each
	plan, err := eng.Plan("all")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("scan", 0)
	if err != nil {
		t.Fatal(err)
	}
	schema := arrow.NewSchema([]arrow.Field{{Name: "x", Type: arrow.PrimitiveTypes.Int64}}, nil)
	values := make([]int64, batches*rows) // of all of them
	for i := range values {
		values[i] = int64(i)
	}
	for i := range batches {
		b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
		b.Field(0).(*array.Int64Builder).AppendValues(values[i*rows:][:rows], nil)
		rec := b.NewRecordBatch()
		err := repo.Put(t.Context(), 0, rec)
		rec.Release()
		b.Release()
		if err != nil {
			t.Fatal(err)
		}
	}
	seen := map[int64]bool{} // those being moved are skipped, so they come in any order
	for h, err := range repo.Drain(t.Context(), 0, tier.Host) {
		if err != nil {
			t.Fatal(err)
		}
		rec, err := eng.Mover().Record(t.Context(), h)
		if err != nil {
			t.Fatal(err)
		}
		column := rec.Column(0).(*array.Int64)
		first := column.Value(0)
		if seen[first] || first%rows != 0 || first >= batches*rows || column.Len() != rows {
			t.Fatalf("a batch of %d rows begins with %d", column.Len(), first)
		}
		seen[first] = true
		if asBytes := arrow.Int64Traits.CastToBytes; !bytes.Equal(
			asBytes(column.Int64Values()),
			asBytes(values[first:][:rows]),
		) {
			t.Errorf("the batch that begins with %d has other values", first)
		}
		rec.Release()
		h.Close()
	}
	if len(seen) != batches {
		t.Errorf("%d batches came back, want %d", len(seen), batches)
	}
}

// TestConfigureTwice: what Configure returns is valid, and Configure does not change it. What it
// was given stays as it was, and what it does not fill in is kept.
func TestConfigureTwice(t *testing.T) {
	for _, name := range recorded {
		top := recordedMachine(t, name)
		for i, cfg := range []spillway.Config{
			{}, {HostMemory: spillway.Share(0.125), GPUMemory: spillway.Bytes(1 << 20), MaxGPUs: 1,
				HostPerGPU: true, StallTimeout: 7},
			{GPUs: []spillway.GPUConfig{}, Disks: []spillway.DiskConfig{}},
			{
				GPUs:  []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}},
				Hosts: []spillway.HostConfig{{Node: -1, Memory: spillway.Share(0.125)}}, Disks: []spillway.DiskConfig{{}, {Dir: "/tmp"}},
			},
		} {
			before := cfg
			before.Hosts, before.Disks = slices.Clone(cfg.Hosts), slices.Clone(cfg.Disks)
			once, err := spillway.Configure(top, cfg)
			if err != nil {
				t.Errorf("%s %d: %v", name, i, err)
				continue
			}
			if !reflect.DeepEqual(cfg, before) {
				t.Errorf("%s %d: what was given has changed: %+v", name, i, cfg)
			}
			if err := once.Validate(); err != nil || once.StallTimeout != cfg.StallTimeout ||
				cfg.GPUs != nil && !reflect.DeepEqual(once.GPUs, cfg.GPUs) {
				t.Errorf("%s %d: %+v, %v", name, i, once, err)
			}
			twice, err := spillway.Configure(top, once)
			if err != nil || !reflect.DeepEqual(once, twice) {
				t.Errorf("%s %d: got  %s, %v\nwant %s", name, i, shape(twice), err, shape(once))
			}
		}
	}
}
