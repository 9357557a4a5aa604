// Package cuda makes NVIDIA GPUs devices of the engine. It binds the driver at run time, so a
// program needs no toolkit and no build flags, and also runs where there is no GPU: Load returns an
// error that names what is missing.
//
//	Driver    NVIDIA's driver library, loaded
//	  │ Open
//	Device    a tier.Device, tier.Pinner and tier.Borrower over one GPU's context
//	  │ NewStream                      │ Record
//	stream    a stream of the GPU's    event    a point in a stream's work, and what the host has to do there
//
// # Memory
//
// Memory is allocated in the order of streams from a pool of the device's own, which keeps what was
// freed for the next allocation and is not shared. Where the driver or the GPU has no pools, the
// device takes its memory in one piece when it is opened and hands it out itself, because the
// driver's other functions wait for all work of a GPU. Each device knows its allocations, so that
// mistakes in arguments are refused before they reach the driver.
//
// Freed memory is retired until the device has come to that point of its stream. Each event takes
// notice of the frees before it.
//
// # Other code in the process
//
// Other code that calls the driver, such as a program's kernels, shares contexts, streams, events
// and memory with a device:
//
//	             made by the program,     made by the device,
//	             used by the device       used by the program
//	CUcontext    Config.Context           ContextOf
//	CUstream     AdoptStream              StreamOf
//	CUevent      AdoptEvent               ShareEvent
//	CUdeviceptr  tier.Borrower            tier.Addr, the same number; tier.Lender keeps it
//
// Each side destroys what it has made, and only that. Handles are numbers here; package
// tier/cuda/gorgonia converts them for programs that use gorgonia.org/cu. A device makes its
// context current only for the length of a call, on the thread that makes the call, and restores
// what was current there. So other code may have any context current on any thread, and must make
// the device's current itself before it works with the device's streams.
//
// A device queries the driver whether borrowed memory is there. While memory of the device is lent,
// Close leaves its memory, its context and its shared events, and no thread. The last loan to end
// gives these up.
//
// # Host memory
//
// A GPU copies asynchronously only from and to memory that its driver has pinned. Pin does so for
// an arena, once. Other memory is copied by way of pinned memory of the device's own. That costs
// time and as much memory as is being copied, of which a rest is kept. So any memory works, but
// only pinned memory is fast. No memory of Go's heap is ever given to the driver for a copy.
//
// # Failures
//
// A driver reports failed work when an event is queried. For a real GPU that is the end of its
// context: every call fails from then on, with the same error, and what the device held is lost. So
// frees count as done then, and events as reached, with that error: no goroutine waits for what
// cannot come. Subscribers of the loss (OnLost) are called before any caller gets such an error.
// The device can still be closed.
//
// Errors of the driver are wrapped and contain the call, the code and its name. Without a driver,
// or without a device to work with, the error matches tier.ErrNotSupported and names what was
// looked for.
//
// The opener of a device closes it. Its mutex has the rank Device, the last in the order, and is
// not held while the driver is called.
package cuda

import (
	"fmt"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/tier"
)

// Driver is NVIDIA's driver library. It is safe for concurrent use, and stays loaded until the
// process ends.
type Driver struct {
	lib *cuda.Library
}

// Load loads the driver library at path, or where path is empty libcuda.so.1, as the dynamic linker
// finds it. That there is none, that it is too old, or that it finds no device is an error that
// matches tier.ErrNotSupported.
func Load(path string) (*Driver, error) {
	lib, err := cuda.Load(path)
	if err != nil {
		return nil, &unavailableError{err}
	}
	return &Driver{lib}, nil
}

// unavailableError is an error of the driver that means that there is nothing to work with.
type unavailableError struct{ cause error }

func (e *unavailableError) Error() string        { return e.cause.Error() }
func (e *unavailableError) Unwrap() error        { return e.cause }
func (e *unavailableError) Is(target error) bool { return target == tier.ErrNotSupported }

// Version returns the newest version of CUDA that the driver is for, such as "12.8".
func (d *Driver) Version() string { return d.lib.Version() }

// DeviceInfo describes a GPU before it is opened.
type DeviceInfo struct {
	Ordinal int    // among those that the driver shows (CUDA_VISIBLE_DEVICES)
	Name    string // as NVIDIA calls it
	UUID    string // such as "GPU-…", as nvidia-smi writes it
	PCI     string // such as "0000:17:00.0"
	Memory  int64  // bytes
	Pools   bool   // memory can be allocated in the order of streams
}

// Devices lists the GPUs that the driver shows to the process.
func (d *Driver) Devices() ([]DeviceInfo, error) {
	found, err := d.lib.Devices()
	if err != nil {
		return nil, err
	}
	infos := make([]DeviceInfo, len(found))
	for i, f := range found {
		infos[i] = DeviceInfo(f)
	}
	return infos, nil
}

// Config describes a device to open. The zero value is the first GPU, all of its memory.
type Config struct {
	// Ordinal is the GPU's number among those that the driver shows.
	Ordinal int
	// Node is the nearest NUMA node, for Info; -1 for unknown.
	Node int
	// Memory is how many bytes may be allocated at most; 0 is what the GPU has free when the
	// device is opened, less a sixteenth for what the driver and others need.
	Memory int64
	// OnePiece takes all memory when the device is opened, and hands it out without the driver, as
	// it is done where DeviceInfo.Pools is false. The free room may be in several pieces, none of
	// which is long enough. Otherwise the driver is asked for each piece, in the order of a stream,
	// and what is not in use can be given back to others.
	OnePiece bool
	// Context, if not 0, is a CUcontext of the program's that the device uses instead of the GPU's
	// primary one. It must be of the GPU that Ordinal names. The program destroys it, after the
	// device is closed and all loans of its memory have ended (tier.Lender). It must also outlive
	// all other devices that have the same host memory pinned, because that is registered in one
	// context.
	Context uintptr
}

// validate checks the configuration.
func (c Config) validate() error {
	switch {
	case c.Ordinal < 0:
		return fmt.Errorf("cuda: device %d: want a number from 0", c.Ordinal)
	case c.Node < -1:
		return fmt.Errorf("cuda: NUMA node %d: want -1 for unknown, or a node", c.Node)
	case c.Memory < 0 || c.Memory > 0 && c.Memory < granule:
		return fmt.Errorf(
			"cuda: a device memory of %d bytes: want 0 for what is free, or at least %d",
			c.Memory,
			granule,
		)
	}
	return nil
}
