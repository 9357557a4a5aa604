package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

// TestTopo: this machine has a CPU and a node, in the table and in the document.
func TestTopo(t *testing.T) {
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

// TestTopoRoot: a recorded machine is told, not this one.
func TestTopoRoot(t *testing.T) {
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

// TestTopoTellsDiskAsRunDoes: the same directory is the same disk to both.
func TestTopoTellsDiskAsRunDoes(t *testing.T) {
	var told report.Topo
	decode(t, succeed(t, "topo", "--json=-").stdout, &told)
	used := runJSON(t, append(small, "--passes=0")...)
	if told.Env.DirectIO != used.Env.DirectIO || told.Env.FileSystem != used.Env.FileSystem {
		t.Errorf("topo says %q, direct %v; run says %q, direct %v",
			told.Env.FileSystem, told.Env.DirectIO, used.Env.FileSystem, used.Env.DirectIO)
	}
}
