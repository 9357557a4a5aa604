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
// Package arrowmem lets arrow-go build its arrays inside such a promise.
//
// # Ownership
//
// A Reservation belongs to whom Reserve, TryReserve or ReserveUpTo gave it, who
// must Release it once. Its bytes are charged to its space from the start, so
// drawing a buffer within the promise never fails for want of room, though a
// device, or an arena, may be too fragmented for it, whatever Config.Clear moves away. A Buffer belongs to whom Alloc gave it and
// may outlive the reservation: freed before Release its bytes are the promise's
// again, freed afterwards they are the space's, and in between, while a device
// still works on it, they are neither's. Whoever frees it, on whichever
// goroutine, it is credited where it was charged.
//
// A Manager belongs to whoever made it. It owns no goroutine, but for a timer's
// while an owner waits, and neither the spaces nor the reservations: Close wakes those
// who wait and refuses new requests, and what was promised stays good.
//
// # Waiting
//
// A request that would not fit any of its candidates even if they were empty is
// refused at once. So is one whose candidates are lost, and who waits for room when its
// last candidate is lost is told then: with a tier.LostError. One that has other candidates goes on with those. Any other waits for any of its candidates: it stands in the
// line of each and leaves them all when it is served from one. A wait ends when
// there is room, with its context, by Close, when the monitor, having nothing
// left to move away, calls Refuse, or by the news of a deadlock. Grow waits like a new request, last in line.
// Allocations wait for nobody's release. Where promised room lies in pieces, Config.Clear may have
// others moved out of the way meanwhile.
//
// Each space serves its line in the order of arrival, with exceptions that keep
// it busy. While the oldest waiter, the head, does not fit, others that do may be
// served before it, waiting or just coming, but only Config.Bypass of them. Then
// the door is shut: what is freed adds up until the head fits. The count begins
// anew with each head, so a waiter that has k others before it can be passed by
// k+1 times as many. TryReserve, Grow, TryGrow and the policies Ignore and
// Increase pass through the same door.
//
// # Deadlocks
//
// Tasks that hold bytes and wait for more may wait for each other. A reservation may have an
// Owner. Handles and records count as held by the owner that their context named (Owner.Context;
// tier.Hold). An owner runs until as many of its goroutines wait as it has. One owner gets a
// DeadlockError
//
//   - when owners are stuck whatever happens: even if all others give back everything that they
//     hold. It gets the error after two looks at the books, also if other owners run.
//   - when every owner waits, nothing that is free is enough for any of them, and for
//     Config.Grace nothing has changed and nothing could be moved (Config.Movable). Where handles
//     or records of unknown owners keep some of the room, it takes Config.StuckAfter. Where no
//     owner holds any of it, it takes four times the grace, so that the monitor can Refuse first.
//
// A wait without an owner gets the error if handles and records of unknown owners keep so much of
// each space that it could not be served whatever else became free, and nothing has changed in
// those spaces for Config.StuckAfter. It takes so long because a handle is often passed to
// another goroutine, and waiting for that one is no mistake.
//
// The error goes to the youngest wait whose owner holds something in the spaces that are waited
// for and has not had it before. That owner should roll back, DeadlockError.Wait for the others,
// and begin again. If all have had it, the youngest should split its work. An owner's record is
// cleared when it holds as much as it wanted then, or when it has released everything, was served,
// and has released everything once more.
//
// # Streams and memory that is out
//
// Streams counts allocations by the stream that they are for, and lets those of a
// stream draw from one reservation. An out-of-memory hook is asked when an allocation
// fails, and may free something and ask for one more try; see WithOutOfMemory.
//
// # Locks
//
// Four kinds of mutex are of this package's rank and are never held together: the
// Manager's guards the lines, that of its table of owners the owners, a Reservation's its
// books, and that of Streams its counts. Under them only the
// ledger of a space is locked (that is below), never a Space, which calls its
// listeners when it is charged:
//
//	… → Batch → Registry → Reservation → Space → Ledger → …
//
// So spaces are charged without a lock, and that shapes the code: a waiter is
// picked under the lock, charged without it, and told under it again, which fails
// if its wait has ended meanwhile. Strategies, subscribers, pools, hooks, Movable and
// the callback of Refuse are called without locks, and waiters are woken without.
package reservation
