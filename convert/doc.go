// Package convert knows how batches look in memory and how they get from one
// memory to another.
//
// # The image
//
// A batch's bytes have one layout in all tiers, its image: the Arrow buffers in
// schema order, depth first, each at a multiple of 64 bytes and the large ones at a
// page. Layout makes it out of a record, with a checksum for each 64 KiB; Open makes a
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
// Builtin has those between images, and between images and tables. A Mover is the one way to move: it reserves in
// the target, locks the batch for transit, converts, commits, and releases the
// source; on any failure the batch is whole where it was and all that was taken is
// given back.
//
// A program may have forms of its own: payloads of a type of its own, and a converter for
// each way that they are to go. One to batch.HostImage is what Record, Columns and a
// repository's Reader need. A form that has a method Descriptor is given room for the
// descriptor's body, others for as many bytes as they take where they are. Registry.Wrap puts
// a function around a converter, also around a built-in one.
//
// What the built-in converters do, and in which order they take what they need, is told at
// package internal/transfer; how a batch's bytes are laid out at package internal/image.
//
// # Locks
//
// The Registry's mutex has the rank Registry and is not held while a converter
// runs. A Mover has a mutex for its counters, under which nothing is called.
package convert
