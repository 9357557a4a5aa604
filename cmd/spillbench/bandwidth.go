package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/bandwidth"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/progress"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/topology"
)

const (
	// bandwidthMemory has room for two batches of the largest default size beside staging,
	// below the trigger.
	bandwidthMemory = 640 << 20
	// bandwidthShare bounds memories without a given size: each takes at most this part of what the
	// process may use, and the rest of the measurement two.
	bandwidthShare = 8

	// Fewer pairs than eleven do not distinguish a difference from noise.
	minPairs = 11
	maxPairs = 10_000
	maxMoves = 64
	maxLoads = 64
)

func newBandwidth(stdout, stderr io.Writer) *cobra.Command {
	// What is compressed passes a disk faster than its limit, or slower.
	f := bandwidthFlags{output: outputFlags{figures: true}, engine: engineFlags{codec: convert.CodecNone.String(), ahead: off}}
	cmd := &cobra.Command{
		Use:   "bandwidth",
		Short: "Measure every edge, next to what the machine can do",
		Long: `Measure every edge, next to what the machine can do.

Batches of each size move along every edge, there and back, alone and several at a time.
Each move is timed beside the limit, pair by pair, alternately: memmove between two
regions of memory, for a GPU one asynchronous copy of its driver between the same
memories, and where a disk takes part direct I/O at the same place, while nothing of the
engine's is there, or on a file of the same kind. Fresh is room that was set aside and
never written; rewritten is room that has been written before. The limit is also timed
against itself, so that it is known what a difference means. With a GPU an even number
of moves is also measured with half of them in each direction at once. Files have no
names, and are gone with the process. What --disk-throttle makes slow is slow for the
limit, too; --fault happens to moves alone. Nothing is compressed, unless --codec says
so.

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
			return measureBandwidth(cmd.Context(), &f, cmd.Flags(), stdout, stderr)
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
	for name, amount := range map[string]*tier.Amount{"gpu-memory": &f.engine.gpuMemory, "host-memory": &f.engine.hostMemory} {
		if !flags.Changed(name) {
			*amount = tier.Amount{Bytes: most}
		}
	}
}

// measureBandwidth measures and reports. Whatever happens, the engine is closed and nothing is
// left behind.
func measureBandwidth(ctx context.Context, f *bandwidthFlags, flags *pflag.FlagSet, stdout, stderr io.Writer) (err error) {
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
	watched := make(map[tier.ID]*bandwidth.Watch)
	f.engine.watch = func(i int) disk.FS {
		w := bandwidth.NewWatch()
		watched[tier.ID{Kind: tier.Disk, Ordinal: i}] = w
		return w
	}
	m, err := f.engine.open(ctx, &notes{})
	if err != nil {
		return err
	}
	var bar progress.Bar
	drawn := &bar
	if !f.output.quiet && progress.OnTerminal(stderr) {
		drawn = progress.New(stderr, m.engine.Stats)
	}
	doc := &report.Bandwidth{Config: report.BandwidthConfig{Seed: f.seed, Pairs: f.pairs, Extent: string(f.extent())}}
	sizes, threads := f.loads()
	err = f.measure(ctx, m, bandwidth.Config{
		Engine: m.engine, Sizes: sizes, Threads: threads, Pairs: f.pairs, Seed: f.seed, Between: f.between, OneOfEach: f.extent() == quick,
		Spare: f.engine.beside, Progress: drawn, Files: m.faults.Slow, Watched: watched,
	}, flags.Changed("sizes") || flags.Changed("threads"), doc)
	drawn.Close()
	if err := errors.Join(err, m.engine.Close()); err != nil {
		return m.blame(ctx, err)
	}
	m.settle()
	doc.Header, doc.Config.Config = report.NewHeader("bandwidth", m.env, m.warnings()), m.config
	doc.WallSeconds = time.Since(start).Seconds()
	lines := m.notes.lines()
	err = out.show(doc, lines)
	if err == nil {
		out.warn(lines)
	}
	return err
}

// measure runs the measurement and puts what it did into doc. What was asked for and does not fit is
// an error; of the defaults it is left out, and noted.
func (f *bandwidthFlags) measure(ctx context.Context, m *machine, cfg bandwidth.Config, asked bool, doc *report.Bandwidth) error {
	skipped, err := bandwidth.Fit(cfg)
	switch {
	case errors.Is(err, bandwidth.ErrNoEdges):
		return &fail.Error{Status: fail.Usage, Err: fmt.Errorf("--between %s: %w", f.between.String(), err), Fix: "name more kinds of spaces, such as --between gpu,host"}
	case err != nil:
		return err
	case len(skipped) > 0 && (asked || len(skipped) == len(cfg.Sizes)*len(cfg.Threads)):
		return &fail.Error{Status: fail.Usage, Err: skipped[0],
			Fix: "choose smaller --sizes or fewer --threads, or raise --gpu-memory, --host-memory or the size of --disk"}
	}
	planned, err := f.cut(&cfg)
	if err != nil {
		return err
	}
	doc.Config.Sizes, doc.Config.Threads, doc.Config.PlannedBytes = cfg.Sizes, cfg.Threads, planned.Ours+planned.Limit
	rows, skipped, err := bandwidth.Run(ctx, cfg)
	if err != nil {
		return err
	}
	doc.Rows = bandwidthRows(rows)
	for _, s := range skipped {
		m.notes.add(s.Error(), "left out: "+s.Error())
	}
	if f.engine.codec != convert.CodecNone.String() {
		m.notes.add("compressed", "moves to disk may be compressed (--codec "+f.engine.codec+
			"): rates are those of the bytes before, and an efficiency above 1 can be the codec's; --codec none moves the bytes as the limit does")
	}
	return nil
}

func bandwidthRows(rows []bandwidth.Row) []report.BandwidthRow {
	out := []report.BandwidthRow{}
	for _, r := range rows {
		row := report.BandwidthRow{
			From: r.From.String(), To: r.To.String(), Bytes: r.Bytes, Threads: r.Threads, GiBPerS: r.GiBPerS, State: string(r.State),
			LimitGiBPerS: r.Limit, LimitOf: string(r.LimitOf), Efficiency: r.Efficiency, Noise: r.Noise, CV: r.CV,
			BothWays: r.BothWays, Gain: r.Gain, LimitGain: r.LimitGain,
			Samples:      report.BandwidthSamples{GiBPerS: list(r.Samples.Ours), LimitGiBPerS: list(r.Samples.Limit), LimitAgainGiBPerS: list(r.Samples.Again)},
			Inconclusive: r.Err == nil && math.Abs(r.Efficiency-1) <= r.Noise,
		}
		if r.Err != nil {
			row.Error = fail.Line(r.Err)
		}
		out = append(out, row)
	}
	return out
}

// list is empty in JSON where there is nothing, and not null.
func list(v []float64) []float64 { return append([]float64{}, v...) }
