package monitor

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// A pipeline under random pressure: producers put batches into GPU memory, which
// they wait for; workers take them from a queue, bring them back to the GPU, for
// which they wait too, use them for a while, and drop them. All data together is many
// times the GPU's memory and fits on the disk. Nothing may stall.
func TestRandomPressure(t *testing.T) {
	for seed := range testseed.Each(t, fewer(12)) {
		bubble(t, fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 4))
			s := sizes{gpu0: 128 * kib, disk0: 4096 * kib}
			if seed%3 > 0 {
				s[host0] = (32 + r.Int64N(128)) * kib
			}
			if seed%4 == 1 {
				s[disk1] = 512 * kib
				s[tier.ID{Kind: tier.GPU, Ordinal: 1}] = 64 * kib
			}
			w := newWorld(t, s, func(c *Config, w *world) {
				c.Policy, _ = ByName(Names()[seed/3%uint64(len(Names()))])
				c.MovesPerEdge = 1 + r.IntN(3)
				w.mover.bytesA = time.Duration(r.IntN(100)) * time.Microsecond
			})
			for _, p := range w.pools {
				p.lag = time.Duration(r.IntN(3)) * time.Millisecond
			}
			faults := r.IntN(2) == 0
			var fr sync.Mutex
			// Moves end in another order than they begin in, and the monitor refuses waiters for an edge on
			// which several moves in a row have failed: failures of an edge are several moves apart.
			good := make(map[[2]tier.ID]int)
			w.mover.fault = func(_ *batch.Batch, from, to tier.ID) error {
				fr.Lock()
				defer fr.Unlock()
				edge := [2]tier.ID{from, to}
				if good[edge]++; faults && good[edge] > 10 && r.IntN(10) == 0 {
					good[edge] = 0
					return errors.New("now and then")
				}
				return nil
			}
			w.start()
			begin := time.Now()
			if err := w.pipeline(seed, 400); err != nil {
				t.Error(err)
			}
			took := time.Since(begin)
			if took > time.Minute {
				t.Errorf("it took %v", took)
			}
			settle(time.Second)
			if len(w.gone) > 0 {
				t.Errorf("somebody was refused: %+v", w.gone)
			}
			if w.moved() < 128*kib {
				t.Errorf("only %d bytes were moved: there was no pressure", w.moved())
			}
			t.Logf("%v, %d spaces: %d KiB in %v; %+v; waits %+v", w.mon.cfg.Policy, len(s), w.moved()/kib, took, w.mon.Stats(), w.res.Waits())
			w.end()
		})
	}
}

const stallAfter = 10 * time.Minute // of virtual time

func (w *world) pipeline(seed uint64, n int) error {
	ctx, cancel := context.WithTimeoutCause(context.Background(), stallAfter, errors.New("stalled"))
	defer cancel()
	queue := make(chan *batch.Batch, n) // unbounded as far as this test goes
	var producers, workers sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	fail := func(err error) {
		if err != nil {
			mu.Lock()
			errs = append(errs, err)
			mu.Unlock()
		}
	}
	const side = 4
	for g := range side {
		producers.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(100+g)))
			for i := range n / side {
				res, err := w.res.Reserve(ctx, reservation.AnyInTier(tier.GPU), (1+r.Int64N(12))*kib, nil)
				if err != nil {
					fail(fmt.Errorf("producing: %w", err))
					return
				}
				time.Sleep(time.Duration(r.IntN(200)) * time.Microsecond)
				b := w.fill(res, batch.Place{Plan: 1 + uint64(g%2), Rank: r.IntN(3), Seq: uint64(i)})
				fail(b.CreateTask(ctx))
				queue <- b
			}
		})
		workers.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(200+g)))
			for b := range queue {
				h, err := w.acquire(ctx, b)
				if err != nil {
					fail(fmt.Errorf("acquiring: %w", err))
					return
				}
				time.Sleep(time.Duration(r.IntN(2000)) * time.Microsecond)
				fail(errors.Join(h.Close(), dropWhenPossible(ctx, b)))
			}
		})
	}
	producers.Wait()
	close(queue)
	workers.Wait()
	for b := range queue { // only after an error
		b.Drop()
	}
	return errors.Join(errs...)
}

func dropWhenPossible(ctx context.Context, b *batch.Batch) error {
	for {
		changed := b.Changed()
		err := b.Drop()
		var s *batch.StateError
		if !errors.As(err, &s) || s.State != batch.InTransit {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// acquire brings b to a GPU and opens it, for a task that was created.
func (w *world) acquire(ctx context.Context, b *batch.Batch) (*batch.Handle, error) {
	defer b.Subscribe()()
	for {
		changed := b.Changed()
		info := b.Info()
		if info.Space.Kind == tier.GPU {
			h, err := b.Lock(ctx, info.Space)
			if errors.Is(err, batch.ErrState) {
				select {
				case <-changed:
					continue
				case <-ctx.Done():
					return nil, context.Cause(ctx)
				}
			}
			return h, err
		}
		if err := w.up(ctx, b, info.Bytes); err != nil && !errors.Is(err, batch.ErrState) {
			return nil, err
		}
	}
}

func (w *world) up(ctx context.Context, b *batch.Batch, n int64) error {
	res, err := w.res.Reserve(ctx, reservation.AnyInTier(tier.GPU), n, nil)
	if err != nil {
		return err
	}
	defer res.Release()
	tr, err := b.Transit(ctx)
	if err != nil {
		return err
	}
	defer tr.Abort()
	if tr.Payload().Space().Kind() == tier.GPU {
		return nil
	}
	time.Sleep(w.mover.bytesA * time.Duration(n/kib))
	buf, err := res.Alloc(n)
	if err != nil {
		return err
	}
	return tr.Commit(batch.NewImage(b.Info().Descriptor, buf, res.Space()), false)
}
