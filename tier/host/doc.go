// Package host is the host tier: arenas of pinned memory that Go code, the GPU's
// copy engines and direct I/O all reach.
//
//	Arena (a tier.Pool)                          one a NUMA node
//	┌─────────────────────────────────────────┐
//	│ one contiguous range of addresses       │  mapped once, as long as the capacity;
//	│ ├ extent ┤├── free ──┤├ extent ┤├ slab ┤│  pages come when touched: ahead, in steps
//	└────────────┬────────────────────────────┘  of 2 MiB, or at first use
//	             │ Alloc: a tier.HostMemory of one extent, or of several that
//	             ▼ meet at cuts only, so that no Arrow buffer straddles two
//	        tier.Buffer ──▶ Staging: one buffer lent out as chunks of equal length
//
// # Small memory
//
// What is charged less than whole pages, all of it below 8 KiB, gets a place in a
// slab: 64-byte aligned, beside others. A place is charged, not its slab, so that what
// was reserved can be drawn. The pages of a slab that is partly used are free for
// small memory only; Stats.Slack says how much that is. An arena in which slabs stand
// in the way of something large says that it is fragmented, as it does when large
// memory stands in the way. Whole pages never lie in slabs: direct I/O needs their
// alignment, and images are whole pages.
//
// # Ownership
//
// An extent belongs to whoever holds its memory, from Alloc to Free; the arena does
// not look into it meanwhile. Freed extents are handed out again with the bytes that
// they had. The mapping stays until the arena is closed and the last extent is
// freed, so arrays opened in place stay readable while they are leased.
//
// Under the invariants tag freed extents are made unreadable, so that a use after release faults at
// once. Freed places are, as far as they have pages to themselves; the rest is overwritten, and
// checked when it is handed out again. The race detector does not see mapped memory: builds with
// -race, and systems other than Linux, macOS and FreeBSD, take the arena from the Go heap.
//
// # What the Go runtime does not see
//
// GOMEMLIMIT counts the Go heap, not arenas. Set it to what the process may use
// less the capacity of its arenas.
//
// # Locks
//
// Arena and Staging have one mutex each, of rank Backend: the last but the device's.
// It guards the free list and counters. No system call is made under it; ranges
// that one works on are taken out of the free list for as long.
package host
