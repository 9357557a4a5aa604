package lockrank

import (
	"fmt"
	"sync"

	"github.com/spillway-db/spillway/internal/invariants"
)

// held maps, in an invariants build, a goroutine's number to what it holds. A stack stays for the
// next goroutine of that number, which saves most of the cost of a lock.
var held sync.Map // uintptr → *stack

// stack is the mutexes that a goroutine holds, in the order taken. Only its own goroutine uses it.
// The race detector does not know that one goroutine ends before another gets its number, so it must
// not look at what the methods do.
type stack struct {
	n       int
	entries [16]entry // there are nine ranks, and few calls of TryLock out of their order
}

type entry struct {
	rank Rank
	mu   any
}

// check panics if a mutex of rank r may not be locked here.
//
//go:norace
func (s *stack) check(r Rank) {
	for i := range s.n { // not only the last: a TryLock may be out of order
		if e := &s.entries[i]; e.rank.rank() >= r.rank() {
			panic(Violation(fmt.Sprintf("%T locked while %T is held", r, e.rank)))
		}
	}
}

//go:norace
func (s *stack) add(r Rank, mu any) {
	s.entries[s.n] = entry{r, mu}
	s.n++
}

// remove panics if the goroutine does not hold mu.
//
//go:norace
func (s *stack) remove(r Rank, mu any) {
	for i := s.n - 1; i >= 0; i-- {
		if s.entries[i].mu == mu {
			s.n--
			for ; i < s.n; i++ {
				s.entries[i] = s.entries[i+1]
			}
			s.entries[s.n] = entry{}
			return
		}
	}
	panic(Violation(fmt.Sprintf("%T unlocked by a goroutine that does not hold it", r)))
}

// last returns the rank of the mutex that was locked last, or nil.
//
//go:norace
func (s *stack) last() Rank {
	if s.n == 0 {
		return nil
	}
	return s.entries[s.n-1].rank
}

// Mutex is a sync.Mutex with a rank. The zero value is unlocked. An invariants build checks the
// rank at every lock; there the goroutine that locked it must unlock it.
type Mutex[R Rank] struct{ mu sync.Mutex }

// Lock locks m. An invariants build panics if the goroutine holds a mutex of the same or a higher
// rank.
func (m *Mutex[R]) Lock() {
	if !invariants.Enabled {
		m.mu.Lock()
		return
	}
	var r R
	s := mine()
	s.check(r)
	m.mu.Lock()
	s.add(r, m)
}

// TryLock locks m if it is free and reports whether it did. The rank is not checked, because a try
// cannot deadlock; it counts for the locks that follow.
func (m *Mutex[R]) TryLock() bool {
	locked := m.mu.TryLock()
	if invariants.Enabled && locked {
		var r R
		mine().add(r, m)
	}
	return locked
}

// Unlock unlocks m.
func (m *Mutex[R]) Unlock() {
	if invariants.Enabled {
		var r R
		mine().remove(r, m)
	}
	m.mu.Unlock()
}

// AssertNone panics in an invariants build if the goroutine holds any ranked mutex. Call it where
// something slow begins: I/O, a wait, a callback.
func AssertNone(what string) {
	if !invariants.Enabled {
		return
	}
	if rank := mine().last(); rank != nil {
		panic(Violation(fmt.Sprintf("%s while %T is held", what, rank)))
	}
}

// mine returns the stack of the goroutine that calls it.
func mine() *stack {
	id := living()
	if s, ok := held.Load(id); ok {
		return s.(*stack)
	}
	s := new(stack)
	held.Store(id, s)
	return s
}
