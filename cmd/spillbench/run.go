package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/job"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/progress"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/simulate"
	"github.com/spillway-db/spillway/internal/thread"
	"github.com/spillway-db/spillway/observe/page"
	"github.com/spillway-db/spillway/observe/timeline"
)

// batchesInGPU is the number of generated batches for which a GPU space has room: enough for all workers
// and moves in progress.
const batchesInGPU = 16

// maxTasks is how many of the tasks that waited for room a document lists.
const maxTasks = 50

// sampled is the period at which a run samples the spaces for its timeline: the length of the intervals
// of a short run.
const sampled = 5 * time.Millisecond

// maxIntervals is the maximum number of intervals in the timeline of a document.
const maxIntervals = 240

// runFlags are the flags of run and of trace record.
type runFlags struct {
	output     outputFlags
	engine     engineFlags
	input      inputFlags
	place      string
	partitions int
	passes     int
	runs       int
	listen     string
	stallAfter time.Duration      // the time without moves before a note reports it
	trace      *simulate.Recorder // gets the engine's events; nil: run does not record
}

func newRun() *cobra.Command {
	f := runFlags{output: outputFlags{figures: true}}
	cmd := &cobra.Command{
		Use:   "run [FILE]...",
		Short: "Load a table through all tiers, work on it, verify it",
		Long: `Load a table through all tiers, work on it, verify it.

run loads the files of --input, and then each FILE (Parquet, Arrow or CSV). Without
files it generates a table. FILE may be a pipe, and - is standard input: an Arrow
stream is read as it comes, and other formats are first copied to a temporary file
in TMPDIR.

run puts all batches into the GPU tier, which holds only a part of them: the rest
moves down to host memory and disk. Each pass then brings every batch back to the
GPU, computes a digest over every byte of it, and compares that with the digest of the
record that was loaded. At the end, one task for each batch (Engine.RunTask) does so
once more and drops the batch; with --passes 0 there are no tasks. Input without any
batch, such as a CSV file of only a header, is wrong use: there would be nothing to
do.

--runs N does all of this N times, after a warm-up that does not count, and prints
the median and the spread.`,
		Example: `  spillbench run data.parquet more.csv --passes 3
  spillbench run data.arrow --repeat 8 --gpu-memory 1GiB --host-memory 2GiB --disk /mnt/nvme
  spillbench run --runs 5                              # the median of five
  spillbench run --policy lru --codec s2 --json result.json
  spillbench run --fault op=read,kind=bitflip,at=20    # ends with 1: the corruption is found`,
		Args: cobra.ArbitraryArgs,
		RunE: f.run,
	}
	f.register(cmd.Flags())
	return cmd
}

func (f *runFlags) register(fs *pflag.FlagSet) {
	f.input.register(fs, "load", "GPU and host memory together")
	intVar(fs, &f.partitions, "partitions", defaultWorkers(), 1, 1<<16,
		"load into `N` partitions of a repository; one goroutine loads each")
	intVar(fs, &f.passes, "passes", 1, 0, 1_000_000, "work on all batches `N` times")
	intVar(fs, &f.runs, "runs", 1, 1, 10_000,
		"do the whole work `N` times; above 1 after a warm-up that does not count")
	f.input.registerWorkers(fs, "number of batches that are worked on at once")
	fs.Var(choice(&f.place, "gpu", "gpu", "fits"), "place",
		"load batches to `PLACE`: gpu (wait for room there) or fits (the fastest tier with room)")
	f.input.registerSeed(fs)
	f.engine.register(fs, defaultMemory)
	f.output.register(fs)
	f.stallAfter = stallAfter
	fs.Lookup("quiet").Usage += "; the address of --listen is printed all the same"
	fs.Var(&valueFlag{&f.listen, "HOST:PORT, such as 127.0.0.1:0"}, "listen",
		"serve the report during the run at `ADDRESS` (default not served); 127.0.0.1:0 is any free port, "+
			"and without a host only this machine reaches it")
}

// run does the work and reports it. It always closes the engine and leaves nothing behind.
func (f *runFlags) run(cmd *cobra.Command, files []string) error {
	start, cpu := time.Now(), thread.ProcessTime()
	ctx, stderr := cmd.Context(), cmd.ErrOrStderr()
	f.input.files = append(f.input.files, files...)
	f.input.again = f.runs > 1
	if err := f.input.validate(); err != nil {
		return err
	}
	out, err := f.output.open(cmd, f.input.files...)
	if err != nil {
		return err
	}
	live, err := f.serve(stderr)
	if err != nil {
		return err
	}
	defer live.close(ctx)
	rec, still, admitted := timeline.New(), &stall{moving: make(map[uint64]bool), last: start}, new(admissions)
	f.engine.seed = f.input.seed
	f.engine.events = spillway.Tee(f.engine.events, rec.Event, still.event, admitted.event)
	m, err := f.engine.open(ctx)
	if err != nil {
		return err
	}
	if f.trace != nil {
		f.trace.Begin(m.config.Policy, m.engine.Stats().Spaces)
	}
	endSamples := rec.Watch(m.engine.Spaces, sampled)
	defer endSamples()
	inputs, sources, batches := f.input.sources(m, m.config.GPUMemoryBytes/int64(len(m.opened.GPUs)*batchesInGPU))
	now := func() *page.Report { return f.now(m, rec, sources, out.call) }
	live.show(now)
	bar := f.output.bar(stderr, m.engine.Stats)
	endStall := still.watch(f.stallAfter, m.engine.Spaces(), func(room string) {
		if !f.output.quiet && f.stallAfter < f.engine.stallTimeout {
			bar.Say(stderr, fmt.Sprintf("spillbench: note: nothing moves: %s; the run ends after %v of that, "+
				"or twice as long (--stall-timeout)", room, f.engine.stallTimeout))
		}
	})
	cfg := f.job(m)
	cfg.Inputs, cfg.Batches = inputs, batches
	var held []report.Held
	cfg.Failed = func() {
		for _, s := range m.engine.Spaces() {
			if h, ok := m.engine.Holders(s.ID()); ok {
				held = append(held, report.Held{
					Space: s.ID().String(), Used: h.Used, Available: h.Available, Text: h.String(),
				})
			}
		}
	}
	before := processorsNow()
	res, runs, perRun, err := f.repeat(ctx, cfg, phased{bar, rec, "", f.passes})
	processors := othersShare(m.opened.Topology, before, processorsNow())
	endStall()
	bar.Close()
	endSamples()
	took := time.Since(start)
	line := rec.Snapshot(maxIntervals, page.Numbers) // before limits are measured
	var limits []report.Limit
	if err == nil && (f.output.html != "" || f.listen != "") {
		limits = m.limits(ctx)
	}
	began := time.Now()
	last := now() // pages must not read what changes below
	live.show(func() *page.Report { return last })
	err = errors.Join(err, m.engine.Close())
	if err == nil && res.Batches == 0 {
		err = fail.Usagef("the input holds no batches (name a file with rows in it)")
	}
	err = m.settle(ctx, err)
	if err != nil && (ctx.Err() != nil || fail.Status(err) == fail.Usage) {
		return err
	}
	doc := f.document(m, sources, res)
	if median := doc.SetRuns(runs); len(runs) == f.runs { // else the phases are those of the run that failed
		doc.Phases = perRun[median]
	}
	doc.Processors, doc.Admission = processors, admitted.report(m.engine.Stats().Admission)
	doc.WallSeconds = (took + time.Since(began)).Seconds()
	doc.CPUSeconds = (thread.ProcessTime() - cpu).Seconds()
	if busy := doc.Busy(); busy != "" {
		m.notes.add(busy)
	}
	doc.Limits, doc.Timeline = limits, line
	if err != nil {
		doc.Error, doc.Held = fail.Line(err), held
	}
	live.end(ctx, doc, out.call)
	if err != nil {
		return errors.Join(err, out.show(doc, nil))
	}
	if res.Mismatches > 0 {
		err = m.settle(ctx, fail.Wrongf("%s; the first: %s", doc.Verify.Wrong(), res.First))
	}
	return m.finish(out, doc, err)
}

// job returns the work on m, without the input.
func (f *runFlags) job(m *machine) job.Config {
	return job.Config{
		Engine: m.engine, Repeat: f.input.repeat, Fits: f.place == "fits",
		Partitions: f.partitions, Passes: f.passes, Workers: f.input.workers, Held: m.plan.Held(),
	}
}

// phased is a job.Progress that records the phases in the timeline and draws them on the progress line.
type phased struct {
	*progress.Bar
	timeline *timeline.Recorder
	run      string // before the name of each phase, such as "run 2 of 5, "
	passes   int
}

// Begin starts a phase.
func (p phased) Begin(phase string, steps int64) {
	p.timeline.Phase(time.Now(), p.run+phase)
	p.Bar.Begin(p.run+passOf(phase, p.passes), steps)
}

// passOf adds the number of passes to the name of a pass: "pass 3 of 10".
func passOf(phase string, passes int) string {
	if n, found := strings.CutPrefix(phase, "pass-"); found {
		return fmt.Sprintf("pass %s of %d", n, passes)
	}
	return phase
}

// repeat does the job --runs times, above 1 after a warm-up. The result has the findings of all runs,
// and the input and phases of the last one. runs and phases have the times of each successful run.
func (f *runFlags) repeat(ctx context.Context, cfg job.Config, p phased) (
	all job.Result, runs []report.Repetition, phases [][]report.Phase, err error) {

	first := 1
	if f.runs > 1 {
		first, p.run = 0, "warm-up, "
	}
	for i := first; i <= f.runs; i++ {
		if i > first {
			p.run = fmt.Sprintf("run %d of %d, ", i, f.runs)
		}
		cfg.Progress = p
		start, cpu := time.Now(), thread.ProcessTime()
		res, err := job.Run(ctx, cfg)
		one := report.Repetition{
			Seconds: time.Since(start).Seconds(), CPUSeconds: (thread.ProcessTime() - cpu).Seconds(),
		}
		res.Checked += all.Checked
		res.Mismatches += all.Mismatches
		res.Corrupt += all.Corrupt
		res.Unread += all.Unread
		res.First = cmp.Or(all.First, res.First)
		all = res
		if err != nil {
			return all, runs, phases, err
		}
		if i > 0 {
			runs, phases = append(runs, one), append(phases, res.Phases)
		}
	}
	return all, runs, phases, nil
}

// document returns the document of the run up to now.
func (f *runFlags) document(m *machine, sources []string, res job.Result) *report.Run {
	var made page.Run
	made.Fill(m.engine.Stats())
	doc := &report.Run{
		Header: m.header("run"),
		Config: report.RunConfig{
			Config: m.config, Seed: f.input.seed, Place: f.place, Repeat: f.input.repeat,
			Partitions: f.partitions, Passes: f.passes, Workers: f.input.workers,
		},
		Input: report.Input{Sources: sources, Rows: res.Rows, Batches: res.Batches, Bytes: res.Bytes},
		Verify: report.Verification{
			Checked: res.Checked > 0, Batches: res.Checked, Mismatches: res.Mismatches, Corrupt: res.Corrupt,
		},
		Spaces: made.Spaces, Edges: made.Edges, Phases: res.Phases, Waits: made.Waits,
		Work: made.Work, Tasks: made.Tasks[:min(len(made.Tasks), maxTasks)],
	}
	doc.Config.RowsPerBatch = int64(f.input.rowsPerBatch)
	if f.runs > 1 {
		doc.Config.Runs = f.runs
	}
	for i := range doc.Work { // another pass would have used the batches that the end drops
		doc.Work[i].Unread = min(doc.Work[i].Unread, res.Unread)
	}
	return doc
}
