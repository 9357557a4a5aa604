package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/bandwidth"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/progress"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/tier"
)

const (
	// bandwidthMemory has room for two batches of the largest default size in addition to staging,
	// below the trigger.
	bandwidthMemory = 640 << 20
	// bandwidthShare is the value of engineFlags.share.
	bandwidthShare = 8
)

// The extents: how much bandwidth measures.
const (
	quick    = "quick"    // the default: a number in seconds
	thorough = "thorough" // large batches, several at once, all spaces: minutes
	ownSizes = "sizes"    // those of --sizes
)

// A quick measurement moves at most quickMost bytes in memory and on disk, for Spillway and for the
// limit together, and quickDisk of them to and from the disk. On a disk of 100 MiB/s it ends within
// ten seconds, of which two are for everything else.
const (
	quickMost = 1 << 30
	quickDisk = 800 << 20
)

// Fewer pairs than eleven do not distinguish a difference from noise.
const minPairs = 11

// maxLoads bounds the combinations of sizes and numbers of moves.
const maxLoads = 64

// bandwidthFlags are the flags of bandwidth.
type bandwidthFlags struct {
	output          outputFlags
	engine          engineFlags
	measured        bandwidth.Config // sizes and threads are nil for those of the extent
	quick, thorough bool
	extent          string // set by validate
	asked           bool   // for the sizes or the numbers of moves; set by validate
}

func newBandwidth() *cobra.Command {
	// The codec is none, because compressed batches pass a disk at another rate than the limit.
	f := bandwidthFlags{output: outputFlags{figures: true}, engine: engineFlags{
		config: report.Config{Codec: "none"}, share: bandwidthShare,
	}}
	cmd := &cobra.Command{
		Use:   "bandwidth",
		Short: "Measure every edge, and the machine's own limit for each",
		Long: `Measure every edge, and the machine's own limit for each.

bandwidth moves batches of each size along every edge, there and back, alone and several
at a time. It times each move and the limit alternately, in pairs. The limit is memmove
between two regions of memory (for two host spaces, of memory in them); for a GPU one
asynchronous copy of its driver between the same memories; for two GPUs the device's own
copy to its peer; and with a disk direct I/O on a file of the same kind in the same
directory. Both write to rewritten room, which was written before.
bandwidth also times the limit against itself, to show what a difference means. With a
real GPU, and between two spaces of a kind, it also measures an even number of moves with
half of them in each direction at once. It compares each batch, after its moves, with the
table that the batch was made of. Files have no names and are gone with the process.
--disk-throttle slows the limit, too; --fault affects moves only. Batches are compressed
only if --codec asks for it.

A row whose efficiency is no further from 1 than the limit is from itself is marked as
inconclusive. The default is --quick: it moves at most 1 GiB, for Spillway and the limit
together, and ends within 10 s on a disk of 100 MiB/s. --thorough measures batches as
large as engines make them, and moves some 280 GiB to and from each disk. That takes
minutes on a fast disk; on a slow one, and where writing wears the disk, choose --sizes.`,
		Example: `  spillbench bandwidth
  spillbench bandwidth --thorough --disk /mnt/nvme --json bandwidth.json
  spillbench bandwidth --between gpu,host --sizes 16MiB,64MiB --threads 1,4
  spillbench bandwidth --format benchfmt    # for benchstat`,
		Args: cobra.NoArgs,
		RunE: f.run,
	}
	fs := cmd.Flags()
	f.register(fs)
	f.engine.register(fs, bandwidthMemory)
	f.engine.config.WriteAheadBytesPerS, fs.Lookup("write-ahead").DefValue = 0, "off"
	f.output.register(fs)
	return cmd
}

// register adds the flags that only bandwidth has.
func (f *bandwidthFlags) register(fs *pflag.FlagSet) {
	fs.BoolVar(&f.quick, quick, false, "measure two sizes, one move at a time, one pair of spaces of each kind: "+
		"moves at most 1GiB, 800MiB of it to and from the disk (default)")
	fs.BoolVar(&f.thorough, thorough, false, "measure sizes up to 256MiB, one and two moves at a time, all spaces: "+
		"takes minutes, and moves some 280GiB to and from each disk (default off)")
	listVar(fs, &f.measured.Sizes, "sizes", "`SIZES` of the batches in bytes, separated by commas (default "+
		"256KiB,2MiB for --quick, and those of 1MiB,16MiB,64MiB,256MiB that fit for --thorough)", batchSize)
	listVar(fs, &f.measured.Threads, "threads", "`NUMBERS` of batches that move at the same time, separated by commas "+
		"(default 1 for --quick, and else 1,2)", func(s string) (n int, err error) {

		err = intFlag{&n, 1, 64}.Set(s)
		return n, err
	})
	intVar(fs, &f.measured.Pairs, "pairs", minPairs, minPairs, 10_000,
		"measure `N` pairs of a move and its limit for each figure")
	fs.Uint64Var(&f.measured.Seed, "seed", 1, "seed of the generated table, a whole number")
	listVar(fs, &f.measured.Between, "between", "measure only edges between these `KINDS` of spaces, such as gpu,host "+
		"or gpu,gpu (default all)", tier.ParseKind)
}

// batchSize parses a value of --sizes.
func batchSize(s string) (int64, error) {
	n, err := size.Parse(s)
	if err == nil && (n < bandwidth.SmallestBatch || n > bandwidth.LargestBatch || n%tier.Page != 0) {
		err = fmt.Errorf("%s: want multiples of 4KiB from %s to %s",
			s, size.Format(bandwidth.SmallestBatch), size.Format(bandwidth.LargestBatch))
	}
	return n, err
}

// listVar adds a flag that takes values separated by commas.
func listVar[T any](fs *pflag.FlagSet, to *[]T, name, usage string, parse func(string) (T, error)) {
	fs.Func(name, usage, func(text string) error {
		*to = nil
		for part := range strings.SplitSeq(text, ",") {
			v, err := parse(part)
			if err != nil {
				return err
			}
			*to = append(*to, v)
		}
		return nil
	})
}

// validate refuses flags that contradict each other, and sets what the extent measures.
func (f *bandwidthFlags) validate() error {
	c := &f.measured
	sizes, threads := []int64{256 << 10, 2 << 20}, []int{1, 2}
	f.asked = c.Sizes != nil || c.Threads != nil
	switch {
	case f.quick && f.thorough:
		return fail.Usagef("--quick and --thorough exclude each other (give one of them)")
	case f.quick && c.Sizes != nil:
		return fail.Usagef("--quick has sizes of its own (leave out --quick or --sizes)")
	case c.Sizes != nil:
		f.extent, sizes = ownSizes, c.Sizes
	case f.thorough:
		f.extent, sizes = thorough, []int64{1 << 20, 16 << 20, 64 << 20, 256 << 20}
	default:
		f.extent, threads, c.OneOfEach = quick, threads[:1], true
	}
	if c.Threads == nil {
		c.Threads = threads
	}
	c.Sizes = sizes
	if loads := len(c.Sizes) * len(c.Threads); loads > maxLoads {
		return fail.Usagef("--sizes and --threads name %d combinations (want at most %d)", loads, maxLoads)
	}
	return nil
}

// plan plans the measurement. The largest batches of a quick one become smaller until it moves at most
// quickMost and quickDisk: more edges, pairs or moves at a time need more. Sizes and numbers of moves
// that were asked for must fit; defaults that do not fit are left out.
func (f *bandwidthFlags) plan() (*bandwidth.Measurement, error) {
	c := &f.measured
	for {
		m, err := bandwidth.New(*c)
		if errors.Is(err, bandwidth.ErrNoEdges) {
			return nil, fail.Usagef("--between: %w (name more kinds of spaces, such as --between gpu,host)", err)
		}
		if err != nil {
			return nil, err
		}
		if n := len(m.Skipped); n > 0 && (f.asked || n == len(c.Sizes)*len(c.Threads)) {
			return nil, fail.Usagef("%w (choose smaller --sizes or fewer --threads, "+
				"or raise --gpu-memory, --host-memory or the size of --disk)", m.Skipped[0])
		}
		last := &c.Sizes[len(c.Sizes)-1]
		small := m.Ours+m.Limit <= quickMost && m.Disk <= quickDisk
		if f.extent != quick || small || *last == bandwidth.SmallestBatch {
			return m, nil
		}
		*last = max(bandwidth.SmallestBatch, *last/2)
		if len(c.Sizes) > 1 && c.Sizes[0] >= *last {
			c.Sizes = c.Sizes[1:]
		}
	}
}

// run measures and reports. It always closes the engine and leaves nothing behind.
func (f *bandwidthFlags) run(cmd *cobra.Command, _ []string) error {
	start, ctx, c := time.Now(), cmd.Context(), &f.measured
	if err := f.validate(); err != nil {
		return err
	}
	out, err := f.output.open(cmd)
	if err != nil {
		return err
	}
	f.engine.seed = c.Seed
	m, err := f.engine.open(ctx)
	if err != nil {
		return err
	}
	bar := f.output.bar(cmd.ErrOrStderr(), m.engine.Stats)
	c.Engine, c.Spare, c.Progress, c.Files = m.engine, f.engine.buffers, bar, m.faults.Slow
	var rows []report.BandwidthRow
	plan, err := f.plan()
	if err == nil {
		rows, err = plan.Run(ctx)
	}
	bar.Close()
	if errors.Is(err, bandwidth.ErrChanged) {
		err = fail.Wrongf("%w", err)
	}
	if err := m.settle(ctx, errors.Join(err, m.engine.Close())); err != nil {
		return err
	}
	for _, s := range plan.Skipped {
		m.notes.add("left out: " + s.Error())
	}
	if codec := m.config.Codec; codec != "none" {
		m.notes.add("moves to disk may be compressed (--codec " + codec + "): " +
			"rates count the bytes before compression, so an efficiency above 1 can come from the codec; " +
			"--codec none moves the same bytes as the limit")
	}
	return m.finish(out, &report.Bandwidth{
		Header: m.header("bandwidth"), Rows: rows, WallSeconds: time.Since(start).Seconds(),
		Config: report.BandwidthConfig{
			Config: m.config, Extent: f.extent, PlannedBytes: plan.Ours + plan.Limit,
			Seed: c.Seed, Pairs: c.Pairs, Sizes: c.Sizes, Threads: c.Threads,
		},
	}, nil)
}

// bar returns a progress bar, which draws if stderr is a terminal.
func (f *outputFlags) bar(stderr io.Writer, stats func() spillway.Stats) *progress.Bar {
	if f.quiet || !progress.OnTerminal(stderr) {
		return new(progress.Bar)
	}
	return progress.New(stderr, stats)
}
