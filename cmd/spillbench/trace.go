package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/simulate"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/observe/page"
	"github.com/spillway-db/spillway/tier"
)

func newTrace() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "trace",
		Short: "Record a run, and replay it with other policies, memories and speeds",
		Long: `Record a run, and replay it with other policies, memories and speeds.

A trace has the events of an engine, one on a line, as JSON. A replay simulates the puts,
uses, hints and drops of batches at their recorded times. The monitor's own code decides
which batches move to slower tiers. Moves have the bandwidth that their edge had when the
trace was recorded, unless --bandwidth sets another.

A replay ignores reads ahead, copies written ahead, compression, pending tasks, memory
that programs reserve, open handles, and changes of marks and limits.`,
		Example: `  spillbench trace record run.trace --passes 3
  spillbench trace replay run.trace --policy lru
  spillbench trace compare run.trace`,
	}
	cmd.AddCommand(newRecord(), newReplay(), newTraceCompare())
	return cmd
}

func newRecord() *cobra.Command {
	f := runFlags{output: outputFlags{figures: true}}
	cmd := &cobra.Command{
		Use:   "record FILE",
		Short: "Do what run does, and write its trace to FILE",
		Long: `Do what run does, with all its flags, and write its trace to FILE. An existing FILE is
replaced only if it is a trace.

The recording begins when the engine is open: a command that ends before that leaves FILE
as it is. A recording that is interrupted, or whose run fails, ends with the last event,
and can be replayed.`,
		Example: `  spillbench trace record run.trace --input data.parquet --repeat 8 --passes 3`,
		Args:    files(1, 1, "the name of a trace's file"),
		RunE: func(cmd *cobra.Command, args []string) error {
			to := &traceFile{place: place{"the trace " + args[0], args[0]}}
			if info, err := os.Stat(to.name); err == nil && info.Mode().IsRegular() && info.Size() > 0 {
				if _, err = readTrace(to.name); errors.Is(err, simulate.ErrFormat) { // it may be meant as input
					return fail.Usagef("%s exists and is not a trace (name a new file; --input names what is loaded)",
						to.name)
				}
			}
			f.output.trace = to.place
			f.trace = simulate.NewRecorder(to)
			f.engine.events = f.trace.Event
			err := errors.Join(f.run(cmd, nil), f.trace.Close())
			if to.file != nil {
				err = errors.Join(err, to.file.Close())
			}
			return err
		},
	}
	f.register(cmd.Flags())
	return cmd
}

// traceFile is the file of a recording. The first write creates it or replaces what it had.
type traceFile struct {
	place
	file *os.File // nil before the first write
}

// Write implements io.Writer.
func (t *traceFile) Write(p []byte) (n int, err error) {
	if t.file == nil {
		if t.file, err = os.Create(t.name); err != nil {
			return 0, err
		}
	}
	return t.file.Write(p)
}

// replayFlags are the flags of trace replay and trace compare.
type replayFlags struct {
	output   outputFlags
	policies []string // "": as recorded
	setting  simulate.Setting
}

// register adds the flags that all replays have.
func (f *replayFlags) register(fs *pflag.FlagSet) {
	f.setting = simulate.Setting{Capacity: make(map[tier.Kind]int64), Bandwidth: make(map[simulate.Edge]float64)}
	for _, k := range tier.Kinds() {
		usage := fmt.Sprintf("`SIZE` of each %s space in bytes, such as 512MiB (default as recorded)", k)
		fs.Func(k.String()+"-memory", usage, func(text string) (err error) {
			f.setting.Capacity[k], err = size.Parse(text)
			return err
		})
	}
	fs.Func("bandwidth", "bytes a second from one space to another, as `FROM-TO=SIZE` such as disk:0-gpu:0=2GiB "+
		"(repeatable; default as recorded)", func(text string) error {

		way, amount, _ := strings.Cut(text, "=")
		from, to, _ := strings.Cut(way, "-")
		var e simulate.Edge
		bytes, err := size.Parse(amount)
		if errors.Join(err, e.From.UnmarshalText([]byte(from)), e.To.UnmarshalText([]byte(to))) != nil {
			return errors.New("want FROM-TO=SIZE, such as disk:0-gpu:0=2GiB")
		}
		f.setting.Bandwidth[e] = float64(bytes)
		return nil
	})
	f.output.prints = true
	f.output.register(fs)
}

func newReplay() *cobra.Command {
	f := replayFlags{policies: []string{""}}
	cmd := &cobra.Command{
		Use:   "replay FILE",
		Short: "Predict moves and times with another setting",
		Long: `Predict moves and times with another setting, and print them next to the measured ones of
the recording.`,
		Example: `  spillbench trace replay run.trace
  spillbench trace replay run.trace --policy lru --gpu-memory 1GiB --bandwidth disk:0-gpu:0=2GiB`,
		Args: files(1, 1, "the name of a trace's file"),
		RunE: f.run,
	}
	cmd.Flags().Var(choice(&f.policies[0], "", monitor.Names()...), "policy",
		"order of eviction, by `NAME`: "+strings.Join(monitor.Names(), ", ")+" (default as recorded)")
	f.register(cmd.Flags())
	return cmd
}

func newTraceCompare() *cobra.Command {
	f := replayFlags{policies: monitor.Names()}
	cmd := &cobra.Command{
		Use:   "compare FILE...",
		Short: "Predict moves and times with each policy",
		Long: `Predict moves and times with each policy, and print them next to the measured ones of each
recording.`,
		Example: `  spillbench trace compare run.trace
  spillbench trace compare a.trace b.trace --format markdown`,
		Args: files(1, 1<<20, "the name of a trace's file"),
		RunE: f.run,
	}
	f.register(cmd.Flags())
	return cmd
}

// run replays each trace with each policy.
func (f *replayFlags) run(cmd *cobra.Command, names []string) error {
	ctx := cmd.Context()
	out, err := f.output.open(cmd, names...)
	if err != nil {
		return err
	}
	header, err := out.header()
	if err != nil {
		return err
	}
	doc := &report.Trace{Header: header}
	for _, name := range names {
		t, err := readTrace(name)
		if err != nil {
			return err
		}
		of := report.Replayed{
			File: name, Events: len(t.Events), CutOff: t.CutOff,
			Recorded: outcome(t.Policy, simulate.Measured(t), nil),
		}
		for _, policy := range f.policies {
			f.setting.Policy = policy
			res, err := simulate.Run(ctx, t, f.setting)
			if errors.Is(err, simulate.ErrSetting) {
				return fail.Usagef("%s: %w", name, err)
			}
			if err != nil && !errors.Is(err, simulate.ErrStuck) {
				return fmt.Errorf("%s: %w", name, err)
			}
			of.Replays = append(of.Replays, outcome(cmp.Or(policy, t.Policy), res, err))
		}
		doc.Traces = append(doc.Traces, of)
	}
	return out.show(doc, nil)
}

func readTrace(name string) (*simulate.Trace, error) {
	var t *simulate.Trace
	f, err := os.Open(name)
	if err == nil {
		defer f.Close()
		t, err = simulate.Read(f)
	}
	if err != nil {
		return nil, fail.Usagef("%s cannot be read: %w (name a file that trace record wrote)", name, pathless(err))
	}
	return t, nil
}

// outcome describes the result of a replay, or the error in its place.
func outcome(policy string, r *simulate.Result, err error) report.Outcome {
	if err != nil {
		return report.Outcome{Policy: policy, Error: err.Error(), Edges: []report.Edge{}}
	}
	return report.Outcome{
		Policy: policy, Seconds: r.Took.Seconds(), StalledSeconds: r.Stalled.Seconds(),
		Accesses: r.Accesses, Found: r.Found, Bytes: r.Bytes, FetchedBytes: r.Fetched, Edges: page.EdgesOf(r.Moves),
	}
}
