package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/headroom"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/inject"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/job"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/faultdev"
	"github.com/spillway-db/spillway/tier/sim"
	"github.com/spillway-db/spillway/topology"
)

// TestEngineFlags: each flag reaches the engine's configuration, and what it says is not there
// without it.
func TestEngineFlags(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", t.TempDir())
	top, err := topology.Discover(t.Context(), topology.Options{})
	if err != nil {
		t.Fatal(err)
	}
	configOf := func(args ...string) (*pflag.FlagSet, spillway.Config) {
		t.Helper()
		var e engineFlags
		fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
		e.register(fs, 1<<20)
		err := errors.Join(fs.Parse(args), e.validate())
		if err != nil {
			t.Fatal(err)
		}
		m := e.newMachine(top)
		if err := e.configure(t.Context(), m); err != nil {
			t.Fatal(err)
		}
		return fs, m.opened
	}
	flags, plain := configOf()
	tested := make(map[string]bool)
	for _, c := range []struct {
		args   string
		heeded func(c spillway.Config) bool
	}{
		{"--gpu=sim", func(c spillway.Config) bool { return c.GPUs[0].Backend == spillway.Sim }},
		{"--gpu=cuda", func(c spillway.Config) bool { return c.GPUs[0].Backend == spillway.CUDA }},
		{"--gpus=3 --gpu=sim", func(c spillway.Config) bool { return len(c.GPUs) == 3 }},
		{"--gpu-memory=3MiB", func(c spillway.Config) bool { return c.GPUs[0].Memory == spillway.Bytes(3<<20) }},
		{"--gpu-memory=25%", func(c spillway.Config) bool { return c.GPUs[0].Memory == spillway.Share(0.25) }},
		{"--host-memory=3MiB", func(c spillway.Config) bool { return c.HostMemory == spillway.Bytes(3<<20) }},
		{"--disk=" + dir, func(c spillway.Config) bool { return c.Disks[0].Dir == dir }},
		{"--disk=" + dir + "=5MiB", func(c spillway.Config) bool { return c.Disks[0].Capacity == spillway.Bytes(5<<20) }},
		{"--limit=0.99", func(c spillway.Config) bool { return c.GPUMarks.Limit == 0.99 && c.HostMarks.Limit == 0.99 }},
		{"--trigger=0.7", func(c spillway.Config) bool { return c.GPUMarks.Trigger == 0.7 && c.HostMarks.Trigger == 0.7 }},
		{"--stop=0.3", func(c spillway.Config) bool { return c.GPUMarks.Stop == 0.3 && c.HostMarks.Stop == 0.3 }},
		{"--policy=lru", func(c spillway.Config) bool { return c.Policy.Name() == "lru" }},
		{"--codec=s2", func(c spillway.Config) bool { return c.Codec == convert.CodecS2 }},
		{"--encrypt", func(c spillway.Config) bool { return c.Disks[0].Encrypt }},
		{"--stall-timeout=7s", func(c spillway.Config) bool { return c.StallTimeout == 7*time.Second }},
		{"--write-ahead=off", func(c spillway.Config) bool { return c.WriteAhead < 0 }},
		{"--write-ahead=7MiB", func(c spillway.Config) bool { return c.WriteAhead == 7<<20 }},
		{"--moves-per-edge=7", func(c spillway.Config) bool { return c.MovesPerEdge == 7 }},
		{"--disk-slots=7", func(c spillway.Config) bool { return *c.Limits.Permits.Slots == 7 }},
		{"--monitor-period=7ms", func(c spillway.Config) bool { return c.MonitorPeriod == 7*time.Millisecond }},
		{"--disk-throttle=1MiB", func(c spillway.Config) bool { return c.Disks[0].FS != nil }},
		{"--fault=op=write,kind=eio", func(c spillway.Config) bool { return c.Disks[0].FS != nil }},
		{"--fault=op=alloc,kind=oom", func(c spillway.Config) bool {
			dev, err := sim.New(sim.Config{Memory: tier.Page})
			if err != nil {
				t.Fatal(err)
			}
			defer dev.Close()
			wrapped, err := c.GPUs[0].Wrap(dev)
			_, faulty := wrapped.(*faultdev.Device)
			return err == nil && faulty
		}},
	} {
		name, _, _ := strings.Cut(strings.TrimPrefix(c.args, "--"), "=")
		tested[name] = true
		if c.heeded(plain) {
			t.Errorf("%s is what there is without it: this shows nothing", c.args)
		}
		if _, cfg := configOf(strings.Fields(c.args)...); !c.heeded(cfg) || cfg.Topology != top {
			t.Errorf("%s is not heeded: %+v", c.args, cfg)
		}
	}
	flags.VisitAll(func(f *pflag.Flag) {
		if !tested[f.Name] {
			t.Errorf("--%s is not tested", f.Name)
		}
	})
}

// TestJobOfTheFlags: the job is what the flags of run say.
func TestJobOfTheFlags(t *testing.T) {
	f := runFlags{place: "fits", partitions: 3, passes: 4}
	f.input.repeat, f.input.workers = 5, 6
	m := &machine{engine: new(spillway.Engine), plan: headroom.Plan{Heap: 1 << 20}}
	want := job.Config{
		Engine:     m.engine,
		Repeat:     5,
		Fits:       true,
		Partitions: 3,
		Passes:     4,
		Workers:    6,
		Held:       m.plan.Held(),
	}
	if got := f.job(m); fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	f.place = "gpu"
	if f.job(m).Fits {
		t.Error("it is loaded where there is room, and not into the GPU")
	}
}

// TestEnd: a command that was interrupted ends with 130, but where data was wrong that is what
// counts.
func TestEnd(t *testing.T) {
	running := t.Context()
	interrupted, cancel := context.WithCancel(running)
	cancel()
	wrong := fail.Wrongf("1 of 2 digests are wrong")
	for i, c := range []struct {
		ctx    context.Context
		err    error
		status int
		says   string
	}{
		{running, nil, 0, ""},
		{interrupted, nil, 0, ""}, // it was done by then
		{running, wrong, 1, "spillbench: 1 of 2 digests are wrong\n"},
		{interrupted, wrong, 1, "spillbench: 1 of 2 digests are wrong\n"},
		{interrupted, errors.Join(context.Canceled, wrong), 1, "spillbench: context canceled 1 of 2 digests are wrong\n"},
		{interrupted, fmt.Errorf("batch 1: %w", convert.ErrCorrupt), 1, "spillbench: batch 1: " + convert.ErrCorrupt.Error() + "\n"},
		{interrupted, context.Canceled, 130, "spillbench: interrupted; everything was given back\n"},
		{interrupted, fail.Usagef("no"), 130, "spillbench: interrupted; everything was given back\n"},
		{running, fail.Usagef("no"), 2, "spillbench: no\n"},
		{running, fail.Environmentf("no"), 3, "spillbench: no\n"},
		{running, context.Canceled, 3, "spillbench: context canceled\n"},
	} {
		var stderr strings.Builder
		if status := end(c.ctx, c.err, &stderr); status != c.status || stderr.String() != c.says {
			t.Errorf("%d: %v ended with %d, %q; want %d, %q", i, c.err, status, stderr.String(), c.status, c.says)
		}
	}
}

// TestBlame: what a fault may have caused has its status, and names it. Wrong use has not.
func TestBlame(t *testing.T) {
	blame := func(ctx context.Context, spec string, err error) error {
		t.Helper()
		parsed, failed := inject.Parse(spec)
		if failed != nil {
			t.Fatal(failed)
		}
		m := (&engineFlags{faults: []inject.Spec{parsed}, seed: 1}).newMachine(nil)
		dev, opening := sim.New(sim.Config{Memory: 1 << 20})
		if opening != nil {
			t.Fatal(opening)
		}
		defer dev.Close()
		faulty := m.faults.Device(dev)
		m.faults.Arm()
		s, opening := faulty.NewStream()
		if opening != nil {
			t.Fatal(opening)
		}
		a, failed := faulty.Alloc(s, tier.Page)
		if failed == nil {
			faulty.Free(s, a)
		}
		return m.settle(ctx, err)
	}
	interrupted, cancel := context.WithCancel(t.Context())
	cancel()
	machine := fail.Environmentf("no space")
	for name, c := range map[string]struct {
		ctx    context.Context
		spec   string
		err    error
		status int
		named  bool
	}{
		"a fault":             {t.Context(), "op=alloc,kind=oom", machine, 1, true},
		"no error":            {t.Context(), "op=alloc,kind=oom", nil, 0, false},
		"wrong use":           {t.Context(), "op=alloc,kind=oom", fail.Usagef("no batches"), 2, false},
		"interrupted":         {interrupted, "op=alloc,kind=oom", machine, 3, false},
		"a fault to come":     {t.Context(), "op=alloc,kind=oom,at=9", machine, 3, false},
		"a fault that is not": {t.Context(), "op=alloc,kind=slow:0.1", machine, 3, false},
	} {
		err := blame(c.ctx, c.spec, c.err)
		if fail.Status(err) != c.status ||
			c.err != nil && strings.Contains(fail.Line(err), "--fault "+c.spec+", hits: ") != c.named {
			t.Errorf("%s: status %d, %v", name, fail.Status(err), err)
		}
	}
}

// TestExplain: an error of opening has the status and the advice of its kind, or stays as it is.
func TestExplain(t *testing.T) {
	running := t.Context()
	interrupted, cancel := context.WithCancel(running)
	cancel()
	full := fmt.Errorf("host:0: %w", tier.ErrNoSpace)
	for i, c := range []struct {
		ctx    context.Context
		gpu    string
		err    error
		status int
		says   string
	}{
		{running, "auto", fmt.Errorf("gpu:0: %w: %w", spillway.ErrShareOfSimulated, tier.ErrNotSupported), 2, "--gpu-memory 25%: gpu:0: "},
		{running, "auto", spillway.ErrShareOfSimulated, 2, "(give a size, such as 512MiB)"},
		{running, "cuda", tier.ErrNotSupported, 3, "(install NVIDIA's driver"},
		{running, "auto", tier.ErrNotSupported, 3, "(see --gpu-memory, --host-memory and --disk)"}, // it is not the GPU
		{running, "auto", errors.New("no"), 3, "no (see --gpu-memory, --host-memory and --disk)"},
		{running, "auto", full, 3, ""},
		{interrupted, "auto", context.Canceled, 3, ""},
	} {
		f := flagsOf(t, "--gpu-memory=25%", "--gpu="+c.gpu)
		got := f.explain(c.ctx, c.err)
		if c.says == "" {
			if got != c.err {
				t.Errorf("%d: %v became %v", i, c.err, got)
			}
			continue
		}
		if fail.Status(got) != c.status || !errors.Is(got, c.err) || !strings.Contains(fail.Line(got), c.says) {
			t.Errorf("%d: status %d, %s", i, fail.Status(got), fail.Line(got))
		}
	}
}

// TestNotes: a warning is kept once, with how often it came, in one line, in the order of the first
// times.
func TestNotes(t *testing.T) {
	var n notes
	log := slog.New(&n)
	log.Info("spillway: not kept")
	for i := range 3 {
		log.Warn("spillway: a move failed", "batch", i, "error", "a\nb")
	}
	log.Warn("spillway: all is well")
	for range 2 { // the machine's own
		log.Warn("spillway: memory is not locked", "space", "host:0", "remedy", "raise the limit")
		n.add("left out: one")
	}
	log.Warn("spillway: memory is not locked", "space", "host:1", "remedy", "raise the limit")
	want := []string{
		"a move failed: batch 0, error a b (3 times)",
		"all is well",
		diag.Warning{
			What:   "memory is not locked",
			Remedy: "raise the limit",
			Space:  "host:0",
		}.String(),
		"left out: one",
		diag.Warning{What: "memory is not locked", Remedy: "raise the limit", Space: "host:1"}.String(),
	}
	if got := n.lines(); !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	for i := range 2 * maxNotes {
		n.add(fmt.Sprint(i))
	}
	if got := n.lines(); len(got) != maxNotes || !slices.Equal(got[:len(want)], want) {
		t.Errorf("of very many, %d are kept: %q", len(got), got)
	}
}

// TestVerifyTellsTheFirst: of several files the first that comes back wrong is reported, before one
// that could not be read.
func TestVerifyTellsTheFirst(t *testing.T) {
	t.Parallel()
	broken := writeFile(t, "broken.arrow", "ARROW1\x00\x00")
	one, two := writeTable(t, "one.arrow", 1, 200), writeTable(t, "two.arrow", 1, 200)
	r := command(
		t,
		t.Context(),
		"verify",
		broken,
		one,
		two,
		"--json=-",
		"--rows-per-batch=100",
		"--gpu-memory=1MiB",
		"--host-memory=1MiB",
		"--fault=op=copy,kind=bitflip",
	)
	if r.status != 1 || !strings.Contains(r.stderr, "differences in "+one) ||
		strings.Contains(r.stderr, filepath.Base(two)) {
		t.Errorf("ended with %d: %s", r.status, r.stderr)
	}
	var doc report.Verify
	decode(t, r.stdout, &doc)
	if doc.Config.RowsPerBatch != 100 || doc.Config.Faults[0].Hits == 0 || doc.Files[0].Mismatches != 0 ||
		doc.Files[1].Mismatches == 0 ||
		doc.Files[2].Mismatches == 0 {
		t.Errorf("%+v, %+v", doc.Config, doc.Files)
	}
	absent := filepath.Join(t.TempDir(), "absent.arrow")
	if r = command(
		t,
		t.Context(),
		"verify",
		broken,
		absent,
	); r.status != 2 || !strings.Contains(r.stderr, broken) ||
		strings.Contains(r.stderr, absent) {
		t.Errorf("ended with %d: %s", r.status, r.stderr)
	}
}

// TestConfigIsTold: the document has what the engine was opened with.
func TestConfigIsTold(t *testing.T) {
	if testing.Short() {
		t.Skip("needs seconds: run without -short")
	}
	t.Parallel()
	dir := t.TempDir()
	r := command(
		t,
		t.Context(),
		"run",
		"--json=-",
		"--gpu=sim",
		"--gpu-memory=1MiB",
		"--host-memory=2MiB",
		"--disk="+dir+"=16MiB",
		"--limit=0.96",
		"--trigger=0.7",
		"--stop=0.3",
		"--policy=lru",
		"--codec=s2",
		"--encrypt",
		"--monitor-period=7ms",
		"--stall-timeout=9s",
		"--write-ahead=5MiB",
		"--moves-per-edge=6",
		"--disk-slots=7",
		"--seed=9",
		"--repeat=2",
		"--passes=3",
		"--partitions=4",
		"--workers=5",
		"--place=fits",
		"--rows-per-batch=2000",
	)
	if r.status != 0 {
		t.Fatalf("ended with %d: %s", r.status, r.stderr)
	}
	var doc report.Run
	decode(t, r.stdout, &doc)
	want := report.RunConfig{
		Config: report.Config{
			GPU:                  "sim",
			GPUMemoryBytes:       1 << 20,
			HostMemoryBytes:      2 << 20,
			Disks:                []report.Disk{{Dir: dir, CapacityBytes: 16 << 20, CapacityGiven: true}},
			Limit:                0.96,
			Trigger:              0.7,
			Stop:                 0.3,
			Policy:               "lru",
			Codec:                "s2",
			Encrypt:              true,
			MonitorPeriodSeconds: 0.007,
			StuckAfterSeconds:    9,
			WriteAheadBytesPerS:  5 << 20,
			MovesPerEdge:         6,
			DiskSlots:            7,
			Faults:               []report.Fault{},
		},
		Seed: 9, Repeat: 2, Passes: 3, Partitions: 4, Workers: 5, Place: "fits",
	}
	want.RowsPerBatch = 2000
	if !reflect.DeepEqual(doc.Config, want) {
		t.Errorf("got  %+v\nwant %+v", doc.Config, want)
	}
}
