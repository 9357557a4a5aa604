// Package budget decorates devices. A Budget sets one byte limit for everything that is allocated
// through any number of devices, and Logged logs what is allocated and freed on a device.
//
//	engine ─▶ Device ──┐                        ┌── Device ◀─ another engine, a program
//	          │ inner  └─▶ Budget: limit,     ◀─┘    │ inner
//	          ▼            reserved, peak            ▼
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
// Freed bytes are retired until the device is done with them. Free records an event after each
// free, and Reap credits the frees whose event is done. Reap queries the events, then reaps the
// device, and then credits. So a device that only takes memory back when it is reaped has done so
// before the bytes are credited. A request that does not fit reaps the devices of the budget and
// tries once more.
//
// If the device refuses to record an event, the next event after a free on that stream counts, or
// that nothing is outstanding on the device.
//
// The limit counts only what is allocated through the devices that Wrap returns. Bytes that were on
// a device before, or that others allocate on it, are not charged; they cannot be freed through the
// budget either. Each call of Wrap returns a device that counts by itself.
//
// # Spaces over a device
//
// A tier.Space over the device charges its reservations to the budget (tier.QuotaOf). So other
// users of the budget cannot take what the space has promised, and the space's waiters wake when
// others give bytes back. Promised bytes are charged once: the device charges the larger of what is
// promised and what is allocated through it.
//
// A program that allocates through the same device as a space uses up the space's promises,
// and later draws from them are refused. It should call Wrap for a device of its own, or reserve in
// the space. On devices without a space, asynchronous frees are credited at the next reap or free,
// or when a request does not fit, because a budget has no goroutine.
//
// # Ownership
//
// A caller that owns a wrapped device closes the wrapper, and with it the device. Closing credits
// what was charged. Neither a Budget nor a wrapper has a goroutine, so nothing else needs closing.
//
// # Locks
//
// A budget has one mutex, of rank lockrank.Space because the mutex of its quota, of rank Backend,
// is locked under it. It is never held while a device, an event, a logger or a subscriber is
// called.
package budget
