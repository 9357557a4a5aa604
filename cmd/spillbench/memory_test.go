package main

import (
	"context"
	"errors"
	"math"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/headroom"
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
	m, err := f.open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer m.engine.Close()
	if m.opened.Topology.Limits.MemoryBytes == 0 {
		t.Skip("needs a system that tells how much memory there is")
	}
	now := debug.SetMemoryLimit(-1)
	if now != m.plan.Heap || now <= 0 || now > m.opened.Topology.Limits.MemoryBytes-12<<20 {
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

// TestTooMuchMemory: spaces for which there is no memory are refused before anything is opened,
// whatever takes them.
func TestTooMuchMemory(t *testing.T) {
	before := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(before)
	f := flagsOf(t, "--host-memory=99%")
	var small *headroom.TooSmallError
	if _, err := f.open(t.Context()); !errors.As(err, &small) {
		t.Error(err)
	}
	top := &topology.Topology{Limits: topology.Limits{MemoryBytes: 1 << 30}}
	for name, c := range map[string]struct {
		args   []string
		disks  int
		beside int64
		fits   bool
	}{
		"alone":                            {nil, 1, 0, true},
		"beside five volumes that encrypt": {[]string{"--encrypt"}, 5, 0, false},
		"beside the command's own buffers": {nil, 1, 200 << 20, false},
	} {
		f := flagsOf(t, c.args...)
		f.disks, f.buffers = slices.Repeat(f.disks, c.disks), c.beside
		err := f.addDisks(t.Context(), f.newMachine(top), 800<<20)
		if c.fits != (err == nil) || err != nil && !errors.As(err, &small) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestMemoryOfSpaces: the process's memory has room for the host space and for every simulated GPU.
func TestMemoryOfSpaces(t *testing.T) {
	for _, c := range []struct {
		args []string
		want int64
	}{
		{nil, 12 << 20},
		{[]string{"--gpus=4"}, 36 << 20},
		{[]string{"--gpu=auto", "--gpus=1"}, 12 << 20}, // where there is no GPU
		{[]string{"--gpus=4", "--gpu-memory=4EiB"}, math.MaxInt64},
	} {
		if len(c.args) > 0 && c.args[0] == "--gpu=auto" && realGPUs() > 0 {
			continue
		}
		f := flagsOf(t, append([]string{"--gpu-memory=8MiB", "--host-memory=4MiB"}, c.args...)...)
		top := &topology.Topology{Limits: topology.Limits{MemoryBytes: 1}} // so that nothing fits
		var small *headroom.TooSmallError
		if err := f.configure(t.Context(), f.newMachine(top)); !errors.As(err, &small) || small.Spaces != c.want {
			t.Errorf("%q: %+v, want spaces of %d bytes", c.args, err, c.want)
		}
	}
}

// TestSpillDirectoriesInMemory: what is spilled there is the process's memory. So those without
// a size share what is left of it, and what does not fit is refused.
func TestSpillDirectoriesInMemory(t *testing.T) {
	const mib = 1 << 20
	before := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(before)
	// Of 1 GiB 32 MiB are for code and such, and 56 for the heap at least: 936 are left.
	for name, c := range map[string]struct {
		limit, spaces int64
		free          int64 // of each file system
		disks         []string
		want          []int64
		spilled       int64
		says          string // of the error
	}{
		"on a disk":           {1024, 128, 4096, []string{"/disk"}, []int64{0}, 0, ""},
		"too large on a disk": {1024, 128, 4096, []string{"/disk=4000MiB"}, []int64{4000}, 0, ""},
		"three of one mount":  {1024, 128, 600, []string{"/tmpfs", "/tmpfs/b", "/tmpfs/c"}, []int64{100, 100, 100}, 300, ""},
		"shares of one mount": {1024, 128, 600, []string{"/tmpfs=100%", "/tmpfs/b=50%"}, []int64{300, 150}, 450, ""},
		"a share of a disk":   {1024, 128, 600, []string{"/disk=50%"}, []int64{0}, 0, ""},
		"beside a size":       {1024, 128, 600, []string{"/tmpfs=200MiB", "/tmpfs/b"}, []int64{200, 200}, 400, ""},
		"half of the free":    {1024, 128, 512, []string{"/tmpfs"}, []int64{256}, 256, ""},
		"what is left":        {1024, 128, 4096, []string{"/tmpfs"}, []int64{808}, 808, ""},
		"two share":           {1024, 128, 4096, []string{"/tmpfs", "/tmpfs/b"}, []int64{404, 404}, 808, ""},
		"one beside a disk":   {1024, 128, 4096, []string{"/disk=4000MiB", "/tmpfs"}, []int64{4000, 808}, 808, ""},
		"just fits":           {1024, 128, 4096, []string{"/tmpfs=808MiB"}, []int64{808}, 808, ""},
		"a page too large": {1024, 128, 4096, []string{"/tmpfs=847253504"}, nil, 0,
			"the spill directory /tmpfs is in memory (tmpfs), of which 847249408 B are left, and not 847253504 B: the process may have 1.0 GiB (memory.max)"},
		"a share of nothing": {1024, 128, 600, []string{"/tmpfs=600MiB", "/tmpfs/b=50%"}, nil, 0,
			"--disk /tmpfs/b=50%: the sizes of other directories take all 600.0 MiB that are free there (give them less"},
		"two do not fit": {1024, 128, 4096, []string{"/tmpfs=800MiB", "/tmpfs/b=9MiB"}, nil, 0,
			"the spill directory /tmpfs/b is in memory (tmpfs), of which 8.0 MiB are left, and not 9.0 MiB"},
		"nothing is left": {1024, 936, 4096, []string{"/tmpfs"}, nil, 0,
			"the spill directory /tmpfs is in memory (tmpfs), of which 0 B are left, and not 4.0 KiB"},
		"the limit is not told": {0, 128, 4096, []string{"/tmpfs"}, []int64{2048}, 2048, ""},
	} {
		t.Run(name, func(t *testing.T) {
			e := engineFlags{diskOf: func(_ context.Context, dir string, _ topology.Options) (topology.Location, error) {
				top := strings.Split(dir, "/")[1]
				return topology.Location{FreeBytes: c.free * mib, FileSystem: top, Mount: "/" + top}, nil
			}}
			e.probe = func(string) error { return nil }
			for _, d := range c.disks {
				must(e.disks.add(d))
			}
			top := &topology.Topology{Limits: topology.Limits{MemoryBytes: c.limit * mib, MemorySource: "memory.max"}}
			m := e.newMachine(top)
			err := e.addDisks(t.Context(), m, c.spaces*mib)
			plan := m.plan
			if c.says != "" {
				line := fail.Line(err)
				if fail.Status(err) != 3 || !strings.Contains(line, c.says) || !strings.Contains(line, "name a directory ") {
					t.Errorf("status %d: %s, want %q", fail.Status(err), line, c.says)
				}
				return
			}
			heap := max(0, c.limit-32-c.spaces-c.spilled) * mib
			if err != nil || plan.Heap != heap {
				t.Fatalf("a heap of %d bytes, want %d: %v", plan.Heap, heap, err)
			}
			for i, want := range c.want {
				if got := m.opened.Disks[i].Capacity; got.Bytes != want*mib {
					t.Errorf("%s has %s, want %d MiB", c.disks[i], got, want)
				}
			}
			if c.limit > 0 && plan.Heap < headroom.LeastHeap {
				t.Errorf("there is no room for the heap: %d", plan.Heap)
			}
		})
	}
}
