// Package reservation promises bytes of a machine's memories to those who ask,
// before they allocate, and keeps those who have to wait in a fair order. Work
// that reserves first does not find out half-way that the memory is full, and
// what waits here is what the monitor spills for.
//
//	Strategy ── which spaces ──▶ Manager ── promises ──▶ Reservation ── draws ──▶ tier.Buffer
//	                                │                        │  ▲                     │
//	                             charges                  returns └───── credits ─────┘
//	                                ▼                        ▼
//	                            tier.Space ◀─────────────────┘
//
// Over a reservation in host memory an Allocator lets arrow-go build its arrays
// inside the promise; Guard turns the panics that it refuses with into errors.
//
// # Ownership
//
// A Reservation belongs to whom Reserve, TryReserve or ReserveUpTo gave it, who
// must Release it once. Its bytes are charged to its space from the start, so
// drawing a buffer within the promise never fails for want of room, though a
// device, or an arena, may be too fragmented for it. A Buffer belongs to whom Alloc gave it and
// may outlive the reservation: freed before Release its bytes are the promise's
// again, freed afterwards they are the space's, and in between, while a device
// still works on it, they are neither's. Whoever frees it, on whichever
// goroutine, it is credited where it was charged.
//
// A Manager belongs to whoever made it. It owns no goroutine, and neither the
// spaces nor the reservations: Close wakes those who wait and refuses new
// requests, and what was promised stays good.
//
// # Waiting
//
// A request that would not fit any of its candidates even if they were empty is
// refused at once. Any other waits for any of its candidates: it stands in the
// line of each and leaves them all when it is served from one. A wait ends when
// there is room, with its context, by Close, or when the monitor, having nothing
// left to move away, calls Refuse. Grow waits like a new request, last in line;
// allocations never wait.
//
// Each space serves its line in the order of arrival, with exceptions that keep
// it busy. While the oldest waiter, the head, does not fit, others that do may be
// served before it, waiting or just coming, but only Config.Bypass of them. Then
// the door is shut: what is freed adds up until the head fits. The count begins
// anew with each head, so a waiter that has k others before it can be passed by
// k+1 times as many. TryReserve, Grow, TryGrow and the policies Ignore and
// Increase pass through the same door.
//
// # Locks
//
// Three kinds of mutex are of this package's rank and are never held together: the
// Manager's guards the lines, a Reservation's its books, an Allocator's its blocks. Under them only the
// ledger of a space is locked (that is below), never a Space, which calls its
// listeners when it is charged:
//
//	… → Batch → Registry → Reservation → Space → Ledger → …
//
// So spaces are charged without a lock, and that shapes the code: a waiter is
// picked under the lock, charged without it, and told under it again, which fails
// if its wait has ended meanwhile. Strategies, subscribers, pools and the callback
// of Refuse are called without locks, and waiters are woken without.
package reservation
