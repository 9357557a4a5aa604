// Package cuda binds NVIDIA's driver library libcuda.so.1 at run time, so that one
// binary serves machines with and without a GPU and needs neither toolkit nor cgo.
// It is the only package that calls foreign code; tier/cuda makes a device of it.
//
//	Library   the driver: its version, its devices, what it lacks; what host memory is pinned
//	  │ Open, Adopt
//	Device    one device, a context, and the thread that has it current
//	  │ Do, Post: on that thread   Here: on the caller's, made fit for it
//	Calls     the driver's functions, as methods
//	  │ Mark
//	Mark      a point in a stream's work: a channel that is closed when it is reached
//
// A context is current on a thread of the operating system, and goroutines change
// threads. So each Device has a goroutine locked to a thread on which its
// context is current, and runs there what it is given, in that order. Work handed over
// while it is busy is taken up in one go, so that a call costs less the more there are.
// Do waits for the answer; Post does not, and is for those who have checked their arguments
// and learn of the rest from a Mark. An answer from another thread costs two changes of threads, tens of
// microseconds on a busy machine. Here costs half of one: it keeps the caller's goroutine on the
// thread that it is on, and pushes the context there for as long.
//
// The device's thread looks at the events of all marks, the oldest of each stream, ever more
// seldom the longer it has waited; no thread is blocked for an event.
//
// One thing is computed on the device: the digest of tier, by a kernel of ours. It is PTX, text that
// the driver compiles, and loaded when it is first wanted (PrepareDigest), since most devices never
// need it. A driver without a compiler is no mistake of anybody's, and is told as ErrNoKernel.
//
// Asynchronous copies are given host memory by its address, and only such as this
// Library has pinned: memory of Go's heap could be gone before the copy is done.
// Addresses of devices are numbers and never pointers.
//
// Whoever opens or creates something here ends it: a Device by Close, when what was made
// with its Calls is destroyed. A Library stays loaded until the process ends, for the
// driver has threads of its own in it.
//
// All errors of the driver are *Error with call, code and name, and match the codes
// (ErrOutOfMemory and so on) with errors.Is. That there is no driver or device to work
// with is a *LoadError, which matches ErrUnavailable.
//
// With the tag gorgonia, on Linux and with cgo, contexts, streams, events, copies and plain memory go through
// gorgonia.org/cu, so that a program which holds contexts of cu's can share them with
// the engine: ContextOf makes of one what Adopt takes, StreamOf and EventOf let work of both sides be
// ordered. Kernels, and what cu has no name for (pools, pinned memory, batches of copies, the newer waits for
// words), are still bound at run time. Such a program is linked with libcuda.so.1, ends before it
// begins where there is no device, and can load no other library; the build needs cuda.h of CUDA 11 or 12. In
// other builds, which cannot have cu, the tag has no effect.
//
// Its mutexes have the rank Device, the last in the order, and are held for a few
// instructions only, never while the driver is called. What Do and Post run is run without
// one, but on the thread of the device, and so must not wait for that device.
package cuda
