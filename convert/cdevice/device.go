package cdevice

import (
	"context"
	"fmt"

	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/tier"
)

// Config describes a device to other programs. The zero value is right for the
// simulated device and the first CUDA device.
type Config struct {
	// Type and ID name the device of the space, as consumers know it. A Type of 0 is that of the
	// space's backend: for one of package tier/cuda, and for the simulated device, ID is not used
	// then, because they have their own numbers.
	Type DeviceType
	ID   int64
	// Event is an event for consumers of an exported array to wait for, for CUDA a
	// cudaEvent_t *; 0 for none, which is right for all that Spillway makes: it is complete.
	Event uintptr
	// Stream, for devices of package tier/cuda and instead of Event, is a stream of the space's
	// device with work of the caller's that writes the batch's memory: the exported array has an
	// event after the work that was put on it so far, and consumers do not wait for later work. The
	// event is released with the array.
	Stream tier.Stream
	// Wait waits for the event of an imported array. Without it a device of package tier/cuda does
	// that, and for others an array that has one is refused. A panic of it is an error of Import.
	Wait func(ctx context.Context, event uintptr) error
	// Failed, if set, is called if the handle, the event or the memory of an exported batch could
	// not be given up. There is no other way to learn of it: the release callback returns nothing.
	// The calling thread is the one that releases the array, which may be C's. A panic of it is
	// logged, and ends there.
	Failed func(error)
}

// panics logs the panics of the program's functions that run in a release callback, where there is
// no Go caller to return them to: a panic must not pass through C.
var panics = new(guard.Log)

// mapped is implemented by a device whose memory is the process's, at other addresses than the
// device's own, as the simulated one's. Pointer fails if the n bytes at a are no memory of the
// device.
type mapped interface {
	Pointer(a tier.Addr, n int64) (uintptr, error)
	AddrOf(p uintptr) (tier.Addr, error)
}

// sharer is implemented by a CUDA device. ShareEvent returns an event behind the work on s so far,
// which the caller must end; AwaitShared waits until an event has happened.
type sharer interface {
	Ordinal() int
	ShareEvent(s tier.Stream) (event uintptr, end func() error, err error)
	AwaitShared(ctx context.Context, event uintptr) error
}

// device is a space's device in C's terms: the type and number that arrays have, and how addresses
// become pointers.
type device struct {
	tier.Device
	kind   DeviceType
	id     int64
	mapped        // between its addresses and pointers
	sharer sharer // nil where there are no events
}

// direct is the mapping of a device whose addresses are pointers, as CUDA's are.
type direct struct{}

func (direct) Pointer(a tier.Addr, _ int64) (uintptr, error) { return uintptr(a), nil }
func (direct) AddrOf(p uintptr) (tier.Addr, error)           { return tier.Addr(p), nil }

// deviceOf returns the device of a space. A Config.Type that is neither 0 nor CPU is taken as it
// is. Otherwise the device must be one whose type is known, the simulated one or a CUDA device; if
// it is not, the error matches tier.ErrNotSupported.
func deviceOf(space *tier.Space, cfg Config) (d device, err error) {
	// Host spaces and disks have no device, so their batches cannot be shared here.
	pool, ok := space.Pool.(interface{ Device() tier.Device })
	if !ok {
		return d, unsupported(nil, "the memory of %s has no device", space.ID())
	}
	d = device{Device: pool.Device(), kind: cfg.Type, id: cfg.ID, mapped: direct{}}
	d.sharer, _ = tier.As[sharer](d.Device)
	m, isMapped := tier.As[mapped](d.Device)
	switch info := d.Info(); {
	case d.kind != 0 && d.kind != CPU:
	case isMapped:
		// The specification recommends -1 for devices that have no numbers.
		d.kind, d.id, d.mapped = CPU, -1, m
	case d.kind == 0 && d.sharer != nil:
		d.kind, d.id = CUDA, int64(d.sharer.Ordinal())
	case d.kind == 0 && info.Backend == "cuda":
		d.kind = CUDA
	default:
		return d, unsupported(nil, "the memory of the device %q (%s): set Config.Type to its kind",
			info.Name, info.Backend)
	}
	return d, nil
}

// DeviceError reports that an array is in the memory of another device than the space's. Importing
// it would need a copy, which the program can make. It matches convert.ErrInvalid.
type DeviceError struct {
	Space    tier.ID
	Type     DeviceType // the array's
	ID       int64
	WantType DeviceType // the space's
	WantID   int64
}

func (e *DeviceError) Error() string {
	return fmt.Sprintf("cdevice: an array on device %d of type %d cannot be in %s, which is device %d of type %d",
		e.ID, e.Type, e.Space, e.WantID, e.WantType)
}

// Is matches convert.ErrInvalid.
func (e *DeviceError) Is(target error) bool { return target == convert.ErrInvalid }
