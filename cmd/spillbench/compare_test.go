package main

import (
	"context"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/peer"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

// briefly is compare with little data.
var briefly = []string{"compare", "--peer=arrow-ipc", "--host-memory=1MiB", "--rounds=2"}

// TestCompare: every figure of the document is there, and a number above 0.
func TestCompare(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	var doc report.Compare
	decode(
		t,
		succeed(t, append(slices.Clone(briefly), "--json=-", "--repeat=2", "--workers=2", "--gpu=sim")...).stdout,
		&doc,
	)
	if doc.Schema != report.Schema || doc.Command != "compare" || doc.Env.Cores < 1 || doc.Peer.Name != "arrow-ipc" {
		t.Errorf("%+v", doc)
	}
	c := doc.Config
	if c.Peer != "arrow-ipc" || c.Rounds != 2 || c.Repeat != 2 || c.Workers != 2 || c.HostMemoryBytes != 1<<20 ||
		c.GPUMemoryBytes != 0 ||
		c.GPU != "none" ||
		len(c.Disks) != 1 {
		t.Errorf("%+v", c)
	}
	// Three times the memory, each batch twice.
	if in := doc.Input; in.Bytes < 5<<20 || in.Bytes > 7<<20 || in.Rows == 0 ||
		doc.Verify != (report.Verification{Checked: true, Batches: 2 * in.Batches}) {
		t.Errorf("%+v, %+v", in, doc.Verify)
	}
	for i, v := range []float64{
		doc.Ours.WriteGiBPerS, doc.Ours.ReadGiBPerS, doc.Ours.PutWriteGiBPerS, doc.Ours.Rewritten.WriteGiBPerS, doc.Ours.Rewritten.ReadGiBPerS,
		doc.Peer.WriteGiBPerS, doc.Peer.ReadGiBPerS, doc.Peer.Warm.WriteGiBPerS, doc.Peer.Warm.ReadGiBPerS,
		doc.Ratio.WriteMin, doc.Ratio.Write, doc.Ratio.WriteMax, doc.Ratio.ReadMin, doc.Ratio.Read, doc.Ratio.ReadMax, doc.WallSeconds,
	} {
		if !(v > 0) || math.IsInf(v, 0) {
			t.Errorf("figure %d is %v: %+v", i, v, doc)
		}
	}
}

// TestCompareFiles: the keys are the contract's, the files go through, and a
// table goes to people beside the document.
func TestCompareFiles(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	path := filepath.Join(t.TempDir(), "c.json")
	args := append(slices.Clone(briefly), "--rows-per-batch=2000", "--json", path)
	for _, name := range []string{"a.parquet", "b.arrow", "c.csv"} {
		args = append(args, "--input", writeTable(t, name, 3, 2000))
	}
	r := succeed(t, args...)
	for _, want := range []string{"write GiB/s", "read GiB/s", "spillway", "arrow-ipc", "warm", "ratio", "2 rounds", "verified: 18 batches"} {
		if !strings.Contains(r.stdout, want) {
			t.Errorf("no %q in\n%s", want, r.stdout)
		}
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var doc map[string]any
	decode(t, string(text), &doc)
	for _, keys := range []string{
		"schema", "command", "env", "config", "wall_seconds", "input.sources", "input.rows", "input.batches", "input.bytes", "ours.write_gib_per_s", "ours.read_gib_per_s",
		"peer.name", "peer.write_gib_per_s", "peer.read_gib_per_s", "peer.warm.write_gib_per_s", "peer.warm.read_gib_per_s", "ratio.write", "ratio.read",
	} {
		at := doc
		path := strings.Split(keys, ".")
		for _, key := range path[:len(path)-1] {
			at, _ = at[key].(map[string]any)
		}
		if _, ok := at[path[len(path)-1]]; !ok {
			t.Errorf("no %s in\n%s", keys, text)
		}
	}
}

// TestCompareErrors: wrong use, and what the machine cannot do, is reported in one line.
func TestCompareErrors(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	whole := writeTable(t, "t.parquet", 1, 60_000)
	for _, c := range []struct {
		name   string
		args   []string
		status int
		want   []string
	}{
		{"no peer", []string{"compare"}, 2, []string{"--peer arrow-ipc"}},
		{"another peer", []string{"compare", "--peer=duckdb"}, 2, []string{`"duckdb" for "--peer"`, "want arrow-ipc"}},
		{"no rounds", append(slices.Clone(briefly), "--rounds=0"), 2, []string{`"0" for "--rounds"`, "1 to 1000"}},
		{"no repeats", append(slices.Clone(briefly), "--repeat=0"), 2, []string{`"0" for "--repeat"`}},
		{"no workers", append(slices.Clone(briefly), "--workers=0"), 2, []string{`"0" for "--workers"`}},
		{"an argument", append(slices.Clone(briefly), whole), 2, []string{"unknown command", whole}},
		{"no such file", append(slices.Clone(briefly), "--input=/absent.arrow"), 2, []string{"/absent.arrow"}},
		{"no batches", append(slices.Clone(briefly), "--input", writeFile(t, "h.csv", "a,b\n")), 2, []string{"no batches", "with rows in it"}},
		{"no room for a batch", append(slices.Clone(briefly), "--input", whole), 3, []string{"t.parquet, batch 1", "--host-memory", "--rows-per-batch"}},
		{"disk full", append(slices.Clone(briefly), soon, "--disk", t.TempDir()+"=1MiB"), 3, []string{"--disk"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := command(t, t.Context(), c.args...)
			if r.status != c.status || strings.Count(r.stderr, "\n") != 1 || r.stdout != "" {
				t.Errorf("ended with %d, want %d: %q, %q", r.status, c.status, r.stderr, r.stdout)
			}
			for _, want := range c.want {
				if !strings.Contains(r.stderr, want) {
					t.Errorf("%q does not say %q", r.stderr, want)
				}
			}
		})
	}
}

// TestCompareFigures: of rounds whose times are known each figure is what the document says it is.
func TestCompareFigures(t *testing.T) {
	const gib, s = 1 << 30, time.Second
	var f compareFlags
	m := new(machine)
	doc := f.document(m, []string{"a"}, peer.Result{
		Rows: 5, Batches: 3, Bytes: 8 * gib, Verified: 7,
		Rounds: []peer.Round{
			{
				Ours: peer.Times{
					Write: 1 * s,
					Read:  2 * s,
				},
				Put:       6 * s,
				Rewritten: peer.Times{Write: 8 * s, Read: 16 * s},
				Peer:      peer.Times{Write: 4 * s, Read: 4 * s},
				Warm:      peer.Times{Write: 32 * s, Read: 64 * s},
			},
			{
				Ours: peer.Times{
					Write: 2 * s,
					Read:  1 * s,
				},
				Put:       2 * s,
				Rewritten: peer.Times{Write: 8 * s, Read: 16 * s},
				Peer:      peer.Times{Write: 6 * s, Read: 5 * s},
				Warm:      peer.Times{Write: 32 * s, Read: 64 * s},
			},
			{
				Ours: peer.Times{Write: 4 * s, Read: 4 * s}, Put: 0, Rewritten: peer.Times{Write: 4 * s, Read: 64 * s},
				Peer: peer.Times{Write: 4 * s, Read: 4 * s}, Warm: peer.Times{Write: 8 * s, Read: 80 * s},
			},
		},
	})
	ours := report.OurRates{
		Rates:           report.Rates{WriteGiBPerS: 4, ReadGiBPerS: 4},
		Rewritten:       report.Rates{WriteGiBPerS: 1, ReadGiBPerS: 0.5},
		PutWriteGiBPerS: 2,
	}
	theirs := report.PeerRates{
		Rates: report.Rates{WriteGiBPerS: 2, ReadGiBPerS: 2},
		Warm:  report.Rates{WriteGiBPerS: 0.25, ReadGiBPerS: 0.125},
	}
	if doc.Ours != ours || doc.Peer != theirs {
		t.Errorf("ours %+v, the peer's %+v", doc.Ours, doc.Peer)
	}
	if want := (report.Ratios{Write: 3, WriteMin: 1, WriteMax: 4, Read: 2, ReadMin: 1, ReadMax: 5}); doc.Ratio != want {
		t.Errorf("ratios %+v, want %+v", doc.Ratio, want)
	}
	if len(doc.Samples) != 3 {
		t.Fatalf("%+v", doc.Samples)
	}
	if got, want := doc.Samples[1], (report.RoundRates{
		Ours: report.OurRates{Rates: report.Rates{WriteGiBPerS: 4, ReadGiBPerS: 8}, PutWriteGiBPerS: 2, Rewritten: ours.Rewritten},
		Peer: report.Rates{WriteGiBPerS: 8.0 / 6, ReadGiBPerS: 1.6}, Warm: theirs.Warm,
	}); got != want {
		t.Errorf("the second round is %+v, want %+v", got, want)
	}
	if got := doc.Samples[0]; got.Ours.Rewritten.WriteGiBPerS != 1 || got.Warm.ReadGiBPerS != 0.125 {
		t.Errorf("the first round is %+v", got)
	}
	if doc.Verify != (report.Verification{Checked: true, Batches: 7}) || doc.Input.Bytes != 8*gib ||
		doc.Input.Batches != 3 ||
		doc.Input.Rows != 5 {
		t.Errorf("%+v, %+v", doc.Verify, doc.Input)
	}
}

// TestCompareNotes: where the comparison is not what its help promises, a note says so.
func TestCompareNotes(t *testing.T) {
	for _, c := range []struct {
		res   peer.Result
		env   report.Env
		disks []report.Disk
		want  string // "": nothing
	}{
		{peer.Result{}, report.Env{DirectIO: true}, []report.Disk{{Dir: "/a"}}, ""},
		{peer.Result{CacheStays: true}, report.Env{DirectIO: true}, []report.Disk{{Dir: "/a"}}, "the page cache cannot be dropped"},
		{peer.Result{}, report.Env{}, []report.Disk{{Dir: "/a"}}, "there is no direct I/O"},
		{peer.Result{}, report.Env{DirectIO: true}, []report.Disk{{Dir: "/a"}, {Dir: "/b"}}, "the peer's file is in /a alone"},
	} {
		m := &machine{notes: &notes{}, env: c.env, config: report.Config{Disks: c.disks}}
		new(compareFlags).note(m, c.res)
		if got := m.notes.lines(); len(got) != min(1, len(c.want)) || !strings.Contains(strings.Join(got, ""), c.want) {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}

// TestCompareInterrupted: it ends with 130, and leaves neither a result nor a file.
func TestCompareInterrupted(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "c.json")
	for _, after := range []time.Duration{0, time.Millisecond, 100 * time.Millisecond} {
		ctx, cancel := context.WithTimeout(t.Context(), after)
		r := command(t, ctx, append(slices.Clone(briefly), "--rounds=1000", "--json", path)...)
		cancel()
		if r.status != 130 || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("after %v: ended with %d: %q", after, r.status, r.stderr)
		}
		if _, err := os.Stat(path); !os.IsNotExist(err) {
			t.Errorf("a result is there: %v", err)
		}
	}
}

// TestMedian: of an even number the lower one in the middle.
func TestMedian(t *testing.T) {
	for _, c := range []struct {
		values []int
		want   int
	}{{[]int{7}, 7}, {[]int{9, 3}, 3}, {[]int{5, 1, 3}, 3}, {[]int{4, 2, 8, 6}, 4}} {
		if got := median(c.values); got != c.want {
			t.Errorf("of %v: %d, want %d", c.values, got, c.want)
		}
	}
}

// TestCompareThrottled: --disk-throttle holds for both sides, and the reported rate is that of the
// measurement. Each figure is of 94 ms. A sleep that was too long before, by up to 50 ms, may be
// made up for.
func TestCompareThrottled(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	const rate = 32 << 20
	var doc report.Compare
	decode(
		t,
		succeed(
			t,
			"compare",
			"--peer=arrow-ipc",
			"--host-memory=1MiB",
			"--rounds=1",
			"--codec=none",
			"--disk-throttle=32MiB",
			"--json=-",
		).stdout,
		&doc,
	)
	if doc.Config.DiskThrottleBytesPerS != rate {
		t.Errorf("%+v", doc.Config)
	}
	for i, v := range []float64{
		doc.Ours.WriteGiBPerS, doc.Ours.ReadGiBPerS, doc.Ours.Rewritten.WriteGiBPerS, doc.Ours.Rewritten.ReadGiBPerS, doc.Peer.WriteGiBPerS, doc.Peer.ReadGiBPerS,
	} {
		if v*(1<<30) > rate*2.5 {
			t.Errorf("figure %d is %v GiB/s, through a disk of %v: %+v", i, v, float64(rate)/(1<<30), doc)
		}
	}
}

// TestCompareFaults: the faults of --fault happen, and are reported.
func TestCompareFaults(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	for fault, want := range map[string]string{
		"op=write,kind=eio":         "input/output error",
		"op=read,kind=bitflip,at=9": "corrupt",
		"op=write,kind=enospc":      "no space",
	} {
		r := command(t, t.Context(), append(slices.Clone(briefly), "--fault="+fault, "--json=-")...)
		if r.status != 1 || !strings.Contains(r.stderr, want) ||
			!strings.Contains(r.stderr, "--fault "+fault+", hits: ") ||
			strings.Count(r.stderr, "\n") != 1 ||
			r.stdout != "" {
			t.Errorf("%s: ended with %d: %q, %q", fault, r.status, r.stderr, r.stdout)
		}
	}
	var doc report.Compare
	decode(t, chanceOfSeed(t, append(slices.Clone(briefly), "--fault=op=read,kind=short")...).stdout, &doc)
	if f := doc.Config.Faults; len(f) != 2 || f[0].Hits == 0 || f[1].Hits == 0 {
		t.Errorf("the faults are told as %+v", f)
	}
}

// TestCompareFindsCorruption: data that a side reads back wrong ends the command with 1, names what is
// wrong, and leaves no result.
func TestCompareFindsCorruption(t *testing.T) {
	t.Parallel()
	result := filepath.Join(t.TempDir(), "c.json")
	args := append(slices.Clone(briefly), "--fault=op=read,kind=bitflip,at=9", "--json", result)
	r := command(t, t.Context(), args...)
	if r.status != 1 || r.stdout != "" || strings.Count(r.stderr, "\n") != 1 ||
		!strings.Contains(r.stderr, "corrupt") ||
		!strings.Contains(r.stderr, "--fault op=read,kind=bitflip,at=9, hits: ") {
		t.Errorf("ended with %d: %q, %q", r.status, r.stderr, r.stdout)
	}
	if _, err := os.Stat(result); !os.IsNotExist(err) {
		t.Errorf("a result is there: %v", err)
	}
}

// TestRatios: writing is compared with writing, and reading with reading.
func TestRatios(t *testing.T) {
	var f compareFlags
	m := new(machine)
	doc := f.document(m, nil, peer.Result{
		Bytes: 1 << 30,
		Rounds: []peer.Round{{
			Ours: peer.Times{Write: 1 * time.Second, Read: 2 * time.Second}, Put: 3 * time.Second,
			Rewritten: peer.Times{Write: 1 * time.Second, Read: 4 * time.Second},
			Peer:      peer.Times{Write: 5 * time.Second, Read: 8 * time.Second},
			Warm:      peer.Times{Write: 2 * time.Second, Read: 1 * time.Second},
		}},
	})
	if r := doc.Ratio; r.Write != 5 || r.WriteMin != 5 || r.WriteMax != 5 || r.Read != 4 || r.ReadMin != 4 ||
		r.ReadMax != 4 {
		t.Errorf("%+v", r)
	}
	if o := doc.Ours; o.WriteGiBPerS != 1 || o.ReadGiBPerS != 0.5 || o.Rewritten.ReadGiBPerS != 0.25 ||
		o.PutWriteGiBPerS != 0.25 {
		t.Errorf("%+v", o)
	}
	if p := doc.Peer; p.WriteGiBPerS != 0.2 || p.ReadGiBPerS != 0.125 || p.Warm.WriteGiBPerS != 0.5 ||
		p.Warm.ReadGiBPerS != 1 {
		t.Errorf("%+v", p)
	}
}
