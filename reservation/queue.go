package reservation

import (
	"math"
	"math/bits"
)

// nothing is the need of an empty place: larger than any room.
const nothing = math.MaxInt64

// queue holds the waiters of one space in the order in which they came, and
// finds the oldest that fits into some room. It is a tournament over an array:
// place i of the queue is leaf size+i, and each inner node is the smaller need
// of its two children. Adding, removing and finding take log₂ of the length, so
// that a wake-up among 100,000 waiters costs 17 steps and not 100,000; a list
// would have to be walked past everybody who does not fit. The zero value is
// empty. Not safe for concurrent use.
type queue struct {
	size int     // places; a power of two, or 0
	next int     // first place never used since the last repack
	live int     // places in use
	sum  total   // of their needs
	need []int64 // the tournament; root at 1
	slot []*slot // by place
}

// push adds s, whose need is set, at the end and sets s.pos.
func (q *queue) push(s *slot) {
	if q.next == q.size {
		q.repack()
	}
	s.pos = q.next
	q.next++
	q.live++
	q.sum.add(s.need)
	q.slot[s.pos] = s
	q.set(s.pos, s.need)
}

// remove takes s out and sets s.pos to -1.
func (q *queue) remove(s *slot) {
	q.slot[s.pos] = nil
	q.set(s.pos, nothing)
	s.pos = -1
	q.live--
	q.sum.sub(s.need)
	if q.live == 0 {
		q.next = 0
		if q.size > 1024 { // a crowd has gone
			*q = queue{}
		}
	}
}

func (q *queue) set(pos int, need int64) {
	i := q.size + pos
	q.need[i] = need
	for i > 1 {
		i /= 2
		m := min(q.need[2*i], q.need[2*i+1])
		if q.need[i] == m {
			return
		}
		q.need[i] = m
	}
}

// least returns the smallest need, or nothing if the queue is empty.
func (q *queue) least() int64 {
	if q.live == 0 {
		return nothing
	}
	return q.need[1]
}

// oldest returns the oldest waiter that needs at most room bytes, or nil.
func (q *queue) oldest(room int64) *slot {
	room = min(room, nothing-1)
	if q.live == 0 || q.need[1] > room {
		return nil
	}
	i := 1
	for i < q.size {
		i *= 2
		if q.need[i] > room {
			i++
		}
	}
	return q.slot[i-q.size]
}

// head returns the oldest waiter, or nil.
func (q *queue) head() *slot { return q.oldest(nothing - 1) }

// repack closes the gaps and leaves at least as many free places as used ones,
// so that it is paid for by as many pushes.
func (q *queue) repack() {
	old := q.slot
	size := 8
	for size < 2*q.live {
		size *= 2
	}
	*q = queue{size: size, need: make([]int64, 2*size), slot: make([]*slot, size), live: q.live, sum: q.sum}
	for i := range q.need {
		q.need[i] = nothing
	}
	for _, s := range old {
		if s == nil {
			continue
		}
		s.pos = q.next
		q.slot[s.pos] = s
		q.need[size+s.pos] = s.need
		q.next++
	}
	for i := size - 1; i > 0; i-- {
		q.need[i] = min(q.need[2*i], q.need[2*i+1])
	}
}

// clear takes everybody out.
func (q *queue) clear() {
	for _, s := range q.slot {
		if s != nil {
			s.pos = -1
		}
	}
	*q = queue{}
}

// total is a sum of any number of sizes: 128 bits, because a crowd may ask for
// more than an int64 holds.
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

// bytes returns the sum, or the largest int64 if it is larger.
func (t total) bytes() int64 {
	if t.hi > 0 || t.lo > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(t.lo)
}
