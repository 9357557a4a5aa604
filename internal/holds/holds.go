// Package holds keeps a space's account of what keeps its memory: open handles, and open records.
//
//	batch, convert ── Hold.Begin, End ──▶ List of a tier.Space ── Append ──▶ View, for those who wait or ask
//
// A List has a mutex of the rank Space. Nothing is called under it.
package holds

import (
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
)

// What a View's Kind may be.
const (
	Handle = "handle" // an open handle on a batch
	Record = "record" // an open record, whose arrays lie in the memory
)

// Hold is an entry in a space's account of what keeps its memory: an open handle or an open record.
// While it is entered, the memory can neither be freed nor moved. The zero value is ready for
// Begin, and must not be copied. It is safe for concurrent use.
//
// Entering costs one lock of the list and allocates nothing. The account is read only for waiters
// and on request: List.Append.
type Hold struct {
	view View
	list *List

	// Guarded by the list's lock.
	next, prev *Hold
	entered    bool
}

// View is what one Hold says.
type View struct {
	Kind string // Handle or Record
	// Memory is what is kept. Holds with the same Memory keep the same bytes. It is a
	// *tier.Buffer, or something with a method Buffers() []*tier.Buffer. If it has
	// EachShared(func(*tier.Buffer)), the buffers that this calls its function with are kept, too,
	// as dictionaries are.
	Memory any
	Bytes  int64 // charged for the memory, without what is shared
	Owner  any   // the task that holds it, a *reservation.Owner; nil if that is unknown
	// About is what the memory belongs to; may be nil. If it has Describe(*tier.Holding), this
	// fills in what it knows. It is called with no lock held.
	About any
	Stack invariants.Trace
}

// List is the account of one space. The zero value is empty.
type List struct {
	changes atomic.Uint64 // holds that began or ended

	mu struct {
		lockrank.Mutex[lockrank.Space]
		first *Hold
	}
}

// Append appends a view of each open hold to dst and returns it. The order is not defined.
func (l *List) Append(dst []View) []View {
	l.mu.Lock()
	defer l.mu.Unlock()
	for h := l.mu.first; h != nil; h = h.next {
		dst = append(dst, h.view)
	}
	return dst
}

// Changes rises whenever a hold begins or ends.
func (l *List) Changes() uint64 { return l.changes.Load() }

// Begin enters h into the account. It must be called once.
func (h *Hold) Begin(l *List, v View) {
	v.Stack = invariants.Stack()
	h.view, h.list = v, l
	l.mu.Lock()
	defer l.mu.Unlock()
	h.entered = true
	h.next = l.mu.first
	if h.next != nil {
		h.next.prev = h
	}
	l.mu.first = h
	l.changes.Add(1)
}

// SetOwner says whose the hold is. It may be called while the hold is entered.
func (h *Hold) SetOwner(owner any) {
	l := h.list
	l.mu.Lock()
	defer l.mu.Unlock()
	h.view.Owner = owner
	l.changes.Add(1)
}

// Owner returns whose the hold is.
func (h *Hold) Owner() any {
	h.list.mu.Lock()
	defer h.list.mu.Unlock()
	return h.view.Owner
}

// End takes h out of the account. Ending it again, or before Begin, does nothing.
func (h *Hold) End() {
	l := h.list
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !h.entered {
		return
	}
	h.entered = false
	if h.prev != nil {
		h.prev.next = h.next
	} else {
		l.mu.first = h.next
	}
	if h.next != nil {
		h.next.prev = h.prev
	}
	h.next, h.prev = nil, nil
	l.changes.Add(1)
}
