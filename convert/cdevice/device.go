package cdevice

import (
	"context"

	"github.com/spillway-db/spillway/tier"
)

// Config says how a device is known to other programs. The zero value is right for the
// simulated device and the first CUDA device.
type Config struct {
	// Type and ID name the device of the space. A Type of 0 is that of the space's backend; ID is that of CUDA,
	// and not used for the simulated device.
	Type DeviceType
	ID   int64
	// Event is an event for consumers of an exported array to wait for, for CUDA a
	// cudaEvent_t *; 0 for none, which is right for all that Spillway makes: it is complete.
	Event uintptr
	// Wait waits for the event of an imported array; without it an array that has one is
	// refused.
	Wait func(ctx context.Context, event uintptr) error
	// Failed, which may be nil, is told if the handle of an exported batch could not be closed. It is called
	// by the thread that releases the array.
	Failed func(error)
}

// mapped is what a device has whose memory is the process's, at other addresses.
type mapped interface {
	Pointer(a tier.Addr, n int64) (uintptr, error)
	AddrOf(p uintptr) (tier.Addr, error)
}

// device is a space's as C knows it.
type device struct {
	kind   DeviceType
	id     int64
	mapped mapped // nil where addresses are pointers
}

// deviceOf finds out what the device of a space is.
func deviceOf(space *tier.Space, cfg Config) (d device, err error) {
	pool, ok := space.Pool().(interface{ Device() tier.Device })
	if !ok {
		return d, path(nil).unsupported("the memory of %s has no device", space.ID())
	}
	dev := pool.Device()
	backend := dev.Info().Backend
	for d.mapped == nil {
		if d.mapped, ok = dev.(mapped); ok {
			break
		}
		w, ok := dev.(interface{ Unwrap() tier.Device })
		if !ok {
			break
		}
		dev = w.Unwrap()
	}
	d.kind, d.id = cfg.Type, cfg.ID
	switch {
	case d.kind != 0 && d.kind != CPU:
		d.mapped = nil
	case d.mapped != nil:
		d.kind, d.id = CPU, -1
	case d.kind == 0 && backend == "cuda":
		d.kind = CUDA
	default:
		return d, path(nil).unsupported("the memory of the device %q (%s), whose kind Config.Type can say", dev.Info().Name, backend)
	}
	return d, nil
}

func (d device) pointer(a tier.Addr, n int64) (uintptr, error) {
	if d.mapped == nil {
		return uintptr(a), nil
	}
	return d.mapped.Pointer(a, n)
}

func (d device) addr(p uintptr) (tier.Addr, error) {
	if d.mapped == nil {
		return tier.Addr(p), nil
	}
	return d.mapped.AddrOf(p)
}
