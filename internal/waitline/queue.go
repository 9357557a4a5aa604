package waitline

import (
	"context"
	"sync"
)

// Queue holds waiters for a V, in the order of arrival; A is what each requests. The owner's lock
// guards it. The zero value is empty.
type Queue[A, V any] struct{ line Line[*Turn[A, V]] }

// Turn is one wait in a Queue.
type Turn[A, V any] struct {
	Ask A

	place Place[*Turn[A, V]]
	over  chan struct{} // closed when got and err are set
	got   V
	err   error
}

// Len returns how many wait.
func (q *Queue[A, V]) Len() int { return q.line.Len() }

// First returns the turn of the oldest waiter, nil if there is none.
func (q *Queue[A, V]) First() *Turn[A, V] {
	if p := q.line.Head(); p != nil {
		return p.Of
	}
	return nil
}

// Join adds a turn at the end. The caller must Wait for it, without the lock.
func (q *Queue[A, V]) Join(ask A) *Turn[A, V] {
	t := &Turn[A, V]{Ask: ask, over: make(chan struct{})}
	t.place.Of = t
	q.line.Push(&t.place, 0)
	return t
}

// HandOver ends the first turn, of which there must be one: with v, or an error. It does not
// wait.
func (q *Queue[A, V]) HandOver(v V, err error) {
	t := q.First()
	q.line.Remove(&t.place)
	t.got, t.err = v, err
	close(t.over)
}

// Wait returns what is handed over at t. If ctx ends before that, it takes t out of the queue and
// returns ctx's cause. It then calls left, unless that is nil, with the lock held, because the next
// waiters may have their turn now. What was handed over at the same moment is returned: the caller
// owns it. mu is the owner's lock, which the caller does not hold.
func (q *Queue[A, V]) Wait(ctx context.Context, mu sync.Locker, t *Turn[A, V], left func()) (V, error) {
	select {
	case <-t.over:
		return t.got, t.err
	case <-ctx.Done():
	}
	mu.Lock()
	defer mu.Unlock()
	if t.place.In() {
		q.line.Remove(&t.place)
		t.err = context.Cause(ctx)
		if left != nil {
			left()
		}
	}
	return t.got, t.err
}
