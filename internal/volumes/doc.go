// Package volumes is the disk tier: volumes that hold memory in spill files.
//
//	Volume (a tier.Pool)                            one a directory
//	├─ segment-0000   one file, nameless where the file system can
//	│  ├ extent ┤├ free, written ┤├ extent ┤├── hole ──┤
//	├─ segment-0001   …
//	│      ▲ Alloc: a tier.FileMemory, of one piece or several
//	│      │ WriteAt, ReadAt: requests, some of them under way at a time
//	│      └─ direct I/O ── the caller's memory
//	└─ trimmer        gives written room back that nothing needs
//
//	tier/disk        what is asked of the file system: disk.FS, disk.File, disk.OS
//	volume.go        opens and closes a volume, and finds out what its file system can
//	directory.go     directories of named files, and what killed processes left in them
//	alloc.go         takes room and hands it out
//	trim.go          gives room back
//	transfer.go      reads and writes
//	persist.go       what outlives the process: a file for each batch and dictionary
//	kept_file.go     the format of such a file; kept_dir.go their directory, and what is found there
//	internal/pace    how fast the volume is: whose turn it is, and how much may be under way
//	internal/seal    encryption
//
// # Ownership
//
// Memory belongs to its holder from Alloc to Free. Free during a transfer takes effect when that
// has ended. The memory given to a transfer is the caller's again when the call returns, also
// after an error or when the context has ended: the call waits for the requests under way.
//
// # Room
//
// A byte of a segment is a hole, which the file system has; or backed, that is free and ours; or
// handed out. Alloc takes what is backed, the lowest segment first. When that is not enough it
// makes holes backed (fallocate, in steps of 64 MiB). Freed room stays backed, because it is
// written again at twice the speed of fresh room (measured: 5.1 against 2.5 GiB/s). What nothing
// needed for Config.Idle goes back, in holes of 4 MiB; so does all of it with Trim and Close.
//
// # Several volumes
//
// Volumes that are used side by side have one Stripe. Pace says for how long a volume has been
// written to, and will be for what it has taken on. A reservation.Strategy or the monitor asks the
// volume first for which that is least. So all are busy for equally long, and bytes go in
// proportion to the bandwidth that each has to spare. A volume that is full is skipped, and makes
// up for no more than a second of that when it has room again.
//
// A volume whose write failed, or whose file system had no room, is tried last for a second, after
// the next failure for two, and so on up to 64. Then one Alloc may try it; a write that succeeds
// ends this. The error itself is returned: a *disk.IOError, or a *tier.NoSpaceError.
//
// # Files
//
// Nameless files are gone with the process, however it ends. Named ones are removed by the next
// volume that is opened in the directory (directory.go). Files have mode 0600. No other file in
// the directory is touched.
//
// # Encryption
//
// With Config.Encrypt only AES-GCM's output reaches a file, in units of 64 KiB, each as long there
// as in memory, so that I/O stays direct. A unit's tag and nonce (24 bytes) are in memory, and on
// disk only for what persists. A changed bit, another unit's bytes and older bytes of the same
// unit are a *tier.AlteredError. A write of a part of a unit reads, opens and seals the rest
// again. A unit that could not be written again, over what was there, is lost until all of it is
// written. What was never written reads as zeros.
//
// Each volume has a key of its own: random, or derived from the user's (HKDF, with a random salt).
// It counts its nonces, so none is used twice under a key. With the key of an earlier volume it
// opens what persists, and seals nothing. Keys are in this process's memory, readable by a reader
// of that memory or of the system's swap. They protect what is on the disk, also after a crash, but
// not its length. Requests pass through mapped memory that is in no ledger: up to 4 × Depth ×
// Request bytes, 32 MiB by default.
//
// # What persists
//
// With Config.Persist each memory is a file of its own, and there are no segments. Volume.Persist
// writes a header behind the body of the first of a batch's memories, and renames that file: from
// then on the batch is on the disk whatever ends the process. See kept_file.go and kept_dir.go.
//
// A memory is in one of three states. It is a part: Alloc created its file, which the next volume
// removes. It persists: its entry has a header, and the file of the first memory has the entry's key
// for a name. It stays: an earlier process left it, and it counts as used until the owner Takes it,
// which makes it persist, or forgets it, which frees it. At Close what stays is left for the next
// volume. The Free of any memory of an entry ends the entry first: its file is a part again.
//
// Written bytes are in the page cache, and nothing is synchronized, so a failure of the system may
// lose any of them. Owners must compare bodies with their own checksums. A damaged header is an error
// of its entry, with a warning that names the file.
//
// The next volume with Persist in Dir takes over one directory whose lock is free. It leaves alone,
// with a warning, a directory of another version, one that needs more than the volume's capacity, one
// of another user, and one with a file that cannot be read. A directory that needs another Key is a
// *disk.KeyError if the volume can take no other, and a warning else.
//
// With Config.Encrypt and a Key the header has the seals of its memories' units and the salts of
// their keys, and is sealed itself. No key is written. So a changed bit of a body, of a header or of a
// seal in it is found, even if the checksums were forged. An older file in the place of a newer one is
// not found. The number of files and their lengths stay readable.
//
// # Locks
//
// A Volume's mutex has rank Backend and guards the books. A transfer's has rank Device and guards
// its rest, as do those of a memory's units, of the buffers and of the figures behind Pace. They
// are not held together, and nothing is done under them. Units are held by requests, which come to
// have all that they need at once, in the order in which they asked.
//
// One token is held across system calls; the mutex is taken inside it. It orders the adding and giving
// back of room: Alloc waits for it only when what is backed is not enough, for as long as one
// fallocate or one hole of 4 MiB takes. The Free of a memory that persists waits for another one that
// is ending the entry.
package volumes
