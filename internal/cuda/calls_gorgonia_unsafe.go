//go:build gorgonia && cgo && linux && (amd64 || arm64)

package cuda

import (
	"errors"
	"fmt"
	"reflect"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/spillway-db/spillway/internal/dynlib"
)

// This file calls the driver through gorgonia.org/cu where cu has a name for the function. The
// methods of the same names in calls_purego_unsafe.go document them. The other functions are bound
// at run time as without the tag, in the library that cu links the program with.

// Linked reports whether the program is linked with a driver library. Then all tests of a binary
// share one emulator, which cudatest.New resets, and it has all functions.
const Linked = true

// ErrNotLinked means that a library is not the one that the program is linked with. Contexts that
// cu makes do not exist in another library.
var ErrNotLinked = errors.New("the program is linked with another CUDA driver library")

// ContextOf, StreamOf and EventOf return handles of cu's as this package's; CUContextOf, CUStreamOf
// and CUEventOf are their inverses. A handle is the same number on both sides, and conversion
// changes nothing about who destroys what it names.
func ContextOf(ctx cu.CUContext) Context { return as[Context](ctx) }

// StreamOf is explained at ContextOf.
func StreamOf(s cu.Stream) Stream { return as[Stream](s) }

// EventOf is explained at ContextOf.
func EventOf(e cu.Event) Event { return as[Event](e) }

// CUContextOf is explained at ContextOf.
func CUContextOf(ctx Context) cu.CUContext { return as[cu.CUContext](ctx) }

// CUStreamOf is explained at ContextOf.
func CUStreamOf(s Stream) cu.Stream { return as[cu.Stream](s) }

// CUEventOf is explained at ContextOf.
func CUEventOf(e Event) cu.Event { return as[cu.Event](e) }

// as returns h with its bits unchanged as another type. cu's handles are structs of one private
// field, so there is no other way to read or to make one.
func as[To, From any](h From) To { return *(*To)(unsafe.Pointer(&h)) }

// These declarations do not compile if cu's types hold more than a handle.
var (
	_ [unsafe.Sizeof(Context(0))]byte = [unsafe.Sizeof(cu.CUContext{})]byte{}
	_ [unsafe.Sizeof(Stream(0))]byte  = [unsafe.Sizeof(cu.Stream{})]byte{}
	_ [unsafe.Sizeof(Event(0))]byte   = [unsafe.Sizeof(cu.Event{})]byte{}
	_ [unsafe.Sizeof(Ptr(0))]byte     = [unsafe.Sizeof(cu.DevicePtr(0))]byte{}
)

// hostPointer returns an address as cu wants it. The memory is pinned, and so is not Go's.
func hostPointer(addr uintptr) unsafe.Pointer { return as[unsafe.Pointer](addr) }

// linked returns an error unless the library is the one that cu calls.
func (l *Library) linked() error {
	from, err := dynlib.Open(DefaultPath)
	if err != nil {
		return &LoadError{Path: l.path, Reason: ErrNotLinked, Cause: err}
	}
	defer from.Close() // it stays loaded: the program needs it
	if from.Find(l.sym.init.name) != l.sym.init.fn {
		detail := fmt.Sprintf("built with the tag gorgonia, it uses %s", DefaultPath)
		return &LoadError{Path: l.path, Reason: ErrNotLinked, Detail: detail}
	}
	return nil
}

// wrap returns cu's error of a call as an *Error, nil if err is nil.
func (l *Library) wrap(e *entry, err error) error {
	if err == nil {
		return nil
	}
	return l.failed(e, Code(reflect.ValueOf(err).Int())) // cu's error type is private, and an int
}

// done returns the result of a query whether work is done.
func (l *Library) done(e *entry, err error) (bool, error) {
	if err == cu.NotReady {
		return false, nil
	}
	return err == nil, l.wrap(e, err)
}

func (l *Library) retain(ordinal int) (Context, error) {
	dev, err := l.handle(ordinal)
	if err != nil {
		return 0, err
	}
	ctx, err := cu.Device(dev).RetainPrimaryCtx()
	return ContextOf(ctx), l.wrap(&l.sym.primaryRetain, err)
}

func (l *Library) releasePrimary(dev int32) error {
	return l.wrap(&l.sym.primaryRelease, cu.Device(dev).ReleasePrimaryCtx())
}

func (l *Library) setContext(ctx Context) error {
	return l.wrap(&l.sym.ctxSet, cu.SetCurrentContext(as[cu.CUContext](ctx)))
}

func (l *Library) pushContext(ctx Context) error {
	return l.wrap(&l.sym.ctxPush, cu.PushCurrentCtx(as[cu.CUContext](ctx)))
}

func (l *Library) popContext() error {
	_, err := cu.PopCurrentCtx()
	return l.wrap(&l.sym.ctxPop, err)
}

func (c *Calls) NewStream() (Stream, error) {
	s, err := cu.MakeStream(cu.NonBlocking)
	return StreamOf(s), c.lib.wrap(&c.lib.sym.streamCreate, err)
}

func (c *Calls) DestroyStream(s Stream) error {
	own := as[cu.Stream](s)
	return c.lib.wrap(&c.lib.sym.streamDestroy, own.Destroy())
}

func (c *Calls) SyncStream(s Stream) error {
	return c.lib.wrap(&c.lib.sym.streamSynchronize, as[cu.Stream](s).Synchronize())
}

func (c *Calls) NewEvent() (Event, error) {
	e, err := cu.MakeEvent(cu.DisableTiming)
	return EventOf(e), c.lib.wrap(&c.lib.sym.eventCreate, err)
}

func (c *Calls) DestroyEvent(e Event) error {
	own := as[cu.Event](e)
	return c.lib.wrap(&c.lib.sym.eventDestroy, cu.DestroyEvent(&own))
}

func (c *Calls) Record(e Event, s Stream) error {
	return c.lib.wrap(&c.lib.sym.eventRecord, as[cu.Event](e).Record(as[cu.Stream](s)))
}

func (c *Calls) EventDone(e Event) (bool, error) {
	return c.lib.done(&c.lib.sym.eventQuery, as[cu.Event](e).Query())
}

func (c *Calls) WaitEvent(s Stream, e Event) error {
	return c.lib.wrap(&c.lib.sym.streamWaitEvent, as[cu.Stream](s).Wait(as[cu.Event](e), 0))
}

func (c *Calls) Alloc(n int64) (Ptr, error) {
	p, err := cu.MemAlloc(n)
	return Ptr(p), c.lib.wrap(&c.lib.sym.memAlloc, err)
}

func (c *Calls) Free(p Ptr) error {
	return c.lib.wrap(&c.lib.sym.memFree, cu.MemFree(cu.DevicePtr(p)))
}

func (c *Calls) MemInfo() (free, total int64, err error) {
	free, total, err = cu.MemInfo()
	return free, total, c.lib.wrap(&c.lib.sym.memInfo, err)
}

func (c *Calls) CopyToDevice(s Stream, dst Ptr, src uintptr, n int64) error {
	if !c.lib.pinned.hold(src, n) {
		return ErrNotPinned
	}
	err := cu.MemcpyHtoDAsync(cu.DevicePtr(dst), hostPointer(src), n, as[cu.Stream](s))
	return c.lib.wrap(&c.lib.sym.copyToDevice, err)
}

func (c *Calls) CopyToHost(s Stream, dst uintptr, src Ptr, n int64) error {
	if !c.lib.pinned.hold(dst, n) {
		return ErrNotPinned
	}
	err := cu.MemcpyDtoHAsync(hostPointer(dst), cu.DevicePtr(src), n, as[cu.Stream](s))
	return c.lib.wrap(&c.lib.sym.copyToHost, err)
}

func (c *Calls) CopyOnDevice(s Stream, dst, src Ptr, n int64) error {
	err := cu.MemcpyDtoDAsync(cu.DevicePtr(dst), cu.DevicePtr(src), n, as[cu.Stream](s))
	return c.lib.wrap(&c.lib.sym.copyOnDevice, err)
}

func (c *Calls) CopyPeer(s Stream, dst Ptr, dstContext Context, src Ptr, srcContext Context, n int64) error {
	return c.lib.wrap(&c.lib.sym.copyPeer, cu.MemcpyPeerAsync(cu.DevicePtr(dst), as[cu.CUContext](dstContext),
		cu.DevicePtr(src), as[cu.CUContext](srcContext), n, as[cu.Stream](s)))
}

func (c *Calls) Fill(s Stream, dst Ptr, value byte, n int64) error {
	return c.lib.wrap(&c.lib.sym.fill, cu.MemsetD8Async(cu.DevicePtr(dst), value, n, as[cu.Stream](s)))
}

func (c *Calls) EnablePeer(peer Context) error {
	return c.lib.wrap(&c.lib.sym.ctxEnablePeer, as[cu.CUContext](peer).EnablePeerAccess(0))
}
