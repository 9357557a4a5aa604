// Package permit limits what transfers have under way: bytes of several budgets
// and spill slots, asked for all at once. A Permit is taken for the time of one
// transfer, where a reservation is kept for as long as there is data.
//
//	Request ── Acquire, TryAcquire, With ──▶ Pool ── grants ──▶ Permit ── Release ──┐
//	                                          ▲ budgets, slots, those who wait      │
//	                                          └─────────────────────────────────────┘
//
// A Pool has named budgets of bytes in a fixed order, and slots, which limit how many
// transfers write to disk at once. A Request names bytes of some of the budgets, or
// none, and may ask for a slot:
//
//	slots configured   asked   granted     CanSpill   Limited
//	n                  yes     one of n    yes        yes
//	n                  no      none        no         no
//	unlimited          yes     unlimited   yes        no
//	unlimited          no      none        no         no
//
// It is granted all or nothing, under one lock, so that two who ask for the same
// two budgets never hold one each and wait for the other.
//
// # The monitor's slot
//
// What users hold must not stop the monitor from spilling, for what they wait for may
// be the room that it makes. So the last free slot is given only to a request that
// is marked with ForMonitor, while the monitor holds none: of n slots users have n−1
// at most. Further slots the monitor has in turn with users. Its first one depends on no
// user: not on those who wait, and also not on those who hold more than
// a limit that was lowered since. A pool of one slot has none for users; a request of
// theirs for one is refused at once. Only slots are kept for the monitor, not bytes: a
// request of the monitor's that must not be held up asks for none.
//
// # Waiting
//
// Who waits stands in a line for each budget that the request needs, and in that
// of the slots if it asks for one; a request that needs nothing of what somebody waits
// for passes freely. For each line it is first come first served, with a bounded
// bypass: while the oldest does not fit, others that do may be served before it, but
// only Config.Bypass of them; then what is released is kept until it fits. A
// wait ends when the request is granted, with its context, by Close, or when limits are
// lowered so far that it can never be granted.
//
// Waits must point downwards: who holds a permit must not wait for room in a memory, nor
// for another permit. Who needs both takes the room first and the permit last,
// around the transfer only.
//
// # Ownership
//
// A Permit belongs to whom it was granted, who must Release it once, on any goroutine.
// A Pool belongs to whoever made it. It owns no goroutine; Close wakes those who wait
// and reports the permits that are still held, which stay good until they are released.
//
// # Locks
//
// A Pool has one mutex, of the rank Reservation. Nothing is called under it; those whose
// wait is over are woken without it.
package permit
