package transfer

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/address"
	"github.com/spillway-db/spillway/internal/pump"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// Scratch is lent in the order in which it was asked for, and a waiter that gives up is forgotten.
func TestScratchIsLentInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s scratch
		one, err := s.borrow(t.Context(), 0)
		if err != nil {
			t.Fatal(err)
		}
		two, ok := s.tryBorrow(0)
		if !ok {
			t.Fatal("there is no scratch for a second lane")
		}
		if &one.raw[0] == &two.raw[0] || address.Of(one.stored)%tier.Page != 0 || address.Of(one.raw)%tier.Page != 0 ||
			int64(len(one.stored)+len(one.raw)) != BlockSize {
			t.Error("the blocks are one, or not on pages")
		}
		ours := errors.New("ours")
		ctx, cancel := context.WithCancelCause(t.Context())
		var order []string
		var mu sync.Mutex
		ask := func(ctx context.Context, name string, want error) {
			go func() {
				b, err := s.borrow(ctx, 0)
				if !errors.Is(err, want) {
					t.Errorf("%s: %v", name, err)
				}
				if err != nil {
					return
				}
				mu.Lock()
				order = append(order, name)
				mu.Unlock()
				time.Sleep(time.Second) // of the bubble's
				s.giveBack(b)
			}()
			synctest.Wait()
		}
		ask(ctx, "gives up", ours)
		ask(t.Context(), "first", nil)
		ask(t.Context(), "second", nil)
		if !s.wanted() {
			t.Error("nobody is said to wait")
		}
		cancel(ours)
		synctest.Wait()
		s.giveBack(one)
		if _, ok := s.tryBorrow(0); ok {
			t.Error("those who wait were passed")
		}
		synctest.Wait()
		s.giveBack(two)
		time.Sleep(time.Minute)
		synctest.Wait()
		if len(order) != 2 || order[0] != "first" || order[1] != "second" || s.Lent != 0 || s.wanted() {
			t.Errorf("lent in the order %v; %d bytes are still", order, s.Lent)
		}
	})
}

// A waiter whose context ends at the moment in which it is served has the scratch.
func TestScratchServesAtTheSameMoment(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // the waiter runs when both have happened
	synctest.Test(t, func(t *testing.T) {
		var s scratch
		one, _ := s.borrow(t.Context(), 0)
		two, _ := s.borrow(t.Context(), 0)
		ctx, cancel := context.WithCancel(t.Context())
		got := make(chan error)
		go func() {
			b, err := s.borrow(ctx, 0)
			if err == nil {
				s.giveBack(b)
			}
			got <- err
		}()
		synctest.Wait()
		cancel()
		s.giveBack(one)
		defer s.giveBack(two)
		if err := <-got; err != nil || s.Lent != BlockSize {
			t.Errorf("%v; %d bytes are lent", err, s.Lent)
		}
	})
}

// No scratch is lost, and no waiter forgotten, while contexts end.
func TestScratchStorm(t *testing.T) {
	seed := testseed.One(t)
	var s scratch
	var wg sync.WaitGroup
	for g := range uint64(8) {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, g))
			for range 300 {
				ctx, cancel := context.WithCancel(t.Context())
				if rng.IntN(3) == 0 {
					go cancel()
				}
				b, err := s.borrow(ctx, 0)
				cancel()
				if err == nil {
					runtime.Gosched()
					s.giveBack(b)
				} else if !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if s.Lent != 0 || s.wanted() {
		t.Errorf("%d bytes are lent; waiters: %t", s.Lent, s.wanted())
	}
}

// Transfers that have scratch wait for chunks, and columns that look strings up need both: none
// holds what the other waits for.
// TestLanesShareScratch: a transfer has a lane for each block that there is, up to as many as its
// permit is for. After each run its lanes give their scratch to those who wait, and only the first
// of them waits for more.
func TestLanesShareScratch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for blocks, want := range map[int64]int64{2: 2, 3 * StagedUnderWay: StagedUnderWay} {
			b := new(Builtin)
			b.Scratch.max = blocks * BlockSize
			var running atomic.Int64
			goOn := make(chan struct{})
			done := make(chan error, 1)
			n := int(want) + 1
			if blocks > want {
				n = 100
			}
			go func() {
				pool := &lanes{b: b, node: -1, blocks: true}
				job := pump.Job[*lane]{Pieces: n, Lanes: StagedUnderWay, Pool: pool, Do: func(context.Context, *lane, int) error {
					running.Add(1)
					<-goOn
					return nil
				}}
				done <- run(t.Context(), job)
			}()
			synctest.Wait()
			if got := running.Load(); got != want {
				t.Errorf("%d blocks: %d lanes, want %d", blocks, got, want)
			}
			if blocks > want {
				close(goOn)
				if err := <-done; err != nil || running.Load() != int64(n) {
					t.Errorf("%d of %d runs: %v", running.Load(), n, err)
				}
				continue
			}
			// Two others wait. They get both blocks when both lanes have ended a run.
			others := make(chan *block, 2)
			for range 2 {
				go func() {
					block, err := b.Scratch.borrow(t.Context(), -1)
					if err != nil {
						t.Error(err)
					}
					others <- block
				}()
				synctest.Wait()
			}
			goOn <- struct{}{}
			goOn <- struct{}{}
			synctest.Wait()
			if len(others) != 2 || running.Load() != want || b.Scratch.waits.Len() != 1 {
				t.Fatalf("%d of 2 waiters have scratch, %d runs have begun, and %d lanes wait",
					len(others), running.Load(), b.Scratch.waits.Len())
			}
			b.Scratch.giveBack(<-others)
			goOn <- struct{}{} // of the last run, for which one block is enough
			if err := <-done; err != nil {
				t.Error(err)
			}
			b.Scratch.giveBack(<-others)
			if b.Scratch.Lent != 0 {
				t.Errorf("%d bytes are lent at the end", b.Scratch.Lent)
			}
		}
	})
}
