// Package monitor decides which batches are evicted, when, and where to: batches leave a space when
// its pressure reaches the trigger, and when requests wait for room in it.
//
//	tier.Space ──Pressed──▶ ┌─────────┐               ┌────────┐
//	reservation ──demand──▶ │ Monitor │ ──snapshot──▶ │ decide │   pure
//	50 ms, end of a move ─▶ │   Run   │ ◀──choices─── └────────┘
//	batch.Batch             └─────────┘
//	     │ BatchChanged       ▲     │ at most 2 at once
//	     ▼                    │     ▼ from one space to one other
//	┌─────────┐  shortlists   │   Mover ──▶ Events
//	│  index  │ ──────────────┘
//	└─────────┘ ordered by the Policy's keys
//
//	monitor.go   Run: wakes, takes a step, starts moves and notes their ends
//	space.go     observe: collects the Snapshot of a step; when waiters are refused
//	index.go     all batches by space, and the victims in the policy's order
//	policy.go    the policies; cost_aware.go: the default one
//	faults.go    what is not tried again for a while after an error
//	together.go  small batches that go to a disk with one write; ahead.go: pre-cleaning
//	headroom.go  the room that stays free for consumers
//	clear.go     Clear: evicts for an allocation that needs contiguous room, without Run
//	events.go    the events, for Config.Events and the log
//
// Package internal/decide makes the decision, and package convert the moves.
//
// # What moves
//
// At the trigger the monitor evicts batches until the pressure is as far below the trigger as it
// was above it, but not below the stop mark. Each step computes this again, so the monitor evicts
// nothing for a pressure that has gone. For waiters it evicts what they lack, at any pressure, and
// no more. Bytes that are already on their way out count: those of moves in progress, and retired
// ones, which the device still works on. So at most one batch's bytes leave beyond what is needed.
// A new step follows every end of a move.
//
// For a request that several spaces may serve, the monitor makes room in the one where it expects
// room soonest, and in another if that one is stuck. Bytes that leave there for other requests
// count, so that small requests do not evict a batch each.
//
// A victim goes to the next tier if that has room beyond what its waiters need. If not, the policy
// compares the victim with the batches of that tier: the one that it would evict first goes down.
// Either a batch of that tier leaves, which makes room, or the victim skips the tier. Within host
// memory the nearest space with room gets the victim; several disks are used side by side.
//
// These batches are never moved: being processed, in transit, subscribed to, empty, in the slowest
// tier, or with a reader that holds the memory beyond a handle.
//
// # What goes wrong
//
// If a batch is in use after all, or the target has no room, the next step chooses another. That is
// no error. After any other error the batch stays where it is.
//
// If the error is the batch's own (batch.ErrUnmovable), the batch is not tried for that tier again
// for two periods, then four, up to 1024, and goes to the next one. When it can be converted for
// none, an Unmovable event is sent once, and the batch is skipped. It is tried at once when it has
// got another form, or when the converters have changed. All others go on.
//
// If the error is about the machine, or of unknown cause, the batch is not moved to that tier
// either for a while, up to 64 periods. From the second such error in a row the monitor also skips
// the edge between the two spaces. Afterwards it tries another batch first.
//
// If nothing can be evicted from a space that needs it, the space is stuck: the monitor sends an
// event once, and takes a step when something changes. It refuses waiters with a tier.NoSpaceError
// if no goroutine is left that could free room. Then batches at rest have all used bytes of the
// space, the slower tiers are full in the same way or cannot take the batches, and there was no
// progress for Config.StallTimeout. Owners that hold room and wait for each other are a matter of the
// reservation manager, which calls Movable to find out whether an eviction could help.
//
// So that consumers can go on when all tiers are full, evictions and new records leave some room
// free: see Monitor.Headroom.
//
// A space that is lost with its device (tier.Space.Lost) is reported once. Nothing is moved from it
// any more, however full it is: its batches have no bytes that could be moved.
//
// # Ownership
//
// A Monitor owns no memory. The goroutines that move batches are Run's: they
// bear pprof labels, there are at most Config.MovesPerEdge for each pair of spaces, and
// when Run has returned all of them have ended. One of them moves up to 256 small batches, one
// after the other, as long as that is quick. The index keeps a pointer to each
// batch from its making until it is dropped.
//
// # Locks
//
// There is one mutex, the index's, of rank Monitor, which is the outermost: batches are read under
// it. It also guards the faults of batches, which Run and Clear record. Everything else belongs to
// Run's goroutine or is atomic. Policies, events and the mover are called with no lock held.
//
//	[Monitor] → Manager → Repository → Batch → Registry → Reservation → Space → …
package monitor
