package main

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/bandwidth"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/progress"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

const (
	// bandwidthMemory has room for two batches of the largest default size beside staging,
	// below the trigger.
	bandwidthMemory = 640 << 20
	// bandwidthShare bounds memories without a given size: each takes at most this part of what the
	// process may use, and the rest of the measurement two.
	bandwidthShare = 8
)

func newBandwidth(stdout, stderr io.Writer) *cobra.Command {
	// Without a codec, because compressed batches pass a disk faster than the limit, or slower.
	f := bandwidthFlags{
		output: outputFlags{figures: true}, engine: engineFlags{codec: convert.CodecNone.String(), ahead: off},
	}
	cmd := &cobra.Command{
		Use:   "bandwidth",
		Short: "Measure every edge, next to what the machine can do",
		Long: `Measure every edge, next to what the machine can do.

Batches of each size move along every edge, there and back, alone and several at a time.
Each move is timed beside the limit, pair by pair, in turns. The limit is memmove between
two regions of memory, for two host spaces of memory in these; for a GPU one asynchronous
copy of its driver between the same memories, for two GPUs the device's own copy to its
peer; and with a disk direct I/O on a file of the same kind in the same directory. Fresh
is room that was allocated and never written; rewritten is room that was written before.
The limit is also timed against itself, to show what a difference means. With a real GPU,
and between two spaces of a kind, an even number of moves is also measured with half of
them in each direction at once. After its moves each batch is compared with the table
that it was made of. Files have no names, and are gone with the process. --disk-throttle
slows the limit, too; --fault happens to moves alone. Nothing is compressed unless --codec
asks for it.

A row whose efficiency is no further from 1 than the limit is from itself says nothing,
and is marked. The default is --quick: it moves at most 1 GiB, ours and the limit's
together, and ends within 10 s on a disk of 100 MiB/s. --thorough measures batches as
large as engines make them, and moves some 280 GiB to and from each disk. That takes
minutes on a fast one; on a slow one, and where writing wears, choose --sizes.`,
		Example: `  spillbench bandwidth
  spillbench bandwidth --thorough --disk /mnt/nvme --json bandwidth.json
  spillbench bandwidth --between gpu,host --sizes 16MiB,64MiB --threads 1,4
  spillbench bandwidth --format benchfmt    # for benchstat`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.run(cmd.Context(), cmd.Flags(), stdout, stderr)
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	f.register(fs)
	f.engine.register(fs, bandwidthMemory)
	f.output.register(fs)
	return cmd
}

// suit makes memories without a given size small enough for the machine.
func (f *bandwidthFlags) suit(flags *pflag.FlagSet, memory int64) {
	most := memory / bandwidthShare / tier.Page * tier.Page
	if most <= 0 || most >= bandwidthMemory {
		return
	}
	if !flags.Changed("gpu-memory") {
		f.engine.gpuMemory = tier.Amount{Bytes: most}
	}
	if !flags.Changed("host-memory") {
		f.engine.hostMemory = tier.Amount{Bytes: most}
	}
}

// run measures and reports. It always closes the engine and leaves nothing behind.
func (f *bandwidthFlags) run(ctx context.Context, flags *pflag.FlagSet, stdout, stderr io.Writer) (err error) {
	start := time.Now()
	if err := f.validate(); err != nil {
		return err
	}
	out, err := f.output.open(ctx, stdout, stderr)
	if err != nil {
		return err
	}
	top, err := topology.Discover(ctx, topology.Options{})
	if err != nil {
		return err
	}
	memory := top.Limits.MemoryBytes
	f.suit(flags, memory)
	f.engine.seed, f.engine.beside = f.seed, 2*memory/bandwidthShare
	m, err := f.engine.open(ctx, &notes{})
	if err != nil {
		return err
	}
	bar := f.output.bar(stderr, m.engine.Stats)
	name, _, _ := f.extent()
	cfg := bandwidth.Config{
		Engine: m.engine, Pairs: f.pairs, Seed: f.seed, Between: f.between, OneOfEach: name == quick,
		Spare: f.engine.beside, Progress: bar, Files: m.faults.Slow,
	}
	doc := &report.Bandwidth{Rows: []report.BandwidthRow{}}
	plan, err := f.plan(&cfg)
	if err == nil {
		var rows []report.BandwidthRow
		rows, err = plan.Run(ctx)
		doc.Rows = append(doc.Rows, rows...)
	}
	bar.Close()
	if errors.Is(err, bandwidth.ErrChanged) {
		err = fail.Wrongf("%w", err)
	}
	if err := errors.Join(err, m.engine.Close()); err != nil {
		return m.blame(ctx, err)
	}

	m.settle()
	for _, s := range plan.Skipped {
		m.notes.add(s.Error(), "left out: "+s.Error())
	}
	if f.engine.codec != convert.CodecNone.String() {
		m.notes.add("compressed", "moves to disk may be compressed (--codec "+f.engine.codec+"): "+
			"rates are those of the bytes before, and an efficiency above 1 can be the codec's; "+
			"--codec none moves the bytes as the limit does")
	}
	doc.Header = report.NewHeader("bandwidth", m.env, m.warnings())
	doc.Config = report.BandwidthConfig{
		Config: m.config, Extent: name, PlannedBytes: plan.Ours + plan.Limit,
		Seed: f.seed, Pairs: f.pairs, Sizes: cfg.Sizes, Threads: cfg.Threads,
	}
	doc.WallSeconds = time.Since(start).Seconds()
	return out.result(doc, m.notes.lines())
}

// bar returns a progress bar, which draws if stderr is a terminal.
func (f *outputFlags) bar(stderr io.Writer, stats func() spillway.Stats) *progress.Bar {
	if f.quiet || !progress.OnTerminal(stderr) {
		return new(progress.Bar)
	}
	return progress.New(stderr, stats)
}

// result shows a document with these notes, and prints the warnings.
func (o *output) result(doc report.Document, lines []string) error {
	err := o.show(doc, lines)
	if err == nil {
		o.warn(lines)
	}
	return err
}
