// Package reservation promises bytes of a machine's memories before they are allocated, and keeps
// requests that have to wait in a fair order. The monitor spills for what waits here.
//
//	Strategy ── which spaces ──▶ Manager ── promises ──▶ Reservation ── draws ──▶ tier.Buffer
//	                                │                        │  ▲                     │
//	                             charges                  returns └───── credits ─────┘
//	                                ▼                        ▼
//	                            tier.Space ◀─────────────────┘
//
//	manager.go       Reserve, TryReserve: finds a space with room, or becomes a waiter
//	strategy.go      the candidates of a request, in order; spaces.go: the set of all spaces
//	wait.go          waiters: how they wait, and how serve gives them room
//	line.go          the line of one space: who is next, and charging the space
//	reservation.go   Reservation: Alloc, Grow, Shrink, Release
//	policy.go        options: what happens when a reservation is used up; where its bytes come from
//	demand.go        what the waiters need, for the monitor
//	owner.go         tasks that hold and wait; books.go, progress.go, deadlock.go: deadlocks
//	blocked.go       counts waits by owner; longwait.go reports long ones; oom.go: WithOutOfMemory
//
// # Ownership
//
// The caller of Reserve owns the Reservation and must Release it once. Its bytes are charged to its
// space from the start. So an allocation within the promise never fails for want of room, unless
// the free room is in pieces. The caller of Alloc owns the Buffer, which may outlive the
// reservation. When a buffer is freed before Release, its bytes are unused again; afterwards they
// return to the space. While a device still works on the buffer they are in neither. Any goroutine
// may free it.
//
// A Manager owns neither the spaces nor the reservations. Its only goroutine is that of a timer
// while a request waits. Close ends all waits and refuses new requests; open reservations stay
// valid.
//
// # Waiting
//
// A request that would not fit any of its candidates even if they were empty is refused at once,
// and so is one whose candidates are all lost (tier.LostError). Any other joins the line of each
// candidate, and leaves them all when it is served from one. A wait ends when there is room, with
// its context, by Close, by Refuse, by a DeadlockError, or when its last candidate is lost. Grow
// waits like a new request, last in line. Alloc does not wait for releases.
//
// Each space serves its line in the order of arrival. While the head, its oldest waiter, does not
// fit, up to Config.Bypass other requests that fit may be served before it, waiting or new. Each
// takes one pass. When no pass is left, the door is shut: freed bytes add up until the head fits. A
// new head brings new passes, so a request that has k others before it can be passed by k+1 times
// as many. TryReserve, Grow, TryGrow and the policies Ignore and Increase go through the same door.
//
// # Deadlocks
//
// Tasks that hold bytes and wait for more may wait for each other. A reservation may have an
// Owner. Handles and records count as held by the owner that their context named (Owner.Context;
// holds.Hold). An owner runs until as many of its goroutines wait as it has. One owner gets a
// DeadlockError
//
//   - when owners are stuck whatever happens: even if all others give back everything that they
//     hold. It gets the error after two looks at the books, also if other owners run.
//   - when every owner waits, nothing that is free is enough for any of them, and for
//     Config.Grace nothing has changed and nothing could be moved (Config.Movable). Where handles
//     or records of unknown owners keep some of the room, or no owner holds anything, it takes
//     Config.StuckAfter. Where what owners hold is in other spaces, it takes four times the grace.
//
// A wait without an owner gets the error if two things are so. Handles and records of unknown
// owners keep so much of each space that it could not be served whatever else became free. And
// nothing has changed in those spaces for Config.StuckAfter. It takes so long because a handle is
// often passed to another goroutine, and waiting for that one is no mistake.
//
// The error goes to the youngest wait whose owner holds something in the spaces that are waited
// for and has not had it before. That owner should roll back, DeadlockError.Wait for the others,
// and begin again. If all have had it, the youngest should split its work. An owner's record is
// cleared when it holds as much as it wanted then, or when it has released everything, was served,
// and has released everything once more.
//
// # Locks
//
// Three kinds of mutex have this package's rank and are never held together: the Manager's guards
// the lines, that of its table of owners the owners, and a Reservation's its books. Under them only
// the ledger of a space is locked (that is below), never a Space, which calls its listeners when it
// is charged:
//
//	… → Batch → Registry → Reservation → Space → Ledger → …
//
// So serve picks a waiter under the lock, charges the space without it, and takes the lock again to
// end the wait, which fails if the wait has ended meanwhile. The package calls strategies,
// subscribers, pools, hooks, Movable and the callback of Refuse, and wakes waiters, with no lock
// held.
package reservation
