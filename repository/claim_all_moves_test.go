package repository

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// moveAlways moves the batches of the partition in place until stop is called: at any time
// one at least is in transit. Call it in a bubble.
func moveAlways(t *testing.T, r *Repository) (stop func()) {
	ctx, cancel := context.WithCancel(background)
	var wg sync.WaitGroup
	for g := range 2 {
		wg.Go(func() {
			time.Sleep(time.Duration(g) * 5 * time.Millisecond)
			for i := 0; ctx.Err() == nil; i++ {
				batches := slices.Collect(r.Batches(0))
				transit, err := batches[(2*i+g)%len(batches)].TryTransit()
				if err != nil {
					time.Sleep(time.Millisecond)
					continue
				}
				time.Sleep(10 * time.Millisecond)
				if err := transit.Abort(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	time.Sleep(time.Second)
	return func() {
		cancel()
		wg.Wait()
	}
}

func inOrder(n int) []int64 {
	numbers := make([]int64, n)
	for i := range numbers {
		numbers[i] = int64(i)
	}
	return numbers
}

// TestClaimAllUnderMoves: moves that overlap, so that a batch is in transit all the time, do
// not keep a claim of all from ending.
func TestClaimAllUnderMoves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 100, 100, 100)
		r := ensure(t, newPlan(t, m), "join")
		fill(t, r, 20)
		r.CloseInput()
		stop := moveAlways(t, r)
		ctx, cancel := context.WithTimeout(background, 10*time.Minute)
		defer cancel()
		c, err := r.ClaimAll(ctx, 0)
		stop()
		check(t, err)
		wantNumbers(t, m.numbersOf(c.Batches()), inOrder(20)...)
		check(t, c.Restore())
	})
}

// TestClaimAllsUnderMoves: of two claims of all beside moves one has all and the other's error
// says so; if the first gives up the other has all.
func TestClaimAllsUnderMoves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 100, 100, 100)
		r := ensure(t, newPlan(t, m), "join")
		fill(t, r, 20)
		r.CloseInput()
		stop := moveAlways(t, r)
		ctx, cancel := context.WithTimeout(background, 10*time.Minute)
		defer cancel()
		results := make(chan claimResult, 2)
		for range 2 {
			go func() {
				c, err := r.ClaimAll(ctx, 0)
				results <- claimResult{c, err}
			}()
		}
		one, other := <-results, <-results
		if one.err != nil {
			one, other = other, one
		}
		stop()
		check(t, one.err)
		wantNumbers(t, m.numbersOf(one.c.Batches()), inOrder(20)...)
		var ce *ClaimedError
		if !errors.As(other.err, &ce) || other.c != nil || *ce != (ClaimedError{Key: r.Key(), Claimed: 20, Batches: 20}) {
			t.Errorf("the other: %v, %v", other.c, other.err)
		}
		check(t, one.c.Restore())

		transit := mustTransit(t, nth(r, 7))
		gone, giveUp := context.WithCancelCause(background)
		first := claiming(func() (*Claim, error) { return r.ClaimAll(gone, 0) })
		second := claiming(func() (*Claim, error) { return r.ClaimAll(background, 0) })
		mustWait(t, first)
		mustWait(t, second)
		cause := errors.New("gave up")
		giveUp(cause)
		wantError(t, (<-first).err, cause)
		mustWait(t, second)
		check(t, transit.Abort())
		got := <-second
		check(t, got.err)
		wantNumbers(t, m.numbersOf(got.c.Batches()), inOrder(20)...)
		check(t, got.c.Restore())
	})
}

// TestClaimAllGivesBack: a claim of all that ends in the middle restores what it has.
func TestClaimAllGivesBack(t *testing.T) {
	for name, test := range map[string]func(*testing.T, *fakeMover, *Manager, *Repository){
		"its context ends": func(t *testing.T, m *fakeMover, _ *Manager, r *Repository) {
			transit := mustTransit(t, nth(r, 2))
			ctx, cancel := context.WithCancel(background)
			all := claiming(func() (*Claim, error) { return r.ClaimAll(ctx, 0) })
			mustWait(t, all)
			if b, err := r.Take(background, 0, batch.Idle, Unordered(), NoWait()); b != nil || err != nil {
				t.Errorf("what a claim keeps was taken: %v, %v", b, err)
			}
			takes := make(chan *batch.Batch, 1)
			go func() {
				b, err := r.Take(background, 0, batch.Idle)
				if err != nil {
					t.Error(err)
				}
				takes <- b
			}()
			mustWait(t, takes)
			cancel()
			wantError(t, (<-all).err, context.Canceled)
			b := <-takes // it is given the oldest
			wantNumbers(t, m.numbersOf([]*batch.Batch{b}), 0)
			check(t, b.Drop())
			check(t, transit.Abort())
			c := mustClaim(t, r, 10)
			wantNumbers(t, m.numbersOf(c.Batches()), 1, 2, 3, 4)
			check(t, c.Consume())
		},
		"another claims one that it waits for": func(t *testing.T, m *fakeMover, _ *Manager, r *Repository) {
			transit := mustTransit(t, nth(r, 0))
			some := claiming(func() (*Claim, error) { return r.Claim(background, 0, 1) })
			all := claiming(func() (*Claim, error) { return r.ClaimAll(background, 0) })
			later := claiming(func() (*Claim, error) { return r.ClaimAll(background, 0) })
			mustWait(t, some)
			mustWait(t, all)
			check(t, transit.Abort())
			got := <-some
			check(t, got.err)
			for _, ch := range []<-chan claimResult{all, later} {
				var ce *ClaimedError
				err := (<-ch).err
				if !errors.As(err, &ce) || *ce != (ClaimedError{Key: r.Key(), Claimed: 1, Batches: 5}) {
					t.Error(err)
				}
			}
			c := mustClaim(t, r, 10)
			wantNumbers(t, m.numbersOf(c.Batches()), 1, 2, 3, 4)
			check(t, c.Restore())
			check(t, got.c.Restore())
			c = mustClaim(t, r, 10)
			wantNumbers(t, m.numbersOf(c.Batches()), inOrder(5)...)
			check(t, c.Consume())
		},
		"the repository is closed": func(t *testing.T, _ *fakeMover, plan *Manager, r *Repository) {
			transit := mustTransit(t, nth(r, 2))
			all := claiming(func() (*Claim, error) { return r.ClaimAll(background, 0) })
			mustWait(t, all)
			closed := make(chan error, 1)
			go func() { closed <- closeAll(background, plan) }()
			wantError(t, (<-all).err, tier.ErrClosed)
			check(t, transit.Abort())
			check(t, <-closed)
			if n := r.Total(); n != 0 {
				t.Errorf("%d batches are left", n)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMover(t, 20, 20, 20)
				plan := newPlan(t, m)
				r := ensure(t, plan, "join")
				putNumbers(t, r, 0, 5)
				test(t, m, plan, r)
			})
		})
	}
}

// TestClaimAllAndTheEndOfItsContext: what can be had at once is claimed whatever the context
// says; a context that ends just as the claim is complete leaves nothing locked.
func TestClaimAllAndTheEndOfItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 20, 20, 20)
		r := ensure(t, newPlan(t, m), "join")
		putNumbers(t, r, 0, 3)
		gone, cancel := context.WithCancel(background)
		cancel()
		for range 50 {
			c, err := r.ClaimAll(gone, 0)
			check(t, err)
			check(t, c.Restore())
		}
		for range 50 {
			transit := mustTransit(t, nth(r, 1))
			ctx, cancel := context.WithCancel(background)
			all := claiming(func() (*Claim, error) { return r.ClaimAll(ctx, 0) })
			mustWait(t, all)
			cancel()
			check(t, transit.Abort())
			if got := <-all; got.err == nil {
				check(t, got.c.Restore())
			} else {
				wantError(t, got.err, context.Canceled)
			}
			c := mustClaim(t, r, 10)
			wantNumbers(t, m.numbersOf(c.Batches()), 0, 1, 2)
			check(t, c.Restore())
		}
	})
}

// TestClaimAllOfWhatWasThere: a claim of all is of what the partition held when it began, less what
// others take or drop meanwhile. It does not wait for what is put later.
func TestClaimAllOfWhatWasThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 20, 20, 20)
		r := ensure(t, newPlan(t, m), "join")
		putNumbers(t, r, 0, 5)
		first := mustTransit(t, nth(r, 0))
		third := mustTransit(t, nth(r, 2))
		taken := make(chan *batch.Batch, 1)
		var transit *batch.Transit
		go func() {
			b, err := r.Take(background, 0, batch.InTransit, Into(&transit))
			if err != nil {
				t.Error(err)
			}
			taken <- b
		}()
		mustWait(t, taken)
		all := claiming(func() (*Claim, error) { return r.ClaimAll(background, 0) })
		mustWait(t, all)
		check(t, nth(r, 1).Drop())
		putNumbers(t, r, 5, 7)
		later, err := r.Claim(background, 0, 1, Unordered(), NoWait()) // of what came later: that is no matter
		check(t, err)
		wantNumbers(t, m.numbersOf(later.Batches()), 5)
		fifth := mustTransit(t, nth(r, 6))
		check(t, first.Abort()) // the one that came first has it
		mustWait(t, all)
		b := <-taken
		check(t, third.Abort())
		got := <-all
		check(t, got.err)
		wantNumbers(t, m.numbersOf(got.c.Batches()), 2, 3, 4)
		check(t, got.c.Consume())
		check(t, later.Consume())
		check(t, transit.Abort())
		check(t, b.Drop())

		// All that it waits for is taken: it begins again, until there is nothing.
		takes := make(chan *batch.Batch, 1)
		take := func() {
			b, err := r.Take(background, 0, batch.Idle)
			if err != nil {
				t.Error(err)
			}
			takes <- b
		}
		go take()
		mustWait(t, takes)
		all = claiming(func() (*Claim, error) { return r.ClaimAll(background, 0) })
		putNumbers(t, r, 7, 8)
		mustWait(t, all)
		check(t, fifth.Abort())
		check(t, (<-takes).Drop())
		got = <-all
		check(t, got.err)
		wantNumbers(t, m.numbersOf(got.c.Batches()), 7)
		check(t, got.c.Restore())
		last := mustTransit(t, nth(r, 0))
		go take()
		mustWait(t, takes)
		all = claiming(func() (*Claim, error) { return r.ClaimAll(background, 0) })
		mustWait(t, all)
		check(t, last.Abort())
		wantError(t, (<-all).err, io.EOF)
		check(t, (<-takes).Drop())
	})
}

// TestClaimAllBesideDrains: a claim of all waits for what a drain has in hand, which may come
// back, and a drain for what a claim of all has.
func TestClaimAllBesideDrains(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 1, 20, 20)
		r := ensure(t, newPlan(t, m), "join")
		fill(t, r, 3)
		r.CloseInput()
		full, err := m.reservations.TryReserve(reservation.AnyInTier(tier.GPU), bodySize, nil)
		check(t, err)
		drain := func() <-chan error {
			ended := make(chan error, 1)
			go func() {
				for h, err := range r.Drain(background, 0, tier.GPU) {
					if err := errors.Join(err, h.Close()); err != nil {
						ended <- err
						return
					}
				}
				ended <- nil
			}()
			synctest.Wait()
			return ended
		}
		one := drain() // it waits for the GPU, with number 0
		all := claiming(func() (*Claim, error) { return r.ClaimAll(background, 0) })
		other := drain() // it waits for the claim
		mustWait(t, all)
		check(t, full.Release())
		got := <-all
		check(t, got.err)
		wantNumbers(t, m.numbersOf(got.c.Batches()), 1, 2)
		check(t, got.c.Restore())
		check(t, <-one)
		check(t, <-other)
	})
}
