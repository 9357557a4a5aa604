package books

import "github.com/spillway-db/spillway/internal/invariants"

// Open makes p, a zero promise, one of n bytes that the caller has reserved. moves marks a promise
// for data that is being moved.
func (b *Books) Open(p *Promise, n int64, owner any, moves bool) {
	p.books, p.promised, p.owner, p.moves, p.stack = b, n, owner, moves, invariants.Stack()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.listLocked(p)
	b.changes++
}

// TryOpen reserves n bytes as p, a zero promise, if there is room for them below the limit and no
// clean image is in the way. It reports whether it did, how many bytes are used then, and the
// trigger.
func (b *Books) TryOpen(p *Promise, n int64, owner any, moves bool) (ok bool, used, trigger int64) {
	p.books, p.promised, p.owner, p.moves, p.stack = b, n, owner, moves, invariants.Stack()
	b.mu.Lock()
	defer b.mu.Unlock()
	if ok, _ = b.takeLocked(n, 0, b.marks.Limit); ok {
		b.listLocked(p)
	}
	return ok, b.usage.Used(), b.marks.Trigger
}

// listLocked adds p to the open promises.
func (b *Books) listLocked(p *Promise) {
	p.prev, p.next = b.promises.prev, &b.promises
	p.prev.next, p.next.prev = p, p
}
