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
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// Scratch is lent in the order in which it was asked for; who needs little does not pass who
// needs much, and who gives up waiting is forgotten.
func TestScratchIsLentInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s scratch
		one, err := s.borrow(t.Context(), 0, BlockSize)
		if err != nil {
			t.Fatal(err)
		}
		two, ok := s.tryBorrow(0, BlockSize)
		if !ok {
			t.Fatal("there is no scratch for a second lane")
		}
		if &one.p[0] == &two.p[0] || address.Of(one.p)%tier.Page != 0 || int64(len(one.p)) != BlockSize {
			t.Error("the blocks are one, or not on pages")
		}
		ours := errors.New("ours")
		ctx, cancel := context.WithCancelCause(t.Context())
		var order []string
		var mu sync.Mutex
		ask := func(ctx context.Context, name string, n int64, want error) {
			go func() {
				b, err := s.borrow(ctx, 0, n)
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
				b.back()
			}()
			synctest.Wait()
		}
		ask(ctx, "large and gives up", layingSize, ours)
		ask(t.Context(), "large", layingSize, nil)
		ask(t.Context(), "small", BlockSize, nil)
		if !s.wanted() {
			t.Error("nobody is said to wait")
		}
		one.back()
		synctest.Wait()
		if _, ok := s.tryBorrow(0, BlockSize); ok || len(order) > 0 {
			t.Errorf("those who wait were passed: %v", order)
		}
		cancel(ours)
		synctest.Wait()
		two.back()
		time.Sleep(time.Minute)
		synctest.Wait()
		if len(order) != 2 || order[0] != "large" || order[1] != "small" || s.Lent != 0 || s.wanted() {
			t.Errorf("lent in the order %v; %d bytes are still", order, s.Lent)
		}
	})
}

// A waiter in front that gives up lets those behind it go on, who need less.
func TestScratchAfterOneGaveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s scratch
		one, _ := s.borrow(t.Context(), 0, BlockSize)
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			if _, err := s.borrow(ctx, 0, layingSize); err == nil {
				t.Error("there was scratch for it")
			}
		}()
		synctest.Wait()
		got := false
		go func() {
			b, err := s.borrow(t.Context(), 0, BlockSize)
			if err == nil {
				got = true
				b.back()
			}
		}()
		synctest.Wait()
		cancel()
		synctest.Wait()
		if !got {
			t.Error("it waits although there is scratch")
		}
		one.back()
		if s.Lent != 0 {
			t.Errorf("%d bytes are lent", s.Lent)
		}
	})
}

// A waiter whose context ends at the moment in which it is served has the scratch.
func TestScratchServesAtTheSameMoment(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // the waiter runs when both have happened
	synctest.Test(t, func(t *testing.T) {
		var s scratch
		one, _ := s.borrow(t.Context(), 0, layingSize)
		ctx, cancel := context.WithCancel(t.Context())
		got := make(chan error)
		go func() {
			b, err := s.borrow(ctx, 0, layingSize)
			if err == nil {
				b.back()
			}
			got <- err
		}()
		synctest.Wait()
		cancel()
		one.back()
		if err := <-got; err != nil || s.Lent != 0 {
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
				b, err := s.borrow(ctx, 0, []int64{BlockSize, layingSize}[rng.IntN(2)])
				cancel()
				if err == nil {
					runtime.Gosched()
					b.back()
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
			b := &Builtin{Staging: func(int) (Staging, error) { return nil, nil }}
			b.Scratch.most = blocks * BlockSize
			var running atomic.Int64
			goOn := make(chan struct{})
			done := make(chan error, 1)
			n := int(want) + 1
			if blocks > want {
				n = 100
			}
			go func() {
				done <- b.inLanes(t.Context(), -1, n, func(context.Context, *lane, int) error {
					running.Add(1)
					<-goOn
					return nil
				})
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
					block, err := b.Scratch.borrow(t.Context(), -1, BlockSize)
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
			(<-others).back()
			goOn <- struct{}{} // of the last run, for which one block is enough
			if err := <-done; err != nil {
				t.Error(err)
			}
			(<-others).back()
			if b.Scratch.Lent != 0 {
				t.Errorf("%d bytes are lent at the end", b.Scratch.Lent)
			}
		}
	})
}
