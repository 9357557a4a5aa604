// Package notify holds functions that are called when something has happened.
package notify

import (
	"slices"
	"sync"
	"sync/atomic"
)

// List is a list of functions. It is copied when it changes, so that none is called with a lock
// held. The zero value is empty. It is safe for concurrent use.
type List struct {
	all  atomic.Pointer[[]entry]
	mu   sync.Mutex // held to change all, and for nothing else
	next int        // guarded by mu
}

type entry struct {
	id int
	f  func()
}

// Add adds f. The returned function takes it out again; a call that has begun may still be
// running when that returns.
func (l *List) Add(f func()) (cancel func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	id := l.next
	l.next++
	l.store(append(slices.Clone(l.entries()), entry{id, f}))
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.store(slices.DeleteFunc(slices.Clone(l.entries()), func(e entry) bool { return e.id == id }))
	}
}

func (l *List) store(all []entry) { l.all.Store(&all) }

func (l *List) entries() []entry {
	if all := l.all.Load(); all != nil {
		return *all
	}
	return nil
}

// IsEmpty says whether there is nobody to call.
func (l *List) IsEmpty() bool { return len(l.entries()) == 0 }

// Each calls do with each function, in the order in which they were added. do calls it, with
// what guards the caller from its panics.
func (l *List) Each(do func(f func())) {
	for _, e := range l.entries() {
		do(e.f)
	}
}
