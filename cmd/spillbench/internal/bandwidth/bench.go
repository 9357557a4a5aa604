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
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// ErrChanged reports a batch that differs from its table after moves.
var ErrChanged = errors.New("moves have changed a batch")

// bench measures links with the batches of one load.
type bench struct {
	cfg     *Config
	load    load
	room    regions
	batches []*batch.Batch // one for each thread
	// unsteady is set by a turn in which the volume allocated room for a batch that was to be written
	// to room allocated before. Its round does not count.
	unsteady bool
	// backed is how much room the volume has allocated for our side, which may be more than the load
	// needs.
	backed int64
}

// direction is that of a transfer along a link.
type direction int

const (
	stay  direction = iota // the thread does nothing
	there                  // from → to
	back                   // to → from
)

// side is one of the contestants of a round: ours, raw, or raw again.
type side struct {
	prepare func(ctx context.Context) error // before each turn; may be nil
	// move transfers the bytes of thread i. Calls for several threads run at the same time.
	move   func(ctx context.Context, i int, d direction) error
	finish func() error // after each turn, also one that failed; may be nil
}

// step is a part of a turn, in which the first and the second half of the threads transfer at the
// same time. A single thread belongs to the first half.
type step struct {
	first, second direction
	timed         bool
	state         string // of the disk's room
}

// The steps of a turn; each timed one makes a row. In memory batches begin in the link's second space,
// and a transfer in the opposite direction precedes each timed one.
var (
	inMemory = []step{
		{first: back, second: back},
		{there, there, true, ""},
		{back, back, true, ""},
		{first: there, second: there},
	}
	onDisk = []step{
		{there, there, true, "fresh"}, {first: back, second: back},
		{there, there, true, "rewritten"}, {back, back, true, "rewritten"},
	}
	// atOnce has one half of the threads transfer in each direction; then each half goes back alone. The
	// first half begins in the link's first space.
	atOnce = []step{{there, back, true, ""}, {back, stay, true, ""}, {stay, there, true, ""}}
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

// bothWays reports whether a load is also measured in both directions at once.
func (k link) bothWays(l load) bool { return k.inSpaces() && l.threads%2 == 0 }

// link measures one link in both directions.
func (b *bench) link(ctx context.Context, k link) (rows []report.BandwidthRow, err error) {
	ours := side{move: func(ctx context.Context, i int, d direction) error {
		to := k.to
		if d == back {
			to = k.from
		}
		defer b.cfg.Engine.Mover().Inside().DropCopies() // a copy left behind would spare the next move
		return b.cfg.Engine.Mover().Move(ctx, b.batches[i], reservation.Specific(to.ID()))
	}}
	steps, start := inMemory, there
	if v, ok := k.to.Pool().(*volumes.Volume); ok {
		steps, start = onDisk, back
		var before disk.Stats
		ours.prepare = func(ctx context.Context) (err error) {
			err = b.allocate(ctx, k.to, v)
			before = v.Stats()
			b.backed = before.Backed
			return err
		}
		ours.finish = func() error {
			b.unsteady = v.Stats().Fresh != before.Fresh
			return nil
		}
	}
	if err := together(b.load.threads, func(i int) error { return ours.move(ctx, i, start) }); err != nil {
		return nil, err
	}
	raw, again, free, err := b.raw(ctx, k)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, free()) }()
	sides := [...]side{ours, raw, again}
	took, err := b.rounds(ctx, k, sides, steps)
	if err != nil {
		return nil, err
	}
	for _, st := range steps {
		if st.timed {
			rows = append(rows, took[0].row(k, b.load, st))
			took = took[1:]
		}
	}
	if !k.bothWays(b.load) {
		return rows, nil
	}

	for i := range b.load.threads / 2 {
		if err := ours.move(ctx, i, back); err != nil {
			return nil, err
		}
	}
	if took, err = b.rounds(ctx, k, sides, atOnce); err != nil {
		return nil, err
	}
	both := took[0].row(k, b.load, atOnce[0])
	both.BothWays = true
	both.Gain = gain(took[0].ours, took[1].ours, took[2].ours)
	both.LimitGain = gain(took[0].limits(), took[1].limits(), took[2].limits())
	return append(rows, both), nil
}

// rounds lets ours, raw and raw again take turns, each doing all steps, until there are as many
// rounds as pairs, and returns the times of each timed step. The first round warms up; unsteady rounds
// are repeated.
func (b *bench) rounds(ctx context.Context, k link, sides [3]side, steps []step) (all []timings, err error) {
	b.cfg.Progress.Begin(b.name(k), int64(b.cfg.Pairs))
	for round, kept := 0, 0; kept < b.cfg.Pairs; round++ {
		if round > 2*b.cfg.Pairs+1 {
			return nil, fmt.Errorf("bandwidth: in only %d of %d rounds was the disk's room in the measured state",
				kept, round)
		}
		order := [...]int{0, 1, 2}
		if kept%2 == 1 {
			order = [...]int{1, 0, 2} // again stays last, so that no side has two turns in a row
		}
		b.unsteady = false
		var took [len(sides)][]float64
		for _, who := range order {
			if took[who], err = b.turn(ctx, sides[who], steps); err != nil {
				return nil, err
			}
		}
		if round == 0 || b.unsteady {
			continue
		}
		kept++
		b.cfg.Progress.Step()
		all = append(all, make([]timings, len(took[0])-len(all))...)
		for i := range all {
			t := &all[i]
			t.ours, t.raw, t.again = append(t.ours, took[0][i]), append(t.raw, took[1][i]), append(t.again, took[2][i])
		}
	}
	return all, nil
}

// turn does the steps, and returns the seconds that the timed ones took.
func (b *bench) turn(ctx context.Context, s side, steps []step) (took []float64, err error) {
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	if s.finish != nil {
		defer func() { err = errors.Join(err, s.finish()) }()
	}
	if s.prepare != nil {
		if err := s.prepare(ctx); err != nil {
			return nil, err
		}
	}
	for _, st := range steps {
		begun := time.Now()
		err := together(b.load.threads, func(i int) error {
			d := st.first
			if i >= (b.load.threads+1)/2 {
				d = st.second
			}
			if d == stay {
				return nil
			}
			return s.move(ctx, i, d)
		})
		if err != nil {
			return nil, err
		}
		if st.timed {
			took = append(took, time.Since(begun).Seconds())
		}
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
	_, err := v.Trim(ctx)
	if st := v.Stats(); err == nil && st.Backed > st.Used {
		err = fmt.Errorf("bandwidth: the volume in %s keeps %d bytes that it was to give back",
			st.Dir, st.Backed-st.Used)
	}
	return err
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
