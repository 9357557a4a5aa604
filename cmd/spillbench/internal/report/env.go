package report

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// simulated is the name of the simulated GPU.
const simulated = "sim"

// MachineEnv describes the machine without an engine. The GPU is the first of the topology, or none: a
// simulated one belongs to an engine.
func MachineEnv(t *topology.Topology) Env {
	kernel := runtime.GOOS
	if release, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		kernel = "Linux " + strings.TrimSpace(string(release))
	}
	_, commit := build()
	e := Env{
		CPU:    t.CPU.Model,
		Cores:  cmp.Or(t.Limits.CPUs, runtime.GOMAXPROCS(0)),
		Memory: t.Limits.MemoryBytes,
		Kernel: kernel,
		Commit: commit,
		GOOS:   runtime.GOOS,
		GOARCH: runtime.GOARCH,
	}
	if len(t.GPUs) > 0 {
		g := t.GPUs[0]
		e.GPU, e.Driver, e.PCIeLink = cmp.Or(g.Name, g.DeviceID), g.Driver, link(g)
	}
	return e
}

// EngineEnv describes the machine as eng uses it. A simulated GPU never has the name of a real one.
func EngineEnv(t *topology.Topology, eng *spillway.Engine) Env {
	e := MachineEnv(t)
	e.GPU, e.Driver, e.PCIeLink = "", "", ""
	var systems []string
	for _, s := range eng.Spaces() {
		switch pool := s.Pool.(type) {
		case *devpool.Memory:
			d := pool.Device().Info()
			switch {
			case e.GPU != "":
			case d.Backend == simulated:
				e.GPU = simulated
			default:
				e.GPU, e.Driver = d.Name, d.Driver
				for _, g := range t.GPUs {
					if named.SameAddress(g.PCIAddress, d.PCI) {
						e.PCIeLink = link(g)
					}
				}
			}
		case *volumes.Volume:
			st := pool.Stats()
			e.DirectIO = st.Direct && (e.DirectIO || len(systems) == 0)
			systems = append(systems, st.FileSystem)
		}
	}
	slices.Sort(systems)
	e.FileSystem = strings.Join(slices.Compact(systems), ",")
	return e
}

// ProbeDisk fills in the file system of dir, and whether an engine uses direct I/O there. It opens a
// volume as an engine does; if that fails, the fields stay empty.
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

func link(g topology.GPU) string {
	if g.PCIeGeneration == 0 || g.PCIeWidth == 0 {
		return ""
	}
	return fmt.Sprintf("PCIe %d x%d", g.PCIeGeneration, g.PCIeWidth)
}

// VersionLine describes this program in one line: its version and commit, and the Go and the system that
// it was built with.
func VersionLine() string {
	version, commit := build()
	return fmt.Sprintf("spillbench %s, commit %s, %s, %s/%s",
		version, cmp.Or(commit, "unknown"), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

// build returns the version of this program's module, or "(devel)" if it is not known, and the revision
// that the program was built from, or "". "go run" doesn't record the revision. Then git is asked, if
// the current directory is the root of this module.
var build = sync.OnceValues(func() (version, commit string) {
	version = "(devel)"
	if info, ok := debug.ReadBuildInfo(); ok {
		version = cmp.Or(info.Main.Version, version)
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				commit = s.Value + commit
			} else if s.Key == "vcs.modified" && s.Value == "true" {
				commit += "+dirty"
			}
		}
	}
	mod, _ := os.ReadFile("go.mod") // empty elsewhere
	if commit != "" || !strings.HasPrefix(string(mod), "module github.com/spillway-db/spillway\n") {
		return version, commit
	}
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	git := exec.CommandContext(ctx, "git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+dirty")
	text, _ := git.Output() // without git, the revision stays unknown
	return version, strings.TrimSpace(string(text))
})
