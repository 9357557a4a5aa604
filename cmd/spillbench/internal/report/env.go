package report

import (
	"cmp"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/gpuid"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// MachineEnv describes the machine without an engine: the GPU is the first of the topology, by its
// PCI number if its name is not known. It is empty where there is none: only an engine has a
// simulated one.
func MachineEnv(t *topology.Topology) Env {
	e := Env{
		CPU:    t.CPU.Model,
		Cores:  t.Limits.CPUs,
		Memory: t.Limits.MemoryBytes,
		Kernel: kernel(),
		Commit: commit(),
		GOOS:   runtime.GOOS,
		GOARCH: runtime.GOARCH,
	}
	if e.Cores == 0 {
		e.Cores = runtime.GOMAXPROCS(0)
	}
	if len(t.GPUs) > 0 {
		g := t.GPUs[0]
		e.GPU, e.Driver, e.PCIeLink = cmp.Or(g.Name, g.DeviceID), g.Driver, link(g)
	}
	return e
}

// simulated is the name of the simulated GPU.
const simulated = "sim"

// kernel names the system and, on Linux, its release.
func kernel() string {
	name, err := os.ReadFile("/proc/sys/kernel/ostype")
	release, errRelease := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil || errRelease != nil {
		return runtime.GOOS
	}
	return strings.TrimSpace(string(name)) + " " + strings.TrimSpace(string(release))
}

// EngineEnv describes the machine as eng uses it.
func EngineEnv(t *topology.Topology, eng *spillway.Engine) Env {
	e := MachineEnv(t)
	e.GPU, e.Driver, e.PCIeLink, e.DirectIO = "", "", "", true
	var systems []string
	for _, s := range eng.Spaces() {
		switch pool := s.Pool().(type) {
		case *devpool.Memory:
			if e.GPU == "" {
				e.GPU, e.Driver, e.PCIeLink = gpu(t, pool.Device().Info())
			}
		case *volumes.Volume:
			st := pool.Stats()
			e.DirectIO = e.DirectIO && st.Direct
			if !slices.Contains(systems, st.FileSystem) {
				systems = append(systems, st.FileSystem)
			}
		}
	}
	e.DirectIO = e.DirectIO && len(systems) > 0
	e.FileSystem = strings.Join(systems, ",")
	return e
}

// ProbeDisk fills in what spilling to dir would use, in the way that an engine
// finds it out: by a volume that writes a page there. What cannot be found out
// stays empty.
func (e *Env) ProbeDisk(dir string) {
	v, err := volumes.Open(volumes.Config{Dir: dir, Capacity: tier.Page})
	if err != nil {
		return
	}
	st := v.Stats()
	if v.Close() == nil {
		e.FileSystem, e.DirectIO = st.FileSystem, st.Direct
	}
}

// gpu names a device; a simulated one is never named like a real one.
func gpu(t *topology.Topology, d tier.DeviceInfo) (name, driver, pcie string) {
	if d.Backend == "sim" {
		return simulated, "", ""
	}
	for _, g := range t.GPUs {
		if gpuid.SameAddress(g.PCIAddress, d.PCI) {
			pcie = link(g)
		}
	}
	return d.Name, d.Driver, pcie
}

func link(g topology.GPU) string {
	if g.PCIeGeneration == 0 || g.PCIeWidth == 0 {
		return ""
	}
	return fmt.Sprintf("PCIe %d x%d", g.PCIeGeneration, g.PCIeWidth)
}
