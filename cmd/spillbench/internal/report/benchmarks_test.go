package report

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"golang.org/x/perf/benchfmt"
)

// TestBenchmarksOfTwo: two documents in one text are told apart by their names, and what is known of the
// first machine alone is not said of the second.
func TestBenchmarksOfTwo(t *testing.T) {
	of := func(gpu string) Document {
		return &Run{Header: NewHeader("run", Env{CPU: "x", GPU: gpu}, nil), Edges: []Edge{{From: "a b\nc\u202e", To: "d", Batches: 1}}}
	}
	var b strings.Builder
	if err := Print(&b, BenchFmt, &Pair{of("sim"), of(""), []string{"a.json", "b.json"}}, nil); err != nil {
		t.Fatal(err)
	}
	var got []string
	for r := benchfmt.NewReader(strings.NewReader(b.String()), ""); r.Scan(); {
		if rec, ok := r.Result().(*benchfmt.Result); ok {
			got = append(got, strings.Join([]string{rec.GetConfig("result"), rec.GetConfig("cpu"), rec.GetConfig("gpu"), rec.Name.String()}, "|"))
		} else if rec, ok := r.Result().(*benchfmt.SyntaxError); ok {
			t.Error(rec)
		}
	}
	want := []string{"a.json|x|sim|Run/phase=all", "a.json|x|sim|Run/from=a-b-c\\u202e/to=d", "b.json|x||Run/phase=all", "b.json|x||Run/from=a-b-c\\u202e/to=d"}
	if !slices.Equal(got, want) || strings.Count(b.String(), "Unit GiB/s") != 1 {
		t.Errorf("%q, want %q, in\n%s", got, want, &b)
	}
}

// TestBenchmarks: benchstat's own reader takes each line, with the unit and the direction that it has,
// and there is a line for each sample.
func TestBenchmarks(t *testing.T) {
	pairs := BandwidthSamples{[]float64{1, 2}, []float64{3, 4}, []float64{5, 6}}
	rates := Rates{WriteGiBPerS: 2, ReadGiBPerS: 3}
	header := NewHeader("x", Env{CPU: "A  CPU\n(R)\x1b[31m", GPU: "sim"}, nil)
	for _, c := range []struct {
		document Document
		names    int
		lines    int
		units    []string
	}{
		{&Run{Header: header, Phases: []Phase{{Name: "load", Seconds: 1.5}, {Name: "drain"}}, Edges: []Edge{
			{From: "gpu:0", To: "host:0", Batches: 3, Seconds: 0.25, GiBPerS: 4}, {From: "a", To: "b"}}},
			4, 4, []string{"GiB/s", "ns/op"}},
		{&Bandwidth{Header: header, Rows: []BandwidthRow{{From: "gpu:0", To: "disk:0", Bytes: 4096, Threads: 2, State: "fresh", Samples: pairs}, {From: "gpu:0", To: "host:0", Samples: pairs}, {From: "gpu:0", To: "host:0", BothWays: true, Samples: pairs}, {Error: "none"}}},
			3, 6, []string{"GiB/s", "limit-GiB/s"}},
		{&Compare{Header: header, Peer: PeerRates{Name: "arrow-ipc"}, Samples: []RoundRates{{Ours: OurRates{Rates: rates, Rewritten: rates}, Peer: rates, Warm: rates}, {}, {}}},
			9, 27, []string{"GiB/s"}},
	} {
		var b strings.Builder
		if err := Print(&b, BenchFmt, c.document, nil); err != nil {
			t.Fatal(err)
		}
		lines := 0
		names, found := map[string]bool{}, map[string]bool{}
		r := benchfmt.NewReader(strings.NewReader(b.String()), "")
		for r.Scan() {
			switch rec := r.Result().(type) {
			case *benchfmt.Result:
				lines++
				names[rec.Name.String()] = true
				if cpu := rec.GetConfig("cpu"); cpu != `A CPU (R)\x1b[31m` {
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
		for unit, want := range map[string]int{"GiB/s": 1, "limit-GiB/s": 1, "ns/op": -1} {
			if got := r.Units().GetBetter(unit); got != want {
				t.Errorf("the direction of %s is %d, want %d", unit, got, want)
			}
		}
		if len(names) != c.names || lines != c.lines || !slices.Equal(slices.Sorted(maps.Keys(found)), c.units) {
			t.Errorf("%d lines of %d names, units %q in\n%s", lines, len(names), slices.Sorted(maps.Keys(found)), &b)
		}
	}
}
