package main

import (
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

// quickly is reserve with the flags that make it shortest.
var quickly = []string{"reserve", "--duration=1ms", "--goroutines=4"}

// TestReserve: a table names the scenarios and both sides; every figure of the document in a file
// beside it is there, and a number above 0.
func TestReserve(t *testing.T) {
	path := filepath.Join(t.TempDir(), "r.json")
	const largest = 1234 // TestMemoryOfContainers has a crowd of as many as there is memory for
	f := reserveFlags{output: outputFlags{json: fileFlag(path)}, goroutines: 4, rounds: minReserveRounds, duration: minRound, crowd: largest, releases: 50}
	var stdout, stderr strings.Builder
	if err := reserve(t.Context(), &f, &stdout, &stderr); err != nil || stderr.Len() > 0 {
		t.Fatal(err, stderr.String())
	}
	for _, want := range []string{"manager", "semaphore", "fits", "8-slots", "1-slot", fmt.Sprint(largest), "11 pairs of rounds of 1ms"} {
		if !strings.Contains(stdout.String(), want) {
			t.Errorf("no %q in\n%s", want, &stdout)
		}
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var doc report.Reserve
	decode(t, string(text), &doc)
	if doc.Schema != report.Schema || doc.Command != "reserve" || doc.Env.Cores < 1 || doc.Config.Rounds != 11 || doc.Config.RoundSeconds != 0.001 {
		t.Errorf("%+v", doc)
	}
	figures := []float64{doc.UncontendedNs, doc.SemaphoreUncontendedNs, doc.WallSeconds}
	var scenarios []string
	for _, c := range doc.Contended {
		scenarios = append(scenarios, c.Scenario)
		if c.Goroutines != 4 || c.RatioMin > c.Ratio || c.Ratio > c.RatioMax {
			t.Errorf("%+v", c)
		}
		figures = append(figures, c.OpsPerS, c.SemaphoreOpsPerS, c.RatioMin)
	}
	if want := []string{"fits", "8-slots", "1-slot"}; !slices.Equal(scenarios, want) {
		t.Errorf("scenarios are %q; want %q", scenarios, want)
	}
	if len(doc.Waiters) != 2 || doc.Waiters[0].Waiters != 100 || doc.Waiters[1].Waiters != largest {
		t.Errorf("waiters are %+v", doc.Waiters)
	}
	for _, w := range doc.Waiters {
		figures = append(figures, w.NsPerRelease, w.SemaphoreNsPerRelease, w.NsPerTurn, w.SemaphoreNsPerTurn)
	}
	type sampled struct {
		of     []float64
		figure float64
	}
	samples := map[string]sampled{
		"uncontended":           {doc.Samples.UncontendedNs, doc.UncontendedNs},
		"uncontended semaphore": {doc.Samples.SemaphoreUncontendedNs, doc.SemaphoreUncontendedNs},
	}
	for _, c := range doc.Contended {
		samples[c.Scenario] = sampled{c.Samples.OpsPerS, c.OpsPerS}
	}
	for _, w := range doc.Waiters {
		samples[fmt.Sprint(w.Waiters)] = sampled{w.Samples.NsPerTurn, w.NsPerTurn}
	}
	for name, s := range samples {
		if len(s.of) != minReserveRounds || median(s.of) != s.figure {
			t.Errorf("%s: %v is not the median of %v", name, s.figure, s.of)
		}
	}
	for i, v := range figures {
		if !(v > 0) || math.IsInf(v, 0) {
			t.Errorf("figure %d is %v: %+v", i, v, doc)
		}
	}
	if doc.AllocsPerOp < 0 || doc.AllocsPerOp > 100 {
		t.Errorf("%v allocations", doc.AllocsPerOp)
	}
}

// TestReserveInterrupted: it ends with 130 and writes nothing.
func TestReserveInterrupted(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	path := filepath.Join(t.TempDir(), "r.json")
	if r := command(t, ctx, append(slices.Clone(quickly), "--json", path)...); r.status != 130 || strings.Count(r.stderr, "\n") != 1 {
		t.Errorf("ended with %d: %q", r.status, r.stderr)
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("a result is there: %v", err)
	}
}
