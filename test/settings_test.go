package test

import (
	"context"
	"errors"
	"log"
	"log/slog"
	"math/big"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/faultdev"
	"github.com/spillway-db/spillway/tier/sim"
	"github.com/spillway-db/spillway/topology"
)

// setting is one way to set a field of the configuration.
type setting struct {
	field string
	with  func(*testing.T, *spillway.Config) // what the field needs beside it; may be nil
	// set sets the field, and returns a function that reports whether an engine heeds it.
	set     func(*testing.T, *spillway.Config) (heeded func(*spillway.Engine) bool)
	refused error // if set, the engine that heeds it is not opened, with this error
}

// plainConfig is what settings are made in: one space of each kind, on a machine with three nodes.
func plainConfig(t *testing.T) spillway.Config {
	top := numa([][]int{{10, 30, 20}, {30, 10, 20}, {20, 20, 10}}, []int64{64, 64, 64})
	return spillway.Config{
		GPUs:  []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}},
		Hosts: []spillway.HostConfig{{Memory: spillway.Bytes(2 << 20)}, {Memory: spillway.Bytes(1 << 20)}}, Disks: []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(16 << 20)}},
		Codec: convert.CodecNone, Limits: spillway.Limits{Quota: &quota.Settings{}}, Topology: top, Logger: slog.New(slog.DiscardHandler),
	}
}

// spaceAt returns a space, or nil if there is none.
func spaceAt(eng *spillway.Engine, k tier.Kind, i int) *tier.Space {
	s, _ := eng.Reservations().Spaces().ByID(tier.ID{Kind: k, Ordinal: i})
	return s
}

func deviceOf(eng *spillway.Engine) tier.Device { return deviceAt(eng, 0) }

func deviceAt(eng *spillway.Engine, i int) tier.Device {
	return spaceAt(eng, tier.GPU, i).Pool.(*devpool.Memory).Device()
}

// wraps reports whether dev is a device that the engine has made of inner.
func wraps(dev, inner tier.Device) bool {
	w, ok := dev.(interface{ Unwrap() tier.Device })
	return ok && w.Unwrap() == inner
}

// capacity heeds a size of a space.
func capacity(k tier.Kind, i int, want int64) func(*spillway.Engine) bool {
	return func(eng *spillway.Engine) bool { return spaceAt(eng, k, i).Capacity == want }
}

// first heeds what the nearest space is to move down to from the GPU.
func first(want int) func(*spillway.Engine) bool {
	return func(eng *spillway.Engine) bool {
		down := reservation.ToDowngrade(tier.ID{Kind: tier.GPU}, tier.Host)
		return down.Candidates(eng.Reservations().Spaces(), nil)[0].ID().Ordinal == want
	}
}

// putOn puts a record into a tier.
func putOn(t *testing.T, eng *spillway.Engine, k tier.Kind, rows int) *batch.Batch {
	t.Helper()
	plan, err := eng.Plan("settings")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("scan", 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := repo.Put(t.Context(), 0, numberedRecord(0, rows, wordList(1, 10)), in(k)); err != nil {
		t.Fatal(err)
	}
	b, _ := repo.Peek(0)
	return b
}

// full takes all room of a space; free gives it back.
func full(t *testing.T, s *tier.Space, eng *spillway.Engine) (free func()) {
	t.Helper()
	for { // the monitor may take room between the two calls
		n := s.State().Available / tier.Page * tier.Page
		r, err := eng.Reservations().TryReserve(reservation.Specific(s.ID()), n, nil)
		if err == nil {
			return func() { release(t, r) }
		}
		if s.State().Available >= n {
			t.Fatal(err)
		}
	}
}

var settings = []setting{
	{field: "GPUs", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.GPUs = append(c.GPUs, c.GPUs[0])
		return func(eng *spillway.Engine) bool { // simulated ones are spread over the nodes
			gpu := spaceAt(eng, tier.GPU, 1)
			return gpu != nil && gpu.Node == 1
		}
	}},
	{field: "GPUs", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.GPUs = []spillway.GPUConfig{}
		return func(eng *spillway.Engine) bool { return spaceAt(eng, tier.GPU, 0) == nil }
	}},
	{field: "GPUs.Backend", with: withDriver, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.GPUs[0].Backend = spillway.Sim
		return func(eng *spillway.Engine) bool { return spaceAt(eng, tier.GPU, 0).Backend == "sim" }
	}},
	{field: "GPUs.Backend", with: func(_ *testing.T, c *spillway.Config) {
		c.CUDALibrary, c.GPUs[0].Backend = "/nowhere/libcuda.so.1", spillway.Auto
	}, refused: tier.ErrNotSupported, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.GPUs[0].Backend = spillway.CUDA
		return nil
	}},
	{field: "GPUs.ID", with: withDriver, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.GPUs[0].ID = "0000:e1:00.0"
		return func(eng *spillway.Engine) bool { return deviceOf(eng).Info().PCI == "0000:e1:00.0" }
	}},
	{field: "GPUs.Memory", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.GPUs[0].Memory = spillway.Bytes(512 << 10)
		return capacity(tier.GPU, 0, 512<<10)
	}},
	{field: "GPUs.Memory", with: withDriver, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.GPUs[0].Memory = spillway.Bytes(512 << 10)
		return func(eng *spillway.Engine) bool {
			_, total, _ := deviceOf(eng).MemInfo() // what the driver gives out is bounded, too
			return total == 512<<10 && capacity(tier.GPU, 0, 512<<10)(eng)
		}
	}},
	{field: "GPUs.Memory", with: func(t *testing.T, c *spillway.Config) {
		withDriver(t, c)
		c.GPUs[0].Memory = spillway.Amount{}
	}, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.GPUs[0].Memory = spillway.Share(0.25)
		return capacity(tier.GPU, 0, 16<<20)
	}},
	{field: "GPUs.Node", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		node := 2
		c.GPUs[0].Node = &node
		return func(eng *spillway.Engine) bool { return spaceAt(eng, tier.GPU, 0).Node == 2 }
	}},
	{field: "GPUs.Node", with: withDriver, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		node := 2
		c.GPUs[0].Node = &node
		return func(eng *spillway.Engine) bool { return spaceAt(eng, tier.GPU, 0).Node == 2 }
	}},
	{field: "GPUs.Device", set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		dev := openSim(t, 3<<20)
		t.Cleanup(func() { dev.Close() })
		c.GPUs[0].Device, c.GPUs[0].Memory = dev, spillway.Amount{}
		return func(eng *spillway.Engine) bool {
			return wraps(deviceOf(eng), dev) && spaceAt(eng, tier.GPU, 0).Capacity == 3<<20
		}
	}},
	{field: "GPUs.Own", with: func(t *testing.T, c *spillway.Config) {
		dev := openSim(t, 1<<20)
		t.Cleanup(func() { dev.Close() })
		c.GPUs[0].Device = dev
	}, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.GPUs[0].Own = true
		return closesDevice
	}},
	{field: "GPUs.Open", set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		var dev tier.Device
		var size int64
		c.GPUs[0].Open = func(_ context.Context, memory int64) (_ tier.Device, err error) {
			size = memory
			dev, err = sim.New(sim.Config{Memory: 2 * memory})
			return dev, err
		}
		return func(eng *spillway.Engine) bool {
			return dev != nil && wraps(deviceOf(eng), dev) && size == c.GPUs[0].Memory.Bytes && closesDevice(eng)
		}
	}},
	{field: "GPUs.Wrap", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		var over *overDevice
		c.GPUs[0].Wrap = func(dev tier.Device) (tier.Device, error) {
			over = &overDevice{Device: dev}
			return over, nil
		}
		return func(eng *spillway.Engine) bool {
			return over != nil && wraps(deviceOf(eng), over) && eng.Close() == nil && over.closed
		}
	}},
	{field: "HostMemory", with: func(_ *testing.T, c *spillway.Config) {
		c.Hosts, c.HostMemory = nil, spillway.Bytes(3<<20)
	}, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.HostMemory = spillway.Bytes(6 << 20)
		return capacity(tier.Host, 2, 2<<20)
	}},
	{field: "HostPerGPU", with: func(_ *testing.T, c *spillway.Config) {
		c.Hosts, c.HostMemory = nil, spillway.Bytes(3<<20) // for three nodes, and one GPU
	}, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.HostPerGPU = true
		return capacity(tier.Host, 0, 3<<20)
	}},
	{field: "GPUMemory", with: func(_ *testing.T, c *spillway.Config) { c.GPUs = nil },
		set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
			c.GPUMemory = spillway.Bytes(512 << 10)
			return capacity(tier.GPU, 0, 512<<10)
		}},
	{field: "GPUMemory", with: func(t *testing.T, c *spillway.Config) {
		withDriver(t, c)
		c.GPUs = nil
	}, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.GPUMemory = spillway.Share(0.25) // of the card
		return func(eng *spillway.Engine) bool {
			return capacity(tier.GPU, 0, 16<<20)(eng) && capacity(tier.GPU, 1, 16<<20)(eng)
		}
	}},
	{field: "MaxGPUs", with: func(t *testing.T, c *spillway.Config) {
		withDriver(t, c)
		c.GPUs = nil
	}, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.MaxGPUs = 1
		return func(eng *spillway.Engine) bool { return spaceAt(eng, tier.GPU, 1) == nil }
	}},
	{field: "Hosts", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Hosts = c.Hosts[:1]
		return func(eng *spillway.Engine) bool { return spaceAt(eng, tier.Host, 1) == nil }
	}},
	{field: "Hosts.Memory", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Hosts[1].Memory = spillway.Bytes(512 << 10)
		return capacity(tier.Host, 1, 512<<10)
	}},
	{field: "Hosts.Memory", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Topology.Limits.MemoryBytes = 8 << 20
		c.Hosts[1].Memory = spillway.Share(0.25)
		return capacity(tier.Host, 1, 2<<20)
	}},
	{field: "Hosts.Node", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Hosts[0].Node = 1
		return func(eng *spillway.Engine) bool { return spaceAt(eng, tier.Host, 0).Node == 1 }
	}},
	{field: "Hosts.Node", set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		if runtime.GOOS != "linux" || testseed.Raced {
			t.Skip("needs Linux, and a build without the race detector, whose memory is Go's: only other memory is bound to nodes")
		}
		const nowhere = 900 // no machine has so many nodes
		c.Topology.Nodes[1].ID, c.Topology.Limits.MemoryNodes = nowhere, nil
		c.Hosts[0].Node = nowhere
		return func(eng *spillway.Engine) bool {
			return slices.ContainsFunc(eng.Warnings(), func(w diag.Warning) bool { return strings.Contains(w.What, "bound to NUMA node 900") })
		}
	}},
	{field: "Topology", with: func(t *testing.T, c *spillway.Config) {
		if runtime.GOOS != "linux" || testseed.Raced {
			t.Skip("needs Linux, and a build without the race detector, whose memory is Go's: only other memory is bound to nodes")
		}
		c.Topology.Nodes[1].ID, c.Topology.Limits.MemoryNodes = 900, nil
		c.Hosts[0].Node, c.Hosts[1].Node = 900, 900
	}, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Topology.Nodes = c.Topology.Nodes[1:2] // of one node nothing need be bound to it
		return func(eng *spillway.Engine) bool {
			return !slices.ContainsFunc(eng.Warnings(), func(w diag.Warning) bool { return strings.Contains(w.What, "bound to NUMA node") })
		}
	}},
	{field: "Hosts.GPUs", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Hosts[1].GPUs = []int{0}
		return first(1)
	}},
	{field: "Disks", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Disks = []spillway.DiskConfig{}
		return func(eng *spillway.Engine) bool { return spaceAt(eng, tier.Disk, 0) == nil }
	}},
	{field: "Disks", with: func(t *testing.T, c *spillway.Config) {
		c.Disks = []spillway.DiskConfig{}
		t.Setenv("TMPDIR", t.TempDir())
	}, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Disks = nil
		return func(eng *spillway.Engine) bool {
			s := spaceAt(eng, tier.Disk, 0)
			return s != nil && s.Pool.(*volumes.Volume).Dir() == os.TempDir() && spaceAt(eng, tier.Disk, 1) == nil
		}
	}},
	{field: "Disks.Dir", set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		dir := t.TempDir()
		c.Disks[0].Dir = dir
		return func(eng *spillway.Engine) bool {
			return spaceAt(eng, tier.Disk, 0).Pool.(*volumes.Volume).Dir() == dir
		}
	}},
	{field: "Disks.Capacity", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Disks[0].Capacity = spillway.Bytes(8 << 20)
		return capacity(tier.Disk, 0, 8<<20)
	}},
	{field: "Disks.Capacity", with: func(t *testing.T, c *spillway.Config) {
		spied(t, c)
		c.Disks[0].Capacity = spillway.Amount{}
	}, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Disks[0].Capacity = spillway.Share(0.25)
		return capacity(tier.Disk, 0, 16<<20)
	}},
	{field: "Disks.Reserve", with: func(t *testing.T, c *spillway.Config) {
		spied(t, c)
		c.Disks[0].Capacity = spillway.Amount{}
	}, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Disks[0].Reserve = 32 << 20
		return capacity(tier.Disk, 0, 16<<20)
	}},
	{field: "Disks.Reserve", with: spied, refused: tier.ErrNoSpace, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Disks[0].Reserve = 50 << 20
		return nil
	}},
	{field: "Disks.Node", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		node := 1
		c.Disks[0].Node = &node
		return func(eng *spillway.Engine) bool { return spaceAt(eng, tier.Disk, 0).Node == 1 }
	}},
	{field: "Disks.FS", set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		spied(t, c)
		return func(eng *spillway.Engine) bool {
			putOn(t, eng, tier.Disk, 1000)
			return c.Disks[0].FS.(*spyFS).saw("7 of batch 0")
		}
	}},
	{field: "Disks.Encrypt", with: spied, set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Disks[0].Encrypt = true
		return func(eng *spillway.Engine) bool {
			putOn(t, eng, tier.Disk, 1000)
			return !spyOf(c).saw("7 of batch 0")
		}
	}},
	{field: "Disks.Key", with: func(t *testing.T, c *spillway.Config) {
		persistNeedsLinux(t)
		c.Disks[0] = spillway.DiskConfig{Dir: crashed(t, 1, sealed), Capacity: spillway.Bytes(64 << 20), Encrypt: true, Persist: true, Key: make([]byte, 32)}
	}, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Disks[0].Key = persistKey
		return func(eng *spillway.Engine) bool { return len(eng.Persisted()) == 1 }
	}},
	{field: "Disks.Persist", with: func(t *testing.T, c *spillway.Config) {
		persistNeedsLinux(t)
		c.Disks[0] = spillway.DiskConfig{Dir: crashed(t, 1), Capacity: spillway.Bytes(64 << 20)}
	}, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Disks[0].Persist = true
		return func(eng *spillway.Engine) bool { return len(eng.Persisted()) == 1 }
	}},
	{field: "GPUMarks", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.GPUMarks = otherMarks
		return marked(tier.GPU)
	}},
	{field: "HostMarks", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.HostMarks = otherMarks
		return marked(tier.Host)
	}},
	{field: "DiskMarks", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.DiskMarks = otherMarks
		return marked(tier.Disk)
	}},
	{field: "GPUs.Marks", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.GPUs[0].Marks, c.GPUMarks = tier.Marks{Limit: 0.75, Stop: 0.25},
			tier.Marks{Limit: 0.9, Trigger: 0.5, Stop: 0.3}
		return marked(tier.GPU)
	}},
	{field: "Hosts.Marks", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Hosts[0].Marks = otherMarks
		return marked(tier.Host)
	}},
	{field: "Disks.Marks", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Disks[0].Marks = otherMarks
		return marked(tier.Disk)
	}},
	{field: "MovesPerEdge", set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.MovesPerEdge = 3
		return func(eng *spillway.Engine) bool { return movesAtOnce(t, eng) == 3 }
	}},
	{field: "Policy", set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		watched(t, c)
		return func(eng *spillway.Engine) bool {
			pressed(t, eng, time.Second)
			return c.Policy.(lookingPolicy).looks.Load() > 0
		}
	}},
	{field: "MonitorPeriod", set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.MonitorPeriod = 10 * time.Second
		return func(eng *spillway.Engine) bool {
			before := eng.Stats().Monitor.Looks
			pressed(t, eng, time.Minute) // in which there are 1200 looks without it
			looks := eng.Stats().Monitor.Looks - before
			return looks >= 6 && looks < 200
		}
	}},
	{field: "StallTimeout", set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.StallTimeout = 2 * time.Second
		return func(eng *spillway.Engine) bool {
			gpu := spaceAt(eng, tier.GPU, 0)
			h, err := eng.Mover().Acquire(t.Context(), putOn(t, eng, tier.GPU, 2000), reservation.Specific(gpu.ID()))
			if err != nil {
				t.Fatal(err)
			}
			defer h.Close()
			start := time.Now()
			_, err = eng.Reserve(t.Context(), reservation.Specific(gpu.ID()), gpu.State().Room/tier.Page*tier.Page)
			return errors.Is(err, reservation.ErrDeadlock) && time.Since(start) < 4*time.Second
		}
	}},
	{field: "WriteAhead", with: func(_ *testing.T, c *spillway.Config) {
		c.HostMarks = tier.Marks{Limit: 1, Trigger: 0.9, Stop: 0.01}
	}, set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.WriteAhead = -1
		return func(eng *spillway.Engine) bool {
			b := putOn(t, eng, tier.Host, 2000)
			time.Sleep(2 * time.Second)
			return len(b.Copies()) == 0
		}
	}},
	{field: "Codec", set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Codec = convert.CodecS2
		return func(eng *spillway.Engine) bool {
			return putOn(t, eng, tier.Disk, 10_000).Info().Payload.Type() == batch.CompressedImage
		}
	}},
	{field: "Limits.Permits", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Limits.Permits = permit.Config{Slots: new(5), Budgets: []permit.Budget{{Name: permit.Host, Bytes: 3 << 20}}}
		return func(eng *spillway.Engine) bool {
			want := []permit.BudgetStats{{Name: permit.Host, Total: 3 << 20}}
			s := eng.Permits().Stats()
			return s.Slots == 5 && slices.Equal(s.Budgets, want)
		}
	}},
	{field: "Limits.PermitPool", set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		pool, err := permit.New(permit.Config{})
		if err != nil {
			t.Fatal(err)
		}
		c.Limits.PermitPool = pool
		return func(eng *spillway.Engine) bool {
			closeClean(t, eng)
			return eng.Permits() == pool && pool.Close() == nil // it is the program's still
		}
	}},
	{field: "Limits.Admission", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		mine := guessing{new(admission.Ratios)}
		c.Limits.Admission = admission.Rules{Estimator: mine, Strategy: reservation.AnyInTier(tier.Host)}
		return func(eng *spillway.Engine) bool {
			return eng.Admitter().Estimator() == admission.Estimator(mine) && eng.Admitter().Strategy() == c.Limits.Admission.Strategy
		}
	}},
	{field: "Limits.Quota.Limit", set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Limits.Quota.Limit = limitOf(t, "512Ki")
		return func(eng *spillway.Engine) bool { return eng.Quota() != nil && eng.Quota().Stats().Limit == 512<<10 }
	}},
	{field: "Limits.Quota.Ratio", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Limits.Quota.Ratio = big.NewRat(1, 2)
		return capacity(tier.GPU, 0, 512<<10)
	}},
	{field: "Limits.Quota.Physical", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Limits.Quota.Physical = 256 << 10
		return capacity(tier.GPU, 0, 256<<10)
	}},
	{field: "Limits.Quota.Physical", with: func(_ *testing.T, c *spillway.Config) {
		c.GPUs[0].Memory, c.Topology.Limits.MemoryBytes = spillway.Amount{}, 64<<20
	}, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Limits.Quota.Physical = 256 << 10
		return func(eng *spillway.Engine) bool { // no size was requested, so there is nothing to warn of
			return capacity(tier.GPU, 0, 256<<10)(eng) && warningsOf(eng.Warnings(), causes.GPUSize) == 0
		}
	}},
	{field: "Limits.Quota.Physical", with: func(t *testing.T, c *spillway.Config) { c.Limits.Quota.Ledger = t.TempDir() },
		set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
			c.Limits.Quota.Physical = 256 << 10
			return func(*spillway.Engine) bool { return heldOf(t, c).Quota == 256<<10 }
		}},
	{field: "Limits.Quota.Ratio", with: func(t *testing.T, c *spillway.Config) { c.Limits.Quota.Ledger = t.TempDir() },
		set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
			c.Limits.Quota.Ratio = big.NewRat(2, 1)
			return func(*spillway.Engine) bool { return heldOf(t, c).Quota == 2<<20 }
		}},
	{field: "Limits.Quota.Ledger", set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Limits.Quota.Ledger = t.TempDir()
		return func(eng *spillway.Engine) bool { return len(eng.Leases()) == 1 && heldOf(t, c).Device != "" }
	}},
	{field: "Limits.Quota.Group", with: func(t *testing.T, c *spillway.Config) { c.Limits.Quota.Ledger = t.TempDir() },
		set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
			c.Limits.Quota.Group = "a group"
			return func(*spillway.Engine) bool { return heldOf(t, c).Group == "a group" }
		}},
	{field: "Limits.Quota.Source", with: func(t *testing.T, c *spillway.Config) { c.Limits.Quota.Limit = limitOf(t, "512Ki") },
		set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
			c.Limits.Quota.Source = "the test"
			return func(eng *spillway.Engine) bool { return eng.Quota().Stats().Name == "the test" }
		}},
	{field: "Limits.SharedQuota", set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		shared, err := quota.New(quota.Config{Limit: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		c.Limits.SharedQuota = shared
		return func(eng *spillway.Engine) bool {
			defer full(t, spaceAt(eng, tier.GPU, 0), eng)()
			return eng.Quota() == shared && shared.Stats().Used > 0
		}
	}},
	{field: "Limits.Budgets", set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		b := newBudget(t, 512<<10)
		c.Limits.Budgets = []*quota.Budget{b}
		return func(eng *spillway.Engine) bool {
			defer full(t, spaceAt(eng, tier.GPU, 0), eng)()
			return b.Stats().Promised > 0
		}
	}},
	{field: "CUDALibrary", with: func(_ *testing.T, c *spillway.Config) {
		c.CUDALibrary, c.GPUs[0].Backend = "/nowhere/libcuda.so.1", spillway.Auto
	}, set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		withDriver(t, c)
		return func(eng *spillway.Engine) bool { return spaceAt(eng, tier.GPU, 0).Backend == "cuda" }
	}},
	{field: "Topology", with: func(_ *testing.T, c *spillway.Config) {
		c.Hosts[0].Node, c.Hosts[1].Node = 1, 2
		c.Topology = numa([][]int{{10, 12, 20}, {12, 10, 20}, {20, 20, 10}}, []int64{64, 64, 64})
	}, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Topology = numa([][]int{{10, 30, 20}, {30, 10, 20}, {20, 20, 10}}, []int64{64, 64, 64})
		return func(eng *spillway.Engine) bool { return eng.Topology() == c.Topology && first(1)(eng) }
	}},
	{field: "Topology", with: withDriver, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Topology.GPUs = []topology.GPU{{PCIAddress: "0000:e0:00.0", Node: 2}}
		return func(eng *spillway.Engine) bool { return spaceAt(eng, tier.GPU, 0).Node == 2 }
	}},
	{field: "Topology", with: func(_ *testing.T, c *spillway.Config) {
		c.Hosts, c.Topology.Limits.MemoryBytes = nil, 18<<20
		for i := range c.Topology.Nodes {
			c.Topology.Nodes[i].MemoryBytes = 6 << 20
		}
	}, set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Topology.Nodes[2].MemoryBytes = 2 << 20 // so the others have three sevenths each of a quarter of all
		return capacity(tier.Host, 0, 18<<20/4*3/7/tier.Page*tier.Page)
	}},
	{field: "Logger", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		var log syncBuffer
		c.Logger = slog.New(slog.NewTextHandler(&log, nil))
		c.Topology.Warnings = []diag.Warning{causes.Warn(causes.UnknownLimits, "the test hides it")}
		return func(*spillway.Engine) bool { return strings.Contains(log.String(), "the test hides it") }
	}},
	{field: "Logger", with: func(t *testing.T, c *spillway.Config) {
		c.Topology.Warnings = []diag.Warning{causes.Warn(causes.UnknownLimits, "the test hides it")}
	}, set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		c.Logger = nil
		log := defaultLog(t)
		return func(*spillway.Engine) bool { return strings.Contains(log.String(), "the test hides it") }
	}},
	{field: "Events", set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		told := 0
		c.Events = on(events.MoveEnded, func(spillway.Event) { told++ })
		return func(eng *spillway.Engine) bool {
			b := putOn(t, eng, tier.GPU, 100)
			err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.Host))
			return err == nil && told == 1
		}
	}},
	{field: "Events", set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		told := 0
		var log syncBuffer
		c.Events = on(events.Oversized, func(spillway.Event) { told++ })
		c.Logger = slog.New(slog.NewTextHandler(&log, nil))
		return func(eng *spillway.Engine) bool {
			p, err := eng.Mover().Ingest(t.Context(), arrowgen.Ints(1, 1<<18, 1), reservation.AnyInTier(tier.GPU))
			return err == nil && p.Release() == nil && told == 1 && log.count("larger than the space") == 1
		}
	}},
	{field: "Events", set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		told := 0
		c.Events = on(events.PressureRose, func(spillway.Event) { told++ })
		return func(eng *spillway.Engine) bool {
			pressed(t, eng, time.Second)
			return told > 0
		}
	}},
	{field: "Events", set: func(_ *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
		told := 0
		c.Events = on(events.Lost, func(spillway.Event) { told++ })
		var gpu *faultdev.Device
		c.GPUs[0].Wrap = func(dev tier.Device) (tier.Device, error) {
			gpu = faultdev.New(dev, 1)
			return gpu, nil
		}
		return func(*spillway.Engine) bool {
			if gpu == nil {
				return false
			}
			gpu.Lose(errFellOff)
			time.Sleep(time.Second)
			synctest.Wait()
			return told == 1
		}
	}},
	{field: "Events", with: func(t *testing.T, c *spillway.Config) { c.Limits.Quota.Limit = limitOf(t, "512Ki") },
		set: func(t *testing.T, c *spillway.Config) func(*spillway.Engine) bool {
			count := 0
			c.Events = on(events.QuotaExceeded, func(spillway.Event) { count++ })
			return func(eng *spillway.Engine) bool {
				defer full(t, spaceAt(eng, tier.GPU, 0), eng)()
				return eng.Quota().SetLimit(4096) == nil && count == 1
			}
		}},
}

// defaultLog makes the default logger write to what it returns until the test ends.
func defaultLog(t *testing.T) *syncBuffer {
	before, writer, flags := slog.Default(), log.Writer(), log.Flags()
	t.Cleanup(func() {
		slog.SetDefault(before)
		log.SetOutput(writer) // which the line above does not put back
		log.SetFlags(flags)
	})
	var b syncBuffer
	slog.SetDefault(slog.New(slog.NewTextHandler(&b, nil)))
	return &b
}

// otherMarks are no tier's own.
var otherMarks = tier.Marks{Limit: 0.75, Trigger: 0.5, Stop: 0.25}

// marked heeds otherMarks.
func marked(k tier.Kind) func(*spillway.Engine) bool {
	return func(eng *spillway.Engine) bool {
		s := spaceAt(eng, k, 0)
		return s.State().Limit == s.Capacity/4*3 && s.State().Trigger == s.Capacity/2 && s.State().Stop == s.Capacity/4
	}
}

// closesDevice closes the engine, and returns whether that has closed its GPU.
func closesDevice(eng *spillway.Engine) bool {
	dev := deviceOf(eng)
	return eng.Close() == nil && errors.Is(dev.Close(), tier.ErrClosed)
}

func spyOf(c *spillway.Config) *spyFS { return c.Disks[0].FS.(*spyFS) }

// heldOf is what the ledger has of the engine.
func heldOf(t *testing.T, c *spillway.Config) leases.Holder {
	t.Helper()
	all, err := leases.Holders(c.Limits.Quota.Ledger)
	if err != nil || len(all) != 1 {
		t.Fatalf("the ledger has %+v, %v", all, err)
	}
	return all[0]
}
