// Package tier holds what all of Spillway's memories have in common: the kinds of memory and the
// names of the spaces in them, the books of a space, the buffers that are drawn from it, and the
// small interfaces that a backend implements. The backends are in the packages below this one.
//
//	Promise -->  Space ----------- books: live, retired, reserved, cached
//	Draw    -->  | limit, trigger, stop; subscribers
//	             |                                        +> HostMemory    internal/host
//	             +- Pool -- Alloc, Free -- Memory --------+> FileMemory    internal/volumes
//	Buffer  <--     |                                     +> DeviceMemory  tier/sim
//	| Lease                                                 Device -- Stream, Event
//	| Release
//	v
//	retired --> reclaimed: to the promise that the bytes were drawn from, or free
//
//	space.go          Space: limits, loss, subscribers, promises
//	space_memory.go   buffers that are drawn from promised bytes, and freed
//	clean.go          clean images: memory that is kept while nobody needs the room
//	buffer.go         Buffer and its leases; Pool and the kinds of Memory
//	device.go         Device and Stream, for GPU backends; marks.go: marks; quota.go: Quota
//	holdings.go       what keeps memory: leaks, and lists of holders
//
// Package reservation waits for room and makes promises for programs. Package internal/books
// counts. Some methods of Space take or return types of this module's internal packages: only
// packages of the module call them.
//
// # Bytes
//
// Sizes are charged as the pool rounds them. Every byte of a space is free, or in exactly one of
// four accounts. Used is the first three together.
//
// Reserved bytes are promised and in no buffer. A reservation gets them, and gives them back when
// it is released. They are also charged to the space's Quota, which limits what several spaces,
// programs or processes take together; so are live and retired bytes.
//
// Live bytes are in a Buffer. Space.Draw allocates it for bytes that a promise has turned into live
// ones.
//
// Retired bytes were in a buffer that is released, while the device may still work on them. When
// the pool reports that they are reclaimed, they return to the promise that they were drawn from
// while it is open, and otherwise are free.
//
// Cached bytes are in clean images: the memory of batches that are current in another space
// (Space.KeepClean). They count as free. A promise that needs their room is made when the oldest
// images are dropped; a batch that returns promotes its image, which costs no copy.
//
// Used and cached bytes never exceed the capacity, and no promise takes them over the limit. Only a
// lowered limit, and memory that was there before the space (Space.Occupy), can be above it.
//
// # Promises
//
// A books.Promise is the part of a space that one reservation has. The code that makes a promise
// must release it. Buffers may outlive it. A promise may have an owner, which lists of holders and
// of leaks name: the books have the sum of what each owner has promised. Space.Promise is for code
// without a reservation.Manager; it never waits.
//
// A space calls its subscribers when bytes are free again, when a limit changed, when the space is
// lost, and when the pressure has reached the trigger. Code that reserves or frees bytes through
// Space.Books calls Space.Reserved or Space.Freed afterwards.
//
// # Ownership
//
// A caller that draws a Buffer owns it and must Release it once. Longer readers, such as Arrow
// arrays that were opened in place, hold leases, and the memory goes back when all of them have
// ended. A Space owns its Pool and closes it. A pool does not own the device that it allocates
// from: the opener of the Device closes it, after the pools and the streams. A stream belongs to
// one goroutine at a time. Buffers outlive the close of their space: their memory stays usable,
// except for the memory of a device that was closed.
//
// # Locks
//
// The order of all of Spillway's locks is in internal/lockrank; this package
// has the inner end of it:
//
//	… → Reservation → Space → Backend → Device
//
// The mutex of a space's books, and that of its list of clean images, have the rank Space: a
// goroutine holds one of them at a time. Backend is for pools. Device is for the devices themselves.
// No lock is held during calls of a pool, a device or a subscriber, or during a wait.
//
// # Errors
//
// No room is a *NoSpaceError, which matches ErrNoSpace and has how much there is. A space whose
// device is lost for good returns a *LostError, which matches ErrLost: see Losable and Space.Lost.
// A second release is ErrReleased, use after a close ErrClosed, and what a backend cannot do
// ErrNotSupported. A Pool that panics in Alloc has returned an error as far as callers can see.
// Books that are given back more than they have panic, because that is a bug in a backend.
package tier

import (
	"fmt"
	"strconv"
	"strings"
)

// Kind is a kind of memory. The order is the order of speed; the zero value is
// invalid. The table kinds describes each tier, so that no code outside this package compares a
// Kind with a constant.
type Kind uint8

// The tiers, fastest first.
const (
	GPU  Kind = iota + 1 // device memory
	Host                 // pinned host memory
	Disk                 // spill files
)

// kinds has a row for each tier.
var kinds = [...]struct {
	name   string
	access access
	marks  Marks // the defaults
}{
	GPU:  {"gpu", device, Marks{Limit: 0.90, Trigger: 0.85, Stop: 0.65}},
	Host: {"host", memory, Marks{Limit: 0.90, Trigger: 0.85, Stop: 0.65}},
	Disk: {"disk", storage, Marks{Limit: 1.00, Trigger: 0.95, Stop: 0.85}}, // it has nowhere to move to
}

// access is how bytes of a tier are reached.
type access uint8

const (
	device  access = iota // by copies of a Device
	memory                // by the processor: arrays are opened in place
	storage               // by requests that need a permit; images may be compressed there
)

// KindCount is one more than the largest Kind: the length of an array that is indexed by Kind.
const KindCount = len(kinds)

// IsDevice reports whether only a Device reaches the tier's bytes.
func (k Kind) IsDevice() bool { return k.Valid() && kinds[k].access == device }

// IsMemory reports whether the processor reaches the tier's bytes, so that arrays are opened in place.
func (k Kind) IsMemory() bool { return k.Valid() && kinds[k].access == memory }

// IsStorage reports whether the tier's bytes are read and written by requests. These need a permit,
// and images may be compressed there.
func (k Kind) IsStorage() bool { return k.Valid() && kinds[k].access == storage }

// Page is the alignment, in bytes, of bodies, of the places where a body may be
// split, and of direct I/O: no disk of today asks for more.
const Page = 4096

// Kinds lists the tiers, fastest first.
func Kinds() []Kind {
	var all []Kind
	for k := range KindCount - 1 {
		all = append(all, Kind(k+1))
	}
	return all
}

// Valid reports whether k is one of the tiers.
func (k Kind) Valid() bool { return k > 0 && int(k) < KindCount }

// String returns "gpu", "host" or "disk".
func (k Kind) String() string {
	if !k.Valid() {
		return "invalid"
	}
	return kinds[k].name
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

// MarshalText prints the id as String does.
func (id ID) MarshalText() ([]byte, error) {
	if !id.Valid() {
		return nil, fmt.Errorf("tier: the space id %s is invalid", id)
	}
	return []byte(id.String()), nil
}

// UnmarshalText parses what MarshalText prints.
func (id *ID) UnmarshalText(b []byte) error {
	kind, ordinal, _ := strings.Cut(string(b), ":")
	k, _ := ParseKind(kind)
	n, _ := strconv.ParseUint(ordinal, 10, 31)
	v := ID{Kind: k, Ordinal: int(n)}
	if !v.Valid() || v.String() != string(b) {
		return fmt.Errorf("tier: %q is not a space: want tier:number with a number from 0, such as gpu:0", b)
	}
	*id = v
	return nil
}
