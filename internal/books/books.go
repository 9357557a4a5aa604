// Package books counts the bytes of one space of a tier: what reservations have of them, and what
// handles and records keep.
//
// Every byte of a space is free or in exactly one of four accounts:
//
//	free --Reserve--> reserved --Draw--> live --Retire--> retired --Reclaim--> reserved or free
//	     <--Release--          <-Undraw-  |
//	free <-------Uncache------- cached <--+ Cache
//
// Reserved bytes are promised to a reservation and in no buffer. Live bytes are in buffers. Retired
// bytes were freed by their owner, but the device may still work on them. Cached bytes are clean
// images: they count as free for reservations, but bytes are reserved only when they have been
// dropped. So live + retired + reserved + cached never exceed the capacity, and a reservation leaves
// them within the limit.
//
// One mutex of rank Space guards all of a space's books. Nothing is called under it. A change that
// would take an account below zero is a bug and panics, because wrong counts would be worse.
package books

import (
	"fmt"
	"math/bits"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
)

// Usage is the counts of a space at one moment, in bytes.
type Usage struct {
	Live     int64 // in buffers that are in use
	Retired  int64 // freed, but the device may still be working on them
	Reserved int64 // promised and not yet drawn
	Cached   int64 // in clean images, which are dropped when the room is needed; not part of Used
	Peak     int64 // largest Used since the start or the last ResetPeak
}

// Used is live + retired + reserved.
func (u Usage) Used() int64 { return u.Live + u.Retired + u.Reserved }

// Marks are the limits of a space in bytes.
type Marks struct {
	Limit   int64 // the most that reservations may take; 0 is final, for a space that is lost
	Trigger int64 // pressure at which the monitor begins to evict
	Stop    int64 // pressure at which it ends at the latest
}

// State is the counts and the marks of a space at one moment.
type State struct {
	Usage
	Marks
	// Progress grows with each change that may lead to room for a waiter, and is the same after a
	// move to the space that has failed.
	Progress uint64
	// CleanChanges grows with each change of Cached.
	CleanChanges uint64
}

// Books are the counts of one space. They are safe for concurrent use.
type Books struct {
	capacity int64

	mu  lockrank.Mutex[lockrank.Space]
	now State

	// The bytes of open promises by owner. Those without an owner, which are most, need no look-up:
	// moving are those for moves. An invariants build has them all in owned, with their stacks.
	promised, moving int64
	owned            map[By]int64

	holds map[*Hold]struct{} // that are open
}

// New returns empty books of a space of that capacity.
func New(capacity int64, marks Marks) *Books {
	b := &Books{capacity: capacity, owned: make(map[By]int64), holds: make(map[*Hold]struct{})}
	b.now.Marks = marks
	return b
}

// Now returns the counts and the marks, all at the same moment.
func (b *Books) Now() State {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.now
}

// SetMarks replaces the limit, and the other marks where they are not 0; but not those of a lost
// space, whose limit is 0. Bytes that are in use stay.
func (b *Books) SetMarks(m Marks) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.now.Limit == 0 {
		return
	}
	if m.Trigger == 0 {
		m.Trigger, m.Stop = b.now.Trigger, b.now.Stop
	}
	b.now.Marks = m
	b.now.Progress++
}

// ResetPeak makes the present use the peak.
func (b *Books) ResetPeak() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now.Peak = b.now.Used()
}

// Reserve reserves n bytes if spare more stay free below the limit, and reports whether it did, and
// the books as they are then. A spare below 0 allows as much above the limit, up to the capacity.
// Clean images may be in the way: drop is how many of their bytes the caller must drop before it tries
// again, 0 if that would not help. The bytes are those of p, a zero promise but for its By, which
// Reserve opens. If p is nil, they are in no promise.
func (b *Books) Reserve(p *Promise, n, spare int64) (ok bool, drop int64, now State) {
	if n < 0 {
		panic(fmt.Sprintf("books: reserving %d bytes", n))
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	used := b.now.Used()
	limit := min(b.capacity, b.now.Limit-min(0, spare))
	switch over := used + n + b.now.Cached - limit; {
	case n == 0:
	case n > limit-max(0, spare)-used:
		return false, 0, b.now
	case over > 0:
		return false, over, b.now
	}
	b.now.Reserved += n
	b.now.Peak = max(b.now.Peak, used+n)
	if p != nil {
		p.books, p.promised, p.Stack = b, n, invariants.Stack()
		b.addLocked(p.By, n)
	}
	return true, 0, b.now
}

// Unreserve frees n reserved bytes that are in no promise.
func (b *Books) Unreserve(n int64) { b.move(n, &b.now.Reserved, nil) }

// Retire turns n live bytes into retired ones.
func (b *Books) Retire(n int64) { b.move(n, &b.now.Live, &b.now.Retired) }

// Cache turns n live bytes into cached ones. The promises that they were drawn from must be
// released, because open ones would have the bytes back.
func (b *Books) Cache(n int64) { b.move(n, &b.now.Live, &b.now.Cached) }

// Uncache frees n cached bytes.
func (b *Books) Uncache(n int64) { b.move(n, &b.now.Cached, nil) }

// move moves n bytes between accounts. If to is nil, they are free.
func (b *Books) move(n int64, from, to *int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n < 0 || n > *from {
		panic(fmt.Sprintf("books: taking %d of %d bytes: %+v", n, *from, b.now.Usage))
	}
	*from -= n
	if to != nil {
		*to += n
	}
	if from == &b.now.Cached || to == &b.now.Cached {
		b.now.CleanChanges++
	}
	if to != &b.now.Retired {
		b.now.Progress++
	}
}

// Left is what Remaining of a tier.Quota returns to the holder of mine of the used bytes, under a
// limit that all holders share. It is the bytes that are left. Below 0 it is the caller's share of
// the excess, rounded so that the shares add up to all of it.
func Left(limit, used, mine int64) int64 {
	if used <= limit || mine <= 0 {
		return max(0, limit-used)
	}
	hi, lo := bits.Mul64(uint64(limit), uint64(mine))
	// limit < used. The share is rounded down, so that all together keep at most the limit.
	keeps, _ := bits.Div64(hi, lo, uint64(used))
	return int64(keeps) - mine
}
