// Package tier holds what all of Spillway's memories have in common: the kinds of memory and the
// names of the spaces in them, the books of a space, the buffers that are drawn from it, and the
// small interfaces that a backend implements. The backends are in the packages below this one.
//
//	             Space ─────────── its books: live, retired, reserved
//	Reserve ──▶  │ limit, trigger, stop; listeners
//	Draw    ──▶  │                                        ┌▶ HostMemory    internal/host
//	             └─ Pool ── Alloc, Free ── Memory ────────┼▶ FileMemory    internal/volumes
//	Buffer  ◀──     │                                     └▶ DeviceMemory  tier/sim
//	│ Lease                                                 Device ── Stream, Event
//	│ Release
//	▼
//	retired ──▶ reclaimed: to the Account that promised the bytes, or free
//
//	space.go          Space: its marks and its listeners; reserving and unreserving
//	space_memory.go   drawing buffers from reserved bytes, and freeing them
//	buffer.go         Buffer and its leases; Pool and the kinds of Memory
//	copies.go         clean images: memory that is kept while nobody needs the room
//	inside.go         Inside: methods for this module's packages
//	device.go         Device and Stream, for GPU backends; fractions.go: marks; quota.go: Quota
//	hold.go           what keeps memory: handles and records; holdings.go: lists of holders
//
// Package reservation makes promises and waits, internal/ledger counts, and tier/disk has the file
// system of volumes. Spill volumes report their Pace, so that several are written side by side in
// proportion to their speed.
//
// # Bytes
//
// Every byte of a space is free, or in exactly one of three accounts: reserved (promised and not
// drawn), live (in a buffer), retired (released, but the device may still work on it). Their sum is
// what is used, and is never over the capacity. Free bytes may be cached: a clean image is in them,
// which the space drops when it needs the room. Sizes are charged as the pool rounds them, and
// everything is counted in bytes. A Quota limits what several spaces, programs or processes share,
// beside each space's limit.
//
// While a space is far from full and has no waiters, it may park bytes that a reservation gives
// back, for the next reservation. A request for room, or a query of what is used, takes them back.
//
// # Ownership
//
// A caller that reserves bytes must draw or unreserve each of them. A caller that draws a Buffer
// owns it and must Release it once. Longer readers, such as Arrow arrays that were opened in place,
// hold leases, and the memory goes back when all of them have ended. A Space owns its Pool and
// closes it. A pool does not own the device that it allocates from: the opener of the Device closes
// it, after the pools and the streams. A stream belongs to one goroutine at a time.
//
// Buffers outlive the close of their space: their memory stays usable, except for
// the memory of a device that was closed.
//
// # Locks
//
// The order of all of Spillway's locks is in internal/lockrank; this package
// has the inner end of it:
//
//	… → Reservation → Space → Ledger → Backend → Device
//
// Space guards a space's set of buffers and its listeners, Ledger the writers of the books (readers
// take no lock). Backend is for pools. Device is for the devices themselves. No lock is held during
// calls of a pool, a device, a listener or an account, or during a wait.
//
// # Errors
//
// No room is a *NoSpaceError, which matches ErrNoSpace and says how much there is. A space whose
// device is lost for good is a *LostError, which matches ErrLost: see Losable and Space.Lost. A
// second release is ErrReleased, use after a close ErrClosed, and what a backend cannot do
// ErrNotSupported. A Pool that panics in Alloc has returned an error as far as callers can see.
package tier

import (
	"fmt"
	"strconv"
	"strings"
)

// Kind is a kind of memory. The order is the order of speed; the zero value is
// invalid.
type Kind uint8

// The tiers, fastest first.
const (
	GPU  Kind = iota + 1 // device memory
	Host                 // pinned host memory
	Disk                 // spill files
)

// Page is the alignment, in bytes, of bodies, of the places where a body may be
// split, and of direct I/O: no disk of today asks for more.
const Page = 4096

// Kinds lists the tiers, fastest first.
func Kinds() [3]Kind { return [...]Kind{GPU, Host, Disk} }

// Valid reports whether k is one of the tiers.
func (k Kind) Valid() bool { return k >= GPU && k <= Disk }

// String returns "gpu", "host" or "disk".
func (k Kind) String() string {
	switch k {
	case GPU:
		return "gpu"
	case Host:
		return "host"
	case Disk:
		return "disk"
	}
	return "invalid"
}

// ParseKind parses what Kind.String prints.
func ParseKind(s string) (Kind, error) {
	for _, k := range Kinds() {
		if s == k.String() {
			return k, nil
		}
	}
	return 0, fmt.Errorf("tier: %q is not a tier: want gpu, host or disk", s)
}

// ID names a space: a kind and the number of the space within it. IDs are
// comparable; the zero value is invalid.
type ID struct {
	Kind    Kind
	Ordinal int
}

// Valid reports whether the id has a tier and a number that is not negative.
func (id ID) Valid() bool { return id.Kind.Valid() && id.Ordinal >= 0 }

// String returns the id as "gpu:0".
func (id ID) String() string { return id.Kind.String() + ":" + strconv.Itoa(id.Ordinal) }

// parseID parses what ID.String prints.
func parseID(s string) (ID, error) {
	kind, ordinal, ok := strings.Cut(s, ":")
	if !ok {
		return ID{}, fmt.Errorf("tier: %q is not a space: want tier:number, such as gpu:0", s)
	}
	k, err := ParseKind(kind)
	if err != nil {
		return ID{}, fmt.Errorf("tier: %q is not a space: want tier:number, such as gpu:0", s)
	}
	n, err := strconv.ParseUint(ordinal, 10, 31)
	if err != nil || ordinal != strconv.FormatUint(n, 10) {
		return ID{}, fmt.Errorf("tier: %q is not a space: %q is not a number from 0", s, ordinal)
	}
	return ID{Kind: k, Ordinal: int(n)}, nil
}

// MarshalText prints the id as String does.
func (id ID) MarshalText() ([]byte, error) {
	if !id.Valid() {
		return nil, fmt.Errorf("tier: the space id %s is invalid", id)
	}
	return []byte(id.String()), nil
}

// UnmarshalText parses what MarshalText prints.
func (id *ID) UnmarshalText(b []byte) error {
	v, err := parseID(string(b))
	if err == nil {
		*id = v
	}
	return err
}
