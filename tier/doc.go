// Package tier holds what all of Spillway's memories have in common: the kinds of memory and the
// names of the spaces in them, the books of a space, the buffers that are drawn from it, and the
// small interfaces that a backend implements. The backends are in the packages below this one.
//
//	             Space ─────────── its books: live, retired, reserved
//	Reserve ──▶  │ limit, trigger, stop; listeners
//	Draw    ──▶  │                                        ┌▶ HostMemory    internal/host
//	             └─ Pool ── Alloc, Free ── Memory ────────┼▶ FileMemory    tier/disk
//	Buffer  ◀──     │                                     └▶ DeviceMemory  tier/sim
//	│ Lease                                                 Device ── Stream, Event
//	│ Release
//	▼
//	retired ──▶ reclaimed: to the Account that promised the bytes, or free
//
// Pools that are written side by side, each as fast as it can, say how far they are (Pace): spill
// volumes.
//
// # Bytes
//
// Every byte of a space is free, or in exactly one of three accounts: reserved (promised and not
// drawn), live (in a buffer), retired (released, but the device may still work on it). Their sum is
// never over the capacity. Sizes are charged as the pool rounds them, and everything is counted in
// bytes. Promises that a reservation.Manager gives back may be kept for its next one while the
// space is far from full and has no waiters. A request for room, or a query of what is used, takes
// them back. A Quota limits what several spaces, programs or processes share, beside each space's
// limit.
//
// # Ownership
//
// A caller that reserves bytes must draw or unreserve each of them. A caller that draws a Buffer
// owns it and must Release it once. Longer readers, such as Arrow arrays that were opened in place,
// hold leases, and the memory goes back when all of them have ended. A Space owns its Pool and
// closes it. A pool does not own the device that it allocates from: the opener of the Device closes
// it, after the pools and the streams. A stream belongs to one goroutine at a time.
//
// Buffers outlive the close of their space: their memory stays usable, except for
// the memory of a device that was closed.
//
// # Locks
//
// The order of all of Spillway's locks is in internal/lockrank; this package
// has the inner end of it:
//
//	… → Reservation → Space → Ledger → Backend → Device
//
// Space guards a space's set of buffers and its listeners, Ledger the writers of the books (readers
// take no lock). Backend is for pools. Device is for the devices themselves. No lock is held during
// calls of a pool, a device, a listener or an account, or during a wait.
//
// # Errors
//
// No room is a *NoSpaceError, which matches ErrNoSpace and says how much there is. A space whose
// device is lost for good is a *LostError, which matches ErrLost: see Losable and Space.Lost. A
// second release is ErrReleased, use after a close ErrClosed, and what a backend cannot do
// ErrNotSupported. A Pool that panics in Alloc has returned an error as far as callers can see.
package tier
