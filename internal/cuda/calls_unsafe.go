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

// captureMode sets how much the thread minds that another one records a graph, and returns what it
// was. At 0, as threads begin, the driver refuses what could be a mistake then, such as a question
// about an event, and breaks the recording off; at 2 it does not.
func (l *Library) captureMode(mode int32) (before int32, err error) {
	err = l.call(&l.sym.exchangeCaptureMode, uintptr(unsafe.Pointer(&mode)))
	return mode, err
}

// WaitValue makes later work on s wait until the word at addr is at least value, as a difference
// that wraps. addr is in device memory or (by HostDevicePtr) in pinned host memory. If that never
// happens the stream hangs, and so does what waits for it.
func (c *Calls) WaitValue(s Stream, addr Ptr, value uint32) error {
	return c.lib.call(&c.lib.sym.streamWaitValue, uintptr(s), uintptr(addr), uintptr(value), 0)
}

// AllocAsync allocates n bytes from pool for work on s.
func (c *Calls) AllocAsync(s Stream, pool Pool, n int64) (Ptr, error) {
	var p Ptr
	err := c.lib.call(&c.lib.sym.memAllocFromPool, uintptr(unsafe.Pointer(&p)), uintptr(n), uintptr(pool), uintptr(s))
	return p, err
}

// FreeAsync gives memory of a pool back when the work on s so far is done.
func (c *Calls) FreeAsync(s Stream, p Ptr) error {
	return c.lib.call(&c.lib.sym.memFreeAsync, uintptr(p), uintptr(s))
}

// AddressRange returns the allocation that p is in, made anywhere in the process: its start and its
// bytes. ErrNotFound or ErrInvalidValue means that there is none. Of memory that a program has
// mapped itself (cuMemMap) it is the one mapping. Where reserved addresses have nothing mapped, it
// may be the whole reservation.
func (c *Calls) AddressRange(p Ptr) (base Ptr, n int64, err error) {
	var size uintptr
	err = c.lib.call(&c.lib.sym.memRange, uintptr(unsafe.Pointer(&base)), uintptr(unsafe.Pointer(&size)), uintptr(p))
	if err == nil || Lost(err) {
		return base, int64(size), err
	}
	if kind, unknown := c.pointer(pointerMemoryType, uintptr(p)); unknown != nil || kind != memoryTypeDevice {
		return 0, 0, err
	}
	// A driver may not look at what was allocated in other contexts. But it can
	// describe the memory at each address.
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
	if c.lib.call(&c.lib.sym.memRetain, uintptr(unsafe.Pointer(&handle)), uintptr(p)) != nil {
		return false
	}
	_ = c.lib.call(&c.lib.sym.memRelease, uintptr(handle)) // refused, the memory stays for as long as the process
	return true
}

// MayUse reports whether this device may read and write the memory at p, which a program has mapped
// itself (ProgramMapped). The answer for other memory is not documented.
func (c *Calls) MayUse(p Ptr) (bool, error) {
	dev, err := c.lib.handle(c.dev.info.Ordinal)
	if err != nil {
		return false, err
	}
	here := location{locationDevice, dev}
	var flags uint64
	err = c.lib.call(&c.lib.sym.memAccess, uintptr(unsafe.Pointer(&flags)), uintptr(unsafe.Pointer(&here)), uintptr(p))
	return flags == accessReadWrite, err
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
		if p.HostDst != 0 && !c.lib.pinned.hold(p.HostDst, p.Size) ||
			p.HostSrc != 0 && !c.lib.pinned.hold(p.HostSrc, p.Size) {
			return ErrNotPinned
		}
		dst[i], src[i], size[i] = uint64(p.Dst)|uint64(p.HostDst), uint64(p.Src)|uint64(p.HostSrc), uintptr(p.Size)
	}
	const inStreamOrder = 1
	attributes, first := copyAttributes{order: inStreamOrder}, uintptr(0)
	if e := &c.lib.sym.copyBatch2; e.fn != 0 {
		return c.lib.call(
			e,
			uintptr(unsafe.Pointer(&dst[0])),
			uintptr(unsafe.Pointer(&src[0])),
			uintptr(unsafe.Pointer(&size[0])),
			uintptr(n),
			uintptr(unsafe.Pointer(&attributes)),
			uintptr(unsafe.Pointer(&first)),
			1,
			uintptr(s),
		)
	}
	var wrong uintptr // which copy; the error says enough
	return c.lib.call(
		&c.lib.sym.copyBatch,
		uintptr(unsafe.Pointer(&dst[0])),
		uintptr(unsafe.Pointer(&src[0])),
		uintptr(unsafe.Pointer(&size[0])),
		uintptr(n),
		uintptr(unsafe.Pointer(&attributes)),
		uintptr(unsafe.Pointer(&first)),
		1,
		uintptr(unsafe.Pointer(&wrong)),
		uintptr(s),
	)
}

// LoadModule loads PTX or a binary. PTX must end in a zero byte.
func (c *Calls) LoadModule(image []byte) (Module, error) {
	if len(image) == 0 || image[len(image)-1] != 0 {
		return 0, &Error{
			Call: c.lib.sym.moduleLoad.name,
			Code: ErrInvalidValue,
			Name: "the image does not end in a zero byte",
		}
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
	err := c.lib.call(
		&c.lib.sym.moduleFunction,
		uintptr(unsafe.Pointer(&f)),
		uintptr(m),
		uintptr(unsafe.Pointer(&text[0])),
	)
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
