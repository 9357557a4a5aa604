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
// A context is current on a thread of the operating system, and goroutines change threads. So each
// Device has a goroutine locked to a thread on which its context is current. It runs the tasks that
// it is given there, in order. Tasks queued while it is busy are taken together, so that a call
// costs less the more there are. Do waits for the answer. Post does not wait: its callers have
// checked their arguments, and learn the rest from a Mark. An answer from another thread costs two
// changes of threads, tens of microseconds on a busy machine. Here costs half of one: it keeps the
// caller's goroutine on its thread, and pushes the context there for as long.
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
// go through gorgonia.org/cu, and ContextOf and the functions beside it convert cu's handles, for
// package tier/cuda/gorgonia. Functions that cu has no name for are still bound at run time:
// kernels, pools, pinned memory, batches of copies, the newer waits for words. Such a program is
// linked with libcuda.so.1, exits at its start where there is no device, and can load no other
// library. The build needs cuda.h of CUDA 11 or 12. Where cu cannot be built, the tag has no
// effect.
//
// Its mutexes have the rank Device, the last in the order, and are held for a few
// instructions only, never while the driver is called. What Do and Post run is run without
// one, but on the thread of the device, and so must not wait for that device.
package cuda

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
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
	replies sync.Pool     // of *reply
	stopped chan struct{} // closed when the thread is done
	result  error         // of closing; to be read when stopped is closed

	calls   Calls
	watches watches // the thread's
	woken   bool    // the thread has ended a mark whose waiters may sleep
	capture int32   // what it minded of others' graphs before it was the thread of the device
	kernels kernels
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
	d.replies.New = func() any { return &reply{done: make(chan struct{}, 1)} }
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

// Do runs f on the device's thread, behind what was handed over before, and returns its
// error, or ErrClosed. f must be brief, must not wait for this device, and must not end
// its goroutine (which t.Fatal does). A panic in it is the caller's.
func (d *Device) Do(f func(*Calls) error) error {
	r := d.replies.Get().(*reply)
	if _, ok := d.queue.put(task{f: f, reply: r}); !ok {
		d.replies.Put(r)
		return ErrClosed
	}
	<-r.done
	err, panicked := r.err, r.panicked
	r.err, r.panicked = nil, nil
	d.replies.Put(r)
	if panicked != nil {
		panic(panicked)
	}
	return err
}

// backlog is how many tasks may be queued before Post waits as well, so that callers faster than
// the driver cannot fill the memory with them. The driver itself makes callers wait when about as
// many kernels are queued on a stream.
const backlog = 1024

// Post runs f as Do does, but does not wait for it, unless the queue is very long. f must report
// its results itself. ErrClosed means that it will not run. It must not be called on the device's
// thread.
func (d *Device) Post(f func(*Calls)) error {
	waiting, ok := d.queue.put(task{post: f})
	switch {
	case !ok:
		return ErrClosed
	case waiting >= backlog:
		_ = d.Do(func(*Calls) error { return nil }) // closed meanwhile: it runs nevertheless
	}
	return nil
}

// Here runs f on the caller's goroutine, kept on its thread with the context current for as long,
// and returns its error, or ErrClosed. It is for calls that take long, which would keep others
// waiting on the device's thread, and for those whose answer is wanted at once: it costs no change
// of threads. It has no order with what Do and Post run.
func (d *Device) Here(f func(*Calls) error) error {
	if !d.queue.enter() {
		return ErrClosed
	}
	defer d.queue.exit()
	return d.current(f)
}

// current runs f on the caller's goroutine with the context current.
func (d *Device) current(f func(*Calls) error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := d.lib.pushContext(d.ctx); err != nil {
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

// Close runs what was handed over, waits until calls of Here have returned and all marks are
// reached, and gives the context up. A stream that waits for what never happens keeps it waiting. A
// second Close returns ErrClosed at once.
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
	called := false
	run := func(c *Calls) error { called = true; return f(c) }
	err := r.dev.current(run)
	if !called { // no thread has it current: a driver that refused that is called once more
		err = r.dev.current(run)
	}
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
	errs := []error{d.kernels.unload(&d.calls)}
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
