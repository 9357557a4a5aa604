// Package books counts the bytes of one space of a tier, and what reservations have of them.
//
// Every byte of a space is free or in exactly one of four accounts:
//
//	free ──Promise──▶ reserved ──Draw──▶ live ──Retire──▶ retired ──Reclaim──▶ reserved or free
//	     ◀──Release──          ◀─Undraw─  │
//	free ◀───────Uncache─────── cached ◀──┘ Cache          Revive: reserved to live, out of cached
//
// Reserved bytes are promised to a reservation and in no buffer. Live bytes are in buffers. Retired
// bytes were freed by their owner, but the device may still work on them. Cached bytes are clean
// images: they count as free for reservations, but a promise is made only when they have been
// dropped. So live + retired + reserved + cached never exceed the capacity, and a promise leaves
// them within the limit.
//
// One mutex of rank Space guards a space's books and the promises that are made from it. Nothing is
// called under it. A change that would take an account below zero is a bug and panics, because
// wrong counts would be worse.
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

// Books are the counts of one space. They are safe for concurrent use.
type Books struct {
	capacity int64

	mu       lockrank.Mutex[lockrank.Space]
	marks    Marks
	usage    Usage
	changes  uint64  // of all of this, and of the promises
	promises Promise // the anchor of the list of open promises
}

// New returns empty books of a space of that capacity.
func New(capacity int64, marks Marks) *Books {
	b := &Books{capacity: capacity, marks: marks}
	b.promises.prev, b.promises.next = &b.promises, &b.promises
	return b
}

// Usage returns the counts, all at the same moment.
func (b *Books) Usage() Usage {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.usage
}

// Now returns the counts and the marks, all at the same moment.
func (b *Books) Now() (Usage, Marks) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.usage, b.marks
}

// Marks returns the present marks.
func (b *Books) Marks() Marks {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.marks
}

// SetMarks replaces the marks, unless the limit is 0. Bytes that are in use stay.
func (b *Books) SetMarks(m Marks) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.marks.Limit > 0 {
		b.marks = m
		b.changes++
	}
}

// SetLimit replaces the limit, unless it is 0, and reports whether that changed it.
func (b *Books) SetLimit(n int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.marks.Limit == 0 || b.marks.Limit == n {
		return false
	}
	b.marks.Limit = n
	b.changes++
	return true
}

// ResetPeak makes the present use the peak.
func (b *Books) ResetPeak() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.usage.Peak = b.usage.Used()
}

// Changes returns a number that grows with each change of the books.
func (b *Books) Changes() uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.changes
}

// takeLocked reserves n bytes if that leaves spare bytes free below the limit. Clean images may be
// in the way: then nothing is taken, and drop is how many of their bytes must go first.
func (b *Books) takeLocked(n, spare, limit int64) (ok bool, drop int64) {
	mustNotBeNegative(n)
	used := b.usage.Used()
	if n == 0 {
		return true, 0
	}
	if n > limit-spare-used {
		return false, 0
	}
	if over := used + n + b.usage.Cached - limit; over > 0 {
		return false, over
	}
	b.usage.Reserved += n
	b.usage.Peak = max(b.usage.Peak, used+n)
	b.changes++
	return true, 0
}

// Reserve reserves n bytes if spare more stay free below the limit, and reports whether it did.
// Clean images may be in the way: drop is how many of their bytes the caller must drop before it
// tries again, 0 if that would not help.
func (b *Books) Reserve(n, spare int64) (ok bool, drop int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.takeLocked(n, spare, b.marks.Limit)
}

// Unreserve gives n reserved bytes back that are in no promise.
func (b *Books) Unreserve(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.take(&b.usage.Reserved, n, "reserved")
}

// Retire turns n live bytes into retired ones.
func (b *Books) Retire(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.take(&b.usage.Live, n, "live")
	b.usage.Retired += n
}

// Reclaim frees n retired bytes that were drawn from p, which may be nil. While p is open it takes
// them back, as far as it is not overdrawn. Reclaim returns how many bytes are free now.
func (b *Books) Reclaim(p *Promise, n int64) (freed int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.take(&b.usage.Retired, n, "retired")
	return n - p.creditLocked(n)
}

// Cache turns n live bytes into cached ones. The promises that they were drawn from must be
// released, because open ones would have the bytes back.
func (b *Books) Cache(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.take(&b.usage.Live, n, "live")
	b.usage.Cached += n
}

// Uncache frees n cached bytes.
func (b *Books) Uncache(n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.take(&b.usage.Cached, n, "cached")
}

func (b *Books) take(account *int64, n int64, name string) {
	mustNotBeNegative(n)
	if *account < n {
		panic(fmt.Sprintf("books: taking %d of %d %s bytes", n, *account, name))
	}
	*account -= n
	b.changes++
}

func mustNotBeNegative(n int64) {
	if n < 0 {
		panic(fmt.Sprintf("books: moving %d bytes", n))
	}
}

// A Promise is what one reservation has of a space: promised bytes, some of which are drawn, that
// is in buffers. It is open until it is released. Buffers that were drawn from it keep a pointer to
// it, so that their bytes return to it while it is open. With a soft limit more may be drawn than
// was promised: it is overdrawn then, and bytes that come back make up for that first.
//
// The books' mutex guards it.
type Promise struct {
	books *Books

	promised, drawn int64
	released        bool
	owner           any
	moves           bool
	occupied        bool
	stack           invariants.Trace // where it was made, in an invariants build
	prev, next      *Promise
}

// PromiseView is a promise at one moment.
type PromiseView struct {
	Owner            any  // who holds it; nil if that is unknown
	Moves            bool // it is for data that is being moved, and no program's
	Occupied         bool // it was made by Occupy
	Promised, Unused int64
	Stack            invariants.Trace
}

// Promise reserves n bytes as Reserve does, as a new promise.
func (b *Books) Promise(n, spare int64, owner any, moves bool) (p *Promise, drop int64) {
	p = &Promise{books: b, promised: n, owner: owner, moves: moves, stack: invariants.Stack()}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.openLocked(p, spare, b.marks.Limit)
}

// Occupy is Promise for memory that was in use before the space was made, or that is lent to it: no
// program's, and the limit does not count.
func (b *Books) Occupy(n int64) (p *Promise, drop int64) {
	p = &Promise{books: b, promised: n, moves: true, occupied: true, stack: invariants.Stack()}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.openLocked(p, 0, b.capacity)
}

// Open makes p, a zero promise, one of n bytes that the caller has reserved. moves marks a promise
// for data that is being moved.
func (b *Books) Open(p *Promise, n int64, owner any, moves bool) {
	p.books, p.promised, p.owner, p.moves, p.stack = b, n, owner, moves, invariants.Stack()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.listLocked(p)
	b.changes++
}

// TryOpen reserves n bytes as p, a zero promise, if there is room for them below the limit and no
// clean image is in the way. It reports whether it did, how many bytes are used then, and the
// trigger.
func (b *Books) TryOpen(p *Promise, n int64, owner any, moves bool) (ok bool, used, trigger int64) {
	p.books, p.promised, p.owner, p.moves, p.stack = b, n, owner, moves, invariants.Stack()
	b.mu.Lock()
	defer b.mu.Unlock()
	if ok, _ = b.takeLocked(n, 0, b.marks.Limit); ok {
		b.listLocked(p)
	}
	return ok, b.usage.Used(), b.marks.Trigger
}

func (b *Books) openLocked(p *Promise, spare, limit int64) (*Promise, int64) {
	if ok, drop := b.takeLocked(p.promised, spare, limit); !ok {
		return nil, drop
	}
	b.listLocked(p)
	return p, 0
}

// listLocked adds p to the open promises.
func (b *Books) listLocked(p *Promise) {
	p.prev, p.next = b.promises.prev, &b.promises
	p.prev.next, p.next.prev = p, p
}

// Promises returns all open promises, the oldest first.
func (b *Books) Promises() (all []PromiseView) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for p := b.promises.next; p != &b.promises; p = p.next {
		all = append(all, p.viewLocked())
	}
	return all
}

func (p *Promise) viewLocked() PromiseView {
	return PromiseView{
		Owner: p.owner, Moves: p.moves, Occupied: p.occupied,
		Promised: p.promised, Unused: p.unusedLocked(), Stack: p.stack,
	}
}

// View returns the promise as it is, and whether it is open. A released promise has no bytes.
func (p *Promise) View() (v PromiseView, open bool) {
	p.books.mu.Lock()
	defer p.books.mu.Unlock()
	v = p.viewLocked()
	if p.released {
		v.Promised, v.Unused = 0, 0
	}
	return v, !p.released
}

// SetOwner sets who holds the promise, and reports whether it was open and had no owner.
func (p *Promise) SetOwner(owner any) bool {
	p.books.mu.Lock()
	defer p.books.mu.Unlock()
	if p.released || p.owner != nil {
		return false
	}
	p.owner = owner
	p.books.changes++
	return true
}

// Books returns the books that the promise was made from.
func (p *Promise) Books() *Books { return p.books }

// unusedLocked returns the promised bytes that are in no buffer.
func (p *Promise) unusedLocked() int64 {
	if p.released {
		return 0
	}
	return max(0, p.promised-p.drawn)
}

// creditLocked takes n drawn bytes back, as reserved ones, and returns how many it kept. A nil or
// released promise keeps none.
func (p *Promise) creditLocked(n int64) (kept int64) {
	if p == nil {
		return 0
	}
	before := p.unusedLocked()
	p.drawn -= n
	kept = p.unusedLocked() - before
	p.books.usage.Reserved += kept
	return kept
}

// An Outcome says what became of a change of a promise.
type Outcome struct {
	Released bool  // the promise was released before: nothing has changed
	Short    int64 // so many bytes are missing: nothing has changed
	Freed    int64 // bytes of the space that are free now
}

// Draw turns n unused bytes into live ones. extra bytes, which the caller has reserved, are added:
// to the promise if grow is set, or else to what is drawn beyond it. If that is not enough, nothing
// changes, and Short is what is missing.
func (p *Promise) Draw(n, extra int64, grow bool) Outcome {
	p.books.mu.Lock()
	defer p.books.mu.Unlock()
	return p.drawLocked(n, extra, grow)
}

// Revive is Draw of n bytes onto the memory of a clean image, which is charged as many.
func (p *Promise) Revive(n, extra int64, grow bool) Outcome {
	b := p.books
	b.mu.Lock()
	defer b.mu.Unlock()
	out := p.drawLocked(n, extra, grow)
	if !out.Released && out.Short == 0 {
		b.take(&b.usage.Cached, n, "cached")
	}
	return out
}

func (p *Promise) drawLocked(n, extra int64, grow bool) Outcome {
	mustNotBeNegative(n)
	before := p.unusedLocked()
	switch {
	case p.released:
		return Outcome{Released: true}
	case n > before+extra:
		return Outcome{Short: n - before - extra}
	}
	if grow {
		p.promised += extra
	}
	p.drawn += n
	left := p.unusedLocked()
	p.books.take(&p.books.usage.Reserved, before+extra-left, "reserved")
	p.books.usage.Live += n
	return Outcome{Freed: before + extra - left - n}
}

// Undraw is the reverse of a Draw of n bytes that has grown the promise by grown bytes.
func (p *Promise) Undraw(n, grown int64) Outcome {
	b := p.books
	b.mu.Lock()
	defer b.mu.Unlock()
	b.take(&b.usage.Live, n, "live")
	before := p.unusedLocked()
	p.drawn -= n
	p.promised -= grown // shrinking does not take drawn bytes
	kept := p.unusedLocked() - before
	b.usage.Reserved += kept
	return Outcome{Released: p.released, Freed: n - kept}
}

// Grow adds n bytes to the promise, which the caller has reserved.
func (p *Promise) Grow(n int64) Outcome {
	p.books.mu.Lock()
	defer p.books.mu.Unlock()
	if p.released {
		return Outcome{Released: true}
	}
	before := p.unusedLocked()
	p.promised += n
	freed := n - (p.unusedLocked() - before) // an overdraft was reserved before
	p.books.take(&p.books.usage.Reserved, freed, "reserved")
	return Outcome{Freed: freed}
}

// Shrink gives n unused bytes back. If fewer are unused, nothing changes, and Short is what is
// missing.
func (p *Promise) Shrink(n int64) Outcome {
	p.books.mu.Lock()
	defer p.books.mu.Unlock()
	unused := p.unusedLocked()
	switch {
	case p.released:
		return Outcome{Released: true}
	case n > unused:
		return Outcome{Short: n - unused}
	}
	p.promised -= n
	p.books.take(&p.books.usage.Reserved, n, "reserved")
	return Outcome{Freed: n}
}

// Release gives all unused bytes back, and ends the promise.
func (p *Promise) Release() Outcome {
	b := p.books
	b.mu.Lock()
	defer b.mu.Unlock()
	if p.released {
		return Outcome{Released: true}
	}
	unused := p.unusedLocked()
	b.take(&b.usage.Reserved, unused, "reserved")
	p.released = true
	p.prev.next, p.next.prev = p.next, p.prev
	p.prev, p.next = nil, nil
	return Outcome{Freed: unused}
}

// Left is what Remaining of a tier.Quota returns to the holder of mine of the used bytes, under a
// limit that all holders share. It is the bytes that are left. Below 0 it is the caller's share of
// the excess, rounded so that the shares add up to all of it.
func Left(limit, used, mine int64) int64 {
	if used <= limit || mine <= 0 {
		return max(0, limit-used)
	}
	hi, lo := bits.Mul64(uint64(used-limit), uint64(mine))
	share, rest := bits.Div64(hi, lo, uint64(used)) // hi < used, because used-limit ≤ used and mine < 1<<63
	if rest > 0 {
		share++
	}
	return -min(int64(share), mine)
}
