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
	"container/list"
	"context"
	"iter"
)

// window is how many waiters from the head on are considered for a bypass. It bounds what a wake-up
// costs, however many wait. Waiters further back are considered as soon as they are nearer.
const window = 256

// A Queue holds waiters of type T in order of arrival. The zero value is empty and lets no request
// bypass its head. The owner's lock guards it.
type Queue[T any] struct {
	Bypass int // how many requests may be served before the head

	entries list.List // of *Entry[T]
}

// An Entry is a waiter's place in a queue.
type Entry[T any] struct {
	Value T

	queue    *Queue[T]
	place    *list.Element // nil once it was removed
	bypassed int           // how many have bypassed it while it was the head
}

// Len returns how many wait.
func (q *Queue[T]) Len() int { return q.entries.Len() }

// Head returns the entry of the oldest waiter, nil if nobody waits.
func (q *Queue[T]) Head() *Entry[T] {
	if at := q.entries.Front(); at != nil {
		return at.Value.(*Entry[T])
	}
	return nil
}

// All yields all entries, the oldest first. The loop may remove the entry that it was given.
func (q *Queue[T]) All() iter.Seq[*Entry[T]] {
	return func(yield func(*Entry[T]) bool) {
		for at := q.entries.Front(); at != nil; {
			next := at.Next()
			if !yield(at.Value.(*Entry[T])) {
				return
			}
			at = next
		}
	}
}

// Push adds a waiter at the end.
func (q *Queue[T]) Push(value T) *Entry[T] {
	e := &Entry[T]{Value: value}
	q.Return(e)
	return e
}

// Return adds an entry that was removed at the end. The requests that bypassed it before still count.
func (q *Queue[T]) Return(e *Entry[T]) { e.queue, e.place = q, q.entries.PushBack(e) }

// Remove takes the entry out of its queue. It does nothing if it was removed before, or if e is nil.
func (e *Entry[T]) Remove() {
	if e.Waits() {
		e.queue.entries.Remove(e.place)
		e.place = nil
	}
}

// Waits reports whether the entry is in its queue.
func (e *Entry[T]) Waits() bool { return e != nil && e.place != nil }

// Next returns the entry to serve now: the head if fits returns true for it, or else the oldest for
// which fits does, if the head may be bypassed. It returns nil if there is none. The owner serves
// the entry and then calls Served, or leaves the queue as it is.
func (q *Queue[T]) Next(fits func(T) bool) *Entry[T] {
	n := 0
	for e := range q.All() {
		if fits(e.Value) {
			return e
		}
		if n++; n == window || q.IsClosed() {
			break
		}
	}
	return nil
}

// Served removes an entry whose waiter was served; nil stands for a request that was served without
// waiting. If another entry is the head, that counts as a bypass.
func (q *Queue[T]) Served(e *Entry[T]) {
	if head := q.Head(); head != nil { // if that is e, its count ends here
		head.bypassed++
	}
	e.Remove()
}

// IsClosed reports whether nobody may bypass the head any more: all that is freed is kept for it.
// A queue without waiters is not closed.
func (q *Queue[T]) IsClosed() bool {
	head := q.Head()
	return head != nil && head.bypassed >= q.Bypass
}

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
