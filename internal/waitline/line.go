// Package waitline has the lines in which goroutines wait for scarce resources. They are first
// come, first served, with a bounded bypass.
//
//	Line   for resources that are asked for in amounts: who needs less may pass who needs more
//	Queue  for things that are handed over one by one: nobody passes
//
// Neither knows the resource. The owner of a line serves the waiters, under a lock of its own; the
// line finds the one to serve.
package waitline

import (
	"context"
	"math"
	"math/bits"
	"sync/atomic"
)

// Nothing is the need of an empty place: larger than any room.
const Nothing = math.MaxInt64

// Line holds the waiters for some of a resource, in the order of arrival, and finds the oldest that
// fits into some room.
//
// The oldest waiter is the head. While it does not fit, others that do may be served before it, but
// only Bypass of them. Each takes a pass from the door. When none is left the door is shut: what is
// freed from then on adds up until the head fits. A new head brings new passes.
//
// It is a tournament over an array: place i of the line is leaf size+i, and each inner node is
// the smaller need of its two children. Adding, removing and finding take log₂ of the length, so
// that a wake-up among 100,000 waiters costs 17 steps and not 100,000. The zero value is empty.
// The owner's lock guards it, except for what says that it takes none.
type Line[W any] struct {
	Bypass uint32 // set before the first wait

	door
	head     atomic.Pointer[Place[W]]
	headNeed atomic.Int64
	least    atomic.Int64 // smallest need; 0 before the first wait
	heads    uint32       // number of the last head

	size  int         // places; a power of two, or 0
	next  int         // first place never used since the last repack
	live  int         // places in use
	sum   total       // of their needs
	need  []int64     // the tournament; root at 1
	place []*Place[W] // by position
}

// Place is a waiter's place in one line. The zero value is in none.
type Place[W any] struct {
	Of   W // whose it is; set before Push, because it is read without the lock
	need int64
	at   int // 1 + the position in the line; 0 if it is in none
}

// In reports whether the place is in a line.
func (p *Place[W]) In() bool { return p.at > 0 }

// Need returns what its waiter needs.
func (p *Place[W]) Need() int64 { return p.need }

// Len returns how many wait.
func (l *Line[W]) Len() int { return l.live }

// Sum returns what all need together, or the largest int64 if that is more.
func (l *Line[W]) Sum() int64 { return l.sum.amount() }

// Least returns the smallest need, Nothing if the line is empty. It takes no lock.
func (l *Line[W]) Least() int64 {
	if l.Door().Open() {
		return Nothing
	}
	return l.least.Load()
}

// Head returns the oldest waiter's place, nil if the line is empty. It takes no lock.
func (l *Line[W]) Head() *Place[W] { return l.head.Load() }

// HeadNeed returns what the head needs, or needed last. It takes no lock.
func (l *Line[W]) HeadNeed() int64 { return l.headNeed.Load() }

// Oldest returns the oldest waiter's place that needs at most room, or nil.
func (l *Line[W]) Oldest(room int64) *Place[W] {
	room = min(room, Nothing-1)
	if l.live == 0 || l.need[1] > room {
		return nil
	}
	i := 1
	for i < l.size {
		i *= 2
		if l.need[i] > room {
			i++
		}
	}
	return l.place[i-l.size]
}

// Next returns the place behind p, which is in the line, or nil.
func (l *Line[W]) Next(p *Place[W]) *Place[W] {
	for i := l.size + p.at - 1; i > 1; i /= 2 {
		if i%2 == 1 || l.need[i+1] == Nothing {
			continue // no waiter is behind it in this part of the tree
		}
		for i++; i < l.size; {
			if i *= 2; l.need[i] == Nothing {
				i++
			}
		}
		return l.place[i-l.size]
	}
	return nil
}

// Push adds p, which is in no line, at the end. need is below Nothing.
func (l *Line[W]) Push(p *Place[W], need int64) {
	l.push(p, need)
	l.update()
}

func (l *Line[W]) push(p *Place[W], need int64) {
	if l.next == l.size {
		l.repack()
	}
	p.need = need
	l.place[l.next] = p
	l.set(l.next, need)
	l.next++
	p.at = l.next
	l.live++
	l.sum.add(need)
}

// Remove takes p out, which is in the line.
func (l *Line[W]) Remove(p *Place[W]) {
	l.place[p.at-1] = nil
	l.set(p.at-1, Nothing)
	p.at = 0
	l.live--
	l.sum.sub(p.need)
	if l.live == 0 {
		l.next = 0
		if l.size > 1024 { // a crowd has gone
			l.empty()
		}
	}
	l.update()
}

// Refill removes all waiters and has fill push those that are to be in the line, in order. A head
// that stays the head keeps its door as it is.
func (l *Line[W]) Refill(fill func(push func(p *Place[W], need int64))) {
	for _, p := range l.place {
		if p != nil {
			p.at = 0
		}
	}
	l.empty()
	fill(l.push)
	l.update()
}

func (l *Line[W]) empty() {
	l.size, l.next, l.live, l.sum, l.need, l.place = 0, 0, 0, total{}, nil, nil
}

func (l *Line[W]) set(pos int, need int64) {
	i := l.size + pos
	l.need[i] = need
	for i > 1 {
		i /= 2
		m := min(l.need[2*i], l.need[2*i+1])
		if l.need[i] == m {
			return
		}
		l.need[i] = m
	}
}

// repack closes the gaps and leaves at least as many free places as used ones, so that it is
// paid for by as many pushes.
func (l *Line[W]) repack() {
	old := l.place
	size := 8
	for size < 2*l.live {
		size *= 2
	}
	l.size, l.next, l.need, l.place = size, 0, make([]int64, 2*size), make([]*Place[W], size)
	for i := range l.need {
		l.need[i] = Nothing
	}
	for _, p := range old {
		if p == nil {
			continue
		}
		l.place[l.next] = p
		l.need[size+l.next] = p.need
		l.next++
		p.at = l.next
	}
	for i := size - 1; i > 0; i-- {
		l.need[i] = min(l.need[2*i], l.need[2*i+1])
	}
}

// update makes what is read without the lock agree with the line, after each change.
func (l *Line[W]) update() {
	head := l.Oldest(Nothing)
	if head == nil {
		l.head.Store(nil)
		l.state.Store(0)
		return
	}
	l.least.Store(l.need[1])
	l.headNeed.Store(head.need)
	if head == l.head.Load() {
		return
	}
	l.head.Store(head)
	if l.heads++; l.heads == 0 { // the number of an open door
		l.heads = 1
	}
	l.state.Store(uint64(l.heads)<<32 | uint64(l.Bypass))
}

// total is a sum of any number of needs: 128 bits, because a crowd may ask for more than an int64
// holds.
type total struct{ hi, lo uint64 }

func (t *total) add(n int64) {
	var carry uint64
	t.lo, carry = bits.Add64(t.lo, uint64(n), 0)
	t.hi += carry
}

func (t *total) sub(n int64) {
	var borrow uint64
	t.lo, borrow = bits.Sub64(t.lo, uint64(n), 0)
	t.hi -= borrow
}

// amount returns the sum, or the largest int64 if it is larger.
func (t total) amount() int64 {
	if t.hi > 0 || t.lo > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(t.lo)
}

// door lets requests pass that do not wait, or not as long as the head of a line, up to a bound.
// Its state is 0 while the line is empty. Otherwise the upper half is the head's number, and the
// lower half the passes that are left. It is atomic, so that passing takes no lock.
type door struct{ state atomic.Uint64 }

// Door is a door's state at one moment.
type Door uint64

// Open reports that the line is empty.
func (d Door) Open() bool { return d == 0 }

// Shut says that no passes are left: what there is, is the head's.
func (d Door) Shut() bool { return d != 0 && d.Passes() == 0 }

// Passes returns how many may pass the head still; 0 if there is no head.
func (d Door) Passes() uint32 { return uint32(d) }

// Door returns the state of the line's door. It takes no lock.
func (l *door) Door() Door { return Door(l.state.Load()) }

// Pass takes a pass from a door that is neither open nor shut. It returns false if the state is
// not d any more. It takes no lock.
func (l *door) Pass(d Door) bool { return l.state.CompareAndSwap(uint64(d), uint64(d-1)) }

// GiveBack gives back a pass, unused, that was taken from d; none of an open door. It returns
// true if the door was shut meanwhile: to a waiter that could have been served. It takes no lock.
func (l *door) GiveBack(d Door) bool {
	for {
		now := l.Door()
		if d.Open() || now>>32 != d>>32 {
			return false // another head has passes of its own
		}
		if l.state.CompareAndSwap(uint64(now), uint64(now+1)) {
			return now.Shut()
		}
	}
}

// Ended returns the error of a wait that ctx has ended: what, and the cause. It matches the
// cause and the context's error.
func Ended(ctx context.Context, what string) error {
	return &ended{what, ctx.Err(), context.Cause(ctx)}
}

type ended struct {
	what       string
	err, cause error
}

func (e *ended) Error() string   { return e.what + ": " + e.cause.Error() }
func (e *ended) Unwrap() []error { return []error{e.cause, e.err} }
