package repository

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// ways are all ways to empty a partition in the order of arrival. Each hands the numbers
// to got one by one, and returns nil at the end of the input.
var ways = map[string]func(ctx context.Context, m *fakeMover, r *Repository, got func(int64), opts ...TakeOption) error{
	"reader": func(ctx context.Context, m *fakeMover, r *Repository, got func(int64), opts ...TakeOption) error {
		rd, err := r.Reader(ctx, 0, opts...)
		if err != nil {
			return err
		}
		defer rd.Release()
		for rd.Next() {
			got(number(rd.RecordBatch()))
		}
		return rd.Err()
	},
	"drain": func(ctx context.Context, m *fakeMover, r *Repository, got func(int64), opts ...TakeOption) error {
		for h, err := range r.Drain(ctx, 0, tier.GPU, append(opts, WaitInput())...) {
			if err != nil {
				return err
			}
			got(m.numberOf(h.Batch()))
			if err := h.Close(); err != nil {
				return err
			}
		}
		return nil
	},
	"drain of what is there": func(ctx context.Context, m *fakeMover, r *Repository, got func(int64), opts ...TakeOption) error {
		for h, err := range r.Drain(ctx, 0, tier.GPU, opts...) {
			if err != nil {
				return err
			}
			got(m.numberOf(h.Batch()))
			if err := h.Close(); err != nil {
				return err
			}
		}
		return nil
	},
	"take idle": func(ctx context.Context, m *fakeMover, r *Repository, got func(int64), opts ...TakeOption) error {
		return takeEach(m, got, func() (*batch.Batch, error) { return r.Take(ctx, 0, batch.Idle, opts...) })
	},
	"take with a task": func(ctx context.Context, m *fakeMover, r *Repository, got func(int64), opts ...TakeOption) error {
		return takeEach(m, got, func() (*batch.Batch, error) { return r.Take(ctx, 0, batch.TaskCreated, opts...) })
	},
	"take in transit": func(ctx context.Context, m *fakeMover, r *Repository, got func(int64), opts ...TakeOption) error {
		return takeEach(m, got, func() (*batch.Batch, error) {
			var t *batch.Transit
			b, err := r.Take(ctx, 0, batch.InTransit, append(opts, Into(&t))...)
			if err != nil {
				return nil, err
			}
			return b, t.Abort()
		})
	},
	"claim": func(ctx context.Context, m *fakeMover, r *Repository, got func(int64), opts ...TakeOption) error {
		for {
			c, err := r.Claim(ctx, 0, 100, opts...)
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			for _, n := range m.numbersOf(c.Batches()) {
				got(n)
			}
			if err := c.Consume(); err != nil {
				return err
			}
		}
	},
}

func takeEach(m *fakeMover, got func(int64), take func() (*batch.Batch, error)) error {
	for {
		b, err := take()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		got(m.numberOf(b))
		if err := b.Discard(background); err != nil {
			return err
		}
	}
}

// numbers are what came so far.
type numbers struct {
	mu   sync.Mutex
	seen []int64
}

func (n *numbers) add(i int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.seen = append(n.seen, i)
}

func (n *numbers) all() []int64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.seen)
}

// nth returns the batch at a place of partition 0.
func nth(r *Repository, i int) *batch.Batch {
	return slices.Collect(r.Batches(0))[i]
}

func mustTransit(t testing.TB, b *batch.Batch) *batch.Transit {
	t.Helper()
	transit, err := b.TryTransit()
	check(t, err)
	return transit
}

// TestOrderOfArrival: while the batch that comes next is in transit a consumer waits for
// it, whichever way it takes, and whether the move succeeds or not.
func TestOrderOfArrival(t *testing.T) {
	for name, consume := range ways {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMover(t, 10, 10, 10)
				r := ensure(t, newPlan(t, m), "join")
				fill(t, r, 6)
				moved := nth(r, 2)
				first, third := mustTransit(t, nth(r, 0)), mustTransit(t, moved)
				r.CloseInput()
				var got numbers
				done := make(chan error, 1)
				go func() { done <- consume(background, m, r, got.add) }()
				synctest.Wait()
				wantNumbers(t, got.all())
				check(t, first.Abort())
				synctest.Wait()
				wantNumbers(t, got.all(), 0, 1)
				p, err := m.image(background, moved.Info().Descriptor, reservation.AnyInTier(tier.Disk))
				check(t, err)
				check(t, third.Commit(p, false))
				check(t, <-done)
				wantNumbers(t, got.all(), 0, 1, 2, 3, 4, 5)
			})
		})
		t.Run(name+", unordered", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMover(t, 10, 10, 10)
				r := ensure(t, newPlan(t, m), "join")
				fill(t, r, 6)
				first, third := mustTransit(t, nth(r, 0)), mustTransit(t, nth(r, 2))
				r.CloseInput()
				var got numbers
				done := make(chan error, 1)
				go func() { done <- consume(background, m, r, got.add, Unordered()) }()
				synctest.Wait()
				wantNumbers(t, got.all(), 1, 3, 4, 5)
				check(t, third.Abort())
				synctest.Wait()
				check(t, first.Abort())
				check(t, <-done)
				wantNumbers(t, got.all(), 1, 3, 4, 5, 2, 0)
			})
		})
	}
}

// TestOrderWaitEnds: the wait for a batch in transit ends with the context and with the
// repository; what does not wait says that there is nothing now. The order is kept.
func TestOrderWaitEnds(t *testing.T) {
	for name, consume := range ways {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMover(t, 10, 10, 10)
				plan := newPlan(t, m)
				r := ensure(t, plan, "join")
				fill(t, r, 3)
				transit := mustTransit(t, nth(r, 0))
				ctx, cancel := context.WithCancelCause(background)
				cause := errors.New("gave up")
				var got numbers
				done := make(chan error, 1)
				go func() { done <- consume(ctx, m, r, got.add) }()
				synctest.Wait()
				cancel(cause)
				wantError(t, <-done, cause)
				wantError(t, consume(ctx, m, r, got.add), cause) // also one that begins afterwards

				if b, err := r.Take(background, 0, batch.TaskCreated, NoWait()); b != nil || err != nil {
					t.Errorf("took %v, %v", b, err)
				}
				if c, err := r.Claim(background, 0, 3, NoWait()); c != nil || err != nil {
					t.Errorf("claimed %v, %v", c, err)
				}

				go func() { done <- consume(background, m, r, got.add) }()
				synctest.Wait()
				closed := make(chan error, 1)
				go func() { closed <- closeAll(background, plan) }()
				wantError(t, <-done, tier.ErrClosed)
				check(t, transit.Abort())
				check(t, <-closed)
				wantNumbers(t, got.all())
			})
		})
	}
}

// TestFailedHeadIsToldFirst: a batch that cannot be had when its transit is over, because
// it is lost with its GPU, is an error, and nothing after it comes before it is gone.
func TestFailedHeadIsToldFirst(t *testing.T) {
	for _, name := range []string{"reader", "drain"} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMover(t, 10, 10, 10)
				r := ensure(t, newPlan(t, m), "join")
				fill(t, r, 3)
				r.CloseInput()
				head := nth(r, 0)
				transit := mustTransit(t, head)
				lost := &tier.LostError{Space: tier.ID{Kind: tier.GPU}}
				m.setFault(func(op string) error {
					if first, _ := r.Peek(0); (op == "acquire" || op == "record") && first == head {
						return lost
					}
					return nil
				})
				var got numbers
				done := make(chan error, 1)
				go func() { done <- ways[name](background, m, r, got.add) }()
				synctest.Wait()
				check(t, transit.Abort())
				wantError(t, <-done, lost)
				wantError(t, ways[name](background, m, r, got.add), lost)
				wantNumbers(t, got.all())
				b, err := r.Take(background, 0, batch.Idle, NoWait())
				check(t, err)
				if b != head {
					t.Errorf("batch %d is first", b.ID())
				}
				check(t, b.Drop())
				check(t, ways[name](background, m, r, got.add))
				wantNumbers(t, got.all(), 1, 2)
			})
		})
	}
}

// TestHeadMovesForItsWaiter: the batch that comes next is moved out of the GPU to make
// room for the one before it, and both come, in order.
func TestHeadMovesForItsWaiter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 1, 10, 10)
		r := ensure(t, newPlan(t, m), "join")
		fill(t, r, 1)
		check(t, r.Put(background, 0, record(1), WithPlacement(reservation.AnyInTier(tier.GPU)))) // which is full now
		r.CloseInput()
		second := nth(r, 1)
		transit := mustTransit(t, second) // as the monitor does when the first waits for room
		var got numbers
		done := make(chan error, 2)
		for range 2 { // one waits for the room, the other for the batch that makes it
			go func() { done <- ways["drain"](background, m, r, got.add) }()
			synctest.Wait()
		}
		wantNumbers(t, got.all())
		p, err := m.image(background, second.Info().Descriptor, reservation.AnyInTier(tier.Disk))
		check(t, err)
		check(t, transit.Commit(p, false))
		check(t, errors.Join(<-done, <-done))
		slices.Sort(got.seen) // of two drainers
		wantNumbers(t, got.seen, 0, 1)
	})
}

// TestRestoredComesNext: what a failed task leaves comes before all that came meanwhile,
// also while the monitor is moving it.
func TestRestoredComesNext(t *testing.T) {
	for name, consume := range ways {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMover(t, 10, 10, 10)
				r := ensure(t, newPlan(t, m), "join")
				fill(t, r, 3)
				c := mustClaim(t, r, 2)
				check(t, r.Put(background, 0, record(3)))
				transit := mustTransit(t, c.Batches()[0])
				check(t, c.Restore())
				r.CloseInput()
				var got numbers
				done := make(chan error, 1)
				go func() { done <- consume(background, m, r, got.add) }()
				synctest.Wait()
				wantNumbers(t, got.all())
				check(t, transit.Abort())
				check(t, <-done)
				wantNumbers(t, got.all(), 0, 1, 2, 3)
			})
		})
	}
}

// TestWorkInPlaceKeepsTheOrder: what is read elsewhere, as when it is cloned, or has work
// announced, is in its place.
func TestWorkInPlaceKeepsTheOrder(t *testing.T) {
	for _, name := range []string{"reader", "drain", "take with a task", "claim"} {
		t.Run(name, func(t *testing.T) {
			m := newMover(t, 10, 10, 10)
			r := ensure(t, newPlan(t, m), "join")
			for n := range int64(3) {
				check(t, r.Put(background, 0, record(n)))
			}
			r.CloseInput()
			h, err := m.Acquire(background, nth(r, 0), reservation.AnyInTier(tier.GPU))
			check(t, err)
			check(t, nth(r, 1).TryCreateTask())
			var got numbers
			check(t, ways[name](background, m, r, got.add))
			wantNumbers(t, got.all(), 0, 1, 2)
			check(t, h.Close())
		})
	}
}

// TestArrivalIsWhenItIsThere: a batch whose put takes long comes after those that were
// there before it, of a fan-out, too.
func TestArrivalIsWhenItIsThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 10, 10, 10)
		plan := newPlan(t, m)
		one, two := ensure(t, plan, "one"), ensure(t, plan, "two")
		goOn := make(chan struct{})
		calls := 0
		m.setFault(func(op string) error {
			if calls++; op == "ingest" && calls == 2 { // the fan-out's second
				<-goOn
			}
			return nil
		})
		done := make(chan error, 1)
		go func() { done <- plan.FanOut(background, record(5), 0, one.Key(), two.Key()) }()
		synctest.Wait()
		check(t, one.Put(background, 0, record(6)))
		if b, _ := one.Peek(0); m.numberOf(b) != 6 {
			t.Fatal("another batch is there")
		}
		close(goOn)
		check(t, <-done)
		all := slices.Collect(one.Batches(0))
		wantNumbers(t, m.numbersOf(all), 6, 5)
		if a, b := all[0].Info().Place.Seq, all[1].Info().Place.Seq; a >= b {
			t.Errorf("places %d and %d", a, b)
		}
	})
}
