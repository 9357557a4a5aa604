package test

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// TestConfigureAndOpenAgree: Open takes what Configure makes for a machine with little memory, and
// Configure refuses what Open would.
func TestConfigureAndOpenAgree(t *testing.T) {
	const memory = 8 << 20
	top := &topology.Topology{Memory: topology.Memory{TotalBytes: memory}, Nodes: []topology.Node{{MemoryBytes: memory}}}
	bytes, share := spillway.Bytes, spillway.Share
	none, sim := []spillway.GPUConfig{}, func(memory spillway.Amount) []spillway.GPUConfig {
		return []spillway.GPUConfig{{Backend: spillway.Sim, Memory: memory}}
	}
	for name, c := range map[string]struct {
		cfg   spillway.Config
		gpu   int64
		wrong string
	}{
		"the defaults":                {gpu: memory / 8},
		"less than the default":       {cfg: spillway.Config{HostMemory: bytes(memory - 8192)}, gpu: 8192},
		"one that is asked for":       {cfg: spillway.Config{HostMemory: bytes(memory - 8192), GPUs: sim(spillway.Amount{})}, gpu: 8192},
		"nothing for a simulated GPU": {cfg: spillway.Config{HostMemory: share(1)}, wrong: "leaves nothing"},
		"no GPU":                      {cfg: spillway.Config{HostMemory: share(1), GPUs: none}},
		"two shares":                  {cfg: spillway.Config{Hosts: []spillway.HostConfig{{Memory: share(1)}, {Memory: share(1)}}, GPUs: none}, wrong: "host memory of 16777216 bytes"},
		"more host memory":            {cfg: spillway.Config{Hosts: []spillway.HostConfig{{Memory: bytes(1 << 30)}}, GPUs: none}, wrong: "host memory of 1073741824 bytes"},
		"a simulated GPU of more":     {cfg: spillway.Config{GPUs: sim(bytes(1 << 30))}, wrong: "simulated GPU memory of 1073741824"},
	} {
		t.Run(name, func(t *testing.T) {
			c.cfg.Disks = []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: bytes(1 << 20)}}
			c.cfg.CUDALibrary = "/nowhere/libcuda.so"
			c.cfg.Logger = slog.New(slog.DiscardHandler)
			cfg, err := spillway.Configure(top, c.cfg)
			if c.wrong != "" {
				if !errors.Is(err, tier.ErrNoSpace) || !strings.Contains(err.Error(), c.wrong) {
					t.Errorf("got %s, %v; want an error with %q", shape(cfg), err, c.wrong)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			eng, err := spillway.Open(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer closeEngine(t, eng)
			if gpu := eng.Stats().Spaces[0]; c.gpu != 0 && gpu.Capacity != c.gpu {
				t.Errorf("%s has %d bytes; want %d", gpu.ID, gpu.Capacity, c.gpu)
			}
		})
	}
}

// TestConfigureRefusesWhatOpenRefuses: of GPUs that are simulated whatever the machine has. So does
// Validate.
func TestConfigureRefusesWhatOpenRefuses(t *testing.T) {
	const memory = 8 << 20
	top := &topology.Topology{Memory: topology.Memory{TotalBytes: memory}, Nodes: []topology.Node{{MemoryBytes: memory}}}
	for name, size := range map[string]spillway.Amount{"a share": spillway.Share(0.5), "less than a page": spillway.Bytes(2813)} {
		t.Run(name, func(t *testing.T) {
			cfg := spillway.Config{
				GPUs:        []spillway.GPUConfig{{Backend: spillway.Sim, Memory: size}},
				Disks:       []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(1 << 20)}},
				CUDALibrary: "/nowhere/libcuda.so", Logger: slog.New(slog.DiscardHandler),
			}
			_, err := spillway.Configure(top, cfg)
			eng, opening := spillway.Open(t.Context(), cfg)
			if opening == nil {
				closeEngine(t, eng)
			}
			for _, err := range []error{cfg.Validate(), err, opening} {
				if err == nil || errors.Is(err, spillway.ErrShareOfSimulated) != (size.Share != 0) {
					t.Errorf("it is refused with %v", err)
				}
			}
		})
	}
}

// TestOpenLeavesNothingForAFallback: a GPU that is named, and simulated for want of it, beside host
// spaces that take all memory.
func TestOpenLeavesNothingForAFallback(t *testing.T) {
	const memory = 8 << 20
	top := &topology.Topology{Memory: topology.Memory{TotalBytes: memory}, Nodes: []topology.Node{{MemoryBytes: memory}}}
	eng, err := spillway.Open(t.Context(), spillway.Config{
		Topology: top, GPUs: []spillway.GPUConfig{{ID: "GPU-12345678-1234-1234-1234-123456789012", Memory: spillway.Bytes(4 << 20)}},
		HostMemory: spillway.Share(1), Disks: []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(1 << 20)}},
		CUDALibrary: "/nowhere/libcuda.so", Logger: slog.New(slog.DiscardHandler),
	})
	if err == nil {
		t.Fatal(eng.Close())
	}
	if !errors.Is(err, tier.ErrNoSpace) || !strings.Contains(err.Error(), "leaves nothing") {
		t.Errorf("the error does not say that host memory leaves nothing: %v", err)
	}
}

// TestOpenUnknownMemory: Open takes what Configure makes there. No machine has such a simulated
// GPU, so its own allocation fails, and not a comparison with a guess.
func TestOpenUnknownMemory(t *testing.T) {
	top := &topology.Topology{Nodes: []topology.Node{{}}}
	for _, memory := range []spillway.Amount{spillway.Bytes(1 << 20), spillway.Bytes(1 << 61)} {
		cfg, err := spillway.Configure(top, spillway.Config{HostMemory: spillway.Bytes(1 << 20), GPUMemory: memory, Disks: []spillway.DiskConfig{}})
		if err != nil {
			t.Fatal(err)
		}
		cfg.CUDALibrary, cfg.Logger = "/nowhere/libcuda.so", slog.New(slog.DiscardHandler)
		eng, err := spillway.Open(t.Context(), cfg)
		if err == nil {
			closeEngine(t, eng)
		}
		if fits := memory.Bytes == 1<<20; (err == nil) != fits || err != nil && strings.Contains(err.Error(), "that the process may use") {
			t.Errorf("%s: %v", memory, err)
		}
	}
}

// TestOpenConfigures: an engine without lists has the spaces that Configure makes for its machine,
// on the GPUs that the driver shows, whatever the topology says of others.
func TestOpenConfigures(t *testing.T) {
	const uuid = "GPU-e0e1e2e3-e4e5-e6e7-e8e9-eaebecedee0%d"
	t.Setenv("TMPDIR", t.TempDir())
	emulator := func(devices int) string {
		if devices == 0 {
			return filepath.Join(t.TempDir(), "libcuda.so.1")
		}
		return emulated(t, cudatest.Config{Devices: devices}).Path
	}
	for name, c := range map[string]struct {
		devices, known int // GPUs that the driver shows, and that the topology has
		cfg            spillway.Config
		same           bool // as Configure makes them
	}{
		"no GPU":               {0, 0, spillway.Config{HostMemory: spillway.Bytes(3 << 20)}, true},
		"two GPUs":             {2, 2, spillway.Config{HostMemory: spillway.Bytes(3 << 20), GPUMemory: spillway.Share(0.5)}, true},
		"for each GPU":         {2, 2, spillway.Config{HostMemory: spillway.Bytes(2 << 20), HostPerGPU: true}, true},
		"more than are shown":  {1, 2, spillway.Config{HostMemory: spillway.Bytes(2 << 20), HostPerGPU: true}, false},
		"more than are known":  {2, 1, spillway.Config{HostMemory: spillway.Bytes(2 << 20), GPUMemory: spillway.Bytes(1 << 20)}, false},
		"no driver, two known": {0, 2, spillway.Config{HostMemory: spillway.Bytes(2 << 20), GPUMemory: spillway.Bytes(1 << 20)}, false},
		"one of two":           {2, 2, spillway.Config{HostMemory: spillway.Bytes(2 << 20), MaxGPUs: 1}, true},
	} {
		t.Run(name, func(t *testing.T) {
			top := numa([][]int{{10, 30}, {30, 10}}, []int64{32, 96})
			for i := range c.known {
				top.GPUs = append(top.GPUs, topology.GPU{
					Index: i, UUID: fmt.Sprintf(uuid, i), PCIAddress: fmt.Sprintf("0000:e%d:00.0", i), Driver: "nvidia", Node: 1 - i, MemoryBytes: 64 << 20,
				})
			}
			if c.cfg.MaxGPUs == 1 {
				top.GPUs[1].FreeBytes = 64 << 20 // so the second is the least used
			}
			cfg := c.cfg
			cfg.Topology, cfg.CUDALibrary, cfg.Logger = top, emulator(c.devices), slog.New(slog.DiscardHandler)
			eng, err := spillway.Open(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer closeClean(t, eng)
			gpus := eng.Reservations().Spaces().InTier(tier.GPU)
			want := max(1, c.devices)
			if c.cfg.MaxGPUs == 1 {
				want = 1
			}
			if len(gpus) != want || (gpus[0].Backend == "sim") != (c.devices == 0) {
				t.Fatalf("%d GPU spaces, the first served by %s; want %d", len(gpus), gpus[0].Backend, want)
			}
			if !c.same {
				return
			}
			made, err := spillway.Configure(top, c.cfg)
			if err != nil || len(made.GPUs) != len(gpus) {
				t.Fatalf("%s, %v", shape(made), err)
			}
			for i, g := range made.GPUs {
				s, id := gpus[i], deviceAt(eng, i).Info().UUID
				if s.Node != *g.Node || g.Memory.Bytes > 0 && s.Capacity != g.Memory.Bytes || g.ID != "" && g.ID != id {
					t.Errorf("%s is %s, on node %d with %d bytes; want %+v", s.ID(), id, s.Node, s.Capacity, g)
				}
			}
			hosts := eng.Reservations().Spaces().InTier(tier.Host)
			for i, h := range made.Hosts {
				if len(hosts) != len(made.Hosts) || hosts[i].Node != h.Node || hosts[i].Capacity != h.Memory.Bytes {
					t.Errorf("host:%d of %d is not %+v", i, len(hosts), h)
				}
			}
		})
	}
}
