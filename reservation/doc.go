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
// # Progress
//
// Tasks that hold bytes and wait for more may wait for each other. A reservation may
// have an Owner, and the owners are looked at together while one of them waits. What
// handles and records keep counts as held by the owner that their context named
// (Owner.Context; tier.Hold is the account). An owner exists while it holds anything or
// waits, and runs until as many of its goroutines wait as it has. Its wait is stuck if there cannot be room for it in any of
// its candidates, or only behind a shut door whose head is stuck too. Somebody gets a
// DeadlockError
//
//   - when owners are stuck whatever happens: even if all give back everything that
//     they hold, except those who are stuck in the same way. Others may run meanwhile. So
//     an owner of one goroutine that is in its own way is told at once: in two looks.
//   - when every owner waits, nothing free is enough for any of them, and for
//     Config.Grace nothing has changed in any space and nothing could be moved
//     (Config.Movable). What they lack is then held by nobody, who may have forgotten it.
//     Where handles or records of unknown owners keep some of it, Config.StuckAfter passes.
//
// A wait without an owner is judged by itself. It ends if handles and records of unknown
// owners keep so much of each space that it waits for that it could not be served whatever
// else became free, and for Config.StuckAfter it has waited and nothing has changed in those
// spaces. Which goroutine will close a handle is unknown: it is often handed on to another, and
// waiting for that is no mistake. Hence the long time. Before that Config.LongWait is told, and
// an error of the context names the holders as well.
//
// So nobody is told while an owner runs whose bytes would help, nor, as far as bytes
// are nobody's, while any owner runs. What is full of batches at rest that cannot be moved
// is the monitor's to say: Refuse sends those away who wait for it, with a
// tier.NoSpaceError. An owner that holds anything there, or where those batches should go,
// keeps the monitor from doing so; and where no owner holds anything that is waited
// for, four times the grace pass before one is told, so that the monitor is first.
//
// Who is told is the youngest waiter of an owner that holds something in the spaces
// which are waited for (of any owner if none does), and that was not told before:
// it should roll back, DeadlockError.Wait for the others, and begin again. If all were told
// before, it is the youngest, and it should split its work. That an owner was told is
// forgotten when it holds as much as it would have held had it been served, or when it has
// let go of everything, and was served and let go of everything once more.
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
