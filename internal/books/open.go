package books

import "github.com/spillway-db/spillway/internal/invariants"

// Open makes p, a zero promise, one of n bytes that the caller has reserved. moves marks a promise
// for data that is being moved.
func (b *Books) Open(p *Promise, n int64, owner any, moves bool) {
	p.books, p.promised, p.owner, p.moves, p.stack = b, n, owner, moves, invariants.Stack()
	b.mu.Lock()
	defer b.mu.Unlock()
	p.prev, p.next = b.promises.prev, &b.promises
	p.prev.next, p.next.prev = p, p
	b.changes++
}
