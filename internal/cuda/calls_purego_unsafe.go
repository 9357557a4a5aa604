//go:build !gorgonia || !cgo || !linux || !(amd64 || arm64)

package cuda

import (
	"sync"
	"unsafe"
)

// The functions of the driver for which gorgonia.org/cu has a name as well are called
// here, and with the tag gorgonia in calls_gorgonia_unsafe.go.

// Linked reports whether the program is linked with a driver library. Then all tests of a binary
// have the same emulator, which cudatest.New resets, and none can be without a function.
const Linked = false

// linked reports whether the library is one that can be worked with: here any is.
func (l *Library) linked() error { return nil }

func (l *Library) retain(ordinal int) (Context, error) {
	dev, err := l.handle(ordinal)
	if err != nil {
		return 0, err
	}
	var ctx Context
	err = l.call(&l.sym.primaryRetain, uintptr(unsafe.Pointer(&ctx)), uintptr(dev))
	return ctx, err
}

func (l *Library) releasePrimary(dev int32) error { return l.call(&l.sym.primaryRelease, uintptr(dev)) }

// setContext makes ctx current on the thread, 0 for none, and pushContext until popContext.
func (l *Library) setContext(ctx Context) error { return l.call(&l.sym.ctxSet, uintptr(ctx)) }

func (l *Library) pushContext(ctx Context) error { return l.call(&l.sym.ctxPush, uintptr(ctx)) }

func (l *Library) popContext() error { return l.call(&l.sym.ctxPop, 0) }

// asked are the arguments of ask, which purego has escape to the heap.
var asked = sync.Pool{New: func() any { return new([1]uintptr) }}

// ask calls e, for which ErrNotReady is no error but the answer no. It allocates nothing: the thread
// of a device may call it a million times a second.
func (l *Library) ask(e *entry, handle uintptr) (bool, error) {
	args := asked.Get().(*[1]uintptr)
	defer asked.Put(args)
	args[0] = handle
	switch code := invoke(e.fn, args[:]); code {
	case 0:
		return true, nil
	case ErrNotReady:
		return false, nil
	default:
		return false, l.failed(e, code)
	}
}

// NewStream creates a stream that does not wait for the default one.
func (c *Calls) NewStream() (Stream, error) {
	const nonBlocking = 1
	var s Stream
	err := c.lib.call(&c.lib.sym.streamCreate, uintptr(unsafe.Pointer(&s)), nonBlocking)
	return s, err
}

// DestroyStream gives s up when its work is done, and returns before that.
func (c *Calls) DestroyStream(s Stream) error {
	return c.lib.call(&c.lib.sym.streamDestroy, uintptr(s))
}

// SyncStream blocks the thread until all work on s is done; it belongs in Here.
func (c *Calls) SyncStream(s Stream) error {
	return c.lib.call(&c.lib.sym.streamSynchronize, uintptr(s))
}

// NewEvent creates an event that keeps no time.
func (c *Calls) NewEvent() (Event, error) {
	const disableTiming = 2
	var e Event
	err := c.lib.call(&c.lib.sym.eventCreate, uintptr(unsafe.Pointer(&e)), disableTiming)
	return e, err
}

// DestroyEvent gives e up.
func (c *Calls) DestroyEvent(e Event) error { return c.lib.call(&c.lib.sym.eventDestroy, uintptr(e)) }

// Record has e happen when the work on s so far is done.
func (c *Calls) Record(e Event, s Stream) error {
	return c.lib.call(&c.lib.sym.eventRecord, uintptr(e), uintptr(s))
}

// EventDone reports whether e has happened since it was last recorded; an error is that of the work
// before it.
func (c *Calls) EventDone(e Event) (bool, error) {
	return c.lib.ask(&c.lib.sym.eventQuery, uintptr(e))
}

// WaitEvent makes work put on s afterwards wait for e, which may be another device's.
func (c *Calls) WaitEvent(s Stream, e Event) error {
	return c.lib.call(&c.lib.sym.streamWaitEvent, uintptr(s), uintptr(e), 0)
}

// Alloc allocates n bytes. It may wait for the device.
func (c *Calls) Alloc(n int64) (Ptr, error) {
	var p Ptr
	err := c.lib.call(&c.lib.sym.memAlloc, uintptr(unsafe.Pointer(&p)), uintptr(n))
	return p, err
}

// Free gives memory back, and as a rule waits for all work of the device before.
func (c *Calls) Free(p Ptr) error { return c.lib.call(&c.lib.sym.memFree, uintptr(p)) }

// MemInfo returns the free and total bytes of the device.
func (c *Calls) MemInfo() (free, total int64, err error) {
	var f, t uintptr
	err = c.lib.call(&c.lib.sym.memInfo, uintptr(unsafe.Pointer(&f)), uintptr(unsafe.Pointer(&t)))
	return int64(f), int64(t), err
}

// CopyToDevice copies n bytes from pinned host memory at src. Neither side may be
// touched before the copy is done.
func (c *Calls) CopyToDevice(s Stream, dst Ptr, src uintptr, n int64) error {
	if !c.lib.pinned.hold(src, n) {
		return ErrNotPinned
	}
	return c.lib.call(&c.lib.sym.copyToDevice, uintptr(dst), src, uintptr(n), uintptr(s))
}

// CopyToHost copies n bytes to pinned host memory at dst.
func (c *Calls) CopyToHost(s Stream, dst uintptr, src Ptr, n int64) error {
	if !c.lib.pinned.hold(dst, n) {
		return ErrNotPinned
	}
	return c.lib.call(&c.lib.sym.copyToHost, dst, uintptr(src), uintptr(n), uintptr(s))
}

// CopyOnDevice copies n bytes between ranges that do not overlap.
func (c *Calls) CopyOnDevice(s Stream, dst, src Ptr, n int64) error {
	return c.lib.call(&c.lib.sym.copyOnDevice, uintptr(dst), uintptr(src), uintptr(n), uintptr(s))
}

// CopyPeer copies n bytes between the devices of two contexts, through the host if they
// cannot reach each other.
func (c *Calls) CopyPeer(s Stream, dst Ptr, dstContext Context, src Ptr, srcContext Context, n int64) error {
	return c.lib.call(
		&c.lib.sym.copyPeer,
		uintptr(dst),
		uintptr(dstContext),
		uintptr(src),
		uintptr(srcContext),
		uintptr(n),
		uintptr(s),
	)
}

// Fill sets n bytes to value.
func (c *Calls) Fill(s Stream, dst Ptr, value byte, n int64) error {
	return c.lib.call(&c.lib.sym.fill, uintptr(dst), uintptr(value), uintptr(n), uintptr(s))
}

// EnablePeer lets work of this context reach the memory of another.
func (c *Calls) EnablePeer(peer Context) error {
	return c.lib.call(&c.lib.sym.ctxEnablePeer, uintptr(peer), 0)
}
