// Package cuda binds NVIDIA's driver library libcuda.so.1 at run time, so that one
// binary serves machines with and without a GPU and needs neither toolkit nor cgo.
// It is the only package that calls foreign code; tier/cuda makes a device of it.
//
//	Library   the driver: its version, its devices, what it lacks; what host memory is pinned
//	  │ Open, Adopt
//	Device    one device, a context, and the thread that has it current
//	  │ Here: on the caller's thread, made fit for it
//	Calls     the driver's functions, as methods
//	  │ Mark
//	Mark      a point in a stream's work: a channel that is closed when it is reached
//
// A context is current on a thread of the operating system, and goroutines change threads. So Here
// keeps the caller's goroutine on its thread, and pushes the context there for as long. Each Device
// also has a goroutine locked to a thread on which its context is current, to look at events.
//
// The device's thread looks at the events of all marks, the oldest of each stream, ever more
// seldom the longer it has waited; no thread is blocked for an event.
//
// One thing is computed on the device: the digest of tier, by a kernel of ours. It is PTX, text
// that the driver compiles. It is loaded at its first use (PrepareDigest), since most devices never
// need it. A driver without a compiler is no mistake; it is reported as ErrNoKernel.
//
// Asynchronous copies are given host memory by its address, and only such as this
// Library has pinned: memory of Go's heap could be gone before the copy is done.
// Addresses of devices are numbers and never pointers.
//
// The opener or creator of something here ends it. A Device is ended by Close, after what was made
// with its Calls is destroyed. A Library stays loaded until the process ends, because the driver
// has threads of its own in it.
//
// All errors of the driver are *Error with call, code and name, and match the codes
// (ErrOutOfMemory and so on) with errors.Is. That there is no driver or device to work
// with is a *LoadError, which matches ErrUnavailable.
//
// With the tag gorgonia, on Linux and with cgo, contexts, streams, events, copies and plain memory
// go through gorgonia.org/cu, and ContextOf and the functions next to it convert cu's handles, for
// package tier/cuda/gorgonia. Functions that cu has no name for are still bound at run time:
// kernels, pools, pinned memory, batches of copies, the newer waits for words. Such a program is
// linked with libcuda.so.1, exits at its start where there is no device, and can load no other
// library. The build needs cuda.h of CUDA 11 or 12. Where cu cannot be built, the tag has no
// effect.
//
// Its mutexes have the rank Device, the last in the order, and are held for a few
// instructions only, never while the driver is called.
package cuda

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/labels"
)

// Device is a device, a context of it, and the thread that has it current. It is safe for
// concurrent use. The caller must Close it, after whatever was made with its Calls
// has been destroyed.
type Device struct {
	lib     *Library
	info    DeviceInfo
	ctx     Context
	primary bool        // the context is the device's own, and was retained here
	keep    atomic.Bool // the context outlives the thread: Detach was called

	queue   queue
	stopped chan struct{} // closed when the thread is done
	result  error         // of closing; to be read when stopped is closed

	calls   Calls
	watches []watched // the thread's
	woken   bool      // the thread has ended a mark whose waiters may sleep
	capture int32     // what it minded of others' graphs before it was the thread of the device

	loading chan struct{} // holds a token while a goroutine loads the kernel, or reads the next fields
	kernel  kernel
}

// Open opens a device with its primary context, which all users of the device in this process
// share.
func (l *Library) Open(ordinal int) (*Device, error) { return l.open(ordinal, 0) }

// Adopt opens a device with a context that the program has and keeps: it must not be
// destroyed before the device is closed.
func (l *Library) Adopt(ordinal int, ctx Context) (*Device, error) {
	if ctx == 0 {
		return nil, errors.New("cuda: no context to adopt")
	}
	return l.open(ordinal, ctx)
}

func (l *Library) open(ordinal int, ctx Context) (*Device, error) {
	info, err := l.device(ordinal)
	if err != nil {
		return nil, fmt.Errorf("cuda: device %d: %w", ordinal, err)
	}
	d := &Device{lib: l, info: info, ctx: ctx, primary: ctx == 0, stopped: make(chan struct{})}
	d.calls = Calls{lib: l, dev: d}
	d.queue.wake = make(chan struct{}, 1)
	d.loading = make(chan struct{}, 1)
	ready := make(chan error, 1)
	go func() {
		labels.GPU.Set()
		d.thread(ready)
	}()
	if err := <-ready; err != nil {
		<-d.stopped
		return nil, fmt.Errorf("cuda: device %d: %w", ordinal, err)
	}
	return d, nil
}

// Info describes the device.
func (d *Device) Info() DeviceInfo { return d.info }

// Library returns the driver.
func (d *Device) Library() *Library { return d.lib }

// Context returns the device's context, for peers and for programs that share it.
func (d *Device) Context() Context { return d.ctx }

// Here runs f on the caller's goroutine, kept on its thread with the context current for as long,
// and returns its error, or ErrClosed.
func (d *Device) Here(f func(*Calls) error) error {
	if !d.queue.enter() {
		return ErrClosed
	}
	defer d.queue.exit()
	return d.current(1, f)
}

// giveUpTries is how often the driver is called to make a context current for something that is to be
// given up: it would stay for as long as the context. Refusals are not known to follow each other,
// unless the context is lost.
const giveUpTries = 10

// Surely is Here to give something up, for which there is no other chance: if the driver refuses to
// make the context current, it is called again, up to giveUpTries times in all.
func (d *Device) Surely(f func(*Calls) error) error {
	if !d.queue.enter() {
		return ErrClosed
	}
	defer d.queue.exit()
	return d.current(giveUpTries, f)
}

// current runs f on the caller's goroutine with the context current. The driver is called to make it
// current up to so many times.
func (d *Device) current(tries int, f func(*Calls) error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := d.lib.pushContext(d.ctx)
	for ; err != nil && tries > 1; tries-- {
		err = d.lib.pushContext(d.ctx)
	}
	if err != nil {
		return err
	}
	// If popping fails the context stays on the thread's stack. No code relies on that: all calls
	// here come after a push, or on a device's own thread.
	defer func() { _ = d.lib.popContext() }()
	if before, refused := d.lib.captureMode(relaxed); refused == nil {
		defer func() { _, _ = d.lib.captureMode(before) }()
	}
	return f(&d.calls)
}

// relaxed is the mode in which a thread does not disturb the graphs that others record, see
// captureMode.
const relaxed = 2

// Close waits until calls of Here have returned and all marks are reached, and gives the context
// up. A stream that waits for what never happens keeps it waiting. A second Close returns ErrClosed
// at once.
func (d *Device) Close() error {
	if !d.queue.close() {
		return ErrClosed
	}
	<-d.stopped
	return d.result
}

// Rest is the context of a device that is closed, while something in it is needed still.
type Rest struct{ dev *Device }

// Detach is Close, except for the context: that stays until Rest.End is called, once. What is in it
// stays as it is, and may be used by others meanwhile. The rest has no thread.
func (d *Device) Detach() (*Rest, error) {
	d.keep.Store(true)
	return &Rest{d}, d.Close()
}

// End runs f on the caller's goroutine with the context current, to destroy what is left, and gives
// the context up.
func (r *Rest) End(f func(*Calls) error) error {
	err := r.dev.current(giveUpTries, f)
	if r.dev.primary {
		err = errors.Join(err, r.dev.lib.release(r.dev.info.Ordinal))
	}
	return err
}

// enter makes the context current on the thread.
func (d *Device) enter() (err error) {
	if d.primary {
		if d.ctx, err = d.lib.retain(d.info.Ordinal); err != nil {
			return err
		}
	}
	if err = d.lib.setContext(d.ctx); err != nil && d.primary {
		err = errors.Join(err, d.lib.release(d.info.Ordinal))
	}
	if err == nil {
		// Refused, or not there: questions about events wait for the end of what others record.
		if before, refused := d.lib.captureMode(relaxed); refused == nil {
			d.capture = before
		}
	}
	return err
}

// leave gives up what the thread has, and reports whether the thread is as it was.
func (d *Device) leave() (clean bool) {
	var errs []error
	if d.kernel.module != 0 {
		errs = append(errs, d.calls.UnloadModule(d.kernel.module))
	}
	for _, e := range d.queue.mu.free { // there is no other user any more
		errs = append(errs, d.calls.DestroyEvent(e))
	}
	_, _ = d.lib.captureMode(d.capture)
	err := d.lib.setContext(0)
	errs = append(errs, err)
	if d.primary && !d.keep.Load() {
		errs = append(errs, d.lib.release(d.info.Ordinal))
	}
	d.result = errors.Join(errs...)
	return err == nil
}
