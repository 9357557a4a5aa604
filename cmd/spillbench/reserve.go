package main

import (
	"context"
	"errors"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/contend"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/headroom"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/progress"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/topology"
)

// Bounds of the flags of reserve. Fewer pairs of rounds than eleven do not distinguish a difference
// from noise.
const (
	maxContenders    = 4096
	minReserveRounds = 11
	maxReserveRounds = 10_000
	minRound         = time.Millisecond
	maxRound         = time.Minute
)

// reserveFlags are the flags of reserve.
type reserveFlags struct {
	output     outputFlags
	goroutines int
	rounds     int
	duration   time.Duration
	// The most waiters, and the releases of a round of theirs.
	crowd, releases int
}

func newReserve(stdout, stderr io.Writer) *cobra.Command {
	f := reserveFlags{output: outputFlags{figures: true}}
	f.crowd, f.releases = contend.Crowd()
	cmd := &cobra.Command{
		Use:   "reserve",
		Short: "Measure how fast memory is reserved and released",
		Long: `Measure how fast memory is reserved and released.

One goroutine, and then many at once, reserve and release a unit of memory: where
all of them fit, where only 8 fit at a time, and where only one does. A weighted
semaphore of golang.org/x/sync does the same work in turn with the manager, round
by round. Last, a crowd waits for one unit, and each release is timed until the next
in line has it; 100,000 goroutines take some 250 MiB. No other memory is allocated,
and no GPU used.`,
		Example: `  spillbench reserve
  spillbench reserve --goroutines 64 --rounds 21 --format csv`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return reserve(cmd.Context(), &f, stdout, stderr) },
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.IntVar(&f.goroutines, "goroutines", 16, "how many goroutines contend")
	fs.IntVar(&f.rounds, "rounds", minReserveRounds, "pairs of rounds in each scenario: the manager and the semaphore, alternately")
	fs.DurationVar(&f.duration, "duration", 100*time.Millisecond, "how long a round takes")
	f.output.register(fs)
	return cmd
}

func (f *reserveFlags) validate() error {
	switch {
	case f.goroutines < 1 || f.goroutines > maxContenders:
		return fail.Usagef("--goroutines %d is out of range (want 1 to %d)", f.goroutines, maxContenders)
	case f.rounds < minReserveRounds || f.rounds > maxReserveRounds:
		return fail.Usagef("--rounds %d is out of range (want %d to %d)", f.rounds, minReserveRounds, maxReserveRounds)
	case f.duration < minRound || f.duration > maxRound:
		return fail.Usagef("--duration %v is out of range (want %v to %v)", f.duration, minRound, maxRound)
	}
	return nil
}

// crowds are how many wait: a wake-up should cost the same in both. The larger one is as
// large as the process's memory lets it be.
func crowds(plan headroom.Plan, largest int) []int {
	const few, bytesPerWaiter = 100, 8 << 10 // goroutine, stack and request: measured, 6 KiB
	most := int64(largest)
	if plan.Heap > 0 {
		most = min(most, max(few, (plan.Heap-headroom.LeastHeap)/bytesPerWaiter))
	}
	return []int{few, int(most)}
}

func reserve(ctx context.Context, f *reserveFlags, stdout, stderr io.Writer) (err error) {
	start := time.Now()
	if err := f.validate(); err != nil {
		return err
	}
	out, err := f.output.open(ctx, stdout, stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.close()) }()
	top, err := topology.Discover(ctx, topology.Options{})
	if err != nil {
		return err
	}
	plan, err := new(engineFlags).divide(top, 0)
	if err != nil {
		return err
	}
	env := report.MachineEnv(top)
	env.ProbeDisk(os.TempDir()) // no part of the figures, and of every description of a machine
	doc := &report.Reserve{
		Header: report.NewHeader("reserve", env, nil),
		Config: report.ReserveConfig{Rounds: f.rounds, RoundSeconds: f.duration.Seconds(), UnitBytes: contend.Unit},
	}
	var bar progress.Bar
	drawn := &bar
	if !f.output.quiet && progress.OnTerminal(stderr) {
		drawn = progress.New(stderr, func() spillway.Stats { return spillway.Stats{} }) // there are no tiers
	}
	res, err := contend.Run(ctx, contend.Config{
		Goroutines: f.goroutines, Rounds: f.rounds, Duration: f.duration, Waiters: crowds(plan, f.crowd), Releases: f.releases, Progress: drawn,
	})
	drawn.Close()
	if err != nil {
		return err
	}
	f.fill(doc, res)
	doc.WallSeconds = time.Since(start).Seconds()
	return out.show(doc, nil)
}

// fill puts what was measured into the document.
func (f *reserveFlags) fill(doc *report.Reserve, res contend.Result) {
	doc.UncontendedNs, doc.SemaphoreUncontendedNs, doc.AllocsPerOp = res.UncontendedNs, res.SemaphoreUncontendedNs, res.AllocsPerOp
	for _, c := range res.Contended {
		doc.Contended = append(doc.Contended, report.Contended{
			Scenario: c.Scenario, Goroutines: f.goroutines, OpsPerS: c.OpsPerS, SemaphoreOpsPerS: c.SemaphoreOpsPerS,
			Ratio: c.Ratio, RatioMin: c.RatioMin, RatioMax: c.RatioMax, Samples: report.ContendedSamples(c.Samples),
		})
	}
	for _, w := range res.Waiters {
		doc.Waiters = append(doc.Waiters, report.Waiters{
			Waiters: w.Waiters, NsPerRelease: w.NsPerRelease, SemaphoreNsPerRelease: w.SemaphoreNsPerRelease,
			NsPerTurn: w.NsPerTurn, SemaphoreNsPerTurn: w.SemaphoreNsPerTurn, Samples: report.WaitersSamples(w.Samples),
		})
	}
	doc.Samples = report.ReserveSamples(res.Samples)
}
