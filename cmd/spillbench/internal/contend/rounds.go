package contend

import (
	"context"
	"errors"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
)

// operation is one unit acquired and released.
type operation func(context.Context) error

// look is how many operations of one goroutine go by until it looks whether the time
// is up: reading a clock takes as long as what is measured.
const look = 64

// measureAlone measures one goroutine, and what it allocates.
func measureAlone(ctx context.Context, cfg Config, res *Result) error {
	b, err := newBench(roomy)
	if err != nil {
		return err
	}
	cfg.Progress.Begin("alone", int64(2*cfg.Rounds))
	var ns, other, allocs []float64
	for i := range cfg.Rounds {
		round := func(op operation) (float64, float64, error) {
			defer cfg.Progress.Step()
			return alone(ctx, cfg.Duration/4, op) // one goroutine shows enough in less time
		}
		err = inTurn(i, func() error {
			v, a, err := round(b.once)
			ns, allocs = append(ns, v), append(allocs, a)
			return err
		}, func() error {
			v, _, err := round(onSemaphore(semaphore.NewWeighted(roomy)))
			other = append(other, v)
			return err
		})
		if err != nil {
			break
		}
	}
	if err := errors.Join(err, b.close()); err != nil {
		return err
	}
	res.UncontendedNs, res.SemaphoreUncontendedNs, res.Samples = median(ns), median(other), Samples{ns, other}
	// Others in the process allocate at times, so the least is what op does.
	res.AllocsPerOp = math.Round(100*slices.Min(allocs)) / 100
	return nil
}

// inTurn runs both; which is first changes with i, so that neither always has the
// caches that the other left.
func inTurn(i int, a, b func() error) error {
	if i%2 == 1 {
		a, b = b, a
	}
	if err := a(); err != nil {
		return err
	}
	return b()
}

// alone runs op for d and returns what one takes, in ns, and how many heap objects
// it makes.
func alone(ctx context.Context, d time.Duration, op operation) (ns, allocs float64, err error) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	n, begun := 0, time.Now()
	for n == 0 || time.Since(begun) < d {
		for range look {
			if err := op(ctx); err != nil {
				return 0, 0, err
			}
		}
		n += look
	}
	took := time.Since(begun)
	runtime.ReadMemStats(&after)
	return float64(took) / float64(n), float64(after.Mallocs-before.Mallocs) / float64(n), nil
}

// measureContended measures pairs of rounds in a space of so many bytes.
func measureContended(ctx context.Context, cfg Config, capacity int64) (c Contended, err error) {
	b, err := newBench(capacity)
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	sem := onSemaphore(semaphore.NewWeighted(capacity))
	var ours, theirs, ratios []float64
	for i := range cfg.Rounds {
		round := func(op operation, rates *[]float64) func() error {
			return func() error {
				defer cfg.Progress.Step()
				rate, err := together(ctx, cfg.Goroutines, cfg.Duration, op)
				*rates = append(*rates, rate)
				return err
			}
		}
		if err := inTurn(i, round(b.once, &ours), round(sem, &theirs)); err != nil {
			return c, err
		}
		ratios = append(ratios, ours[i]/theirs[i])
	}
	c = Contended{
		OpsPerS: median(ours), SemaphoreOpsPerS: median(theirs), Ratio: median(ratios),
		RatioMin: slices.Min(ratios), RatioMax: slices.Max(ratios), Samples: ContendedSamples{ours, theirs},
	}
	return c, nil
}

// together lets n goroutines do op for d, and returns how many they did in a second. They look at
// the clock themselves: where all processors are busy, a timer is up to 10 ms late.
func together(ctx context.Context, n int, d time.Duration, op operation) (float64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	var stop atomic.Bool
	var total atomic.Int64
	var begun time.Time
	begin := make(chan struct{})
	for range n {
		wg.Go(func() {
			<-begin
			done := int64(0)
			for done == 0 || !stop.Load() { // a rate of nothing has no ratio
				if err := op(ctx); err != nil {
					cancel(err) // the round is over
					break
				}
				if done++; done%look == 0 && time.Since(begun) >= d {
					stop.Store(true)
				}
			}
			total.Add(done)
		})
	}
	end := func() { stop.Store(true) }
	defer context.AfterFunc(ctx, end)()
	defer time.AfterFunc(d, end).Stop() // for operations that take long
	begun = time.Now()
	close(begin)
	wg.Wait() // a goroutine that stops serves the waiters
	took := time.Since(begun)
	if err := context.Cause(ctx); err != nil {
		return 0, err
	}
	return float64(total.Load()) / took.Seconds(), nil
}
