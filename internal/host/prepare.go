package host

import (
	"context"
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/tier"
)

// touchAhead makes the pages present, from the low end, where the allocator begins, to the high
// one, some way ahead of what has been used. It works while the memory is used: touching
// changes no byte.
func (a *Arena) touchAhead(stop <-chan struct{}) {
	defer close(a.touchDone)
	for i := range int64(len(a.state)) {
		if !a.window.Wait(i*step, stop) {
			return
		}
		n := a.stepLen(i)
		err := a.space.Touch(a.mem[i*step : i*step+n])
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

// Pin has p pin the whole range, in one piece, so that no memory is partly pinned. All pages become
// present, and Trim gives none back from then on: a device would go on using those that were there.
// The range is unpinned before it is unmapped, or when p is closed. An arena on Go's heap, as a
// build with the race detector has, cannot be pinned: tier.ErrNotSupported.
func (a *Arena) Pin(p tier.Pinner) error {
	if onHeap {
		return fmt.Errorf("host: an arena on Go's heap cannot be pinned: %w", tier.ErrNotSupported)
	}
	a.pages <- struct{}{}
	defer func() { <-a.pages }()
	if closed, _ := a.status(); closed {
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

// status returns whether the arena is closed, and whether its pages must stay because it is pinned.
// The caller that has the token pages may rely on both.
func (a *Arena) status() (closed, pinned bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mu.closed, len(a.mu.pinners) > 0
}

// Lock does what Config.Lock does, for an arena that was to be pinned and is not. It locks as much of
// the range as may be: all of it, else in strides that become shorter where one is refused. It does
// nothing to an arena that is closed.
func (a *Arena) Lock() {
	a.pages <- struct{}{}
	defer func() { <-a.pages }()
	if closed, _ := a.status(); closed {
		return
	}
	var refused error
	size, locked := a.cfg.Capacity, a.locked.Load()
	for n := size - locked; n > 0; n = min(n, size-locked) {
		if refused = a.space.lock(a.mem[locked : locked+n]); refused == nil {
			locked += n
		} else if n = n / 2 / tier.Page * tier.Page; errors.Is(refused, errors.ErrUnsupported) {
			break
		}
	}
	a.locked.Store(locked)
	if locked == size {
		return
	}
	cause := causes.LockLimit
	if errors.Is(refused, errors.ErrUnsupported) {
		cause = causes.System
	}
	a.warn(cause, "%d of %d bytes are locked (%v): the rest may be swapped out, and then waits for the swap device",
		locked, size, refused)
}

// trimStride is how much Trim withholds from allocations at a time: to give back 256 MiB takes some
// 10 ms.
const trimStride = 256 << 20

// Trim gives the pages of free ranges back to the system and returns how many bytes that were at
// most, in whole steps of 2 MiB. It also ends touching ahead, which would bring them back. The ranges
// can be allocated as before; their pages come again at first use. An allocation that needs what Trim
// works on waits for that piece. Of an arena that is pinned it gives nothing back. It ends early,
// with ctx's error, between two pieces of 256 MiB.
func (a *Arena) Trim(ctx context.Context) (given int64, err error) {
	a.endTouching()
	a.pages <- struct{}{}
	defer func() { <-a.pages }()
	if _, pinned := a.status(); pinned {
		return 0, nil
	}
	// The allocator cannot take a given range, so all ranges that can hold a whole step are taken at
	// once and put back one by one. After Close none is taken: the mapping may be gone.
	var withheld []piece
	a.mu.Lock()
	for !a.mu.closed && a.mu.free.Largest() >= min(step, a.cfg.Capacity) {
		n := a.mu.free.Largest()
		off, _ := a.mu.free.Alloc(n)
		a.mu.withheld += n
		for end := off + n; off < end; off += trimStride {
			withheld = append(withheld, piece{At: off, Len: min(end-off, trimStride)})
		}
	}
	a.mu.Unlock()
	for _, p := range withheld {
		if err = context.Cause(ctx); err == nil {
			given += a.discard(p)
		}
		a.mu.Lock()
		a.mu.free.Free(p.At, p.Len)
		a.mu.withheld -= p.Len
		if a.mu.returned != nil {
			close(a.mu.returned)
			a.mu.returned = nil
		}
		a.mu.Unlock()
	}
	return given, err
}

// discard gives back the steps that are wholly in a withheld range, and returns how many of their
// bytes may have been present.
func (a *Arena) discard(p piece) (given int64) {
	first, last := (p.At+step-1)/step, (p.At+p.Len)/step
	if p.At+p.Len == a.cfg.Capacity {
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
