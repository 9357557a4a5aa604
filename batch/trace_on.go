//go:build invariants

package batch

import (
	"fmt"
	"runtime"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/tier"
)

// holding is a handle's entry in its space's account. It is an object of its own here: the
// account must not keep a handle that was forgotten from the garbage collector.
type holding struct{ own *books.Hold }

func (h *holding) begin(s *tier.Space, v books.HoldView) {
	h.own = new(books.Hold)
	h.own.Begin(s.Books(), v)
}

func (h *holding) hold() *books.Hold { return h.own }

// trace remembers where a handle or a transit was taken. One that the garbage
// collector finds open can never be ended any more; forgotten says so.
type trace struct {
	stack   invariants.Trace
	cleanup runtime.Cleanup
}

// forgotten is a variable for the test's sake.
var forgotten = func(message string) { panic(message) }

func track[T any](holder *T, t *trace, kind string, id ID) {
	t.stack = invariants.Stack()
	where := t.stack
	t.cleanup = runtime.AddCleanup(holder, func(id ID) {
		forgotten(fmt.Sprintf("batch: a %s on batch %d was forgotten open; it was taken at\n%s", kind, id, where))
	}, id)
}

func (t *trace) end() { t.cleanup.Stop() }

func (t *trace) String() string { return t.stack.String() }
