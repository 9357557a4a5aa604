package bandwidth

import (
	"context"
	"errors"
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"
	"golang.org/x/sync/errgroup"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// bench is one load's batches and what measures them.
type bench struct {
	cfg     *Config
	load    load
	room    *regions
	batches []*batch.Batch // one for each thread
	// unsteady is set by a turn in which the volume allocated room for a batch that was to be written
	// to room allocated before. Its round does not count.
	unsteady bool
	// backed is how much room the volume has allocated for our side, which may be more than the load
	// needs.
	backed int64
}

// A turn has at most so many figures. A step of figure untimed is not timed.
const (
	figures = 3
	untimed = -1
)

// schedule is the steps of a turn, and the row that each figure makes.
type schedule struct {
	steps []step
	rows  []figureRow
}

type figureRow struct {
	d     direction
	state string
}

// The schedules. A transfer in the opposite direction precedes each timed one in memory.
var (
	inMemory = schedule{
		[]step{{untimed, there, there}, {1, back, back}, {0, there, there}, {untimed, back, back}},
		[]figureRow{{there, ""}, {back, ""}},
	}
	onDisk = schedule{
		[]step{{0, there, there}, {untimed, back, back}, {1, there, there}, {2, back, back}},
		[]figureRow{{there, fresh}, {there, rewritten}, {back, rewritten}},
	}
	// atOnce has one half of the threads transfer in each direction; then each half goes back alone.
	atOnce = []step{{0, there, back}, {1, back, stay}, {2, stay, there}}
)

// bothWays reports whether a load is also measured in both directions at once.
func (k link) bothWays(l load) bool { return k.inSpaces() && l.threads%2 == 0 && k.there && k.back }

// link measures one link in both directions.
func (b *bench) link(ctx context.Context, k link) (rows []report.BandwidthRow, err error) {
	ours := side{move: func(ctx context.Context, i int, d direction) error {
		to := k.to
		if d == back {
			to = k.from
		}
		defer b.cfg.Engine.Mover().Inside().DropCopies() // a copy left behind would spare the next move
		return b.bring(ctx, b.batches[i], to)
	}}
	if err := together(b.load.threads, func(i int) error { return ours.move(ctx, i, back) }); err != nil {
		return nil, err
	}
	raw, again, free, err := b.raw(ctx, k)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, free()) }()

	plan := inMemory
	if v, ok := k.to.Pool().(*volumes.Volume); ok {
		plan = onDisk
		taken := int64(0)
		ours.prepare = func(ctx context.Context) (err error) {
			err = b.allocate(ctx, k.to, v)
			st := v.Stats()
			taken, b.backed = st.Fresh, st.Backed
			return err
		}
		ours.finish = func() error {
			b.unsteady = v.Stats().Fresh != taken
			return nil
		}
	}
	sides := [...]side{ours, raw, again}
	t, err := b.rounds(ctx, k, sides, plan.steps)
	if err != nil {
		return nil, err
	}
	for figure, row := range plan.rows {
		if row.d == there && k.there || row.d == back && k.back {
			rows = append(rows, t[figure].row(k, b.load, row))
		}
	}
	if !k.bothWays(b.load) {
		return rows, nil
	}

	for i := b.load.threads / 2; i < b.load.threads; i++ {
		if err := ours.move(ctx, i, there); err != nil {
			return nil, err
		}
	}
	t, err = b.rounds(ctx, k, sides, atOnce)
	if err != nil {
		return nil, err
	}
	both := t[0].row(k, b.load, inMemory.rows[0])
	both.BothWays = true
	both.Gain = gain(t[0].ours, t[1].ours, t[2].ours)
	both.LimitGain = gain(t[0].limits(), t[1].limits(), t[2].limits())
	return append(rows, both), nil
}

// bring moves a batch to a space, by way of another if there is no converter.
func (b *bench) bring(ctx context.Context, x *batch.Batch, to *tier.Space) error {
	move := func(to *tier.Space) error {
		return b.cfg.Engine.Mover().Move(ctx, x, reservation.Specific(to.ID()))
	}
	err := move(to)
	for _, via := range b.cfg.Engine.Spaces() {
		if !errors.Is(err, convert.ErrNoConverter) {
			return err
		}
		if via != to {
			if err = move(via); err == nil {
				err = move(to)
			}
		}
	}
	return err
}

// ErrChanged reports a batch that differs from its table after moves.
var ErrChanged = errors.New("moves have changed a batch")

// verify compares every batch with the table that it was made of.
func (b *bench) verify(ctx context.Context, want arrow.RecordBatch) error {
	mover := b.cfg.Engine.Mover()
	for i, x := range b.batches {
		if err := b.bring(ctx, x, b.cfg.host()); err != nil {
			return err
		}
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

// allocate makes the volume give its room back and allocate as much as the load needs, without
// writing there.
func (b *bench) allocate(ctx context.Context, s *tier.Space, v *volumes.Volume) error {
	if err := trim(ctx, v); err != nil {
		return err
	}
	buf, err := b.reserve(ctx, s, s.Charge(b.load.bytes)*int64(b.load.threads))
	return errors.Join(err, buf.Release())
}

// trim makes the volume give back its room, which must be unused.
func trim(ctx context.Context, v *volumes.Volume) error {
	if _, err := v.Trim(ctx); err != nil {
		return err
	}
	if st := v.Stats(); st.Backed > st.Used {
		return fmt.Errorf("bandwidth: the volume in %s keeps %d bytes that it was to give back",
			st.Dir, st.Backed-st.Used)
	}
	return nil
}

// reserve allocates memory beside that of the batches. The caller must Release it.
func (b *bench) reserve(ctx context.Context, s *tier.Space, bytes int64) (*tier.Buffer, error) {
	r, err := b.cfg.Engine.Reserve(ctx, reservation.Specific(s.ID()), s.Charge(bytes))
	if err != nil {
		return nil, err
	}
	buf, err := r.Alloc(bytes)
	return buf, errors.Join(err, r.Release())
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
