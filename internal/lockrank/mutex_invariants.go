//go:build invariants

package lockrank

import (
	"fmt"
	"sync"

	"github.com/spillway-db/spillway/internal/goid"
)

// held maps a goroutine that holds ranks to these, in the order taken.
var held sync.Map // uintptr → *[]entry; only its own goroutine touches the slice

type entry struct {
	rank int
	name string
	mu   any
}

// Mutex is a sync.Mutex with a rank that is checked at every lock. The zero
// value is unlocked. It must be unlocked by the goroutine that locked it.
type Mutex[R Rank] struct{ mu sync.Mutex }

// Lock locks m, and panics if the goroutine holds a mutex of the same or a
// higher rank.
func (m *Mutex[R]) Lock() {
	var r R
	stack := mine()
	for _, e := range *stack { // not only the last: a TryLock may be out of order
		if e.rank >= r.rank() {
			panic(Violation(fmt.Sprintf("%s locked while %s is held", r.name(), e.name)))
		}
	}
	m.mu.Lock()
	*stack = append(*stack, entry{r.rank(), r.name(), m})
}

// TryLock locks m if it is free and says whether it did. The rank is not
// checked, for a try cannot deadlock; it counts for the locks that follow.
func (m *Mutex[R]) TryLock() bool {
	if !m.mu.TryLock() {
		return false
	}
	var r R
	stack := mine()
	*stack = append(*stack, entry{r.rank(), r.name(), m})
	return true
}

// Unlock unlocks m.
func (m *Mutex[R]) Unlock() {
	stack := mine()
	for i := len(*stack) - 1; i >= 0; i-- {
		if (*stack)[i].mu == any(m) {
			*stack = append((*stack)[:i], (*stack)[i+1:]...)
			if len(*stack) == 0 {
				held.Delete(goid.Living())
			}
			m.mu.Unlock()
			return
		}
	}
	var r R
	panic(Violation(r.name() + " unlocked by a goroutine that does not hold it"))
}

// AssertNone panics if the goroutine holds any ranked mutex. Call it where
// something slow begins: I/O, a wait, a callback.
func AssertNone(what string) {
	s, ok := held.Load(goid.Living())
	if !ok {
		return
	}
	if stack := *s.(*[]entry); len(stack) > 0 {
		panic(Violation(fmt.Sprintf("%s while %s is held", what, stack[len(stack)-1].name)))
	}
}

func mine() *[]entry {
	id := goid.Living()
	if s, ok := held.Load(id); ok {
		return s.(*[]entry)
	}
	s := new([]entry)
	held.Store(id, s)
	return s
}
