// Package gorgonia lets a program that uses gorgonia.org/cu work in an engine's CUDA context, on
// its streams and on its batches: it converts cu's contexts, streams, events and device pointers to
// those of package tier/cuda, and back.
//
//	gorgonia.org/cu    to the engine    from the engine
//	cu.CUContext       Open             Context
//	cu.Stream          AdoptStream      Stream
//	cu.Event           AdoptEvent       Event
//	cu.DevicePtr       Addr             DevicePtr
//
// The CUcontext of a *cu.Ctx is its CUDAContext().
//
// # Building and running
//
// The functions exist with the build tag gorgonia, on Linux on amd64 or arm64, with cgo; in other
// builds the package is empty. Package cu, of version 0.9.6, needs the header cuda.h of CUDA 11 or
// 12 and links the program with libcuda.so.1. It calls cuInit when the program starts and ends the
// process with status 1 where that fails: so such a program does not run on a machine without a GPU
// and its driver, not even with simulated GPUs. The engine binds the same library at run time, as in
// other programs: handles of cu's mean nothing in a library that cuda.Load got by another path.
//
// # Ownership
//
// A conversion copies a handle, which is a number, and transfers nothing: the side that made a
// context, stream, event or allocation destroys it. So a program must not destroy what Context,
// Stream and Event return, and must keep what it gives to Open, AdoptStream and AdoptEvent for as
// long as their comments require. cu has no finalizers except that of a *cu.Ctx, which destroys its
// context: a program must keep a *cu.Ctx reachable, unless its Run runs.
//
// # Threads
//
// The driver has a current context for each thread. An engine makes its own context current for the
// length of each call and restores the one before, so it can be used from any goroutine and
// disturbs no thread of a *cu.Ctx. cu's functions work in the context that is current on the
// calling thread. So a program calls them by the methods of a *cu.Ctx, which has a thread for that,
// or between runtime.LockOSThread, cu.PushCurrentCtx and cu.PopCurrentCtx. A stream belongs to one
// goroutine at a time, whichever side the work on it comes from.
//
// # Batches
//
// The address of a batch in GPU memory is the address of its buffers in the arrays that
// convert/cdevice exports (Array.Buffer), as a cu.DevicePtr. A handle that is open keeps the batch
// there, and so does an array that is not released. A kernel must not write to a batch, because the
// engine may have copies of it in other tiers. It writes to memory of its own: a buffer from a
// reservation (DevicePtr), or memory of cu's, which convert/cdevice imports as a batch. The work
// must be done before the handle is closed, or the array or the buffer released: wait for an event
// behind it.
//
// # Errors
//
// Errors of the driver are those of package tier/cuda, with the call, the code and its name. A
// device or stream that is not one of package tier/cuda, such as a simulated one, is
// tier.ErrNotSupported.
package gorgonia
