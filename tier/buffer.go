package tier

import (
	"context"
	"sync/atomic"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/invariants"
)

// Memory is what a pool hands out. The tier determines which one it is: HostMemory, DeviceMemory or
// FileMemory. Code that copies bytes switches on it.
type Memory interface {
	// Size is the number of bytes asked for.
	Size() int64
}

// HostMemory is memory that Go code can read and write.
type HostMemory interface {
	Memory
	// Extents are the pieces that the memory consists of, in order; their
	// lengths add up to Size, and each but the last is a multiple of 4096 long.
	// Each starts at an address that is a multiple of 4096 if Size is one too or is
	// above 8 KiB, and of 64 otherwise: small memory shares its pages with other.
	Extents() [][]byte
}

// HostStats describes an arena of host memory at a moment; all sizes are in bytes.
type HostStats struct {
	Capacity int64
	Used     int64 // handed out, as charged
	Slabs    int64 // the length of the slabs that small memory lies in
	Slack    int64 // pages in use less Used: free room next to small memory, in slabs for the most part
	// Committed is the length of the steps of 2 MiB that were touched or handed out since the last
	// Trim: at most this much is present.
	Committed   int64
	Touched     int64          // of these, touched ahead of use
	Locked      int64          // cannot be swapped out
	LargestFree int64          // the longest free range
	Warnings    []diag.Warning // what was asked for and could not be had; Space is not set
}

// DeviceMemory is one contiguous piece of device memory.
type DeviceMemory interface {
	Memory
	Device() Device
	Addr() Addr
}

// FileMemory is memory on a disk. Offsets are within the memory. Transfers whose address, offset and
// length are multiples of Page are done directly between p and the disk, with several requests in
// progress; others are copied, which is slower.
type FileMemory interface {
	Memory
	// WriteAt writes all of p at off. Out of disk space is a NoSpaceError. No write reads: WriteAt
	// returns ErrNotSupported if off, or the end of p before the end of the memory, is not a
	// multiple of Page, or if the memory encrypts and p would change only a part of what an earlier
	// call has written between two multiples of 64 KiB.
	WriteAt(ctx context.Context, p []byte, off int64) error
	// ReadAt fills p from off. Memory that encrypts returns an AlteredError if the bytes are not
	// what was written.
	ReadAt(ctx context.Context, p []byte, off int64) error
	// Locate says in which file of the volume, and where in it, off lies, for
	// error messages.
	Locate(off int64) (volume, file string, offset int64)
}

// Pool is the allocator behind a space. It does not count: the space's books
// do, and the space calls Alloc only for bytes that it has charged. A Pool is safe for
// concurrent use.
type Pool interface {
	// Charge returns what size bytes take out of the space: size rounded up as
	// the pool rounds. Charge(0) is 0, Charge(Charge(a)) is Charge(a), and Charge
	// never falls as the size rises. Two charges may be less than that of both
	// together: a pool may round large sizes more coarsely than small ones.
	Charge(size int64) int64
	// Alloc hands out size > 0 bytes. If they cannot be had in one piece the
	// pool may split them at cuts (ascending multiples of 4096 below size), and
	// only there; device pools never split. A pool that has the room but not in
	// one piece returns a NoSpaceError with Largest set.
	Alloc(size int64, cuts []int64) (Memory, error)
	// Free takes m back and calls reclaimed exactly once, when the bytes are
	// free: before it returns, or later from a goroutine of the pool's, in
	// either case with no lock held. It must not panic: what it calls of a
	// program's, such as a decorated device, may.
	Free(m Memory, reclaimed func())
	// Close waits until freed memory is reclaimed, and gives everything back that is not handed
	// out. Memory that is handed out stays usable and goes back when it is freed. A second Close
	// returns ErrClosed.
	Close() error
}

// A Buffer is owned bytes in one space. It is drawn from a reservation, and released
// exactly once by its owner. Longer readers, such as Arrow arrays opened in place, hold leases. The
// memory goes back when the owner has released it and the last lease has ended. Methods are safe
// for concurrent use; the owner guards the bytes.
//
// A nil Buffer has no bytes: it is what an allocation of zero bytes gives.
type Buffer struct {
	space   *Space
	mem     Memory
	charge  int64
	promise *books.Promise // gets the bytes back while it is open; Promote replaces it
	stack   invariants.Trace

	reclaimed func(n int64) // see OnReclaimed; may be nil

	// holders is the number of leases, plus the bit owned until the owner releases the buffer, plus
	// the bit cached while it is the memory of a clean image. All are in one word, so that they
	// change together. Without owned and leases the memory is gone.
	holders atomic.Int64

	unleased atomic.Pointer[func()] // see OnUnleased
}

const (
	owned  = 1 << 62
	cached = 1 << 61
)

// Space returns where the buffer lies; nil for a nil buffer.
func (b *Buffer) Space() *Space {
	if b == nil {
		return nil
	}
	return b.space
}

// Size returns the number of bytes asked for.
func (b *Buffer) Size() int64 {
	if b == nil {
		return 0
	}
	return b.mem.Size()
}

// Charge returns the number of bytes counted in the space's books.
func (b *Buffer) Charge() int64 {
	if b == nil {
		return 0
	}
	return b.charge
}

// OnReclaimed makes the space call f with the charge of b when the device is done with the memory,
// just before the bytes are free, and with no lock held. f must be quick and must not block. Only the
// caller may have b, which it has just drawn.
func (b *Buffer) OnReclaimed(f func(n int64)) {
	if b != nil {
		b.reclaimed = f
	}
}

// Memory returns the bytes: a HostMemory, a DeviceMemory or a FileMemory; nil
// for a nil buffer. It must not be used after Release, except for the holder of a
// lease; an invariants build panics when the memory is gone.
func (b *Buffer) Memory() Memory {
	if b == nil {
		return nil
	}
	if invariants.Enabled && b.holders.Load()&^cached == 0 {
		panic("tier: the memory of a buffer is gone; it was taken at\n" + b.stack.String())
	}
	return b.mem
}

// Lease keeps the memory until the caller calls the returned function, also after Release. A second
// call of that function does nothing. The caller of Lease must own the buffer or hold a lease;
// otherwise Lease panics if the memory is gone.
func (b *Buffer) Lease() (end func()) {
	end, ok := b.TryLease()
	if !ok {
		panic("tier: a lease on a buffer whose memory is gone; it was taken at\n" + b.stack.String())
	}
	return end
}

// TryLease is Lease for callers that neither own the buffer nor hold a lease: it returns false if
// the memory is gone. A lease on the memory of a clean image should be short: the space cannot have
// the room, which counts as free, until it ends.
func (b *Buffer) TryLease() (end func(), ok bool) {
	if b == nil {
		return func() {}, true
	}
	for {
		n := b.holders.Load()
		if n&^cached == 0 {
			return nil, false
		}
		if b.holders.CompareAndSwap(n, n+1) {
			return b.leaseEnd(), true
		}
	}
}

// leaseEnd returns the function that ends a lease which holders counts already.
func (b *Buffer) leaseEnd() func() {
	var ended atomic.Bool
	return func() {
		if !ended.CompareAndSwap(false, true) {
			return
		}
		switch n := b.holders.Add(-1); {
		case n&^cached == 0:
			b.space.free(b)
		case n == owned: // the last lease: a move or a release frees the memory at once from now on
			if f := b.unleased.Load(); f != nil && *f != nil {
				(*f)()
			}
		}
	}
}

// OnUnleased sets what is called whenever the last open lease ends while the owner still
// has the buffer: on the goroutine that ends the lease, with no lock held. It replaces
// what was set before; nil ends that. f must be quick and must not block.
func (b *Buffer) OnUnleased(f func()) {
	if b != nil {
		b.unleased.Store(&f)
	}
}

// Leased returns how many leases are open.
func (b *Buffer) Leased() int {
	if b == nil {
		return 0
	}
	return int(b.holders.Load() &^ (owned | cached))
}

// Release gives the buffer up. A second release changes nothing and returns
// ErrReleased (an invariants build panics with the stack that took it). Release
// of a nil buffer does nothing.
func (b *Buffer) Release() error {
	if b == nil {
		return nil
	}
	switch before := b.holders.And(^int64(owned)); {
	case before&owned == 0:
		if invariants.Enabled {
			panic("tier: buffer released twice; it was taken at\n" + b.stack.String())
		}
		return ErrReleased
	case before&^cached == owned:
		b.space.free(b)
	}
	return nil
}
