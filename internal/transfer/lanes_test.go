package transfer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// blocks is scratch of the heap: so many blocks.
func blocks(n int) scratch { return scratch{lent: make(chan struct{}, n)} }

// fewChunks is Staging of so many chunks, and never lends one twice.
type fewChunks struct {
	t    *testing.T
	idle chan []byte
	mu   sync.Mutex
	lent map[*byte]bool
	most int // lent at the same time
}

func newChunks(t *testing.T, n int) *fewChunks {
	p := &fewChunks{t: t, idle: make(chan []byte, n), lent: make(map[*byte]bool)}
	for range n {
		p.idle <- make([]byte, 8)
	}
	return p
}

func (p *fewChunks) take(c []byte) []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lent[&c[0]] = true
	p.most = max(p.most, len(p.lent))
	return c
}

func (p *fewChunks) Borrow(ctx context.Context, wait bool) ([]byte, error) {
	if !wait {
		select {
		case c := <-p.idle:
			return p.take(c), nil
		default:
			return nil, nil
		}
	}
	select {
	case c := <-p.idle:
		return p.take(c), nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func (p *fewChunks) Return(c []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.lent[&c[0]] {
		p.t.Error("a chunk is returned that was not lent")
	}
	delete(p.lent, &c[0])
	p.idle <- c
}

func (p *fewChunks) Chunk() int64 { return 8 }

// whole checks that nothing is lent.
func (p *fewChunks) whole(b *Builtin) {
	p.t.Helper()
	if len(p.lent) > 0 || b.Scratch.Lent() > 0 {
		p.t.Errorf("%d chunks and %d bytes of blocks are still lent", len(p.lent), b.Scratch.Lent())
	}
}

var errFails = errors.New("it fails")

// watched is a transfer that checks how its functions are called.
type watched struct {
	t               *testing.T
	lanes           *lanes
	pieces, most    int
	nap             func()
	active          atomic.Int64 // calls of do, at the same time
	calls           atomic.Int64
	failAt, panicAt int64 // call; 0 for none
	begun           int
	ended           []atomic.Int64
}

func watch(t *testing.T, w *lanes, pieces, most int, nap func()) *watched {
	return &watched{t: t, lanes: w, pieces: pieces, most: most, nap: nap, ended: make([]atomic.Int64, pieces)}
}

// call is one call of begin or do.
func (w *watched) call() error {
	switch w.calls.Add(1) {
	case w.failAt:
		return errFails
	case w.panicAt:
		panic("it panics")
	}
	return nil
}

func (w *watched) run(ctx context.Context) error {
	return w.lanes.each(ctx, 0, w.pieces, w.most,
		func(l *lane, i int) error {
			w.begun++
			if w.begun != i+1 || w.lanes.blocks == (l.raw == nil) || (w.lanes.chunks != nil) == (l.chunk == nil) {
				w.t.Errorf("piece %d is begun out of turn, or with %+v", i, l)
			}
			return w.call()
		},
		func(_ context.Context, l *lane, i int) error {
			if n := w.active.Add(1); n > int64(w.most) {
				w.t.Errorf("%d pieces are in progress", n)
			}
			defer w.active.Add(-1)
			w.nap()
			err := w.call()
			w.ended[i].Add(1)
			return err
		})
}

// TestEveryCallFailsOnce: whatever fails or panics, each returns that, nothing is in progress, and
// everything is given back. Without a failure all pieces are moved once.
func TestEveryCallFailsOnce(t *testing.T) {
	for _, most := range []int{1, 2, 5} {
		for _, panics := range []bool{false, true} {
			for at := int64(0); ; at++ {
				b, chunks := &Builtin{Scratch: blocks(3)}, newChunks(t, 3)
				w := watch(t, &lanes{b: b, blocks: true, chunks: chunks}, 4, most, func() {})
				if w.failAt = at; panics {
					w.failAt, w.panicAt = 0, at
				}
				err := w.run(t.Context())
				chunks.whole(b)
				if n := w.active.Load(); n != 0 {
					t.Errorf("%d pieces are in progress", n)
				}
				if at > 0 && w.calls.Load() < at { // there are no more calls
					break
				}
				switch {
				case at == 0:
					for i := range w.ended {
						if n := w.ended[i].Load(); n != 1 || err != nil {
							t.Errorf("piece %d was moved %d times: %v", i, n, err)
						}
					}
				case panics && !errors.Is(err, batch.ErrUnmovable), !panics && err != errFails:
					t.Errorf("call %d: %v", at, err)
				}
			}
		}
	}
}

// TestRandomTransfers: transfers that share blocks and chunks end, with all pieces moved or when
// their contexts do, and give everything back.
func TestRandomTransfers(t *testing.T) {
	for seed := range testseed.Each(t, testseed.Rounds(300, 60)) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			b, chunks := &Builtin{Scratch: blocks(1 + rng.IntN(6))}, newChunks(t, 1+rng.IntN(4))
			var all sync.WaitGroup
			for range 1 + rng.IntN(5) {
				needs := &lanes{b: b, node: -1, blocks: rng.IntN(2) == 0}
				if rng.IntN(2) == 0 {
					needs.chunks = chunks
				}
				slow := time.Duration(rng.IntN(20)) * time.Millisecond
				w := watch(t, needs, rng.IntN(30), 1+rng.IntN(6), func() { time.Sleep(slow) })
				gone := errors.New("gone")
				ctx, cancel := context.WithCancelCause(t.Context())
				if rng.IntN(3) == 0 {
					time.AfterFunc(time.Duration(rng.IntN(300))*time.Millisecond, func() { cancel(gone) })
				}
				all.Go(func() {
					defer cancel(nil)
					err := w.run(ctx)
					moved := 0
					for i := range w.ended {
						moved += int(w.ended[i].Load())
					}
					if n := w.active.Load(); n != 0 {
						t.Errorf("%d pieces are in progress", n)
					}
					if err == nil && moved != w.pieces || err != nil && !errors.Is(err, gone) {
						t.Errorf("%d of %d pieces were moved: %v", moved, w.pieces, err)
					}
				})
			}
			all.Wait()
			chunks.whole(b)
		})
		if t.Failed() {
			return
		}
	}
}

// TestLanesOfATransfer: as many lanes work as there is memory for, up to as many as there may be,
// and half of the blocks are left to others.
func TestLanesOfATransfer(t *testing.T) {
	for _, c := range []struct{ blocks, chunks, pieces, want int }{
		{0, 0, 100, 8}, {0, 3, 100, 3}, {0, 20, 100, 8}, {0, 20, 3, 3}, {2, 0, 100, 2}, {1, 0, 100, 1}, {3, 0, 100, 2},
		{8, 0, 100, 5}, {16, 0, 100, 8}, {16, 0, 5, 5}, {16, 2, 100, 2},
	} {
		synctest.Test(t, func(t *testing.T) {
			b, chunks := &Builtin{Scratch: blocks(max(1, c.blocks))}, newChunks(t, c.chunks)
			w := &lanes{b: b, node: -1, blocks: c.blocks > 0}
			if c.chunks > 0 {
				w.chunks = chunks
			}
			goOn, done := make(chan struct{}), make(chan error)
			running := 0
			var mu sync.Mutex
			go func() {
				done <- w.each(t.Context(), 0, c.pieces, 8, nil, func(context.Context, *lane, int) error {
					mu.Lock()
					running++
					mu.Unlock()
					<-goOn
					return nil
				})
			}()
			synctest.Wait()
			if running != c.want || c.chunks > 0 && chunks.most != c.want ||
				c.blocks > 0 && b.Scratch.Lent() != int64(c.want)*BlockSize {
				t.Errorf("%+v: %d lanes work", c, running)
			}
			close(goOn)
			if err := <-done; err != nil || running != c.pieces {
				t.Errorf("%d of %d pieces: %v", running, c.pieces, err)
			}
			chunks.whole(b)
		})
	}
}

// TestOnePieceStartsNoGoroutine, nor does one lane.
func TestOnePieceStartsNoGoroutine(t *testing.T) {
	caller := lockrank.GoroutineID()
	for _, c := range [][2]int{{1, 8}, {5, 1}} {
		err := (&lanes{b: new(Builtin)}).each(t.Context(), 0, c[0], c[1], nil, func(context.Context, *lane, int) error {
			if here := lockrank.GoroutineID(); here != caller {
				t.Errorf("a piece is moved by goroutine %d, not by %d", here, caller)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// TestFailureEndsWhatIsInProgress: the others' context ends with the first error, and that is what
// each returns. No piece is begun after it.
func TestFailureEndsWhatIsInProgress(t *testing.T) {
	var ended atomic.Int64
	err := (&lanes{b: new(Builtin)}).each(t.Context(), 0, 9, 2, nil, func(ctx context.Context, _ *lane, i int) error {
		ended.Add(1)
		if i == 1 {
			return errFails
		}
		<-ctx.Done()
		return errors.New("later")
	})
	if err != errFails || ended.Load() != 2 {
		t.Errorf("%d pieces: %v", ended.Load(), err)
	}
}

// TestNoPieceIsBegunAfterOneThatCouldNotBe, also while earlier ones are moved.
func TestNoPieceIsBegunAfterOneThatCouldNotBe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := 0
		err := (&lanes{b: new(Builtin)}).each(t.Context(), 0, 20, 8,
			func(*lane, int) error {
				if begun++; begun == 2 {
					return errFails
				}
				return nil
			},
			func(context.Context, *lane, int) error { time.Sleep(time.Second); return nil })
		if err != errFails || begun != 2 {
			t.Errorf("%d were begun: %v", begun, err)
		}
	})
}

// TestCancelledTransfer: what is in progress ends, and no other piece is begun. After the last
// piece nothing is left to cancel.
func TestCancelledTransfer(t *testing.T) {
	gone := errors.New("gone")
	for at := range 4 {
		ctx, cancel := context.WithCancelCause(t.Context())
		ended := 0
		if at == 0 {
			cancel(gone)
		}
		err := (&lanes{b: new(Builtin)}).each(ctx, 0, 3, 1, nil, func(context.Context, *lane, int) error {
			if ended++; ended == at {
				cancel(gone)
			}
			return nil
		})
		if at < 3 && err != gone || at == 3 && err != nil || at < 3 && ended != at {
			t.Errorf("cancelled in piece %d: %d ended, %v", at, ended, err)
		}
		cancel(nil)
	}
}

// TestBlocksAreLentInOrder: transfers get their first block in the order in which they came. One
// whose context ends is forgotten, and has no block.
func TestBlocksAreLentInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &lanes{b: &Builtin{Scratch: blocks(1)}, node: -1, blocks: true}
		held, err := w.borrow(t.Context(), true)
		if err != nil {
			t.Fatal(err)
		}
		if extent.Address(held.stored)%tier.Page != 0 || extent.Address(held.raw)%tier.Page != 0 ||
			len(held.stored)+len(held.raw) != BlockSize {
			t.Error("a block is not on pages")
		}
		ours := errors.New("ours")
		ctx, cancel := context.WithCancelCause(t.Context())
		var order []int // one has the block at a time
		for i, ctx := range []context.Context{ctx, t.Context(), t.Context()} {
			go func() {
				l, err := w.borrow(ctx, true)
				if i == 0 && err != ours || i > 0 && err != nil {
					t.Errorf("%d: %v", i, err)
				}
				if err == nil {
					order = append(order, i)
					l.free()
				}
			}()
			synctest.Wait()
		}
		cancel(ours)
		synctest.Wait()
		if l, err := w.borrow(t.Context(), false); l != nil || err != nil {
			t.Errorf("a block is lent that is not free: %v", err)
		}
		held.free()
		synctest.Wait()
		if !slices.Equal(order, []int{1, 2}) || w.b.Scratch.Lent() != 0 {
			t.Errorf("lent in the order %v; %d bytes are still", order, w.b.Scratch.Lent())
		}
	})
}

// TestBlocksStorm: no block is lost while contexts end.
func TestBlocksStorm(t *testing.T) {
	seed := testseed.One(t)
	w := &lanes{b: &Builtin{Scratch: blocks(2)}, node: -1, blocks: true}
	var wg sync.WaitGroup
	for g := range uint64(8) {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, g))
			for range 300 {
				ctx, cancel := context.WithCancel(t.Context())
				if rng.IntN(3) == 0 {
					go cancel()
				}
				l, err := w.borrow(ctx, true)
				cancel()
				if err == nil {
					runtime.Gosched()
					l.free()
				} else if !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if w.b.Scratch.Lent() != 0 {
		t.Errorf("%d bytes are lent", w.b.Scratch.Lent())
	}
}

// TestWhosePanic: a panic of a transfer is the batch's failure. That of a program's file system,
// which comes as an error, is the volume's, and what it says is kept.
func TestWhosePanic(t *testing.T) {
	ofDisk := &guard.PanicError{What: "the file system's ReadAt", Value: syscall.EIO}
	for name, c := range map[string]struct {
		f    func() error
		mine bool
	}{
		"a panic":                  {func() error { panic("boom") }, true},
		"of the file system":       {func() error { return ofDisk }, false},
		"of the file system, told": {func() error { return fmt.Errorf("reading: %w", ofDisk) }, false},
	} {
		do := func(context.Context, *lane, int) error { return c.f() }
		err := (&lanes{b: new(Builtin)}).each(t.Context(), 0, 3, 2, nil, do)
		if errors.Is(err, batch.ErrUnmovable) != c.mine || errors.Is(err, syscall.EIO) == c.mine {
			t.Errorf("%s: %v", name, err)
		}
	}
}
