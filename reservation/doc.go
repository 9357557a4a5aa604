// Package reservation promises bytes of a machine's memories before they are allocated, and keeps
// requests that have to wait in a fair order.
//
//	Strategy -- which spaces --> Manager -- promises --> Reservation -- draws --> tier.Buffer
//	                                |                        |  ^                     |
//	                            reserves                  returns +------ credits ----+
//	                                v                        v
//	                            tier.Space <-----------------+
//
//	manager.go       Reserve, TryReserve: takes room, or waits for it
//	strategy.go      the candidates of a request, in order; spaces.go: the set of all spaces
//	wait.go          requests that wait, and their lines; Grow
//	reservation.go   Reservation: Alloc, Shrink, Release
//	policy.go        Options: what happens when a reservation is used up; what its bytes are for
//	demand.go        what is waited for; makeRoom: the oldest waiter has batches evicted
//	owner.go         tasks that hold and wait; deadlock.go: deadlocks; reclaim.go: memory to reclaim
//	report.go        long waits, and figures; streams.go: what is allocated on each stream of a GPU
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
// A Manager owns neither the spaces nor the reservations. Close ends all waits and refuses new
// requests; open reservations stay valid.
//
// # Waiting
//
// A request that would not fit any of its candidates even if they were empty is refused at once,
// and so is one whose candidates are all lost (tier.LostError). Any other joins the line of each
// candidate, and leaves them all when it is served from one. A wait ends when there is room, with
// its context, by Close, by a DeadlockError, by a tier.NoSpaceError, or when its last candidate is
// lost. Grow waits like a new request, last in line. Alloc does not wait for releases.
//
// Each space serves its line in the order of arrival. While the head, its oldest waiter, does not
// fit, up to Config.Bypass other requests that fit may be served before it, waiting or new. After
// that freed bytes add up until the head fits. The next head may be bypassed as often again.
// TryReserve, Grow, TryGrow and the policies Ignore and Increase follow the same rule.
//
// A release does not assign the freed bytes to a waiter. It wakes the waiter to be served next,
// which takes them on its own goroutine and then wakes the next one. Until it runs, a request of a
// running goroutine may take them as a bypass. So goroutines that contend for a few slots need not
// wait for another goroutine to be scheduled before each use of the bytes. Taking room on the
// waiter's goroutine also keeps quotas and clean images, which take time, away from the goroutine
// that releases.
//
// The head of a line makes room on its own goroutine. It calls Config.Evict for what its line lacks,
// again and again as long as that moves batches. A request that heads several lines does so for the
// first of its candidates where that helps. When no batch can be evicted, the head asks for memory
// that is not in batches (OnReclaim), in its space before slower ones and the largest first. Each has
// a second. Then it sleeps until bytes are freed in its space or in a slower one, or until Wake.
// While it is served from what others free, it may still be at work in Evict for as long as a move
// takes.
//
// A request is refused with a tier.NoSpaceError after Config.StallTimeout if nothing can make room
// for it: all used bytes of its spaces are those of batches at rest, or the engine's own, and no
// batch can be evicted.
//
// # Deadlocks
//
// Tasks that hold bytes and wait for more may wait for each other. The request that began to wait
// last gets a DeadlockError then: see Manager.watch for the definition of a deadlock. A
// reservation may have an Owner. Handles and records count as held by the owner that their context
// named (Owner.Context). The owner should roll back, DeadlockError.Wait for the others, and begin
// again.
//
// # Locks
//
// One mutex of the rank Reservation, the Manager's, guards the lines of all spaces and whatever else
// concerns waiters. Under it a space's books are locked, and numbers are read that are in memory: of
// a quota Remaining and Limit, and of a pool what it is unsure of.
//
//	… → Batch → Registry → Reservation → Space → Backend → …
//
// The package charges and credits quotas, calls strategies, pools, hooks and the functions of
// Config, drops clean images, and notifies spaces of changes with no lock held.
package reservation
