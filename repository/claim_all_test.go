package repository

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

type claimResult struct {
	c   *Claim
	err error
}

// claiming runs claim in a goroutine and returns its result when it comes. Call it in a
// bubble.
func claiming(claim func() (*Claim, error)) <-chan claimResult {
	ch := make(chan claimResult, 1)
	go func() {
		c, err := claim()
		ch <- claimResult{c, err}
	}()
	synctest.Wait()
	return ch
}

func mustWait[T any](t *testing.T, ch <-chan T) {
	t.Helper()
	synctest.Wait()
	if len(ch) != 0 {
		t.Fatalf("it did not wait: %v", <-ch)
	}
}

// TestClaimAll: with batches in transit, and one that a drain is just taking, the claim of
// all waits and is complete; a claim of some is what can be had now, in order.
func TestClaimAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 1, 20, 20)
		r := ensure(t, newPlan(t, m), "join")
		fill(t, r, 10)
		r.CloseInput()
		full, err := m.reservations.TryReserve(reservation.AnyInTier(tier.GPU), bodySize, nil)
		check(t, err)
		ctx, cancel := context.WithCancel(background)
		drained := make(chan error, 1)
		go func() {
			for _, err := range r.Drain(ctx, 0, tier.GPU) { // it waits for the GPU with number 0
				drained <- err
			}
		}()
		synctest.Wait()
		moving := []*batch.Transit{mustTransit(t, nth(r, 3)), mustTransit(t, nth(r, 9))}

		some := mustClaim(t, r, 10)
		wantNumbers(t, m.numbersOf(some.Batches()), 1, 2)
		check(t, some.Restore())

		all := claiming(func() (*Claim, error) { return r.ClaimAll(background, 0) })
		mustWait(t, all)
		check(t, moving[0].Abort())
		mustWait(t, all)
		check(t, moving[1].Abort())
		mustWait(t, all)
		cancel()
		wantError(t, <-drained, context.Canceled)
		got := <-all
		check(t, got.err)
		wantNumbers(t, m.numbersOf(got.c.Batches()), 0, 1, 2, 3, 4, 5, 6, 7, 8, 9)

		// What is left is in that claim: no caller waits for it for ever.
		for name, claim := range map[string]func() (*Claim, error){
			"Claim":             func() (*Claim, error) { return r.Claim(background, 0, 100) },
			"Claim, unordered":  func() (*Claim, error) { return r.Claim(background, 0, 100, Unordered()) },
			"Claim, at once":    func() (*Claim, error) { return r.Claim(background, 0, 100, NoWait()) },
			"ClaimAll":          func() (*Claim, error) { return r.ClaimAll(background, 0) },
			"ClaimAll, waiting": func() (*Claim, error) { return r.ClaimAll(background, 0, WaitInput()) },
		} {
			got := <-claiming(claim)
			var ce *ClaimedError
			if !errors.As(got.err, &ce) || !errors.Is(got.err, ErrClaimed) || got.c != nil || errors.Is(got.err, io.EOF) {
				t.Errorf("%s: %v, %v", name, got.c, got.err)
			} else if want := (ClaimedError{Key: r.Key(), Claimed: 10, Batches: 10}); *ce != want {
				t.Errorf("%s: %+v", name, *ce)
			}
		}
		waits := claiming(func() (*Claim, error) { return r.Claim(background, 0, 100, WaitClaims()) })
		mustWait(t, waits)
		check(t, got.c.Consume())
		wantError(t, (<-waits).err, io.EOF)
		_, err = r.ClaimAll(background, 0)
		wantError(t, err, io.EOF)
		check(t, full.Release())
	})
}

// TestClaimAllWaitsForInput: with WaitInput it waits until the input is closed, and also
// has what was put meanwhile; without it has what is there. All waits end with the
// context and with the repository.
func TestClaimAllWaitsForInput(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 20, 20, 20)
		plan := newPlan(t, m)
		r := ensure(t, plan, "join")
		_, err := r.ClaimAll(background, -1)
		wantError(t, err, ErrPartition)
		_, err = r.ClaimAll(background, 0)
		wantError(t, err, io.EOF)
		putNumbers(t, r, 0, 2)
		c, err := r.ClaimAll(background, 0)
		check(t, err)
		wantNumbers(t, m.numbersOf(c.Batches()), 0, 1)
		check(t, c.Restore())

		all := claiming(func() (*Claim, error) { return r.ClaimAll(background, 0, WaitInput()) })
		mustWait(t, all)
		putNumbers(t, r, 2, 4)
		mustWait(t, all)
		cause := errors.New("gave up")
		ctx, cancel := context.WithCancelCause(background)
		other := claiming(func() (*Claim, error) { return r.ClaimAll(ctx, 0, WaitInput()) })
		mustWait(t, other)
		cancel(cause)
		wantError(t, (<-other).err, cause)
		transit := mustTransit(t, nth(r, 1))
		r.CloseInput()
		mustWait(t, all)
		other = claiming(func() (*Claim, error) { return r.ClaimAll(ctx, 0) })
		wantError(t, (<-other).err, cause)
		check(t, transit.Abort())
		got := <-all
		check(t, got.err)
		wantNumbers(t, m.numbersOf(got.c.Batches()), 0, 1, 2, 3)
		check(t, got.c.Restore())

		transit = mustTransit(t, nth(r, 1))
		all = claiming(func() (*Claim, error) { return r.ClaimAll(background, 0) })
		mustWait(t, all)
		open := ensure(t, plan, "open")
		putNumbers(t, open, 0, 1)
		wait := claiming(func() (*Claim, error) { return open.ClaimAll(background, 0, WaitInput()) })
		mustWait(t, wait)
		closed := make(chan error, 1)
		go func() { closed <- closeAll(background, plan) }()
		wantError(t, (<-all).err, tier.ErrClosed)
		wantError(t, (<-wait).err, tier.ErrClosed)
		check(t, transit.Abort())
		check(t, <-closed)
	})
}

// TestClaimEndsWhenOthersHaveTheRest: a claim that waits ends as soon as all that is left
// is in open claims, whatever comes last.
func TestClaimEndsWhenOthersHaveTheRest(t *testing.T) {
	wantClaimed := func(t *testing.T, got claimResult, claimed int) {
		t.Helper()
		var ce *ClaimedError
		if !errors.As(got.err, &ce) || ce.Claimed != claimed || ce.Batches != claimed {
			t.Errorf("%v, %v", got.c, got.err)
		}
	}
	t.Run("the end of the input", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m := newMover(t, 20, 20, 20)
			r := ensure(t, newPlan(t, m), "join")
			putNumbers(t, r, 0, 2)
			mustClaim(t, r, 2)
			if c, err := r.Claim(background, 0, 1, NoWait()); c != nil || err != nil {
				t.Errorf("while more may be put: %v, %v", c, err)
			}
			waits := claiming(func() (*Claim, error) { return r.Claim(background, 0, 1) })
			mustWait(t, waits)
			r.CloseInput()
			wantClaimed(t, <-waits, 2)
		})
	})
	t.Run("the claim of the last batch", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m := newMover(t, 20, 20, 20)
			r := ensure(t, newPlan(t, m), "join")
			putNumbers(t, r, 0, 1)
			r.CloseInput()
			transit := mustTransit(t, nth(r, 0))
			first := claiming(func() (*Claim, error) { return r.Claim(background, 0, 1) })
			second := claiming(func() (*Claim, error) { return r.Claim(background, 0, 1) })
			mustWait(t, first)
			mustWait(t, second)
			check(t, transit.Abort())
			got := <-first
			check(t, got.err)
			wantClaimed(t, <-second, 1)
			check(t, got.c.Restore())
			wantNumbers(t, m.numbersOf(mustClaim(t, r, 1).Batches()), 0)
		})
	})
	t.Run("the end of the others", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m := newMover(t, 1, 20, 20)
			r := ensure(t, newPlan(t, m), "join")
			fill(t, r, 2)
			mustClaim(t, r, 1)
			r.CloseInput()
			full, err := m.reservations.TryReserve(reservation.AnyInTier(tier.GPU), bodySize, nil)
			check(t, err)
			drained := make(chan error, 1)
			go func() {
				for h, err := range r.Drain(background, 0, tier.GPU) { // it waits for the GPU
					if err == nil {
						err = h.Close()
					}
					drained <- err
					return
				}
			}()
			synctest.Wait()
			waits := claiming(func() (*Claim, error) { return r.Claim(background, 0, 1) })
			mustWait(t, waits) // the drain may fail
			check(t, full.Release())
			check(t, <-drained)
			wantClaimed(t, <-waits, 1)
		})
	})
}

// TestClaimAllWaitsForAConsume: a claim that is being consumed, which waits for the end of a move, is
// as good as gone.
func TestClaimAllWaitsForAConsume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 20, 20, 20)
		r := ensure(t, newPlan(t, m), "join")
		putNumbers(t, r, 0, 3)
		c := mustClaim(t, r, 1)
		transit := mustTransit(t, c.Batches()[0])
		consumed := make(chan error, 1)
		go func() { consumed <- c.Consume() }()
		mustWait(t, consumed)
		all := claiming(func() (*Claim, error) { return r.ClaimAll(background, 0) })
		mustWait(t, all)
		check(t, transit.Abort())
		check(t, <-consumed)
		got := <-all
		check(t, got.err)
		wantNumbers(t, m.numbersOf(got.c.Batches()), 1, 2)
		check(t, got.c.Consume())
	})
}
