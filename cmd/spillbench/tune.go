package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/job"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/progress"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/tune"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/tier"
)

const (
	// defaultBudget has room for some sixty runs of the generated table on two cores.
	defaultBudget = time.Minute
	maxBudget     = 24 * time.Hour
	// defaultMostWritten is what these runs move to disks, with some to spare.
	defaultMostWritten = 32 << 30
)

// tuneFlags are the flags of tune: those of run, and how long it may take.
type tuneFlags struct {
	run         runFlags
	budget      time.Duration
	mostWritten tier.Amount
	yaml        fileFlag // a path or -
}

func newTune(stdout, stderr io.Writer) *cobra.Command {
	f := tuneFlags{run: runFlags{input: inputFlags{times: tunedTimes, again: true}}}
	cmd := &cobra.Command{
		Use:   "tune [FILE]...",
		Short: "Find settings with which run is faster on this machine",
		Long: `Find settings with which run is faster on this machine.

The work is that of run, with its flags and on its FILEs: what is measured is how long
loading, the passes and dropping take. Each value is run beside the default, and those
that are faster by more than runs vary are combined. The combination is then compared
with the default anew, in pairs of runs. If it does not win, the result is the default,
and the command says so.

Printed are a table with the reason for each value, and the configuration as flags, as
YAML for --config, and as a spillway.Config in Go. A setting whose flag is given, also by
--config, stays as it is. Memories are never changed: how much there is, you know better.
The gain of a single value is that of the best among many, and so too good by some; that
of the whole is not.

All runs are verified as those of run are. Nothing stays on disks.`,
		Example: `  spillbench tune
  spillbench tune data.parquet --repeat 8 --gpu-memory 1GiB --host-memory 2GiB --budget 5m
  spillbench tune --yaml tuned.yaml -q
  spillbench run --config tuned.yaml
  spillbench tune --codec zstd --format json    # all but the codec`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			f.run.input.files = append(f.run.input.files, args...)
			return f.tune(cmd.Context(), cmd.Flags(), stdout, stderr)
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.DurationVar(&f.budget, "budget", defaultBudget, "how long it may take, about; more time tries more values and finds smaller gains")
	f.mostWritten.Bytes = defaultMostWritten
	fs.TextVar(&f.mostWritten, "most-written", f.mostWritten, "`SIZE` that all runs together move to disks at most, before compression")
	fs.Var(&f.yaml, "yaml", "write the configuration as YAML to `FILE`, or nothing but it to standard output if it is -")
	f.run.register(fs)
	return cmd
}

func (f *tuneFlags) validate() error {
	switch {
	case f.budget <= 0 || f.budget > maxBudget:
		return fail.Usagef("--budget %v is out of range (want more than 0s, up to %v, such as 5m)", f.budget, maxBudget)
	case f.mostWritten.Share != 0:
		return fail.Usagef("--most-written %s: a share of what is not known (give a size, such as 16GiB)", f.mostWritten)
	case f.yaml == "-" && (f.run.output.json == "-" || f.run.output.format != ""):
		return fail.Usagef("--yaml - and --json - or --format both want standard output (give one of them, or --yaml FILE)")
	}
	for _, d := range f.run.engine.disks {
		if dir := absolute(d.dir); !utf8.ValidString(dir) {
			return fail.Usagef("--disk %q: its path is not UTF-8, and so cannot be in the configuration that comes out (name another directory, or a link to it)", dir)
		}
	}
	return f.run.validate()
}

// tune searches and reports. Each run opens an engine and closes it, so nothing is left behind.
func (f *tuneFlags) tune(ctx context.Context, fs *pflag.FlagSet, stdout, stderr io.Writer) (err error) {
	start := time.Now()
	if err := f.validate(); err != nil {
		return err
	}
	if err := apart(append(f.run.places(), place{"--yaml " + string(f.yaml), string(f.yaml)}), readings(f.run.reads()...)); err != nil {
		return err
	}
	out, err := f.run.output.open(ctx, stdout, stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.close()) }()
	var yaml *destination
	if f.yaml != "" && f.yaml != "-" {
		if yaml, err = newDestination("--yaml", string(f.yaml)); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, yaml.close()) }()
	}
	f.run.engine.seed = f.run.input.seed
	var bar progress.Bar
	drawn := &bar
	if !f.run.output.quiet && progress.OnTerminal(stderr) {
		drawn = progress.New(stderr, func() spillway.Stats { return spillway.Stats{} }) // of engines that come and go
	}
	t := &tuning{flags: f, bar: drawn, log: &notes{}}
	drawn.Begin("looking at the default", -1)
	first, err := t.once(ctx, &f.run)
	if err != nil {
		drawn.Close()
		return err
	}
	t.knobs = f.knobs(fs, first.res)
	t.names = make([]tune.Setting, len(t.knobs))
	for i, k := range t.knobs {
		t.names[i] = k.setting()
	}
	res, err := tune.Search(ctx, tune.Config{
		Settings: t.names, Budget: f.budget, Elapsed: func() time.Duration { return time.Since(start) }, Bytes: f.mostWritten.Bytes - first.written,
	}, t.measure)
	drawn.Close()
	if err != nil {
		return err
	}
	doc, err := t.document(fs, first, &res)
	if err != nil {
		return err
	}
	doc.WallSeconds = time.Since(start).Seconds()
	return f.show(out, yaml, doc, t.log.lines())
}

// show prints the result, and writes the YAML. One that cannot be written costs nothing else: the
// result took long.
func (f *tuneFlags) show(out *output, yaml *destination, doc *report.Tune, lines []string) (err error) {
	if f.yaml == "-" {
		return errors.Join(out.write(doc), toStdout(out.stdout, []byte(doc.Chosen.YAML)))
	}
	if yaml != nil {
		err = yaml.write([]byte(doc.Chosen.YAML))
	}
	err = errors.Join(out.show(doc, lines), err)
	if err == nil {
		out.warn(lines)
	}
	return err
}

// knob is a setting that tune tries: the flags that it consists of, what they are, and other values
// for them.
type knob struct {
	flags  []string
	usual  []string
	values [][]string
}

// setting is the knob in words.
func (k knob) setting() tune.Setting {
	s := tune.Setting{Name: strings.Join(k.flags, "/"), Default: strings.Join(k.usual, "/")}
	for _, v := range k.values {
		s.Values = append(s.Values, strings.Join(v, "/"))
	}
	return s
}

// knobs returns what is tried, the most promising first: on the machines that we know, how the work is
// cut mattered more than how the engine does it. A flag that was given is not tried.
func (f *tuneFlags) knobs(fs *pflag.FlagSet, first job.Result) (all []knob) {
	add := func(values [][]string, flags ...string) {
		k := knob{flags: flags}
		for _, name := range flags {
			if fs.Changed(name) {
				return
			}
			k.usual = append(k.usual, fs.Lookup(name).Value.String())
		}
		for _, v := range values {
			if !slices.Equal(v, k.usual) {
				k.values = append(k.values, v)
			}
		}
		if len(k.values) > 0 {
			all = append(all, k)
		}
	}
	rows := max(1, first.Rows/max(1, first.Batches))
	var parts [][]string
	if rows > 1 {
		parts = numbers(rows/2, 2*rows)
	}
	workers, partitions := int64(f.run.input.workers), int64(f.run.partitions)
	add(parts, "rows-per-batch")
	add(numbers(max(1, workers/2), min(2*workers, maxWorkers)), "workers")
	add(others("codec", "bitpack", "none", "s2", "zstd"), "codec")
	add([][]string{{"0.9", "0.8"}, {"0.75", "0.5"}}, "trigger", "stop")
	add(numbers(4, 1), "moves-per-edge")
	add([][]string{{"10ms"}, {"200ms"}}, "monitor-period")
	add(others("policy", monitor.Names()...), "policy")
	add([][]string{{"off"}}, "write-ahead")
	add(numbers(max(1, partitions/2), min(2*partitions, maxPartitions)), "partitions")
	add(numbers(4, 64), "disk-slots")
	return slices.DeleteFunc(all, func(k knob) bool { return k.flags[0] == "trigger" && fs.Changed("limit") })
}

func numbers(values ...int64) (all [][]string) {
	for _, v := range values {
		all = append(all, []string{strconv.FormatInt(v, 10)})
	}
	return all
}

// others are the choices of a flag, in this order.
func others(flag string, order ...string) (all [][]string) {
	for _, v := range order {
		if slices.Contains(choices(flag), v) {
			all = append(all, []string{v})
		}
	}
	return all
}

// tuning is a search under way.
type tuning struct {
	flags *tuneFlags
	knobs []knob
	names []tune.Setting
	bar   *progress.Bar
	log   *notes
}

// with returns the flags with the values of a choice, and as a set that knows their texts.
func (t *tuning) with(c tune.Choice) (*runFlags, *pflag.FlagSet, error) {
	v := new(runFlags)
	fs := pflag.NewFlagSet("tune", pflag.ContinueOnError)
	v.register(fs)
	*v = t.flags.run // the set now has these values: it points at v
	for i, value := range c {
		if value == 0 {
			continue
		}
		for k, name := range t.knobs[i].flags {
			if err := fs.Set(name, t.knobs[i].values[value-1][k]); err != nil {
				return nil, nil, err
			}
		}
	}
	return v, fs, nil
}

// measure is one run with the values of a choice.
func (t *tuning) measure(ctx context.Context, c tune.Choice) (tune.Sample, error) {
	v, _, err := t.with(c)
	if err != nil {
		return tune.Sample{}, err
	}
	t.bar.Begin("tuning: "+t.words(c), -1)
	r, err := t.once(ctx, v)
	// What is wrong with the default, and wrong data, is no matter of the values.
	isDefault := !slices.ContainsFunc(c, func(v int) bool { return v != 0 })
	if s := fail.Status(err); err != nil && ctx.Err() == nil && !isDefault && (s == fail.Usage || s == fail.Environment) {
		err = fmt.Errorf("%w: %w", tune.ErrRefused, err)
	}
	return tune.Sample{Seconds: r.seconds, Bytes: r.written}, err
}

// words says what a choice is.
func (t *tuning) words(c tune.Choice) string {
	var parts []string
	for i, value := range c {
		if value > 0 {
			parts = append(parts, t.names[i].Name+" "+t.names[i].Values[value-1])
		}
	}
	if len(parts) == 0 {
		return "the default"
	}
	return strings.Join(parts, ", ")
}

// once is what one run came to.
type once struct {
	res     job.Result
	machine *machine // closed
	sources []string
	seconds float64
	written int64
}

// once does the job of run in an engine of its own. What others left in the heap is collected before
// the clock runs.
func (t *tuning) once(ctx context.Context, v *runFlags) (o once, err error) {
	if err := v.validate(); err != nil {
		return o, err
	}
	runtime.GC()
	m, err := v.engine.open(ctx, t.log)
	if err != nil {
		return o, err
	}
	inputs, sources, batches := v.input.sources(m, m.config.GPUMemoryBytes/batchesInGPU)
	cfg := v.job(m)
	cfg.Inputs, cfg.Batches = inputs, batches
	o = once{machine: m, sources: sources}
	o.res, err = job.Run(ctx, cfg)
	for _, p := range o.res.Phases {
		o.seconds += p.Took.Seconds()
	}
	for _, e := range m.engine.Stats().Edges {
		if e.To.Kind == tier.Disk {
			o.written += e.Bytes
		}
	}
	err = errors.Join(err, m.engine.Close())
	if err == nil && o.res.Batches == 0 {
		err = fail.Usagef("the input holds no batches (name a file with rows in it)")
	}
	if err != nil {
		return o, m.blame(ctx, err)
	}
	return o, verdict(o.res)
}

// document is the result.
func (t *tuning) document(fs *pflag.FlagSet, first once, res *tune.Result) (*report.Tune, error) {
	f, m := t.flags, first.machine
	doc := &report.Tune{
		Header: report.NewHeader("tune", m.env, m.warnings()),
		Config: report.RunConfig{
			Config: m.config, Seed: f.run.input.seed, Place: f.run.place, Repeat: f.run.input.repeat,
			Partitions: f.run.partitions, Passes: f.run.passes, Workers: f.run.input.workers,
		},
		Input:         report.Input{Sources: first.sources, Rows: first.res.Rows, Batches: first.res.Batches, Bytes: first.res.Bytes},
		BudgetSeconds: f.budget.Seconds(), MostWrittenBytes: f.mostWritten.Bytes,
		Runs: res.Runs + 1, WrittenBytes: res.Bytes + first.written,
		DefaultSeconds: first.seconds, Variation: res.Variation,
		Better: res.Better, Verdict: t.verdict(res), Settings: []report.TuneSetting{},
		Comparison: report.TuneComparison{
			Pairs: len(res.LastDefault), Gain: res.Last.Median, GainLow: res.Last.Low, GainHigh: res.Last.High,
			Samples: report.TuneSamples{DefaultSeconds: append([]float64{}, res.LastDefault...), ChosenSeconds: append([]float64{}, res.LastChosen...)},
		},
	}
	doc.Config.RowsPerBatch = f.run.input.rowsPerBatch
	if len(res.Default) > 0 {
		doc.DefaultSeconds = median(res.Default)
	}
	for i, s := range t.names {
		setting := report.TuneSetting{Name: s.Name, Default: s.Default, Chosen: s.Default, Reason: res.Reason(t.names, i), Tried: []report.TuneTrial{}}
		if v := res.Choice[i]; v > 0 {
			setting.Chosen = s.Values[v-1]
		}
		for _, trial := range res.Trials {
			if trial.Setting == i {
				setting.Tried = append(setting.Tried, report.TuneTrial{
					Value: s.Values[trial.Value], Outcome: string(trial.Outcome),
					Gain: trial.Gain.Median, GainLow: trial.Gain.Low, GainHigh: trial.Gain.High, Samples: append([]float64{}, trial.Gain.Samples...),
					Vague: trial.Gain.Vague(res.Variation),
				})
			}
		}
		doc.Settings = append(doc.Settings, setting)
	}
	v, set, err := t.with(res.Choice)
	if err != nil {
		return nil, err
	}
	doc.Chosen, err = configuration{flags: v, set: set, given: fs, verdict: doc.Verdict, settings: doc.Settings}.forms()
	return doc, err
}

// verdict says what came of it, in words.
func (t *tuning) verdict(res *tune.Result) string {
	switch {
	case len(t.names) == 0:
		return "Nothing was tried: all settings were given. The configuration is what was given."
	case res.Short:
		return fmt.Sprintf("Nothing was tried: the budget has no room for enough runs (give --budget %v at least, or --most-written more). The configuration is the default.", max(time.Second, res.Needed.Round(time.Second)))
	case res.Better && res.Last.Vague(res.Variation):
		return fmt.Sprintf("The chosen configuration is faster than the default, in the median of %d pairs of runs that nothing was chosen by. The runs vary too much for a figure.", len(res.LastChosen))
	case res.Better:
		return fmt.Sprintf("The chosen configuration is %s faster than the default: %.3f s instead of %.3f s (medians of %d pairs of runs that nothing was chosen by; %.1f to %.1f %%).",
			fmt.Sprintf("%.1f %%", 100*res.Last.Median), median(res.LastChosen), median(res.LastDefault), len(res.LastChosen), 100*res.Last.Low, 100*res.Last.High)
	case len(res.LastChosen) > 0:
		return fmt.Sprintf("Nothing is better than the default: what looked faster was %s in the last comparison, which is within what runs vary. The configuration is the default.", res.Last.Words(res.Variation))
	}
	if res.Open > 0 {
		return fmt.Sprintf("Nothing is known to be better than the default: the budget ended while %d values still looked faster, in too few runs (give more --budget, or stop what else runs). The configuration is the default.", res.Open)
	}
	return "Nothing is better than the default: no value was faster by more than runs vary. The configuration is the default."
}
