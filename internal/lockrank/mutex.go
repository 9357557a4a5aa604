package lockrank

import (
	"fmt"
	"slices"
	"sync"

	"github.com/spillway-db/spillway/internal/invariants"
)

// held maps, in an invariants build, a goroutine that holds ranks to these, in the order taken.
var held sync.Map // uintptr → *[]entry; only its own goroutine touches the slice

type entry struct {
	rank Rank
	mu   any
}

// Mutex is a sync.Mutex with a rank. The zero value is unlocked. An invariants build checks the
// rank at every lock; there the goroutine that locked it must unlock it.
type Mutex[R Rank] struct{ mu sync.Mutex }

// Lock locks m. An invariants build panics if the goroutine holds a mutex of the same or a higher
// rank.
func (m *Mutex[R]) Lock() {
	if invariants.Enabled {
		m.check()
	}
	m.mu.Lock()
	if invariants.Enabled {
		m.add()
	}
}

// TryLock locks m if it is free and reports whether it did. The rank is not checked, because a try
// cannot deadlock; it counts for the locks that follow.
func (m *Mutex[R]) TryLock() bool {
	locked := m.mu.TryLock()
	if invariants.Enabled && locked {
		m.add()
	}
	return locked
}

// Unlock unlocks m.
func (m *Mutex[R]) Unlock() {
	if invariants.Enabled {
		m.remove()
	}
	m.mu.Unlock()
}

// check panics if m may not be locked here.
func (m *Mutex[R]) check() {
	var r R
	for _, e := range *mine() { // not only the last: a TryLock may be out of order
		if e.rank.rank() >= r.rank() {
			panic(Violation(fmt.Sprintf("%T locked while %T is held", r, e.rank)))
		}
	}
}

// add adds m to those that the goroutine holds.
func (m *Mutex[R]) add() {
	var r R
	stack := mine()
	*stack = append(*stack, entry{r, m})
}

// remove takes m from those that the goroutine holds, and panics if it is not among them.
func (m *Mutex[R]) remove() {
	stack := mine()
	for i := len(*stack) - 1; i >= 0; i-- {
		if (*stack)[i].mu == any(m) {
			*stack = slices.Delete(*stack, i, i+1)
			if len(*stack) == 0 {
				held.Delete(living())
			}
			return
		}
	}
	var r R
	panic(Violation(fmt.Sprintf("%T unlocked by a goroutine that does not hold it", r)))
}

// AssertNone panics in an invariants build if the goroutine holds any ranked mutex. Call it where
// something slow begins: I/O, a wait, a callback.
func AssertNone(what string) {
	if !invariants.Enabled {
		return
	}
	s, ok := held.Load(living())
	if !ok {
		return
	}
	if stack := *s.(*[]entry); len(stack) > 0 {
		panic(Violation(fmt.Sprintf("%s while %T is held", what, stack[len(stack)-1].rank)))
	}
}

func mine() *[]entry {
	id := living()
	if s, ok := held.Load(id); ok {
		return s.(*[]entry)
	}
	s := new([]entry)
	held.Store(id, s)
	return s
}
