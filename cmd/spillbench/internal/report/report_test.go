package report

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/topology"
)

// keys lists the paths of all keys of a document: "env.cpu", "spaces[].id".
func keys(t *testing.T, document Document) []string {
	t.Helper()
	var buf bytes.Buffer
	if err := Print(&buf, JSON, document, nil); err != nil {
		t.Fatal(err)
	}
	var v any
	if err := json.Unmarshal(buf.Bytes(), &v); err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	var walk func(prefix string, v any)
	walk = func(prefix string, v any) {
		switch v := v.(type) {
		case map[string]any:
			for k, e := range v {
				walk(strings.TrimPrefix(prefix+"."+k, "."), e)
			}
		case []any:
			for _, e := range v {
				walk(prefix+"[]", e)
			}
		default:
			found[prefix] = true
		}
	}
	walk("", v)
	return slices.Sorted(maps.Keys(found))
}

// TestKeys: the schema's keys are what programs read; a change is a new version.
func TestKeys(t *testing.T) {
	header := []string{
		"command",
		"schema",
		"version",
		"go_version",
		"args[]",
		"time",
		"env.commit",
		"env.cores",
		"env.cpu",
		"env.direct_io",
		"env.driver",
		"env.file_system",
		"env.goarch",
		"env.goos",
		"env.gpu",
		"env.kernel",
		"env.memory",
		"env.pcie_link",
		"warnings[].cause",
		"warnings[].space",
		"warnings[].what",
		"warnings[].remedy",
		"warnings[].info",
	}
	warned := NewHeader("x", Env{}, []diag.Warning{{}})
	warned.Stamp([]string{"--quiet"}, time.Unix(0, 0))
	config := []string{
		"config.disks[].capacity_bytes",
		"config.disks[].dir",
		"config.gpu",
		"config.gpu_memory_bytes",
		"config.host_memory_bytes",
		"config.codec",
		"config.encrypt",
		"config.limit",
		"config.monitor_period_seconds",
		"config.moves_per_edge",
		"config.policy",
		"config.rows_per_batch",
		"config.stop",
		"config.stuck_after_seconds",
		"config.trigger",
		"config.write_ahead_bytes_per_s",
		"config.disk_slots",
		"config.disk_throttle_bytes_per_s",
		"config.faults[].spec",
		"config.faults[].hits",
	}
	disks := Config{Disks: []Disk{{}}, Faults: []Fault{{}}}
	for _, c := range []struct {
		document Document
		want     []string
	}{
		{&Run{Header: warned, Config: RunConfig{Config: disks}, Input: Input{Sources: []string{"x"}}, Spaces: []Space{{}},
			Edges: []Edge{{ByReason: map[string]int64{"work": 1}}}, Phases: []Phase{{}}},
			slices.Concat(header, config, []string{
				"config.partitions", "config.passes", "config.place", "config.repeat", "config.seed", "config.workers",
				"input.batches", "input.bytes", "input.rows", "input.sources[]",
				"verify.batches", "verify.checked", "verify.mismatches",
				"spaces[].backend", "spaces[].capacity_bytes", "spaces[].end_bytes", "spaces[].id", "spaces[].peak_bytes",
				"edges[].batches", "edges[].by_reason.work", "edges[].bytes", "edges[].copies", "edges[].from", "edges[].gib_per_s", "edges[].seconds", "edges[].to", "edges[].unmoved_bytes",
				"edges[].ahead_bytes", "edges[].ahead_in_vain_bytes", "edges[].ahead_used_bytes",
				"waits.count", "waits.max", "waits.p50", "waits.p99",
				"phases[].name", "phases[].seconds", "wall_seconds"})},
		{&Verify{Header: warned, Config: disks, Files: []File{{}}},
			slices.Concat(header, config, []string{"files[].batches", "files[].edges", "files[].error", "files[].mismatches", "files[].path"})},
		{&Quota{Header: warned, Holders: []leases.Holder{{Group: "x"}}}, slices.Concat(header, []string{
			"limit", "limit_bytes", "source", "ratio", "physical_bytes", "ledger", "group",
			"holders[].device", "holders[].group", "holders[].pid", "holders[].started", "holders[].quota", "holders[].live", "holders[].peak",
			"holders[].granted", "holders[].physical", "holders[].advertised",
		})},
		{&Trace{Header: warned, Traces: []Replayed{{Recorded: Outcome{Edges: []Edge{{ByReason: map[string]int64{"work": 1}}}}, Replays: []Outcome{{Edges: []Edge{{ByReason: map[string]int64{"work": 1}}}}}}}},
			slices.Concat(header, []string{"traces[].file", "traces[].events", "traces[].lost_events", "traces[].cut_off"}, outcome("traces[].recorded."), outcome("traces[].replays[]."))},
		{&Topo{Header: warned}, slices.Concat(header, []string{"topology", "paths.devices", "paths.paths"})},
	} {
		slices.Sort(c.want)
		if got := keys(t, c.document); !slices.Equal(got, c.want) {
			t.Errorf("%T has the keys\n%q, want\n%q", c.document, got, c.want)
		}
	}
}

// outcome lists the keys of an Outcome.
func outcome(prefix string) (keys []string) {
	for _, k := range []string{"policy", "error", "bytes", "fetched_bytes", "seconds", "stalled_seconds", "accesses", "found", "edges[].batches", "edges[].by_reason.work", "edges[].bytes",
		"edges[].copies", "edges[].ahead_bytes", "edges[].ahead_used_bytes", "edges[].ahead_in_vain_bytes", "edges[].from", "edges[].gib_per_s", "edges[].seconds", "edges[].to", "edges[].unmoved_bytes"} {
		keys = append(keys, prefix+k)
	}
	return keys
}

// TestRate: GiB a second, and nothing from nothing.
func TestRate(t *testing.T) {
	if got := Rate(3<<30, 2); got != 1.5 {
		t.Errorf("3 GiB in 2 s is %v", got)
	}
	if got := Rate(1, 0); got != 0 {
		t.Errorf("a byte in no time is %v", got)
	}
}

// TestPrint: a run that failed says so, and each edge stands with its reasons.
func TestPrint(t *testing.T) {
	r := &Run{
		Input:  Input{Sources: []string{"a.csv", "b.csv"}, Batches: 7, Bytes: 1 << 20},
		Verify: Verification{Checked: true, Batches: 7, Mismatches: 2},
		Edges: []Edge{
			{From: "gpu:0", To: "host:0", Batches: 3, Bytes: 1 << 20, ByReason: map[string]int64{"demand": 1 << 20}},
			{
				From:     "host:0",
				To:       "gpu:0",
				Batches:  2,
				Bytes:    1 << 10,
				Copies:   1,
				Unmoved:  3 << 20,
				ByReason: map[string]int64{"work": 1 << 10},
			},
		},
		Waits: Waits{Count: 2, P50: 0.0015, P99: 2.5, Max: 2.5},
	}
	r.Env.GPU = "sim"
	r.Config.Codec, r.Config.Encrypt = "s2", true
	var b strings.Builder
	if err := Print(&b, Table, r, []string{"take note"}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"a.csv, b.csv", "FAILED: 2 of 7", "for demand", "for work", "on a copy", "1.0 MiB", "3.0 MiB", "note: take note", "half within 1.5ms", "codec s2, encrypted on disk: yes,", "2.5s", "sim: no figure here is a real GPU's"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
}

// TestMachineEnv: what the topology knows is told, a GPU's link included.
func TestMachineEnv(t *testing.T) {
	top := &topology.Topology{
		CPU: topology.CPU{Model: "A CPU"}, Limits: topology.Limits{CPUs: 6, MemoryBytes: 1 << 30},
		GPUs: []topology.GPU{{Name: "A GPU", Driver: "nvidia", PCIeGeneration: 4, PCIeWidth: 16}},
	}
	e := MachineEnv(top)
	if e.CPU != "A CPU" || e.Cores != 6 || e.Memory != 1<<30 || e.GPU != "A GPU" || e.Driver != "nvidia" ||
		e.PCIeLink != "PCIe 4 x16" ||
		e.Kernel == "" {
		t.Errorf("%+v", e)
	}
	top.GPUs[0].Name, top.GPUs[0].DeviceID = "", "10de:2330"
	if e := MachineEnv(top); e.GPU != "10de:2330" {
		t.Errorf("of a GPU without a name: %+v", e)
	}
	if e := MachineEnv(new(topology.Topology)); e.Cores < 1 || e.GPU != "" || e.PCIeLink != "" {
		t.Errorf("of nothing: %+v", e)
	}
}
