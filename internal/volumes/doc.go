// Package volumes is the disk tier: volumes that hold memory in spill files.
//
//	Volume (a tier.Pool)                            one a directory
//	├─ segment-0000   one file, without a name if the file system supports that
//	│  ├ extent ┤├ free, written ┤├ extent ┤├── hole ──┤
//	│      ▲ Alloc: a tier.FileMemory, of one piece or several
//	│      │ WriteAt, ReadAt: requests, some of them under way at a time
//	│      └─ direct I/O ── the caller's memory
//	└─ trimmer        gives written room back that nothing needs
//
//	tier/disk        the interface to the file system: disk.FS, disk.File, disk.OS
//	volume.go        opens and closes a volume, and tries its file system
//	directory.go     directories of named files, and what killed processes left in them
//	alloc.go         takes room from the file system, allocates it, and frees it
//	trim.go          gives room back
//	transfer.go      reads and writes
//	errors.go        classes of errors of file systems
//	notices.go       events and warnings
//	persisted.go     files that outlive the process: one for each batch and dictionary; their format
//	                 is in persisted_file.go; persisted_dir.go takes over those of another process
//	pace.go          the speed of a disk: which volume comes next, and the length of requests
//	seal.go          encryption: what is sealed at once; seal_key.go has the keys
//
// # Ownership
//
// Memory belongs to its owner from Alloc to Free. Free during a transfer takes effect when that has
// ended. The memory given to a transfer is the caller's again when the call returns, also after an
// error or when the context has ended: the call waits for the requests in progress. Writes are whole
// pages, except at the end of a memory, so that no write has to read.
//
// # Room
//
// A byte of the file is in one of three states. A hole takes no room on the disk. A backed byte
// takes room and is free. An allocated byte belongs to a memory. Alloc takes backed bytes, the
// shortest range that fits. If there are too few, it backs holes (fallocate, in steps of 64 MiB).
// Freed bytes stay backed, because they can be written again at twice the speed of fresh ones
// (measured: 5.1 against 2.5 GiB/s). Backed bytes that were not needed for Config.Idle become holes
// of 4 MiB again, and all of them do with Trim and Close. Where the file system punches no holes, only
// the free end of the file is cut. The file is as long as the volume at most: where the file system
// allows no file of that length (16 TiB on ext4), the volume is full before.
//
// # Several volumes
//
// Volumes that are used side by side have one Stripe. Pace is the time for which a volume has been
// written to, and will be for the bytes that it has accepted. A reservation.Strategy or the monitor
// tries the volume with the lowest Pace first. So all are busy for equally long, and get bytes in
// proportion to their spare bandwidth. A full volume is skipped, and catches up by at most a second
// when it has room again.
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
// With Config.Encrypt only AES-GCM's output reaches a file. Each write is sealed in blocks of at most
// 64 KiB, each as long there as in memory, so that I/O stays direct. A block's offset, tag and nonce
// (40 bytes) are in memory, and on disk only in persisted files. Reading a changed bit, another
// block's bytes or older bytes is a *tier.AlteredError. A write replaces whole blocks; one that
// would change a part of a block is tier.ErrNotSupported. A block whose write failed cannot be read
// until all of it is written again. Bytes that were never written read as zeros.
//
// Each volume has a key of its own: random, or derived from the user's (HKDF, with a random salt).
// It counts its nonces, so none is used twice under a key. With the key of an earlier volume it
// opens that volume's persisted files, and seals nothing. Keys are in this process's memory,
// readable by a reader of that memory or of the system's swap. They protect the bytes on the disk,
// also after a crash, but not their number. Requests pass through mapped memory that is in no
// books: up to EncryptionBuffers, 34 MiB by default.
//
// # What persists
//
// With Config.Persist each memory is a file of its own, and there is no other. Volume.Persist
// writes a header behind the body of a batch, and renames the file: from then on the batch is on
// the disk whatever ends the process. See persisted_file.go and persisted_dir.go.
//
// A memory is in one of four states (persistedState).
//
//   - A part: Alloc has created its file, which the next volume removes.
//   - Owned: its file has a header, and its name is the key. Forget ends the entry, so that the
//     file is a part again, and so does Free before it removes the file.
//   - Found: an earlier process left it. It counts as used, and stays for the next volume at Close.
//   - Lent: Take has handed out the memory of a found one. Own makes it owned, and Free makes it
//     found again.
//
// Written bytes are in the page cache, and nothing is synchronized, so a failure of the system may
// lose any of them. Owners must compare bodies with their own checksums. A damaged header is an error
// of its entry, with a warning that names the file.
//
// The next volume with Persist in Dir takes over one directory whose lock is free. It leaves alone,
// with a warning, a directory with only files of another version, one that needs more than the
// volume's capacity, one of another user, and one with a file that cannot be read. A directory that
// needs another Key is a *disk.KeyError if the volume can take no other, and a warning else.
//
// With Config.Encrypt and a Key the header has the seals of the body's blocks and the salt of their
// key, and is sealed itself. The tail has a proof of the user's key. No key is written. So a
// changed bit of a body, of a header or of a seal in it is found, even if the checksums were
// forged. An older file in the place of a newer one is not found. The number of files and their
// lengths stay readable.
//
// # Locks
//
// A Volume's mutex has rank Backend and guards the books. Those of sealedExtent, speed, buffers and
// notices have rank Device. Each guards its own fields, and nothing slow is done with one locked. A
// transfer's mutex guards its cursor, and speed's is locked inside it.
//
// One token is held across system calls; the mutex is locked inside it. It orders the adding and giving
// back of room: Alloc waits for it only when the backed room is not enough, for as long as one
// fallocate or one hole of 4 MiB takes. Each file that persists has a token, too, whose owner opens it,
// writes its header or changes its name.
package volumes
