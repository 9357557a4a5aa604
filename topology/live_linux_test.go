package topology_test

import (
	"runtime"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/topology"
)

// This machine, whatever it is: what cannot be wrong on any.
func TestThisMachine(t *testing.T) {
	top := discover(t, topology.Options{})
	t.Logf("\n%s", top)
	if top.Memory.TotalBytes <= 0 || top.Memory.FreeBytes > top.Memory.TotalBytes {
		t.Errorf("memory %+v", top.Memory)
	}
	if l := top.Limits; l.MemoryBytes <= 0 || l.MemoryBytes > top.Memory.TotalBytes || l.MemorySource == "" {
		t.Errorf("limits %+v of %+v", l, top.Memory)
	}
	if len(top.CPU.Online) == 0 || len(top.CPU.Allowed) == 0 {
		t.Errorf("CPUs %+v", top.CPU)
	}
	if l := top.Limits; l.CPUs < 1 || l.CPUs > len(top.CPU.Allowed) {
		t.Errorf("limits %+v of %d CPUs", l, len(top.CPU.Allowed))
	}
	onNodes := 0
	for _, n := range top.Nodes {
		onNodes += len(n.CPUs)
		if n.FreeBytes > n.MemoryBytes {
			t.Errorf("node %+v", n)
		}
	}
	// Some containers are shown CPUs that they do not have; that ends in a
	// warning. Else all agree.
	if !strings.Contains(said(top.Warnings), "CPUs") {
		if len(top.CPU.Allowed) != runtime.NumCPU() {
			t.Errorf("%s is allowed, want %d CPUs", top.CPU.Allowed, runtime.NumCPU())
		}
		if onNodes < len(top.CPU.Allowed) {
			t.Errorf("%d CPUs on nodes, %s is allowed", onNodes, top.CPU.Allowed)
		}
	}
	for _, d := range top.Disks {
		if d.SizeBytes <= 0 || d.Device == "" {
			t.Errorf("disk %+v", d)
		}
	}
}

func TestThisDirectory(t *testing.T) {
	for _, dir := range []string{t.TempDir(), "."} {
		l, err := topology.DiskOf(t.Context(), dir, topology.Options{})
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%+v", l)
		if l.FileSystem == "" || l.Mount == "" || l.TotalBytes <= 0 || l.FreeBytes < 0 || l.FreeBytes > l.TotalBytes {
			t.Errorf("got %+v", l)
		}
		if len(l.Disks) == 0 && len(l.Warnings) == 0 {
			t.Errorf("no disk, and no word of why: %+v", l)
		}
	}
}
