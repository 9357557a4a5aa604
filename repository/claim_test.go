package repository

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// putNumbers puts the numbers [from, to) into partition 0.
func putNumbers(t testing.TB, r *Repository, from, to int64) {
	t.Helper()
	for n := from; n < to; n++ {
		check(t, r.Put(background, 0, record(n)))
	}
}

func mustClaim(t testing.TB, r *Repository, most int) *Claim {
	t.Helper()
	c, err := r.Claim(background, 0, most, NoWait())
	check(t, err)
	if c == nil {
		t.Fatal("there is nothing to claim")
	}
	return c
}

func (m *fakeMover) numbersOf(batches []*batch.Batch) (ns []int64) {
	for _, b := range batches {
		ns = append(ns, m.numberOf(b))
	}
	return ns
}

func wantNumbers(t testing.TB, got []int64, want ...int64) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("the batches are %d, want %d", got, want)
	}
}

// takeAll empties partition 0.
func takeAll(t testing.TB, m *fakeMover, r *Repository) (ns []int64) {
	t.Helper()
	for {
		b, err := r.Take(background, 0, batch.Idle, NoWait())
		check(t, err)
		if b == nil {
			return ns
		}
		ns = append(ns, m.numberOf(b))
		check(t, b.Drop())
	}
}

// TestClaimKeepsThePlace: what was restored comes before all that came after it, whatever happened
// to the batches and to the partition meanwhile.
func TestClaimKeepsThePlace(t *testing.T) {
	m := newMover(t, 20, 20, 20)
	r := ensure(t, newPlan(t, m), "join")
	putNumbers(t, r, 0, 6)
	first, second := mustClaim(t, r, 2), mustClaim(t, r, 2)
	wantNumbers(t, m.numbersOf(first.Batches()), 0, 1)
	wantNumbers(t, m.numbersOf(second.Batches()), 2, 3)
	if r.Len(0) != 6 || r.Total() != 6 || len(first.Batches()) != 2 {
		t.Errorf("%d batches are counted", r.Len(0))
	}
	b, err := r.Take(background, 0, batch.TaskCreated, NoWait())
	check(t, err)
	if n := m.numberOf(b); n != 4 { // claimed ones are passed over
		t.Errorf("batch %d was taken", n)
	}
	check(t, b.Drop())
	putNumbers(t, r, 6, 8)
	for _, b := range first.Batches() { // as a task does, and the monitor
		h, err := m.Acquire(background, b, r.opts.Placement)
		check(t, err)
		check(t, h.Close())
		check(t, m.move(background, b, reservation.AnyInTier(tier.Disk)))
	}
	check(t, second.Restore())
	check(t, first.Restore())
	wantNumbers(t, m.numbersOf(slices.Collect(r.Batches(0))), 0, 1, 2, 3, 5, 6, 7)
	wantNumbers(t, takeAll(t, m, r), 0, 1, 2, 3, 5, 6, 7)
	for _, c := range []*Claim{first, second} {
		wantError(t, c.Restore(), tier.ErrReleased)
		wantError(t, c.Consume(), tier.ErrReleased)
	}
}

// TestClaimIsConsumed: with open handles the data goes with the last of them.
func TestClaimIsConsumed(t *testing.T) {
	m := newMover(t, 20, 20, 20)
	r := ensure(t, newPlan(t, m), "join")
	putNumbers(t, r, 0, 4)
	c := mustClaim(t, r, 3)
	dropped := c.Batches()[1]
	check(t, dropped.Drop()) // by other code, in place
	h, err := m.Acquire(background, c.Batches()[0], r.opts.Placement)
	check(t, err)
	check(t, c.Consume())
	if r.Len(0) != 1 || r.Bytes(tier.GPU) != bodySize {
		t.Errorf("%d batches with %d bytes are left", r.Len(0), r.Bytes(tier.GPU))
	}
	if used := m.space(tier.GPU).State().Used(); used != 2*bodySize {
		t.Errorf("%d bytes are used", used)
	}
	check(t, h.Close())
	if used := m.space(tier.GPU).State().Used(); used != bodySize {
		t.Errorf("%d bytes are used after the handle was closed", used)
	}
	wantNumbers(t, takeAll(t, m, r), 3)
}

// TestClaimWaits: for the first batch, with takers served in their order; the end of the input does
// not come while an open claim may be restored.
func TestClaimWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 20, 20, 20)
		r := ensure(t, newPlan(t, m), "join")
		for _, most := range []int{0, -1} {
			if _, err := r.Claim(background, 0, most); err == nil {
				t.Errorf("%d batches were claimed", most)
			}
		}
		_, err := r.Claim(background, -1, 1)
		wantError(t, err, ErrPartition)
		if c, err := r.Claim(background, 0, 1, NoWait()); c != nil || err != nil {
			t.Errorf("of nothing: %v, %v", c, err)
		}
		ctx, cancel := context.WithCancel(background)
		cancel()
		_, err = r.Claim(ctx, 0, 1)
		wantError(t, err, context.Canceled)

		type result struct {
			c   *Claim
			err error
		}
		results := make(chan result, 2)
		claim := func() {
			c, err := r.Claim(background, 0, 5, WaitClaims())
			results <- result{c, err}
		}
		go claim()
		synctest.Wait()
		putNumbers(t, r, 0, 1)
		one := <-results
		check(t, one.err)
		wantNumbers(t, m.numbersOf(one.c.Batches()), 0)

		r.CloseInput()
		go claim()
		synctest.Wait()
		select {
		case r := <-results:
			t.Fatalf("the partition has ended while a batch is claimed: %v", r.err)
		default:
		}
		check(t, one.c.Restore())
		two := <-results
		check(t, two.err)
		wantNumbers(t, m.numbersOf(two.c.Batches()), 0)
		go claim()
		synctest.Wait()
		check(t, two.c.Consume())
		if r := <-results; !errors.Is(r.err, io.EOF) {
			t.Errorf("at the end: %v", r.err)
		}
	})
}

// TestRestoreServesTheOldest: a waiter gets the oldest of what is restored.
func TestRestoreServesTheOldest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 20, 20, 20)
		r := ensure(t, newPlan(t, m), "join")
		putNumbers(t, r, 0, 5)
		c := mustClaim(t, r, 5)
		check(t, c.Batches()[0].Drop()) // which ends its entry first of all
		taken := make(chan *batch.Batch, 2)
		for range 2 {
			go func() {
				b, err := r.Take(background, 0, batch.Idle)
				check(t, err)
				taken <- b
			}()
			synctest.Wait()
		}
		check(t, c.Restore())
		got := []int64{m.numberOf(<-taken), m.numberOf(<-taken)}
		slices.Sort(got)
		wantNumbers(t, got, 1, 2)
		wantNumbers(t, takeAll(t, m, r), 3, 4)
		// The takers drop the two that were taken.
		for _, b := range c.Batches()[1:3] {
			check(t, b.Drop())
		}
	})
}

// TestBytesOfAClaimedBatch: a claimed batch that is dropped in place counts no bytes from then on,
// with a handle open and after its close.
func TestBytesOfAClaimedBatch(t *testing.T) {
	m := newMover(t, 20, 20, 20)
	r := ensure(t, newPlan(t, m), "join")
	putNumbers(t, r, 0, 2)
	c := mustClaim(t, r, 2)
	b := c.Batches()[0]
	h, err := b.Open(background, tier.ID{}, false)
	check(t, err)
	k := h.Space().Kind()
	check(t, b.Drop())
	if n := r.Bytes(k); n != bodySize {
		t.Errorf("with a handle open the repository counts %d bytes, want the other batch's", n)
	}
	check(t, h.Close())
	if n, used := r.Bytes(k), m.space(k).State().Used(); n != bodySize || used != bodySize {
		t.Errorf("the repository counts %d bytes, of %d that are used", n, used)
	}
	check(t, c.Restore())
	if n := r.Bytes(k); n != bodySize {
		t.Errorf("after the claim the repository counts %d bytes", n)
	}
	check(t, c.Batches()[1].Drop())
}

// TestCloseTakesClaimsBack: an open claim, which may never end, holds up neither a close nor the
// memory; ending it then does nothing.
func TestCloseTakesClaimsBack(t *testing.T) {
	for name, end := range map[string]func(*Claim) error{"restore": (*Claim).Restore, "consume": (*Claim).Consume} {
		t.Run(name, func(t *testing.T) {
			m := newMover(t, 20, 20, 20)
			plan := newPlan(t, m)
			r := ensure(t, plan, "join")
			putNumbers(t, r, 0, 3)
			c := mustClaim(t, r, 2)
			h, err := m.Acquire(background, c.Batches()[0], r.opts.Placement)
			check(t, err)
			check(t, closeAll(background, plan))
			if used := m.space(tier.GPU).State().Used(); used != bodySize { // the handle's
				t.Errorf("%d bytes are used", used)
			}
			check(t, h.Close())
			check(t, end(c))
			if n := r.Bytes(tier.GPU); n != 0 {
				t.Errorf("an empty repository has %d bytes", n)
			}
			_, err = r.Claim(background, 0, 1, NoWait())
			wantError(t, err, tier.ErrClosed)
		})
	}
}

// TestClearWaitsForClaims: an open repository is only cleared of what no task has.
func TestClearWaitsForClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 20, 20, 20)
		plan := newPlan(t, m)
		r := ensure(t, plan, "join")
		putNumbers(t, r, 0, 3)
		c := mustClaim(t, r, 2)
		cleared := make(chan []Leftover, 1)
		go func() {
			left, err := plan.Clear(background)
			check(t, err)
			cleared <- left
		}()
		synctest.Wait()
		if len(cleared) != 0 {
			t.Error("it did not wait")
		}
		check(t, c.Consume())
		if left := <-cleared; len(left) != 1 || left[0].Batches != 1 {
			t.Errorf("cleared %+v", left)
		}
	})
}

// TestClaimsConcurrently: claimers that restore and consume at random, takers and putters at
// once. Nothing is lost or had twice, and every claim and the partition is in order of
// arrival at every moment, in which a batch keeps its place however often it is restored.
func TestClaimsConcurrently(t *testing.T) {
	const putters, each = 3, 120
	seed := testseed.One(t)
	m := newMover(t, putters*each, 10, 10)
	r := ensure(t, newPlan(t, m), "join")
	var mu sync.Mutex
	consumed := make(map[int64]int)
	order := make(map[*batch.Batch]uint64) // of arrival
	ascending := func(what string, batches []*batch.Batch) {
		if !slices.IsSortedFunc(batches, func(a, b *batch.Batch) int {
			if a.Info().Place.Seq < b.Info().Place.Seq {
				return -1
			}
			return 1
		}) {
			t.Errorf("%s is out of order", what)
		}
	}
	var put, work sync.WaitGroup
	for p := range int64(putters) {
		put.Go(func() {
			for n := range int64(each) {
				check(t, r.Put(background, 0, record(p*each+n)))
			}
		})
	}
	for w := range 6 {
		work.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(w)))
			for {
				if w == 5 {
					b, err := r.Take(background, 0, batch.Idle)
					if errors.Is(err, io.EOF) {
						return
					}
					check(t, err)
					mu.Lock()
					consumed[m.numberOf(b)]++
					mu.Unlock()
					check(t, b.Drop())
					continue
				}
				c, err := r.Claim(background, 0, 1+rng.IntN(5), WaitClaims())
				if errors.Is(err, io.EOF) {
					return
				}
				check(t, err)
				batches := c.Batches()
				ascending("a claim", batches)
				mu.Lock()
				for _, b := range batches {
					if seq, ok := order[b]; ok && seq != b.Info().Place.Seq {
						t.Errorf("a batch has moved from place %d to %d", seq, b.Info().Place.Seq)
					}
					order[b] = b.Info().Place.Seq
				}
				mu.Unlock()
				if rng.IntN(3) > 0 {
					check(t, c.Restore())
					continue
				}
				mu.Lock()
				for _, b := range batches {
					consumed[m.numberOf(b)]++
				}
				mu.Unlock()
				check(t, c.Consume())
			}
		})
	}
	work.Go(func() {
		for range 500 {
			ascending("the partition", slices.Collect(r.Batches(0)))
		}
	})
	put.Wait()
	r.CloseInput()
	work.Wait()
	if len(consumed) != putters*each {
		t.Errorf("%d of %d batches were consumed", len(consumed), putters*each)
	}
	for n, times := range consumed {
		if times != 1 {
			t.Errorf("batch %d was consumed %d times", n, times)
		}
	}
}
