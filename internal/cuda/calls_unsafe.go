package cuda

import (
	"runtime"
	"unsafe"
)

// Calls are the driver's functions that want a current context. A Device hands
// them to what runs where its context is current, and they are good there until that returns.
type Calls struct {
	lib *Library
	dev *Device
}

// Library returns the driver, whose own functions may be called here as well.
func (c *Calls) Library() *Library { return c.lib }

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

// StreamDone says whether all work on s is done, or how it failed.
func (c *Calls) StreamDone(s Stream) (bool, error) {
	return c.lib.ask(&c.lib.sym.streamQuery, uintptr(s))
}

// SyncStream blocks the thread until all work on s is done; it belongs in Here.
func (c *Calls) SyncStream(s Stream) error {
	return c.lib.call(&c.lib.sym.streamSynchronize, uintptr(s))
}

// Sync blocks the thread until all work of the context is done; it belongs in Here.
func (c *Calls) Sync() error { return c.lib.call(&c.lib.sym.ctxSynchronize) }

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

// EventDone says whether e has happened since it was last recorded; an error is that of the work
// before it.
func (c *Calls) EventDone(e Event) (bool, error) {
	return c.lib.ask(&c.lib.sym.eventQuery, uintptr(e))
}

// SyncEvent blocks the thread until e has happened; it belongs in Here.
func (c *Calls) SyncEvent(e Event) error {
	return c.lib.call(&c.lib.sym.eventSynchronize, uintptr(e))
}

// WaitEvent makes work put on s afterwards wait for e, which may be another device's.
func (c *Calls) WaitEvent(s Stream, e Event) error {
	return c.lib.call(&c.lib.sym.streamWaitEvent, uintptr(s), uintptr(e), 0)
}

// WaitValue makes work put on s afterwards wait until the word at addr, in device memory or
// (by HostDevicePtr) in pinned host memory, is at least value, as a difference that
// wraps. If that never happens the stream, and what waits for it, hangs.
func (c *Calls) WaitValue(s Stream, addr Ptr, value uint32) error {
	return c.lib.call(&c.lib.sym.streamWaitValue, uintptr(s), uintptr(addr), uintptr(value), 0)
}

// WriteValue writes the word at addr when the work on s so far is done.
func (c *Calls) WriteValue(s Stream, addr Ptr, value uint32) error {
	return c.lib.call(&c.lib.sym.streamWriteValue, uintptr(s), uintptr(addr), uintptr(value), 0)
}

// Alloc allocates n bytes. It may wait for the device.
func (c *Calls) Alloc(n int64) (Ptr, error) {
	var p Ptr
	err := c.lib.call(&c.lib.sym.memAlloc, uintptr(unsafe.Pointer(&p)), uintptr(n))
	return p, err
}

// Free gives memory back, and as a rule waits for all work of the device before.
func (c *Calls) Free(p Ptr) error { return c.lib.call(&c.lib.sym.memFree, uintptr(p)) }

// AllocAsync allocates n bytes from pool, 0 for the device's own, for work on s.
func (c *Calls) AllocAsync(s Stream, pool Pool, n int64) (Ptr, error) {
	var p Ptr
	if pool == 0 {
		err := c.lib.call(&c.lib.sym.memAllocAsync, uintptr(unsafe.Pointer(&p)), uintptr(n), uintptr(s))
		return p, err
	}
	err := c.lib.call(&c.lib.sym.memAllocFromPool, uintptr(unsafe.Pointer(&p)), uintptr(n), uintptr(pool), uintptr(s))
	return p, err
}

// FreeAsync gives memory of a pool back when the work on s so far is done.
func (c *Calls) FreeAsync(s Stream, p Ptr) error {
	return c.lib.call(&c.lib.sym.memFreeAsync, uintptr(p), uintptr(s))
}

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
	return c.lib.call(&c.lib.sym.copyPeer, uintptr(dst), uintptr(dstContext), uintptr(src), uintptr(srcContext), uintptr(n), uintptr(s))
}

// Fill sets n bytes to value.
func (c *Calls) Fill(s Stream, dst Ptr, value byte, n int64) error {
	return c.lib.call(&c.lib.sym.fill, uintptr(dst), uintptr(value), uintptr(n), uintptr(s))
}

// copyAttributes says how the copies of a batch are to be done. The driver's
// structure has two hints of places, of 8 bytes each, that pinned and device memory need not.
type copyAttributes struct {
	order uint32
	_     [4]uint32
	flags uint32
}

// CopyBatch does many copies as one piece of work; they have no order among each other.
// If one is wrong none is done. The slice may be used again when it returns.
func (c *Calls) CopyBatch(s Stream, copies []Copy) error {
	n := len(copies)
	if n == 0 {
		return nil
	}
	dst, src, size := make([]uint64, n), make([]uint64, n), make([]uintptr, n)
	for i, p := range copies {
		if p.HostDst != 0 && !c.lib.pinned.hold(p.HostDst, p.Size) || p.HostSrc != 0 && !c.lib.pinned.hold(p.HostSrc, p.Size) {
			return ErrNotPinned
		}
		dst[i], src[i], size[i] = uint64(p.Dst)|uint64(p.HostDst), uint64(p.Src)|uint64(p.HostSrc), uintptr(p.Size)
	}
	const inStreamOrder = 1
	attributes, first := copyAttributes{order: inStreamOrder}, uintptr(0)
	if e := &c.lib.sym.copyBatch2; e.fn != 0 {
		return c.lib.call(e, uintptr(unsafe.Pointer(&dst[0])), uintptr(unsafe.Pointer(&src[0])), uintptr(unsafe.Pointer(&size[0])), uintptr(n),
			uintptr(unsafe.Pointer(&attributes)), uintptr(unsafe.Pointer(&first)), 1, uintptr(s))
	}
	var wrong uintptr // which copy; the error says enough
	return c.lib.call(&c.lib.sym.copyBatch, uintptr(unsafe.Pointer(&dst[0])), uintptr(unsafe.Pointer(&src[0])), uintptr(unsafe.Pointer(&size[0])), uintptr(n),
		uintptr(unsafe.Pointer(&attributes)), uintptr(unsafe.Pointer(&first)), 1, uintptr(unsafe.Pointer(&wrong)), uintptr(s))
}

// EnablePeer lets work of this context reach the memory of another.
func (c *Calls) EnablePeer(peer Context) error {
	return c.lib.call(&c.lib.sym.ctxEnablePeer, uintptr(peer), 0)
}

// DisablePeer takes that back.
func (c *Calls) DisablePeer(peer Context) error {
	return c.lib.call(&c.lib.sym.ctxDisablePeer, uintptr(peer))
}

// LoadModule loads PTX or a binary. PTX must end in a zero byte.
func (c *Calls) LoadModule(image []byte) (Module, error) {
	if len(image) == 0 || image[len(image)-1] != 0 {
		return 0, &Error{Call: c.lib.sym.moduleLoad.name, Code: ErrInvalidValue, Name: "the image does not end in a zero byte"}
	}
	var m Module
	err := c.lib.call(&c.lib.sym.moduleLoad, uintptr(unsafe.Pointer(&m)), uintptr(unsafe.Pointer(&image[0])))
	return m, err
}

// UnloadModule gives m and its functions up.
func (c *Calls) UnloadModule(m Module) error {
	return c.lib.call(&c.lib.sym.moduleUnload, uintptr(m))
}

// Function returns a kernel of m, which is good as long as m is.
func (c *Calls) Function(m Module, name string) (Function, error) {
	text := append([]byte(name), 0)
	var f Function
	err := c.lib.call(&c.lib.sym.moduleFunction, uintptr(unsafe.Pointer(&f)), uintptr(m), uintptr(unsafe.Pointer(&text[0])))
	return f, err
}

// Launch puts a kernel on s. Its arguments must all have 64 bits.
func (c *Calls) Launch(s Stream, f Function, g Grid, args ...uint64) error {
	own := append(make([]uint64, 0, len(args)+1), args...) // not the caller's stack
	at := make([]unsafe.Pointer, len(args)+1)
	for i := range own {
		at[i] = unsafe.Pointer(&own[i])
	}
	err := c.lib.call(&c.lib.sym.launch, uintptr(f), uintptr(g.Blocks), 1, 1, uintptr(g.Threads), 1, 1, 0, uintptr(s),
		uintptr(unsafe.Pointer(&at[0])), 0)
	runtime.KeepAlive(own)
	return err
}
