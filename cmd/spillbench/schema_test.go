package main

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/test/testfs"
)

// TestDocumentsOfEveryCommand: what each command writes is what the schema says. All other tests
// that read a document check it too.
func TestDocumentsOfEveryCommand(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	into := map[string]report.Document{
		"run": &report.Run{}, "trace record": &report.Run{}, "verify": &report.Verify{}, "bandwidth": &report.Bandwidth{}, "compare": &report.Compare{},
		"topo": &report.Topo{}, "quota": &report.Quota{}, "trace replay": &report.Trace{}, "trace compare": &report.Trace{},
	}
	for name, c := range printing(t) {
		decode(t, command(t, t.Context(), append(slices.Clone(c.args), "--format=json", "-q")...).stdout, into[name])
	}
}

// TestUnusualDocuments: what few documents have is in the schema as well: differences, GPUs and
// network cards, holders, replays that got stuck.
func TestUnusualDocuments(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	for _, machine := range []string{"dgx-a100", "mig", "numa-unknown"} {
		root := testfs.MemoryDir(t)
		if err := testfs.UnpackTree(filepath.Join("../../topology/testdata", machine+".txtar"), root); err != nil {
			t.Fatal(err)
		}
		decode(t, succeed(t, "topo", "--root", root, "--format=json").stdout, &report.Topo{})
	}
	broken := writeFile(t, "broken.arrow", "ARROW1\x00\x00")
	decode(t, command(t, t.Context(), "verify", broken, writeTable(t, "t.arrow", 1, 100), "--json=-", "--fault=op=copy,kind=bitflip").stdout, &report.Verify{})
	if runtime.GOOS == "linux" || runtime.GOOS == "darwin" {
		dir := filepath.Join(t.TempDir(), "ledger")
		lease, err := leases.Join(leases.Terms{Dir: dir, Device: "GPU-1", Physical: 8 << 30})
		if err != nil {
			t.Fatal(err)
		}
		defer lease.Close()
		var doc report.Quota
		if decode(t, succeed(t, "quota", "--ledger", dir, "--format=json").stdout, &doc); len(doc.Holders) != 1 {
			t.Errorf("%+v", doc.Holders)
		}
	}
	trace := filepath.Join(t.TempDir(), "run.trace")
	succeed(t, append([]string{"trace", "record", trace, "-q"}, small...)...)
	var doc report.Trace
	decode(t, succeed(t, "trace", "replay", trace, "--disk-memory=64KiB", "--format=json").stdout, &doc)
	if doc.Traces[0].Replays[0].Error == "" {
		t.Errorf("a disk of 64 KiB was enough: %+v", doc)
	}
}

// TestSchemaCommand: it prints the schema, whole.
func TestSchemaCommand(t *testing.T) {
	t.Parallel()
	var v struct {
		Title string `json:"title"`
	}
	if err := json.Unmarshal([]byte(succeed(t, "schema").stdout), &v); err != nil || v.Title != report.Schema {
		t.Errorf("%+v, %v", v, err)
	}
	var stderr strings.Builder
	if status := Main(t.Context(), []string{"schema"}, full{}, &stderr); status != 3 || strings.Count(stderr.String(), "\n") != 1 {
		t.Error(fmt.Sprint(status), stderr.String())
	}
}
