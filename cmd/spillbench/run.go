package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/job"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/progress"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/system"
	"github.com/spillway-db/spillway/observe/page"
)

// batchesInGPU is how many generated batches a GPU space has room for: so workers and
// moves under way find some, too.
const batchesInGPU = 16

// mostTasks is how many tasks a document names that waited for room.
const mostTasks = 50

// Bounds of what may be asked for: far above sense, far below overflow.
const (
	maxPartitions = 1 << 16
	maxPasses     = 1_000_000
	maxRuns       = 10_000
)

// runFlags are the flags of run.
type runFlags struct {
	output     outputFlags
	engine     engineFlags
	input      inputFlags
	place      string
	partitions int
	passes     int
	runs       int
	listen     string
	stallAfter time.Duration // how long nothing moves before a note says so
}

func newRun(stdout, stderr io.Writer) *cobra.Command {
	f := runFlags{output: outputFlags{figures: true}}
	cmd := &cobra.Command{
		Use:   "run [FILE]...",
		Short: "Load a table through all tiers, work on it, verify it",
		Long: `Load a table through all tiers, work on it, verify it.

Each FILE (Parquet, Arrow or CSV) is loaded, as those of --input are, which come
first. Without any a table is generated. FILE may be a pipe, and - is standard
input: an Arrow stream is read as it comes, and the other formats are first copied
to a temporary file in TMPDIR.

All batches are put into the GPU tier, which holds only a part of them: the rest
moves down to host memory and disk. Each pass then brings every batch back to the
GPU, computes a digest over every byte there, and compares it with that of the
record that was loaded. At the end, unless there were no passes, one task for each
batch (Engine.RunTask) does so once more and drops the batch. Input without any
batch, such as a CSV file of only a header, is wrong use: there would be nothing
to do.

--runs N does all of this N times, after a warm-up that does not count, and prints
the median and the spread.`,
		Example: `  spillbench run data.parquet more.csv --passes 3
  spillbench run data.arrow --repeat 8 --gpu-memory 1GiB --host-memory 2GiB --disk /mnt/nvme
  spillbench run --runs 5                              # the median of five
  spillbench run --policy lru --codec s2 --json result.json
  spillbench run --fault op=read,kind=bitflip,at=20    # ends with 1: the corruption is found`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			f.input.files = append(f.input.files, args...)
			return run(cmd.Context(), &f, stdout, stderr)
		},
	}
	f.register(cmd.Flags())
	return cmd
}

func (f *runFlags) register(fs *pflag.FlagSet) {
	fs.SortFlags = false
	f.input.register(fs, "load", "GPU and host memory together")
	fs.IntVar(&f.partitions, "partitions", defaultWorkers(), "partitions of the repository that is loaded; each is loaded by one goroutine")
	fs.IntVar(&f.passes, "passes", 1, "how often all batches are worked on")
	fs.IntVar(&f.runs, "runs", 1, "do the whole work `N` times; above 1 after a warm-up that does not count")
	f.input.registerWorkers(fs, "how many batches are worked on at once")
	fs.Var(choice(&f.place, "gpu", "gpu", "fits"), "place", "where batches are loaded, by `NAME`: gpu (each waits for room there) or fits (the fastest tier with room)")
	f.input.registerSeed(fs)
	f.engine.register(fs, defaultMemory)
	f.output.register(fs)
	f.stallAfter = stallAfter
	fs.Lookup("quiet").Usage += "; where --listen serves is said all the same"
	fs.Var(&valueFlag{&f.listen, "HOST:PORT, such as 127.0.0.1:0"}, "listen", "serve the report while the run lasts, at `ADDRESS`, such as 127.0.0.1:0 for any free port; without a host only this machine reaches it")
}

func (f *runFlags) validate() error {
	for _, n := range []bounded{
		{"partitions", int64(f.partitions), 1, maxPartitions},
		{"passes", int64(f.passes), 0, maxPasses},
		{"runs", int64(f.runs), 1, maxRuns},
	} {
		if err := n.validate(); err != nil {
			return err
		}
	}
	if _, err := listenAddress(f.listen); err != nil {
		return err
	}
	f.input.again = f.runs > 1
	if err := f.input.validate(); err != nil {
		return err
	}
	return f.engine.validate()
}

// run does the main job and reports it. Whatever happens, the engine is closed
// and nothing is left behind.
func run(ctx context.Context, f *runFlags, stdout, stderr io.Writer) (err error) {
	start, cpu := time.Now(), system.CPUTime()
	if err := f.validate(); err != nil {
		return err
	}
	if err := apart(f.output.places(), readings(f.input.files...)); err != nil {
		return err
	}
	out, err := f.output.open(ctx, stdout, stderr)
	if err != nil {
		return err
	}
	f.engine.seed = f.input.seed
	live, err := f.serve(stderr)
	if err != nil {
		return err
	}
	defer live.close(ctx)
	rec := f.record()
	defer rec.end()
	var bar progress.Bar
	drawn := &bar
	still := f.stall(func(line string) { drawn.Say(stderr, line) })
	var admitted admissions
	f.engine.events = spillway.Tee(rec.events(), still.events(), admitted.event)
	m, err := f.engine.open(ctx, &notes{})
	if err != nil {
		return err
	}
	rec.watch(m.engine)
	inputs, sources, batches := f.input.sources(m, m.gpuBytes/batchesInGPU)
	live.show(func() *page.Report { return f.now(m, rec, sources, start, out.call.args) })
	if !f.output.quiet && progress.OnTerminal(stderr) {
		drawn = progress.New(stderr, m.engine.Stats)
	}
	cfg := f.job(m)
	cfg.Inputs, cfg.Batches, cfg.Progress = inputs, batches, rec.progress(ofPasses{drawn, f.passes})
	var held []report.Held
	cfg.Failed = func() { held = holders(m.engine) }
	others := watchOthers(m.topology)
	still.watch(m.engine.Spaces())
	res, runs, err := f.repeat(ctx, cfg)
	processors := others.end()
	still.end()
	drawn.Close()
	rec.end()
	took := time.Since(start)
	line := rec.snapshot() // before limits are measured
	var limits []report.Limit
	if err == nil && (f.output.html != "" || f.listen != "") {
		limits = m.limits(ctx)
	}
	began := time.Now()
	live.hold() // what is shown must not read what changes now
	err = errors.Join(err, m.engine.Close())
	if err == nil && res.Batches == 0 {
		err = fail.Usagef("the input holds no batches (name a file with rows in it)")
	}
	err = m.blame(ctx, err)
	if err != nil && (ctx.Err() != nil || fail.Status(err) == fail.Usage) {
		return err
	}
	m.settle()
	if res.OnHost {
		m.notes.add("on host", "the GPU cannot compute digests here: the bytes were copied back and digested in host memory")
	}
	doc := f.document(m, sources, res)
	f.addRuns(doc, runs)
	doc.Processors, doc.Admission = processors, admitted.report(m.engine.Stats().Admission)
	doc.WallSeconds = (took + time.Since(began)).Seconds()
	doc.CPUSeconds = (system.CPUTime() - cpu).Seconds()
	if busy := doc.Busy(); busy != "" {
		m.notes.add("busy", busy)
	}
	doc.Limits, doc.Timeline = limits, line
	if err != nil {
		doc.Error, doc.Held = fail.Line(err), held
	}
	live.end(ctx, doc, out.call)
	if err != nil {
		return errors.Join(err, out.showFailed(doc))
	}
	lines := m.notes.lines()
	// The verdict goes first: it decides the status.
	err = errors.Join(m.blame(ctx, verdict(res)), out.show(doc, lines))
	if err == nil {
		out.warn(lines)
	}
	return err
}

// job is what is to be done on m, except for the input.
func (f *runFlags) job(m *machine) job.Config {
	return job.Config{
		Engine: m.engine, Repeat: f.input.repeat, Fits: f.place == "fits",
		Partitions: f.partitions, Passes: f.passes, Workers: f.input.workers, Held: m.plan.Held(),
	}
}

// ofPasses says of a pass how many there are: "pass 3 of 10".
type ofPasses struct {
	job.Progress
	passes int
}

// Begin starts a phase.
func (p ofPasses) Begin(phase string, steps int64) { p.Progress.Begin(p.named(phase), steps) }

func (p ofPasses) named(phase string) string {
	if run, n, found := strings.Cut(phase, "pass-"); found {
		return fmt.Sprintf("%spass %s of %d", run, n, p.passes)
	}
	return phase
}

// ofRun is a job.Progress of one run of several: its phases begin with the name of the run.
type ofRun struct {
	job.Progress
	run string
}

// Begin starts a phase.
func (p ofRun) Begin(phase string, steps int64) { p.Progress.Begin(p.run+phase, steps) }

// oneRun is the phases of a run and what it took.
type oneRun struct {
	report.Repetition
	phases []job.Phase
}

// repeat does the job, or if it is to be done several times a warm-up and then the job so often. The
// result has the findings of all runs, and the input and phases of the last one.
func (f *runFlags) repeat(ctx context.Context, cfg job.Config) (all job.Result, runs []oneRun, err error) {
	first, progress := 1, cfg.Progress
	if f.runs > 1 {
		first = 0 // the warm-up
	}
	for i := first; i <= f.runs; i++ {
		switch {
		case i == 0:
			cfg.Progress = ofRun{progress, "warm-up, "}
		case f.runs > 1:
			cfg.Progress = ofRun{progress, fmt.Sprintf("run %d of %d, ", i, f.runs)}
		}
		start, cpu := time.Now(), system.CPUTime()
		res, err := job.Run(ctx, cfg)
		one := report.Repetition{Seconds: time.Since(start).Seconds(), CPUSeconds: (system.CPUTime() - cpu).Seconds()}
		res.Checked += all.Checked
		res.Mismatches += all.Mismatches
		res.Corrupt += all.Corrupt
		res.Unread += all.Unread
		res.OnHost = res.OnHost || all.OnHost
		res.First = cmp.Or(all.First, res.First)
		all = res
		if err != nil {
			return all, runs, err
		}
		if i > 0 {
			runs = append(runs, oneRun{one, res.Phases})
		}
	}
	return all, runs, nil
}

// stall returns what says that nothing moves; nil if nobody wants to read it, or the run ends sooner.
func (f *runFlags) stall(say func(line string)) *stall {
	if f.output.quiet || f.stallAfter <= 0 || f.engine.stuckAfter <= f.stallAfter {
		return nil
	}
	return newStall(f.stallAfter, func(why string) {
		say(fmt.Sprintf("spillbench: note: nothing moves: %s; the run ends after %v of that, or twice as long (--stuck-after)", why, f.engine.stuckAfter))
	})
}

// holders is who holds what in the spaces of an engine.
func holders(eng *spillway.Engine) (all []report.Held) {
	for _, s := range eng.Spaces() {
		if h, ok := eng.Holders(s.ID()); ok {
			all = append(all, report.Held{Space: s.ID().String(), Used: h.Used, Available: h.Available, Text: h.String()})
		}
	}
	return all
}

// verdict is what a finished run ends with.
func verdict(res job.Result) error {
	if res.Mismatches > 0 {
		return fail.Wrongf("%s; the first: %s", page.Verified(verification(res)).Wrong(), res.First)
	}
	return nil
}

func verification(res job.Result) report.Verification {
	return report.Verification{Checked: res.Checked > 0, Batches: res.Checked, Mismatches: res.Mismatches, Corrupt: res.Corrupt}
}

// document is the result; the engine is closed by now.
func (f *runFlags) document(m *machine, sources []string, res job.Result) *report.Run {
	stats := m.engine.Stats()
	doc := &report.Run{
		Header: report.NewHeader("run", m.env, m.warnings()),
		Config: report.RunConfig{
			Config: m.config, Seed: f.input.seed, Place: f.place, Repeat: f.input.repeat,
			Partitions: f.partitions, Passes: f.passes, Workers: f.input.workers,
		},
		Input:  report.Input{Sources: sources, Rows: res.Rows, Batches: res.Batches, Bytes: res.Bytes},
		Verify: verification(res),
		Spaces: spaces(stats),
		Edges:  edges(stats),
		Waits: report.Waits{
			Count: stats.Waits.Count, P50: stats.Waits.P50.Seconds(), P99: stats.Waits.P99.Seconds(),
			P999: stats.Waits.P999.Seconds(), Max: stats.Waits.Max.Seconds(),
		},
	}
	doc.Config.RowsPerBatch = f.input.rowsPerBatch
	for _, w := range stats.Work { // of one operator: what the end drops would have been used by another pass
		doc.Work = append(doc.Work, report.Work{Plan: w.Plan, Operator: w.Operator, Port: w.Port, DownBytes: w.Down.Bytes, UpBytes: w.Up.Bytes, Unread: min(w.Unread, res.Unread)})
	}
	for _, o := range stats.Blocked[:min(len(stats.Blocked), mostTasks)] {
		doc.Tasks = append(doc.Tasks, report.Task{Name: o.Owner, Waits: o.Waits, Total: o.Total.Seconds(), Longest: o.Longest.Seconds()})
	}
	doc.Phases = phases(res.Phases)
	return doc
}

// addRuns adds the runs to the document. Its phases are those of the median run, or of the run that
// failed.
func (f *runFlags) addRuns(doc *report.Run, runs []oneRun) {
	if f.runs > 1 {
		doc.Config.Runs = f.runs
	}
	times := make([]report.Repetition, len(runs))
	for i, one := range runs {
		times[i] = one.Repetition
	}
	if median := doc.SetRuns(times); len(runs) == f.runs {
		doc.Phases = phases(runs[median].phases)
	}
}

func phases(all []job.Phase) (out []report.Phase) {
	for _, p := range all {
		out = append(out, report.Phase{Name: p.Name, Seconds: p.Took.Seconds()})
	}
	return out
}

func spaces(stats spillway.Stats) []report.Space {
	out := []report.Space{}
	for _, s := range stats.Spaces {
		space := report.Space{
			ID: s.ID.String(), Backend: s.Backend, CapacityBytes: s.Capacity, PeakBytes: s.Peak, EndBytes: s.Used(),
		}
		if s.Disk != nil {
			space.WrittenBytes, space.ReadBytes = s.Disk.Written, s.Disk.Read
		}
		out = append(out, space)
	}
	return out
}

func edges(stats spillway.Stats) []report.Edge {
	out := []report.Edge{}
	for _, e := range stats.Edges {
		out = append(out, report.Edge{
			From: e.From.String(), To: e.To.String(), Batches: e.Batches, Bytes: e.Bytes, Copies: e.Copies, Unmoved: e.Unmoved,
			Ahead: e.Ahead, AheadUsed: e.AheadUsed, AheadInVain: e.AheadInVain,
			Seconds: e.Busy.Seconds(), GiBPerS: report.Rate(e.Bytes, e.Busy.Seconds()), ByReason: e.ByReason,
			P50: e.P50.Seconds(), P99: e.P99.Seconds(), Longest: e.Longest.Seconds(),
		})
	}
	return out
}
