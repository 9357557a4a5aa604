// Package monitor decides what moves down, when, and where to: batches leave a space when its
// pressure reaches the trigger, and when there are waiters for room in it.
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
// # What moves
//
// At the trigger a space is relieved until it is below it, and at most as far below as it was
// above; the stop mark ends that. Each step computes this again: it sees
// what changed in between, and moves nothing for a pressure that has gone. Waiting demand
// frees what the waiters lack, at any pressure, and not more. Bytes that are on
// their way already count: those of moves under way, and those that were freed and
// that the device still works on. So no more than one batch's bytes leave beyond
// what is needed. Every end of a move is followed by a new look.
//
// Room for a request that several spaces may serve is made in one of them: where it can be made
// soonest, and in another one if that is stuck. What leaves there for others counts, so small
// requests do not move a batch each.
//
// A victim goes to the next tier if that has room without waiters. If not, the one of two that the
// policy would move first goes down: either a batch of that tier, which makes room, or the victim
// itself, past that tier. Of the spaces in a memory tier the nearest with room is taken; several
// disks are used side by side.
//
// These batches are never moved: being processed, in transit, subscribed to, empty, in the slowest
// tier, or with a reader that holds the memory beyond a handle.
//
// # What goes wrong
//
// A batch that is in use after all, or a target without room, is no error: another is chosen. After
// any other error the batch stays where it is.
//
// If the error is the batch's own (batch.ErrUnmovable), the batch is not tried for that tier again
// for two periods, then four, up to 1024, and goes to the next one. When it can be converted for
// none, an Unmovable event is sent once, and the batch is skipped. It is tried at once when it has
// got another form, or when the converters have changed. All others go on.
//
// If the error is about the machine, or of unknown cause, the batch is skipped as well, up to 64
// periods. From the second such error in a row the way between the two spaces is skipped, too. Then
// another batch is tried first.
//
// If nothing can be moved for a space, an event is sent once, and the monitor looks again when
// something changes. Waiters are refused with a tier.NoSpaceError if nobody is left to help: all
// that is used in the space belongs to batches at rest, all slower tiers are full in the same way,
// or none of the batches can be converted, and there was no progress for Config.StuckAfter.
// Owners that wait for each other hold something. The reservation manager detects those: it calls
// Movable.
//
// So that consumers can go on when all tiers are full, moves down leave some room free, and so does
// what comes from outside: see Monitor.Headroom.
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
// One mutex, the index's, of rank Monitor: the outermost, under which batches are read. It guards
// what went wrong with batches, too, which Run and Clear note. Everything else belongs to Run's
// goroutine or is atomic. Policies, events and the mover are called with no lock held.
//
//	[Monitor] → Manager → Repository → Batch → Registry → Reservation → Space → …
package monitor
