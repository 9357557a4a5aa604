// Package cuda binds NVIDIA's driver library libcuda.so.1 at run time, so that one
// binary serves machines with and without a GPU and needs neither toolkit nor cgo.
// It is the only package that calls foreign code; tier/cuda makes a device of it.
//
//	Library   the driver: its version, its devices, what it lacks; what host memory is pinned
//	  │ Open
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
// Asynchronous copies are given host memory by its address, and only such as this
// Library has pinned: memory of Go's heap could be gone before the copy is done.
// Addresses of devices are numbers and never pointers.
//
// The opener or creator of something here ends it. A Device is ended by Close, after what was made
// with its Calls is destroyed, or in two steps where others still use what is in its context: Stop
// ends its thread, and End gives the context up. A Library stays loaded until the process ends, because the driver
// has threads of its own in it.
//
// All errors of the driver are *Error with call, code and name, and match the codes
// (ErrOutOfMemory and so on) with errors.Is. That there is no driver or device to work
// with is a *LoadError, which matches ErrUnavailable.
//
// Its mutexes have the rank Device, the last in the order, and are held for a few
// instructions only, never while the driver is called.
package cuda

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/spillway-db/spillway/internal/labels"
)

// Device is a device, a context of it, and the thread that has it current. It is safe for
// concurrent use. The caller must Close it, after whatever was made with its Calls
// has been destroyed.
type Device struct {
	lib     *Library
	info    DeviceInfo
	handle  int32 // the driver's number of it
	ctx     Context
	primary bool // the context is the device's own, and was retained here

	queue   queue
	stopped chan struct{} // closed when the thread is done
	result  error         // of Stop; to be read when stopped is closed

	calls   Calls
	watches []watched // the thread's
	woken   bool      // the thread has ended a mark whose waiters may sleep
}

// Open opens a device. If ctx is 0 that is with its primary context, which all users of the device
// in this process share. Otherwise ctx is a context that the program has and keeps: it must not be
// destroyed before the device is closed.
func (l *Library) Open(ordinal int, ctx Context) (*Device, error) {
	info, handle, err := l.device(ordinal)
	if err != nil {
		return nil, fmt.Errorf("cuda: device %d: %w", ordinal, err)
	}
	d := &Device{lib: l, info: info, handle: handle, ctx: ctx, primary: ctx == 0, stopped: make(chan struct{})}
	d.calls = Calls{l, d}
	d.queue.wake = make(chan struct{}, 1)
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

// Context returns the device's context, for peers and for programs that share it.
func (d *Device) Context() Context { return d.ctx }

// Here runs f on the caller's goroutine, kept on its thread with the context current for as long,
// and returns its error, or ErrClosed.
func (d *Device) Here(f func(*Calls) error) error { return d.visit(1, f) }

// giveUpTries is how often the driver is called to make a context current for something that is to be
// given up: it would stay for as long as the context. Refusals are not known to follow each other,
// unless the context is lost.
const giveUpTries = 10

// Surely is Here to give something up, for which there is no other chance: if the driver refuses to
// make the context current, it is called again, up to giveUpTries times in all.
func (d *Device) Surely(f func(*Calls) error) error { return d.visit(giveUpTries, f) }

func (d *Device) visit(tries int, f func(*Calls) error) error {
	if !d.queue.enter() {
		return ErrClosed
	}
	defer d.queue.exit()
	return d.current(tries, f)
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

// Close gives up the device and its context: it is Stop, and then End. A second Close returns
// ErrClosed at once.
func (d *Device) Close() error {
	err := d.Stop()
	if err == ErrClosed {
		return err
	}
	return errors.Join(err, d.End(nil))
}

// Stop waits until calls of Here have returned and all marks are reached, and ends the device's
// thread. A stream that waits for what never happens keeps it waiting. The context stays, with what is
// in it, for others to use until End. A second Stop returns ErrClosed at once.
func (d *Device) Stop() error {
	if !d.queue.close() {
		return ErrClosed
	}
	<-d.stopped
	return d.result
}

// End runs f, if it is not nil, on the caller's goroutine with the context current, to destroy what
// is left in it, and gives the context up. It is called once, after Stop.
func (d *Device) End(f func(*Calls) error) (err error) {
	if f != nil {
		err = d.current(giveUpTries, f)
	}
	if d.primary {
		err = errors.Join(err, d.lib.release(d.handle))
	}
	return err
}

// setContext makes ctx current on the thread, 0 for none.
func (l *Library) setContext(ctx Context) error { return l.call(l.cuCtxSetCurrent, uintptr(ctx)) }

// pushContext makes ctx current on the thread until popContext.
func (l *Library) pushContext(ctx Context) error { return l.call(l.cuCtxPushCurrent_v2, uintptr(ctx)) }

func (l *Library) popContext() error { return l.call(l.cuCtxPopCurrent_v2, 0) }
