package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/test/testfs"
)

// TestTopo: this machine has a CPU and a node, in the table and in the document.
func TestTopo(t *testing.T) {
	t.Parallel()
	if r := succeed(t, "topo"); !strings.Contains(r.stdout, "NUMA nodes") {
		t.Errorf("printed %q", r.stdout)
	}
	r := succeed(t, "topo", "--json=-")
	var doc report.Topo
	decode(t, r.stdout, &doc)
	if doc.Command != "topo" || doc.Topology == nil || len(doc.Topology.Nodes) < 1 || doc.Env.Cores < 1 {
		t.Errorf("%s", r.stdout)
	}
}

// TestTopoRoot: a recorded machine is printed, not this one.
func TestTopoRoot(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for name, content := range map[string]string{
		"proc/meminfo": "MemTotal: 1234567 kB\nMemFree: 1000 kB\nMemAvailable: 1000 kB\nSwapTotal: 0 kB\n",
		"proc/cpuinfo": "processor : 0\nmodel name : Recorded CPU\n",
	} {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r := succeed(t, "topo", "--root", root, "--json=-")
	var doc report.Topo
	decode(t, r.stdout, &doc)
	if doc.Env.CPU != "Recorded CPU" || doc.Topology.Memory.TotalBytes != 1234567<<10 || doc.Env.Kernel != "" {
		t.Errorf("%s", r.stdout)
	}
	var raw map[string]json.RawMessage
	decode(t, r.stdout, &raw)
	for _, key := range []string{"schema", "command", "env", "topology"} {
		if raw[key] == nil {
			t.Errorf("no %q in %s", key, r.stdout)
		}
	}
}

// TestTopoOfNoMachine: a directory that holds no machine is wrong use. Of one with few facts,
// nothing is printed that is this machine's.
func TestTopoOfNoMachine(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	for _, dir := range []string{root, filepath.Join(root, "missing")} {
		r := command(t, t.Context(), "topo", "--root", dir)
		if r.status != 2 || strings.Count(r.stderr, "\n") != 1 || !strings.Contains(r.stderr, "--root "+dir) || r.stdout != "" {
			t.Errorf("status %d, %q, %q", r.status, r.stderr, r.stdout)
		}
	}
	if err := os.Mkdir(filepath.Join(root, "sys"), 0o700); err != nil {
		t.Fatal(err)
	}
	var doc report.Topo
	decode(t, succeed(t, "topo", "--root", root, "--json=-").stdout, &doc)
	if e := doc.Env; e.Cores != 0 || e.Memory != 0 || e.CPU != "" || e.GPU != "" || len(doc.Topology.Warnings) == 0 {
		t.Errorf("got %+v", doc)
	}
}

// TestQuietPrinters: commands whose work is to print do so with --quiet, too, unless the result goes to
// a file.
func TestQuietPrinters(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	trace := filepath.Join(t.TempDir(), "run.trace")
	succeed(t, append([]string{"trace", "record", trace, "-q"}, small...)...)
	for _, args := range [][]string{{"topo"}, {"quota"}, {"trace", "replay", trace}, {"trace", "compare", trace}} {
		want := succeed(t, args...).stdout
		if r := succeed(t, append(args, "-q")...); r.stdout != want && args[0] != "topo" || r.stdout == "" { // what is available changes
			t.Errorf("%q, quiet: printed %q, want %q", args, r.stdout, want)
		}
		succeed(t, append(args, "-q", "--format=table")...)
		if r := succeed(t, append(args, "-q", "--json="+filepath.Join(t.TempDir(), "r.json"))...); r.stdout != "" {
			t.Errorf("%q, quiet and to a file: printed %q", args, r.stdout)
		}
	}
	if r := succeed(t, "topo", "-q", "--json=-"); !strings.Contains(r.stdout, `"topology"`) {
		t.Errorf("printed %q", r.stdout)
	}
}

// TestMachineWithoutAGPU: commands that open no engine name no simulated GPU.
func TestMachineWithoutAGPU(t *testing.T) {
	t.Parallel()
	root := testfs.MemoryDir(t)
	if err := testfs.UnpackTree("../../topology/testdata/vm.txtar", root); err != nil {
		t.Fatal(err)
	}
	var doc report.Topo
	decode(t, succeed(t, "topo", "--root", root, "--json=-").stdout, &doc)
	if len(doc.Topology.GPUs) != 0 || doc.Env.GPU != "" {
		t.Errorf("the GPU is %q of %d", doc.Env.GPU, len(doc.Topology.GPUs))
	}
}

// TestTopoTellsDiskAsRunDoes: the same directory is the same disk to both.
func TestTopoTellsDiskAsRunDoes(t *testing.T) {
	t.Parallel()
	var told report.Topo
	decode(t, succeed(t, "topo", "--json=-").stdout, &told)
	used := runJSON(t, append(small, "--passes=0")...)
	if told.Env.DirectIO != used.Env.DirectIO || told.Env.FileSystem != used.Env.FileSystem {
		t.Errorf("topo says %q, direct %v; run says %q, direct %v",
			told.Env.FileSystem, told.Env.DirectIO, used.Env.FileSystem, used.Env.DirectIO)
	}
}

// TestTopoMachines: of each recorded machine the command prints what the topology
// says, as table and matrix, and in the document.
func TestTopoMachines(t *testing.T) {
	t.Parallel()
	const recorded = "../../topology/testdata"
	for _, machine := range []string{"dgx-a100", "workstation", "vm", "pod", "mig", "numa-unknown"} {
		t.Run(machine, func(t *testing.T) {
			root := testfs.MemoryDir(t)
			if err := testfs.UnpackTree(filepath.Join(recorded, machine+".txtar"), root); err != nil {
				t.Fatal(err)
			}
			want, err := os.ReadFile(filepath.Join(recorded, machine+".table"))
			if err != nil {
				t.Fatal(err)
			}
			if r := succeed(t, "topo", "--root", root); r.stdout != string(want) {
				t.Errorf("printed\n%s\nwant\n%s", r.stdout, want)
			}
			var doc report.Topo
			decode(t, succeed(t, "topo", "--root", root, "--json=-").stdout, &doc)
			if !reflect.DeepEqual(doc.Paths, doc.Topology.Matrix()) || len(doc.Paths.Devices) != len(doc.Topology.GPUs)+len(doc.Topology.NICs)+len(doc.Topology.Disks) {
				t.Errorf("paths %+v", doc.Paths)
			}
		})
	}
}

// TestTopoVisibleDevices: a value that names no GPU is wrong use, and said to be.
func TestTopoVisibleDevices(t *testing.T) {
	t.Setenv("CUDA_VISIBLE_DEVICES", "first")
	for _, name := range []string{"topo", "run"} {
		r := command(t, t.Context(), name)
		if r.status != 2 || !strings.Contains(r.stderr, "CUDA_VISIBLE_DEVICES") || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%s: status %d, %q", name, r.status, r.stderr)
		}
	}
}

// TestTopoNVML: a build with go-nvml prints the same through it, and one without names the build
// that has it.
func TestTopoNVML(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "proc"), 0o700); err != nil {
		t.Fatal(err)
	}
	for want, args := range map[string][]string{
		"recorded machine has no library": {"topo", "--nvml", "go-nvml", "--root", root},
		"want run-time or go-nvml":        {"topo", "--nvml", "cgo"},
	} {
		if r := command(t, t.Context(), args...); r.status != 2 || !strings.Contains(r.stderr, want) || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%q: status %d, %q, want %q", args, r.status, r.stderr, want)
		}
	}
	if goNVML == nil {
		r := command(t, t.Context(), "topo", "--nvml", "go-nvml")
		if r.status != 2 || !strings.Contains(r.stderr, "go build -tags gonvml -ldflags '-extldflags=-Wl,-z,lazy' ./cmd/spillbench") {
			t.Errorf("status %d, %q", r.status, r.stderr)
		}
	}
}
