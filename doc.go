// Package spillway keeps Apache Arrow record batches in the fastest memory that
// has room for them: GPU memory, pinned host memory, disk. When a memory fills past
// its trigger, a monitor moves batches down until it is below; when work needs
// a batch, it comes back up. A move copies bytes: nothing is encoded again, and
// what comes from disk is verified.
//
//	Engine ─┬─ Plan ── Repository ── partition ── Batch ── image in one space
//	        ├─ Mover      moves batches between spaces, the only one that does
//	        ├─ Monitor    decides what moves down, and when
//	        ├─ Reservations   promises of bytes, and who waits for them
//	        ├─ Admitter    decides which tasks may start
//	        └─ Spaces     gpu:0 · host:0 · disk:0 … each with its ledger
//
// Open makes an Engine from a Config, whose zero value takes everything from the machine: all its
// GPUs, host memory on each NUMA node, and a temporary disk. Configure fills a Config in for a
// machine that Discover has described, without opening anything. An Amount says how large something
// is, and Limits what an engine takes at most beside that.
//
// This package wires the others together, and has names for what most programs need of them: see
// the examples, which import nothing else of this module. Each other package has its own
// documentation.
//
// # Ownership
//
// The engine owns its spaces, plans and batches; Close gives all back and reports
// what is still held. A record given to Repository.Put stays the caller's. A
// batch that a program makes of a payload (Engine.NewBatch) is the program's until it is put
// into a repository or dropped. A
// Handle must be closed, a Grant ended, and a Reservation and a record opened by
// Mover.Record released. A repository's Claim is ended by its owner, or by RunTask to
// which it was given.
//
// # After a crash
//
// What is on a disk dies with the process, unless DiskConfig.Persist is set: then each batch that
// has come to the disk is recorded, and an engine that is opened there later lists it
// (Engine.Persisted) and takes it back (Engine.Adopt), verified. Against a failure of the
// machine this is no help.
//
// # Memory that Go does not see
//
// Host arenas and the simulated GPU lie outside of Go's heap: GOMEMLIMIT does
// not count them. Set it to what the process may use less HostMemory and, without a
// real GPU, less the GPUs' memory.
//
// # Locks
//
// An Engine and a Plan each have one mutex, under which nothing else is called.
// The order of all others is in docs/architecture.md; a build with the tag invariants
// checks it.
package spillway
