package host

import (
	"context"
	"fmt"

	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/tier"
)

// touchAhead makes the pages present, from the low end, where the allocator begins, to the high
// one, some way ahead of what has been used. It works beside the users of the memory: touching
// changes no byte.
func (a *Arena) touchAhead(stop <-chan struct{}) {
	defer close(a.touchDone)
	for i := range int64(len(a.state)) {
		if !a.window.Wait(i*step, stop) {
			return
		}
		n := a.stepLen(i)
		err := a.space.touch(a.mem[i*step : i*step+n])
		if err != nil && !poison { // poisoned pages refuse to be touched
			a.warn(causes.Touch, "only %d of %d bytes were made present ahead of use (%v): "+
				"the rest is slower when it is used first, or cannot be had", a.touched.Load(), a.cfg.Capacity, err)
			return
		}
		if a.state[i].Or(committed|touched)&committed == 0 {
			a.commit.Add(n)
		}
		a.touched.Add(n)
	}
}

// endTouching ends the toucher and waits for it: for one step at most.
func (a *Arena) endTouching() {
	a.stopTouch()
	<-a.touchDone
}

// Pin has p pin the whole range, in one piece, so that no memory lies across the end of what is
// pinned. All pages become present, and Trim gives none back from then on: a device would go on
// using those that were there. The range is unpinned before it is unmapped, or when p is closed. An
// arena on Go's heap, as a build with the race detector has, cannot be pinned:
// tier.ErrNotSupported.
func (a *Arena) Pin(p tier.Pinner) error {
	if onHeap {
		return fmt.Errorf("host: an arena on Go's heap cannot be pinned: %w", tier.ErrNotSupported)
	}
	a.pages <- struct{}{}
	defer func() { <-a.pages }()
	if a.isClosed() {
		return tier.ErrClosed
	}
	if err := p.Pin(a.mem); err != nil {
		return err
	}
	a.mark(0, a.cfg.Capacity)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.pinners = append(a.mu.pinners, p)
	return nil
}

// Lock does what Config.Lock does, for an arena that was to be pinned and is not. It does nothing
// to one that is closed.
func (a *Arena) Lock() {
	a.pages <- struct{}{}
	defer func() { <-a.pages }()
	if !a.isClosed() {
		a.lock()
	}
}

func (a *Arena) isClosed() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.closed
}

// pinned reports whether the pages must stay.
func (a *Arena) pinned() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.mu.pinners) > 0
}

// trimStride is how much Trim withholds from allocations at a time: to give back
// 256 MiB takes some 10 ms.
const trimStride = 256 << 20

// Trim gives the pages of free ranges back to the system and returns how many
// bytes that were at most, in whole steps of 2 MiB. It also ends touching ahead,
// which would bring them back. The ranges can be allocated as before; their pages
// come again at first use. An allocation that needs what Trim works on waits for
// that piece. Of an arena that is pinned it gives nothing back. It ends early, with ctx's error,
// between two pieces of 256 MiB.
func (a *Arena) Trim(ctx context.Context) (given int64, err error) {
	a.endTouching()
	a.pages <- struct{}{}
	defer func() { <-a.pages }()
	if a.pinned() {
		return 0, nil
	}

	// The allocator cannot take a given range, so all ranges of a step
	// or more are taken at once and put back one by one.
	for _, r := range a.withhold() {
		for off := r.off; off < r.end; {
			end := min(r.end, off+trimStride)
			if err = context.Cause(ctx); err == nil {
				given += a.discard(off, end)
			}
			a.replace(off, end-off)
			off = end
		}
	}
	return given, err
}

type span struct{ off, end int64 }

// withhold takes all free ranges that can hold a whole step. After Close it
// takes none: the mapping may be gone.
func (a *Arena) withhold() []span {
	a.mu.Lock()
	defer a.mu.Unlock()
	var held []span
	a.mu.slabs.flush(a.mu.free.Free)
	for !a.mu.closed {
		n := a.mu.free.Largest()
		if n < min(step, a.cfg.Capacity) {
			break
		}
		off, _ := a.mu.free.Alloc(n)
		a.mu.withheld += n
		held = append(held, span{off, off + n})
	}
	return held
}

// replace puts a withheld range back and wakes its waiters.
func (a *Arena) replace(off, n int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.free.Free(off, n)
	a.mu.withheld -= n
	if a.mu.returned != nil {
		close(a.mu.returned)
		a.mu.returned = nil
	}
}

// discard gives back the steps that are wholly in a withheld range, and returns how many of their
// bytes may have been present.
func (a *Arena) discard(off, end int64) (given int64) {
	first, last := (off+step-1)/step, end/step
	if end == a.cfg.Capacity {
		last = int64(len(a.state))
	}
	if first >= last {
		return 0
	}
	lo, hi := first*step, min(last*step, a.cfg.Capacity)
	if err := a.space.discard(a.mem[lo:hi]); err != nil {
		a.warn(causes.GiveBack, "%d free bytes could not be given back to the system (%v): "+
			"the process stays as large as it was", hi-lo, err)
		return 0
	}
	for i := first; i < last; i++ {
		n, state := a.stepLen(i), a.state[i].Swap(0)
		if state&committed != 0 {
			given += n
		}
		if state&touched != 0 {
			a.touched.Add(-n)
		}
	}
	a.commit.Add(-given)
	return given
}
