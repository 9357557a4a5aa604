package main

import (
	"cmp"
	"context"
	"errors"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/peer"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/progress"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

const (
	// compareMemory is what both sides have; the generated table is three times as large.
	compareMemory    = 256 << 20
	batchesInHost    = 16
	maxCompareRounds = 1000
)

// compareFlags are the flags of compare.
type compareFlags struct {
	output outputFlags
	engine engineFlags
	input  inputFlags
	peer   string
	rounds int
}

func newCompare(stdout, stderr io.Writer) *cobra.Command {
	f := compareFlags{output: outputFlags{figures: true}, engine: engineFlags{noGPUs: true}, input: inputFlags{again: true}}
	cmd := &cobra.Command{
		Use:   "compare --peer NAME",
		Short: "Spill the same data with and without Spillway",
		Long: `Spill the same data with and without Spillway.

Batches go from host memory to disk and back, and the same are written by the peer as a
Go program would do it today: arrow-go's ipc.FileWriter, one file, synced, read back by
ipc.FileReader, both by one goroutine, as they demand; ours are moved and read by
--workers. Both sides hash every byte that they have read, and both have as much memory,
--host-memory; what is larger streams through. Round by round each has its turn, who is
first changes, ours on an empty disk volume. Before the peer reads, its file is dropped
from the page cache, as it would be if other data had come, and so is what it has read;
"warm" is its writing without the sync, and its reading of what it has just written,
from the cache. Once, before anything is measured, every batch that comes back is
compared with the input. In each round the peer does its work once untimed, so that the
memory of the page cache is not fetched from the host of a virtual machine in its time.

Laying batches out in host memory is done once, when they are put, and not in what is
compared; it is counted in a figure of its own. Spill files are of no use after a crash,
so a direct write to them ends when the disk has the data, without telling it to flush
its own cache, as the peer's sync does.

With --disk-throttle the disk is that slow for both: for the peer as for a page cache
that reads ahead and writes behind at that rate, and "warm" knows of no disk. Faults of
--fault happen to our side alone, also while it opens its volumes.

No GPU takes part: --gpu, --gpus and --gpu-memory are taken, as by other commands, and
change nothing.`,
		Example: `  spillbench compare --peer arrow-ipc
  spillbench compare --peer arrow-ipc --input data.parquet --repeat 8 --host-memory 1GiB`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return compare(cmd.Context(), &f, stdout, stderr) },
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.Var(choice(&f.peer, "", peer.ArrowIPC), "peer", "what to compare with, by `NAME`: "+peer.ArrowIPC)
	f.input.register(fs, "spill", "the host memory")
	fs.IntVar(&f.rounds, "rounds", 5, "pairs of rounds: ours and the peer's, alternately")
	f.input.registerWorkers(fs, "how many of our batches are moved at once")
	f.input.registerSeed(fs)
	f.engine.register(fs, defaultMemory)
	f.engine.hostMemory.Bytes = compareMemory
	fs.Lookup("host-memory").DefValue = f.engine.hostMemory.String()
	for _, name := range []string{"gpu", "gpus", "gpu-memory"} {
		must(fs.MarkHidden(name))
	}
	f.output.register(fs)
	return cmd
}

func (f *compareFlags) validate() error {
	switch {
	case f.peer == "":
		return fail.Usagef("compare needs a peer (--peer %s)", peer.ArrowIPC)
	case f.rounds < 1 || f.rounds > maxCompareRounds:
		return fail.Usagef("--rounds %d is out of range (want 1 to %d)", f.rounds, maxCompareRounds)
	}
	if err := f.input.validate(); err != nil {
		return err
	}
	return f.engine.validate()
}

func compare(ctx context.Context, f *compareFlags, stdout, stderr io.Writer) (err error) {
	start := time.Now()
	if err := f.validate(); err != nil {
		return err
	}
	out, err := f.output.open(ctx, stdout, stderr, f.input.files...)
	if err != nil {
		return err
	}
	f.engine.seed = f.input.seed
	m, err := f.engine.open(ctx, &notes{})
	if err != nil {
		return err
	}
	if err := m.engine.Close(); err != nil { // each round opens its own
		return err
	}
	inputs, sources, batches := f.input.sources(m, m.config.HostMemoryBytes/batchesInHost)
	var bar progress.Bar
	drawn := &bar
	if !f.output.quiet && progress.OnTerminal(stderr) {
		drawn = progress.New(stderr, func() spillway.Stats { return spillway.Stats{} }) // of engines that come and go
	}
	cfg := f.both(m)
	cfg.Open, cfg.Inputs, cfg.Batches, cfg.Progress = m.reopen, inputs, batches, drawn
	res, err := peer.Run(ctx, cfg)
	drawn.Close()
	if err != nil {
		return m.blame(ctx, comparing(err))
	}
	m.settle()
	f.note(m, res)
	doc := f.document(m, sources, res)
	doc.WallSeconds = time.Since(start).Seconds()
	lines := m.notes.lines()
	err = out.show(doc, lines)
	if err == nil {
		out.warn(lines)
	}
	return err
}

// both is what both sides do, except for the input.
func (f *compareFlags) both(m *machine) peer.Config {
	return peer.Config{
		Repeat: f.input.repeat, Rounds: f.rounds, Workers: f.input.workers,
		Dir: m.config.Disks[0].Dir, Memory: m.config.HostMemoryBytes, Rate: m.config.DiskThrottleBytesPerS,
	}
}

// comparing gives what ended the comparison its exit status.
func comparing(err error) error {
	var other *peer.MismatchError
	switch {
	case errors.As(err, &other):
		return fail.Wrongf("%w", err)
	case errors.Is(err, peer.ErrNoBatches):
		return fail.Usagef("%w (name a file with rows in it)", err)
	}
	return err
}

// note says where the comparison is not what its help promises.
func (f *compareFlags) note(m *machine, res peer.Result) {
	if res.CacheStays {
		m.notes.add("cache stays", "the page cache cannot be dropped on this system: what the peer read, it may have read from there")
	}
	if !m.env.DirectIO {
		m.notes.add("no direct I/O", "there is no direct I/O in the spill directory: Spillway's figures are those of the page cache, without a sync, like the peer's warm ones")
	}
	if len(m.config.Disks) > 1 {
		m.notes.add("several disks", "the peer's file is in "+m.config.Disks[0].Dir+" alone; Spillway used all spill directories")
	}
}

// document is the result.
func (f *compareFlags) document(m *machine, sources []string, res peer.Result) *report.Compare {
	doc := &report.Compare{
		Header: report.NewHeader("compare", m.env, m.warnings()),
		Config: report.CompareConfig{
			Config: m.config, Peer: f.peer, Seed: f.input.seed, Repeat: f.input.repeat, Rounds: f.rounds, Workers: f.input.workers,
		},
		Input:  report.Input{Sources: sources, Rows: res.Rows, Batches: res.Batches, Bytes: res.Bytes},
		Verify: report.Verification{Checked: true, Batches: res.Verified},
		Ours:   report.OurRates{Rates: rates(res.Bytes, res.Ours), Rewritten: rates(res.Bytes, res.Rewritten)},
		Peer:   report.PeerRates{Name: f.peer, Rates: rates(res.Bytes, res.Peer), Warm: rates(res.Bytes, res.Warm)},
	}
	doc.Config.RowsPerBatch = f.input.rowsPerBatch
	var both []time.Duration
	var write, read []float64
	for i, t := range res.Ours {
		both = append(both, t.Write+res.Put[i])
		write = append(write, res.Peer[i].Write.Seconds()/t.Write.Seconds())
		read = append(read, res.Peer[i].Read.Seconds()/t.Read.Seconds())
	}
	doc.Ours.PutWriteGiBPerS = report.Rate(res.Bytes, median(both).Seconds())
	doc.Samples = samples(res)
	doc.Ratio = report.Ratios{
		Write: median(write), WriteMin: slices.Min(write), WriteMax: slices.Max(write),
		Read: median(read), ReadMin: slices.Min(read), ReadMax: slices.Max(read),
	}
	return doc
}

// samples are the rates of each round.
func samples(res peer.Result) []report.RoundRates {
	out := make([]report.RoundRates, len(res.Ours))
	of := func(all []peer.Times, i int) report.Rates {
		if i >= len(all) {
			return report.Rates{}
		}
		return rates(res.Bytes, all[i:i+1])
	}
	for i, t := range res.Ours {
		out[i] = report.RoundRates{Ours: report.OurRates{Rates: of(res.Ours, i), Rewritten: of(res.Rewritten, i)}, Peer: of(res.Peer, i), Warm: of(res.Warm, i)}
		out[i].Ours.PutWriteGiBPerS = report.Rate(res.Bytes, (t.Write + res.Put[i]).Seconds())
	}
	return out
}

// rates are the medians over the rounds.
func rates(bytes int64, rounds []peer.Times) report.Rates {
	var write, read []time.Duration
	for _, t := range rounds {
		write, read = append(write, t.Write), append(read, t.Read)
	}
	return report.Rates{
		WriteGiBPerS: report.Rate(bytes, median(write).Seconds()),
		ReadGiBPerS:  report.Rate(bytes, median(read).Seconds()),
	}
}

// median returns the lower of the two in the middle of an even number.
func median[T cmp.Ordered](values []T) T {
	s := slices.Sorted(slices.Values(values))
	return s[(len(s)-1)/2]
}
