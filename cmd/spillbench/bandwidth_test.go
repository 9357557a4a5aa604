package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// narrow is bandwidth with the flags that make it shortest.
func narrow(t *testing.T, more ...string) []string {
	t.Helper()
	return append(
		[]string{
			"bandwidth",
			"--codec=none",
			"--gpu-memory=1MiB",
			"--host-memory=1MiB",
			"--disk=" + t.TempDir() + "=2MiB",
		},
		more...)
}

// fourLoads is narrow with two sizes, and two numbers of threads.
func fourLoads(t *testing.T, more ...string) []string {
	t.Helper()
	return narrow(t, append(more, "--sizes=64KiB,128KiB", "--threads=1,2")...)
}

// TestBandwidth: a row for each edge, load and state, with figures above 0.
func TestBandwidth(t *testing.T) {
	t.Parallel()
	var doc report.Bandwidth
	decode(t, succeed(t, fourLoads(t, "--json=-")...).stdout, &doc)
	if doc.Schema != report.Schema || doc.Command != "bandwidth" || doc.Env.GPU != "sim" || doc.Env.FileSystem == "" ||
		!(doc.WallSeconds > 0) {
		t.Errorf("%+v", doc)
	}
	if c := doc.Config; c.Pairs != 11 || !slices.Equal(c.Sizes, []int64{64 << 10, 128 << 10}) ||
		!slices.Equal(c.Threads, []int{1, 2}) ||
		c.Seed != 1 ||
		c.GPUMemoryBytes != 1<<20 ||
		c.Codec != "none" {
		t.Errorf("%+v", c)
	}
	states := make(map[string]int)
	for _, r := range doc.Rows {
		states[fmt.Sprintf("%s-%s %s", r.From, r.To, r.State)]++
		for _, v := range []float64{r.GiBPerS, r.LimitGiBPerS, r.Efficiency} {
			if !(v > 0) || math.IsInf(v, 0) {
				t.Errorf("%+v", r)
			}
		}
		k, ratios := r.Samples, []float64{}
		if len(k.GiBPerS) != 11 || len(k.LimitGiBPerS) != 11 || len(k.LimitAgainGiBPerS) != 11 {
			t.Fatalf("%+v", k)
		}
		for i, v := range k.GiBPerS {
			ratios = append(ratios, v/k.LimitGiBPerS[i])
		}
		if median(k.GiBPerS) != r.GiBPerS || math.Abs(median(ratios)-r.Efficiency) > 1e-9 {
			t.Errorf("the figures are not those of the samples: %+v", r)
		}
	}
	for _, edge := range []string{
		"gpu:0-host:0 ", "host:0-gpu:0 ", "gpu:0-disk:0 rewritten", "disk:0-gpu:0 rewritten",
		"host:0-disk:0 rewritten", "disk:0-host:0 rewritten",
	} {
		if states[edge] != 4 {
			t.Errorf("%d rows of %s", states[edge], edge)
		}
	}
	if len(doc.Rows) != 24 {
		t.Errorf("%d rows", len(doc.Rows))
	}
}

// TestBandwidthForPeople: a table that names all that was measured, and the document in a
// file beside it.
func TestBandwidthForPeople(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	path := filepath.Join(t.TempDir(), "b.json")
	r := succeed(t, fourLoads(t, "--pairs=12", "--json", path)...)
	for _, want := range []string{"gpu:0", "host:0", "disk:0", "64.0 KiB", "128.0 KiB", "rewritten", "limit", "efficiency", "noise", "cv", "12 pairs a row", "sim"} {
		if !strings.Contains(r.stdout, want) {
			t.Errorf("no %q in\n%s", want, r.stdout)
		}
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	decode(t, string(text), new(report.Bandwidth))
	if r := succeed(t, narrow(t, "--sizes=64KiB", "--threads=1", "--quiet")...); r.stdout != "" {
		t.Errorf("quiet, it prints %q", r.stdout)
	}
}

// TestBandwidthDefaults: of the default sizes those that do not fit are left out, and noted.
func TestBandwidthDefaults(t *testing.T) {
	t.Parallel()
	var doc report.Bandwidth
	r := command(t, t.Context(), "bandwidth", "--thorough", "--gpu-memory=2MiB", "--host-memory=4MiB", "--json=-")
	if r.status != 0 {
		t.Fatal(r.status, r.stderr)
	}
	decode(t, r.stdout, &doc)
	for _, row := range doc.Rows {
		if row.Bytes != 1<<20 || row.Threads != 1 {
			t.Errorf("%+v", row)
		}
	}
	if n := strings.Count(r.stderr, "note: left out: "); len(doc.Rows) != 6 || n != 7 {
		t.Errorf("%d rows, and %d loads left out: %s", len(doc.Rows), n, r.stderr)
	}
}

// TestQuickPlan: without flags at most 1 GiB is moved, by the plan, whatever the machine has, and so much
// on a disk that one of 100 MiB/s leaves two of ten seconds for all else; what
// is asked for in addition makes the batches smaller, or is as large as it was asked for.
func TestQuickPlan(t *testing.T) {
	quickSizes := []int64{256 << 10, 2 << 20}
	for _, c := range []struct {
		args  string
		disks int
		sizes []int64
		quick bool
	}{
		{"", 1, quickSizes, true},
		{"--threads=1,2", 1, []int64{256 << 10, 512 << 10}, true},
		{"--between=host,disk --threads=1,4", 1, []int64{256 << 10, 512 << 10}, true}, // all of it on the disk
		{"--between=gpu,host --threads=1,2", 1, quickSizes, true},                     // nothing of it
		{"", 3, quickSizes, true},
		{"--pairs=1000", 1, []int64{64 << 10}, false}, // that is what it takes
		{"--sizes=8MiB", 1, []int64{8 << 20}, false},
	} {
		var f bandwidthFlags
		fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
		f.register(fs)
		f.engine.register(fs, 64<<20)
		args := strings.Fields(c.args)
		for range c.disks {
			args = append(args, "--disk="+t.TempDir()+"=64MiB")
		}
		if err := errors.Join(fs.Parse(append(args, "--gpu=sim")), f.validate()); err != nil {
			t.Fatal(err)
		}
		m, err := f.engine.open(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		f.measured.Engine = m.engine
		planned, err := f.plan()
		if err := errors.Join(err, m.engine.Close()); err != nil {
			t.Fatal(err)
		}
		const disk, most = 100 << 20, 8 // bytes a second, and seconds
		if all := planned.Ours + planned.Limit; (all <= quickMost) != c.quick ||
			(planned.Disk <= most*disk) != c.quick || all < quickMost/8 || !slices.Equal(f.measured.Sizes, c.sizes) {
			t.Errorf("%q, %d disks: batches of %v, %d bytes are moved, %d with a disk",
				c.args, c.disks, f.measured.Sizes, all, planned.Disk)
		}
	}
}

// TestBandwidthQuick: it is the default, and says so.
func TestBandwidthQuick(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	var doc report.Bandwidth
	r := succeed(
		t,
		"bandwidth",
		"--gpu=sim",
		"--gpu-memory=16MiB",
		"--host-memory=16MiB",
		"--disk="+t.TempDir()+"=64MiB",
		"--json=-",
	)
	decode(t, r.stdout, &doc)
	if c := doc.Config; c.Extent != "quick" || c.PlannedBytes <= 0 || c.PlannedBytes > quickMost ||
		!slices.Equal(c.Sizes, []int64{256 << 10, 2 << 20}) || !slices.Equal(c.Threads, []int{1}) {
		t.Errorf("%+v", c)
	}
	for _, row := range doc.Rows {
		if row.Inconclusive != (math.Abs(row.Efficiency-1) <= row.Noise) {
			t.Errorf("%+v", row)
		}
	}
	var text strings.Builder
	must(report.Print(&text, report.Table, &doc, nil))
	if !strings.Contains(text.String(), "quick: 985.5 MiB were moved; --thorough") {
		t.Errorf("it does not say that it is quick:\n%s", &text)
	}
}

// TestInconclusiveRows: a row that is within the limit's own variation is marked, and counted.
func TestInconclusiveRows(t *testing.T) {
	doc := report.Bandwidth{
		Rows: []report.BandwidthRow{{Inconclusive: true}, {Inconclusive: true}, {}, {Error: "no converter"}},
	}
	var text strings.Builder
	must(report.Print(&text, report.Table, &doc, nil))
	if n := len(
		regexp.MustCompile(` yes\b`).FindAllString(text.String(), -1),
	); n != 2 ||
		!strings.Contains(text.String(), "\n2 of 4 rows are inconclusive: ") {
		t.Errorf("%d rows are marked:\n%s", n, &text)
	}
	doc.Rows = doc.Rows[2:]
	text.Reset()
	if must(report.Print(&text, report.Table, &doc, nil)); strings.Contains(text.String(), "inconclusive") {
		t.Errorf("marked:\n%s", &text)
	}
}

// TestBandwidthTooLarge: what was asked for and does not fit is not left out in silence; and to
// measure nothing is no success.
func TestBandwidthTooLarge(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"--sizes=64KiB,1MiB", "--threads=1"},
		{"--threads=8", "--sizes=128KiB"},
		{"--thorough"}, // no default fits
	} {
		r := command(
			t,
			t.Context(),
			append([]string{"bandwidth", "--gpu-memory=1MiB", "--host-memory=1MiB"}, args...)...)
		if r.status != 2 || strings.Count(r.stderr, "\n") != 1 || !strings.Contains(r.stderr, "gpu:0") ||
			!strings.Contains(r.stderr, "raise --gpu-memory") {
			t.Errorf("%q ends with %d: %s", args, r.status, r.stderr)
		}
	}
}

// TestBandwidthInterrupted: it ends with 130, writes no result, and leaves nothing.
func TestBandwidthInterrupted(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	path := filepath.Join(t.TempDir(), "b.json")
	if r := command(t, ctx, fourLoads(t, "--json", path)...); r.status != 130 || strings.Count(r.stderr, "\n") != 1 {
		t.Errorf("ended with %d: %q", r.status, r.stderr)
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("a result is there: %v", err)
	}
}

// TestBandwidthSuits: on a small machine memories without a given size are smaller.
func TestBandwidthSuits(t *testing.T) {
	for _, c := range []struct {
		memory    int64
		args      []string
		gpu, host int64
	}{
		{0, nil, bandwidthMemory, bandwidthMemory}, // not known
		{64 << 30, nil, bandwidthMemory, bandwidthMemory},
		{2 << 30, nil, 256 << 20, 256 << 20},
		{2 << 30, []string{"--gpu-memory=1GiB"}, 1 << 30, 256 << 20},
		{2 << 30, []string{"--host-memory=7MiB"}, 256 << 20, 7 << 20},
	} {
		e := engineFlags{share: bandwidthShare}
		fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
		e.register(fs, bandwidthMemory)
		if err := fs.Parse(append(c.args, "--gpu=sim", "--disk="+t.TempDir())); err != nil {
			t.Fatal(err)
		}
		top := &topology.Topology{Limits: topology.Limits{MemoryBytes: c.memory}}
		m := e.newMachine(top)
		if err := e.configure(t.Context(), m); err != nil {
			t.Fatal(err)
		}
		if gpu := m.opened.GPUs[0].Memory; gpu != (tier.Amount{Bytes: c.gpu}) {
			t.Errorf("%+v: the GPU has %s", c, gpu)
		}
		if host := m.opened.HostMemory; host != (tier.Amount{Bytes: c.host}) {
			t.Errorf("%+v: the host has %s", c, host)
		}
	}
}

// TestBandwidthNoConverter: such an edge is a row, in the document and in the table.
func TestBandwidthNoConverter(t *testing.T) {
	why := convert.NoConverterError{From: convert.ImageIn(tier.GPU), To: convert.ImageIn(tier.Disk)}
	doc := report.Bandwidth{Rows: []report.BandwidthRow{{From: "gpu:0", To: "disk:0", Error: why.Error()}}}
	var text strings.Builder
	must(report.Print(&text, report.Table, &doc, []string{"a note"}))
	for _, want := range []string{"  gpu:0  disk:0  ", "convert: no converter from image in gpu to image in disk", "note: a note"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
}

// TestBandwidthErrors: wrong use is reported in one line, with what to do.
func TestBandwidthErrors(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		arg  string
		want []string
	}{
		{"--pairs=10", []string{"--pairs", "11 to"}},
		{"--threads=0", []string{"--threads", "1 to"}},
		{"--threads=65", []string{"--threads", "1 to 64"}},
		{"--threads=", []string{"--threads"}},
		{"--quick --thorough", []string{"--quick and --thorough"}},
		{"--quick --sizes=1MiB", []string{"--quick", "--sizes"}},
		{"--threads=x", []string{"--threads"}},
		{"--sizes=", []string{"--sizes"}},
		{"--sizes=1MiB,,", []string{"--sizes"}},
		{"--sizes=4KiB", []string{"--sizes", "64KiB to 8GiB"}},
		{"--sizes=1MB", []string{"--sizes", "multiples of 4KiB"}},
		{"--sizes=1TiB", []string{"--sizes", "64KiB to 8GiB"}},
		{"--passes=2", []string{"--passes"}},
		{"file", []string{`unknown command "file"`}},
	} {
		r := command(t, t.Context(), append([]string{"bandwidth"}, strings.Fields(c.arg)...)...)
		if r.status != 2 || strings.Count(r.stderr, "\n") != 1 {
			t.Errorf("%s ends with %d: %s", c.arg, r.status, r.stderr)
		}
		for _, want := range c.want {
			if !strings.Contains(r.stderr, want) {
				t.Errorf("%s: no %q in %s", c.arg, want, r.stderr)
			}
		}
	}
}

// TestBandwidthThrottled: a disk that --disk-throttle makes slow is slow for moves and for
// their limit: all bytes of both take as long as they should. Single figures say less, for
// what a sleep was too long is made up for.
func TestBandwidthThrottled(t *testing.T) {
	t.Parallel()
	const rate, size, pairs = 32 << 20, 64 << 10, 11
	var doc report.Bandwidth
	begun := time.Now()
	decode(
		t,
		succeed(t, narrow(t, "--sizes=64KiB", "--threads=1", "--disk-throttle=32MiB", "--json=-")...).stdout,
		&doc,
	)
	took := time.Since(begun)
	slow := 0
	for _, r := range doc.Rows {
		if r.State != "" {
			slow++
		}
	}
	if slow != 4 || doc.Config.Pairs != pairs {
		t.Errorf("%d rows have a disk, with %d pairs; want 4 and %d", slow, doc.Config.Pairs, pairs)
	}
	// Of each of two links, in each round and one before them: moves and two files of the limit,
	// to the disk and back, twice.
	const passed = 2 * (pairs + 1) * 3 * 4 * size
	if least := time.Duration(passed * int(time.Second) / rate); took < least {
		t.Errorf("took %v; what passed the disk takes %v at least", took, least)
	}
}

// TestBandwidthFaults: a fault that is not survived has status 1, and is named; others
// are counted.
func TestBandwidthFaults(t *testing.T) {
	t.Parallel()
	one := narrow(t, "--sizes=64KiB", "--threads=1", "--json=-")
	for fault, want := range map[string]string{"op=write,kind=eio": "input/output error", "op=read,kind=bitflip": "corrupt", "op=copy,kind=eio": "input/output error"} {
		r := command(t, t.Context(), append(slices.Clone(one), "--fault="+fault)...)
		if r.status != 1 || !strings.Contains(r.stderr, want) ||
			!strings.Contains(r.stderr, "--fault "+fault+", hits: ") ||
			strings.Count(r.stderr, "\n") != 1 ||
			r.stdout != "" {
			t.Errorf("%s: ended with %d: %q, %q", fault, r.status, r.stderr, r.stdout)
		}
	}
	var doc report.Bandwidth
	decode(t, chanceOfSeed(t, one...).stdout, &doc)
	if f := doc.Config.Faults; len(f) != 1 || f[0].Hits == 0 {
		t.Errorf("the faults are told as %+v", f)
	}
}

// TestBandwidthNotesTheCodec: what may be compressed is not compared with what is not
// without a word.
func TestBandwidthNotesTheCodec(t *testing.T) {
	t.Parallel()
	one := narrow(t, "--sizes=64KiB", "--threads=1")
	for codec, noted := range map[string]bool{"none": false, "s2": true, "auto": true} {
		r := succeed(t, append(slices.Clone(one), "--codec="+codec)...)
		if got := strings.Contains(
			r.stdout,
			"note: moves to disk may be compressed (--codec "+codec+")",
		); got != noted {
			t.Errorf("--codec %s, noted: %v\n%s", codec, got, r.stdout)
		}
	}
}

// TestBandwidthBetween: what is not requested is not measured, and an unknown kind of space is an
// error.
func TestBandwidthBetween(t *testing.T) {
	t.Parallel()
	var doc report.Bandwidth
	decode(t, succeed(t, fourLoads(t, "--between=gpu,host", "--json=-")...).stdout, &doc)
	for _, r := range doc.Rows {
		if r.State != "" || r.LimitOf != "memmove" || r.BothWays {
			t.Errorf("%+v", r)
		}
	}
	if len(doc.Rows) != 8 {
		t.Errorf("%d rows", len(doc.Rows))
	}
	if r := command(
		t,
		t.Context(),
		"bandwidth",
		"--between=gpu,tape",
	); r.status != 2 ||
		!strings.Contains(r.stderr, `"tape"`) {
		t.Errorf("it ends with %d: %s", r.status, r.stderr)
	}
}

// TestBandwidthWithoutEdges: kinds of spaces of which there are no two are wrong use, not an empty
// table.
func TestBandwidthWithoutEdges(t *testing.T) {
	t.Parallel()
	top, err := topology.Discover(t.Context(), topology.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string]string{
		"--between=host": "--between: there is nothing to measure: an edge needs two spaces, not both of them disks, " +
			"and there is only host:0",
		"--between=disk":                             "there is only disk:0",
		"--between=disk --disk=" + t.TempDir():       "not both of them disks, and there is only disk:0, disk:1",
		"--between=host --json=-":                    "--between gpu,host",
		"--between=gpu,gpu --sizes=64KiB --quiet -q": "there is only gpu:0",
	} {
		if len(top.Nodes) > 1 && strings.Contains(args, "=host") {
			continue // each node has a host space
		}
		r := command(t, t.Context(), narrow(t, strings.Fields(args)...)...)
		if r.status != 2 || strings.Count(r.stderr, "\n") != 1 || !strings.Contains(r.stderr, want) || r.stdout != "" {
			t.Errorf("%s ends with %d: %q, %q", args, r.status, r.stderr, r.stdout)
		}
	}
}

// TestBandwidthBothWays: the table shows how much is gained, and what the limit is.
func TestBandwidthBothWays(t *testing.T) {
	var text strings.Builder
	doc := report.Bandwidth{Rows: []report.BandwidthRow{{
		From: "gpu:0", To: "host:0", Bytes: 1 << 20, Threads: 2, LimitOf: "driver's copy",
		GiBPerS: 90, LimitGiBPerS: 92, BothWays: true, Gain: 1.93, LimitGain: 1.95,
	}}}
	must(report.Print(&text, report.Table, &doc, nil))
	for _, want := range []string{"both ways", "limit gain", "  1.0 MiB  ", "  yes  ", "  1.93  ", "  1.95\n", "  driver's copy  "} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("no %q in\n%s", want, text.String())
		}
	}
}
