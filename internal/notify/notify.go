// Package notify holds functions that are called when something has happened.
package notify

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
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

// IsEmpty reports whether there is nothing to call.
func (l *List) IsEmpty() bool { return len(l.entries()) == 0 }

// Each calls do with each function, in the order in which they were added. do calls it, with
// what guards the caller from its panics.
func (l *List) Each(do func(f func())) {
	for _, e := range l.entries() {
		do(e.f)
	}
}

// Guarded is a List whose functions may panic: that is logged, and keeps no other from being
// called. The zero value is empty.
type Guarded struct {
	List
	Panics guard.Log
}

// Notify calls the functions. It must be called with no lock held; what they are is for the log.
func (g *Guarded) Notify(what string) {
	if g.IsEmpty() {
		return
	}
	lockrank.AssertNone(what)
	g.Each(func(f func()) { g.Panics.Do(what, f) })
}
