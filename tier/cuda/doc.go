// Package cuda makes NVIDIA GPUs devices of the engine. The driver is bound at run
// time, so a program needs no toolkit and no build flags, and runs where there is no
// GPU, too: Load says then what is missing.
//
//	Driver    NVIDIA's driver library, loaded
//	  │ Open
//	Device    a tier.Device, tier.Computer, tier.Pinner and tier.Borrower over one GPU's context
//	  │ NewStream                      │ Record
//	stream    a stream of the GPU's    event    a point in a stream's work, and what the host has to do there
//
// # Memory
//
// Memory is allocated in the order of streams from a pool of the device's own, which keeps
// what was freed for the next allocation and shares it with nobody. Where the driver or the
// GPU has no pools, the device takes its memory in one piece when it is opened and hands
// it out itself, for the driver's other functions wait for all work of a GPU. Each device knows
// its allocations, so that mistakes in arguments are refused before they reach the driver.
//
// What others have allocated on the GPU, in whatever way, can be worked with while it is borrowed
// (tier.Borrower); the driver is asked whether it is there. Events are shared with others, too:
// ShareEvent makes a CUevent behind a stream's work, and AwaitShared waits for somebody else's.
// While others have been given memory of the device's (tier.Lender), Close leaves its memory, its
// context and those events, and no thread; the last of them gives these up.
//
// What is freed is retired until the device has come to that point of its stream. Each event
// takes notice of the frees before it.
//
// # Host memory
//
// A GPU copies asynchronously only from and to memory that its driver has pinned. Pin does so for
// an arena, once. Other memory is copied by way of pinned memory of the device's own, which costs
// time and as much memory as is under way, of which a rest is kept; so works everything, but
// nothing fast. No memory of Go's heap is ever given to the driver for a copy.
//
// # Failures
//
// A driver tells of work that failed when it is asked about an event. For a real GPU that is the
// end of its context: every call fails from then on, with the same error, and what the device held
// is lost. So frees count as done then, and events as reached, with that error: nobody waits for
// what cannot come. Who asked to be told (OnLost) is told before anybody is given such an error.
// The device can still be closed.
//
// Errors of the driver are wrapped and say call, code and name. No driver or no device to work with
// is an error that matches tier.ErrNotSupported and says what was looked for.
//
// Who opens a device closes it. Its mutex has the rank Device, the last in the order, and is not
// held while the driver is called.
package cuda
