// Package convert knows how batches look in memory and how they get from one
// memory to another.
//
// # The image
//
// A batch's bytes have one layout in all tiers, its image: the Arrow buffers in
// schema order, depth first, each at a multiple of 64 bytes and the large ones at a
// page. Layout makes it out of a record, with a checksum for each MiB; Open makes a
// record out of it again, in place. Between the two nothing but bytes is copied.
//
//	arrow.RecordBatch ──Layout──▶ image (GPU) ◀─▶ image (host) ◀─▶ image (disk)
//	                                   ▲                │               ▲
//	                                   └────────────────┼───────────────┘
//	arrow.RecordBatch ◀───────Open──────────────────────┘
//
// # Converters and moves
//
// A Registry holds the converters, one function for a pair of payload types.
// Builtin has those between images. A Mover is the one way to move: it reserves in
// the target, locks the batch for transit, converts, commits, and releases the
// source; on any failure the batch is whole where it was and all that was taken is
// given back.
//
// Copies between device and disk go through a few pinned chunks, so that the
// device and the disk work at the same time; those between host and disk go
// straight to and from the arena. Everything goes in pieces of at most 8 MiB, and acts on a
// cancelled context within one.
//
// # Locks
//
// The Registry's mutex has the rank Registry and is not held while a converter
// runs. A Mover has a mutex for its counters, under which nothing is called.
package convert
