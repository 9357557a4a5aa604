package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/configfile"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/job"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/tune"
	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/monitor"
)

// tuneBriefly is a tune of runs of some milliseconds.
func tuneBriefly(t *testing.T, args ...string) []string {
	t.Helper()
	return append(append([]string{"tune", writeTable(t, "t.arrow", 32, 2000), "--budget=3s"}, small...), args...)
}

// TestTune: it says of each setting what was tried, its YAML is a file for --config, with which run has
// the values that were chosen, and the whole is better than the default or is the default.
func TestTune(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	file := filepath.Join(t.TempDir(), "tuned.yaml")
	spill := t.TempDir()
	var doc report.Tune
	decode(t, succeed(t, tuneBriefly(t, "--yaml", file, "--disk", spill+"=64MiB", "--codec=zstd", "--format=json", "-q")...).stdout, &doc)
	if doc.Runs < 2 || doc.DefaultSeconds <= 0 || len(doc.Settings) == 0 || doc.Verdict == "" {
		t.Errorf("%+v", doc)
	}
	if !doc.Better && !strings.Contains(doc.Verdict, "The configuration is the default.") || doc.Better && doc.Comparison.GainLow <= 0 {
		t.Errorf("better %v: %s", doc.Better, doc.Verdict)
	}
	for _, s := range doc.Settings {
		if s.Reason == "" || s.Name == "codec" || len(s.Tried) == 0 || !doc.Better && s.Chosen != s.Default {
			t.Errorf("%+v", s)
		}
	}
	text, err := os.ReadFile(file)
	if err != nil || string(text) != doc.Chosen.YAML {
		t.Fatalf("%q, %v, want %q", text, err, doc.Chosen.YAML)
	}
	var ran report.Run
	decode(t, succeed(t, "run", "--config", file, "--format=json", "-q").stdout, &ran)
	c := ran.Config
	if c.Codec != "zstd" || c.GPUMemoryBytes != 512<<10 || len(c.Disks) != 1 || c.Disks[0].Dir != spill || c.Disks[0].CapacityBytes != 64<<20 {
		t.Errorf("the file gives %+v", c)
	}
	for _, args := range [][]string{{"verify", writeTable(t, "v.arrow", 1, 100)}, {"compare", "--peer=arrow-ipc", "--rounds=1", "--gpu-memory=512KiB", "--host-memory=4MiB"}, {"trace", "record", filepath.Join(t.TempDir(), "r.trace")}} {
		succeed(t, append(args, "--config", file, "-q")...)
	}
}

// TestTuneYAMLAlone: --yaml - prints nothing else, so that it can be piped.
func TestTuneYAMLAlone(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	r := succeed(t, tuneBriefly(t, "--yaml=-", "--budget=1ms")...)
	entries, err := configfile.Parse([]byte(r.stdout))
	if err != nil || len(entries) < 15 {
		t.Errorf("%v, %v in %q", entries, err, r.stdout)
	}
}

// TestTuneOfASmallBudget: it says that nothing was tried, and which budget is enough.
func TestTuneOfASmallBudget(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	r := succeed(t, tuneBriefly(t, "--budget=1ms")...)
	for _, want := range []string{"Nothing was tried", "give --budget ", "The configuration is the default.", "\nflags:\n", "\nYAML, for --config FILE:\n", "\nGo:\n", "  var config = spillway.Config{\n"} {
		if !strings.Contains(r.stdout, want) {
			t.Errorf("no %q in\n%s", want, r.stdout)
		}
	}
}

// TestTuneRefuses: wrong use is one line.
func TestTuneRefuses(t *testing.T) {
	t.Parallel()
	for args, want := range map[string]string{
		"--budget=0s":                "--budget 0s is out of range",
		"--most-written=5%":          "--most-written 5%: a share",
		"--yaml=- --format=json":     "both want standard output",
		"--yaml=":                    "want FILE or -",
		"--yaml=/nowhere/t.yaml":     "--yaml /nowhere/t.yaml cannot be written",
		"--workers=0":                "--workers 0 is out of range",
		"--policy=newest":            `"newest" for "--policy" flag: want `,
		"--input=/nowhere/x.parquet": "/nowhere/x.parquet",
		"--format=benchfmt":          "--format",
	} {
		r := command(t, t.Context(), append([]string{"tune"}, strings.Fields(args)...)...)
		if r.status != 2 || strings.Count(r.stderr, "\n") != 1 || !strings.Contains(r.stderr, want) || r.stdout != "" {
			t.Errorf("%s: %d, %q, want %q", args, r.status, r.stderr, want)
		}
	}
}

// TestTuneInterrupted: an interrupted tune gives everything back; TestMain sees what it leaves.
func TestTuneInterrupted(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	time.AfterFunc(300*time.Millisecond, cancel)
	if r := command(t, ctx, tuneBriefly(t, "--budget=5m", "--disk-throttle=8MiB", "-q")...); r.status != 130 || r.stdout != "" {
		t.Errorf("ended with %d: %q", r.status, r.stderr)
	}
}

// TestTuneFindsWrongData: wrong bytes are not a slow setting.
func TestTuneFindsWrongData(t *testing.T) {
	t.Parallel()
	if r := command(t, t.Context(), tuneBriefly(t, "--fault=op=read,kind=bitflip,p=1", "-q")...); r.status != 1 {
		t.Errorf("ended with %d: %q", r.status, r.stderr)
	}
}

// TestTuneOnAFullDisk: what the default cannot do is an error of the machine, as of run.
func TestTuneOnAFullDisk(t *testing.T) {
	t.Parallel()
	args := append([]string{"--disk", t.TempDir() + "=64KiB", soon, "-q"}, small...)
	want := command(t, t.Context(), append([]string{"run"}, args...)...)
	r := command(t, t.Context(), append([]string{"tune"}, args...)...)
	if r.status != 3 || want.status != 3 || strings.Count(r.stderr, "\n") != 1 || strings.Contains(r.stderr, tune.ErrRefused.Error()) {
		t.Errorf("ended with %d: %q, and run with %d: %q", r.status, r.stderr, want.status, want.stderr)
	}
}

// tuningOf is a search that has not begun, with these flags.
func tuningOf(t *testing.T, args ...string) (*tuning, *pflag.FlagSet) {
	t.Helper()
	var f tuneFlags
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	f.run.register(fs)
	if err := errors.Join(fs.Parse(args), f.run.validate()); err != nil {
		t.Fatal(err)
	}
	tu := &tuning{flags: &f, log: &notes{}}
	tu.knobs = f.knobs(fs, job.Result{Rows: 1000, Batches: 10})
	for _, k := range tu.knobs {
		tu.names = append(tu.names, k.setting())
	}
	return tu, fs
}

// TestKnobs: each value of each setting is one that run takes and is not the default; what was given is
// left alone.
func TestKnobs(t *testing.T) {
	tu, fs := tuningOf(t)
	if len(tu.knobs) < 10 {
		t.Errorf("only %d settings", len(tu.knobs))
	}
	for i, k := range tu.knobs {
		for v := range k.values {
			c := make(tune.Choice, len(tu.knobs))
			c[i] = v + 1
			flags, set, err := tu.with(c)
			if err == nil {
				err = flags.validate()
			}
			if err != nil {
				t.Errorf("%s: %v", tu.words(c), err)
				continue
			}
			set.VisitAll(func(f *pflag.Flag) {
				changed := f.Value.String() != fs.Lookup(f.Name).Value.String()
				if changed && !slices.Contains(k.flags, f.Name) {
					t.Errorf("%s changes --%s to %s", tu.words(c), f.Name, f.Value)
				}
			})
			if got := tu.words(c); got == "the default" || strings.HasSuffix(got, " "+tu.names[i].Default) {
				t.Errorf("%s is the default", got)
			}
		}
	}
	given, _ := tuningOf(t, "--workers=3", "--policy=lru", "--limit=0.95")
	for _, s := range given.names {
		if slices.Contains([]string{"workers", "policy", "trigger/stop"}, s.Name) {
			t.Errorf("%s was given, and is tried", s.Name)
		}
	}
	if len(given.names) != len(tu.names)-3 {
		t.Errorf("%d settings of %d", len(given.names), len(tu.names))
	}
}

// TestFormsAgree: flags, YAML and Go of a configuration are the same one.
func TestFormsAgree(t *testing.T) {
	spill := t.TempDir()
	tu, fs := tuningOf(t, "--gpu=sim", "--gpu-memory=3MiB", "--host-memory=5MB", "--disk="+spill+"=9MiB", "--encrypt", "--stuck-after=7s")
	c := make(tune.Choice, len(tu.knobs))
	for i := range c {
		c[i] = 1
	}
	res := tune.Result{Choice: c, Better: true, Last: tune.Gain{Median: 0.1}, LastDefault: []float64{1}, LastChosen: []float64{2}}
	doc, err := tu.document(fs, once{machine: &machine{warnings: func() []spillway.Warning { return nil }}}, &res)
	if err != nil {
		t.Fatal(err)
	}
	var byFlags, byFile runFlags
	set := pflag.NewFlagSet("test", pflag.ContinueOnError)
	byFlags.register(set)
	if err := errors.Join(set.Parse(doc.Chosen.Flags), byFlags.validate()); err != nil {
		t.Fatalf("%q: %v", doc.Chosen.Flags, err)
	}
	set = pflag.NewFlagSet("test", pflag.ContinueOnError)
	byFile.register(set)
	entries, err := configfile.Parse([]byte(doc.Chosen.YAML))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		for _, v := range e.Values {
			if err := set.Set(e.Key, v); err != nil {
				t.Error(err)
			}
		}
	}
	for _, name := range configured {
		want, _, err := tu.with(c)
		if err != nil {
			t.Fatal(err)
		}
		text := func(f *runFlags) string {
			fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
			var v runFlags
			v.register(fs)
			v = *f
			return fs.Lookup(name).Value.String()
		}
		if text(&byFlags) != text(want) || text(&byFile) != text(want) {
			t.Errorf("%s: %q by flags, %q by the file, want %q", name, text(&byFlags), text(&byFile), text(want))
		}
	}
}

// TestGoNames: each value of a flag has a name in Go.
func TestGoNames(t *testing.T) {
	for flag, names := range map[string]map[string]string{"gpu": goBackends, "policy": goPolicies, "codec": goCodecs} {
		for _, v := range choices(flag) {
			if names[v] == "" {
				t.Errorf("--%s %s has no name in Go", flag, v)
			}
		}
	}
	for name := range goPolicies {
		if _, err := monitor.ByName(name); err != nil {
			t.Error(err)
		}
	}
}

// TestTuneYAMLFile: the YAML's file is looked at before the search, a link and a device stay what they
// are, and one that cannot be written to the end costs neither the table nor the JSON.
func TestTuneYAMLFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if r := command(t, t.Context(), "tune", "--yaml", dir); r.status != 2 || strings.Count(r.stderr, "\n") != 1 || !strings.Contains(r.stderr, "--yaml") {
		t.Errorf("a directory: %d, %q", r.status, r.stderr)
	}
	real, link := filepath.Join(dir, "real.yaml"), filepath.Join(dir, "link.yaml")
	if err := errors.Join(os.WriteFile(real, []byte("old"), 0o600), os.Symlink("real.yaml", link)); err != nil {
		t.Fatal(err)
	}
	show := func(name string) (string, string, error) {
		to, err := newDestination("--yaml", name)
		if err != nil {
			t.Fatal(err)
		}
		defer to.close()
		var stdout strings.Builder
		json := filepath.Join(dir, "result.json")
		f := tuneFlags{yaml: fileFlag(name), run: runFlags{output: outputFlags{json: fileFlag(json)}}}
		out, err := f.run.output.open(t.Context(), &stdout, &strings.Builder{})
		if err != nil {
			t.Fatal(err)
		}
		defer out.close()
		err = f.show(out, to, &report.Tune{Chosen: report.TuneChosen{YAML: "passes: 1\n"}}, nil)
		return stdout.String(), readFile(t, json), err
	}
	if _, _, err := show(link); err != nil || readFile(t, real) != "passes: 1\n" {
		t.Errorf("%q, %v", readFile(t, real), err)
	}
	if info, err := os.Lstat(link); err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link is %v, %v", info, err)
	}
	if _, err := os.Stat("/dev/full"); err != nil {
		t.Skip("needs /dev/full, which Linux has: ", err)
	}
	if table, json, err := show("/dev/full"); fail.Status(err) != fail.Environment || table == "" || json == "" {
		t.Errorf("%q, %q, %v", table, json, err)
	}
}

// TestTuneRefusesPaths: a directory whose path no YAML and no JSON can have is refused before the
// search.
func TestTuneRefusesPaths(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "a\xffb")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Skip("needs a file system that takes names which are not UTF-8: ", err)
	}
	r := command(t, t.Context(), tuneBriefly(t, "--budget=1s", "--disk", dir)...)
	if r.status != 2 || strings.Count(r.stderr, "\n") != 1 || !strings.Contains(r.stderr, "not UTF-8") {
		t.Errorf("%d, %q", r.status, r.stderr)
	}
}

// TestTuneWithoutFigures: a gain that is of one run, or of runs that vary too much, has no percentage in
// the table, in the YAML and in Go.
func TestTuneWithoutFigures(t *testing.T) {
	gain := func(samples ...float64) tune.Gain {
		g := tune.Gain{Samples: samples}
		for i, v := range samples {
			if i == 0 {
				g.Low, g.High = v, v
			}
			g.Low, g.High = min(g.Low, v), max(g.High, v)
		}
		g.Median = (g.Low + g.High) / 2
		return g
	}
	for name, c := range map[string]struct {
		gain, last tune.Gain
		variation  float64
		figures    bool
	}{
		"sure":     {gain(0.1, 0.2), gain(0.1, 0.2), 0.1, true},
		"one run":  {gain(1.777), gain(1.777), 0.1, false},
		"far away": {gain(0.1, 0.8), gain(0.1, 0.8), 0.1, false},
		"noise":    {gain(0.1, 0.2), gain(0.1, 0.2), 0.6, false},
	} {
		f := &tuneFlags{}
		fs := pflag.NewFlagSet("tune", pflag.ContinueOnError)
		f.run.register(fs)
		knobs := f.knobs(fs, job.Result{Rows: 100, Batches: 10})
		tu := &tuning{flags: f, knobs: knobs[1:2]} // workers
		tu.names = []tune.Setting{tu.knobs[0].setting()}
		res := &tune.Result{
			Choice: tune.Choice{1}, Better: true, Last: c.last, LastDefault: []float64{2, 2}, LastChosen: []float64{1, 1}, Default: []float64{2}, Variation: c.variation,
			Trials: []tune.Trial{{Outcome: tune.Kept, Gain: c.gain}},
		}
		m := &machine{warnings: func() []diag.Warning { return nil }}
		doc, err := tu.document(fs, once{machine: m}, res)
		if err != nil {
			t.Fatal(err)
		}
		doc.Variation = 0 // which is said in the head, and is no gain
		var b strings.Builder
		if err := doc.Page(nil).Write(&b, report.Table); err != nil {
			t.Fatal(err)
		}
		for form, text := range map[string]string{"table": b.String(), "YAML": doc.Chosen.YAML, "Go": doc.Chosen.Go} {
			if strings.Contains(text, " %") != c.figures || !strings.Contains(text, "faster") {
				t.Errorf("%s, %s: %s", name, form, text)
			}
		}
	}
}
