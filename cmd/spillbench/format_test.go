package main

import (
	"encoding/csv"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/perf/benchfmt"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

// printing returns short calls of the commands that print results, and the names of their benchmark
// figures, if they have some.
func printing(t *testing.T) map[string]struct {
	args    []string
	figures []string
} {
	t.Helper()
	trace := filepath.Join(t.TempDir(), "run.trace")
	succeed(t, append([]string{"trace", "record", trace, "-q"}, small...)...)
	return map[string]struct {
		args    []string
		figures []string
	}{
		"run": {
			append([]string{"run"}, small...),
			[]string{"Run/phase=load", "Run/phase=all", "Run/from=gpu:0/to=disk:0"},
		},
		"trace record": {
			append([]string{"trace", "record", filepath.Join(t.TempDir(), "again.trace")}, small...),
			[]string{"Run/phase=load"},
		},
		"verify": {[]string{"verify", writeTable(t, "a,b.arrow", 2, 100)}, nil},
		"bandwidth": {
			narrow(t, "--sizes=64KiB", "--threads=1"),
			[]string{"Bandwidth/from=gpu:0/to=disk:0/bytes=65536/moves=1/state=rewritten"},
		},
		"compare":       {briefly, []string{"Compare/side=spillway/op=read", "Compare/side=arrow-ipc-warm/op=write"}},
		"topo":          {[]string{"topo"}, nil},
		"quota":         {[]string{"quota"}, nil},
		"trace replay":  {[]string{"trace", "replay", trace}, nil},
		"trace compare": {[]string{"trace", "compare", trace, trace}, nil},
	}
}

// TestFormats: each command prints its result in each format, and what reads that format can.
func TestFormats(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	for name, c := range printing(t) {
		t.Run(name, func(t *testing.T) {
			as := func(f report.Format) string {
				r := command(t, t.Context(), append(slices.Clone(c.args), "--format="+string(f), "-q")...)
				if r.status != 0 || r.stderr != "" {
					t.Fatalf("%s: ended with %d: %q", f, r.status, r.stderr)
				}
				return r.stdout
			}
			var doc struct{ Command string }
			if err := json.Unmarshal(
				[]byte(as(report.JSON)),
				&doc,
			); err != nil ||
				doc.Command != strings.Replace(name, "trace record", "run", 1) {
				t.Errorf("JSON of %q, %v", doc.Command, err)
			}
			for block := range strings.SplitSeq(as(report.CSV), "\n\n") {
				rows, err := csv.NewReader(strings.NewReader(block)).ReadAll() // refuses rows of different lengths
				if err != nil || len(rows) < 2 || slices.Contains(rows[0], "") || slices.Contains(rows[0], "GiB/s") {
					t.Errorf("CSV %q: %v", block, err)
				}
			}
			columns := 0
			for line := range strings.Lines(as(report.Markdown)) {
				n := strings.Count(line, "|")
				if n > 0 && columns > 0 && n != columns ||
					n > 0 && !strings.HasPrefix(line, "| ") && !strings.HasPrefix(line, "|:") {
					t.Errorf("a row of another length, or after a line of text: %q", line)
				}
				columns = n
			}
			if c.figures == nil {
				return
			}
			var got []string
			r := benchfmt.NewReader(strings.NewReader(as(report.BenchFmt)), name)
			for r.Scan() {
				if rec, ok := r.Result().(*benchfmt.Result); ok {
					got = append(got, rec.Name.String())
				} else if rec, ok := r.Result().(*benchfmt.SyntaxError); ok {
					t.Error(rec)
				}
			}
			for _, want := range c.figures {
				if !slices.Contains(got, want) {
					t.Errorf("no %s in %q", want, got)
				}
			}
		})
	}
}

// TestFormatBesideJSON: a file with the document does not depend on what is printed, and notes go to
// standard error where what is printed has no place for them.
func TestFormatBesideJSON(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	path, file := filepath.Join(t.TempDir(), "r.json"), writeFile(t, "none.csv", "a,b\n")
	for format, noted := range map[string]string{"table": "stdout", "markdown": "stdout", "csv": "stderr", "json": "stderr"} {
		r := command(t, t.Context(), "verify", file, "--format="+format, "--json", path)
		for name, text := range map[string]string{"stdout": r.stdout, "stderr": r.stderr} {
			if strings.Contains(text, "note: "+file+" holds no batches") != (name == noted) {
				t.Errorf("%s: %s has %q", format, name, text)
			}
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var doc report.Verify
		decode(t, string(text), &doc)
		if format == "json" && r.stdout != string(text) {
			t.Errorf("printed %q, and wrote %q", r.stdout, text)
		}
	}
}
