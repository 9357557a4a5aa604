package report

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"golang.org/x/perf/benchfmt"
)

// TestBenchmarks: benchstat's own reader takes each line, with the unit and the direction that it has;
// no two lines of a document have one name.
func TestBenchmarks(t *testing.T) {
	rates := Rates{WriteGiBPerS: 2, ReadGiBPerS: 3}
	header := NewHeader("x", Env{CPU: "A  CPU\n(R)", GPU: "sim"}, nil)
	for _, c := range []struct {
		document Measured
		lines    int
		units    []string
	}{
		{&Run{Header: header, Phases: []Phase{{"load", 1.5}, {"drain", 0}}, Edges: []Edge{{From: "gpu:0", To: "host:0", Batches: 3, Seconds: 0.25, GiBPerS: 4}, {From: "a", To: "b"}}},
			4, []string{"GiB/s", "ns/op"}},
		{&Bandwidth{Header: header, Rows: []BandwidthRow{{From: "gpu:0", To: "disk:0", Bytes: 4096, Threads: 2, State: "fresh"}, {From: "gpu:0", To: "host:0"}, {From: "gpu:0", To: "host:0", BothWays: true}, {Error: "none"}}},
			3, []string{"GiB/s", "limit-GiB/s"}},
		{&Compare{Header: header, Ours: OurRates{Rates: rates, Rewritten: rates}, Peer: PeerRates{Name: "arrow-ipc", Rates: rates, Warm: rates}},
			9, []string{"GiB/s"}},
		{&Reserve{Header: header, UncontendedNs: 90.5, Contended: []Contended{{Scenario: "fits", Goroutines: 16}}, Waiters: []Waiters{{Waiters: 100}}},
			6, []string{"allocs/op", "ns/op", "ns/release", "ns/turn", "ops/s"}},
	} {
		var b strings.Builder
		if err := WriteBenchmarks(&b, c.document); err != nil {
			t.Fatal(err)
		}
		names, found := map[string]bool{}, map[string]bool{}
		r := benchfmt.NewReader(strings.NewReader(b.String()), "")
		for r.Scan() {
			switch rec := r.Result().(type) {
			case *benchfmt.Result:
				if names[rec.Name.String()] {
					t.Errorf("%s is there twice in\n%s", rec.Name, &b)
				}
				names[rec.Name.String()] = true
				if cpu := rec.GetConfig("cpu"); cpu != "A CPU (R)" {
					t.Errorf("the CPU is %q", cpu)
				}
				for _, v := range rec.Values {
					unit := v.OrigUnit
					if unit == "" {
						unit = v.Unit
					}
					found[unit] = true
				}
			case *benchfmt.SyntaxError:
				t.Errorf("%v in\n%s", rec, &b)
			}
		}
		if err := r.Err(); err != nil {
			t.Error(err)
		}
		for unit, more := range units {
			want := -1
			if more {
				want = 1
			}
			if got := r.Units().GetBetter(unit); found[unit] && got != want {
				t.Errorf("the direction of %s is %d, want %d", unit, got, want)
			}
		}
		if len(names) != c.lines || !slices.Equal(slices.Sorted(maps.Keys(found)), c.units) {
			t.Errorf("%d lines, units %q in\n%s", len(names), slices.Sorted(maps.Keys(found)), &b)
		}
	}
}
