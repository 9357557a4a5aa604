package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/gen"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

// runJSON runs the job with args and checks what every result must show.
func runJSON(t *testing.T, args ...string) report.Run {
	t.Helper()
	r := succeed(t, append(args, "--json=-")...)
	var doc report.Run
	decode(t, r.stdout, &doc)
	if doc.Schema != "spillway.spillbench/v1" || doc.Command != "run" {
		t.Errorf("%q is the schema and %q the command", doc.Schema, doc.Command)
	}
	env := doc.Env
	if env.CPU == "" || env.Cores < 1 || env.Memory < 1 || env.Kernel == "" || env.FileSystem == "" || env.GPU != "sim" {
		t.Errorf("env is %+v", env)
	}
	if len(doc.Spaces) != 3 {
		t.Fatalf("%d spaces", len(doc.Spaces))
	}
	for _, s := range doc.Spaces {
		if s.EndBytes != 0 || s.PeakBytes < 0 || s.PeakBytes > s.CapacityBytes {
			t.Errorf("%s: peak %d of %d, %d at the end", s.ID, s.PeakBytes, s.CapacityBytes, s.EndBytes)
		}
	}
	phases := []string{"load"}
	for i := range doc.Config.Passes {
		phases = append(phases, fmt.Sprintf("pass-%d", i+1))
	}
	phases = append(phases, "drain")
	sum := 0.0
	for i, p := range doc.Phases {
		if i >= len(phases) || p.Name != phases[i] {
			t.Fatalf("phases %v, want %v", doc.Phases, phases)
		}
		sum += p.Seconds
	}
	if len(doc.Phases) != len(phases) || doc.WallSeconds < sum {
		t.Errorf("%d phases of %d, %v of %v s", len(doc.Phases), len(phases), sum, doc.WallSeconds)
	}
	if want := doc.Input.Batches * int64(doc.Config.Passes); doc.Verify.Batches != want || doc.Verify.Mismatches != 0 || doc.Verify.Checked != (want > 0) {
		t.Errorf("verified %+v, want %d batches", doc.Verify, want)
	}
	return doc
}

// TestGeneratedTable: with no input, a table several times larger than the GPU
// goes down to the disk and comes back.
func TestGeneratedTable(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	doc := runJSON(t, append(small, "--passes=2")...)
	if doc.Input.Bytes < 5<<19 || doc.Input.Rows < 1 {
		t.Errorf("%d bytes, %d rows in 1 MiB of memory", doc.Input.Bytes, doc.Input.Rows)
	}
	moved := map[string]int64{}
	for _, e := range doc.Edges {
		if e.Batches < 1 || e.Bytes < 1 || e.From == e.To {
			t.Errorf("an edge that moved nothing: %+v", e)
		}
		sum := int64(0)
		for _, n := range e.ByReason {
			sum += n
		}
		if sum != e.Bytes {
			t.Errorf("%s to %s: reasons for %d of %d bytes", e.From, e.To, sum, e.Bytes)
		}
		moved[e.To] += e.Bytes
	}
	if moved["disk:0"] < doc.Input.Bytes/2 || moved["gpu:0"] < doc.Input.Bytes/2 {
		t.Errorf("%v moved, by space, of %d", moved, doc.Input.Bytes)
	}
}

// TestEncrypt: the table comes back whole from volumes that encrypt, and a disk that
// changes what it gives is not survived: nothing is read, and where small chunks are parts
// of what is sealed as a whole nothing can be written either.
func TestEncrypt(t *testing.T) {
	t.Parallel()
	if doc := runJSON(t, small...); doc.Config.Encrypt {
		t.Error("nobody asked for encryption")
	}
	doc := runJSON(t, append(small, "--encrypt", "--passes=2")...)
	moved := int64(0)
	for _, e := range doc.Edges {
		if e.To == "disk:0" {
			moved += e.Bytes
		}
	}
	if !doc.Config.Encrypt || moved < doc.Input.Bytes/2 {
		t.Errorf("encrypt is %t, and %d of %d bytes went to disk", doc.Config.Encrypt, moved, doc.Input.Bytes)
	}
	r := command(t, t.Context(), append([]string{"run"}, append(small, "--encrypt", "--fault=op=read,kind=bitflip")...)...)
	if r.status != 1 || !strings.Contains(r.stderr, "not what was written") && !strings.Contains(r.stderr, "--fault op=read,kind=bitflip, hits: ") {
		t.Errorf("ended with %d: %q", r.status, r.stderr)
	}
}

// TestRunFiles: files are loaded whether they are arguments or --input's, all of them.
func TestRunFiles(t *testing.T) {
	t.Parallel()
	a, b := writeTable(t, "a.arrow", 2, 500), writeTable(t, "b.parquet", 1, 300)
	doc := runJSON(t, append([]string{"run", a, "--input", b, a}, small...)...)
	if want := []string{b, a, a}; !slices.Equal(doc.Input.Sources, want) || doc.Input.Rows != 2*1000+300 {
		t.Errorf("%+v, want %q", doc.Input, want)
	}
}

// TestSeed: the same seed is the same table, another is another.
func TestSeed(t *testing.T) {
	t.Parallel()
	a := runJSON(t, append(small, "--passes=0", "--seed=5")...)
	b := runJSON(t, append(small, "--passes=0", "--seed=5", "--rows-per-batch=1000")...)
	c := runJSON(t, append(small, "--passes=0", "--seed=6")...)
	if a.Input.Rows != b.Input.Rows || a.Input.Bytes == c.Input.Bytes {
		t.Errorf("seeds 5, 5, 6: %+v, %+v, %+v", a.Input, b.Input, c.Input)
	}
}

// TestSources: what is put, in batches of what size and how many, and how files are read.
func TestSources(t *testing.T) {
	const mib = 1 << 20
	m := &machine{config: report.Config{GPUMemoryBytes: 20 * mib, HostMemoryBytes: 10 * mib}}
	for _, c := range []struct {
		rows        int
		bytes, want int64
	}{
		{0, 1, smallestGenerated / gen.RowBytes},
		{0, mib, mib / gen.RowBytes},
		{0, 1 << 40, largestGenerated / gen.RowBytes},
		{7, mib, 7},
	} {
		f := inputFlags{repeat: 2, rowsPerBatch: c.rows, seed: 9}
		if got, want := f.table(30*mib, c.bytes), (gen.Config{Seed: 9, Rows: 90 * mib / gen.RowBytes, RowsPerBatch: c.want}); got != want {
			t.Errorf("%+v: %+v, want %+v", c, got, want)
		}
		n := int64(0)
		for put := int64(0); put < 90*mib/gen.RowBytes; put += c.want {
			n += 2
		}
		if inputs, names, batches := f.sources(m, c.bytes); len(inputs) != 1 || len(names) != 1 || batches != n {
			t.Errorf("%+v: %d inputs, %q, %d batches; want %d", c, len(inputs), names, batches, n)
		}
	}
	table := writeTable(t, "t.parquet", 1, 5000)
	f := inputFlags{repeat: 1, workers: 1, files: []string{table, table + ".missing"}}
	if err := f.validate(); fail.Status(err) != fail.Usage || !strings.Contains(fail.Line(err), table+".missing") {
		t.Errorf("a file that is missing: %v", err)
	}
	m.plan.Heap = 1
	inputs, names, _ := f.sources(m, mib)
	if len(inputs) != 2 || !slices.Equal(names, f.files) {
		t.Fatalf("%d inputs, %q", len(inputs), names)
	}
	src, err := inputs[0].Open(t.Context())
	if err == nil {
		_, err = src.Next(t.Context())
		err = errors.Join(err, src.Close())
	}
	if err == nil {
		t.Error("a file was read into memory that the process may not have")
	}
}

// TestInputs: every format, cut, repeated, in partitions, placed both ways.
func TestInputs(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	for _, name := range []string{"t.parquet", "t.arrow", "t.arrows", "t.csv"} {
		t.Run(name, func(t *testing.T) {
			path := writeTable(t, name, 2, 3000)
			doc := runJSON(t, append(small, "--input", path, "--repeat=5", "--rows-per-batch=1000",
				"--partitions=3", "--workers=2", "--passes=2", "--place=fits", "--policy=lru")...)
			if doc.Input.Rows != 5*6000 || doc.Input.Batches != 5*6 || len(doc.Input.Sources) != 1 || doc.Input.Sources[0] != path {
				t.Errorf("%+v", doc.Input)
			}
			if c := doc.Config; c.Repeat != 5 || c.RowsPerBatch != 1000 || c.Partitions != 3 || c.Workers != 2 || c.Place != "fits" || c.Policy != "lru" {
				t.Errorf("%+v", c)
			}
		})
	}
}

// TestSeveralInputs: files of different schemas go side by side.
func TestSeveralInputs(t *testing.T) {
	t.Parallel()
	other := writeFile(t, "other.csv", "a,b,c\n1,2.5,x\n2,,y\n")
	doc := runJSON(t, append(small, "--input", writeTable(t, "t.arrow", 1, 100), "--input", other)...)
	if doc.Input.Rows != 102 || doc.Input.Batches != 2 || len(doc.Input.Sources) != 2 {
		t.Errorf("%+v", doc.Input)
	}
}

// TestOversizedBatch: what can never fit the GPU is worked on where it fits, and
// that is said.
func TestOversizedBatch(t *testing.T) {
	t.Parallel()
	path := writeTable(t, "t.arrow", 1, 60_000) // over 2 MiB
	args := []string{"run", "--input", path, "--gpu-memory=1MiB", "--host-memory=8MiB"}
	runJSON := command(t, t.Context(), append(args, "--json=-")...)
	if runJSON.status != 0 || !strings.Contains(runJSON.stderr, "larger than the space") {
		t.Errorf("ended with %d: %q", runJSON.status, runJSON.stderr)
	}
	if r := succeed(t, args...); !strings.Contains(r.stdout, "note: ") || !strings.Contains(r.stdout, "host:0") {
		t.Errorf("no note in\n%s", r.stdout)
	}
}

// TestSummary: the tables for people name what matters, and quiet means quiet.
func TestSummary(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	r := succeed(t, small...)
	for _, want := range []string{"load", "pass-1", "drain", "gpu:0", "host:0", "disk:0", "sim", "verified: all"} {
		if !strings.Contains(r.stdout, want) {
			t.Errorf("no %q in\n%s", want, r.stdout)
		}
	}
	if r := succeed(t, append(small, "--quiet")...); r.stdout != "" {
		t.Errorf("quiet printed %q", r.stdout)
	}
}

// TestWrongDigests: a run that finds wrong digests ends with 1, names the first batch, and prints its
// result.
func TestWrongDigests(t *testing.T) {
	t.Parallel()
	r := command(t, t.Context(), append(slices.Clone(small), "--fault=op=copy,kind=bitflip", "--json=-", "-q")...)
	var doc report.Run
	decode(t, r.stdout, &doc)
	if r.status != 1 || doc.Verify.Mismatches == 0 || strings.Count(r.stderr, "\n") != 1 ||
		!strings.Contains(r.stderr, "; the first: a generated table (seed 1), batch ") {
		t.Errorf("ended with %d, %+v: %s", r.status, doc.Verify, r.stderr)
	}
}

// TestInterrupted: a run that is cancelled before it begins, or while it loads,
// ends with 130 and leaves nothing.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if r := command(t, ctx, small...); r.status != 130 || strings.Count(r.stderr, "\n") != 1 {
		t.Errorf("cancelled before: %d, %q", r.status, r.stderr)
	}
	if runtime.GOOS != "linux" {
		return // what follows sees its spill file in /proc
	}
	// Cancelled once its spill file is open, which is before or while it loads.
	for _, args := range [][]string{
		{"run", "--gpu-memory=64MiB", "--host-memory=64MiB", "--repeat=1000"},
		append([]string{"verify"}, slices.Repeat([]string{writeTable(t, "t.arrow", 1, 100)}, 1000)...),
	} {
		dir := t.TempDir()
		ctx, cancel = context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			defer cancel()
			for ctx.Err() == nil && !holdsFileIn(dir) {
				runtime.Gosched()
			}
		}()
		out := t.TempDir()
		r := command(t, ctx, append(args, "--disk", dir, "--json", filepath.Join(out, "out.json"))...)
		cancel()
		<-done
		if r.status != 130 || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%s, cancelled while it works: %d, %q", args[0], r.status, r.stderr)
		}
		for _, d := range []string{dir, out} {
			if left, err := os.ReadDir(d); err != nil || len(left) != 0 {
				t.Errorf("%s left %v, %v", args[0], left, err)
			}
		}
	}
}

// holdsFileIn says whether this process has a file in dir open, named or not.
func holdsFileIn(dir string) bool {
	fds, _ := os.ReadDir("/proc/self/fd")
	for _, fd := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.HasPrefix(to, dir+"/") {
			return true
		}
	}
	return false
}

// TestFailureIsOneLine: the notes of a run that failed are not printed beside its error.
func TestFailureIsOneLine(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	noted := writeTable(t, "t.arrow", 1, 60_000) // too large for the GPU, which is a note
	whole, err := os.ReadFile(writeTable(t, "t.arrows", 40, 100))
	if err != nil {
		t.Fatal(err)
	}
	cut := writeFile(t, "cut.arrows", string(whole[:len(whole)/2+3]))
	empty := writeFile(t, "header.csv", "a,b\n") // verify has a note on it
	for _, args := range [][]string{
		{"run", "--input", noted, "--input", cut, "--gpu-memory=1MiB", "--host-memory=8MiB"},
		{"verify", empty, cut},
	} {
		r := command(t, t.Context(), append(args, "--json=-")...)
		if r.status != 2 || strings.Count(r.stderr, "\n") != 1 || !strings.Contains(r.stderr, "cut.arrows") {
			t.Errorf("%q ended with %d: %q", args, r.status, r.stderr)
		}
	}
}

// TestNoBatches: where there is nothing to do, run is used wrongly, and verify,
// which was asked whether the file is right, says that it was read and no more.
func TestNoBatches(t *testing.T) {
	t.Parallel()
	path := writeFile(t, "header.csv", "a,b\n")
	if r := command(t, t.Context(), "run", "--input", path); r.status != 2 || !strings.Contains(r.stderr, "no batches") {
		t.Errorf("run ended with %d: %q", r.status, r.stderr)
	}
	if r := succeed(t, "verify", path); !strings.Contains(r.stdout, path+" holds no batches") {
		t.Errorf("verify printed %q", r.stdout)
	}
	r := command(t, t.Context(), "verify", path, "--json=-")
	if r.status != 0 || strings.Count(r.stderr, path+" holds no batches") != 1 {
		t.Errorf("verify ended with %d: %q", r.status, r.stderr)
	}
}

// TestRunWithoutPasses: what was not checked is not said to be, and a peak is what was in
// use and not what there is.
func TestRunWithoutPasses(t *testing.T) {
	t.Parallel()
	doc := runJSON(t, append(small, "--passes=0")...)
	if doc.Verify.Checked || doc.Verify.Batches != 0 {
		t.Errorf("nothing was checked: %+v", doc.Verify)
	}
	for _, s := range doc.Spaces {
		if s.ID == "disk:0" && (s.PeakBytes <= 0 || s.PeakBytes >= s.CapacityBytes) {
			t.Errorf("%+v", s)
		}
	}
}
