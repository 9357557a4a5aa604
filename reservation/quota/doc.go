// Package quota limits how much GPU memory a process, or a group of processes on a
// node, takes by Spillway.
//
//	environment ─▶ Settings ─▶ Quota ──┐
//	program     ─┘                     ├─▶ Device ─▶ tier.Space charges them for
//	other processes ◀─ Ledger ─▶ Lease ┘   │         each byte that it promises
//	                                       ▼
//	                                  a backend's device
//
// A [Quota] is one number over all GPU spaces of a process. A [Lease] is a process's part
// in a ledger that all processes of a node share for one GPU. Both implement tier.Quota:
// the check and the charge are one step, made when bytes are reserved, so that a device
// is never asked for what would be refused. What is above a limit that was lowered stays
// where it is until the monitor has moved it down.
//
// Only what is reserved through Spillway is limited. Other libraries in the same process,
// and other programs on the same GPU, are not: what they hold shows as foreign bytes of a
// space, and nothing here keeps them from taking more.
//
// # The ledger
//
// A ledger is a directory with one directory for each GPU, in which each process has a
// lease: a file of one page that it has mapped and locked. There is no daemon. The kernel
// gives a lock up when its process ends, however that ends, and a lease that nobody has
// locked counts for nothing. Three rules hold over all that are alive:
//
//   - the quotas of all groups together are no more than what is advertised of the GPU:
//     its memory times the oversubscription ratio,
//   - the processes of a group together hold no more than the group's quota,
//   - all processes together hold no more than the GPU has. What does not fit is spilled.
//
// A charge locks nothing: it adds to the process's own word and then adds up everybody's.
// The files must be left alone while processes use them. When they are removed all the
// same, each process notices at its next charge, or when it looks at the ledger, tells
// (BrokenError), and puts its lease back; until then the others do not see what it holds.
// Whoever may write to the
// directory can break the rules, or end a process by cutting its lease short: it is
// for one user's processes, which trust each other. Containers can share it if they
// share the directory and run as the same user.
//
// # Ownership
//
// Who joins a ledger closes the lease, after the spaces over it. A Quota has nothing to
// close. A Device belongs to who made it, and closing it closes the wrapped device.
//
// # Locks
//
// The mutexes here have the rank Backend; subscribers, events and files are never called
// or read with one held.
//
//	… → Reservation → Space → Ledger → Backend
package quota
