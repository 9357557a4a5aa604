package test

import (
	"fmt"
	"io"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// TestLeastLoadedGPU: a space that any GPU will do for has the one that carries least: by the bytes
// in use there, by those in the node's ledger, by the holders, then by UUID. GPUs that are named
// are not touched by that.
func TestLeastLoadedGPU(t *testing.T) {
	t.Parallel()
	const gib = 1 << 30
	pci := func(i int) string { return fmt.Sprintf("0000:e%d:00.0", i) }
	uuid := func(i int) string { return fmt.Sprintf("GPU-e0e1e2e3-e4e5-e6e7-e8e9-eaebecedee0%d", i) }
	spaces := func(ids ...string) (gpus []spillway.GPUConfig) {
		for _, id := range ids {
			gpus = append(gpus, spillway.GPUConfig{ID: id, Backend: spillway.CUDA, Memory: spillway.Bytes(1 << 20)})
		}
		return gpus
	}
	for name, c := range map[string]struct {
		free   []int64         // of 16 GiB, by the topology; nil: not known
		leases map[int][]int64 // bytes that others hold of the ledger, by GPU
		gpus   []spillway.GPUConfig
		want   []int // the devices of the spaces
	}{
		"nothing known":        {nil, nil, spaces(""), []int{0}},
		"the first is empty":   {[]int64{16 * gib, 15 * gib, 15 * gib}, nil, spaces(""), []int{0}},
		"the last is empty":    {[]int64{1 * gib, 15 * gib, 16 * gib}, nil, spaces(""), []int{2}},
		"two spaces":           {[]int64{1 * gib, 15 * gib, 16 * gib}, nil, spaces("", ""), []int{2, 1}},
		"one is named":         {[]int64{1 * gib, 15 * gib, 16 * gib}, nil, spaces("", pci(2)), []int{1, 2}},
		"all are named":        {[]int64{1 * gib, 15 * gib, 16 * gib}, nil, spaces(pci(0), uuid(1)), []int{0, 1}},
		"by the ledger":        {nil, map[int][]int64{0: {1 << 20}, 1: {4096}, 2: {8192}}, spaces("", ""), []int{1, 2}},
		"by holders":           {nil, map[int][]int64{0: {4096, 4096}, 1: {8192}, 2: {8192}}, spaces("", ""), []int{1, 2}},
		"bytes before holders": {nil, map[int][]int64{0: {4096, 4096}, 1: {1 << 20}, 2: {1 << 20}}, spaces(""), []int{0}},
		"by the instances":     {[]int64{1 * gib, 15 * gib, 16 * gib}, nil, spaces(""), []int{2}},
		"the ledger or the card": {[]int64{16 * gib, 16*gib - 8192, 16*gib - 4096}, map[int][]int64{0: {1 << 20}},
			spaces("", ""), []int{2, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			top := &topology.Topology{Nodes: []topology.Node{{MemoryBytes: 1 << 40}}}
			for i := range 3 {
				g := topology.GPU{
					UUID:       uuid(i),
					PCIAddress: pci(i),
					Node:       topology.Unknown,
					MemoryNode: topology.Unknown,
				}
				if c.free != nil {
					g.MemoryBytes, g.FreeBytes = 16*gib, c.free[i]
				}
				if name == "by the instances" { // of which the driver shows one for each card
					g.MIG = []topology.MIGInstance{{UUID: g.UUID, MemoryBytes: g.MemoryBytes, FreeBytes: g.FreeBytes}}
					g.UUID, g.MIGEnabled, g.FreeBytes = "GPU-of-the-card", true, g.MemoryBytes
				}
				top.GPUs = append(top.GPUs, g)
			}
			settings := &quota.Settings{}
			if c.leases != nil {
				settings.Ledger = t.TempDir()
			}
			library := emulated(t, cudatest.Config{Devices: 3}).Path
			cfg := spillway.Config{
				Topology: top, CUDALibrary: library, GPUs: c.gpus, HostMemory: spillway.Bytes(1 << 20),
				Disks:  []spillway.DiskConfig{},
				Limits: spillway.Limits{Quota: settings}, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
			}
			if c.leases != nil {
				physical := physicalOf(t, cfg)
				for i, held := range c.leases {
					for _, n := range held {
						l, err := leases.Join(
							leases.Terms{Dir: settings.Ledger, Device: uuid(i), Group: "others", Physical: physical},
						)
						if err != nil {
							t.Fatal(err)
						}
						if err := l.Charge(n); err != nil {
							t.Fatal(err)
						}
						defer func() {
							l.Credit(n)
							if err := l.Close(); err != nil {
								t.Error(err)
							}
						}()
					}
				}
				settings.Group = "others"
			}
			before, err := leases.Holders(settings.Ledger)
			if err != nil && c.leases != nil {
				t.Fatal(err)
			}
			eng, err := spillway.Open(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			var got []int
			for _, s := range eng.Reservations().Spaces().InTier(tier.GPU) {
				info := s.Pool.(*devpool.Memory).Device().Info()
				got = append(
					got,
					slices.IndexFunc(top.GPUs, func(g topology.GPU) bool { return g.PCIAddress == info.PCI }),
				)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("the spaces have GPUs %v, want %v", got, c.want)
			}
			if err := eng.Close(); err != nil {
				t.Error(err)
			}
			if after, _ := leases.Holders(settings.Ledger); !slices.Equal(after, before) {
				t.Errorf("the ledger has %v, before %v", after, before)
			}
		})
	}
}

// physicalOf returns how much memory an engine says that the GPUs have.
func physicalOf(t *testing.T, cfg spillway.Config) int64 {
	t.Helper()
	cfg.Limits.Quota = &quota.Settings{}
	eng, err := spillway.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	_, total, _ := eng.Reservations().Spaces().InTier(tier.GPU)[0].Pool.(*devpool.Memory).Device().MemInfo()
	if err := eng.Close(); err != nil {
		t.Fatal(err)
	}
	return total
}

// TestLeastLoadedSpace: batches and tasks that may go to any GPU go to the one that has the most
// room, and what others hold on a device does not count as room.
func TestLeastLoadedSpace(t *testing.T) { synctest.Test(t, testLeastLoadedSpace) }

func testLeastLoadedSpace(t *testing.T) {
	r := openRefuser(t, 2, 1, 0)
	synctest.Wait() // the engine has asked the devices what others hold there
	gpus := r.Reservations().Spaces().InTier(tier.GPU)
	words := wordList(1, 10)
	put := func() tier.ID {
		t.Helper()
		if err := r.repo.Put(t.Context(), 0, numberedRecord(0, 2000, words),
			repository.WithPlacement(reservation.AnyInTier(tier.GPU))); err != nil {
			t.Fatal(err)
		}
		var last tier.ID
		for b := range r.repo.Batches(0) {
			last = b.Info().Space
		}
		return last
	}
	admitted := func() tier.ID {
		t.Helper()
		g, err := r.Admit(t.Context(), spillway.Estimate{Output: 4096, Overhead: 4096})
		if err != nil {
			t.Fatal(err)
		}
		defer release(t, g)
		return g.Reservation().Space().ID()
	}
	for i, want := range []int{0, 1} { // the other one has the batch
		if at := put(); at != gpus[want].ID() {
			t.Errorf("put %d went to %s", i, at)
		}
	}
	gpus[0].SetExternal(1 << 20)
	for i := range 3 {
		if at := put(); at != gpus[1].ID() {
			t.Errorf("put %d beside external bytes went to %s", i, at)
		}
	}
	if at := admitted(); at != gpus[1].ID() {
		t.Errorf("a task went to %s", at)
	}
	gpus[0].SetExternal(0)
	if at := admitted(); at != gpus[0].ID() {
		t.Errorf("a task went to %s", at)
	}
}

// TestConfigureTheLeastUsed: of the GPUs of a machine those are configured of which the least is in
// use.
func TestConfigureTheLeastUsed(t *testing.T) {
	const gib = 1 << 30
	node := 0
	top := &topology.Topology{Nodes: []topology.Node{{MemoryBytes: 64 * gib}},
		Limits: topology.Limits{CPUs: 1, MemoryBytes: 64 * gib}}
	for i, free := range []int64{2, 9, 1, 8} {
		top.GPUs = append(top.GPUs, topology.GPU{
			Index: i, UUID: fmt.Sprintf("GPU-%d", i), PCIAddress: fmt.Sprintf("0000:0%d:00.0", i), Node: node,
			MemoryBytes: 16 * gib, FreeBytes: free * gib,
		})
	}
	for most, want := range map[int][]string{
		0: {"GPU-0", "GPU-1", "GPU-2", "GPU-3"}, 1: {"GPU-1"}, 2: {"GPU-1", "GPU-3"}, 3: {"GPU-0", "GPU-1", "GPU-3"},
	} {
		cfg, err := spillway.Configure(top, spillway.Config{MaxGPUs: most, Disks: []spillway.DiskConfig{}})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, g := range cfg.GPUs {
			got = append(got, g.ID)
		}
		if !slices.Equal(got, want) {
			t.Errorf("of %d GPUs at most: %v, want %v", most, got, want)
		}
	}
	unnamed, unnumbered := *top, *top
	unnamed.GPUs, unnumbered.GPUs = slices.Clone(top.GPUs), slices.Clone(top.GPUs)
	for i := range top.GPUs {
		unnamed.GPUs[i].UUID, unnamed.GPUs[i].PCIAddress = "", ""
		unnumbered.GPUs[i].Index = 0
	}
	for name, top := range map[string]*topology.Topology{"names": &unnamed, "numbers": &unnumbered} {
		cfg, err := spillway.Configure(top, spillway.Config{MaxGPUs: 1, Disks: []spillway.DiskConfig{}})
		if err != nil || len(cfg.GPUs) != 1 {
			t.Errorf("of one GPU at most, without %s: %d, %v", name, len(cfg.GPUs), err)
		}
	}
}
