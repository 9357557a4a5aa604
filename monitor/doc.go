// Package monitor evicts batches: it decides which batches leave a space, when, and where to.
// Waiters for room evict on their own goroutines (Evict). The monitor's goroutine (Run) evicts from
// spaces whose pressure has reached the trigger, and pre-cleans.
//
//	reservation.Manager --Evict: a waiter lacks bytes--> +-------+  snapshot  +--------+
//	tier.Space --pressure at the trigger--> Run -------> | evict | ---------> | decide | pure
//	batch.Batch --BatchChanged--> index ---victims-----> +-------+ <--moves-- +--------+
//	                                                         | from one space to one other,
//	                                                         v MovesPerEdge at once
//	                                                       Mover --> Events
//
//	evict.go      Evict, evictToStop and Clear: lists of moves out of a space
//	monitor.go    Run: a step each period and when a trigger is reached; Headroom
//	index.go      all batches by space, and the victims in the policy's order
//	policy.go     the policies; cost_aware.go: the default one
//	faults.go     pauses after an error
//	events.go     the log, and the events of marks and of spaces that are stuck
//	pre_clean.go  clean images of batches that will leave next
//
// Package internal/decide makes the decision, and package convert the moves.
//
// # What moves
//
// A list of moves is short: at most 4 MiB, or one batch, for each move that may run at once. After
// each list the need is computed again, so nothing is evicted for a pressure or a request that has
// gone. For requests as much is evicted as they lack, at any pressure, and no more. At the trigger
// the pressure falls as far below the trigger as it was above it, but not below the stop mark.
// Retired bytes, which the device still works on, count as gone. So at most one batch's bytes leave
// beyond what is needed.
//
// A victim goes to the next tier if that has room beyond what its waiters need. If not, the policy
// compares the victim with the batches of that tier: the one that it would evict first goes down.
// Either a batch of that tier leaves first, which makes room, or the victim skips the tier. Within
// host memory the nearest space with room gets the victim; several disks are used side by side.
//
// These batches are never moved: being processed, in transit, subscribed to, empty, in the slowest
// tier, or with a reader that holds the memory beyond a handle.
//
// # What goes wrong
//
// If a batch is in use after all, or the target has no room, another list chooses another. That is
// no error. After any other error the batch stays where it is.
//
// If the error is the batch's own (batch.ErrUnmovable), the batch is not tried for that tier again
// for two periods, then four, up to 1024, and goes to the next one. When it can be converted for
// none, an Unmovable event is sent once, and the batch is skipped. It is tried at once when it has
// got another form, or when the converters have changed. All others go on.
//
// If the error is about the machine, or of unknown cause, the batch is not moved to that tier
// either for a while, up to 64 periods. From the second such error in a row the edge between the two
// spaces is not used for a while either. Afterwards another batch is tried first. If the target has
// no room although its books have, the edge takes only smaller batches for a while.
//
// If nothing can be evicted from a space that needs it, the space is dry, and stuck if that lasts:
// the monitor sends an event once. Evict is called again when a batch of the space or of a slower
// one becomes a victim, when a slower space has more room, and now and then; Run tries again after
// a few periods. Each end of a use may wake a waiter. So after a list of moves that moved nothing
// Evict does not search for another for ten times as long as that took, and at most 25 ms. A waiter
// that calls it meanwhile is woken afterwards. The reservation manager decides how long a request
// waits, and refuses it if it can never be served.
//
// So that consumers can go on when all tiers are full, evictions and new records leave some room
// free: see Monitor.Headroom.
//
// A space that is lost with its device (tier.Space.Lost) is reported once. Nothing is moved from it
// any more, however full it is: its batches have no bytes that could be moved.
//
// # Ownership
//
// A Monitor owns no memory. Goroutines that Evict starts have ended when it returns, and those of
// Run when Run returns. There are at most Config.MovesPerEdge moves for each pair of spaces at once.
// The index keeps a pointer to each batch from its making until it is dropped.
//
// # Locks
//
// Each space has a token. Only the goroutine that has it evicts from the space. A goroutine takes
// the tokens of several spaces from the fastest to the slowest. It may wait for moves while it has
// one, but takes no token with a lock held.
//
// There is one mutex, of rank Monitor, which is the outermost: batches are read under
// it. It also guards the pauses of batches and edges. Policies, events, the mover and the reservation
// manager are called with no lock held.
//
//	[Monitor] → Manager → Repository → Batch → Registry → Reservation → Space → …
package monitor
