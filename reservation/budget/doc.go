// Package budget decorates devices. A Budget sets one byte limit for everything that is allocated
// through any number of devices, and Logged logs the calls of a device.
//
//	engine ─▶ Device ──┐                        ┌── Device ◀─ another engine, a program
//	          │ inner  └─▶ Budget: limit,     ◀─┘    │ inner
//	          ▼            reserved, totals          ▼
//	          Logged device                          a backend's device
//	          │ inner
//	          ▼
//	          a backend's device
//
// Both decorators are devices themselves, have a method Unwrap, and stack in any order over any
// device. A budget over a logged device logs the calls that the budget lets through. A logged
// device over a budget also logs the calls that the budget refuses.
//
// # Accounting
//
// A budget reserves what the device charges for an allocation before it calls the device, in one
// step with the check against the limit. It rolls the reservation back if the call fails or panics.
// While no call is in progress,
//
//	reserved = live + retired
//
// Freed bytes are retired until the device is known to be done with them. A request that does not
// fit, but would if everything retired were free, makes the budget reap its devices once and try
// again.
//
// Reap finds finished frees in two ways. Free records an event after the free, and a free whose
// event is done is finished. Independently of that, the bytes allocated so far less the device's
// Outstanding are finished. Neither can be too large, so Reap credits up to the larger of the two.
//
//   - Events are exact even while other allocations are in progress. They cannot be used if the
//     device refuses to record them or their stream has failed, and for allocations that are older
//     than the budget, whose sizes are unknown.
//   - Outstanding covers these cases, and on a device that frees synchronously it shows the end of
//     a free before the event does. While Alloc calls are in progress it may include their bytes,
//     so the credit may be late by as much. It is exact when they have returned.
//
// Reap queries the events, then reaps the device, and then credits. So a device that only takes
// memory back when it is reaped has done so before the bytes are credited.
//
// # Spaces over a device
//
// A tier.Space over the device charges its reservations to the budget (tier.QuotaOf). So other
// users of the budget cannot take what the space has promised, and the space's waiters wake when
// others give bytes back. Promised bytes are charged once: the device charges the larger of what is
// promised and what is allocated through it.
//
// A program that allocates through the same device beside a space uses up the space's promises,
// and later draws from them are refused. It should use a device of its own, or reserve in the
// space. On devices without a space, asynchronous frees are credited at the next reap or free,
// or when a request does not fit, because a budget has no goroutine.
//
// # Ownership
//
// The caller of Wrap closes the wrapper, and with it the device, if the caller owns the device.
// Closing credits what was charged. If the device stays in use elsewhere, Budget.Release removes it
// from the budget. A Budget needs no owner: it has no goroutine and nothing to close.
//
// # Locks
//
// A budget has one mutex, of rank lockrank.Backend, for its own counters and those of its devices.
// It is never held while a device, an event, a logger or a subscriber is called.
package budget
