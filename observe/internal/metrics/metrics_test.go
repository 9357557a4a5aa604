package metrics

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the table of docs/operating.md")

const (
	page  = "../../../docs/operating.md"
	begin = "<!-- metrics: go test ./observe/internal/metrics -update -->\n"
	end   = "<!-- end of metrics -->\n"
)

// The table of docs/operating.md has all metrics, and no other.
func TestDocs(t *testing.T) {
	var table strings.Builder
	table.WriteString("| metric | type | labels | unit | what |\n|---|---|---|---|---|\n")
	for _, m := range All(Filter{}) {
		fmt.Fprintf(&table, "| `%s` | %s | %s | %s | %s |\n", m.Prometheus(), []string{Gauge: "gauge", Counter: "counter", Histogram: "histogram"}[m.Kind], strings.Join(m.Labels, ", "), m.Unit, m.Help)
	}
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), begin)
	have, after, ended := strings.Cut(rest, end)
	if !ok || !ended {
		t.Fatalf("%s has no place for the table", page)
	}
	if have == table.String() {
		return
	}
	if !*update {
		t.Fatalf("the table of %s is another; go test ./observe/internal/metrics -update writes it", page)
	}
	if err := os.WriteFile(page, []byte(before+begin+table.String()+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestNames(t *testing.T) {
	for _, c := range []struct {
		m                Measure
		prometheus, otel string
	}{
		{Measure{Group: "space", Name: "capacity", Unit: Bytes, Kind: Gauge}, "spillway_space_capacity_bytes", "spillway.space.capacity"},
		{Measure{Group: "blocked", Unit: Seconds, Kind: Counter}, "spillway_blocked_seconds_total", "spillway.blocked"},
		{Measure{Group: "disk", Name: "write_bandwidth", Unit: BytesPerSecond, Kind: Gauge}, "spillway_disk_write_bandwidth_bytes_per_second", "spillway.disk.write_bandwidth"},
		{Measure{Group: "edge", Name: "copies", Unit: "{batch}", Kind: Counter}, "spillway_edge_copies_total", "spillway.edge.copies"},
	} {
		if c.m.Prometheus() != c.prometheus || c.m.OpenTelemetry() != c.otel {
			t.Errorf("%s and %s, want %s and %s", c.m.Prometheus(), c.m.OpenTelemetry(), c.prometheus, c.otel)
		}
	}
}
