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

// Functions that gorgonia.org/cu has a name for are called through it. The methods of the same
// names in calls_purego_unsafe.go document them. The other functions are bound at run time as
// without the tag, in the library that the program was linked with through cu.

// Linked reports whether the program is linked with a driver library. Then all tests of a binary
// have the same emulator, which cudatest.New resets, and none can be without a function.
const Linked = true

// ErrNotLinked: the library is another one than the program is linked with. It has no part in the
// contexts that cu makes.
var ErrNotLinked = errors.New("the program is linked with another CUDA driver library")

// ContextOf returns a context of cu's, to be given to Library.Adopt. That of a *cu.Ctx is its
// CUDAContext, and must be kept from being collected, because that destroys the context.
func ContextOf(ctx cu.CUContext) Context { return as[Context](ctx) }

// StreamOf returns a stream of cu's, on which work can be put from both sides.
func StreamOf(s cu.Stream) Stream { return as[Stream](s) }

// EventOf returns an event of cu's, for which streams of both sides can wait.
func EventOf(e cu.Event) Event { return as[Event](e) }

// as takes a handle for the same handle by another type: cu's types hold nothing else, but do
// not let it be set.
func as[To, From any](h From) To { return *(*To)(unsafe.Pointer(&h)) }

// So it does not compile with a cu of which that is no longer true.
var (
	_ [unsafe.Sizeof(Context(0))]byte = [unsafe.Sizeof(cu.CUContext{})]byte{}
	_ [unsafe.Sizeof(Stream(0))]byte  = [unsafe.Sizeof(cu.Stream{})]byte{}
	_ [unsafe.Sizeof(Event(0))]byte   = [unsafe.Sizeof(cu.Event{})]byte{}
)

// hostPointer returns an address as cu wants it. The memory is not Go's: it has been pinned.
func hostPointer(addr uintptr) unsafe.Pointer { return as[unsafe.Pointer](addr) }

// linked refuses a library that is not the one that cu calls.
func (l *Library) linked() error {
	from, err := dynlib.Open(DefaultPath)
	if err != nil {
		return &LoadError{Path: l.path, Reason: ErrNotLinked, Cause: err}
	}
	defer from.Close() // it stays loaded: the program needs it
	if from.Find(l.sym.init.name) != l.sym.init.fn {
		return &LoadError{Path: l.path, Reason: ErrNotLinked, Detail: fmt.Sprintf("built with the tag gorgonia, it uses %s", DefaultPath)}
	}
	return nil
}

// told turns cu's error of a call into ours, nil if that is nil.
func (l *Library) told(e *entry, err error) error {
	if err == nil {
		return nil
	}
	return l.failed(e, Code(reflect.ValueOf(err).Int())) // cu's type is its own, and an int
}

// answer is told for queries whether work is done.
func (l *Library) answer(e *entry, err error) (bool, error) {
	if err == cu.NotReady {
		return false, nil
	}
	return err == nil, l.told(e, err)
}

func (l *Library) retain(ordinal int) (Context, error) {
	dev, err := l.handle(ordinal)
	if err != nil {
		return 0, err
	}
	ctx, err := cu.Device(dev).RetainPrimaryCtx()
	return ContextOf(ctx), l.told(&l.sym.primaryRetain, err)
}

func (l *Library) releasePrimary(dev int32) error {
	return l.told(&l.sym.primaryRelease, cu.Device(dev).ReleasePrimaryCtx())
}

func (l *Library) setContext(ctx Context) error {
	return l.told(&l.sym.ctxSet, cu.SetCurrentContext(as[cu.CUContext](ctx)))
}

func (l *Library) pushContext(ctx Context) error {
	return l.told(&l.sym.ctxPush, cu.PushCurrentCtx(as[cu.CUContext](ctx)))
}

func (l *Library) popContext() error {
	_, err := cu.PopCurrentCtx()
	return l.told(&l.sym.ctxPop, err)
}

func (c *Calls) NewStream() (Stream, error) {
	s, err := cu.MakeStream(cu.NonBlocking)
	return StreamOf(s), c.lib.told(&c.lib.sym.streamCreate, err)
}

func (c *Calls) DestroyStream(s Stream) error {
	own := as[cu.Stream](s)
	return c.lib.told(&c.lib.sym.streamDestroy, own.Destroy())
}

func (c *Calls) StreamDone(s Stream) (bool, error) {
	return c.lib.answer(&c.lib.sym.streamQuery, as[cu.Stream](s).Query())
}

func (c *Calls) SyncStream(s Stream) error {
	return c.lib.told(&c.lib.sym.streamSynchronize, as[cu.Stream](s).Synchronize())
}

func (c *Calls) Sync() error { return c.lib.told(&c.lib.sym.ctxSynchronize, cu.Synchronize()) }

func (c *Calls) NewEvent() (Event, error) {
	e, err := cu.MakeEvent(cu.DisableTiming)
	return EventOf(e), c.lib.told(&c.lib.sym.eventCreate, err)
}

func (c *Calls) DestroyEvent(e Event) error {
	own := as[cu.Event](e)
	return c.lib.told(&c.lib.sym.eventDestroy, cu.DestroyEvent(&own))
}

func (c *Calls) Record(e Event, s Stream) error {
	return c.lib.told(&c.lib.sym.eventRecord, as[cu.Event](e).Record(as[cu.Stream](s)))
}

func (c *Calls) EventDone(e Event) (bool, error) {
	return c.lib.answer(&c.lib.sym.eventQuery, as[cu.Event](e).Query())
}

func (c *Calls) SyncEvent(e Event) error {
	return c.lib.told(&c.lib.sym.eventSynchronize, as[cu.Event](e).Synchronize())
}

func (c *Calls) WaitEvent(s Stream, e Event) error {
	return c.lib.told(&c.lib.sym.streamWaitEvent, as[cu.Stream](s).Wait(as[cu.Event](e), 0))
}

func (c *Calls) Alloc(n int64) (Ptr, error) {
	p, err := cu.MemAlloc(n)
	return Ptr(p), c.lib.told(&c.lib.sym.memAlloc, err)
}

func (c *Calls) Free(p Ptr) error {
	return c.lib.told(&c.lib.sym.memFree, cu.MemFree(cu.DevicePtr(p)))
}

func (c *Calls) MemInfo() (free, total int64, err error) {
	free, total, err = cu.MemInfo()
	return free, total, c.lib.told(&c.lib.sym.memInfo, err)
}

func (c *Calls) CopyToDevice(s Stream, dst Ptr, src uintptr, n int64) error {
	if !c.lib.pinned.hold(src, n) {
		return ErrNotPinned
	}
	return c.lib.told(&c.lib.sym.copyToDevice, cu.MemcpyHtoDAsync(cu.DevicePtr(dst), hostPointer(src), n, as[cu.Stream](s)))
}

func (c *Calls) CopyToHost(s Stream, dst uintptr, src Ptr, n int64) error {
	if !c.lib.pinned.hold(dst, n) {
		return ErrNotPinned
	}
	return c.lib.told(&c.lib.sym.copyToHost, cu.MemcpyDtoHAsync(hostPointer(dst), cu.DevicePtr(src), n, as[cu.Stream](s)))
}

func (c *Calls) CopyOnDevice(s Stream, dst, src Ptr, n int64) error {
	return c.lib.told(&c.lib.sym.copyOnDevice, cu.MemcpyDtoDAsync(cu.DevicePtr(dst), cu.DevicePtr(src), n, as[cu.Stream](s)))
}

func (c *Calls) CopyPeer(s Stream, dst Ptr, dstContext Context, src Ptr, srcContext Context, n int64) error {
	return c.lib.told(&c.lib.sym.copyPeer, cu.MemcpyPeerAsync(cu.DevicePtr(dst), as[cu.CUContext](dstContext),
		cu.DevicePtr(src), as[cu.CUContext](srcContext), n, as[cu.Stream](s)))
}

func (c *Calls) Fill(s Stream, dst Ptr, value byte, n int64) error {
	return c.lib.told(&c.lib.sym.fill, cu.MemsetD8Async(cu.DevicePtr(dst), value, n, as[cu.Stream](s)))
}

func (c *Calls) EnablePeer(peer Context) error {
	return c.lib.told(&c.lib.sym.ctxEnablePeer, as[cu.CUContext](peer).EnablePeerAccess(0))
}

func (c *Calls) DisablePeer(peer Context) error {
	return c.lib.told(&c.lib.sym.ctxDisablePeer, as[cu.CUContext](peer).DisablePeerAccess())
}
