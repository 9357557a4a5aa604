package main

import (
	"errors"
	"math"
	"runtime/debug"
	"testing"

	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/headroom"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
	"github.com/spillway-db/spillway/topology"
)

// flagsOf are the engine's flags as args set them.
func flagsOf(t *testing.T, args ...string) *engineFlags {
	t.Helper()
	var f engineFlags
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	f.register(fs, defaultMemory)
	if err := fs.Parse(append([]string{"--gpu=sim", "--disk=" + t.TempDir()}, args...)); err != nil {
		t.Fatal(err)
	}
	return &f
}

// TestHeapIsLimited: while a command has an engine, Go's heap is limited to what that
// leaves; afterwards it is as it was. What waits to be put has a part of it.
func TestHeapIsLimited(t *testing.T) {
	before := debug.SetMemoryLimit(math.MaxInt64)
	defer debug.SetMemoryLimit(before)
	f := flagsOf(t, "--gpu-memory=8MiB", "--host-memory=4MiB")
	m, err := f.open(t.Context(), &notes{})
	if err != nil {
		t.Fatal(err)
	}
	defer m.engine.Close()
	if m.topology.Limits.MemoryBytes == 0 {
		t.Skip("needs a system that tells how much memory there is")
	}
	now := debug.SetMemoryLimit(-1)
	if now != m.plan.Heap || now <= 0 || now > m.topology.Limits.MemoryBytes-12<<20 {
		t.Errorf("the limit is %d, the plan %+v", now, m.plan)
	}
	if held := (&runFlags{}).job(m).Held; held <= 0 || held > m.plan.Heap/2 {
		t.Errorf("%d bytes of %d may wait to be put", held, m.plan.Heap)
	}
	if opt := m.reading(7); opt.RowsPerBatch != 7 || opt.MaxAlloc != m.plan.Heap || opt.Room == nil {
		t.Errorf("files are read with %+v", opt)
	}
	debug.SetMemoryLimit(math.MaxInt64)
	succeed(t, append([]string{"run", "--quiet"}, small...)...)
	if now := debug.SetMemoryLimit(-1); now != math.MaxInt64 {
		t.Errorf("after a command the limit is %d", now)
	}
}

// TestTooMuchMemory: spaces for which there is no memory are refused before anything is
// opened, whoever takes them.
func TestTooMuchMemory(t *testing.T) {
	before := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(before)
	files := faultfs.New(disk.OS(), 1)
	f := flagsOf(t, "--host-memory=99%")
	f.watch = func(int) disk.FS { return files }
	if _, err := f.open(t.Context(), &notes{}); !errors.Is(err, headroom.ErrTooSmall) || files.Count() != 0 {
		t.Errorf("%v, after %d operations on the disk", err, files.Count())
	}
	top := &topology.Topology{Limits: topology.Limits{MemoryBytes: 1 << 30}}
	if _, err := (&engineFlags{}).divide(top, 800<<20); err != nil {
		t.Error(err)
	}
	if _, err := (&engineFlags{encrypt: true, disks: make(diskFlags, 5)}).divide(top, 800<<20); !errors.Is(err, headroom.ErrTooSmall) {
		t.Errorf("beside five volumes that encrypt: %v", err)
	}
	if _, err := (&engineFlags{beside: 200 << 20}).divide(top, 800<<20); !errors.Is(err, headroom.ErrTooSmall) {
		t.Errorf("beside what the command takes: %v", err)
	}
}

// TestExpected: a GPU's memory is the process's if the GPU is simulated.
func TestExpected(t *testing.T) {
	with := &topology.Topology{GPUs: make([]topology.GPU, 1)}
	for _, c := range []struct {
		backend spillway.Backend
		top     *topology.Topology
		want    int64
	}{
		{spillway.Sim, with, 30},
		{spillway.Auto, new(topology.Topology), 30},
		{spillway.Auto, with, 10},
		{spillway.CUDA, with, 10},
	} {
		cfg := spillway.Config{HostMemory: 10, GPUs: []spillway.GPU{{Backend: c.backend, Memory: 20}}}
		if got := expected(cfg, c.top); got != c.want {
			t.Errorf("%q: %d bytes, want %d", c.backend, got, c.want)
		}
	}
	cfg := spillway.Config{HostMemory: 10, GPUs: []spillway.GPU{{Backend: spillway.Sim, Memory: math.MaxInt64}}}
	if got := expected(cfg, with); got != math.MaxInt64 {
		t.Errorf("too much to be counted: %d", got)
	}
}
