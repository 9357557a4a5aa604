package guard

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/lockrank"
)

// List is a list of functions of users, such as the subscribers of a quota. Call calls all of them,
// in the order in which they were added; a panic of one is logged, and the others are called. The
// zero value is empty. It is safe for concurrent use, and calls no function with a lock held.
type List[T any] struct {
	Panics Log

	mu  sync.Mutex                 // held to change all, and for nothing else
	all atomic.Pointer[[]*func(T)] // replaced, never changed in place; nil for an empty list
}

// Add adds f. The returned function removes it; a call that has begun may still be running when
// that returns.
func (l *List[T]) Add(f func(T)) (cancel func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := append(slices.Clone(l.functions()), &f)
	l.all.Store(&all)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		left := slices.DeleteFunc(slices.Clone(l.functions()), func(o *func(T)) bool { return o == &f })
		l.all.Store(&left)
	}
}

func (l *List[T]) functions() []*func(T) {
	if all := l.all.Load(); all != nil {
		return *all
	}
	return nil
}

// Len returns the number of functions.
func (l *List[T]) Len() int { return len(l.functions()) }

// Call calls the functions with arg. It takes no lock, and must be called with none held. The log
// of a panic names the functions what.
func (l *List[T]) Call(what string, arg T) {
	all := l.all.Load()
	if all == nil {
		return
	}
	for _, f := range *all {
		lockrank.AssertNone(what)
		l.Panics.Do(what, func() { (*f)(arg) })
	}
}
