//go:build gorgonia && cgo && linux && (amd64 || arm64)

package gorgonia

import (
	"errors"
	"fmt"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
)

// handle returns one of cu's handles as the driver's number. cu's handles are structs of one private
// field, so there is no other way to read or to make one.
func handle[H cu.CUContext | cu.Stream | cu.Event](h H) uintptr {
	return *(*uintptr)(unsafe.Pointer(&h))
}

// of returns the driver's number as one of cu's handles.
func of[H cu.CUContext | cu.Stream | cu.Event](number uintptr) H {
	return *(*H)(unsafe.Pointer(&number))
}

// These declarations do not compile if cu's types hold more than a handle.
var (
	_ [unsafe.Sizeof(uintptr(0))]byte = [unsafe.Sizeof(cu.CUContext{})]byte{}
	_ [unsafe.Sizeof(uintptr(0))]byte = [unsafe.Sizeof(cu.Stream{})]byte{}
	_ [unsafe.Sizeof(uintptr(0))]byte = [unsafe.Sizeof(cu.Event{})]byte{}
)

// Open opens a device that works in ctx, a context of the GPU cfg.Ordinal, as cuda.Driver.Open does
// with cfg.Context, which must be 0 here. An engine uses the device as spillway.GPUConfig.Device,
// and closes it if GPUConfig.Own is set; otherwise the caller closes it. The program destroys ctx,
// after the device is closed and all loans of its memory have ended: see cuda.Config.Context.
func Open(ctx cu.CUContext, cfg cuda.Config) (tier.Device, error) {
	if cfg.Context != 0 {
		return nil, errors.New("gorgonia: opening a device: Config.Context is set beside the argument ctx: want 0")
	}
	cfg.Context = handle(ctx)
	if cfg.Context == 0 {
		return nil, errors.New("gorgonia: opening a device: ctx is no context: " +
			"make one with cu.Device.MakeContext or cu.NewContext")
	}
	lib, err := cuda.Load("")
	if err != nil {
		return nil, err
	}
	return lib.Open(cfg)
}

// Context returns the context that dev works in, to be made current for cu's functions: see
// cuda.ContextOf. The device of an engine is DeviceMemory.Device of any buffer in its GPU memory,
// also where the engine has opened it.
func Context(dev tier.Device) (cu.CUContext, error) {
	ctx, err := cuda.ContextOf(dev)
	return of[cu.CUContext](ctx), err
}

// Stream returns the CUstream of s, for kernels and copies of cu's. It is valid until s is closed:
// see cuda.StreamOf.
func Stream(s tier.Stream) (cu.Stream, error) {
	stream, err := cuda.StreamOf(s)
	return of[cu.Stream](stream), err
}

// AdoptStream returns a stream of dev whose work goes to s, a stream of cu's in the context of dev.
// The program destroys s after the result, or dev, is closed: see cuda.AdoptStream.
func AdoptStream(dev tier.Device, s cu.Stream) (tier.Stream, error) {
	return cuda.AdoptStream(dev, handle(s))
}

// Event records an event behind the work put on s so far, for streams of cu's to wait for. It is
// valid until end is called, once, which destroys it: see cuda.ShareEvent.
func Event(s tier.Stream) (e cu.Event, end func() error, err error) {
	event, end, err := cuda.ShareEvent(s)
	return of[cu.Event](event), end, err
}

// AdoptEvent makes work put on s afterwards wait for e, an event that cu has recorded, and returns
// an event of Spillway's behind it. The program may destroy e when AdoptEvent has returned: see
// cuda.AdoptEvent.
func AdoptEvent(s tier.Stream, e cu.Event) (tier.Event, error) {
	return cuda.AdoptEvent(s, handle(e))
}

// DevicePtr returns the address of a buffer, such as Reservation.Alloc returns in GPU memory. It is
// valid until the buffer is released. A buffer that is not on a device of package tier/cuda is
// tier.ErrNotSupported. The nil buffer, of no bytes, is at 0.
func DevicePtr(b *tier.Buffer) (cu.DevicePtr, error) {
	if b == nil {
		return 0, nil
	}
	m, ok := b.Memory().(tier.DeviceMemory)
	if !ok {
		return 0, fmt.Errorf("gorgonia: the address of a buffer in %s: %w", b.Space().ID(), tier.ErrNotSupported)
	}
	if _, err := cuda.ContextOf(m.Device()); err != nil {
		return 0, fmt.Errorf("gorgonia: the address of a buffer in %s: %w", b.Space().ID(), err)
	}
	return cu.DevicePtr(m.Addr()), nil
}

// Addr returns p for the copies of a device, with which it is the same number. The device refuses
// memory that is not its own, so the memory must be borrowed (tier.Borrower) for as long as work of
// the device uses it. The program frees it afterwards.
func Addr(p cu.DevicePtr) tier.Addr { return tier.Addr(p) }
