package cuda

import (
	"sync"
	"sync/atomic"
	"unsafe"
)

// Calls are the driver's functions that want a current context. A Device hands
// them to what runs where its context is current, and they are good there until that returns.
type Calls struct {
	*Library
	dev *Device
}

// captureMode sets how much the thread minds that another one records a graph, and returns what it
// was. At 0, as threads begin, the driver refuses what could be a mistake then, such as a question
// about an event, and breaks the recording off; at 2 it does not.
func (l *Library) captureMode(mode int32) (before int32, err error) {
	err = l.call(l.cuThreadExchangeStreamCaptureMode, uintptr(unsafe.Pointer(&mode)))
	return mode, err
}

// NewStream creates a stream that does not wait for the default one.
func (c *Calls) NewStream() (s Stream, err error) {
	const nonBlocking = 1
	err = c.call(c.cuStreamCreate, uintptr(unsafe.Pointer(&s)), nonBlocking)
	return s, err
}

// DestroyStream gives s up when its work is done, and returns before that.
func (c *Calls) DestroyStream(s Stream) error { return c.call(c.cuStreamDestroy_v2, uintptr(s)) }

// SyncStream blocks the thread until all work on s is done; it belongs in Here.
func (c *Calls) SyncStream(s Stream) error { return c.call(c.cuStreamSynchronize, uintptr(s)) }

// NewEvent creates an event that keeps no time.
func (c *Calls) NewEvent() (e Event, err error) {
	const disableTiming = 2
	err = c.call(c.cuEventCreate, uintptr(unsafe.Pointer(&e)), disableTiming)
	return e, err
}

// DestroyEvent gives e up.
func (c *Calls) DestroyEvent(e Event) error { return c.call(c.cuEventDestroy_v2, uintptr(e)) }

// Record has e happen when the work on s so far is done.
func (c *Calls) Record(e Event, s Stream) error {
	return c.call(c.cuEventRecord, uintptr(e), uintptr(s))
}

// queries are the arguments of EventDone, which purego has escape to the heap.
var queries = sync.Pool{New: func() any { return new([1]uintptr) }}

// EventDone reports whether e has happened since it was last recorded; an error is that of the work
// before it. It allocates nothing: the thread of a device may call it a million times a second.
func (c *Calls) EventDone(e Event) (bool, error) {
	args := queries.Get().(*[1]uintptr)
	defer queries.Put(args)
	args[0] = uintptr(e)
	switch code := raw(c.cuEventQuery, args[:]...); code {
	case 0:
		return true, nil
	case ErrNotReady:
		return false, nil
	default:
		return false, c.failed(c.cuEventQuery, code)
	}
}

// WaitEvent makes work put on s afterwards wait for e, which may be another device's.
func (c *Calls) WaitEvent(s Stream, e Event) error {
	return c.call(c.cuStreamWaitEvent, uintptr(s), uintptr(e), 0)
}

// WaitValue makes later work on s wait until the word at addr is at least value, as a difference
// that wraps. addr is in device memory or (by HostDevicePtr) in pinned host memory. If that never
// happens the stream hangs, and so does what waits for it.
func (c *Calls) WaitValue(s Stream, addr Ptr, value uint32) error {
	return c.call(c.cuStreamWaitValue32_v2, uintptr(s), uintptr(addr), uintptr(value), 0)
}

// Alloc allocates n bytes. It may wait for the device.
func (c *Calls) Alloc(n int64) (p Ptr, err error) {
	err = c.call(c.cuMemAlloc_v2, uintptr(unsafe.Pointer(&p)), uintptr(n))
	return p, err
}

// Free gives memory back, and as a rule waits for all work of the device before.
func (c *Calls) Free(p Ptr) error { return c.call(c.cuMemFree_v2, uintptr(p)) }

// MemInfo returns the free and total bytes of the device.
func (c *Calls) MemInfo() (free, total int64, err error) {
	err = c.call(c.cuMemGetInfo_v2, uintptr(unsafe.Pointer(&free)), uintptr(unsafe.Pointer(&total)))
	return free, total, err
}

// Numbers of the driver for memory of a device that is pinned there, what peers may do, and the
// attributes of a pool.
const (
	allocationPinned = 1
	locationDevice   = 1
	accessReadWrite  = 3

	poolReuseMakesWait   = 3 // memory that was freed on another stream may make the allocating one wait for it
	poolReleaseThreshold = 4 // reserved bytes that are kept after a wait
	poolReserved         = 5
	poolUsed             = 7
)

// location is where memory lies.
type location struct{ kind, id int32 }

// poolProperties are what a pool is made by. The fields behind the size came later, and
// were reserved before: zero is right for all versions.
type poolProperties struct {
	allocation, handles int32
	location            location
	security            uintptr
	maxSize             uintptr // 0 for no limit, the only value that drivers before 12.2 take
	_                   [56]byte
}

var _ [88]byte = [unsafe.Sizeof(poolProperties{})]byte{}

// NewPool creates a pool on the device that keeps what is freed: to give memory back to the system
// at each synchronization, as a pool does of itself, and to get it again, is slow.
//
// The pool does not make streams wait for each other, either. A driver would silently have the
// stream of an allocation wait for a free on another stream that has not had its turn. That stream
// may itself wait for work behind the allocation. The driver reuses memory whose free is done, or is
// behind an event that the stream has waited for. A driver that refuses this setting lets such waits
// happen; all else works.
func (c *Calls) NewPool() (p Pool, err error) {
	properties := poolProperties{allocation: allocationPinned, location: location{locationDevice, c.dev.handle}}
	err = c.call(c.cuMemPoolCreate, uintptr(unsafe.Pointer(&p)), uintptr(unsafe.Pointer(&properties)))
	if err != nil {
		return 0, err
	}
	all, no := ^uint64(0)>>1, int32(0)
	err = c.call(c.cuMemPoolSetAttribute, uintptr(p), poolReleaseThreshold, uintptr(unsafe.Pointer(&all)))
	if err != nil {
		_ = c.DestroyPool(p) // the reason is returned
		return 0, err
	}
	_ = c.call(c.cuMemPoolSetAttribute, uintptr(p), poolReuseMakesWait, uintptr(unsafe.Pointer(&no)))
	return p, nil
}

// DestroyPool gives p up, from which nothing may be allocated any more.
func (c *Calls) DestroyPool(p Pool) error { return c.call(c.cuMemPoolDestroy, uintptr(p)) }

// TrimPool gives back what p reserves and does not use.
func (c *Calls) TrimPool(p Pool) error { return c.call(c.cuMemPoolTrimTo, uintptr(p), 0) }

// PoolUnused returns how many bytes p reserves and does not use.
func (c *Calls) PoolUnused(p Pool) (int64, error) {
	var reserved, used int64
	err := c.call(c.cuMemPoolGetAttribute, uintptr(p), poolReserved, uintptr(unsafe.Pointer(&reserved)))
	if err == nil {
		err = c.call(c.cuMemPoolGetAttribute, uintptr(p), poolUsed, uintptr(unsafe.Pointer(&used)))
	}
	return max(0, reserved-used), err
}

// ShowPool lets another device reach the memory of p, which EnablePeer does not.
func (c *Calls) ShowPool(p Pool, peer int) error {
	dev, err := c.handle(peer)
	if err != nil {
		return err
	}
	access := struct {
		location
		flags int32
	}{location{locationDevice, dev}, accessReadWrite}
	return c.call(c.cuMemPoolSetAccess, uintptr(p), uintptr(unsafe.Pointer(&access)), 1)
}

// AllocAsync allocates n bytes from pool for work on s.
func (c *Calls) AllocAsync(s Stream, pool Pool, n int64) (p Ptr, err error) {
	err = c.call(c.cuMemAllocFromPoolAsync, uintptr(unsafe.Pointer(&p)), uintptr(n), uintptr(pool), uintptr(s))
	return p, err
}

// FreeAsync gives memory of a pool back when the work on s so far is done.
func (c *Calls) FreeAsync(s Stream, p Ptr) error {
	return c.call(c.cuMemFreeAsync, uintptr(p), uintptr(s))
}

// Numbers of the driver for questions about an address, and for the answer that it is a device's.
const (
	pointerMemoryType = 2
	pointerNumber     = 7 // of the allocation, or registration
	pointerRangeStart = 11
	pointerRangeSize  = 12
	pointerMapped     = 13
	pointerPool       = 17
	memoryTypeDevice  = 2
)

// pointer returns the driver's answer to a question about an address. Drivers write the first byte
// of the answer, or more, and nothing for questions that they do not know.
func (c *Calls) pointer(what, addr uintptr) (answer uint64, err error) {
	err = c.call(c.cuPointerGetAttribute, uintptr(unsafe.Pointer(&answer)), what, addr)
	return answer, err
}

// pointerRange returns the piece of memory that addr lies in.
func (c *Calls) pointerRange(addr uintptr) (start, size uint64, err error) {
	if start, err = c.pointer(pointerRangeStart, addr); err == nil {
		size, err = c.pointer(pointerRangeSize, addr)
	}
	return start, size, err
}

// AddressRange returns the allocation that p is in, made anywhere in the process: its start and its
// bytes. ErrNotFound or ErrInvalidValue means that there is none. Of memory that a program has
// mapped itself (cuMemMap) it is the one mapping. Where reserved addresses have nothing mapped, it
// may be the whole reservation.
func (c *Calls) AddressRange(p Ptr) (base Ptr, n int64, err error) {
	err = c.call(c.cuMemGetAddressRange_v2,
		uintptr(unsafe.Pointer(&base)), uintptr(unsafe.Pointer(&n)), uintptr(p))
	if err == nil || Lost(err) {
		return base, n, err
	}
	// A driver may not look at what was allocated in other contexts. But it can
	// describe the memory at each address.
	if kind, unknown := c.pointer(pointerMemoryType, uintptr(p)); unknown != nil || kind != memoryTypeDevice {
		return 0, 0, err
	}
	start, size, unknown := c.pointerRange(uintptr(p))
	if unknown != nil {
		return 0, 0, err
	}
	return Ptr(start), int64(size), nil
}

// Reserved reports whether p is an address that a program has reserved and put no memory behind.
// Allocated memory has a number, or a pool, in every driver.
func (c *Calls) Reserved(p Ptr) bool {
	if yes, err := c.pointer(pointerMapped, uintptr(p)); err != nil || yes != 0 {
		return false
	}
	for _, of := range []uintptr{pointerNumber, pointerPool} {
		if which, err := c.pointer(of, uintptr(p)); err == nil && which != 0 {
			return false
		}
	}
	return true
}

// ProgramMapped reports whether a program has mapped the memory at p itself: of that alone drivers
// give a handle.
func (c *Calls) ProgramMapped(p Ptr) bool {
	var handle uint64
	if c.call(c.cuMemRetainAllocationHandle, uintptr(unsafe.Pointer(&handle)), uintptr(p)) != nil {
		return false
	}
	_ = c.call(c.cuMemRelease, uintptr(handle)) // refused, the memory stays for as long as the process
	return true
}

// MayUse reports whether this device may read and write the memory at p, which a program has mapped
// itself (ProgramMapped). The answer for other memory is not documented.
func (c *Calls) MayUse(p Ptr) (bool, error) {
	here := location{locationDevice, c.dev.handle}
	var flags uint64
	err := c.call(c.cuMemGetAccess, uintptr(unsafe.Pointer(&flags)), uintptr(unsafe.Pointer(&here)), uintptr(p))
	return flags == accessReadWrite, err
}

// HostBytes returns n bytes of host memory that Calls.AllocHost has allocated, for as
// long as it is not freed.
func HostBytes(addr uintptr, n int64) []byte {
	// The address is the driver's, so the garbage collector has no part in it.
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&addr))), n)
}

// StoreWord writes a word of pinned host memory for which a stream may be waiting with
// WaitValue. The address must be a multiple of 4.
func StoreWord(addr uintptr, v uint32) {
	atomic.StoreUint32((*uint32)(*(*unsafe.Pointer)(unsafe.Pointer(&addr))), v)
}

// portable is the flag that pins host memory for all contexts.
const portable = 1

// RegisterHost pins n bytes at addr, which must not be on Go's heap, for all contexts.
// It takes some tenths of a second for each GiB, and so belongs in Here. The memory
// must be there until UnregisterHost.
func (c *Calls) RegisterHost(addr uintptr, n int64) error {
	err := c.call(c.cuMemHostRegister_v2, addr, uintptr(n), portable)
	if err == nil {
		c.KnowHost(addr, n)
	}
	return err
}

// UnregisterHost ends what RegisterHost began, by the address that it was given. No copy
// may be using the memory.
func (c *Calls) UnregisterHost(addr uintptr) error {
	c.pinned.remove(addr)
	return c.call(c.cuMemHostUnregister, addr)
}

// KnowHost records n bytes at addr as pinned. Another part of the process has registered them.
func (c *Calls) KnowHost(addr uintptr, n int64) { c.pinned.add(addr, n) }

// HostRegistered reports whether all n > 0 bytes at addr are pinned in one piece, anywhere in the
// process: the driver refuses copies that cross two pieces. If the driver does not answer, it
// returns false.
func (c *Calls) HostRegistered(addr uintptr, n int64) bool {
	last := addr + uintptr(n) - 1
	if start, size, err := c.pointerRange(addr); err == nil {
		return start <= uint64(addr) && uint64(last)-start < size
	}
	first, err1 := c.pointer(pointerNumber, addr)
	end, err2 := c.pointer(pointerNumber, last)
	return err1 == nil && err2 == nil && first == end && first != 0
}

// AllocHost allocates n bytes of pinned host memory for all contexts.
func (c *Calls) AllocHost(n int64) (addr uintptr, err error) {
	err = c.call(c.cuMemHostAlloc, uintptr(unsafe.Pointer(&addr)), uintptr(n), portable)
	if err != nil {
		return 0, err
	}
	c.KnowHost(addr, n)
	return addr, nil
}

// FreeHost gives memory of AllocHost back.
func (c *Calls) FreeHost(addr uintptr) error {
	c.pinned.remove(addr)
	return c.call(c.cuMemFreeHost, addr)
}

// HostDevicePtr returns the address that the device has for pinned host memory.
func (c *Calls) HostDevicePtr(addr uintptr) (p Ptr, err error) {
	err = c.call(c.cuMemHostGetDevicePointer_v2, uintptr(unsafe.Pointer(&p)), addr, 0)
	return p, err
}

// CopyToDevice copies n bytes from pinned host memory at src. Neither side may be
// touched before the copy is done.
func (c *Calls) CopyToDevice(s Stream, dst Ptr, src uintptr, n int64) error {
	if !c.Pinned(src, n) {
		return ErrNotPinned
	}
	return c.call(c.cuMemcpyHtoDAsync_v2, uintptr(dst), src, uintptr(n), uintptr(s))
}

// CopyToHost copies n bytes to pinned host memory at dst.
func (c *Calls) CopyToHost(s Stream, dst uintptr, src Ptr, n int64) error {
	if !c.Pinned(dst, n) {
		return ErrNotPinned
	}
	return c.call(c.cuMemcpyDtoHAsync_v2, dst, uintptr(src), uintptr(n), uintptr(s))
}

// CopyOnDevice copies n bytes between ranges that do not overlap.
func (c *Calls) CopyOnDevice(s Stream, dst, src Ptr, n int64) error {
	return c.call(c.cuMemcpyDtoDAsync_v2, uintptr(dst), uintptr(src), uintptr(n), uintptr(s))
}

// CopyPeer copies n bytes between the devices of two contexts, through the host if they
// cannot reach each other.
func (c *Calls) CopyPeer(s Stream, dst Ptr, dstContext Context, src Ptr, srcContext Context, n int64) error {
	return c.call(c.cuMemcpyPeerAsync,
		uintptr(dst), uintptr(dstContext), uintptr(src), uintptr(srcContext), uintptr(n), uintptr(s))
}

// copyAttributes are the settings of the copies of a batch. The driver's
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
		if p.HostDst != 0 && !c.Pinned(p.HostDst, p.Size) || p.HostSrc != 0 && !c.Pinned(p.HostSrc, p.Size) {
			return ErrNotPinned
		}
		dst[i], src[i], size[i] = uint64(p.Dst)|uint64(p.HostDst), uint64(p.Src)|uint64(p.HostSrc), uintptr(p.Size)
	}
	const inStreamOrder = 1
	attributes, first := copyAttributes{order: inStreamOrder}, uintptr(0)
	if c.cuMemcpyBatchAsync_v2.fn != 0 {
		return c.call(c.cuMemcpyBatchAsync_v2,
			uintptr(unsafe.Pointer(&dst[0])), uintptr(unsafe.Pointer(&src[0])), uintptr(unsafe.Pointer(&size[0])),
			uintptr(n), uintptr(unsafe.Pointer(&attributes)), uintptr(unsafe.Pointer(&first)), 1, uintptr(s))
	}
	var wrong uintptr // which copy; the error says enough
	return c.call(c.cuMemcpyBatchAsync,
		uintptr(unsafe.Pointer(&dst[0])), uintptr(unsafe.Pointer(&src[0])), uintptr(unsafe.Pointer(&size[0])),
		uintptr(n), uintptr(unsafe.Pointer(&attributes)), uintptr(unsafe.Pointer(&first)), 1,
		uintptr(unsafe.Pointer(&wrong)), uintptr(s))
}

// Fill sets n bytes to value.
func (c *Calls) Fill(s Stream, dst Ptr, value byte, n int64) error {
	return c.call(c.cuMemsetD8Async, uintptr(dst), uintptr(value), uintptr(n), uintptr(s))
}

// EnablePeer lets work of this context reach the memory of another.
func (c *Calls) EnablePeer(peer Context) error {
	return c.call(c.cuCtxEnablePeerAccess, uintptr(peer), 0)
}
