package guard

import (
	"slices"
	"sync"

	"github.com/spillway-db/spillway/internal/lockrank"
)

// List is a list of functions of users, such as the subscribers of a quota. Call calls all of them,
// in the order in which they were added; a panic of one is logged, and the others are called. The
// zero value is empty. It is safe for concurrent use, and calls no function with a lock held.
type List[T any] struct {
	Panics Log

	mu  sync.Mutex // held to read or change all, and for nothing else
	all []*func(T) // replaced, never changed in place
}

// Add adds f. The returned function removes it; a call that has begun may still be running when
// that returns.
func (l *List[T]) Add(f func(T)) (cancel func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(slices.Clone(l.all), &f)
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.all = slices.DeleteFunc(slices.Clone(l.all), func(o *func(T)) bool { return o == &f })
	}
}

// Call calls the functions with arg. It must be called with no lock held. The log of a panic names
// the functions what.
func (l *List[T]) Call(what string, arg T) {
	l.mu.Lock()
	all := l.all
	l.mu.Unlock()
	for _, f := range all {
		lockrank.AssertNone(what)
		l.Panics.Do(what, func() { (*f)(arg) })
	}
}
