// Package host is the host tier: arenas of pinned memory that Go code, the GPU's
// copy engines and direct I/O all reach.
//
//	Arena (a tier.Pool)                          one a NUMA node
//	+-----------------------------------------+
//	| one contiguous range of addresses       |  mapped once, as long as the capacity;
//	| + extent ++-- free --++ extent ++ slab +|  pages come when touched: ahead, in steps
//	+------------+----------------------------+  of 2 MiB, or at first use
//	             | Alloc: a tier.HostMemory of one extent, or of several that
//	             v meet at cuts only, so that no Arrow buffer straddles two
//	        tier.Buffer --> Staging: one buffer lent out as chunks of equal length
//
// # Free room in pieces
//
// If enough pages are free, but not in ranges that fit a request and its cuts, the request gets
// another mapping, in one piece. As many free pages go back to the system, and stay out of use until
// that mapping is freed. So what was reserved can be allocated, and the arena has no more pages than
// its capacity. An arena that is pinned cannot give pages back, and reports that the room is in
// pieces: tier.NoSpaceError.Largest.
//
// # Small memory
//
// Requests that are charged less than whole pages, all of them below 8 KiB, get a place in a slab:
// 64-byte aligned, next to others. A place is charged, not its slab. The pages of a partly used slab
// are free for small memory only; tier.HostStats.Slack is how much that is. If slabs block a large
// request, the arena reports that the room is in pieces. Whole pages never are in slabs: direct I/O
// needs their alignment, and images are whole pages.
//
// # Ownership
//
// The holder of an extent's memory owns it, from Alloc to Free; the arena does not read it
// meanwhile. Freed extents are handed out again with the bytes that they had. The mapping stays
// until the arena is closed and the last extent is freed. So arrays opened in place stay readable
// while they are leased.
//
// Under the invariants tag freed extents are made unreadable, so that a use after release faults at
// once. Freed places are overwritten, and checked when they are handed out again. The race detector
// does not see mapped memory: builds with -race, and systems other than Linux, macOS and FreeBSD,
// take the arena from the Go heap, which keeps the pages that are given back.
//
// # What the Go runtime does not see
//
// GOMEMLIMIT counts the Go heap, not arenas. Set it to what the process may use
// less the capacity of its arenas.
//
// # Locks
//
// Arena and Staging have one mutex each, of rank Backend: the last but the device's.
// It guards the free list and counters. No system call is made under it; ranges
// that one works on are taken out of the free list for as long.
package host

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// step is how much memory is touched at a time, and the granule in which Trim gives back: one huge
// page of x86 and of arm64 with 4 KiB pages.
const step = 2 << 20

// Config describes an arena. Capacity is required; the zero value of the rest is
// a plain arena on node 0 whose pages come at first use.
type Config struct {
	// Capacity is the size in bytes, rounded down to a multiple of 4096. The
	// arena never has more pages than this.
	Capacity int64
	// Node is the NUMA node to bind the pages to; -1 for any. On a machine with
	// one node it makes no difference.
	Node int
	// Lock keeps the pages from being swapped out, as far as the limits of the
	// process allow; Stats reports how far that was.
	Lock bool
	// Touch makes the pages present ahead of use, from a goroutine that Close ends: 1/16 of
	// them at once, up to 64 MiB, and as much again as has been used, up to 512 MiB, later.
	Touch bool
	// Huge asks for huge pages.
	Huge bool
}

// Validate checks the configuration.
func (c Config) Validate() error {
	switch {
	case c.Capacity < tier.Page:
		return fmt.Errorf("host: arena capacity %d must be at least %d bytes", c.Capacity, tier.Page)
	case c.Node < -1:
		return fmt.Errorf("host: NUMA node %d: want a node from 0, or -1 for any", c.Node)
	}
	return nil
}

// Arena hands out memory from one contiguous range. It implements tier.Pool and is safe for
// concurrent use.
//
// An arena is open until Close. The range is mapped until the arena is closed and the last memory is
// freed. While a Pinner has pinned it, all pages stay present. A free range is withheld while Trim
// gives its pages back; requests that need it wait.
type Arena struct {
	cfg     Config
	reserve func(size int64) (Mapping, error)
	space   Mapping
	mem     []byte // the range

	state   []atomic.Uint32 // a step each: committed, touched
	touched atomic.Int64    // bytes
	commit  atomic.Int64    // bytes
	locked  atomic.Int64    // bytes

	window    *Window       // how far pages are touched
	stopTouch func()        // ends the toucher
	touchDone chan struct{} // closed when it has ended
	pages     chan struct{} // a token: its holder gives pages back, pins or locks them, or closes the arena

	mu struct {
		lockrank.Mutex[lockrank.Backend]
		free     *extent.Allocator
		slabs    slabs
		used     int64         // bytes handed out, as charged
		withheld int64         // free bytes that Trim works on
		returned chan struct{} // closed when some of them are put back; nil without waiters
		refs     int           // memories handed out, and one until Close has ended; the last unmaps the arena
		closed   bool
		pinners  []tier.Pinner
		warnings []diag.Warning
	}
}

// The bits of a step's state.
const (
	committed = 1 << iota // a page of it may be present
	touched               // all pages of it were made present ahead of use
)

var _ tier.Pool = (*Arena)(nil)

// NewArena maps an arena. If huge pages, the node or locking cannot be had, that is a
// warning; if the range cannot be mapped, that is an error. The caller must
// Close it.
func NewArena(cfg Config) (*Arena, error) { return newArena(cfg, reserve) }

func newArena(cfg Config, reserve func(size int64) (Mapping, error)) (*Arena, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.Capacity -= cfg.Capacity % tier.Page
	space, err := reserve(cfg.Capacity)
	if err != nil {
		return nil, fmt.Errorf("host: reserving an address range of %d bytes: %w (make the host memory smaller, "+
			"or raise the limits of ulimit -v and vm.overcommit_memory)", cfg.Capacity, err)
	}
	stop := make(chan struct{})
	a := &Arena{
		cfg:       cfg,
		reserve:   reserve,
		space:     space,
		mem:       space.Bytes(),
		state:     make([]atomic.Uint32, (cfg.Capacity+step-1)/step),
		window:    NewWindow(cfg.Capacity),
		stopTouch: sync.OnceFunc(func() { close(stop) }),
		touchDone: make(chan struct{}),
		pages:     make(chan struct{}, 1),
	}
	a.mu.free = extent.New(cfg.Capacity)
	a.mu.refs = 1
	if cfg.Huge {
		if err := space.huge(); err != nil {
			cause := causes.HugePagesMissing
			switch {
			case errors.Is(err, errHugeOff):
				cause = causes.HugePagesOff
			case errors.Is(err, errors.ErrUnsupported):
				cause = causes.System
			}
			a.warn(cause, "huge pages were refused (%v): %d bytes are in small ones, "+
				"and making them present and copying them is slower", err, cfg.Capacity)
		}
	}
	if cfg.Node >= 0 {
		if err := space.bind(cfg.Node); err != nil {
			cause := causes.MemoryNode
			if errors.Is(err, fs.ErrPermission) || errors.Is(err, errors.ErrUnsupported) {
				cause = causes.MemoryPolicy // EPERM or ENOSYS: containers filter the system call
			}
			a.warn(cause, "the memory could not be bound to NUMA node %d (%v): "+
				"it may come from any node, and copies between nodes are slower", cfg.Node, err)
		}
	}
	if cfg.Lock {
		a.Lock()
	}
	if cfg.Touch {
		go func() {
			labels.Touch.Set()
			a.touchAhead(stop)
		}()
	} else {
		close(a.touchDone)
	}
	return a, nil
}

func (a *Arena) warn(c diag.Cause, format string, args ...any) {
	w := causes.Warn(c, format, args...)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.warnings = append(a.mu.warnings, w)
}

// Stats returns the arena's figures. Each is right by itself. The Space of the warnings is not set,
// because an arena has no ID.
func (a *Arena) Stats() tier.HostStats {
	a.mu.Lock()
	defer a.mu.Unlock()
	return tier.HostStats{
		Capacity:    a.cfg.Capacity,
		Used:        a.mu.used,
		Slabs:       a.mu.slabs.length,
		Slack:       a.slackLocked(),
		Committed:   a.commit.Load(),
		Touched:     a.touched.Load(),
		Locked:      a.locked.Load(),
		LargestFree: a.mu.free.Largest(),
		Warnings:    slices.Clone(a.mu.warnings),
	}
}

// slackLocked returns how many bytes are not charged and in no free range either: what is left of
// slabs, and of pages with small memory.
func (a *Arena) slackLocked() int64 {
	return a.cfg.Capacity - a.mu.used - a.mu.free.FreeBytes() - a.mu.withheld
}

// memory is what Alloc returns: a place in a slab, or whole pages.
type memory struct {
	size    int64
	extents [][]byte
	one     [1][]byte // for a single extent
	slab    *slab     // nil for whole pages
	index   int       // of the place in the slab
	pieces  []piece   // where the extents are in the arena; or the pages that own has the place of
	own     Mapping   // where the bytes are, if the arena had no ranges that fit; else nil
	freed   atomic.Bool
}

// piece is pages of a memory; At is its offset in the arena.
type piece = extent.Piece[int64]

func (m *memory) Size() int64 { return m.size }

func (m *memory) Extents() [][]byte { return m.extents }

// Charge returns what size bytes take. Above 8 KiB that is size rounded up to a multiple of 4096.
// Below, it is the next of the slabs' sizes, at most a quarter more. The rest of a slab's pages is
// not charged. It is free for later small memory, and for everything once the slab is empty. So an
// arena whose books have room may be too fragmented for a large request; see Alloc.
func (a *Arena) Charge(size int64) int64 {
	switch {
	case size > maxSmall:
		return extent.RoundUp(size, tier.Page)
	case size <= 0:
		return 0
	}
	return classSize(classOf(size))
}

// Alloc hands out size > 0 bytes. Memory that is charged in whole pages begins at a multiple of
// 4096: it is the shortest free range that is long enough, else several that meet at cuts, else a
// mapping by itself. The rest, all of it below 8 KiB, begins at a multiple of 64. The bytes are
// whatever they were. No room is a *tier.NoSpaceError, with Largest set if there is enough but not
// in long enough ranges: because the arena is pinned, or because slabs are in the way.
//
// Small memory is refused only if no page is free and no place in a slab is long enough.
func (a *Arena) Alloc(size int64, cuts []int64) (tier.Memory, error) {
	if size <= 0 {
		return nil, fmt.Errorf("host: cannot allocate %d bytes", size)
	}
	m := &memory{size: size}
	charge := a.Charge(size)
	scattered := false // the pieces are enough, but do not fit the request
	a.mu.Lock()
	for {
		if a.mu.closed {
			a.mu.Unlock()
			return nil, tier.ErrClosed
		}
		if charge%tier.Page != 0 {
			m.slab, m.index = a.placeLocked(classOf(size))
		}
		// The size is compared with what is free first: rounding it could overflow.
		if m.slab == nil && size <= a.mu.free.FreeBytes() {
			pages := extent.RoundUp(size, tier.Page) // which is more than the charge for a place
			m.pieces, _ = extent.Place(a.mu.free, pages, cuts, 0)
			if m.pieces == nil && a.mu.withheld == 0 && len(a.mu.pinners) == 0 {
				m.pieces, scattered = a.scatteredLocked(pages), true
			}
		}
		if m.slab != nil || m.pieces != nil {
			break
		}
		if a.mu.withheld == 0 {
			defer a.mu.Unlock()
			return nil, a.fullLocked(size)
		}
		if a.mu.returned == nil {
			a.mu.returned = make(chan struct{})
		}
		wait := a.mu.returned
		a.mu.Unlock()
		<-wait // Trim has what is wanted, for some milliseconds
		a.mu.Lock()
	}
	a.mu.used += charge
	a.mu.refs++
	a.mu.Unlock()

	switch {
	case scattered:
		if err := a.relocate(m); err != nil {
			return nil, err
		}
	case m.slab != nil:
		at := m.slab.at(m.index)
		a.window.Reach(at + size)
		m.one[0] = a.mem[at : at+size : at+size]
		m.extents = m.one[:]
		if invariants.Enabled {
			for i, c := range a.mem[at : at+charge] {
				if c != freedByte {
					a.Free(m, func() {})
					panic(fmt.Sprintf("host: byte %d of %d was written after it was freed", i, charge))
				}
			}
		}
	default:
		m.extents = m.one[:0]
		var err error
		for _, p := range m.pieces {
			end := p.At + min(p.Len, size-p.Off)
			m.extents = append(m.extents, a.mem[p.At:end:end])
			a.mark(p.At, p.Len)
			a.window.Reach(end)
			if poison && err == nil {
				err = a.space.show(a.pagesOf(p))
			}
		}
		if err != nil {
			a.Free(m, func() {})
			return nil, fmt.Errorf("host: making %d bytes readable again: %w", size, err)
		}
	}
	return m, nil
}

// scatteredLocked takes n bytes of the shortest free ranges, so that long ones stay.
func (a *Arena) scatteredLocked(n int64) (pieces []piece) {
	var lengths []int64
	for _, length := range a.mu.free.All() {
		lengths = append(lengths, length)
	}
	slices.Sort(lengths)
	for _, length := range lengths {
		if length = min(length, n); length == 0 {
			break
		}
		at, _ := a.mu.free.Alloc(length)
		pieces = append(pieces, piece{Len: length, At: at})
		n -= length
	}
	return pieces
}

// fullLocked is the error of a request for which there is no room. Nothing is withheld.
func (a *Arena) fullLocked(size int64) *tier.NoSpaceError {
	full := &tier.NoSpaceError{Requested: size, Available: a.mu.free.FreeBytes() + a.slackLocked()}
	if size <= full.Available {
		full.Largest = max(a.mu.free.Largest(), 1) // what is left in slabs is short, but not nothing
	}
	return full
}

// pagesOf returns the bytes of a piece.
func (a *Arena) pagesOf(p piece) []byte { return a.mem[p.At : p.At+p.Len] }

// relocate gives m, whose pieces do not fit it, one piece with a mapping of its own. The pages of the
// pieces go back to the system, and the pieces are not used until the memory is freed. They count as
// committed in its place.
func (a *Arena) relocate(m *memory) error {
	a.endTouching() // it would bring the pages back
	a.pages <- struct{}{}
	defer func() { <-a.pages }()
	_, pinned := a.status()
	err := errors.New("the arena was pinned meanwhile")
	if !pinned {
		m.own, err = a.reserve(extent.RoundUp(m.size, tier.Page))
	}
	for i := 0; i < len(m.pieces) && err == nil; i++ {
		a.mark(m.pieces[i].At, m.pieces[i].Len)
		err = a.space.discard(a.pagesOf(m.pieces[i]))
	}
	if err != nil {
		a.Free(m, func() {})
		a.mu.Lock()
		defer a.mu.Unlock()
		full := a.fullLocked(m.size)
		full.Cause = err
		return full
	}
	// NewArena has warned of these errors already.
	if a.cfg.Huge {
		_ = m.own.huge()
	}
	if a.cfg.Node >= 0 {
		_ = m.own.bind(a.cfg.Node)
	}
	if a.locksAll() { // the lock moves with the pages: no more than the capacity is locked
		for _, p := range m.pieces {
			_ = a.space.unlock(a.pagesOf(p))
		}
		_ = m.own.lock(m.own.Bytes())
	}
	m.one[0] = m.own.Bytes()[:m.size:m.size]
	m.extents = m.one[:]
	return nil
}

// locksAll reports whether the whole arena is locked. If the limit was less, it is exhausted, and
// memory with a mapping of its own is not locked.
func (a *Arena) locksAll() bool { return a.locked.Load() == a.cfg.Capacity }

// mark notes that the pages of a range may be present from now on.
func (a *Arena) mark(off, n int64) {
	for i := off / step; i <= (off+n-1)/step; i++ {
		if a.state[i].Or(committed)&committed == 0 {
			a.commit.Add(a.stepLen(i))
		}
	}
}

// stepLen is the length of step i: the last may be shorter.
func (a *Arena) stepLen(i int64) int64 { return min(step, a.cfg.Capacity-i*step) }

// Free takes back what Alloc handed out and calls reclaimed before it returns. The memory must not
// be in use any more: not by Go code, not by a device. To free it twice is a panic.
func (a *Arena) Free(mem tier.Memory, reclaimed func()) {
	m, ok := mem.(*memory)
	if !ok || !m.freed.CompareAndSwap(false, true) {
		panic(fmt.Sprintf("host: freeing a %T that is no memory of an arena, or was freed before", mem))
	}
	switch {
	case m.slab != nil && invariants.Enabled:
		at := m.slab.at(m.index)
		scribble(a.mem[at : at+classSize(m.slab.class)])
	case m.own != nil:
		_ = m.own.Release() // only a bug of ours makes it fail
		for i := 0; i < len(m.pieces) && a.locksAll(); i++ {
			_ = a.space.lock(a.pagesOf(m.pieces[i]))
		}
	case poison:
		for _, p := range m.pieces {
			// Refused when the process has too many mappings; then the bytes stay readable, which
			// only hides bugs.
			_ = a.space.hide(a.pagesOf(p))
		}
	}
	a.mu.Lock()
	if s := m.slab; s != nil && a.mu.slabs.put(s, m.index) {
		if poison {
			_ = a.space.hide(a.mem[s.off : s.off+s.length])
		}
		a.mu.free.Free(s.off, s.length)
	}
	for _, p := range m.pieces {
		a.mu.free.Free(p.At, p.Len)
	}
	a.mu.used -= a.Charge(m.size)
	a.mu.refs--
	last, pinners := a.mu.refs == 0, a.mu.pinners
	a.mu.Unlock()
	if last {
		for _, p := range pinners {
			_ = p.Unpin(a.mem) // which closing it has done, if it is closed
		}
		_ = a.space.Release() // only a bug of ours makes it fail
	}
	reclaimed()
}

// Shrink gives the pages of a memory behind its first size bytes back. A place in a slab, and memory
// with a mapping of its own, stay as they are. Nothing may use the memory meanwhile.
func (a *Arena) Shrink(mem tier.Memory, size int64) {
	m := mem.(*memory)
	if size = extent.RoundUp(size, tier.Page); m.slab != nil || m.own != nil || size >= m.size {
		return
	}
	rest := &memory{size: extent.RoundUp(m.size, tier.Page) - size}
	before, pieces, extents := a.Charge(m.size), m.pieces, m.extents
	m.size, m.pieces, m.extents = size, nil, nil
	for i, p := range pieces {
		keep := min(p.Len, max(0, size-p.Off))
		if keep > 0 {
			m.pieces = append(m.pieces, piece{Off: p.Off, Len: keep, At: p.At})
			m.extents = append(m.extents, extents[i][:keep:keep])
		}
		if keep < p.Len {
			rest.pieces = append(rest.pieces, piece{Len: p.Len - keep, At: p.At + keep})
		}
	}
	a.mu.Lock()
	a.mu.refs++                                                // that of rest, which Free ends with its charge
	a.mu.used += a.Charge(size) + a.Charge(rest.size) - before // a place was charged if there was no slab for it
	a.mu.Unlock()
	a.Free(rest, func() {})
}

// Close ends the goroutine that touches pages and gives the range back, or lets
// the Free of the last memory do so. Memory that is handed out stays usable. A
// second Close returns tier.ErrClosed.
func (a *Arena) Close() error {
	a.mu.Lock()
	closed := a.mu.closed
	a.mu.closed = true
	a.mu.Unlock()
	if closed {
		return tier.ErrClosed
	}
	a.endTouching()
	a.pages <- struct{}{} // a Trim in progress ends, and none begins
	defer func() { <-a.pages }()
	a.Free(&memory{}, func() {}) // the arena's own use of the range
	return nil
}

// Map maps size bytes and asks for huge pages, for the memory of a simulated device. Pages come when
// they are touched. The caller must Release the mapping.
func Map(size int64) (Mapping, error) {
	m, err := reserve(size)
	if err == nil {
		_ = m.huge() // refused, it works all the same, and is slower
	}
	return m, err
}

// Mapping is a range of addresses. The slices given to its methods are whole pages of it. Methods may
// be called concurrently. In a build with the race detector the memory is from Go's heap.
type Mapping interface {
	// Bytes is the range; it starts at a multiple of 2 MiB.
	Bytes() []byte
	// huge asks for huge pages in the whole range.
	huge() error
	// bind binds the pages of the whole range, which are not present yet, to a
	// NUMA node.
	bind(node int) error
	// lock keeps the pages of b from being swapped, those present and those to
	// come; it makes none present.
	lock(b []byte) error
	// unlock undoes lock.
	unlock(b []byte) error
	// Touch makes the pages of b present and changes no byte, also while others
	// write them.
	Touch(b []byte) error
	// discard gives the pages of b back; their bytes are undefined afterwards.
	discard(b []byte) error
	// hide makes b unreadable, show readable and writable; only an invariants build calls them.
	hide(b []byte) error
	show(b []byte) error
	// Release unmaps the range, which nothing may use any more.
	Release() error
}

// errHugeOff reports that the kernel has huge pages and grants none.
var errHugeOff = errors.New("switched off")
