package host

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/tiertest"
)

// trim is Trim where nothing ends it early.
func trim(a *Arena) int64 {
	n, err := a.Trim(context.Background())
	if err != nil {
		panic(err)
	}
	return n
}

// A Trim that is ended gives nothing back, and leaves all of the arena free.
func TestTrimEnds(t *testing.T) {
	const capacity = 4 * step
	a := openFaulty(t, Config{Capacity: capacity, Node: -1}, &faulty{})
	m := alloc(t, a, capacity)
	fill(m, 1)
	free(a, m)
	why := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	if n, err := a.Trim(ctx); n != 0 || !errors.Is(err, why) {
		t.Errorf("Trim gave %d bytes back: %v", n, err)
	}
	if s := a.Stats(); s.Committed != capacity || s.LargestFree != capacity {
		t.Errorf("after a Trim that was ended: %+v", s)
	}
	free(a, alloc(t, a, capacity))
}

func TestTrimGivesFreeStepsBack(t *testing.T) {
	const capacity = 8*step + 5*tier.Page
	var discarded atomic.Int64
	a := openFaulty(t, Config{Capacity: capacity, Node: -1}, &faulty{
		onDiscard: func(b []byte) error { discarded.Add(int64(len(b))); return nil },
	})
	low, mid, high := alloc(t, a, 2*step), alloc(t, a, step+tier.Page), alloc(t, a, 5*step+4*tier.Page)
	for i, m := range []tier.HostMemory{low, mid, high} {
		fill(m, byte(i+1))
	}
	free(a, low, high)
	// high begins one page into step 3, so that step stays; the end does not.
	want := int64(2*step + 4*step + 5*tier.Page)
	if got := trim(a); got != want || discarded.Load() != want {
		t.Errorf("Trim gave %d bytes back, discarded %d, want %d", got, discarded.Load(), want)
	}
	if !holds(mid, 2) {
		t.Error("Trim touched memory in use")
	}
	if s := a.Stats(); s.Committed != capacity-want || s.LargestFree != 5*step+4*tier.Page {
		t.Errorf("after Trim: %+v", s)
	}
	if got := trim(a); got != 0 {
		t.Errorf("a second Trim gave %d bytes back", got)
	}
	again := alloc(t, a, 2*step)
	fill(again, 9)
	if !holds(again, 9) {
		t.Error("trimmed memory does not hold what is written")
	}
	free(a, mid, again)
	if s := a.Stats(); s.Used != 0 || s.LargestFree != capacity {
		t.Errorf("in the end: %+v", s)
	}
}

// present returns how many bytes of whole pages have one, in memory or swapped out. What
// the process has beside them, which comes and goes, does not count.
func present(t *testing.T, pages []byte) (n int64) {
	t.Helper()
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		t.Skip("needs /proc/self/pagemap")
	}
	defer f.Close()
	page := int64(os.Getpagesize())
	entries := make([]byte, int64(len(pages))/page*8)
	if _, err := f.ReadAt(entries, int64(extent.Address(pages))/page*8); err != nil {
		t.Fatal(err)
	}
	for ; len(entries) > 0; entries = entries[8:] {
		if entries[7]&0xc0 != 0 { // the two highest bits: present, swapped
			n += page
		}
	}
	return n
}

func TestPagesComeAndGo(t *testing.T) {
	const capacity = 64 << 20
	a := open(t, Config{Capacity: capacity, Node: -1, Huge: true})
	if onHeap {
		t.Skip("needs an arena that is not from the heap, as it is in this build")
	}
	empty := present(t, a.mem)
	m := alloc(t, a, capacity)
	fill(m, 1)
	full := present(t, a.mem)
	free(a, m)
	trim(a)
	if trimmed := present(t, a.mem); empty != 0 || full != capacity || trimmed != 0 {
		t.Errorf("present: %d bytes when new, %d of %d when written, %d when trimmed", empty, full, capacity, trimmed)
	}
}

func TestFailedTrimIsWarnedOfAndLosesNothing(t *testing.T) {
	a := openFaulty(t, Config{Capacity: 4 * step, Node: -1}, &faulty{
		onDiscard: func([]byte) error { return errors.New("invalid argument") },
	})
	free(a, alloc(t, a, 4*step))
	if n := trim(a); n != 0 {
		t.Errorf("gave %d bytes back", n)
	}
	if s := a.Stats(); s.LargestFree != 4*step || len(s.Warnings) != 1 {
		t.Errorf("%+v", s)
	}
}

// TestAllocWaitsForTrim: what Trim works on is not missing for those who have
// room in the books.
func TestAllocWaitsForTrim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		leave := make(chan struct{})
		a := openFaulty(t, Config{Capacity: 4 * step, Node: -1}, &faulty{
			onDiscard: func([]byte) error { <-leave; return nil },
		})
		free(a, alloc(t, a, 4*step))
		trimmed, got := make(chan int64, 1), make(chan error, 1)
		go func() { trimmed <- trim(a) }()
		synctest.Wait()
		go func() {
			m, err := a.Alloc(4*step, nil)
			if err == nil {
				a.Free(m, func() {})
			}
			got <- err
		}()
		synctest.Wait()
		if len(got) > 0 {
			t.Errorf("Alloc returned %v while Trim has all", <-got)
		}
		close(leave)
		if err := <-got; err != nil {
			t.Errorf("Alloc while Trim works: %v", err)
		}
		if n := <-trimmed; n != 4*step {
			t.Errorf("Trim gave %d bytes back", n)
		}
	})
}

// TestConcurrentTrim lets owners check their bytes while Trim runs again and
// again, and all of it is there in the end.
func TestConcurrentTrim(t *testing.T) {
	seed := testseed.One(t)
	tiertest.NoLeaks(t)
	// The other two hold at most 2 × most, and so cut what is free, 3 × most, into
	// three pieces at most. One of these is as long as most.
	const most = 3 * step
	const capacity = 5 * most
	a := open(t, Config{Capacity: capacity, Node: -1, Touch: true})
	var owners sync.WaitGroup
	for g := range uint64(3) {
		owners.Go(func() {
			r := rand.New(rand.NewPCG(seed, g))
			for i := range 60 {
				size := 1 + r.Int64N(most)
				m, err := a.Alloc(size, nil)
				if err != nil {
					t.Errorf("Alloc(%d): %v", size, err)
					return
				}
				h := m.(tier.HostMemory)
				e := h.Extents()[0]
				mark := byte(g<<6) | byte(i)
				e[0], e[len(e)/2], e[len(e)-1] = mark, mark, mark
				runtime.Gosched()
				if e[0] != mark || e[len(e)/2] != mark || e[len(e)-1] != mark {
					t.Error("bytes in use were changed")
				}
				free(a, h)
			}
		})
	}
	done := make(chan struct{})
	go func() { owners.Wait(); close(done) }()
	for {
		trim(a)
		runtime.Gosched() // or who waits for what Trim had finds that the next one has it
		select {
		case <-done:
			if s := a.Stats(); s.Used != 0 || s.LargestFree != capacity {
				t.Errorf("%+v", s)
			}
			return
		default:
		}
	}
}
