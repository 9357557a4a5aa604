// Package disk is the disk tier: volumes that keep memory in spill files.
//
//	Volume (a tier.Pool)                            one a directory
//	├─ segment-0000   one file, nameless where the file system can
//	│  ├ extent ┤├ free, written ┤├ extent ┤├── hole ──┤
//	├─ segment-0001   …
//	│      ▲ Alloc: an Extents (a tier.FileMemory), of one piece or several
//	│      │ WriteAt, ReadAt: requests, some of them under way at a time
//	│  caller + workers ── direct I/O ── the caller's memory
//	└─ keeper          gives written room back that nothing needs
//
// The parts, each in a file: FS and File are what is asked of the system (fs.go);
// Volume opens and closes (volume.go); named files and what killed processes left
// (named.go); Alloc, Free and how room is taken (alloc.go) and given back (keep.go);
// transfers (transfer.go); what encrypts them (seal.go), with which units a request
// holds (holds.go) and the buffers that it passes through (bounce.go); how fast the
// volume is written and whose turn it is (pace.go); with Config.Keep what is kept (kept.go),
// its records on disk (manifest.go, record.go), and how the next volume takes it over (takeover.go).
//
// # Ownership
//
// An Extents belongs to its holder from Alloc to Free. A transfer keeps its room,
// so Free during one takes effect when that has ended. The memory given to a transfer
// is the caller's again when the call returns, also after an error or when the context
// has ended: the call waits for the requests under way.
//
// # Room
//
// A byte of a segment is a hole, which the file system has; or backed, that is free
// and ours; or handed out. Alloc takes what is backed, the lowest segment first, and
// makes holes backed (fallocate, in steps of 64 MiB) when that is not enough. Freed
// room stays backed, because it is written again at twice the speed of fresh room
// (measured: 5.1 against 2.5 GiB/s). What nothing needed for Config.Idle goes back, in
// holes of 4 MiB; so does all of it with Trim and Close.
//
// # Several volumes
//
// Volumes that are used side by side have one Stripe. Each says with Pace for how long it
// has been written to and will be for what it has taken on; who has something to put
// on any disk, a reservation.Strategy or the monitor, asks the one first for which that
// is least. So all are busy for equally long, and bytes go in proportion to the
// bandwidth that each has to spare, whether one writes or many do. A volume that is full is
// passed by, and makes up for no more than a second of that when it has room again.
//
// A volume whose write failed, or whose file system had no room, is asked last for a
// second, after the next failure for two, and so on up to 64; then one Alloc may try it,
// and a write that succeeds ends this. The error itself is returned: an *IOError, or
// a *tier.NoSpaceError, after which a convert.Mover tries the other volumes.
//
// # What is left behind
//
// Nothing, but for what is kept (below): nameless files are gone with the process, however it ends, and named ones
// are removed by the next volume that is opened in the directory (named.go says how it
// knows). Files have mode 0600. No other file in the directory is touched.
//
// # Encryption
//
// With Config.Encrypt only AES-GCM's output reaches a file: units of 64 KiB, each as long
// there as it is in the memory, so that direct I/O stays what it is. A unit's tag and
// nonce (24 bytes) are in memory, and on disk only of what is kept (below), and its number and its memory's are part of what the
// tag says. So a changed bit, another unit's bytes and older bytes of the same unit are all
// found, as a *tier.AlteredError. Whoever writes a part of a unit has the rest read, opened and
// sealed again; a unit that could not be written again, over what was there, is lost
// until all of it is written. What was never written reads as zeros.
//
// Each volume has a key of its own, random, or derived (HKDF, with a random salt) from the
// user's, and counts its nonces; so none is used twice under a key. With a key that it finds
// in use, of what was kept, a volume seals nothing: such memory can be read, and not written. The key is in this
// process's memory as long as the volume is used: who can read that, or the
// system's swap, has it. It protects what lies on the disk, also after a crash, and not its
// length. Requests pass through mapped memory that is in no ledger: up to
// 4 × Depth × Request bytes, 32 MiB, while so many are under way.
//
// # What is kept
//
// Only with Config.Keep, and then only what Volume.Keep was called for: memories that
// hold what they are to hold, and some bytes of their owner's that say what that is. What
// many have in common of these is written once (Volume.KeepWith).
//
//	<Dir>/spillway-kept-<random>/lock, segment-0000, …
//	                            /manifest-<generation>   header · record · record · …
//
// The record is appended after the memories were written; that it has ended is appended
// before their room can be handed out again, or written over it where the disk is full. Both are in the page cache when the call
// returns, and so is what was written, if not on the disk. So a killed process leaves no
// room that is two records', nor a record of bytes that are not there. A system that fails
// may lose any of it; nothing is synchronized, and what is read must be compared with
// checksums of the owner's.
//
// The next volume with Keep in Dir takes over one such directory whose lock is free. It
// lists what the records say (Volume.Kept), which stays where it is and counts as used;
// all other room is free. The owner takes it (Take), puts it back, or has it forgotten; at
// Close what nobody has taken stays, and a directory without anything is removed. Records
// have checksums that also cover their place in the file. One that is damaged, or whose
// segment is missing or too short, is lost, with a warning; so are those that share what
// was damaged. Of two in the same room the younger counts. A manifest of another version or with a damaged header, and a directory
// that needs more than the volume's capacity or belongs to another user, stay as they are, with a
// warning. The format
// is told in manifest.go.
//
// With Config.Encrypt and a Key of the user's, a record holds the seals of its memories'
// units and the salts that their keys were derived with, and its meta is sealed, with the
// rest of the record as part of what the tag says. No key is written. The next volume with the
// same Key derives the old keys again, to read, and one of its own, to write. So a changed
// bit of the files, of a record, or of a seal in it is found, also where somebody has made the
// checksums right, and so are older bytes in the place of what was kept. What cannot
// be told is a record put back together with the bytes of its time: who can write to the
// directory can bring back what was kept there, as he can remove it. Readable stay how many
// memories there are, how long they are and where they lie, how long the meta is, and when
// something was kept and freed. A directory of another Key, or without encryption where the volume
// encrypts, or the other way round, is a *KeyError (ErrKey) if there is none that the volume can
// take, and a warning else; it stays as it is. One in which nothing is kept goes.
//
// # Locks
//
// A Volume's mutex has rank Backend and guards the books; a transfer's has rank
// Device and guards its rest, as do those of a memory's units, of the buffers and of the
// figures behind Pace. They are not held together, and nothing is done under them. Units
// are held by requests, which come to have all that they need at once, in the order in
// which they asked. Adding and giving back room is ordered by a token that is held across the
// system's calls; the mutex is taken inside it, never the other way round. Alloc waits
// for the token only when what is backed is not enough, for as long as one
// fallocate or one hole of 4 MiB takes. The manifest has a token of its own, for which Keep and
// the Free of what is kept wait; who gives the directory up takes it inside the other one, nobody
// else holds both, and it, too, comes before the mutex.
package disk
