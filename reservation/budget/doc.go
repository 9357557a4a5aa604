// Package budget decorates devices: one limit over what is allocated through any
// number of them, and a log of their calls.
//
//	engine ─▶ Device ──┐                        ┌── Device ◀─ another engine, a program
//	          │ inner  └─▶ Budget: limit,     ◀─┘    │ inner
//	          ▼            reserved, totals          ▼
//	          Logged device                          a backend's device
//	          │ inner
//	          ▼
//	          a backend's device
//
// Both decorators are devices themselves, with a method Unwrap, and stack in any
// order over any device: budget over logging logs what was let through; logging over
// budget also what was refused.
//
// # Books
//
// What a device charges for an allocation is reserved before the device is called, in one step with
// the check against the limit. It is given back if the call fails. While no call is in progress,
//
//	reserved = live + retired
//
// where what was freed is retired until the device is known to be done with it: a
// budget over a device that frees asynchronously keeps the bytes as long as the
// device does. A request that does not fit, but would without what is retired, has
// the devices reaped once and is tried once more.
//
// The end of a free is found as follows. An event is recorded behind it on its stream. The event is
// queried first, and then the device is reaped. So a device that takes memory back only at a reap
// has done so when the budget credits. That is exact whatever else happens.
//
// In addition the device's Outstanding is compared with what must be live. On a device that frees
// synchronously it shows the end before the event does. It is the only source where there is no
// event, because the device refused to record it or its stream has failed. It is also the only
// source for allocations older than the budget, whose sizes are unknown. It never credits too
// early. While other allocations are being made it may be late, and it is exact when they are done.
//
// # Spaces over a device
//
// A tier.Space over the device charges its promises to the budget (tier.QuotaOf). So other users of
// the budget cannot take what is promised, and a waiter in the space is woken when others give
// something back. What a space has promised is charged once: the device charges the larger of what
// is promised and what is allocated through it.
//
// A program that allocates beside a space uses up the space's promises, whose later draws are then
// refused. It should use a device of its own, or reserve in the space. On devices without a space,
// asynchronous frees are credited at the next reap, free or allocation: a budget has no goroutine
// that would look.
//
// # Ownership
//
// The caller of Wrap closes the wrapper, and with it the device, if the device was the caller's to
// close. Closing credits what was charged. If the device stays in use elsewhere, Budget.Release
// removes it from the budget. A Budget needs no owner: it has no goroutine and nothing to close.
//
// # Locks
//
// A budget has one mutex, of rank Backend, for its books and those of its devices:
//
//	… → Reservation → Space → Ledger → Backend
//
// It is never held while a device, an event, a logger or a subscriber is called.
package budget
