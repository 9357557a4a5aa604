// Package transfer holds the built-in converters: it moves the bytes of images, tables and
// dictionaries between host memory, devices and disks, and checks, compresses and uncompresses them
// on the way.
//
//	Builtin.Convert ──▶ Builtin.copy           one converter, from every form of an image to every other
//	Source ──ReadAt──▶ lane ──WriteAt──▶ Sink  in host memory, on a device, or in a file
//
//	builtin.go         Builtin; its converter; layouts, digests, verification
//	copy.go            the loop: pieces, checksums, compression
//	lanes.go           the goroutines of a transfer, and the memory that they work in
//	memory.go          Source and Sink of each kind of memory; streams
//	dictionaries.go    shared dictionaries
//	extended.go        dictionaries that begin with the values of others
//	table.go           scattered images: how they are read
//	permit.go          permits for disk transfers, and transfers that give way to others
//	columns_read.go    some columns of a batch on disk, and rows of a batch anywhere
//
// Package convert calls it: its Mover decides what is moved and when, reserves the room, puts the
// batch in transit and commits the new image. This package only makes that image. States of batches
// and queues are not its concern. A failure here leaves the batch where it was: the new image is
// released, and the old one was only read. The Mover that this text names is that of package
// convert.
//
// One move goes like this: Convert takes a permit if a disk is involved, draws memory for the body
// from the move's reservation, takes references to the dictionaries in the target (copying those
// that are missing), and calls copy. copy chooses the size of pieces and the memory that they pass
// through, and runs one goroutine for each lane. Every lane takes the next piece, until none is
// left or one has failed. Convert returns the image, or releases all it took.
//
// Copies between device and disk go through a few pinned chunks, so that the device and the disk
// work at the same time; those between host and disk go straight to and from the arena. Everything
// goes in pieces of at most 8 MiB, and a cancelled context ends a transfer within one.
//
// # Tables
//
// A batch may also be on a GPU scattered, as a table: each Arrow buffer at a place of its own, as
// GPU libraries make them. One batched copy of the device's brings them to their places in an
// image; no device memory is needed for that. A table that is made of an image is one allocation,
// in which the buffers are at the same places.
//
//	table (GPU)  │valid│  │offsets│    │ text │      anywhere on the device
//	image        │valid│offsets│text │             checksums known, or computed on the way
//
// Mover.AdoptTable makes a table of memory that code outside the engine has filled, where it is;
// package cdevice does so for C programs. The monitor moves tables as it moves images; they come
// back as images, unless Mover.MoveAs wants a table. A table is compressed as it is gathered, run
// by run.
//
// # Dictionaries
//
// A dictionary of more than 4 KiB is an image of its own. Each space has at most one copy of it,
// which the batches there share: their images hold a reference each, and the release of the last
// reference frees the copy. The memory of a copy is drawn from the reservation of the batch that is
// moved there first. If another batch with the same dictionary is moved there at the same time, its
// move waits until the copy is complete. The copy in a batch's old space stays until the batch has
// left, so that a failed move loses nothing.
//
//	image (GPU) ─┐                     ┌─ image (host)
//	image (GPU) ─┼─▶ copy (GPU)        ├─ image (host)
//	image (GPU) ─┘     └─ dictionary ──┴▶ copy (host) ──▶ one array, shared by opened records
//
// # Compressed batches
//
// On disk, and in host memory, an image can also be compressed: in runs of 1 MiB, which lanes
// compress and uncompress at the same time.
//
//	image       │ frame frame frame frame │ frame …      run 0, run 1, …
//	               ╰──── S2, Zstandard, bitpack ────╮
//	compressed  │ f f  f f │ f f f f │ …                 in one buffer, with a checksum of each run
//
// The buffer is as long as the body until all runs are stored. Each lane takes room for its run
// from one counter, so the runs are in any order. Then the rest of the buffer is given back.
//
// Builtin.Codec is the codec; codec.Auto measures whether compressing is faster. A read verifies
// two checksums: that of the stored bytes and that of the image's bytes.
//
// Each lane works in a block of 2.25 MiB: a run as it is stored, and as it is. All transfers
// together have an eighth of host memory for that, and at least 4.5 MiB. A transfer leaves half of
// it to those that begin later. Blocks are drawn from the host space of the NUMA node, or of the
// first one, and freed when the transfer ends; if that space is small or full, they come from the
// heap. A Zstandard coder also has about 1 MiB of the heap, until the garbage collector frees it.
//
// # Columns
//
// Mover.Columns opens some columns and rows of a batch and leaves it where it is. Of an image on
// disk it reads only the blocks under a checksum that have something wanted. It puts them one after
// the other into one piece of host memory, in which the record is opened like any image. Package
// internal/image documents in walk.go how the columns' buffers are found, cut and laid out.
//
// Of a compressed image it reads the frames that these blocks are in. ReadRows reads rows for a
// cursor: it copies their bytes out of such blocks, which pass through the scratch memory of a
// lane.
//
//	disk   │  a   │ a b  │  b   │  c   │  c   │      a, from the disk: the first two blocks
//	host   │  a   │ a    │                           leased to the record
//
// # Permits
//
// Every transfer with a disk has a permit (package permit): up to 16 MiB of the budget of host
// memory for the pinned memory that it uses, and a spill slot if it writes. A Builtin without a
// pool of permits cannot be registered, and a user's converter takes its own with Mover.OnDisk. A
// move takes the permit last, and keeps it for the transfer only:
//
//	room in the target → the batch, in transit → a permit → a stream → a block → a chunk → the disk
//
// All callers take them in this order, so the holder of one waits only for those to its right. A
// holder of a permit waits for no memory, no batch and no other permit. A caller that copies a
// dictionary takes its permit before others can wait for the copy. So a permit is free as soon as
// the disk has answered, and every wait for one ends.
//
// All waiters for room depend on the monitor's moves, which therefore never wait for a program's
// permits. They need no bytes of the budget, and if programs have all slots, one move at a time
// writes without a slot.
//
// # Locks
//
// The mutex of the dictionaries has the rank Registry. It guards tables: nothing is copied,
// allocated or freed under it. The mutex of a stream is held while copies are put on it, and that
// of lanes while a piece begins. No two of these are held at once.
package transfer
