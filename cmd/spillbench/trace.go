package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/simulate"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

func newTrace(stdout, stderr io.Writer) *cobra.Command {
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
	cmd.AddCommand(newRecord(stdout, stderr), newReplay(stdout, stderr), newTraceCompare(stdout, stderr))
	return cmd
}

func newRecord(stdout, stderr io.Writer) *cobra.Command {
	f := runFlags{output: outputFlags{figures: true}}
	cmd := &cobra.Command{
		Use:   "record FILE",
		Short: "Do what run does, and write its trace to FILE",
		Long: `Do what run does, with all its flags, and write its trace to FILE. An existing FILE is
replaced only if it is a trace.`,
		Example: `  spillbench trace record run.trace --input data.parquet --repeat 8 --passes 3`,
		Args:    files(1, 1, "a trace's file"),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if err := f.validate(); err != nil {
				return err
			}
			if err := replaceable(args[0]); err != nil {
				return err
			}
			if err := apart(append(f.output.places(), place{"the trace " + args[0], args[0]}), readings(f.input.files...)); err != nil {
				return err
			}
			to, err := os.Create(args[0])
			if err != nil {
				return fail.Usagef("%s cannot be written: %w (name a file in a directory that you may write to)", args[0], pathless(err))
			}
			f.engine.trace = simulate.NewRecorder(to)
			err = run(cmd.Context(), &f, stdout, stderr)
			return errors.Join(err, f.engine.trace.Close(), to.Close())
		},
	}
	f.register(cmd.Flags())
	return cmd
}

// replaceable refuses a file that has something else than a trace: it may be what was meant to be
// read.
func replaceable(name string) error {
	info, err := os.Stat(name)
	if err != nil || !info.Mode().IsRegular() || info.Size() == 0 {
		return nil
	}
	if _, err = readTrace(name); errors.Is(err, simulate.ErrFormat) {
		return fail.Usagef("%s exists and is not a trace (name a new file; --input names what is loaded)", name)
	}
	return nil
}

// replayFlags are the flags of trace replay and compare.
type replayFlags struct {
	output  outputFlags
	policy  string
	sizes   [tier.Disk + 1]tier.Amount // 0: as recorded
	speeds  []string
	setting simulate.Setting
}

func (f *replayFlags) register(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.SortFlags = false
	for _, k := range tier.Kinds() {
		fs.TextVar(&f.sizes[k], k.String()+"-memory", tier.Amount{}, fmt.Sprintf("`SIZE` of each %s space, such as 512MiB (default as recorded)", k))
	}
	fs.StringArrayVar(&f.speeds, "bandwidth", nil, "bytes a second from one space to another, as `FROM-TO=SIZE` such as disk:0-gpu:0=2GiB (repeatable; default as recorded)")
	f.output.register(fs)
}

// validate makes the setting.
func (f *replayFlags) validate() (err error) {
	f.setting = simulate.Setting{Capacity: make(map[tier.Kind]int64), Bandwidth: make(map[simulate.Edge]float64)}
	for _, k := range tier.Kinds() {
		if f.sizes[k].Share != 0 {
			return fail.Usagef("--%s-memory %s: a replay has no machine to take a share of (give a size, such as 512MiB)", k, f.sizes[k])
		}
		f.setting.Capacity[k] = f.sizes[k].Bytes
	}
	for _, s := range f.speeds {
		way, amount, _ := strings.Cut(s, "=")
		from, to, _ := strings.Cut(way, "-")
		var e simulate.Edge
		size, err := tier.ParseAmount(amount)
		if err = errors.Join(err, e.From.UnmarshalText([]byte(from)), e.To.UnmarshalText([]byte(to))); err != nil || size.Bytes <= 0 {
			return fail.Usagef("--bandwidth %q: want FROM-TO=SIZE, such as disk:0-gpu:0=2GiB", s)
		}
		f.setting.Bandwidth[e] = float64(size.Bytes)
	}
	if f.policy != "" {
		f.setting.Policy, err = monitor.ByName(f.policy)
	}
	return err
}

func newReplay(stdout, stderr io.Writer) *cobra.Command {
	f := replayFlags{output: outputFlags{prints: true}}
	cmd := &cobra.Command{
		Use:   "replay FILE",
		Short: "Predict what is moved, and the time, with a setting",
		Long: `Predict what is moved, and the time, with a setting, beside what was measured when FILE
was recorded.`,
		Example: `  spillbench trace replay run.trace
  spillbench trace replay run.trace --policy lru --gpu-memory 1GiB --bandwidth disk:0-gpu:0=2GiB`,
		Args: files(1, 1, "a trace's file"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.run(cmd.Context(), "trace replay", args, false, stdout, stderr)
		},
	}
	cmd.Flags().Var(choice(&f.policy, "", monitor.Names()...), "policy", "what moves down first, by `NAME`: "+strings.Join(monitor.Names(), ", ")+" (default as recorded)")
	f.register(cmd)
	return cmd
}

func newTraceCompare(stdout, stderr io.Writer) *cobra.Command {
	f := replayFlags{output: outputFlags{prints: true}}
	cmd := &cobra.Command{
		Use:   "compare FILE...",
		Short: "Predict what is moved, and the time, with each policy",
		Long: `Predict what is moved, and the time, with each policy, beside what was measured when each
FILE was recorded.`,
		Example: `  spillbench trace compare run.trace
  spillbench trace compare a.trace b.trace --format markdown`,
		Args: files(1, 1<<20, "a trace's file"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.run(cmd.Context(), "trace compare", args, true, stdout, stderr)
		},
	}
	f.register(cmd)
	return cmd
}

// files wants so many names; what says of what.
func files(least, most int, what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < least || len(args) > most {
			return fail.Usagef("%s wants the name of %s (see %s --help)", strings.TrimPrefix(cmd.CommandPath(), "spillbench "), what, cmd.CommandPath())
		}
		return nil
	}
}

// run replays traces, each with the setting or with all policies.
func (f *replayFlags) run(ctx context.Context, command string, names []string, all bool, stdout, stderr io.Writer) (err error) {
	if err := f.validate(); err != nil {
		return err
	}
	out, err := f.output.open(ctx, stdout, stderr, names...)
	if err != nil {
		return err
	}
	top, err := topology.Discover(ctx, topology.Options{})
	if err != nil {
		return err
	}
	doc := &report.Trace{Header: report.NewHeader(command, report.MachineEnv(top), nil)}
	for _, name := range names {
		t, err := readTrace(name)
		if err != nil {
			return err
		}
		of := report.Replayed{
			File: name, Events: len(t.Events), CutOff: t.CutOff,
			Recorded: outcome(t.Policy, simulate.Measured(t), nil),
		}
		policies := []string{f.policy}
		if all {
			policies = monitor.Names()
		}
		for _, p := range policies {
			s := f.setting
			if all {
				s.Policy, _ = monitor.ByName(p) // it is of Names
			} else if p == "" {
				p = t.Policy
			}
			res, err := simulate.Run(ctx, t, s)
			if errors.Is(err, simulate.ErrSetting) {
				return fail.Usagef("%s: %w", name, err)
			}
			if err != nil && !errors.Is(err, simulate.ErrStuck) {
				return fmt.Errorf("%s: %w", name, err)
			}
			of.Replays = append(of.Replays, outcome(p, res, err))
		}
		doc.Traces = append(doc.Traces, of)
	}
	return out.show(doc, nil)
}

func readTrace(name string) (*simulate.Trace, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, fail.Usagef("%s cannot be read: %w (name a file that trace record wrote)", name, pathless(err))
	}
	defer f.Close()
	t, err := simulate.Read(f)
	if err != nil {
		return nil, fail.Usagef("%s: %w (name a file that trace record wrote)", name, err)
	}
	return t, nil
}

// outcome returns the report of a result, or of the error in its place.
func outcome(policy string, r *simulate.Result, err error) report.Outcome {
	o := report.Outcome{Policy: policy, Edges: []report.Edge{}}
	if err != nil {
		o.Error = err.Error()
		return o
	}
	o.Seconds, o.StalledSeconds, o.Accesses, o.Found, o.Bytes = r.Took.Seconds(), r.Stalled.Seconds(), r.Accesses, r.Found, r.Bytes()
	o.FetchedBytes = r.Fetched()
	for _, m := range r.Moves {
		o.Edges = append(o.Edges, report.Edge{
			From: m.From.String(), To: m.To.String(), Batches: m.Batches, Bytes: m.Bytes, Copies: m.Copies, Unmoved: m.Unmoved,
			Seconds: m.Busy.Seconds(), GiBPerS: report.Rate(m.Bytes, m.Busy.Seconds()), ByReason: m.ByReason,
		})
	}
	return o
}
