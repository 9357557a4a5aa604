package tier

import (
	"context"
	"iter"

	"github.com/spillway-db/spillway/internal/thread"
)

// Addr is an address in a device's memory: a handle, never a Go pointer. The
// zero value is no address. Addresses within one allocation can be reached by
// addition.
type Addr uint64

// DeviceInfo describes a device.
type DeviceInfo struct {
	Name    string // as the vendor calls it; "simulated GPU" for sim
	Backend string // "sim", "cuda"
	UUID    string // empty if unknown
	PCI     string // PCI address, empty if unknown
	Node    int    // nearest NUMA node, -1 if unknown
	Driver  string // driver version, empty if none
}

// Device is what a backend implements: tier/sim, tier/cuda, or a program with another GPU. A
// wrapper of a Device that counts, limits or logs calls is a Device itself, with a method Unwrap()
// Device. Wrappers stack in any order and pass on streams and events as they are.
//
// Work is put on a stream and done later, in the order in which it was put
// there; work on different streams has no order but what events give it. Every call returns without
// waiting for work, except for Close, and for work put on a stream on which some 1,000 pieces of it
// wait already: then the call may wait for the first of them. Calls for other streams go on.
//
// An error of a call means that nothing was put on the stream. A mistake in its arguments has no
// other effect: an address that is not inside an allocation, a range that leaves it, memory that
// was freed, another device's stream. An error of the work itself is returned by the stream's Err
// and by every event recorded after it on that stream. Work put there later may be left undone,
// except that frees take place. Other streams are not affected.
//
// An engine wraps the device that a program brings, so that a panic of a method is an error of the
// call; As finds the device behind that.
//
// Host memory given to a copy must stay as it is until the copy is done. It must come from a host
// space, or be pinned in another way where the backend requires that. Copies of no bytes do
// nothing. Methods are safe for concurrent use, but a stream belongs to one goroutine at a time.
// After Close they return ErrClosed.
type Device interface {
	Info() DeviceInfo

	// Charge returns what an allocation of size bytes takes: size rounded up to
	// the device's granule (256 bytes or more). Charge(0) is 0.
	Charge(size int64) int64
	// Alloc allocates size > 0 bytes, aligned to at least 256, with any contents.
	// The memory may be used by work put on s afterwards, and on other streams
	// behind an event. No room is a NoSpaceError without a space.
	Alloc(s Stream, size int64) (Addr, error)
	// Free gives an allocation back once the work on s so far is done; until
	// then it is retired. a is what Alloc returned; anything else is an error.
	Free(s Stream, a Addr) error

	// CopyPeer copies from src on this device to dst on another; the stream is
	// this device's. ErrNotSupported where the devices cannot reach each other.
	CopyPeer(s Stream, dst Addr, dstDevice Device, src Addr, size int64) error
	// CopyRegions does copies within the device, and between it and host memory, as one piece of work;
	// they have no order among each other and must not overlap. If one of them is wrong none is done.
	// The slice may be used again when the call returns.
	CopyRegions(s Stream, regions []Region) error
	// Fill sets size bytes to value.
	Fill(s Stream, dst Addr, value byte, size int64) error

	NewStream() (Stream, error)
	// Record returns an event that is done when all work put on s so far is.
	Record(s Stream) (Event, error)
	// WaitEvent makes work put on s afterwards wait for e. If the work before e
	// failed, s has failed too. ErrNotSupported for an event of another backend
	// that this one cannot wait for.
	WaitEvent(s Stream, e Event) error

	// MemInfo returns the device's free and total bytes. After an error the device could not find
	// out how many are free, and free is 0.
	MemInfo() (free, total int64, err error)
	// Outstanding returns live + retired bytes, as charged.
	Outstanding() int64
	// Reap takes back what was freed and is done with, and returns how many
	// bytes that were. A device that does so by itself may return 0.
	Reap() int64

	// Close waits for the work under way and gives the device up. Open
	// allocations are gone with it, unless they are lent (Lender). A second Close
	// returns ErrClosed.
	Close() error
}

// Stream is an ordered queue of work on a device.
type Stream interface {
	// Err returns the first failure of work on the stream, nil if none is known. A stream that has
	// failed stays so; close it and open another.
	Err() error
	// Sync waits for the work put on the stream so far and returns Err. It is
	// for the case in which an event cannot be had.
	Sync() error
	// Close waits for the work on the stream and gives it up. A second Close
	// returns ErrClosed.
	Close() error
}

// Event marks a point in a stream's work.
type Event interface {
	// Done is closed when the work before the event is done or has failed.
	Done() <-chan struct{}
	// Err is nil until Done is closed, and then reports whether work on the stream
	// before the event failed.
	Err() error
}

// Region is one copy of CopyRegions: between host and device if exactly one of
// HostDst and HostSrc is set (and then Size, unless 0, is its length), within
// the device if neither is.
type Region struct {
	Dst, Src         Addr
	HostDst, HostSrc []byte
	Size             int64
}

// Wait waits for e and returns its error, or ctx's if that ends first; the
// work goes on in that case, and what it uses must be left alone until Done.
func Wait(ctx context.Context, e Event) error {
	done := e.Done()
	if thread.Look(done) {
		return e.Err()
	}
	select {
	case <-done:
		return e.Err()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Pinner is a device that copies from and to host memory as fast as it can only if it has pinned it
// before. A decorator may implement it, or be looked through: see As.
type Pinner interface {
	// Pin pins host memory that is not Go's, for all devices of the backend. The memory must stay
	// mapped, and the pages that it has, until it is unpinned. To pin what is pinned does nothing.
	Pin(mem []byte) error
	// Unpin ends that, for memory as it was given to Pin; closing the device does, too. No copy may
	// be using it.
	Unpin(mem []byte) error
}

// Borrower is a device that works only with its own allocations, and with other code's allocations
// on it while they are borrowed. A decorator may implement it, or be looked through: see As.
type Borrower interface {
	// Borrow lets work of the device read and write the size > 0 bytes at addr until giveBack is
	// called, once, when no work uses them any more. The device's own memory may be borrowed, too.
	// An error means that there are no such bytes.
	Borrow(addr Addr, size int64) (giveBack func(), err error)
}

// Lender is a device whose memory other code in the process may use by itself, without knowing when
// the device is closed. A decorator may implement it, or be looked through: see As.
type Lender interface {
	// Lend keeps the memory of all open allocations, and what was shared of the device besides,
	// until back is called. Close does not wait for that: it gives up all else, and the last back
	// the rest. back may be called by any thread and must be called, once the memory is not in use
	// any more; further calls do nothing. Its error lists what could not be given up.
	Lend() (back func() error, err error)
}

// Losable is a device, or a pool of memory, that may fail for good while it is in use: a GPU whose
// context was ended by an error, or that has fallen off its bus. A decorator may implement it, or
// be looked through: see As.
//
// From the loss on all work fails. Frees take effect at once in the books, and events are done, so
// that no goroutine waits for what cannot come.
type Losable interface {
	// OnLost has f called, with the reason, when the loss is noticed, before any caller gets an
	// error of it; at once if it was before. The calling goroutine is the one that has noticed,
	// with no lock held. f must be quick and must not call the device; and it may be called more
	// than once. The returned function ends that; a call that has begun may still be running when
	// it returns.
	OnLost(f func(why error)) (cancel func())
}

// As returns dev, or the first of the devices that it wraps, as a T: one of the optional
// interfaces, such as Pinner, or the type of a backend's own devices.
func As[T any](dev Device) (t T, ok bool) {
	for d := range layers(dev) {
		if t, ok := d.(T); ok {
			return t, true
		}
	}
	return t, false
}

// layers calls its function with dev and all the devices that it wraps, the outermost first.
func layers(dev Device) iter.Seq[Device] {
	return func(yield func(Device) bool) {
		for d := dev; d != nil && yield(d); {
			w, ok := d.(interface{ Unwrap() Device })
			if !ok {
				return
			}
			d = w.Unwrap()
		}
	}
}
