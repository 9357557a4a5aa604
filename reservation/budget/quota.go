package budget

import "github.com/spillway-db/spillway/tier"

// Quota returns what a tier.Space over the device charges for its reservations, so
// that a promise is one within the budget too: who shares the budget cannot take it
// away before the space allocates, and who waits in the space is woken when others
// give something back. tier.QuotaOf finds it.
//
// What a space has promised is charged once: the device takes the larger of what is
// promised and what is allocated through it. So a space's device should be left to
// spaces; a program that allocates beside them does so out of their promises, and
// they are refused when they come to draw. It should use a device of its own, or
// reserve in the space. What others free asynchronously on devices that no space is
// over is seen when they reap, free again or allocate: a budget has no goroutine that
// would look.
func (d *Device) Quota() tier.Quota { return quota{d} }

type quota struct{ d *Device }

func (q quota) Charge(n int64) error { return q.d.budget.admit(q.d, request{promise: n}) }

func (q quota) Credit(n int64) {
	if q.retired() {
		// The device was done with the bytes before the space knew; without this they
		// might stay charged.
		q.d.Reap()
	}
	q.d.budget.change(q.d, func() { q.d.books.promised -= n })
	// Also if no less is charged, because more is allocated than promised: the space
	// has room again, and those who wait for that hear of it from nobody else.
	q.d.budget.notify()
}

func (q quota) retired() bool {
	q.d.budget.mu.Lock()
	defer q.d.budget.mu.Unlock()
	return q.d.books.retired() > 0
}

// Remaining is nothing once the device is closed: what can be charged must be told
// apart from what cannot, or a space would try for ever.
func (q quota) Remaining() int64 {
	b := q.d.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	if q.d.books.closed {
		return 0
	}
	return tier.Left(b.mu.limit, b.mu.reserved, q.d.books.charged())
}

func (q quota) Limit() int64 { return q.d.budget.Limit() }

func (q quota) Subscribe(f func()) (cancel func()) { return q.d.budget.subscribe(f) }
