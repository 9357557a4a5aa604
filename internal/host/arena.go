// Package host is the host tier: arenas of pinned memory that Go code, the GPU's
// copy engines and direct I/O all reach.
//
//	Arena (a tier.Pool)                          one a NUMA node
//	┌─────────────────────────────────────────┐
//	│ one contiguous range of addresses       │  mapped once, as long as the capacity;
//	│ ├ extent ┤├── free ──┤├ extent ┤├ slab ┤│  pages come when touched: ahead, in steps
//	└────────────┬────────────────────────────┘  of 2 MiB, or at first use
//	             │ Alloc: a tier.HostMemory of one extent, or of several that
//	             ▼ meet at cuts only, so that no Arrow buffer straddles two
//	        tier.Buffer ──▶ Staging: one buffer lent out as chunks of equal length
//
// # Small memory
//
// Requests that are charged less than whole pages, all of them below 8 KiB, get a place in a slab:
// 64-byte aligned, beside others. A place is charged, not its slab, so that what was reserved can
// be drawn. The pages of a partly used slab are free for small memory only; tier.HostStats.Slack is
// how much that is. If slabs block a large request, the arena reports that it is fragmented, as it
// does when large memory blocks it. Whole pages never are in slabs: direct I/O needs their
// alignment, and images are whole pages.
//
// # Ownership
//
// The holder of an extent's memory owns it, from Alloc to Free; the arena does not read it
// meanwhile. Freed extents are handed out again with the bytes that they had. The mapping stays
// until the arena is closed and the last extent is freed. So arrays opened in place stay readable
// while they are leased.
//
// Under the invariants tag freed extents are made unreadable, so that a use after release faults at
// once. Freed places are, as far as they have pages to themselves; the rest is overwritten, and
// checked when it is handed out again. The race detector does not see mapped memory: builds with
// -race, and systems other than Linux, macOS and FreeBSD, take the arena from the Go heap.
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
	"os"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/ahead"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/placement"
	"github.com/spillway-db/spillway/tier"
)

// step is how much memory is touched at a time, and the granule in which Trim
// gives back: one huge page of x86 and of arm64 with 4 KiB pages.
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
	// process allow; Stats says how far that was.
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

// Arena hands out memory from one contiguous range. It implements tier.Pool and
// is safe for concurrent use.
type Arena struct {
	cfg   Config
	space mapping
	mem   []byte // the range

	state   []atomic.Uint32 // a step each: committed, touched
	touched atomic.Int64    // bytes
	commit  atomic.Int64    // bytes
	locked  atomic.Int64    // bytes

	window    *ahead.Window // how far pages are touched
	stopTouch chan struct{} // closed to end the toucher
	touchDone chan struct{} // closed when it has ended
	trimming  chan struct{} // a token: Trim and Close exclude each other

	mu struct {
		lockrank.Mutex[lockrank.Backend]
		free      *extent.Allocator
		slabs     slabs
		used      int64         // bytes handed out, as charged
		tails     int64         // bytes of pages that small memory lies in by itself, beyond what is charged
		withheld  int64         // free bytes that Trim works on, or a slab that comes or goes
		returned  chan struct{} // closed when some of them are put back; nil without waiters
		stopped   bool          // the toucher must end
		closed    bool
		quiet     bool // after closed: no toucher and no Trim is under way
		unmapping bool // or unmapped
		pinners   []tier.Pinner
		warnings  []diag.Warning
	}
}

// The bits of a step's state.
const (
	committed = 1 << iota // a page of it may be present
	touched               // all pages of it were made present ahead of use
)

var _ tier.Pool = (*Arena)(nil)

// NewArena maps an arena. What cannot be had (huge pages, the node, locking)
// becomes a warning; that the range cannot be mapped is an error. The caller must
// Close it.
func NewArena(cfg Config) (*Arena, error) { return newArena(cfg, reserve) }

func newArena(cfg Config, reserve func(size int64) (mapping, error)) (*Arena, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.Capacity -= cfg.Capacity % tier.Page
	space, err := reserve(cfg.Capacity)
	if err != nil {
		return nil, fmt.Errorf("host: reserving an address range of %d bytes: %w (make the host memory smaller, or raise the limits of ulimit -v and vm.overcommit_memory)", cfg.Capacity, err)
	}
	a := &Arena{
		cfg:       cfg,
		space:     space,
		mem:       space.bytes(),
		state:     make([]atomic.Uint32, (cfg.Capacity+step-1)/step),
		window:    ahead.New(cfg.Capacity),
		stopTouch: make(chan struct{}),
		touchDone: make(chan struct{}),
		trimming:  make(chan struct{}, 1),
	}
	a.mu.free = extent.New(cfg.Capacity)
	a.mu.slabs.reuse = !invariants.Enabled // a page of a spare slab could be read
	a.advise()
	if cfg.Touch {
		go func() {
			labels.Touch.Set()
			a.touchAhead()
		}()
	} else {
		close(a.touchDone)
	}
	return a, nil
}

// advise asks for what the configuration asks for, before any page is present.
func (a *Arena) advise() {
	if a.cfg.Huge {
		a.warnOfHuge(a.space.huge())
	}
	if a.cfg.Node >= 0 {
		a.warnOfNode(a.space.bind(a.cfg.Node))
	}
	if a.cfg.Lock {
		a.lock()
	}
}

// lock locks as much of the range as may be: all of it, else in strides that
// become shorter where one is refused.
func (a *Arena) lock() {
	var refused error
	size, locked := a.cfg.Capacity, a.locked.Load()
	for stride := size; stride >= tier.Page && locked < size; stride = stride / 2 / tier.Page * tier.Page {
		for locked < size {
			n := min(stride, size-locked)
			if err := a.space.lock(a.mem[locked : locked+n]); err != nil {
				refused = err
				break
			}
			locked += n
		}
		if errors.Is(refused, errors.ErrUnsupported) {
			break
		}
	}
	a.locked.Store(locked)
	if locked < size {
		a.warnOfLock(refused)
	}
}

// Stats returns the arena's figures. Each is right by itself.
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

// memory is what Alloc returns, except for small ones: whole pages.
type memory struct {
	size    int64
	extents [][]byte
	pieces  []piece // where the extents are in the arena
	freed   atomic.Bool
}

// piece is a part of a memory; At is its offset in the arena. Its length there is
// Len rounded up to a page.
type piece = placement.Piece[int64]

func (m *memory) Size() int64 { return m.size }

func (m *memory) Extents() [][]byte { return m.extents }

// round returns n rounded up to a multiple of 4096.
func round(n int64) int64 { return (n + tier.Page - 1) &^ (tier.Page - 1) }

// Charge returns what size bytes take. Above 8 KiB that is size rounded up to a multiple of 4096.
// Below, it is the next of the slabs' sizes, at most a quarter more. The rest of a slab's pages is
// not charged. It is free for later small memory, and for everything once the slab is empty. So an
// arena whose books have room may be too fragmented for a large request; see Alloc.
func (a *Arena) Charge(size int64) int64 {
	if size > smallMost {
		return round(size)
	}
	if size <= 0 {
		return 0
	}
	return classSize(classOf(size))
}

// source is the free list as package placement sees it; a.mu is held.
type source struct{ free *extent.Allocator }

func (s source) Alloc(n int64) (int64, bool) { return s.free.Alloc(round(n)) }
func (s source) Free(off, n int64)           { s.free.Free(off, round(n)) }
func (s source) Largest() int64              { return s.free.Largest() }

// Alloc hands out size > 0 bytes. What is charged in whole pages begins at a
// multiple of 4096: it is the shortest free range that is long enough, else several
// that meet at cuts. The rest, all of it below 8 KiB, begins at a multiple of 64.
// The bytes are whatever they were. No room is a *tier.NoSpaceError, with Largest
// set if there is enough but not in long enough ranges.
//
// Small memory takes constant time, and is refused only if no page is free and no
// place in a slab is long enough.
func (a *Arena) Alloc(size int64, cuts []int64) (tier.Memory, error) {
	if size <= 0 {
		return nil, fmt.Errorf("host: cannot allocate %d bytes", size)
	}
	if size <= smallMost {
		if charge := a.Charge(size); charge%tier.Page != 0 {
			return a.allocSmall(size, charge, cuts)
		}
	}
	for {
		pieces, wait, err := a.place(size, cuts)
		if wait != nil {
			<-wait // Trim has what is wanted, for some milliseconds
			continue
		}
		if err != nil {
			return nil, err
		}
		return a.handOut(size, pieces)
	}
}

// place takes ranges off the free list. It returns a channel to wait for if Trim,
// or a slab that comes or goes, holds free ranges that may be enough.
func (a *Arena) place(size int64, cuts []int64) (pieces []piece, wait <-chan struct{}, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.closed {
		return nil, nil, tier.ErrClosed
	}
	if pieces, ok := a.pagesLocked(size, cuts); ok {
		return pieces, nil, nil
	}
	if a.mu.withheld > 0 {
		return nil, a.returnedLocked(), nil
	}
	return nil, nil, a.fullLocked(size)
}

// pagesLocked takes whole pages. Spare slabs give way before
// anything is split.
func (a *Arena) pagesLocked(size int64, cuts []int64) ([]piece, bool) {
	free := a.mu.free
	if size > free.Largest() {
		a.mu.slabs.flush(free.Free)
	}
	// size is compared with what is free first: rounding it could overflow.
	if size > free.FreeBytes() {
		return nil, false
	}
	pieces, ok := placement.Place(source{free}, size, cuts, 0)
	if ok {
		charge := a.Charge(size)
		a.mu.used += charge
		a.mu.tails += round(size) - charge
	}
	return pieces, ok
}

// fullLocked is the error of a request for which there is no room. Nothing is
// withheld, and no slab is spare.
func (a *Arena) fullLocked(size int64) error {
	full := &tier.NoSpaceError{Requested: size, Available: a.mu.free.FreeBytes() + a.slackLocked()}
	if size <= full.Available {
		// A place may be as long as the request and yet not begin at a page; that there
		// is something, and that it is too short, is what callers go by.
		inSlab := min(max(place, a.mu.slabs.largest()), max(place, a.Charge(size)-place))
		full.Largest = max(a.mu.free.Largest(), inSlab)
	}
	return full
}

// handOut makes a memory of ranges that were taken.
func (a *Arena) handOut(size int64, pieces []piece) (tier.Memory, error) {
	m := &memory{size: size, extents: make([][]byte, len(pieces)), pieces: pieces}
	for i, p := range pieces {
		end := p.At + p.Len
		m.extents[i] = a.mem[p.At:end:end]
		a.mark(p.At, round(p.Len))
		a.window.Reach(end)
		if !poison {
			continue
		}
		if err := a.space.show(a.mem[p.At : p.At+round(p.Len)]); err != nil {
			a.freePages(m)
			return nil, fmt.Errorf("host: making %d bytes readable again: %w", p.Len, err)
		}
	}
	return m, nil
}

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

// Free takes back what Alloc handed out and calls reclaimed before it returns.
// The memory must not be in use any more: not by Go code, not by a device. To free
// it twice is a panic.
func (a *Arena) Free(mem tier.Memory, reclaimed func()) {
	switch m := mem.(type) {
	case *small:
		mustBeFirst(m.freed.CompareAndSwap(false, true))
		a.freeSmall(m, true)
	case *memory:
		mustBeFirst(m.freed.CompareAndSwap(false, true))
		a.freePages(m)
	default:
		panic(fmt.Sprintf("host: %T is no memory of an arena", mem))
	}
	reclaimed()
}

func mustBeFirst(is bool) {
	if !is {
		panic("host: memory freed twice")
	}
}

// freePages returns the pages of a memory to the free list.
func (a *Arena) freePages(m *memory) {
	if poison {
		for _, p := range m.pieces {
			// Refused when the process has too many mappings; then the
			// bytes stay readable, which only hides bugs.
			_ = a.space.hide(a.mem[p.At : p.At+round(p.Len)])
		}
	}
	if a.putBack(m) {
		a.unmap()
	}
}

// putBack is freePages for the books. It reports whether the caller must unmap the arena.
func (a *Arena) putBack(m *memory) (last bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, p := range m.pieces {
		a.mu.free.Free(p.At, round(p.Len))
	}
	charge := a.Charge(m.size)
	a.mu.used -= charge
	a.mu.tails -= round(m.size) - charge
	return a.lastLocked()
}

// slackLocked is what is not charged and is no free page either. With it the arena adds up:
// capacity = used + slack + free + withheld.
func (a *Arena) slackLocked() int64 { return a.mu.slabs.slack() + a.mu.tails }

// returnedLocked returns what is closed when withheld ranges are put back.
func (a *Arena) returnedLocked() <-chan struct{} {
	if a.mu.returned == nil {
		a.mu.returned = make(chan struct{})
	}
	return a.mu.returned
}

// unwithholdLocked records that n withheld bytes are back. The caller wakes the waiters without the
// lock.
func (a *Arena) unwithholdLocked(n int64) (waiters chan struct{}) {
	a.mu.withheld -= n
	waiters, a.mu.returned = a.mu.returned, nil
	return waiters
}

func wake(waiters chan struct{}) {
	if waiters != nil {
		close(waiters)
	}
}

// lastLocked says, once, that the arena is closed, that nothing is handed out and
// that no goroutine of ours works on the range.
func (a *Arena) lastLocked() bool {
	if !a.mu.quiet || a.mu.used > 0 || a.mu.withheld > 0 || a.mu.unmapping {
		return false
	}
	a.mu.unmapping = true
	return true
}

// unmap gives the range up. There is no caller to return an error to, and only a bug of ours causes
// one.
func (a *Arena) unmap() {
	a.mu.Lock()
	pinners := a.mu.pinners
	a.mu.pinners = nil
	a.mu.Unlock()
	for _, p := range pinners {
		_ = p.Unpin(a.mem) // which closing it has done, if it is closed
	}
	_ = a.space.release()
}

// Close ends the goroutine that touches pages and gives the range back, or lets
// the Free of the last memory do so. Memory that is handed out stays usable. A
// second Close returns tier.ErrClosed.
func (a *Arena) Close() error {
	a.mu.Lock()
	if a.mu.closed {
		a.mu.Unlock()
		return tier.ErrClosed
	}
	a.mu.closed = true
	a.mu.Unlock()
	a.endTouching()
	a.trimming <- struct{}{} // a Trim under way ends, and none begins
	a.mu.Lock()
	a.mu.quiet = true
	last := a.lastLocked()
	a.mu.Unlock()
	<-a.trimming
	if last {
		a.unmap()
	}
	return nil
}

// mapping is an arena's range of addresses. The slices given to its methods are
// whole pages of it. Methods may be called concurrently.
type mapping interface {
	// bytes is the range; it starts at a multiple of step.
	bytes() []byte
	// huge asks for huge pages in the whole range.
	huge() error
	// bind binds the pages of the whole range, which are not present yet, to a
	// NUMA node.
	bind(node int) error
	// lock keeps the pages of b from being swapped, those present and those to
	// come; it makes none present.
	lock(b []byte) error
	// touch makes the pages of b present and changes no byte, also while others
	// write them.
	touch(b []byte) error
	// discard gives the pages of b back; their bytes are undefined afterwards.
	discard(b []byte) error
	// hide makes b unreadable, show readable and writable.
	hide(b []byte) error
	show(b []byte) error
	// release unmaps the range.
	release() error
}

// errHugeOff reports that the kernel has huge pages and grants none.
var errHugeOff = errors.New("switched off")

func (a *Arena) warn(c diag.Cause, format string, args ...any) {
	w := causes.Warn(c, format, args...)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mu.warnings = append(a.mu.warnings, w)
}

// Warnings lists what was asked for and could not be had. Their Space is not set: an
// arena does not know its own.
func (a *Arena) Warnings() []diag.Warning { return a.Stats().Warnings }

func (a *Arena) warnOfHuge(err error) {
	cause := causes.HugePagesMissing
	switch {
	case err == nil:
		return
	case errors.Is(err, errHugeOff):
		cause = causes.HugePagesOff
	case errors.Is(err, errors.ErrUnsupported):
		cause = causes.System
	}
	a.warn(cause, "huge pages were refused (%v): %d bytes are in small ones, and making them present and copying them is slower", err, a.cfg.Capacity)
}

func (a *Arena) warnOfNode(err error) {
	if err == nil {
		return
	}
	cause := causes.MemoryNode
	if mayNotBind(err) {
		cause = causes.MemoryPolicy
	}
	a.warn(cause, "the memory could not be bound to NUMA node %d (%v): it may come from any node, and copies between nodes are slower", a.cfg.Node, err)
}

// mayNotBind reports whether err means that the process is not allowed to bind memory at all.
// Container runtimes' filters of system calls refuse that.
func mayNotBind(err error) bool {
	return errors.Is(err, fs.ErrPermission) || errors.Is(err, errors.ErrUnsupported) // EPERM or ENOSYS
}

// lockLimit says how much memory the process may lock, as far as Linux says so.
func lockLimit() string {
	limits, _ := os.ReadFile("/proc/self/limits")
	_, rest, _ := strings.Cut(string(limits), "Max locked memory")
	switch words := strings.Fields(rest); {
	case len(words) == 0:
		return "not known"
	case words[0] == "unlimited":
		return "none"
	default:
		return words[0] + " bytes"
	}
}

func (a *Arena) warnOfLock(err error) {
	cause, limit := causes.LockLimit, fmt.Sprintf("; the limit is %s", lockLimit())
	if errors.Is(err, errors.ErrUnsupported) {
		cause, limit = causes.System, ""
	}
	a.warn(cause, "%d of %d bytes are locked (%v%s): the rest may be swapped out, and then waits for the swap device", a.locked.Load(), a.cfg.Capacity, err, limit)
}
