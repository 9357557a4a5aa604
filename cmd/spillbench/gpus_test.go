package main

import (
	"strings"
	"testing"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

// everyGPUWorked checks that a run used so many GPUs of one size: each held batches and is empty, and
// the generated table is larger than all of them together.
func everyGPUWorked(t *testing.T, doc report.Run, gpus int, memory int64) {
	t.Helper()
	if doc.Config.GPUMemoryBytes != int64(gpus)*memory {
		t.Errorf("the GPUs have %d bytes, want %d times %d", doc.Config.GPUMemoryBytes, gpus, memory)
	}
	for _, s := range doc.Spaces[:gpus] {
		if !strings.HasPrefix(s.ID, "gpu:") || s.CapacityBytes != memory || s.PeakBytes == 0 || s.EndBytes != 0 {
			t.Errorf("the GPU space is %+v", s)
		}
	}
	all := doc.Config.GPUMemoryBytes + doc.Config.HostMemoryBytes
	if doc.Input.Bytes < 2*all || doc.Verify.Batches != doc.Input.Batches || doc.Verify.Mismatches != 0 {
		t.Errorf("memories of %d bytes, %+v, %+v", all, doc.Input, doc.Verify)
	}
}

// TestSimulatedGPUs: --gpu sim simulates one GPU, or --gpus of them; every command that opens an
// engine has them all, and tables list each.
func TestSimulatedGPUs(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	for _, c := range []struct {
		args string
		gpus int
	}{{"", 1}, {"--gpus=4", 4}} {
		var doc report.Run
		args := append(strings.Fields(c.args), "run", "--gpu=sim", "--gpu-memory=512KiB", "--host-memory=1MiB")
		decode(t, succeed(t, append(args, "--json=-", "--quiet")...).stdout, &doc)
		if len(doc.Spaces) != c.gpus+2 {
			t.Fatalf("%q: the spaces are %+v", c.args, doc.Spaces)
		}
		everyGPUWorked(t, doc, c.gpus, 512<<10)
	}
	four := []string{"--gpu=sim", "--gpus=4", "--gpu-memory=1MiB", "--host-memory=1MiB"}
	table := succeed(t, append([]string{"run", "--format=table"}, four...)...).stdout
	for _, space := range []string{"gpu:0", "gpu:1", "gpu:2", "gpu:3"} {
		if !strings.Contains(table, "\n  "+space+" ") {
			t.Errorf("no row for %s in\n%s", space, table)
		}
	}
	var doc report.Verify
	file := writeTable(t, "t.arrow", 1, 100)
	decode(t, succeed(t, append([]string{"verify", file, "--json=-"}, four...)...).stdout, &doc)
	var one report.Verify
	decode(
		t,
		succeed(t, "verify", file, "--json=-", "--gpu=sim", "--gpu-memory=1MiB", "--host-memory=1MiB").stdout,
		&one,
	)
	if doc.Config.GPUMemoryBytes != 4<<20 || doc.Files[0].Edges <= one.Files[0].Edges {
		t.Errorf(
			"%d bytes, %d edges with four GPUs and %d with one",
			doc.Config.GPUMemoryBytes,
			doc.Files[0].Edges,
			one.Files[0].Edges,
		)
	}
}

// TestNoGPUsToLimit: without a GPU only simulated ones can be several.
func TestNoGPUsToLimit(t *testing.T) {
	t.Parallel()
	if realGPUs() > 0 {
		t.Skip("needs a machine without a GPU")
	}
	r := command(t, t.Context(), append([]string{"run", "--gpus=2"}, small...)...)
	if r.status != 3 || strings.Count(r.stderr, "\n") != 1 ||
		!strings.Contains(r.stderr, "--gpus 2: NVIDIA's driver shows 0 GPUs") ||
		!strings.Contains(r.stderr, "--gpu sim") {
		t.Errorf("ended with %d: %q", r.status, r.stderr)
	}
}
