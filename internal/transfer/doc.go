// Package transfer holds the built-in converters: it moves the bytes of images, tables and
// dictionaries between host memory, devices and disks.
//
//	Builtin.Register ──▶ image, pack, toTable      the converters
//	source ──transfer──▶ sink                      one way for each kind of memory, in and out
//	pump.Job: lanes, chunks, copies of a stream    the one loop below all of them
//
//	builtin.go         Builtin; the converter between images; host memory to and from disk
//	sources_sinks.go   source, sink and transfer, which chooses the way between two memories
//	staged.go          the ways that use a stream or pinned chunks
//	pack.go            compresses and uncompresses; scratch.go: the memory for it
//	packed_file.go     reads parts of a compressed batch
//	dictionaries.go    shared dictionaries; extended.go: those that begin with the values of others
//	table.go           tables; table_peek.go, table_slab.go: reading and allocating them
//	permit.go          permits for disk transfers; spare.go: transfers that give way to others
//	columns_read.go    some columns of a batch on disk; digest.go: digests
//
// Of the calls that this text names, those of a Mover are in package convert.
//
// Copies between device and disk go through a few pinned chunks, so that the
// device and the disk work at the same time; those between host and disk go
// straight to and from the arena. Everything goes in pieces of at most 8 MiB, and acts on a
// cancelled context within one.
//
// # Tables
//
// A batch may also lie on a GPU as a table (payload.Table): each Arrow buffer in an allocation
// of its own, as GPU libraries make them. One batched copy of the device's brings them to
// their places in an image, or from there; no device memory is needed for that.
//
//	table (GPU)  │valid│  │offsets│    │ text │      anywhere on the device
//	image        │valid│offsets│text │             checksums known, or made as it comes by
//
// Mover.AdoptTable makes a table of memory that code outside the engine has filled, where it is;
// package cdevice does so for C programs. The monitor moves tables as it moves images; they come
// back as images, unless Mover.MoveAs wants a table. A table is compressed as it is gathered, run
// by run.
//
// # Dictionaries
//
// A dictionary of more than 4 KiB is an image of its own. In each space there is
// one copy of it at most, which the batches there share: their images hold a
// reference each, and the last to be released frees it. Every copy is drawn from the
// reservation of the batch that brings it; when two bring the same one, the second
// waits until the first has copied it. A copy in a batch's old space stays until
// the batch has left, so that a failed move loses nothing.
//
//	image (GPU) ─┐                     ┌─ image (host)
//	image (GPU) ─┼─▶ copy (GPU)        ├─ image (host)
//	image (GPU) ─┘     └─ dictionary ──┴▶ copy (host) ──▶ one array, shared by opened records
//
// A dictionary that begins with the values of an earlier one, its base, is an extension: its image
// has only the other values, and an image that uses it holds a reference to its base, too. In host
// memory the array is assembled when a record is opened. On a GPU, where programs read images in
// place, the parts stay apart, because few programs look at dictionaries: cdevice.Export copies them
// to one piece of device memory until the release, and others find them by Descriptor.From.
//
// # Compressed batches
//
// On disk, and in host memory, an image can also be packed (payload.Packed): runs of 1 MiB,
// compressed for themselves, that lanes pack and unpack side by side.
//
//	image │ frame frame frame frame │ frame …      run 0, run 1, …
//	         ╰──── S2, Zstandard, bitpack ────╮
//	packed │ f f  f f │ f f f f │ …                a buffer for each run, a checksum of what is stored
//
// Builtin.Codec is the codec; codec.Auto measures whether compressing is faster. A read verifies
// two checksums: that of the stored bytes and that of the image's bytes.
//
// Lanes work in scratch memory: 1.5 MiB each, and 1 MiB more to lay a record out. All transfers
// together have an eighth of host memory for that, and at least 3 MiB. It is drawn from a host
// space and freed when the transfer ends; if that space has no room, it comes from the Go heap. A
// Zstandard coder has about 1 MiB of the heap beside that, until the garbage collector frees it.
//
// # Columns
//
// Mover.Columns opens some columns and rows of a batch and leaves it where it is. Of an image on
// disk it reads only the chunks under a checksum that have something wanted. It puts them one after
// the other into one piece of host memory, in which the record is opened like any image. Package
// internal/image/columns documents how the columns' buffers are found, cut and laid out.
//
//	disk   │  a   │ a b  │  b   │  c   │  c   │      a, from the disk: the first two chunks
//	host   │  a   │ a    │                           leased to the record
//
// # Permits
//
// Every transfer with a disk has a permit (package permit): bytes of the budget of host memory for
// the pinned memory that it uses, and to write a spill slot. A Builtin without a pool of permits
// cannot be registered, and a user's converter takes its own with Mover.OnDisk. A move takes the
// permit last, and keeps it for the transfer only:
//
//	room in the target → the batch, in transit → a permit → a stream → scratch → a chunk → the disk
//
// All callers take them in this order, so a holder waits only for things to the right of what it
// holds. A holder of a permit waits for no memory, no batch and no other permit. A caller that
// copies a dictionary takes its permit before others can wait for the copy. So a permit is free as
// soon as the disk has answered, and every wait for one ends.
//
// All waiters for room depend on the monitor's moves, which therefore never wait for a program's
// permits. They need no bytes of the budget, and if programs have all slots, one move at a time
// writes without a slot.
//
// # Locks
//
// The mutex of the dictionaries has the rank Registry. It guards tables: nothing is copied,
// allocated or freed under it.
package transfer
