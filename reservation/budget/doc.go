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
// What a device charges for an allocation is reserved before the device is called,
// in one step with the check against the limit, and given back if it fails. While
// no call is under way,
//
//	reserved = live + retired
//
// where what was freed is retired until the device is known to be done with it: a
// budget over a device that frees asynchronously keeps the bytes as long as the
// device does. A request that does not fit, but would without what is retired, has
// the devices reaped once and is tried once more.
//
// How it is known that a free is over: an event is recorded behind it on its
// stream. Its being done is looked at first, and then the device is told to reap, so
// that one which takes memory back only then has done so when the budget credits.
// That is exact whatever else goes on. Beside that the device's Outstanding is
// compared with what must be live: of a device that frees synchronously it tells
// before the event does, and it alone tells where no event can be had, because the
// device refused to record it or its stream has failed, and of allocations that are
// older than the budget, whose sizes nobody has told it. It never credits too early;
// while other allocations are being made it may be late, and is exact when they are
// done.
//
// # Spaces over a device
//
// A tier.Space over the device charges its promises to the budget (tier.QuotaOf). So who shares
// the budget cannot take away what is promised, and who waits in the space is woken when others
// give something back. What a space has promised is charged once: the device takes the larger of
// what is promised and what is allocated through it. A program that allocates beside a space does
// so out of its promises, and they are refused when they come to draw. It should use a device of
// its own, or reserve in the space. What others free asynchronously on devices without a space is
// seen when they reap, free again or allocate: a budget has no goroutine that would look.
//
// # Ownership
//
// Who wraps a device closes the wrapper, and by that the device, if the device was
// theirs to close. Closing credits what was charged. A Budget belongs to nobody in
// particular: it has no goroutine and nothing to close.
//
// # Locks
//
// A budget has one mutex, of rank Backend, for its books and those of its devices:
//
//	… → Reservation → Space → Ledger → Backend
//
// It is never held while a device, an event, a logger or a subscriber is called.
package budget
