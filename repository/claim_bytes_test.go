package repository

import (
	"context"
	"io"
	"math/rand/v2"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// sized puts batches of so many bytes each into partition 0, with ids from first on.
func sized(t *testing.T, r *Repository, s *tier.Space, first batch.ID, sizes ...int64) {
	t.Helper()
	for i, n := range sizes {
		b, err := batch.New(batch.Options{ID: first + batch.ID(i), Payload: sizedForm{form{s}, n}})
		check(t, err)
		check(t, r.PutBatch(0, b))
	}
}

type sizedForm struct {
	form
	bytes int64
}

func (f sizedForm) Bytes() int64 { return f.bytes }

func wantIDs(t *testing.T, c *Claim, want ...batch.ID) {
	t.Helper()
	var got []batch.ID
	for _, b := range c.Batches() {
		got = append(got, b.ID())
	}
	if len(got) != len(want) || len(got) > 0 && (got[0] != want[0] || got[len(got)-1] != want[len(want)-1]) {
		t.Errorf("batches %d were claimed, want %d", got, want)
	}
}

// TestClaimBytes: a claim has as many batches as fit into the largest number of bytes, at least one.
// It waits for the smallest number, for the end of the input, or for a batch in transit.
func TestClaimBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 10, 10, 10)
		r := ensure(t, newPlan(t, m), "join")
		gpu := m.space(tier.GPU)
		for _, bounds := range [][2]int64{{-1, 5}, {0, 0}, {7, 6}} {
			if c, err := r.ClaimBytes(background, 0, bounds[0], bounds[1]); c != nil || err == nil {
				t.Errorf("%d bytes: %v, %v", bounds, c, err)
			}
		}
		claim := func(least, most int64, opts ...TakeOption) func() (*Claim, error) {
			return func() (*Claim, error) { return r.ClaimBytes(background, 0, least, most, opts...) }
		}
		had := func(got claimResult, want ...batch.ID) *Claim {
			t.Helper()
			check(t, got.err)
			wantIDs(t, got.c, want...)
			return got.c
		}
		sized(t, r, gpu, 1, 30, 30, 30, 500, 10)
		check(t, had(<-claiming(claim(0, 60)), 1, 2).Restore()) // exactly
		check(t, had(<-claiming(claim(60, 89)), 1, 2).Restore())
		check(t, had(<-claiming(claim(0, 1)), 1).Restore())          // one that is larger than the bytes
		check(t, had(<-claiming(claim(91, 100)), 1, 2, 3).Restore()) // the next would be too large
		first := had(<-claiming(claim(90, 90)), 1, 2, 3)
		large := had(<-claiming(claim(0, 100)), 4)

		waits := claiming(claim(25, 1000))
		mustWait(t, waits)
		if c, err := r.ClaimBytes(background, 0, 25, 1000, NoWait()); c != nil || err != nil {
			t.Errorf("without waiting: %v, %v", c, err)
		}
		sized(t, r, gpu, 6, 14)
		mustWait(t, waits)
		sized(t, r, gpu, 7, 1)
		rest := had(<-waits, 5, 6, 7)

		waits = claiming(claim(100, 1000))
		sized(t, r, gpu, 8, 20, 20)
		moving := mustTransit(t, nth(r, 8))
		r.CloseInput() // what there is, but a batch in transit is there in a moment
		mustWait(t, waits)
		check(t, moving.Abort())
		last := had(<-waits, 8, 9)

		_, err := r.ClaimBytes(background, 0, 1, 10)
		wantError(t, err, ErrClaimed)
		for _, c := range []*Claim{first, large, rest, last} {
			check(t, c.Consume())
		}
		_, err = r.ClaimBytes(background, 0, 1, 10)
		wantError(t, err, io.EOF)
	})
}

// TestClaimBytesEnds with its context and with the repository; what it would have is free then.
func TestClaimBytesEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 10, 10, 10)
		plan := newPlan(t, m)
		r := ensure(t, plan, "join")
		sized(t, r, m.space(tier.GPU), 1, 10)
		ctx, cancel := context.WithCancel(background)
		waits := claiming(func() (*Claim, error) { return r.ClaimBytes(ctx, 0, 50, 100) })
		mustWait(t, waits)
		check(t, mustClaim(t, r, 1).Restore()) // it holds nothing while it waits
		cancel()
		wantError(t, (<-waits).err, context.Canceled)
		waits = claiming(func() (*Claim, error) { return r.ClaimBytes(background, 0, 50, 100) })
		mustWait(t, waits)
		check(t, closeAll(background, plan))
		wantError(t, (<-waits).err, tier.ErrClosed)
	})
}

// TestClaimBytesAtRandom compares claims of random bounds with a plain loop over the sizes.
func TestClaimBytesAtRandom(t *testing.T) {
	for seed := range testseed.Each(t, 5) {
		rnd := rand.New(rand.NewPCG(seed, 3))
		m := newMover(t, 10, 10, 10)
		r := ensure(t, newPlan(t, m), "join")
		sizes := make([]int64, 200)
		for i := range sizes {
			sizes[i] = 1 + rnd.Int64N(100)
		}
		sized(t, r, m.space(tier.Host), 1, sizes...)
		r.CloseInput()
		for at := 0; at < len(sizes); {
			least := rnd.Int64N(300)
			most := max(1, least+rnd.Int64N(200))
			c, err := r.ClaimBytes(background, 0, least, most)
			check(t, err)
			end, bytes := at+1, sizes[at]
			for end < len(sizes) && bytes+sizes[end] <= most {
				bytes += sizes[end]
				end++
			}
			if got := c.Batches(); len(got) != end-at || got[0].ID() != batch.ID(at+1) {
				t.Fatalf("seed %d: %d to %d bytes are %d batches from %d on, want %d from %d on",
					seed, least, most, len(got), got[0].ID(), end-at, at+1)
			}
			if rnd.IntN(3) == 0 {
				check(t, c.Restore())
				continue
			}
			check(t, c.Consume())
			at = end
		}
		_, err := r.ClaimBytes(background, 0, 0, 1)
		wantError(t, err, io.EOF)
	}
}
