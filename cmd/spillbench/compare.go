package main

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/peer"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
)

const (
	// compareMemory is the host memory in bytes; the generated table is three times as large.
	compareMemory = 256 << 20
	batchesInHost = 16
)

// compareFlags are the flags of compare.
type compareFlags struct {
	output outputFlags
	engine engineFlags
	input  inputFlags
	peer   string
	rounds int
}

func newCompare() *cobra.Command {
	f := compareFlags{
		output: outputFlags{figures: true}, engine: engineFlags{noGPUs: true}, input: inputFlags{again: true},
	}
	cmd := &cobra.Command{
		Use:   "compare --peer NAME",
		Short: "Spill the same data with and without Spillway",
		Long: `Spill the same data with and without Spillway.

Spillway moves batches from host memory to disk and back. The peer writes the same batches
as a Go program would do it today: with arrow-go's ipc.FileWriter, to one file for each
input, which it syncs and reads back with ipc.FileReader. Writer and reader belong to one
goroutine; --workers goroutines move and read Spillway's batches. Both sides hash every
byte that they read. Spillway has --host-memory, and larger data streams through; the peer
holds one batch at a time, beside the page cache. In each round both sides take a turn, and
the first side alternates; Spillway begins with an empty disk volume. compare drops the
peer's file from the page cache before the peer reads it. "warm" is the peer's writing
without the sync, and its reading of a file that it has just written, from the cache. Once,
before anything is measured, compare checks every batch that either side reads back against
the input. In each round the peer does its work once untimed, so that its time includes no
page cache memory that a virtual machine must get from its host.

Spillway lays batches out in host memory once, when they are put. The comparison does not
include that; it has a figure of its own. Spill files are of no use after a crash, so a
direct write to them ends when the disk has the data, and does not make the disk flush its
own cache, as the peer's sync does.

--disk-throttle makes the disk slow for both sides: for the peer as behind a page cache
that reads ahead and writes behind at that rate. It does not apply to "warm". Faults of
--fault happen only to Spillway, also while it opens its volumes.

No GPU takes part: --gpu, --gpus and --gpu-memory are accepted, as by other commands, and
change nothing. compare ends with 1 if a side reads back other data than it wrote.`,
		Example: `  spillbench compare --peer arrow-ipc
  spillbench compare --peer arrow-ipc --input data.parquet --repeat 8 --host-memory 1GiB`,
		Args: cobra.NoArgs,
		RunE: f.run,
	}
	fs := cmd.Flags()
	fs.Var(choice(&f.peer, "", peer.ArrowIPC), "peer",
		"compare with this program, by `NAME`: "+peer.ArrowIPC+" (required)")
	f.input.register(fs, "spill", "the host memory")
	intVar(fs, &f.rounds, "rounds", 5, 1, 1000, "measure `N` pairs of rounds: Spillway's and the peer's, alternately")
	f.input.registerWorkers(fs, "number of Spillway's batches that move at once")
	f.input.registerSeed(fs)
	f.engine.register(fs, compareMemory)
	for _, name := range []string{"gpu", "gpus", "gpu-memory"} {
		must(fs.MarkHidden(name))
	}
	f.output.register(fs)
	return cmd
}

// run measures and reports. It leaves nothing behind.
func (f *compareFlags) run(cmd *cobra.Command, _ []string) error {
	start, ctx := time.Now(), cmd.Context()
	if f.peer == "" {
		return fail.Usagef("compare needs a peer (--peer %s)", peer.ArrowIPC)
	}
	if err := f.input.validate(); err != nil {
		return err
	}
	out, err := f.output.open(cmd, f.input.files...)
	if err != nil {
		return err
	}
	f.engine.seed = f.input.seed
	m, err := f.engine.open(ctx)
	if err != nil {
		return err
	}
	if err := m.engine.Close(); err != nil { // each round opens its own
		return err
	}
	inputs, sources, batches := f.input.sources(m, m.config.HostMemoryBytes/batchesInHost)
	// Engines come and go, so the bar has no figures of them.
	bar := f.output.bar(cmd.ErrOrStderr(), func() spillway.Stats { return spillway.Stats{} })
	res, err := peer.Run(ctx, peer.Config{
		Open: m.reopen, Inputs: inputs, Batches: batches, Progress: bar,
		Repeat: f.input.repeat, Rounds: f.rounds, Workers: f.input.workers,
		Dir: m.config.Disks[0].Dir, Rate: m.config.DiskThrottleBytesPerS,
	})
	bar.Close()
	switch {
	case errors.Is(err, peer.ErrMismatch):
		err = fail.Wrongf("%w", err)
	case errors.Is(err, peer.ErrNoBatches):
		err = fail.Usagef("%w (name a file with rows in it)", err)
	}
	if err := m.settle(ctx, err); err != nil {
		return err
	}
	f.note(m, res)
	doc := f.document(m, sources, res)
	doc.Header, doc.WallSeconds = m.header("compare"), time.Since(start).Seconds()
	return m.finish(out, doc, nil)
}

// note adds notes for differences between the comparison and its description in the help.
func (f *compareFlags) note(m *machine, res peer.Result) {
	if res.CacheStays {
		m.notes.add("the page cache cannot be dropped on this system: " +
			"the peer may have read from the cache")
	}
	if !m.env.DirectIO {
		m.notes.add("there is no direct I/O in the spill directory: " +
			"Spillway's figures are those of the page cache, without a sync, like the peer's warm ones")
	}
	if len(m.config.Disks) > 1 {
		m.notes.add("the peer's file is in " + m.config.Disks[0].Dir + " alone; " +
			"Spillway used all spill directories")
	}
}

// document returns the document without its header. It computes rates and ratios from median times.
func (f *compareFlags) document(m *machine, sources []string, res peer.Result) *report.Compare {
	all := roundRates(res.Bytes, res.Rounds)
	doc := &report.Compare{
		Config: report.CompareConfig{
			Config: m.config, Peer: f.peer, Seed: f.input.seed,
			Repeat: f.input.repeat, Rounds: f.rounds, Workers: f.input.workers,
		},
		Input:  report.Input{Sources: sources, Rows: res.Rows, Batches: res.Batches, Bytes: res.Bytes},
		Verify: report.Verification{Checked: true, Batches: res.Verified},
		Ours:   all.Ours,
		Peer:   report.PeerRates{Name: f.peer, Rates: all.Peer, Warm: all.Warm},
	}
	doc.Config.RowsPerBatch = int64(f.input.rowsPerBatch)
	var write, read []float64
	for i, r := range res.Rounds {
		doc.Samples = append(doc.Samples, roundRates(res.Bytes, res.Rounds[i:i+1]))
		write = append(write, r.Peer.Write.Seconds()/r.Ours.Write.Seconds())
		read = append(read, r.Peer.Read.Seconds()/r.Ours.Read.Seconds())
	}
	doc.Ratio = report.Ratios{
		Write: median(write), WriteMin: slices.Min(write), WriteMax: slices.Max(write),
		Read: median(read), ReadMin: slices.Min(read), ReadMax: slices.Max(read),
	}
	return doc
}

// roundRates returns the rates for the median times of rounds.
func roundRates(bytes int64, rounds []peer.Round) report.RoundRates {
	rates := func(of func(peer.Round) peer.Times) report.Rates {
		var write, read []time.Duration
		for _, r := range rounds {
			t := of(r)
			write, read = append(write, t.Write), append(read, t.Read)
		}
		return report.Rates{
			WriteGiBPerS: report.Rate(bytes, median(write).Seconds()),
			ReadGiBPerS:  report.Rate(bytes, median(read).Seconds()),
		}
	}
	withPut := rates(func(r peer.Round) peer.Times { return peer.Times{Write: r.Ours.Write + r.Put} })
	return report.RoundRates{
		Ours: report.OurRates{
			Rates:           rates(func(r peer.Round) peer.Times { return r.Ours }),
			PutWriteGiBPerS: withPut.WriteGiBPerS,
			Rewritten:       rates(func(r peer.Round) peer.Times { return r.Rewritten }),
		},
		Peer: rates(func(r peer.Round) peer.Times { return r.Peer }),
		Warm: rates(func(r peer.Round) peer.Times { return r.Warm }),
	}
}

// median returns the median of values; of an even number of values, the lower of the two medians.
func median[T cmp.Ordered](values []T) T {
	s := slices.Sorted(slices.Values(values))
	return s[(len(s)-1)/2]
}
