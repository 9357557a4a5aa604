package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const root = "../.."

// TestReadme checks that the tables of README.md and docs/results/README.md have the newest figures.
func TestReadme(t *testing.T) {
	t.Parallel()
	if err := run(root, true, "", 0, ""); err != nil {
		t.Error(err)
	}
}

// TestCheckFails checks that -check finds figures that were typed into the table and figures that
// are missing, and that it accepts a page that was just written.
func TestCheckFails(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	results := filepath.Join(dir, "docs", "results", "readme")
	if err := os.MkdirAll(results, 0o700); err != nil {
		t.Fatal(err)
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	read := func(name string) string {
		t.Helper()
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	if err := run(dir, true, "", 0, ""); err == nil {
		t.Error("no figures")
	}
	figures := read(filepath.Join(root, "docs", "results", "readme", "2026-11-23.json"))
	page, file := filepath.Join(dir, "docs", "results", "README.md"), filepath.Join(results, "2026-11-23.json")
	write(file, figures)
	write(page, "before\n"+begin+"| typed |\n"+end+"after\n")
	if err := run(dir, true, "", 0, ""); err == nil || !strings.Contains(err.Error(), "go run ./scripts/results") {
		t.Errorf("a table that was typed: %v", err)
	}
	if err := run(dir, false, "", 0, ""); err != nil {
		t.Fatal(err)
	}
	if err := run(dir, true, "", 0, ""); err != nil {
		t.Error(err)
	}
	made := read(page)
	if !strings.HasPrefix(made, "before\n"+begin+"Measured on 23 November 2026: ") ||
		!strings.HasSuffix(made, " |\n"+end+"after\n") {
		t.Errorf("written:\n%s", made)
	}
	write(page, strings.Replace(made, "0.88", "0.99", 1))
	if err := run(dir, true, "", 0, ""); err == nil {
		t.Error("a figure that was changed by hand")
	}
	write(page, made)
	later := filepath.Join(results, "2026-11-24.json")
	next := strings.Replace(figures, `"2026-11-23"`, `"2026-11-24"`, 1)
	write(later, strings.Replace(next, "0.88", "0.77", 1))
	if err := run(dir, true, "", 0, ""); err == nil {
		t.Error("newer figures")
	}
	write(later, strings.Replace(figures, `"Move/host-disk/64MiB"`, `"Move/gone"`, 1))
	if err := run(dir, true, "", 0, ""); err == nil {
		t.Error("a file that is named for another day")
	}
	write(later, strings.Replace(next, `"Move/host-disk/64MiB"`, `"Move/gone"`, 1))
	if err := run(dir, false, "", 0, ""); err == nil || !strings.Contains(err.Error(), "Move/host-disk/64MiB") {
		t.Errorf("a figure that is missing: %v", err)
	}
	if read(page) != made {
		t.Error("an error has changed the page")
	}
	write(page, "no marks\n")
	if err := os.Remove(later); err != nil {
		t.Fatal(err)
	}
	if err := run(dir, false, "", 0, ""); err == nil {
		t.Error("a page without marks")
	}
}

// TestOutputs checks that the outputs of the commands are parsed into the figures of the table.
func TestOutputs(t *testing.T) {
	t.Parallel()
	samples := make(map[string][]float64)
	const printed = `goos: linux
pkg: github.com/spillway-db/spillway/convert
BenchmarkMove/host-disk/64MiB-2 	       5	         1.128 GiB/s	         2.048 limit-GiB/s	 0.7371 of-limit
BenchmarkMove/host-disk/64MiB-2 	       5	         1.128 GiB/s	         2.048 limit-GiB/s	 0.9 of-limit
BenchmarkReserveRelease/specific         	 7383480	       178.7 ns/op	       0 B/op	       0 allocs/op
BenchmarkSmallBatches/host-2         	     200	  58848598 ns/op	      6802 ns/drain	     29000 ns/put
PASS
`
	if err := ofBenchmarks([]byte(printed), samples); err != nil {
		t.Fatal(err)
	}
	if err := ofCompare([]byte(`{"ratio": {"write": 1.5, "read": 2.5, "read_min": 2}}`), samples); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]float64{
		"Move/host-disk/64MiB of-limit": 0.81855, "ReserveRelease/specific sec/op": 178.7e-9,
		"SmallBatches/host sec/put": 29e-6, "compare/arrow-ipc write": 1.5, "compare/arrow-ipc read": 2.5,
	} {
		if got := samples[key]; len(got) == 0 || median(got) < want*0.999 || median(got) > want*1.001 {
			t.Errorf("%s is %v, not %v", key, got, want)
		}
	}
	if err := ofCompare([]byte(`{}`), samples); err == nil {
		t.Error("no ratio")
	}
}

// TestReadmeComparisons checks the figures in the sentence that README has below its table.
func TestReadmeComparisons(t *testing.T) {
	t.Parallel()
	var figures Figures
	_, err := newest(filepath.Join(root, "docs", "results", "readme"), &figures, true)
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Join(strings.Fields(string(readme)), " ")
	for peer, keys := range map[string][2]string{
		"arrow-go's IPC files": {"compare/arrow-ipc write", "compare/arrow-ipc read"},
		"DuckDB 1.4.5":         {"duckdb/300MB store", "duckdb/300MB read"},
	} {
		write, err := figures.find(keys[0])
		if err != nil {
			t.Fatal(err)
		}
		read, err := figures.find(keys[1])
		if err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("%.1f / %.1f times as fast as %s", write.Median, read.Median, peer)
		if !strings.Contains(text, want) {
			t.Errorf("README.md does not have %q", want)
		}
	}
}
