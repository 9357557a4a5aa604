// Package fairqueue decides who is served next where goroutines wait for amounts of something
// scarce: first come, first served, with a bounded bypass.
//
// The oldest waiter is the head. While there is too little for it, requests that need less may be
// served before it, whether they wait behind it or have just arrived. Each of them bypasses the
// head, and a head is bypassed at most Bypass times. From then on whatever is freed adds up until
// the head can be served. So small requests keep a resource busy, and a large one is not starved.
//
// A queue does not depend on what is waited for. Its owner checks with a function of its own
// whether a waiter can be served, guards the queue with its own lock, and wakes the waiters.
package fairqueue

import (
	"context"
	"slices"
)

// window is how many waiters from the head on are considered for a bypass. It bounds what a wake-up
// costs, however many wait. Waiters further back are considered as soon as they are nearer.
const window = 256

// A Queue holds waiters of type T, which is a pointer, in order of arrival. The zero value is empty
// and lets no request bypass its head. The owner's lock guards it.
type Queue[T comparable] struct {
	Bypass  int // how many requests may be served before the head
	Waiters []T // the head first; the owner adds waiters at the end

	bypassed int // how many have bypassed the head
}

// Head returns the oldest waiter, nil if nobody waits.
func (q *Queue[T]) Head() (head T) {
	if len(q.Waiters) > 0 {
		head = q.Waiters[0]
	}
	return head
}

// Remove removes a waiter. It does nothing if the waiter is not in the queue. The next head may be
// bypassed as often as the last.
func (q *Queue[T]) Remove(w T) {
	i := slices.Index(q.Waiters, w)
	if i < 0 {
		return
	}
	if i > 0 {
		q.Waiters = slices.Delete(q.Waiters, i, i+1)
		return
	}
	var none T
	q.Waiters[0] = none // for the garbage collector
	q.Waiters, q.bypassed = q.Waiters[1:], 0
}

// Replace replaces all waiters. A head that stays was bypassed as often as before.
func (q *Queue[T]) Replace(waiters []T) {
	before := q.Head()
	if q.Waiters = waiters; q.Head() != before {
		q.bypassed = 0
	}
}

// Next returns the waiter to serve now: the head if fits returns true for it, or else the oldest for
// which fits does, if the head may be bypassed. It returns nil if there is none. The owner serves
// the waiter and then calls Served, or leaves the queue as it is.
func (q *Queue[T]) Next(fits func(T) bool) (next T) {
	for i, w := range q.Waiters {
		if fits(w) {
			return w
		}
		if i+1 == window || q.IsClosed() {
			break
		}
	}
	return next
}

// Served removes a waiter that was served; nil stands for a request that was served without
// waiting. If another waiter is the head, that counts as a bypass.
func (q *Queue[T]) Served(w T) {
	if len(q.Waiters) > 0 { // if w is the head, Remove ends its count
		q.bypassed++
	}
	q.Remove(w)
}

// IsClosed reports whether nobody may bypass the head any more: all that is freed is kept for it.
// A queue without waiters is not closed.
func (q *Queue[T]) IsClosed() bool { return len(q.Waiters) > 0 && q.bypassed >= q.Bypass }

// Ended returns the error of a wait that ctx has ended: what, and the cause. It matches the cause
// and the context's error.
func Ended(ctx context.Context, what string) error {
	return &ended{what, ctx.Err(), context.Cause(ctx)}
}

type ended struct {
	what       string
	err, cause error
}

func (e *ended) Error() string   { return e.what + ": " + e.cause.Error() }
func (e *ended) Unwrap() []error { return []error{e.cause, e.err} }
