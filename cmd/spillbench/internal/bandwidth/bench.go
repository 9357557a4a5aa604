package bandwidth

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"golang.org/x/sync/errgroup"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// ErrChanged reports a batch that differs from its table after moves.
var ErrChanged = errors.New("moves have changed a batch")

// bench measures links with the batches of one load.
type bench struct {
	cfg     *Config
	load    load
	room    regions
	batches []*batch.Batch // one for each thread
}

// direction is that of a transfer along a link.
type direction int

const (
	stay  direction = iota // the thread does nothing
	there                  // from → to
	back                   // to → from
)

// transfer moves the bytes of thread i along a link. Calls for several threads run at the same time.
type transfer func(ctx context.Context, i int, d direction) error

// step is a part of a turn: the directions of the first and of the second half of the threads, which
// transfer at the same time. A single thread belongs to the first half.
type step [2]direction

var (
	// oneWay begins in the link's second space. The rows are those of its two middle steps.
	oneWay = []step{{back, back}, {there, there}, {back, back}, {there, there}}
	// atOnce also begins in the second space. The first half goes back alone, then each half transfers in
	// one direction, and then the second half goes there alone.
	atOnce = []step{{back, stay}, {there, back}, {stay, there}}
)

// run puts the batches, measures every link with them, and drops them.
func (b *bench) run(ctx context.Context, links []link) (rows []report.BandwidthRow, err error) {
	b.cfg.Progress.Begin("making a table of "+size.Format(b.load.bytes), 0)
	rec, err := record(ctx, b.cfg.Seed, b.load.bytes)
	if err != nil {
		return nil, err
	}
	defer rec.Release()
	runtime.GC() // so that the garbage of making the table is not collected while something is timed
	// The batches are dropped although ctx has ended. If the monitor has begun to move one before it was
	// subscribed to, that waits for the move.
	defer func() {
		for _, x := range b.batches {
			err = errors.Join(err, x.Discard(context.WithoutCancel(ctx)))
		}
	}()
	for range b.load.threads {
		p, err := b.cfg.Engine.Mover().Ingest(ctx, rec, reservation.AnyInTier(tier.Host))
		if err != nil {
			return nil, err
		}
		x, err := b.cfg.Engine.NewBatch(p)
		if err != nil {
			return nil, err
		}
		b.batches = append(b.batches, x)
		x.Subscribe() // so that the monitor does not move it
	}
	for _, k := range links {
		more, err := b.link(ctx, k)
		if err == nil {
			err = b.verify(ctx, rec)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", b.name(k), err)
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

// link measures one link in both directions.
func (b *bench) link(ctx context.Context, k link) (rows []report.BandwidthRow, err error) {
	move := func(ctx context.Context, i int, d direction) error {
		to := k.to
		if d == back {
			to = k.from
		}
		defer b.cfg.Engine.Mover().DropCopies() // a copy left behind would spare the next move
		return b.cfg.Engine.Mover().Move(ctx, b.batches[i], reservation.Specific(to.ID()))
	}
	if err := together(b.load.threads, func(i int) error { return move(ctx, i, there) }); err != nil {
		return nil, err
	}
	limit, free, err := b.raw(ctx, k)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, free()) }()
	sides := [...]transfer{move, limit, limit}
	took, err := b.rounds(ctx, k, sides, oneWay)
	if err != nil {
		return nil, err
	}
	rows = append(rows, took[1].row(k, b.load, there), took[2].row(k, b.load, back))
	if !k.bothWays(b.load) {
		return rows, nil
	}

	if took, err = b.rounds(ctx, k, sides, atOnce); err != nil {
		return nil, err
	}
	both := took[1].row(k, b.load, there)
	both.BothWays = true
	both.Gain = gain(took[1][ours], took[0][ours], took[2][ours])
	both.LimitGain = gain(took[1].limits(), took[0].limits(), took[2].limits())
	return append(rows, both), nil
}

// rounds lets ours, raw and raw again take turns, each doing all steps, until there are as many
// rounds as pairs, and returns the times of the steps. The first round warms up.
func (b *bench) rounds(ctx context.Context, k link, sides [3]transfer, steps []step) ([]timings, error) {
	b.cfg.Progress.Begin(b.name(k), int64(b.cfg.Pairs))
	all := make([]timings, len(steps))
	for round := range b.cfg.Pairs + 1 {
		order := [...]int{ours, raw, again}
		if round > 0 && round%2 == 0 {
			order = [...]int{raw, ours, again} // again stays last, so that no side has two turns in a row
		}
		for _, side := range order {
			took, err := b.turn(ctx, sides[side], steps)
			if err != nil {
				return nil, err
			}
			for i, seconds := range took {
				if round > 0 {
					all[i][side] = append(all[i][side], seconds)
				}
			}
		}
		if round > 0 {
			b.cfg.Progress.Step()
		}
	}
	return all, context.Cause(ctx)
}

// turn does the steps, and returns the seconds that each took.
func (b *bench) turn(ctx context.Context, move transfer, steps []step) (took []float64, err error) {
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	for _, st := range steps {
		begun := time.Now()
		err := together(b.load.threads, func(i int) error {
			d := st[0]
			if i >= (b.load.threads+1)/2 {
				d = st[1]
			}
			if d == stay {
				return nil
			}
			return move(ctx, i, d)
		})
		if err != nil {
			return nil, err
		}
		took = append(took, time.Since(begun).Seconds())
	}
	return took, nil
}

// verify compares every batch with the table that it was made of.
func (b *bench) verify(ctx context.Context, want arrow.RecordBatch) error {
	mover := b.cfg.Engine.Mover()
	for i, x := range b.batches {
		h, err := mover.Acquire(ctx, x, reservation.AnyInTier(tier.Host))
		if err != nil {
			return err
		}
		got, err := mover.Record(ctx, h)
		if err == nil {
			if e := convert.Equal(want, got); e != nil {
				err = fmt.Errorf("%w: batch %d: %w", ErrChanged, i+1, e)
			}
			got.Release()
		}
		if err := errors.Join(err, h.Close()); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) name(k link) string {
	return fmt.Sprintf("%s and %s, %d × %s", k.from.ID(), k.to.ID(), b.load.threads, size.Format(b.load.bytes))
}

// together calls f with 0 to n-1 at the same time, and returns after all calls have.
func together(n int, f func(i int) error) error {
	if n == 1 {
		return f(0) // without the cost of a goroutine
	}
	var group errgroup.Group
	for i := range n {
		group.Go(func() error { return f(i) })
	}
	return group.Wait()
}
