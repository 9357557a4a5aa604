package books

import (
	"cmp"
	"slices"

	"github.com/spillway-db/spillway/internal/invariants"
)

// The kinds of holds.
const (
	Handle = "handle" // an open handle on a batch
	Record = "record" // an open record, whose arrays are in the memory
)

// Hold is an open handle or an open record. While it is in the books of a space, memory there can
// neither be freed nor moved. The zero value is ready for Begin, and must not be copied. It is safe
// for concurrent use. Only waiters and lists of holders read it.
type Hold struct {
	books *Books
	view  HoldView // guarded by the mutex of the books
}

// HoldView describes a hold.
type HoldView struct {
	Kind string // Handle or Record
	// Memory is what is kept; it is comparable. Holds with the same Memory keep the same bytes. If it
	// has EachShared(func(*tier.Buffer)), the buffers that this calls its function with are kept,
	// too, as dictionaries are.
	Memory any
	Bytes  int64 // charged for the memory, without what is shared
	Owner  any   // the task that holds it, a *reservation.Owner; nil if that is unknown
	// About is what the memory belongs to; may be nil. If it has Describe(*tier.Holding), this
	// fills in what is known. It is called with no lock held.
	About any
	Stack invariants.Trace

	begun uint64
}

// Holds returns all open holds, the oldest first.
func (b *Books) Holds() (all []HoldView) {
	b.mu.Lock()
	for h := range b.holds {
		all = append(all, h.view)
	}
	b.mu.Unlock()
	slices.SortFunc(all, func(x, y HoldView) int { return cmp.Compare(x.begun, y.begun) })
	return all
}

// Begin enters h into the books. It must be called once.
func (h *Hold) Begin(b *Books, v HoldView) {
	v.Stack = invariants.Stack()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now.Progress++
	v.begun = b.now.Progress
	h.books, h.view = b, v
	b.holds[h] = struct{}{}
}

// SetOwner sets the owner of a hold that has begun.
func (h *Hold) SetOwner(owner any) {
	h.books.mu.Lock()
	defer h.books.mu.Unlock()
	h.view.Owner = owner
	h.books.now.Progress++
}

// Owner returns the owner.
func (h *Hold) Owner() any {
	h.books.mu.Lock()
	defer h.books.mu.Unlock()
	return h.view.Owner
}

// End takes h out of the books. Ending it again, or before Begin, does nothing.
func (h *Hold) End() {
	if h.books == nil {
		return
	}
	h.books.mu.Lock()
	defer h.books.mu.Unlock()
	delete(h.books.holds, h)
	h.books.now.Progress++
}
